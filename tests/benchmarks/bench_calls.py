"""The call log: what a list costs among 100 000 calls, and what a row costs its call."""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fumehood import Config, Engine
from fumehood.store.calls import CallLog, CallRow
from fumehood.store.database import open_database
from fumehood.testing import FakeWall
from tests.benchmarks.line import Line

LOGGED = 100_000
LISTS = 30
PAIRS = 4000
BATCH = 20
START = datetime(2026, 1, 1, tzinfo=UTC)

QUERIES: dict[str, dict[str, Any]] = {
    "newest": {},
    "100 newest": {"limit": 100},
    "of a rare tool": {"tool": "rare", "limit": 100},
    "of a tool that is not there": {"tool": "none"},
    "of an agent": {"agent": "a", "limit": 100},
    "of a rare code": {"code": "TIMEOUT", "limit": 100},
    "tool, agent and code": {"tool": "calculator", "agent": "a", "code": "TIMEOUT"},
    "of the last hour": {"since": START + timedelta(seconds=LOGGED - 3600), "limit": 100},
    "of a future": {"since": START + timedelta(days=999)},
    "of the first hour": {"until": START + timedelta(hours=1), "limit": 100},
}


def call_log() -> Iterator[Line]:
    """Every line of this file."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        yield from asyncio.run(lists(home))
        yield asyncio.run(cost_of_a_row(home))
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def lists(home: Path) -> list[Line]:
    database = open_database(home / "lists.db")
    config = Config(home=home, calls_kept=10_000_000, calls_kept_days=3650)
    async with Engine(config=config, interpreter=FakeWall(), database=database) as engine:
        await fill(engine._calls, engine.owner.id)
        lines = []
        for name, query in QUERIES.items():
            times = []
            for _ in range(LISTS):
                before = time.perf_counter()
                await engine.calls(**query)
                times.append(time.perf_counter() - before)
            took_ms = statistics.median(times) * 1e3
            lines.append(
                Line(f"calls list, {LOGGED} logged: {name}", "≤ 20 ms", f"{took_ms:.1f} ms",
                     took_ms <= 20)
            )  # fmt: skip
    database.close()
    return lines


async def fill(log: CallLog, principal_id: str) -> None:
    chance = random.Random(1)
    for number in range(LOGGED):
        moment = START + timedelta(seconds=number)
        log.record(
            CallRow(
                id=f"call_{chance.getrandbits(96):024x}",
                at=moment.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
                principal_id=principal_id if number % 10 else "uid:4242",
                agent_id=chance.choice((None, "a", "b", "c")),
                session_id=None,
                trace_id=f"trace_20260101_{chance.getrandbits(48):012x}",
                tool="rare" if number % 1000 == 1 else "calculator",
                version="1.0.0",
                code="TIMEOUT" if number % 777 == 1 else "OK",
                ended_by="ok",
                total_ms=1.5,
                cpu_ms=0.5,
                cost="0.000000",
                currency="USD",
                input_tokens=9,
                output_tokens=3,
                tokens_used=0,
            )
        )
        if number % 5000 == 0:
            await log._database.flush()
    await log._database.flush()


async def cost_of_a_row(home: Path) -> Line:
    """The same engine with and without posting, in turn; writing the rows is in the time."""
    database = open_database(home / "cost.db")
    engine = Engine(config=Config(home=home), interpreter=FakeWall(), database=database)
    async with engine:
        record = engine._calls.record

        async def batch(*, logged: bool) -> float:
            engine._calls.record = record if logged else _forget  # type: ignore[method-assign]
            before = time.perf_counter()
            for _ in range(BATCH):
                await engine.call("calculator", {"expression": "1"})
            return (time.perf_counter() - before) / BATCH

        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(PAIRS // BATCH):
            for logged in (True, False):
                taken = await batch(logged=logged)
                if number:
                    times[logged].append(taken)
    database.close()
    # Means: what the writer's thread takes, it takes from a few calls only.
    cost_ms = (statistics.mean(times[True]) - statistics.mean(times[False])) * 1e3
    return Line(
        "call log's share of a call", "≤ 0.1 ms", f"{cost_ms:.3f} ms", cost_ms <= 0.1
    )  # fmt: skip


def _forget(row: CallRow) -> None:
    """No call log."""
