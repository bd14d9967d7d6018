"""How fast an audit chain is verified, and what its row costs a harmless call."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import Connection

from benchmarks.line import Line
from fumehood import Config, Engine
from fumehood.audit.service import verify_state
from fumehood.engine import parse_call_body
from fumehood.storage import calls
from fumehood.storage.audit_chain import AuditEntry
from fumehood.storage.database import Database, open_database
from fumehood.testing import FakeWall

ROWS = 200_000
AT_ONCE = 5000
RUNS = 3
TARGET = 50_000
PAIRS = 20_000
BATCH = 200


def audit_lines() -> Iterator[Line]:
    with TemporaryDirectory() as place:
        yield verification(Path(place))
    with TemporaryDirectory() as place:
        yield asyncio.run(cost_of_a_row(Path(place)))


def verification(state: Path) -> Line:
    """As `audit verify` does it: from the file, a database that nobody has read before."""
    fill(state)
    rates = []
    for _ in range(RUNS):
        before = time.perf_counter()
        verdict = verify_state(state, [])
        rates.append(ROWS / (time.perf_counter() - before))
        if not verdict.is_intact or verdict.rows != ROWS:
            raise RuntimeError(f"wrong verdict: {verdict}")
    rate = statistics.median(rates)
    return Line(
        f"audit verify, {ROWS} rows", f"≥ {TARGET} rows/s", f"{rate:.0f} rows/s", rate >= TARGET
    )


def fill(state: Path) -> None:
    """With rows as calls have them."""
    database = open_database(state / "state.db")
    for start in range(0, ROWS, AT_ONCE):
        database.write_now(
            lambda connection, first=start: database.audit.append_all(
                connection, [entry(number) for number in range(first, first + AT_ONCE)]
            )
        )
    database.close()


def entry(number: int) -> AuditEntry:
    return AuditEntry(
        "call.ended",
        "2026-01-01T00:00:00.000Z",
        {
            "call_id": f"call_{number:024x}", "principal_id": "uid:1000",
            "trace_id": "trace_20260101_000000000000", "tool": "calculator", "version": "1.0.0",
            "code": "OK", "ended_by": "ok", "total_ms": 1.5, "cpu_ms": 0.5, "cost": "0.000000",
            "currency": "USD", "input_tokens": 9, "output_tokens": 3, "tokens_used": 0,
        },
    )  # fmt: skip


async def cost_of_a_row(home: Path) -> Line:
    """Calls with and without it, in turn; what the writer's thread takes is in the time."""
    database: Database = open_database(home / "state.db")
    config = Config(home=home)
    async with Engine(config=config, interpreter=FakeWall(), database=database) as engine:
        body = parse_call_body({"arguments": {"expression": "1"}})
        owner = engine.owner
        chained = calls.chain_of
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * PAIRS // BATCH):
            with_row = turn % 2 == 0
            calls.chain_of = chained if with_row else _no_chain
            before = time.perf_counter()
            for _ in range(BATCH):
                await engine.run("calculator", body, owner)
            await database.flush()
            times[with_row].append((time.perf_counter() - before) / BATCH)
        calls.chain_of = chained
    database.close()
    cost_us = (statistics.median(times[True]) - statistics.median(times[False])) * 1e6
    return Line("audit row of a harmless call, all threads", "–", f"{cost_us:.0f} µs", None)


class _NoChain:
    def append_all(self, connection: Connection, entries: object) -> int:
        return 0


def _no_chain(connection: Connection) -> _NoChain:
    return _NoChain()
