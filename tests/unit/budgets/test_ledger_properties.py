"""Whatever is asked, settled, released, crashed and set back: no budget is ever overspent.

The model knows what calls have really taken. A crash forgets everything that is in memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fumehood.budgets.accounts import BLOCKS
from fumehood.budgets.ledger import Budgets, Reservation
from fumehood.budgets.model import Subject
from fumehood.budgets.settings import BudgetRule, Period
from fumehood.budgets.store import CounterKey, CounterRow, CounterTable
from fumehood.core.errors import QuotaExceeded
from fumehood.storage.database import Database, open_database
from support.budgets import HandClock, budgets_on, spender, takes

pytestmark = pytest.mark.row("E4")

LIMIT = 200
TOTAL = BudgetRule(name="total", period=Period.TOTAL, tokens=LIMIT)
DAILY = BudgetRule(name="daily", per=("agent",), period=Period.DAY, tokens=LIMIT)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 120), st.sampled_from([None, "a", "b"])),
        st.tuples(st.just("settle"), st.integers(0, 5), st.floats(0, 1)),
        st.tuples(st.just("release"), st.integers(0, 5), st.none()),
        st.tuples(st.just("crash"), st.just(0), st.none()),
        st.tuples(st.just("stop"), st.just(0), st.none()),
        st.tuples(st.just("clock"), st.integers(-2, 2), st.none()),
        st.tuples(st.just("prune"), st.just(0), st.none()),
    ),
    max_size=40,
)


@dataclass
class World:
    """An engine's budgets, and what really happened."""

    database: Database
    clock: HandClock = field(default_factory=HandClock)
    running: list[tuple[Reservation, int, CounterKey]] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)
    """Tokens really taken, all together and each day's of each agent."""

    crashes: int = 0
    lost: int = 0
    """Tokens that calls held which a crash has ended: they may count as taken."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.budgets = budgets_on(self.database, TOTAL, DAILY, clock=self.clock)

    async def do(self, step: str, number: int, more: Any) -> None:
        if step == "reserve":
            await self.reserve(number, more)
        elif step in ("settle", "release") and self.running:
            reservation, held, key = self.running.pop(number % len(self.running))
            if step == "settle":
                taken = int(held * more)
                reservation.settle(takes(tokens=taken))
                self.taken["total"] += taken
                self.taken[f"{key.subject.text} {key.period}"] += taken
            else:
                reservation.release()
        elif step == "crash":
            self.crashes += 1
            self.lost += sum(held for _, held, _ in self.running)
            # What a call has done by then, it has done: the worst that there is.
            for _, held, key in self.running:
                self.taken["total"] += held
                self.taken[f"{key.subject.text} {key.period}"] += held
            self.running.clear()
            self.start()
        elif step == "stop":
            for reservation, _, _ in self.running:
                reservation.release()
            self.running.clear()
            await self.budgets.close()
            self.start()
        elif step == "clock":
            self.clock.moment += timedelta(days=number)
        elif step == "prune":
            await self.budgets.prune(self.clock.moment)

    async def reserve(self, tokens: int, agent: str | None) -> None:
        subject = Subject(agent=agent) if agent else Subject(principal="uid:1")
        key = CounterKey("daily", subject, self.clock.moment.date().isoformat())
        try:
            reservation = await self.budgets.reserve(spender(agent=agent), takes(tokens=tokens))
        except QuotaExceeded:
            event("refused")
        else:
            self.running.append((reservation, tokens, key))

    async def rows(self) -> list[CounterRow]:
        return await CounterTable(self.database).find(
            [CounterKey("total", Subject(), "total"), *{key for _, _, key in self.running}]
        )

    async def check(self) -> None:
        held = sum(held for _, held, _ in self.running)
        assert all(taken <= LIMIT for taken in self.taken.values())
        assert self.taken["total"] + held <= LIMIT
        # What is on the disk now is enough for a start that knows nothing else.
        durable = {(row.key, row.unit): row.reserved for row in await self.rows()}
        total = CounterKey("total", Subject(), "total")
        assert sum(v for (key, _), v in durable.items() if key == total) >= (
            self.taken["total"] + held
        )
        (standing,) = (one for one in self.budgets.standings() if one.budget == "total")
        assert int(standing.spent) >= self.taken["total"]
        # Nothing leaks but what crashes may have cost.
        leaked = int(standing.spent) - self.taken["total"]
        assert leaked <= self.crashes * 2 * (LIMIT // BLOCKS)


async def live(steps: list[tuple[str, int, Any]]) -> None:
    database = open_database(None)
    try:
        world = World(database)
        for step in steps:
            await world.do(*step)
            await world.check()
        event(f"crashes: {min(world.crashes, 3)}")
    finally:
        database.close()


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_no_budget_is_overspent_and_only_crashes_cost_anything(
    steps: list[tuple[str, int, Any]],
) -> None:
    asyncio.run(live(steps))


def test_control_a_budget_that_trusted_what_was_settled_would_be_overspent() -> None:
    """Without the marks the property fails: a start would know nothing of what ran."""

    class Trusting(CounterTable):
        def load_now(self, day: str) -> list[CounterRow]:
            rows = super().load_now(day)
            return [CounterRow(row.key, row.unit, row.settled, row.settled) for row in rows]

    class TrustingWorld(World):
        def start(self) -> None:
            self.budgets = Budgets([TOTAL], Trusting(self.database), self.clock)

    async def overspend() -> None:
        database = open_database(None)
        try:
            world = TrustingWorld(database)
            for step in [("reserve", 70, None), ("crash", 0, None)] * 3:
                await world.do(*step)
            await world.check()
        finally:
            database.close()

    with pytest.raises(AssertionError):
        asyncio.run(overspend())
