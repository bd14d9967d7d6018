"""Record: every call of an authenticated principal is in the call log, whatever its outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import tool
from fumehood.call_options import CallBody
from fumehood.core.call import MAX_TOOL_CHARACTERS
from fumehood.core.call_log import CallRecord
from support.answers import code_of
from support.recording import Bench, bench

pytestmark = [pytest.mark.anyio, pytest.mark.row("D4", "D6")]

PRIVATE = "PRIVATE-VALUE"


async def only(b: Bench, **query: Any) -> CallRecord:
    (record,) = (await b.engine.calls(**query)).items
    return record


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
    assert (record.code, code_of(envelope)) == (code, code)
    assert (record.tool_name, record.tool_version) == name_and_version
    assert (record.ended_by, record.cpu_ms) == (None, None)
    assert record.call_id == envelope.metadata.call_id


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


async def test_call_log_is_pruned_to_configured_count_while_running(home: Path) -> None:
    async with bench(home, calls_kept=100) as b:
        for _ in range(115):
            await b.engine.call("nothing")
        with anyio.fail_after(120):
            while await count(b) > 109:
                await anyio.sleep(0.001)


async def count(b: Bench) -> int:
    first = await b.engine.calls(limit=100)
    rest = await b.engine.calls(limit=100, cursor=first.next_cursor) if first.has_more else None
    return len(first.items) + (len(rest.items) if rest is not None else 0)
