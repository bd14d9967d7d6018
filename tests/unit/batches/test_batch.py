"""Batches: one answer per call in order, with failures isolated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fumehood import Envelope, tool
from fumehood.batches import batch as module
from fumehood.batches.batch import parse_batch
from fumehood.core.errors import InvalidParams
from fumehood.registry.declare import FunctionTool
from support.answers import code_of
from support.recording import bench

pytestmark = pytest.mark.anyio


class Gate:
    """A host tool whose calls wait until released; counts concurrent runs."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.running = self.most = 0
        self.reached = anyio.Event()
        self.opened = anyio.Event()
        self.full = 1

    def tool(self) -> FunctionTool:
        @tool(name="wait", sandboxed=False, description="Wait.")
        async def wait(number: int) -> int:
            self.begun.append(number)
            self.running += 1
            self.most = max(self.most, self.running)
            if self.running == self.full:
                self.reached.set()
            try:
                await self.opened.wait()
            finally:
                self.running -= 1
            return number

        return wait


@tool(sandboxed=False, description="Give it back, after some turns of the loop.")
async def echo(number: int, turns: int = 0) -> int:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    if number < 0:
        raise ValueError("a fault of the tool")
    return number


def called(name: str, **arguments: Any) -> dict[str, Any]:
    """A member of a batch."""
    return {"tool": name, "arguments": arguments}


def codes(envelopes: list[Envelope]) -> list[str]:
    return [code_of(found) for found in envelopes]


def waits(count: int) -> list[dict[str, Any]]:
    return [called("wait", number=number) for number in range(count)]


@pytest.mark.parametrize(
    ("options", "most"),
    [({"max_parallel": 3}, 3), ({}, 8), ({"parallel_tool_calls": False}, 1)],
)
async def test_concurrent_batch_calls_are_limited_to_max_parallel(
    home: Path, options: dict[str, Any], most: int
) -> None:
    gate = Gate()
    gate.full = most
    async with bench(home, [gate.tool()]) as b:
        task = asyncio.create_task(b.engine.batch(waits(20), **options))
        with anyio.fail_after(120):
            await gate.reached.wait()
            await anyio.wait_all_tasks_blocked()
            assert (gate.running, gate.begun) == (most, list(range(most)))
            gate.opened.set()
            assert codes(await task) == ["OK"] * 20
    assert gate.most == most
    assert gate.begun == list(range(20))


async def test_cancelled_batch_returns_an_answer_for_every_call(home: Path) -> None:
    gate = Gate()
    gate.full = 2
    async with bench(home, [gate.tool()]) as b:
        body = parse_batch({"calls": waits(4), "options": {"max_parallel": 2}})
        batch = b.engine.open_batch(body, b.engine.owner)
        task = asyncio.create_task(batch.run())
        with anyio.fail_after(120):
            await gate.reached.wait()
            batch.cancel()
            batch.cancel()
            answers = await task
    assert codes(answers) == ["CANCELLED"] * 4
    assert gate.begun == [0, 1]
    assert ["not begun" in str(answer.error) for answer in answers] == [False, False, True, True]


HOSTILE: list[Any] = [
    None, 7, "calculator", [], {}, {"tool": 7}, {"tool": "echo" * 100}, {"tool": "echo", "more": 1},
    {"tool": "echo", "arguments": []}, {"tool": "echo", "options": {"timeout_seconds": "1"}},
    {"tool": "echo", "arguments": {"number": {1, 2}}},
    {"tool": "echo", "arguments": {"number": float("nan")}},
    {"tool": "echo", "arguments": {str(number): 1 for number in range(1001)}},
]  # fmt: skip


async def test_malformed_batch_member_gets_its_own_error(home: Path) -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    loop: dict[str, Any] = {"tool": "echo"}
    loop["arguments"] = loop
    hostile = [*HOSTILE, called("echo", number=deep), loop]
    calls = [call for member in hostile for call in (member, called("echo", number=1))]
    async with bench(home, [echo]) as b:
        answers = await b.engine.batch(calls)
        logged = await b.engine.calls(limit=100)
    assert codes(answers) == ["INVALID_PARAMS", "OK"] * len(hostile)
    assert len(logged.items) == len(hostile)  # what is malformed is no call


@pytest.mark.parametrize(
    "document",
    [
        None, [], {}, {"calls": []}, {"calls": [{}] * 1001}, {"calls": {}}, {"calls": "ab"},
        {"calls": [{}], "more": 1}, {"calls": [{}], "options": None},
        {"calls": [{}], "options": {"max_parallel": 0}},
        {"calls": [{}], "options": {"max_parallel": 33}},
        {"calls": [{}], "options": {"max_parallel": True}},
        {"calls": [{}], "options": {"timeout_seconds": 0}},
        {"calls": [{}], "options": {"parallel_tool_calls": "no"}},
        {"calls": [{}], "options": {"dry_run": True}},
    ],
)  # fmt: skip
def test_malformed_batch_document_is_refused(document: Any) -> None:
    with pytest.raises(InvalidParams):
        parse_batch(document)
    assert len(parse_batch({"calls": [{}] * 1000, "options": {"max_parallel": 32}}).calls) == 1000


async def test_batch_over_answer_size_limit_starts_no_further_call(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(home, [echo]) as b:
        size = len(module.encode_envelope(await b.engine.call("echo", {"number": 1})))
        monkeypatch.setattr(module, "MAX_DATA_BYTES", size * 2)
        calls = [called("echo", number=1)] * 5
        answers = await b.engine.batch(calls, parallel_tool_calls=False)
        logged = await b.engine.calls(limit=100)
    assert codes(answers)[-1] == "OUTPUT_LIMIT_EXCEEDED"
    assert codes(answers).count("OK") in (2, 3)
    assert len(logged.items) - 1 == codes(answers).count("OK")
    assert answers[-1].error.retryable is True


async def test_internal_error_in_one_call_does_not_affect_other_answers(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(home, [echo]) as b:
        real = b.engine._made.calls.run

        def broken(name: str, *rest: Any) -> Any:
            if name == "broken":
                raise RuntimeError("PRIVATE-VALUE")
            return real(name, *rest)

        monkeypatch.setattr(b.engine._made.calls, "run", broken)
        answers = await b.engine.batch([called("broken"), called("echo", number=1)])
        assert codes(answers) == ["INTERNAL_ERROR", "OK"]
        assert "PRIVATE-VALUE" not in answers[0].model_dump_json()
        assert b.log.named("batch.internal_error")
