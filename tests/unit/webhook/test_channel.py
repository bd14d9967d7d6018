"""Webhook deliveries: signing, retries, retention and isolation of failures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest
from sqlalchemy import select

from fumehood.approvals.model import Approval
from fumehood.approvals.store import ApprovalTable
from fumehood.config import Config, ConfigError
from fumehood.core.errors import Unauthorized
from fumehood.engine_part import Kernel
from fumehood.observe.log import quiet_logger
from fumehood.observe.subscriber import Subscribers
from fumehood.storage.database import Database, open_database
from fumehood.storage.schema import DELIVERIES
from fumehood.testing import ManualClock
from fumehood.webhook import channel as deliveries
from fumehood.webhook.channel import (
    AT_ONCE,
    HEADER,
    Callbacks,
    WebhookChannel,
    read_secret,
)
from fumehood.webhook.in_engine import Webhook
from fumehood.webhook.settings import WebhookSettings
from support.approvals import NOW, approval

pytestmark = pytest.mark.row("A6")

SECRET = b"s" * 40


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def database() -> Iterator[Database]:
    opened = open_database(None)
    yield opened
    opened.close()


class Receiver:
    """A receiver that returns scripted answers and repeats the last one."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = list(answers) or [200]
        self.got: list[tuple[bytes, dict[str, str]]] = []

    async def __call__(self, body: bytes, headers: dict[str, str]) -> int:
        self.got.append((body, headers))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body, _ in self.got]


def settings(secret_file: Path, **config: Any) -> WebhookSettings:
    return WebhookSettings(url="https://example.org/hook", secret_file=secret_file, **config)


def make_channel(database: Database, secret_file: Path, **config: Any) -> WebhookChannel:
    chosen = settings(secret_file, **config)
    return WebhookChannel(chosen, database, lambda: NOW, quiet_logger())


async def show(approval_id: str) -> Approval:
    sends = {"method": "POST", "url": "https://a.example/"}
    return approval(int(approval_id.removeprefix("apr_"), 16), sends=sends)


def make(database: Database, secret_file: Path, **config: Any) -> WebhookChannel:
    channel = make_channel(database, secret_file, **config)
    channel.show = show
    return channel


def owe(database: Database, number: int = 1, event: str = "approval.created") -> None:
    database.write_now(
        partial(deliveries.owe, approval_id=approval(number).id, event=event, at=NOW)
    )


def owed(database: Database) -> list[deliveries.Owed]:
    return database.read_now(partial(deliveries.list_owed, after=0, limit=100))


@pytest.mark.anyio
async def test_message_is_signed_and_omits_the_binding(
    database: Database, secret_file: Path
) -> None:
    owe(database)
    receiver = Receiver()
    assert await make(database, secret_file).send_owed(receiver)
    ((body, headers),) = receiver.got
    (message,) = receiver.messages
    assert message["event"] == "approval.created"
    assert message["delivery"] == 1
    assert message["approval"]["id"] == approval().id
    assert "binding" not in message["approval"]
    assert message["approval"]["sends"] == {"method": "POST", "url": "https://a.example/"}
    Callbacks(SECRET, window_s=300).check([headers[HEADER]], body, NOW)
    with pytest.raises(Unauthorized):
        Callbacks(SECRET, window_s=300).check([headers[HEADER]], body + b" ", NOW)
    assert owed(database) == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer", [500, 404, 302, 199, httpx2.ConnectError("no"), TimeoutError(), OSError("no")]
)
async def test_undelivered_message_is_retried(
    database: Database, secret_file: Path, answer: Any
) -> None:
    owe(database)
    webhook = make(database, secret_file)
    assert not await webhook.send_owed(Receiver(answer))
    (left,) = owed(database)
    assert left.attempts == 1
    assert await webhook.send_owed(Receiver(204))
    assert owed(database) == []


@pytest.mark.anyio
async def test_permanently_refused_message_does_not_block_others(
    database: Database, secret_file: Path
) -> None:
    for number in (1, 2, 3):
        owe(database, number)

    got: list[str] = []

    async def refuses_one(body: bytes, headers: dict[str, str]) -> int:
        message = json.loads(body)
        if message["approval"]["id"] == approval(1).id:
            return 500
        got.append(message["approval"]["id"])
        return 200

    webhook = make(database, secret_file, attempts=3)
    assert [await webhook.send_owed(refuses_one) for _ in range(3)] == [False, False, True]
    assert got == [approval(2).id, approval(3).id]
    assert owed(database) == []


@pytest.mark.anyio
async def test_newer_anchor_replaces_an_undelivered_one_and_survives_a_late_delivery(
    database: Database, secret_file: Path
) -> None:
    def owe_anchor(seq: int) -> None:
        database.write_now(partial(deliveries.owe_anchor, document={"seq": seq}, at=NOW))

    got: list[tuple[int, int]] = []

    async def slow(body: bytes, headers: dict[str, str]) -> int:
        message = json.loads(body)
        got.append((message["delivery"], message["seq"]))
        if message["seq"] == 7:
            owe_anchor(8)  # while the earlier one is on its way
        return 200

    owe_anchor(6)
    owe_anchor(7)  # which replaces it
    webhook = make(database, secret_file)
    assert await webhook.send_owed(slow)
    assert await webhook.send_owed(slow)
    assert [seq for _, seq in got] == [7, 8]
    assert len({delivery for delivery, _ in got}) == 2
    assert owed(database) == []


@pytest.mark.anyio
async def test_failing_receiver_gets_a_bounded_number_of_attempts_per_round(
    database: Database, secret_file: Path
) -> None:
    for number in range(1, 16):
        owe(database, number)
    receiver = Receiver(503)
    assert not await make(database, secret_file).send_owed(receiver)
    assert len(receiver.got) == AT_ONCE
    assert [one.attempts for one in owed(database)[AT_ONCE:]] == [0] * (15 - AT_ONCE)
    again = Receiver(200)
    assert await make(database, secret_file).send_owed(again)
    assert len(again.got) == 15


@pytest.mark.anyio
async def test_hanging_receiver_times_out(database: Database, secret_file: Path) -> None:
    owe(database)

    async def silent(body: bytes, headers: dict[str, str]) -> int:
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.fail_after(120):
        assert not await make(database, secret_file, timeout_seconds=0.05).send_owed(silent)


@pytest.mark.anyio
async def test_sender_survives_internal_error_and_refused_delivery(
    database: Database, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fumehood.webhook.channel.FIRST_PAUSE_S", 0.001)
    broken = iter([True, False])

    async def show_once_broken(approval_id: str) -> Approval:
        if next(broken, False):
            raise RuntimeError("a bug")
        return await show(approval_id)

    webhook = make_channel(database, secret_file)
    receiver = Receiver(500, 200)
    owe(database)
    with anyio.fail_after(120):
        async with webhook.running(show_once_broken, send=receiver):
            while owed(database):
                await anyio.lowlevel.checkpoint()
    assert len(receiver.got) == 2


@pytest.mark.anyio
async def test_delivered_messages_are_pruned_and_undelivered_ones_kept(
    database: Database, secret_file: Path
) -> None:
    owe(database, 1)
    webhook = make(database, secret_file)
    await webhook.send_owed(Receiver(200))
    owe(database, 2)
    kernel = Kernel(Config(), database, ManualClock(NOW), quiet_logger())
    table = ApprovalTable(database, subscribers=Subscribers([Webhook(kernel)], quiet_logger()))
    await table.prune(NOW + timedelta(days=91))
    kept = database.read_now(lambda c: list(c.execute(select(DELIVERIES.c.seq)).scalars()))
    assert kept == [one.seq for one in owed(database)] == [2]


def test_callbacks_are_verified_only_if_webhook_may_decide(
    database: Database, secret_file: Path
) -> None:
    assert make_channel(database, secret_file).callbacks is None
    assert make_channel(database, secret_file, may_decide=True).callbacks is not None


def _short(path: Path) -> None:
    path.write_bytes(b"short\n")


def _open_to_the_group(path: Path) -> None:
    path.chmod(0o640)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("spoil", [_short, _open_to_the_group, _link, _pipe, _gone])
def test_untrustworthy_secret_file_is_refused(secret_file: Path, spoil: Any) -> None:
    spoil(secret_file)
    with pytest.raises(ConfigError, match=r"webhook\.secret_file") as refused:
        read_secret(secret_file)
    assert "short" not in str(refused.value).replace("too short", "")
    assert str(secret_file) not in str(refused.value)


def test_relative_secret_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="absolute"):
        read_secret(Path("secret"))
