"""Counters of budgets in memory: one account for each limit of a budget, subject and period.

Below `budgets/ledger`, which decides. Figures are integers here: calls, tokens, millionths of
money.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_FLOOR, Decimal

from fumehood.budgets.model import (
    Amounts,
    BudgetStanding,
    Exceeded,
    Spender,
    Subject,
    Unit,
    subject_of,
)
from fumehood.budgets.settings import BudgetRule, Period
from fumehood.budgets.store import CounterKey, CounterRow
from fumehood.core.identity import Principal
from fumehood.core.names import compile_glob
from fumehood.core.usage import money

BLOCKS = 20
"""A mark is one 20th of the limit ahead. A whole budget costs that many durable writes, and a crash
can lose that share of it."""

MICROS = 6
"""Decimal places of money, as in envelopes."""

TOTAL = Period.TOTAL.value

UNITS = (Unit.CALLS, Unit.TOKENS, Unit.MONEY)

Figures = tuple[int, int, int]
"""Amounts of one call: calls, tokens, millionths of money."""


@dataclass(frozen=True, slots=True)
class LimitedRule:
    """One limit of a budget rule, as an integer."""

    rule: BudgetRule
    place: int
    """The position of its unit in `Figures`."""
    limit: int

    @classmethod
    def all_of(cls, rule: BudgetRule) -> list[LimitedRule]:
        """The limits of a rule."""
        allowed = None if rule.money is None else _micros(rule.money, ROUND_FLOOR)
        limits = (rule.calls, rule.tokens, allowed)
        return [cls(rule, place, limit) for place, limit in enumerate(limits) if limit is not None]

    @property
    def unit(self) -> Unit:
        return UNITS[self.place]

    def key(self, subject: Subject, day: str) -> CounterKey:
        """The key of today's counter."""
        period = TOTAL if self.rule.period is Period.TOTAL else day
        return CounterKey(self.rule.name, subject, period, self.unit)

    def counts_by(self, key: CounterKey, day: str) -> bool:
        """Whether a stored counter belongs to this rule; its `per` or period may have changed."""
        of = key.subject
        spender = Spender(of.principal or "", of.agent, of.session, of.tool or "")
        return key == self.key(subject_of(spender, self.rule.per), day)

    def covers(self, tool: str, agent_id: str | None) -> bool:
        """Whether it counts calls of this tool by this agent."""
        if self.rule.tools and not any_matches(self.rule.tools, tool):
            return False
        return not self.rule.agents or (
            agent_id is not None and any_matches(self.rule.agents, agent_id)
        )


@dataclass(slots=True, eq=False)
class Account:
    """One limit of a budget, for one subject and period."""

    rule: LimitedRule
    key: CounterKey
    spent: int = 0
    held: int = 0
    mark: int = 0
    """The figure up to which spending is durable."""
    was_used: bool = True
    writing: int = 0
    """Number of higher marks that are being written."""
    is_unsure: bool = False
    """The disk may have a higher mark, because the wait for its write was abandoned."""

    @property
    def used(self) -> int:
        """Spent plus held."""
        return self.spent + self.held

    @property
    def is_short(self) -> bool:
        """Whether more is spent or held than is durable."""
        return self.spent + self.held > self.mark

    @property
    def is_ahead(self) -> bool:
        """Whether more is reserved than spent, or may be."""
        return self.is_unsure or self.mark != self.spent

    @property
    def is_far_ahead(self) -> bool:
        """Whether more than two blocks are reserved that no call holds."""
        return self.mark - self.spent - self.held > 2 * (self.rule.limit // BLOCKS)

    @property
    def resets_at(self) -> datetime | None:
        """The end of its day."""
        if self.key.period == TOTAL:
            return None
        day = date.fromisoformat(self.key.period)
        return datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)

    def is_for(self, principal: Principal | None) -> bool:
        """Whether it limits this principal; None means all principals."""
        if principal is None:
            return True
        owner, agent, names = self.key.subject.principal, self.key.subject.agent, self.rule.rule
        return (
            (owner is None or owner == principal.id)
            and (agent is None or agent in principal.agents)
            and (
                not names.agents or any(any_matches(names.agents, one) for one in principal.agents)
            )
        )

    def hold(self, needed: Figures) -> None:
        self.was_used = True
        self.held += needed[self.rule.place]

    def settle(self, held: Figures, taken: Figures) -> None:
        self.held -= held[self.rule.place]
        self.spent += taken[self.rule.place]

    @property
    def next_mark(self) -> int:
        """One block ahead of the use, but not beyond the limit."""
        limit = self.rule.limit
        return max(self.used, min(limit, self.used + limit // BLOCKS))

    def row(self, reserved: int) -> CounterRow:
        """The row for the database."""
        return CounterRow(self.key, self.spent, reserved)

    def exceeded(self, needed: Figures) -> Exceeded | None:
        more, rule = needed[self.rule.place], self.rule
        if self.spent + self.held + more <= rule.limit:
            return None
        return Exceeded(
            rule.rule.name,
            rule.unit,
            limit=_shown(rule, rule.limit),
            left=_shown(rule, max(0, rule.limit - self.used)),
            needed=_shown(rule, more),
            resets_at=self.resets_at,
            subject=self.key.subject,
        )

    def standing(self) -> BudgetStanding:
        rule = self.rule
        return BudgetStanding(
            budget=rule.rule.name,
            subject=self.key.subject.parts,
            period=rule.rule.period,
            unit=rule.unit,
            limit=_shown(rule, rule.limit),
            spent=_shown(rule, self.spent),
            held=_shown(rule, self.held),
            left=_shown(rule, max(0, rule.limit - self.used)),
            resets_at=self.resets_at,
        )


def figures_of(amounts: Amounts, rounding: str) -> Figures:
    return (
        max(0, amounts.calls),
        max(0, amounts.tokens),
        max(0, _micros(amounts.money, rounding)),
    )


def _micros(amount: Decimal, rounding: str) -> int:
    if not amount:
        return 0
    return int(amount.scaleb(MICROS).to_integral_value(rounding))


def _shown(rule: LimitedRule, figure: int) -> int | str:
    """A figure as users see it."""
    return money(Decimal(figure).scaleb(-MICROS)) if rule.unit is Unit.MONEY else figure


def day_of(moment: datetime) -> str:
    return moment.date().isoformat()


def any_matches(patterns: Iterable[str], name: str) -> bool:
    return any(compile_glob(pattern)(name) for pattern in patterns)


__all__ = [
    "BLOCKS",
    "TOTAL",
    "Account",
    "Figures",
    "LimitedRule",
    "any_matches",
    "day_of",
    "figures_of",
]
