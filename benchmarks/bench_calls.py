"""The call log among 100 000 calls, and what identity, binding and log cost a call."""

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

from benchmarks.line import Line
from fumehood import Config, Engine
from fumehood.core.identity import Principal, Scope
from fumehood.engine import parse_call_body
from fumehood.identity.model import Agent, Binding
from fumehood.storage.calls import CallLog, CallRow
from fumehood.storage.database import open_database
from fumehood.testing import FakeWall

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
        yield from asyncio.run(cost_of_identity(home))
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def lists(home: Path) -> list[Line]:
    database = open_database(home / "lists.db")
    config = Config(home=home, calls_kept=10_000_000, calls_kept_days=3650)
    async with Engine(config=config, interpreter=FakeWall(), database=database) as engine:
        await fill(engine._made.services.stores.calls, engine.owner.id)
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


async def cost_of_identity(home: Path) -> list[Line]:
    """The same engine with nothing of it and with all of it, in turn; writing is in the time."""
    database = open_database(home / "cost.db")
    engine = Engine(config=Config(home=home), interpreter=FakeWall(), database=database)
    async with engine:
        record = engine._made.services.stores.calls.record
        token = await a_token_for_an_agent(engine)
        plain = parse_call_body({"arguments": {"expression": "1"}})
        as_agent = parse_call_body(
            {"arguments": {"expression": "1"}, "options": {"agent_id": "sums"}}
        )
        owner = engine.owner

        async def nothing() -> None:
            await engine.run("calculator", plain, owner)

        async def logged() -> None:
            await engine.run("calculator", plain, engine.principal_of_uid(1000))

        async def all_of_it() -> None:
            principal = engine.tokens.principal_of(token, engine.now())
            await engine.run("calculator", as_agent, principal)

        kinds = {"nothing": nothing, "log": logged, "all": all_of_it}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(PAIRS // BATCH):
            for kind, one in kinds.items():
                engine._made.services.stores.calls.record = _forget if one is nothing else record  # type: ignore[method-assign]
                before = time.perf_counter()
                for _ in range(BATCH):
                    await one()
                if number:
                    times[kind].append((time.perf_counter() - before) / BATCH)
    database.close()
    # Means: what the writer's thread takes, it takes from a few calls only.
    mean_ms = {kind: statistics.mean(taken) * 1e3 for kind, taken in times.items()}
    log_ms, all_ms = (mean_ms[kind] - mean_ms["nothing"] for kind in ("log", "all"))
    return [
        Line("call log and uid, share of a call", "–", f"{log_ms:.3f} ms", None),
        Line("token, binding and call log, share of a call", "≤ 0.3 ms", f"{all_ms:.3f} ms",
             all_ms <= 0.3),
    ]  # fmt: skip


async def a_token_for_an_agent(engine: Engine) -> str:
    """A token that speaks for an agent with one tool, one of whose arguments is fixed."""
    admin, now = Principal("approver:bench", frozenset({Scope.ADMIN})), engine.now()
    await engine.agents.create(Agent(id="sums"), by=admin, now=now)
    binding = Binding(tool="calculator", fixed={"precision": 2})
    await engine.agents.bind("sums", binding, by=admin, now=now)
    _, text = await engine.tokens.new(
        "bench", principal_id="token:bench", scopes=[Scope.CALL], agents=["sums"],
        expires_at=None, by=admin, now=now,
    )  # fmt: skip
    return text


def _forget(row: CallRow) -> None:
    """No call log."""
