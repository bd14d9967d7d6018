"""Record: every call of an authenticated principal is in the call log, whatever its outcome."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Envelope, tool
from fumehood.core.call import MAX_TOOL_CHARACTERS, CallBody, CallOptions
from fumehood.core.call_log import CallQuery, CallRecord
from fumehood.core.errors import EndedBy, InvalidParams, ResourceNotFound
from fumehood.core.identity import Principal, Scope
from fumehood.sandbox.wall import RunEnding
from fumehood.testing import FakeWall, SeenRun, always_four
from support.recording import Bench, bench

pytestmark = [pytest.mark.anyio, pytest.mark.row("D4", "D6")]

PRIVATE = "PRIVATE-VALUE"
OTHER = Principal("uid:4242", frozenset({Scope.CALL}))


async def only(b: Bench, **query: Any) -> CallRecord:
    (record,) = (await b.engine.calls(**query)).items
    return record


async def test_call_record_matches_the_envelope(home: Path) -> None:
    def answer(run: SeenRun) -> RunEnding:
        return replace(always_four(run), cpu_ms=0.5)

    async with bench(home, wall=FakeWall(answer)) as b:
        envelope = await b.engine.call("calculator", {"expression": "2+2"}, trace_id="mine")
        record = await only(b)
    metadata = envelope.metadata
    assert record.model_dump() == {
        "call_id": metadata.call_id, "timestamp": metadata.timestamp,
        "principal_id": b.engine.owner.id, "agent_id": None, "session_id": None,
        "trace_id": "mine", "tool_name": "calculator", "tool_version": "1.0.0", "code": "OK",
        "ended_by": "ok", "execution_time_ms": metadata.execution_time_ms, "cpu_ms": 0.5,
        "cost": "0.000000", "currency": "USD",
        "input_tokens": metadata.usage.input_tokens,
        "output_tokens": metadata.usage.output_tokens, "tokens_used": 0, "cache_hit": False,
    }  # fmt: skip
    assert record.input_tokens > 0


REFUSED = {
    "unknown tool": (("nothing", {}), "TOOL_NOT_FOUND", ("nothing", None)),
    "unknown version": (("calculator@9.9.9", {}), "TOOL_NOT_FOUND", ("calculator", "9.9.9")),
    "wrong arguments": (("calculator", {}), "INVALID_PARAMS", ("calculator", "1.0.0")),
    "a name that is long": (("n" * 500, {}), "TOOL_NOT_FOUND", ("n" * MAX_TOOL_CHARACTERS, None)),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_call_is_recorded(home: Path, case: str) -> None:
    call, code, name_and_version = REFUSED[case]
    async with bench(home) as b:
        envelope = await b.engine.call(*call)
        record = await only(b)
    assert envelope.error is not None
    assert (record.code, envelope.error.code) == (code, code)
    assert (record.tool_name, record.tool_version) == name_and_version
    assert (record.ended_by, record.cpu_ms) == (None, None)
    assert record.call_id == envelope.metadata.call_id


async def test_failed_run_is_recorded_with_its_ending(home: Path) -> None:
    wall = FakeWall(answer=lambda run: RunEnding(EndedBy.WALL_TIME, "call", cpu_ms=7.0))
    async with bench(home, wall=wall) as b:
        await b.engine.call("calculator", {"expression": "1"})
        record = await only(b)
    assert (record.code, record.ended_by, record.cpu_ms) == ("TIMEOUT", "wall_time", 7.0)


async def test_cancelled_call_is_recorded(home: Path) -> None:
    started = anyio.Event()

    @tool(sandboxed=False, description="Wait.")
    async def wait_long() -> None:
        started.set()
        await anyio.sleep_forever()

    async with bench(home, tools=[wait_long]) as b:
        async with anyio.create_task_group() as group:
            group.start_soon(b.engine.call, "wait_long")
            await started.wait()
            group.cancel_scope.cancel()
        record = await only(b)
    assert (record.tool_name, record.code) == ("wait_long", "CANCELLED")


async def test_internal_error_is_recorded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise LookupError(PRIVATE)

    monkeypatch.setattr("fumehood.pipeline.run.execute", fail)
    async with bench(home) as b:
        await b.engine.call("calculator", {"expression": "1"})
        record = await only(b)
    assert record.code == "INTERNAL_ERROR"


async def test_dry_run_and_unauthenticated_call_are_not_recorded(home: Path) -> None:
    async with bench(home) as b:
        await b.engine.call("calculator", {"expression": "1"}, dry_run=True)
        await b.engine.call("nothing", {}, dry_run=True)
        await b.engine.run("calculator", CallBody(arguments={"expression": "1"}), None)
        assert (await b.engine.calls()).items == ()
        await b.engine.call("calculator", {"expression": "1"})
        assert len((await b.engine.calls()).items) == 1


async def test_call_record_contains_no_argument_or_result_values(home: Path) -> None:
    @tool(sandboxed=False, description="Echo.")
    async def echo(text: str) -> str:
        return text

    async with bench(home, tools=[echo]) as b:
        await b.engine.call("echo", {"text": PRIVATE})
        await b.engine.call("echo", {"text": PRIVATE, PRIVATE: 1})
        await b.engine.call("calculator", {"expression": PRIVATE})
        page = await b.engine.calls()
    assert len(page.items) == 3
    assert PRIVATE not in page.model_dump_json()


async def test_requested_agent_and_session_are_recorded(home: Path) -> None:
    body = CallBody(
        arguments={"expression": "1"}, options=CallOptions(agent_id="a", session_id="s")
    )
    async with bench(home) as b:
        await b.engine.run("calculator", body, b.engine.owner)
        record = await only(b, agent="a")
    assert (record.agent_id, record.session_id) == ("a", "s")


async def test_principal_finds_only_its_own_calls(home: Path) -> None:
    async with bench(home) as b:
        mine = await b.engine.call("calculator", {"expression": "1"})
        theirs: Envelope = await b.engine.run(
            "calculator", CallBody(arguments={"expression": "1"}), OTHER
        )
        assert mine.metadata.call_id is not None
        assert theirs.metadata.call_id is not None
        assert (await only(b)).call_id == mine.metadata.call_id
        (seen,) = (await b.engine.call_log.page(OTHER.id, CallQuery())).items
        assert seen.call_id == theirs.metadata.call_id
        assert await b.engine.call_record(mine.metadata.call_id)
        with pytest.raises(ResourceNotFound) as foreign:
            await b.engine.call_record(theirs.metadata.call_id)
        with pytest.raises(ResourceNotFound) as missing:
            await b.engine.call_record("call_" + "0" * 24)
        assert foreign.value.message == missing.value.message
        with pytest.raises(ResourceNotFound):
            await b.engine.calls(cursor=theirs.metadata.call_id)


async def test_invalid_call_query_is_refused_by_field(home: Path) -> None:
    async with bench(home) as b:
        with pytest.raises(InvalidParams) as caught:
            await b.engine.calls(since="yesterday", limit=0)
        with pytest.raises(TypeError, match="principal"):
            await b.engine.calls(principal="uid:0")
    assert sorted(caught.value.fields) == ["limit", "since"]


async def test_call_log_is_pruned_to_configured_count_while_running(home: Path) -> None:
    async with bench(home, calls_kept=100) as b:
        for _ in range(115):
            await b.engine.call("nothing")
        with anyio.fail_after(20):
            while await count(b) > 109:
                await anyio.sleep(0.001)


async def count(b: Bench) -> int:
    first = await b.engine.calls(limit=100)
    rest = await b.engine.calls(limit=100, cursor=first.next_cursor) if first.has_more else None
    return len(first.items) + (len(rest.items) if rest is not None else 0)
