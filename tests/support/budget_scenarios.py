"""Budget scenarios to be killed at every commit; see `crash_points`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fumehood.budgets.ledger import Budgets
from fumehood.budgets.settings import BudgetRule, Period
from fumehood.budgets.store import CounterTable
from fumehood.storage.database import open_database

from .budgets import HandClock, spender, takes
from .crash_points import Hook, Say

LIMIT = 100
RULES = (
    BudgetRule(name="ever", period=Period.TOTAL, tokens=LIMIT),
    BudgetRule(name="each", per=("session",), tokens=LIMIT, calls=20),
)
DATABASE = "state.db"
MOST_UNTOLD = 50
"""Tokens of one call that may be held on disk without being reported."""


async def spending(home: Path, hook: Hook, say: Say) -> None:
    """Calls that spend less than reserved, nothing, exactly it, and more after an approval."""
    database = open_database(home / DATABASE, commit_hook=hook)
    budgets = Budgets(RULES, CounterTable(database), HandClock())
    try:
        await _calls(budgets, say)
        say("closing")
        await budgets.close()
        say("closed")
    finally:
        database.close()


async def _calls(budgets: Budgets, say: Say) -> None:
    first = await budgets.reserve(spender(session="s"), takes(tokens=30))
    say("hold a 30")
    second = await budgets.reserve(spender(session="t"), takes(tokens=20))
    say("hold b 20")
    say("take a 10")
    first.settle(takes(tokens=10))
    say("take b 0")
    second.release()
    for number in range(4):
        third = await budgets.reserve(spender(session="s"), takes(tokens=15))
        say(f"hold c{number} 15")
        say(f"take c{number} 15")
        third.settle(takes(tokens=15))
    forced = await budgets.reserve(spender(session="s"), takes(tokens=50), force=True)
    say("hold d 50")
    say("take d 50")
    forced.settle(takes(tokens=50))
    await budgets.prune(HandClock()())


@dataclass(frozen=True)
class Told:
    """The lines a scenario had printed before it died."""

    said: tuple[str, ...]

    @property
    def taken(self) -> int:
        """Tokens that calls spent or may have spent."""
        figures: dict[str, int] = {}
        for line in self.said:
            if line[:4] in ("hold", "take"):
                _, call, tokens = line.split()
                figures[call] = int(tokens)
        return sum(figures.values())
