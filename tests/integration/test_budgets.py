"""Persistent budgets: exact after a stop, never overspent after a kill, pruned when old."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from conftest import CLEAN_ENVIRONMENT
from fumehood.budgets.ledger import BLOCKS, Budgets
from fumehood.budgets.model import Subject
from fumehood.budgets.settings import BudgetRule, Period
from fumehood.budgets.store import KEPT_DAYS, CounterKey, CounterTable
from fumehood.core.errors import QuotaExceeded
from fumehood.storage.database import DELETED_AT_ONCE, Database, open_database
from fumehood.storage.schema import COUNTERS
from support.budget_scenarios import DATABASE, MOST_UNTOLD, RULES, Told
from support.budget_scenarios import LIMIT as SESSION_LIMIT
from support.budgets import NOON, HandClock, a_total, budgets_on, spender, takes
from support.crash_points import crash_at_every_point
from support.spending import CALLS_AT_ONCE, LIMIT, MOST_EXPECTED, RULE, spend

pytestmark = [pytest.mark.anyio, pytest.mark.row("E4", "D6")]

SEED = 20261121
MOST_LINES = 700
MAX_LIVES = 40

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


def left(budgets: Budgets) -> list[int | str]:
    return [standing.left for standing in budgets.standings()]


async def test_budget_after_clean_stop_is_reduced_by_exactly_what_was_spent(reopen: Reopen) -> None:
    rule = BudgetRule(
        name="b", period=Period.TOTAL, per=("agent",), calls=100, tokens=1000, money=Decimal("2.5")
    )
    budgets = budgets_on(reopen(), rule)
    for _ in range(3):
        held = await budgets.reserve(spender(agent="a"), takes(tokens=50, money="0.2"))
        held.settle(takes(tokens=7, money="0.100001"))
    await budgets.close()
    again = budgets_on(reopen(), rule)
    assert left(again) == [97, 979, "2.199997"]


async def test_budget_after_clean_stop_has_released_reservations_back(reopen: Reopen) -> None:
    """Includes amounts that are released without an awaited write."""
    database = reopen()
    for _ in range(30):
        budgets = budgets_on(database, a_total(3))
        for _ in range(3):
            (await budgets.reserve(spender(), takes(calls=3))).release()
        await budgets.close()
    assert left(budgets_on(database, a_total(3))) == [3]


async def test_budget_after_crash_also_loses_the_block_reserved_ahead(reopen: Reopen) -> None:
    rule = BudgetRule(name="b", period=Period.TOTAL, tokens=1000)
    budgets = budgets_on(reopen(), rule)
    await use(budgets, 100)
    again = budgets_on(reopen(), rule)
    assert left(again) == [1000 - 100 - 1000 // BLOCKS]


async def test_counter_of_an_earlier_day_is_loaded_on_demand(
    reopen: Reopen,
) -> None:
    rule, clock = BudgetRule(name="b", tokens=10), HandClock()
    budgets = budgets_on(reopen(), rule, clock=clock)
    await use(budgets, 10)
    clock.moment += timedelta(days=1)
    again = budgets_on(reopen(), rule, clock=clock)
    await use(again, 10)
    clock.moment -= timedelta(days=1)
    with pytest.raises(QuotaExceeded):
        await use(again, 1)


@pytest.mark.row("D6")
def test_budget_killed_at_random_moments_is_never_overspent(home: Path) -> None:
    """One budget, spent by successive processes that are each killed while calls run."""
    chance = random.Random(SEED)
    taken, lives = 0, 0
    while lives < MAX_LIVES:
        life = spend(home / "state.db", lives, chance.randrange(MOST_LINES), CLEAN_ENVIRONMENT)
        lives += 1
        taken += sum(life.taken.values())
        assert taken <= LIMIT
        if life.refused and not life.taken:
            break
    assert 3 <= lives < MAX_LIVES
    costs_of_a_crash = 2 * (LIMIT // BLOCKS) + CALLS_AT_ONCE * MOST_EXPECTED
    assert taken >= LIMIT - lives * costs_of_a_crash


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
    database = reopen()
    await use(budgets_on(database, RULE), LIMIT)
    with pytest.raises(QuotaExceeded):
        await use(budgets_on(database, RULE), 1)
    await database.write(lambda connection: connection.execute(update(COUNTERS), {"reserved": "0"}))
    await use(budgets_on(database, RULE), LIMIT)


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


async def test_prune_removes_more_rows_than_one_transaction_deletes(reopen: Reopen) -> None:
    database, clock = reopen(), HandClock()
    budgets = budgets_on(database, BudgetRule(name="b", per=("principal",), calls=9), clock=clock)
    count = DELETED_AT_ONCE + 10
    for number in range(count):
        await budgets.reserve(spender(principal=f"uid:{number}"), takes())
    assert await CounterTable(database).prune(NOON) == 0
    later = NOON + timedelta(days=KEPT_DAYS + 2)
    assert await CounterTable(database).prune(later) == count
    total = await database.read(
        lambda connection: connection.execute(select(func.count()).select_from(COUNTERS)).scalar()
    )
    assert total == 0


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


@pytest.mark.parametrize("text", ["-1", "NaN", "Infinity", "1e", "", "x"])
async def test_invalid_counter_amount_is_refused_at_start(reopen: Reopen, text: str) -> None:
    database = reopen()
    await use(budgets_on(database, a_total(5)), 0)
    await database.write(
        lambda connection: connection.execute(update(COUNTERS), {"reserved": text})
    )
    with pytest.raises(ValueError, match="no amount"):
        budgets_on(database, a_total(5))
