"""Streamed and cancelled calls: all events, one answer, no leftover recordings or tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine, progress, tool
from fumehood.call_options import CallBody
from fumehood.core.envelope import Envelope
from fumehood.core.errors import EndedBy, ResourceNotFound
from fumehood.core.identity import Principal, Scope
from fumehood.streams.events import Event, ProgressEvent
from fumehood.streams.in_engine import Streams
from fumehood.testing import CONTAINER_LIMITS, FakeWall
from support.answers import code_of, sandbox_of

pytestmark = [pytest.mark.anyio, pytest.mark.row("S8", "P8", "D2")]

STRANGER = Principal("uid:9", frozenset({Scope.CALL}), frozenset())
PROGRAM = {"code": "1"}


@tool(sandboxed=False)
async def wait(note: str = "") -> str:
    """Report and wait to be ended."""
    progress(50, note)
    await asyncio.Event().wait()
    return note


@tool(sandboxed=False)
async def hold_on() -> str:
    """Do not let itself be cancelled."""
    progress(50)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "I went on"
    return ""


@tool(sandboxed=False)
async def report(count: int) -> int:
    """Report more than anybody hears."""
    for number in range(count):
        progress(100 * number / count, f"step {number}")
    return count


class FullWall(FakeWall):
    """A container wall without a free place."""

    @asynccontextmanager
    async def lease(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield self


@asynccontextmanager
async def engine_with(home: Path) -> AsyncIterator[Engine]:
    async with Engine(
        [wait, hold_on, report],
        config=Config(home=home, streams_kept_minutes=0),
        interpreter=FakeWall(),
        container=FullWall(limits=CONTAINER_LIMITS),
    ) as engine:
        yield engine


async def followed(
    engine: Engine, name: str, arguments: Any = None, until: Callable[[Event], bool] | None = None,
    **options: Any,
) -> list[Event]:  # fmt: skip
    """Collect all events, and cancel the call as soon as one satisfies `until`."""
    events = []
    with anyio.fail_after(120):
        async for event in engine.stream(name, arguments, **options):
            events.append(event)
            if until is not None and isinstance(event, ProgressEvent) and until(event):
                await engine.cancel(event.metadata.call_id)
    return events


def answer_of(events: list[Event]) -> Any:
    return events[-1].envelope  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "arguments", "options", "code"),
    [
        ("nothing", {}, {}, "TOOL_NOT_FOUND"),
        ("run_python", {"cod": "1"}, {}, "INVALID_PARAMS"),
        ("run_python", PROGRAM, {"isolation": "sideways"}, "INVALID_PARAMS"),
        ("run_python", {"code": {1, 2}}, {}, "INVALID_PARAMS"),
        ("run_python", PROGRAM, {"memory_limit_mb": 16}, "INVALID_PARAMS"),
    ],
)
async def test_refused_stream_is_a_single_error_event(
    home: Path, name: str, arguments: Any, options: Any, code: str
) -> None:
    async with engine_with(home) as engine:
        (event,) = await followed(engine, name, arguments, **options)
    assert (event.type, answer_of([event]).error.code) == ("tool_error", code)


async def test_progress_events_per_call_are_limited(home: Path) -> None:
    async with engine_with(home) as engine:
        events = await followed(engine, "report", {"count": 1500})
    told = [event.message for event in events if isinstance(event, ProgressEvent)]
    assert told == ["started", *(f"step {number}" for number in range(1000))]
    assert answer_of(events).data == {"value": 1500}


@pytest.mark.parametrize("name", ["wait", "hold_on"])
async def test_cancelled_function_call_ends_as_cancelled(home: Path, name: str) -> None:
    async with engine_with(home) as engine:
        events = await followed(engine, name, until=lambda event: event.id.startswith("1:"))
        envelope: Envelope = answer_of(events)
        assert (code_of(envelope), envelope.data) == ("CANCELLED", {})
        assert sandbox_of(envelope).ended_by is EndedBy.CANCELLED
        record = await engine.call_record(str(envelope.metadata.call_id))
        assert record.code == "CANCELLED"


async def test_call_waiting_for_a_lease_can_be_cancelled(home: Path) -> None:
    async with engine_with(home) as engine:
        events = await followed(engine, "run_python", PROGRAM, until=lambda event: True)
    envelope = answer_of(events)
    assert (envelope.error.code, envelope.metadata.sandbox) == ("CANCELLED", None)


async def test_cancelling_foreign_unknown_or_ended_call_is_not_found(home: Path) -> None:
    refusals = []
    async with engine_with(home) as engine:
        async for event in engine.stream("wait"):
            if isinstance(event, ProgressEvent) and event.progress == 50:
                call_id = event.metadata.call_id
                for who, asked in ((STRANGER, call_id), (engine.owner, "call_0")):
                    with pytest.raises(ResourceNotFound) as refused:
                        await engine.cancel_call(asked, who)
                    refusals.append(refused.value.message)
                await engine.cancel(call_id)
        with pytest.raises(ResourceNotFound) as refused:
            await engine.cancel(call_id)
        refusals.append(refused.value.message)
    assert len(set(refusals)) == 1


async def test_cancelled_call_does_not_leave_its_task_cancelling(home: Path) -> None:
    """The embedding program's own timeouts around the call continue to work."""
    async with engine_with(home) as engine:
        ended: list[str] = []

        async def call() -> None:
            async with asyncio.timeout(20):
                ended.append(code_of(await engine.call("wait")))
            assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
            await anyio.lowlevel.checkpoint()
            ended.append("and went on")

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            with anyio.fail_after(120):
                while not (running := list(engine._made.calls.running)):
                    await anyio.lowlevel.checkpoint()
                await engine.cancel(running[0])
    assert ended == ["CANCELLED", "and went on"]


async def test_twin_timeout_of_embedding_program_raises_timeout_error(home: Path) -> None:
    """A cancellation from outside is not turned into an answer."""
    async with engine_with(home) as engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.call("wait")


@pytest.mark.parametrize("cancels", [True, False])
async def test_closing_the_stream_cancels_the_call_only_if_requested(
    home: Path, cancels: bool
) -> None:
    async with engine_with(home) as engine:
        events = engine.stream("wait", cancel_on_disconnect=cancels)
        assert (await anext(events)).type == "tool_progress"
        await events.aclose()  # type: ignore[attr-defined]
        if not cancels:
            (call_id,) = engine._made.calls.running
            await engine.cancel(call_id)
        with anyio.fail_after(120):
            while len(engine._made.calls.running):
                await anyio.lowlevel.checkpoint()
        (record,) = (await engine.calls()).items
    assert record.code == "CANCELLED"


async def test_reader_cancelled_before_call_begins_leaves_no_recording(home: Path) -> None:
    async with engine_with(home) as engine:
        call = engine.open_stream("report", CallBody(arguments={"count": 3}), engine.owner)
        waiting = call.begun()
        waiting.send(None)
        with pytest.raises(asyncio.CancelledError):
            waiting.throw(asyncio.CancelledError())
        with anyio.fail_after(120):
            while engine._made.calls.started:
                await anyio.lowlevel.checkpoint()
            room = engine.part(Streams).recordings.room
            while room.share.total or os.listdir(room.directory):
                await anyio.lowlevel.checkpoint()
