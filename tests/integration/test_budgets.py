"""Persistent budgets: never overspent after a kill, pruned when old."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update

from fumehood.budgets.ledger import BLOCKS, STEPS, Budgets
from fumehood.budgets.model import Subject
from fumehood.budgets.settings import BudgetRule
from fumehood.budgets.store import KEPT_DAYS, CounterKey, CounterRow, CounterTable
from fumehood.core.errors import QuotaExceeded
from fumehood.core.usage_table import Period
from fumehood.storage.database import Database, open_database
from fumehood.storage.schema import COUNTERS
from support.budgets import NOON, HandClock, a_total, budgets_on, spender, takes

pytestmark = [pytest.mark.anyio, pytest.mark.row("E4", "D6")]

Reopen = Callable[[], Database]


@pytest.fixture
def reopen(home: Path) -> Reopen:
    opened: list[Database] = []

    def again() -> Database:
        for database in opened:
            database.close()
        opened[:] = [open_database(home / "state.db")]
        return opened[0]

    return again


async def use(budgets: Budgets, tokens: int, **who: str) -> None:
    (await budgets.reserve(spender(**who), takes(tokens=tokens))).settle(takes(tokens=tokens))


async def test_control_lowering_the_reserved_mark_allows_overspending(reopen: Reopen) -> None:
    """Twin of the kills of `test_crash_approval`: without the reserved mark the next process spends the budget again."""
    database, rule = reopen(), BudgetRule(name="all", period=Period.TOTAL, tokens=100)
    await use(budgets_on(database, rule), 100)
    with pytest.raises(QuotaExceeded):
        await use(budgets_on(database, rule), 1)
    await database.write(lambda connection: connection.execute(update(COUNTERS), {"reserved": "0"}))
    await use(budgets_on(database, rule), 100)


async def test_engine_that_is_killed_often_loses_less_than_it_uses(reopen: Reopen) -> None:
    """A budget of 20,000 calls was used up by 30 kills and 1,571 calls. Here each start is one after
    a kill: nothing is closed, and the next engine reads what is on the disk.
    """
    database, rule, used = reopen(), a_total(20_000), 0
    for life in range(30):
        budgets = budgets_on(database, rule)
        for _ in range(life * 7 % 106):
            (await budgets.reserve(spender(), takes())).settle(takes())
            used += 1
    budgets = budgets_on(database, rule)
    (standing,) = budgets.standings()
    assert used <= int(standing.spent) <= used * 3 // 2 + 30 * (20_000 // STEPS)
    for _ in range(20_000 - int(standing.spent)):  # all of the rest can still be used
        (await budgets.reserve(spender(), takes())).settle(takes())
    with pytest.raises(QuotaExceeded):
        await budgets.reserve(spender(), takes())


async def test_marks_of_a_long_run_are_few(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    reserve = CounterTable.reserve

    async def count(table: CounterTable, rows: Sequence[CounterRow], at: datetime) -> None:
        written.extend(row.reserved for row in rows)
        await reserve(table, rows, at)

    monkeypatch.setattr(CounterTable, "reserve", count)
    budgets = budgets_on(reopen(), a_total(20_000))
    for _ in range(20_000):
        (await budgets.reserve(spender(), takes())).settle(takes())
    assert written == sorted(written)
    assert written[-1] == 20_000
    assert len(written) < 2 * BLOCKS


# ── what goes ────────────────────────────────────────────────────────────────────────────────


async def rows_of(database: Database) -> set[tuple[str, str]]:
    chosen = select(COUNTERS.c.subject, COUNTERS.c.period)
    return await database.read(
        lambda connection: {(row.subject, row.period) for row in connection.execute(chosen)}
    )


async def test_prune_removes_old_day_and_session_counters_and_keeps_totals(reopen: Reopen) -> None:
    database, clock = reopen(), HandClock()
    rules = [
        BudgetRule(name="day", calls=9),
        BudgetRule(name="ever", per=("agent",), period=Period.TOTAL, calls=9),
        BudgetRule(name="session", per=("session",), period=Period.TOTAL, calls=9),
    ]
    budgets = budgets_on(database, *rules, clock=clock)
    await use(budgets, 0, agent="a", session="old")
    clock.moment += timedelta(days=KEPT_DAYS - 5)
    await use(budgets, 0, agent="a", session="new")
    clock.moment += timedelta(days=6)
    assert await budgets.prune(clock.moment) == 2
    assert await rows_of(database) == {
        ("agent=a", "total"),
        ("principal=uid:1;session=new", "total"),
        ("", (NOON + timedelta(days=KEPT_DAYS - 5)).date().isoformat()),
    }
    assert await budgets.prune(clock.moment) == 0


async def test_reserved_mark_is_never_lowered_by_a_later_write(reopen: Reopen) -> None:
    """Two writes of one counter may arrive in either order."""
    database = reopen()
    budgets = budgets_on(database, a_total(100))
    await budgets.reserve(spender(), takes(calls=60))
    table = CounterTable(database)
    key = CounterKey("all", Subject(), "total", "calls")
    (row,) = await table.find([key])
    lower = row._replace(settled=1, reserved=2)
    await table.reserve([lower], NOON)
    (after,) = await table.find([key])
    assert after.reserved == row.reserved == 65
