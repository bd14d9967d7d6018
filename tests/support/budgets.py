"""Budgets on a separate database, with a manual clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from fumehood.budgets.ledger import Budgets
from fumehood.budgets.model import Amounts, Spender
from fumehood.budgets.settings import BudgetRule
from fumehood.budgets.store import CounterTable
from fumehood.core.usage_table import Period
from fumehood.storage.database import Database

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@dataclass
class HandClock:
    """A manually set clock."""

    moment: datetime = NOON

    def __call__(self) -> datetime:
        return self.moment


def spender(
    tool: str = "calculator",
    *,
    principal: str = "uid:1",
    agent: str | None = None,
    session: str | None = None,
) -> Spender:
    """The subject of a call."""
    return Spender(principal, agent, session, tool)


def takes(calls: int = 1, tokens: int = 0, money: str = "0") -> Amounts:
    """The cost of a call."""
    return Amounts(calls, tokens, Decimal(money))


def a_total(calls: int, name: str = "all") -> BudgetRule:
    """A total budget of this many calls."""
    return BudgetRule(name=name, period=Period.TOTAL, calls=calls)


def budgets_on(database: Database, *rules: BudgetRule, clock: HandClock | None = None) -> Budgets:
    """Budgets as loaded at a start on this database."""
    return Budgets(rules, CounterTable(database), clock or HandClock())
