"""What approvals cost: every gate on a call that asks nobody, asking, and lists among many."""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert

from benchmarks.bench_budgets import BUDGETS
from benchmarks.bench_policy import _tool, _written
from benchmarks.line import Line
from fumehood import Config, Engine, tool
from fumehood.approvals.model import ApprovalQuery, ApprovalState
from fumehood.approvals.store import ApprovalTable
from fumehood.core.identity import Principal, Scope
from fumehood.storage.database import Database, open_database
from fumehood.storage.schema import APPROVALS
from fumehood.testing import FakeWall

APPROVALS_KEPT = 100_000
LISTED = 50
ROUNDS = 60
CALLS = 2000
ASKED = 100
GATES_MS = 0.5
LIST_MS = 10.0
ADMIN = Principal("approver:root", frozenset({Scope.ADMIN}))


@tool(dangerous=True, sandboxed=False)
async def erase(what: str) -> dict[str, str]:
    """Erase something."""
    return {"erased": what}


def approval_lines() -> Iterator[Line]:
    """Every line of this file."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        yield from asyncio.run(_measure(home))
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _measure(home: Path) -> list[Line]:
    database = open_database(home / "state.db")
    config = Config(home=home, budgets=BUDGETS)
    try:
        async with Engine(
            tools=[erase], config=config, interpreter=FakeWall(), database=database
        ) as engine:
            await engine.approvers.add("alice", [Scope.APPROVE], by=ADMIN, now=engine.now())
            engine.policy.gate.replace(_written([_tool(f"tool_{n}") for n in range(500)]))
            gates_ms = await _call_ms(engine)
            asked_ms = await _asked_ms(engine)
            first = (await engine.approvals.list(ApprovalQuery(limit=1))).items[0].id
            await database.write(lambda connection: _fill(connection, first))
            listed = {
                "of all": await _listed_ms(database, ApprovalQuery(limit=LISTED)),
                "of those that wait": await _listed_ms(
                    database, ApprovalQuery(limit=LISTED, state=ApprovalState.PENDING)
                ),
                "of one caller's": await _listed_ms(
                    database, ApprovalQuery(limit=LISTED), engine.owner.id
                ),
            }
    finally:
        database.close()
    return [
        Line("a harmless call, 1 000 rules and 3 budgets, all gates", f"≤ {GATES_MS} ms",
             f"{gates_ms:.3f} ms", gates_ms <= GATES_MS),
        Line("a call that is parked for a human, durable", "–", f"{asked_ms:.2f} ms", None),
        *(
            Line(f"newest {LISTED} {which}, {APPROVALS_KEPT} approvals kept", f"≤ {LIST_MS:g} ms",
                 f"{taken_ms:.2f} ms", taken_ms <= LIST_MS)
            for which, taken_ms in listed.items()
        ),
    ]  # fmt: skip


async def _call_ms(engine: Engine) -> float:
    """A whole call on a wall that answers at once: what is left is the way through the gates."""
    times = []
    for _ in range(CALLS):
        before = time.perf_counter()
        answer = await engine.call("calculator", {"expression": "2+2"})
        times.append((time.perf_counter() - before) * 1e3)
        if not answer.success:
            raise RuntimeError(f"the call was refused: {answer.error}")
    return statistics.median(times)


async def _asked_ms(engine: Engine) -> float:
    times = []
    for number in range(ASKED):
        before = time.perf_counter()
        answer = await engine.call("erase", {"what": str(number)})
        times.append((time.perf_counter() - before) * 1e3)
        if answer.error is None or answer.error.approval_id is None:
            raise RuntimeError(f"nobody was asked: {answer.error}")
    return statistics.median(times)


async def _listed_ms(
    database: Database, query: ApprovalQuery, principal_id: str | None = None
) -> float:
    table = ApprovalTable(database)
    times = []
    for _ in range(ROUNDS):
        before = time.perf_counter()
        page = await table.page(query, principal_id)
        times.append((time.perf_counter() - before) * 1e3)
        if len(page.items) != query.limit:
            raise RuntimeError(f"{len(page.items)} were listed")
    return statistics.median(times)


def _fill(connection: Connection, first: str) -> None:
    """Many more like a real one: every tenth still waits."""
    row: dict[str, Any] = dict(
        connection.execute(APPROVALS.select().where(APPROVALS.c.id == first)).mappings().one()
    )
    answer = json.dumps({"data": "x" * 500})
    rows = [
        {
            **row,
            "seq": None,
            "id": f"apr_{number:024x}",
            "call_id": f"call_{number:024x}",
            "repeat_key": None,
            "state": "pending" if number % 10 == 0 else "done",
            "answer": None if number % 10 == 0 else answer,
        }
        for number in range(APPROVALS_KEPT - ASKED)
    ]
    connection.execute(insert(APPROVALS), rows)
