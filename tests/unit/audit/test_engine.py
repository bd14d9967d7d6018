"""The engine's audit chain: when it is anchored, and what a new key leaves behind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.audit.service import own_anchors
from fumehood.audit.settings import AuditSettings
from fumehood.audit.verify import Anchor
from fumehood.core.identity import Principal, Scope
from fumehood.storage.database import open_database
from fumehood.storage.errors import ReadFailed, WriteFailed
from fumehood.testing import FakeWall
from support.audit import look, rows_of, run_sql
from support.recording import RecordingLog

pytestmark = [pytest.mark.anyio, pytest.mark.row("A7")]

ADMIN = Principal("approver:olga", frozenset({Scope.ADMIN}))
DEADLINE_S = 20


@asynccontextmanager
async def engine_at(home: Path, **settings: Any) -> AsyncIterator[tuple[Engine, RecordingLog]]:
    log = RecordingLog()
    database = open_database(home / "state.db")
    audit = AuditSettings().model_copy(update=settings)  # also less than an operator may set
    config = Config(home=home).model_copy(update={"audit": audit})
    engine = Engine(config=config, interpreter=FakeWall(), database=database, log=log)
    try:
        async with engine:
            yield engine, log
    finally:
        database.close()


def kinds(home: Path) -> list[str]:
    found = [json.loads(row.body) for row in rows_of(home)]
    return [row["kind"] + (f":{row['why']}" if "why" in row else "") for row in found]


async def until(log: RecordingLog, count: int) -> None:
    """So many anchors were told."""
    with anyio.fail_after(DEADLINE_S):
        while len(log.named("audit.anchor")) < count:
            await anyio.sleep(0.01)


async def test_audit_chain_is_anchored_at_start_and_stop(home: Path) -> None:
    async with engine_at(home) as (engine, log):
        await engine.call("calculator", {"expression": "1"})
    assert kinds(home) == ["audit.anchored:start", "call.ended", "audit.anchored:stop"]
    anchors = own_anchors(home)
    assert [anchor.seq for anchor in anchors] == [1, 3]
    assert [row.mac for row in rows_of(home)] == [
        anchors[0].mac, rows_of(home)[1].mac, anchors[1].mac,
    ]  # fmt: skip
    told = log.named("audit.anchor")
    assert [(event["seq"], event["mac"]) for event in told] == [
        (anchor.seq, anchor.mac.hex()) for anchor in anchors
    ]
    verdict = look(home)
    assert (verdict.is_intact, verdict.anchored_to) == (True, verdict.last_seq)


async def test_failed_anchor_is_written_later(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_at(home, anchor_seconds=0.05) as (engine, log):
        write, failures = engine.database.write, [1]

        async def failing_once(job: Any) -> Any:
            def then(connection: Any) -> Any:
                result = job(connection)
                if failures and isinstance(result, Anchor):
                    failures.pop()
                    raise WriteFailed("full")
                return result

            return await write(then)

        monkeypatch.setattr(engine.database, "write", failing_once)
        await engine.call("calculator", {"expression": "1"})
        await until(log, 2)
        assert len(log.named("audit.anchor_failed")) == 1
    assert kinds(home)[:3] == ["audit.anchored:start", "call.ended", "audit.anchored:time"]


@pytest.mark.parametrize(
    ("settings", "why"), [({"anchor_seconds": 0.05}, "time"), ({"anchor_rows": 1}, "rows")]
)
async def test_unchanged_audit_chain_is_not_anchored_again(
    home: Path, settings: dict[str, float], why: str
) -> None:
    """Not even by the anchor's own row, of which there would be no end."""
    async with engine_at(home, **settings) as (engine, log):
        for number in (1, 2):
            await engine.call("calculator", {"expression": "1"})
            await until(log, number + 1)
    assert kinds(home) == [
        "audit.anchored:start", *("call.ended", f"audit.anchored:{why}") * 2, "audit.anchored:stop",
    ]  # fmt: skip


async def test_audit_chain_holds_no_arguments_or_results(home: Path) -> None:
    async with engine_at(home) as (engine, _):
        await engine.call("calculator", {"expression": "31337 * 2"})
        await engine.call("calculator", {"expression": "31337 +"})
        await engine.call("nothing", {"secret": "31337"})
        await engine.call("calculator", {"expression": "31337"}, dry_run=True)
    bodies = b"".join(row.body for row in rows_of(home))
    assert b"31337" not in bodies
    assert b"62674" not in bodies
    assert kinds(home).count("call.ended") == 3


async def test_key_rotation_keeps_the_old_key_and_names_its_author(home: Path) -> None:
    async with engine_at(home) as (engine, _):
        before = (home / "audit.key").read_text()
        rotation = await engine.audit.rotate(ADMIN)
        assert rotation.key_id != rotation.previous_key_id
        assert (home / f"audit-{rotation.previous_key_id}.key").read_text() == before
        assert (home / "audit.key").read_text() != before
        verdict = await engine.audit.verify()
        assert (verdict.intact, verdict.anchored_to) == (True, verdict.last_seq)
    told = next(row for row in rows_of(home) if row.seq == rotation.seq)
    body = json.loads(told.body)
    assert (told.key_id, body["next_key_id"], body["by"]) == (
        rotation.previous_key_id, rotation.key_id, "approver:olga",
    )  # fmt: skip
    assert look(home).is_intact


async def test_tampered_chain_is_reported_at_start(home: Path) -> None:
    async with engine_at(home) as (engine, log):
        await engine.call("calculator", {"expression": "1"})
    assert log.named("audit.broken") == []
    async with engine_at(home) as (_, log):  # the twin: nobody has touched it
        assert log.named("audit.broken") == []
    last = rows_of(home)[-1].seq
    other = "(SELECT mac FROM audit ORDER BY seq LIMIT 1)"
    for change in (
        f"DELETE FROM audit WHERE seq = {last}",
        f"UPDATE audit SET mac = {other} WHERE seq = (SELECT max(seq) FROM audit)",
    ):
        run_sql(home, change)
        async with engine_at(home) as (engine, log):
            (told,) = log.named("audit.broken")
            assert "audit verify" in told["reason"]
            assert (await engine.call("calculator", {"expression": "1"})).success
    assert not look(home).is_intact


async def test_unusable_anchor_file_stops_nothing(home: Path) -> None:
    (home / "audit-anchors.jsonl").mkdir()
    async with engine_at(home) as (engine, log):
        assert (await engine.call("calculator", {"expression": "1"})).success
    assert log.named("audit.anchor_unreadable")
    assert len(log.named("audit.anchor_failed")) == 2
    assert len(log.named("audit.anchor")) == 2  # the log has them all the same


@pytest.mark.parametrize("spoilt", ["audit.key", "audit-anchors.jsonl"])
async def test_unreadable_chain_is_reported_without_a_path(home: Path, spoilt: str) -> None:
    async with engine_at(home) as (engine, _):
        assert (await engine.audit.verify()).intact
        (home / spoilt).unlink()
        (home / spoilt).mkdir()
        with pytest.raises(ReadFailed) as refused:
            await engine.audit.verify()
        assert str(home) not in refused.value.message
        (home / spoilt).rmdir()
