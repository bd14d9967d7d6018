"""Calls with keys through a whole engine: run once, answered as often as they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import Connection, func, select

from fumehood import Config, Engine, Envelope, ToolError, tool
from fumehood.core.call import CallBody
from fumehood.core.errors import EndedBy
from fumehood.core.idempotency import KEY_LIFETIME
from fumehood.executors.handle import CallHandle
from fumehood.sandbox.wall import RunEnding
from fumehood.storage.database import open_database
from fumehood.storage.schema import IDEMPOTENCY
from fumehood.testing import FakeWall, ManualClock
from support.definitions import expression_document
from support.recording import RecordingLog, bench

pytestmark = [pytest.mark.anyio, pytest.mark.row("P3")]


class Counter:
    """A tool's deeds, and what it does next."""

    def __init__(self) -> None:
        self.deeds: list[str] = []
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.waits = False
        self.error: Exception | None = None

    def tools(self) -> list[Any]:
        @tool(sandboxed=False, description="Act.", cost_per_use="0.5")
        async def act(text: str = "", idempotency_key: str | None = None) -> dict[str, int]:
            self.deeds.append(text)
            self.begun.set()
            if self.waits:
                await self.go.wait()
            if self.error is not None:
                raise self.error
            return {"deeds": len(self.deeds)}

        @tool(sandboxed=False, description="Look.", read_only=True)
        async def look(text: str = "") -> dict[str, int]:
            return await act.function({"text": text})  # type: ignore[no-any-return]

        return [act, look]


@pytest.fixture
def counter() -> Counter:
    return Counter()


Opened = Callable[[], AbstractAsyncContextManager[Engine]]


@pytest.fixture
def opened(home: Path, counter: Counter) -> Opened:
    """An engine whose state outlives it."""

    @asynccontextmanager
    async def life() -> AsyncIterator[Engine]:
        database = open_database(home / "state.db")
        engine = Engine(
            counter.tools(), config=Config(home=home), interpreter=FakeWall(),
            log=RecordingLog(), clock=ManualClock(), database=database,
        )  # fmt: skip
        try:
            async with engine:
                yield engine
        finally:
            database.close()

    return life


def code(envelope: Envelope) -> str:
    return envelope.error.code if envelope.error is not None else "OK"


async def test_repeat_is_answered_and_runs_nothing_in_the_next_engine_too(
    opened: Opened, counter: Counter
) -> None:
    async with opened() as engine:
        first = await engine.call("act", {"text": "a"}, idempotency_key="k")
        again = await engine.call("act", {"text": "a"}, idempotency_key="k")
    async with opened() as engine:
        later = await engine.call("act", {"text": "a"}, idempotency_key="k")
        other = await engine.call("act", {"text": "b"}, idempotency_key="k")
    assert counter.deeds == ["a"]
    for envelope in (again, later):
        assert (envelope.data, envelope.metadata.call_id) == (first.data, first.metadata.call_id)
        assert envelope.metadata.idempotent_replay is True
    assert first.metadata.idempotent_replay is False
    assert code(other) == "IDEMPOTENCY_CONFLICT"


async def test_replay_is_a_row_of_the_call_log_that_cost_nothing(
    opened: Opened, counter: Counter
) -> None:
    async with opened() as engine:
        for _ in range(3):
            await engine.call("act", {"text": "a"}, idempotency_key="k")
        page = await engine.calls()
    costs = [record.cost for record in page.items]
    assert costs == ["0.000000", "0.000000", "0.500000"]
    assert len({record.call_id for record in page.items}) == 3
    assert {record.code for record in page.items} == {"OK"}


@pytest.mark.parametrize(
    ("name", "deeds", "heard"), [("act", 1, "OUTCOME_UNKNOWN"), ("look", 2, "OK")]
)
@pytest.mark.parametrize("by", ["its caller", "the task's end"])
async def test_call_that_was_cancelled_in_the_middle_is_not_run_again(
    opened: Opened, counter: Counter, name: str, deeds: int, heard: str, by: str
) -> None:
    counter.waits = True
    async with opened() as engine:
        body = CallBody.model_validate({"options": {"idempotency_key": "k"}})
        live = CallHandle()
        with anyio.fail_after(20):
            running = asyncio.create_task(engine.run(name, body, engine.owner, live))
            await counter.begun.wait()
            if by == "its caller":
                live.cancel()
                assert code(await running) == "CANCELLED"
            else:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
        counter.waits = False
        assert code(await engine.call(name, idempotency_key="k")) == heard
    assert len(counter.deeds) == deeds


async def test_tools_failure_is_answered_again_and_not_repeated(
    opened: Opened, counter: Counter
) -> None:
    counter.error = ToolError("CITY_BUSY", "Come back.", retryable=True, retry_after_ms=5)
    async with opened() as engine:
        first = await engine.call("act", idempotency_key="k")
        again = await engine.call("act", idempotency_key="k")
    assert code(first) == code(again) == "CITY_BUSY"
    assert first.error is not None
    assert again.error is not None
    assert (first.error.retryable, again.error.retryable) == (True, False)
    assert len(counter.deeds) == 1


async def test_lost_run_of_a_tool_that_may_be_repeated_frees_its_key(home: Path) -> None:
    endings = [EndedBy.SANDBOX_LOST, EndedBy.OK]
    wall = FakeWall(
        lambda run: RunEnding(
            isolation="call", ended_by=endings.pop(0), result={"value": 4, "text": "4"}
        )
    )
    async with bench(home, [expression_document(idempotent=True)], wall) as b:
        first = await b.engine.call("sums", {"expression": "1"}, idempotency_key="k")
        again = await b.engine.call("sums", {"expression": "1"}, idempotency_key="k")
    assert (code(first), code(again)) == ("SANDBOX_UNAVAILABLE", "OK")
    assert again.metadata.idempotent_replay is False


async def test_rehearsal_takes_no_key_and_replays_nothing(opened: Opened, counter: Counter) -> None:
    async with opened() as engine:
        rehearsed = await engine.call("act", idempotency_key="k", dry_run=True)
        assert rehearsed.data["dry_run"] is True
        await engine.call("act", idempotency_key="k")
        rehearsed = await engine.call("act", idempotency_key="k", dry_run=True)
        assert rehearsed.data["dry_run"] is True
        assert rehearsed.metadata.idempotent_replay is False
    assert len(counter.deeds) == 1


async def test_engine_clears_old_keys_away(home: Path, counter: Counter) -> None:
    database, clock = open_database(home / "state.db"), ManualClock()

    def count(connection: Connection) -> int:
        return connection.execute(select(func.count()).select_from(IDEMPOTENCY)).scalar_one()

    def engine() -> Engine:
        return Engine(
            counter.tools(), config=Config(home=home), interpreter=FakeWall(), clock=clock,
            database=database,
        )  # fmt: skip

    async with engine() as first:
        await first.call("act", idempotency_key="k")
        assert await database.read(count) == 1
    clock.advance(KEY_LIFETIME.total_seconds())
    async with engine():
        with anyio.fail_after(20):
            while await database.read(count):
                await anyio.lowlevel.checkpoint()
    database.close()
