"""The counters of budgets in memory, one account for each budget, subject and period.

Below `budget`, which alone decides. Figures are whole numbers in here: calls, tokens,
millionths of money.
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
"""A mark is ahead by a limit's 20th: so many durable writes use up a whole budget, and so much
of it a crash may cost."""

MICROS = 6
"""Decimal places of money, as in envelopes."""

TOTAL = Period.TOTAL.value

UNITS = (Unit.CALLS, Unit.TOKENS, Unit.MONEY)

Figures = tuple[int, int, int]
"""Of one call: calls, tokens, millionths of money."""


@dataclass(frozen=True, slots=True)
class LimitedRule:
    """A budget's rule with its limits as figures."""

    rule: BudgetRule
    limits: tuple[tuple[int, int], ...]
    """The places of the units that have a limit, and the limits."""

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
        """Which of its counters is the one of today."""
        return TOTAL if self.is_total else day

    def counts_by(self, key: CounterKey, period: str) -> bool:
        """Whether a counter is still one of its own: `per` and period may have been others."""
        of = key.subject
        spender = Spender(of.principal or "", of.agent, of.session, of.tool or "")
        return key.period == period and subject_of(spender, self.rule.per) == of

    def covers(self, tool: str, agent_id: str | None) -> bool:
        """Whether it counts calls of this tool, made for this agent."""
        if self.rule.tools and not any_matches(self.rule.tools, tool):
            return False
        return not self.rule.agents or (
            agent_id is not None and any_matches(self.rule.agents, agent_id)
        )


@dataclass(slots=True, eq=False)
class Account:
    """One counter for each unit, of one budget, subject and period. Three figures each."""

    rule: LimitedRule
    key: CounterKey
    spent: list[int] = field(default_factory=lambda: [0, 0, 0])
    held: list[int] = field(default_factory=lambda: [0, 0, 0])
    marks: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Up to where spending is durable."""
    was_used: bool = True
    writing: int = 0
    """How many higher marks are on their way to the disk."""
    is_unsure: bool = False
    """A higher mark may be on the disk than here: the wait for it was given up."""

    @property
    def used(self) -> list[int]:
        """What is spent or held."""
        return [spent + held for spent, held in zip(self.spent, self.held, strict=True)]

    @property
    def is_short(self) -> bool:
        """More is spent or held than is durable."""
        for i, _ in self.rule.limits:  # noqa: SIM110  # on the way of every call: no generator
            if self.spent[i] + self.held[i] > self.marks[i]:
                return True
        return False

    @property
    def is_ahead(self) -> bool:
        """More is reserved than was spent, or may be."""
        return self.is_unsure or any(self.marks[i] != self.spent[i] for i, _ in self.rule.limits)

    @property
    def is_far_ahead(self) -> bool:
        """More than two blocks are reserved that nobody holds."""
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
        """Whether it is one that limits this principal; None asks for everybody."""
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
        """A block ahead of what is used, but not beyond the limit."""
        marks = self.used
        for i, limit in self.rule.limits:
            marks[i] = max(marks[i], min(limit, marks[i] + limit // BLOCKS))
        return marks

    def rows(self, reserved: Sequence[int]) -> list[CounterRow]:
        """As they are kept, one for each limited unit."""
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
    """A figure as it is kept."""
    return Decimal(figure).scaleb(-MICROS) if UNITS[place] is Unit.MONEY else Decimal(figure)


def _shown(place: int, figure: int) -> int | str:
    """A figure as people see it."""
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
