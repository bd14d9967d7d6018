"""What budgets cost a call: a reservation with its settlement, and whole calls, in turn."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from benchmarks.line import Line
from fumehood import Config, Engine
from fumehood.budgets.ledger import Budgets
from fumehood.budgets.model import Amounts, Spender
from fumehood.budgets.settings import BudgetRule
from fumehood.budgets.store import CounterTable
from fumehood.observe.clock import SystemClock
from fumehood.storage.database import Database, open_database
from fumehood.testing import FakeWall

RESERVATIONS = 20_000
CALLS = 4000
BATCH = 20
LARGE = 10**9

BUDGETS = (
    BudgetRule(name="all", calls=LARGE, tokens=LARGE, money=Decimal(LARGE)),
    BudgetRule(name="each", per=("principal", "tool"), calls=LARGE),
    BudgetRule(name="calculators", tools=("calc*",), period="total", tokens=LARGE),
)
SMALL = (BudgetRule(name="small", calls=10),)
"""Of a budget without blocks: each reservation is a durable write."""


def budget_lines() -> Iterator[Line]:
    """Every line of this file."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        yield from asyncio.run(reservations(home))
        yield asyncio.run(share_of_a_call(home))
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def reservations(home: Path) -> list[Line]:
    database = open_database(home / "reservations.db")
    none_ms = await one_ms(budgets_on(database, ()))
    three_ms = await one_ms(budgets_on(database, BUDGETS))
    durable_ms = await durable_one_ms(database)
    database.close()
    return [
        Line("reservation and settlement, no budgets", "–", f"{none_ms:.4f} ms", None),
        Line("reservation and settlement, three budgets", "≤ 0.1 ms", f"{three_ms:.4f} ms",
             three_ms <= 0.1),
        Line("reservation that takes a new block", "–", f"{durable_ms:.3f} ms", None),
    ]  # fmt: skip


def budgets_on(database: Database, chosen: tuple[BudgetRule, ...]) -> Budgets:
    rules = Config(budgets=chosen).of("budgets", tuple) or ()
    return Budgets(rules, CounterTable(database), SystemClock().now)


async def one_ms(budgets: Budgets) -> float:
    """The mean of many, of several principals; the few that write are among them."""
    spenders = [Spender(f"uid:{number}", "a", None, "calculator") for number in range(10)]
    estimate, actual = Amounts(1, 9, Decimal("0.01")), Amounts(1, 12, Decimal("0.02"))
    before = time.perf_counter()
    for number in range(RESERVATIONS):
        (await budgets.reserve(spenders[number % 10], estimate)).settle(actual)
    return (time.perf_counter() - before) / RESERVATIONS * 1e3


async def durable_one_ms(database: Database) -> float:
    """The median of reservations that each reach the disk before they are granted."""
    times = []
    for _ in range(20):
        budgets = budgets_on(database, SMALL)
        for _ in range(3):
            before = time.perf_counter()
            reservation = await budgets.reserve(Spender("uid:1", None, None, "x"), Amounts(1))
            times.append(time.perf_counter() - before)
            reservation.release()
        await budgets.close()
    return statistics.median(times) * 1e3


async def share_of_a_call(home: Path) -> Line:
    """Two engines that differ in their budgets only, in turn."""
    times: dict[bool, list[float]] = {False: [], True: []}
    databases = [open_database(home / f"{name}.db") for name in ("without", "with")]
    without = Engine(config=Config(home=home), interpreter=FakeWall(), database=databases[0])
    limited = Engine(
        config=Config(home=home, budgets=BUDGETS), interpreter=FakeWall(), database=databases[1]
    )
    async with without, limited:
        for number in range(CALLS // BATCH):
            for has_budgets, engine in ((False, without), (True, limited)):
                before = time.perf_counter()
                for _ in range(BATCH):
                    envelope = await engine.call("calculator", {"expression": "1"})
                    if envelope.error is not None:
                        raise RuntimeError(f"wrong answer: {envelope.error.code}")
                if number:
                    times[has_budgets].append((time.perf_counter() - before) / BATCH)
    for database in databases:
        database.close()
    share_ms = (statistics.mean(times[True]) - statistics.mean(times[False])) * 1e3
    return Line("three budgets, share of a call", "≤ 0.2 ms", f"{share_ms:.3f} ms", share_ms <= 0.2)
