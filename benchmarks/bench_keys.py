"""What an idempotency key costs a call: two flushes to the disk, and a replay none."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.line import Line
from fumehood import Config, Engine, Envelope
from fumehood.storage.database import open_database
from fumehood.testing import FakeWall
from support.postgres import programs, running_postgres

CALLS = 1000
WARM_UP = 50
IN_POSTGRESQL = "a call with a key, its state in PostgreSQL / in SQLite"
ARGUMENTS = {"expression": "1 + 1"}


def key_lines() -> Iterator[Line]:
    """Every line of this file."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        yield from asyncio.run(_measure(home))
        if programs() is None:
            yield Line(IN_POSTGRESQL, "≤ 3", "PostgreSQL is not installed", None)
            return
        with running_postgres() as server:
            yield asyncio.run(_in_postgresql(home, server.state_url(home / "other")))
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _measure(home: Path) -> list[Line]:
    """Whole calls in turn, on a wall that answers at once: what is left is all gates."""
    database = open_database(home / "state.db")
    config = Config(home=home)
    async with Engine(config=config, interpreter=FakeWall(), database=database) as engine:

        async def plain(number: int) -> Envelope:
            return await engine.call("calculator", ARGUMENTS)

        async def keyed(number: int) -> Envelope:
            return await engine.call("calculator", ARGUMENTS, idempotency_key=f"key-{number}")

        kinds = {"plain": plain, "keyed": keyed, "replayed": keyed}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(CALLS + WARM_UP):
            for kind, call in kinds.items():
                took_ms = await _timed(call, number, is_replay=kind == "replayed")
                if number >= WARM_UP:
                    times[kind].append(took_ms)
    database.close()
    median = {kind: statistics.median(taken) for kind, taken in times.items()}
    whole_ms, replayed_ms = median["keyed"], median["replayed"]
    return [
        Line("two bare flushes of 4 KB to this disk", "–", f"{_two_flushes_ms(home):.3f} ms", None),
        Line("a call without a key, every gate", "–", f"{median['plain']:.3f} ms", None),
        Line("a call with a key, every gate, flushed twice", "≤ 1.5 ms", f"{whole_ms:.3f} ms",
             whole_ms <= 1.5),
        Line("the same call again, answered from what is kept", "–", f"{replayed_ms:.3f} ms", None),
    ]  # fmt: skip


async def _in_postgresql(home: Path, url: str) -> Line:
    """Calls with a key in turn on two engines, whose states differ."""
    times: dict[str, list[float]] = {"sqlite": [], "postgresql": []}
    async with AsyncExitStack() as stack:
        engines = {}
        for name, state in (("sqlite", None), ("postgresql", url)):
            place = home / name
            place.mkdir()
            database = open_database(place / "state.db", url=state)
            stack.callback(database.close)
            engines[name] = await stack.enter_async_context(
                Engine(config=Config(home=place), interpreter=FakeWall(), database=database)
            )
        for number in range(CALLS + WARM_UP):
            for name, engine in engines.items():

                async def keyed(number: int, engine: Engine = engine) -> Envelope:
                    return await engine.call("calculator", ARGUMENTS, idempotency_key=f"k{number}")

                took_ms = await _timed(keyed, number, is_replay=False)
                if number >= WARM_UP:
                    times[name].append(took_ms)
    ratio = statistics.median(times["postgresql"]) / statistics.median(times["sqlite"])
    return Line(IN_POSTGRESQL, "≤ 3", f"{ratio:.2f}", ratio <= 3)


def _two_flushes_ms(home: Path) -> float:
    """What no engine can do without."""
    handle = os.open(home / "bare", os.O_RDWR | os.O_CREAT, 0o600)
    times = []
    try:
        for number in range(CALLS // 5):
            before = time.perf_counter()
            for half in range(2):
                os.pwrite(handle, b"x" * 4096, (2 * number + half) * 4096)
                os.fdatasync(handle)
            times.append((time.perf_counter() - before) * 1e3)
    finally:
        os.close(handle)
    return statistics.median(times)


async def _timed(
    call: Callable[[int], Awaitable[Envelope]], number: int, *, is_replay: bool
) -> float:
    before = time.perf_counter()
    envelope = await call(number)
    took_ms = (time.perf_counter() - before) * 1e3
    assert envelope.success
    assert envelope.metadata.idempotent_replay is is_replay
    return took_ms
