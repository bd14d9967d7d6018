"""Counters of budgets in memory: one account for each budget, subject and period.

Below `budgets/ledger`, which decides. Figures are integers here: calls, tokens, millionths of
money.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from fumehood.budgets.model import (
    Amounts,
    BudgetStanding,
    Exceeded,
    Spender,
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
"""Of one call: calls, tokens, millionths of money."""


@dataclass(frozen=True, slots=True)
class LimitedRule:
    """A budget rule with its limits as integers."""

    rule: BudgetRule
    limits: tuple[tuple[int, int], ...]
    """The position of each limited unit, and its limit."""

    @classmethod
    def of(cls, rule: BudgetRule) -> LimitedRule:
        allowed = None if rule.money is None else _micros(rule.money, ROUND_FLOOR)
        limits = (rule.calls, rule.tokens, allowed)
        given = ((place, limit) for place, limit in enumerate(limits) if limit is not None)
        return cls(rule, tuple(given))

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def is_total(self) -> bool:
        return self.rule.period is Period.TOTAL

    def period(self, day: str) -> str:
        """The period of today's counter."""
        return TOTAL if self.is_total else day

    def counts_by(self, key: CounterKey, period: str) -> bool:
        """Whether a stored counter belongs to this rule; its `per` or period may have changed."""
        of = key.subject
        spender = Spender(of.principal or "", of.agent, of.session, of.tool or "")
        return key.period == period and subject_of(spender, self.rule.per) == of

    def covers(self, tool: str, agent_id: str | None) -> bool:
        """Whether it counts calls of this tool by this agent."""
        if self.rule.tools and not any_matches(self.rule.tools, tool):
            return False
        return not self.rule.agents or (
            agent_id is not None and any_matches(self.rule.agents, agent_id)
        )


@dataclass(slots=True, eq=False)
class Account:
    """One budget, subject and period: three figures for each unit."""

    rule: LimitedRule
    key: CounterKey
    spent: list[int] = field(default_factory=lambda: [0, 0, 0])
    held: list[int] = field(default_factory=lambda: [0, 0, 0])
    marks: list[int] = field(default_factory=lambda: [0, 0, 0])
    """The figures up to which spending is durable."""
    was_used: bool = True
    writing: int = 0
    """Number of higher marks that are being written."""
    is_unsure: bool = False
    """The disk may have a higher mark, because the wait for its write was abandoned."""

    @property
    def used(self) -> list[int]:
        """Spent plus held."""
        return [spent + held for spent, held in zip(self.spent, self.held, strict=True)]

    @property
    def is_short(self) -> bool:
        """Whether more is spent or held than is durable."""
        for i, _ in self.rule.limits:  # noqa: SIM110  # on the way of every call: no generator
            if self.spent[i] + self.held[i] > self.marks[i]:
                return True
        return False

    @property
    def is_ahead(self) -> bool:
        """Whether more is reserved than spent, or may be."""
        return self.is_unsure or any(self.marks[i] != self.spent[i] for i, _ in self.rule.limits)

    @property
    def is_far_ahead(self) -> bool:
        """Whether more than two blocks are reserved that no call holds."""
        for i, limit in self.rule.limits:
            if self.marks[i] - self.spent[i] - self.held[i] > 2 * (limit // BLOCKS):
                return True
        return False

    @property
    def is_unused(self) -> bool:
        return not any(self.spent) and not any(self.held)

    @property
    def resets_at(self) -> datetime | None:
        """The end of its day."""
        if self.rule.is_total:
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
        for i, _ in self.rule.limits:
            self.held[i] += needed[i]

    def settle(self, held: Figures, taken: Figures) -> None:
        for i, _ in self.rule.limits:
            self.held[i] -= held[i]
            self.spent[i] += taken[i]

    def begin_with(self, row: CounterRow) -> None:
        i = UNITS.index(row.unit)
        figure = _micros(row.reserved, ROUND_CEILING) if i == 2 else int(row.reserved)
        self.spent[i] = self.marks[i] = figure

    def next_marks(self) -> list[int]:
        """One block ahead of the use, but not beyond the limit."""
        marks = self.used
        for i, limit in self.rule.limits:
            marks[i] = max(marks[i], min(limit, marks[i] + limit // BLOCKS))
        return marks

    def rows(self, reserved: Sequence[int]) -> list[CounterRow]:
        """Rows for the database, one for each limited unit."""
        return [
            CounterRow(self.key, UNITS[i], _amount(i, self.spent[i]), _amount(i, reserved[i]))
            for i, _ in self.rule.limits
        ]

    def exceeded(self, needed: Figures) -> Exceeded | None:
        for i, limit in self.rule.limits:
            used = self.spent[i] + self.held[i]
            if used + needed[i] > limit:
                return Exceeded(
                    self.rule.name,
                    UNITS[i],
                    limit=_shown(i, limit),
                    left=_shown(i, max(0, limit - used)),
                    needed=_shown(i, needed[i]),
                    resets_at=self.resets_at,
                    subject=self.key.subject,
                )
        return None

    def standings(self) -> list[BudgetStanding]:
        return [
            BudgetStanding(
                budget=self.rule.name,
                subject=self.key.subject.parts,
                period=self.rule.rule.period,
                unit=UNITS[i],
                limit=_shown(i, limit),
                spent=_shown(i, self.spent[i]),
                held=_shown(i, self.held[i]),
                left=_shown(i, max(0, limit - self.spent[i] - self.held[i])),
                resets_at=self.resets_at,
            )
            for i, limit in self.rule.limits
        ]


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


def _amount(place: int, figure: int) -> Decimal:
    """A figure as it is stored."""
    return Decimal(figure).scaleb(-MICROS) if UNITS[place] is Unit.MONEY else Decimal(figure)


def _shown(place: int, figure: int) -> int | str:
    """A figure as users see it."""
    return money(_amount(place, figure)) if UNITS[place] is Unit.MONEY else figure


def highest(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [max(pair) for pair in zip(one, other, strict=True)]


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
    "highest",
]
