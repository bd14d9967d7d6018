"""Persistent budgets: never overspent after a kill, pruned when old."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update

from conftest import CLEAN_ENVIRONMENT
from fumehood.budgets.ledger import BLOCKS, Budgets
from fumehood.budgets.model import Subject
from fumehood.budgets.settings import BudgetRule, Period
from fumehood.budgets.store import KEPT_DAYS, CounterKey, CounterTable
from fumehood.core.errors import QuotaExceeded
from fumehood.storage.database import Database, open_database
from fumehood.storage.schema import COUNTERS
from support.budget_scenarios import DATABASE, MOST_UNTOLD, RULES, Told
from support.budget_scenarios import LIMIT as SESSION_LIMIT
from support.budgets import NOON, HandClock, a_total, budgets_on, spender, takes
from support.crash_points import crash_at_every_point

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


@pytest.mark.row("D6")
async def test_budget_killed_at_every_commit_counts_all_calls_and_bounded_reserve(
    home: Path,
) -> None:
    points = []
    for crash in crash_at_every_point(
        "support.budget_scenarios:spending", home, CLEAN_ENVIRONMENT
    ):  # fmt: skip
        told = Told(crash.said)
        database = open_database(crash.home / DATABASE)
        budgets = budgets_on(database, *RULES)
        (ever,) = (one for one in budgets.standings() if one.budget == "ever")
        session = budgets_on(database, *RULES)
        with pytest.raises(QuotaExceeded):  # a session's counter is looked for when it is asked for
            await session.reserve(spender(session="s"), takes(tokens=SESSION_LIMIT + 1))
        database.close()
        spent = int(ever.spent)
        assert spent >= told.taken, crash
        if "closed" in crash.said:
            assert spent == told.taken, crash
        elif "closing" not in crash.said:
            # Two blocks, what was just about to be held, and what had just been given back.
            assert spent <= told.taken + 2 * (SESSION_LIMIT // BLOCKS) + MOST_UNTOLD, crash
        points.append(crash.point)
    assert points[-1] is None
    assert len(points) >= 10


async def test_control_lowering_the_reserved_mark_allows_overspending(reopen: Reopen) -> None:
    """Twin of the kills: without the reserved mark the next process spends the budget again."""
    database, rule = reopen(), BudgetRule(name="all", period=Period.TOTAL, tokens=100)
    await use(budgets_on(database, rule), 100)
    with pytest.raises(QuotaExceeded):
        await use(budgets_on(database, rule), 1)
    await database.write(lambda connection: connection.execute(update(COUNTERS), {"reserved": "0"}))
    await use(budgets_on(database, rule), 100)


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
