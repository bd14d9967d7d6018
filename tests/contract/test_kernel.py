"""What the kernel promises, whichever parts it has.

These tests also run in copies of the engine from which a part was deleted (`tests/unit/
test_parts.py`). So they use the kernel's own tools, functions, and import nothing of a part.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from fumehood import Config, Engine, Envelope
from fumehood.approvals.model import ApprovalQuery, NewDecision
from fumehood.core.identity import Principal, Scope
from fumehood.parts import parts
from fumehood.sandbox.settings import ContainerSettings
from fumehood.storage.database import open_database
from support.http import SocketClient
from support.kernel_tools import TOOLS
from support.preloaded import PYTHON
from support.wait import wait_until

pytestmark = pytest.mark.anyio

DEADLINE_S = 120
"""Bound on each wait. Only a test that fails takes so long."""

ADMIN = Principal("approver:root", frozenset({Scope.ADMIN}))
ALICE = Principal("approver:alice", frozenset({Scope.APPROVE}))
TESTS = Path(__file__).parents[1]


@asynccontextmanager
async def engine_in(home: Path, **settings: Any) -> AsyncIterator[Engine]:
    """An engine whose state is kept in `home`, and that Alice may approve."""
    database = open_database(home / "state.db")
    try:
        # No container is made ahead.
        config = Config(home=home, container=ContainerSettings(pool_min=0), **settings)
        async with Engine(TOOLS, config=config, database=database) as engine:
            if not engine.approvers.current():
                await engine.approvers.add("alice", [Scope.APPROVE], by=ADMIN, now=engine.now())
            yield engine
    finally:
        database.close()


def code_of(envelope: Envelope) -> str:
    assert envelope.error is not None, envelope.data
    return envelope.error.code


async def asked(engine: Engine, **arguments: Any) -> str:
    """Call the dangerous tool; the id of the approval that it waits for."""
    envelope = await engine.call("note", arguments)
    assert code_of(envelope) == "REQUIRES_HUMAN_APPROVAL"
    assert envelope.error is not None
    assert envelope.error.approval_id is not None
    return envelope.error.approval_id


async def decided(engine: Engine, approval_id: str, decision: str) -> Envelope:
    """Decide as Alice; the answer of the call."""
    choice = NewDecision.model_validate({"decision": decision})
    approval = await engine.approvals.decide(approval_id, choice, ALICE, channel="test")
    with anyio.fail_after(DEADLINE_S):
        seen = 0
        while (answer := await engine.approvals.answer_of(approval.call_id, engine.owner)) is None:
            seen = await engine.approvals.next_change(seen, within_s=1)
    return answer


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """An engine for all tests that need none of their own, because each start takes long."""
    async with engine_in(tmp_path_factory.mktemp("engine")) as running:
        yield running


async def test_call_answers_in_the_envelope(engine: Engine) -> None:
    envelope = await engine.call("greet", {"name": "Ada"}, trace_id="trace_1")
    assert (envelope.success, envelope.status, envelope.error) == (True, "success", None)
    assert envelope.data == {"greeting": "Hello, Ada!"}
    assert envelope.metadata.tool_name == "greet"
    assert envelope.metadata.trace_id == "trace_1"
    assert envelope.metadata.call_id is not None


async def test_unknown_tool_or_argument_is_refused(engine: Engine) -> None:
    assert code_of(await engine.call("great", {"name": "Ada"})) == "TOOL_NOT_FOUND"
    assert code_of(await engine.call("greet", {"nick": "Ada"})) == "INVALID_PARAMS"
    assert code_of(await engine.call("greet", {"name": 21 * "a"})) == "INVALID_PARAMS"
    assert (await engine.call("greet", {"name": 20 * "a"})).success  # twin


OF_PARTS: dict[str, dict[str, Any]] = {
    "cache": {"enable_cache": False},
    "receipts": {"receipt": True, "replay": {"exchanges": []}},
    "streams": {"enable_streaming": False},
}
"""Options by the part that adds them."""


@pytest.mark.parametrize(
    ("part", "option"), [(part, option) for part, options in OF_PARTS.items() for option in options]
)
async def test_option_of_an_absent_part_is_refused_before_anybody_is_asked(
    engine: Engine, part: str, option: str
) -> None:
    given = {option: OF_PARTS[part][option]}
    before = (await engine.approvals.list(ApprovalQuery())).items
    for more in ({}, {"dry_run": True}):
        for tool in ("note", "greet"):
            refused = await engine.call(tool, {}, **{**given, **more})
            message = refused.error.message if refused.error is not None else ""
            if part in [one.name for one in parts()]:
                assert "The call is wrong" not in message
            else:
                assert code_of(refused) == "INVALID_PARAMS"
                assert f"The call is wrong: options.{option}: " in message
    assert (await engine.approvals.list(ApprovalQuery())).items == before


async def test_dangerous_call_runs_once_and_only_after_a_yes(engine: Engine, home: Path) -> None:
    file = home / "notes"
    approval_id = await asked(engine, text="a", file=str(file))
    assert not file.exists()
    assert (await decided(engine, approval_id, "approve")).data == {"noted": "a"}
    assert file.read_text() == "a\n"


async def test_call_that_was_denied_never_runs(engine: Engine, home: Path) -> None:
    file = home / "notes"
    approval_id = await asked(engine, text="a", file=str(file))
    assert code_of(await decided(engine, approval_id, "deny")) == "APPROVAL_DENIED"
    assert not file.exists()


async def test_rule_denies_what_it_names_and_nothing_else(home: Path) -> None:
    policy = home / "policy.toml"
    policy.write_text(
        '[[rules]]\nid = "no-bob"\ndecision = "deny"\ntools = ["greet"]\nreason = "Not him."\n'
        '[[rules.when]]\nargument = "/name"\nglob = "Bob*"\n'
    )
    policy.chmod(0o600)
    async with engine_in(home, policy_file=policy) as engine:
        refused = await engine.call("greet", {"name": "Bobby"})
        assert code_of(refused) == "PERMISSION_DENIED"
        assert "Not him." in refused.model_dump_json()
        assert (await engine.call("greet", {"name": "Ada"})).success  # twin


async def test_time_limit_kills_the_process_of_a_function(engine: Engine) -> None:
    pid = (await engine.call("who")).data["pid"]
    assert (await engine.call("who")).data["pid"] == pid  # twin
    envelope = await engine.call("block", timeout_seconds=1)
    assert code_of(envelope) == "TIMEOUT"
    await anyio.to_thread.run_sync(wait_until, lambda: not psutil.pid_exists(pid))
    assert (await engine.call("who")).data["pid"] != pid


async def test_every_call_has_a_record_with_its_ending(engine: Engine) -> None:
    made = [await engine.call("greet", {"name": name}) for name in ("Ada", 21 * "a")]
    page = await engine.calls()
    codes = {record.call_id: record.code for record in page.items}
    assert [codes[envelope.metadata.call_id] for envelope in made] == ["OK", "INVALID_PARAMS"]


async def test_restart_keeps_records_keys_and_waiting_approvals(home: Path) -> None:
    file = home / "notes"
    async with engine_in(home) as engine:
        first = await engine.call("greet", {"name": "Ada"}, idempotency_key="k")
        approval_id = await asked(engine, text="a", file=str(file))
    async with engine_in(home) as engine:
        again = await engine.call("greet", {"name": "Ada"}, idempotency_key="k")
        assert (again.data, again.metadata.call_id) == (first.data, first.metadata.call_id)
        waiting = (await engine.approvals.list(ApprovalQuery())).items
        assert [approval.id for approval in waiting] == [approval_id]
        assert (await decided(engine, approval_id, "approve")).success
    assert file.read_text() == "a\n"


@pytest.mark.needs("landlock")
async def test_jailed_function_reads_no_file_of_the_host(engine: Engine, home: Path) -> None:
    canary = home / "canary"
    canary.write_text("canary-8b1f")
    refused = await engine.call("read", {"file": str(canary)})
    assert not refused.success
    assert "canary-8b1f" not in refused.model_dump_json()
    twin = await engine.call("double", {"number": 21})
    assert twin.data == {"doubled": 42}, str(twin.error and twin.error.message)
    assert canary.read_text() == "canary-8b1f"


def test_daemon_answers_health_and_a_call_on_its_socket(home: Path) -> None:
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TESTS))))
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": path, "FUMEHOOD_HOME": str(home),
        "FUMEHOOD_CONTAINER__POOL_MIN": "0",
    }  # fmt: skip
    log = home / "log"
    with log.open("wb") as written:
        daemon = subprocess.Popen(
            [PYTHON, "-m", "support.kernel_tools"], env=environment, stdin=subprocess.DEVNULL,
            stdout=written, stderr=written,
        )  # fmt: skip
    try:
        socket = home / "engine.sock"
        wait_until(lambda: daemon.poll() is not None or SocketClient.answers(socket))
        assert daemon.poll() is None, log.read_text()
        client = SocketClient(socket)
        assert client.get("/v1/health").status == 200
        assert client.call("greet", {"name": "Ada"}).body["data"] == {"greeting": "Hello, Ada!"}
        client.close()
        daemon.terminate()
        assert daemon.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        daemon.kill()
        daemon.wait(DEADLINE_S)
