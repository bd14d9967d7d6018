"""Budgets: reserve what a call is expected to take before it runs, settle what it took after.

Above it the spine, below it `store/counters`. Decided is in memory, between two awaits, so that
calls at once cannot share the last of a budget. Invariant: what is spent or held is at most the
mark that is durable, except where a call has just taken more than was expected of it. A mark
is ahead by a block, so that most calls write nothing; a start takes it for spent. A crash can
therefore make a budget smaller, by two blocks and what was held, and never larger.

Figures are whole numbers in here: calls, tokens, millionths of money.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from types import TracebackType
from typing import Self

from fumehood.model.budget import (
    Amounts,
    BudgetRule,
    BudgetStanding,
    Exceeded,
    Period,
    Spender,
    Subject,
    Unit,
    subject_of,
)
from fumehood.model.envelope import UsageReport
from fumehood.model.errors import QuotaExceeded
from fumehood.model.identity import Principal
from fumehood.model.json_types import JsonObject
from fumehood.model.tool import ToolDefinition
from fumehood.model.usage import TextKind, TokenCounter, money
from fumehood.store.counters import CounterKey, CounterRow, CounterTable
from fumehood.wire import strict_json

BLOCKS = 20
"""A mark is ahead by a limit's 20th: so many durable writes use up a whole budget, and so much
of it a crash may cost."""

MICROS = 6
"""Decimal places of money, as in envelopes."""

MAX_REMEMBERED = 4096
"""Pairs of tool and agent whose budgets are known without looking."""

TOTAL = Period.TOTAL.value

UNITS = (Unit.CALLS, Unit.TOKENS, Unit.MONEY)

_Figures = tuple[int, int, int]
"""Of one call: calls, tokens, millionths of money."""


class Reservation:
    """What is held for one call. Ended by `settle` or `release`, whichever comes first.

    A context manager, too: leaving it releases what was not settled.
    """

    __slots__ = ("_accounts", "_budgets", "_held", "_is_open")

    def __init__(self, budgets: Budgets, accounts: Sequence[_Account], held: _Figures) -> None:
        self._budgets = budgets
        self._accounts = accounts
        self._held = held
        self._is_open = True
        for account in accounts:
            account.hold(held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.release()

    def settle(self, actual: Amounts) -> None:
        """The call has run and took this, be it more or less than was held."""
        if self._is_open:
            self._is_open = False
            taken = _figures(actual, ROUND_HALF_EVEN)
            self._budgets.spend(self._accounts, self._held, taken)

    def release(self) -> None:
        """The call has not run: everything is left as if it had never been asked for."""
        if self._is_open:
            self._is_open = False
            self._budgets.let_go(self._accounts, self._held)


class Budgets:
    """Every budget with its counters. `now` is in UTC.

    Raises:
        ReadFailed: the counters cannot be read.
        ValueError: they hold what no engine wrote.
    """

    def __init__(
        self, rules: Sequence[BudgetRule], counters: CounterTable, now: Callable[[], datetime]
    ) -> None:
        self._rules = tuple(_Rule.of(rule) for rule in rules)
        self._table = counters
        self._now = now
        self._accounts: dict[CounterKey, _Account] = {}
        self._covering: dict[tuple[str, str | None], tuple[_Rule, ...]] = {}
        self.overdue = asyncio.Event()
        """Never set: what is over may wait for the next hour."""
        self.is_empty = not rules
        if rules:
            day = _day(now())
            self._load(counters.load_now(day), day)

    def exceeded(self, spender: Spender, estimate: Amounts) -> Exceeded | None:
        """The budget that has too little left for the call; of several, the last to reset.

        Looks into memory only: a session that was not heard of since the start has spent nothing.
        """
        keys = self._keys(spender)
        known = [self._accounts.get(key) or _Account(rule, key) for rule, key in keys]
        return _exceeded(known, _figures(estimate, ROUND_CEILING))

    async def reserve(
        self, spender: Spender, estimate: Amounts, *, force: bool = False
    ) -> Reservation:
        """Hold what the call is expected to take; `force` also where too little is left.

        Raises:
            QuotaExceeded: what is left, and when it resets.
            WriteFailed, ReadFailed: it could not be made durable, so nothing is held.
        """
        if self.is_empty:
            return Reservation(self, (), (0, 0, 0))
        accounts = await self._accounts_of(spender)
        needed = _figures(estimate, ROUND_CEILING)
        exceeded = None if force else _exceeded(accounts, needed)
        if exceeded is not None:
            raise refusal(exceeded, self._now())
        reservation = Reservation(self, accounts, needed)
        short = [account for account in accounts if account.is_short]
        if short:
            try:
                await self._reserve_blocks(short)
            except BaseException:
                reservation.release()
                raise
        return reservation

    def spend(self, accounts: Sequence[_Account], held: _Figures, taken: _Figures) -> None:
        """Count what a call took in place of what was held for it. Neither waits nor fails."""
        for account in accounts:
            account.settle(held, taken)
        short = [account for account in accounts if account.is_short]
        if short:  # it took more than anybody expected
            rows = [row for account in short for row in account.rows(account.used)]
            self._table.reserve_soon(rows, self._now())
        self._lower(accounts)

    def let_go(self, accounts: Sequence[_Account], held: _Figures) -> None:
        """Take back what was held. Neither waits nor fails."""
        for account in accounts:
            account.settle(held, (0, 0, 0))
            is_known = self._accounts.get(account.key) is account
            if is_known and account.is_unused and account.key.subject.session is not None:
                # A session's name costs nothing: names that are none would fill the table.
                del self._accounts[account.key]
                self._table.forget_soon(account.key)
        self._lower(account for account in accounts if account.key in self._accounts)

    def standings(self, principal: Principal | None = None) -> list[BudgetStanding]:
        """What is left now, of every budget, or of those that limit one principal."""
        current = {key: account for key, account in self._accounts.items() if self._is_now(key)}
        day = _day(self._now())
        for rule in self._rules:
            key = CounterKey(rule.name, self._plain_subject(rule, principal), rule.period(day))
            if set(rule.rule.per) <= ({"principal"} if principal is not None else set()):
                current.setdefault(key, _Account(rule, key))
        seen = (account for account in current.values() if account.is_for(principal))
        ordered = sorted(seen, key=lambda account: (account.key.budget, account.key.subject.text))
        return [standing for account in ordered for standing in account.standings()]

    def unmatched(self, tools: Iterable[str]) -> list[str]:
        """Names of budgets that cover none of these tools, as a misspelt one does."""
        names = list(tools)
        return [
            rule.name
            for rule in self._rules
            if rule.rule.tools and not any(_any(rule.rule.tools, name) for name in names)
        ]

    async def prune(self, now: datetime) -> int:
        """Forget counters that are over, and rows that are over for long; how many rows went.

        Raises:
            ReadFailed, WriteFailed: the rest stays until the next time.
        """
        if self.is_empty:
            return 0
        idle = [account for account in self._accounts.values() if self._may_forget(account)]
        for account in idle:
            del self._accounts[account.key]
        if idle:
            await self._give_back(idle)
        return await self._table.prune(now)

    async def close(self) -> None:
        """Give back what was reserved ahead. Without it, that counts as spent at the next start.

        Raises:
            WriteFailed: it does.
        """
        if not self.is_empty:
            # Also where nothing is left to give: what nobody waited for is written then, too.
            await self._give_back([one for one in self._accounts.values() if not any(one.held)])

    def _load(self, rows: Iterable[CounterRow], day: str) -> None:
        """What is reserved, counts: it may have been spent."""
        rules = {rule.name: rule for rule in self._rules}
        for row in rows:
            rule = rules.get(row.key.budget)
            if rule is not None and rule.counts_by(row.key, rule.period(day)):
                account = self._accounts.setdefault(row.key, _Account(rule, row.key))
                account.begin_with(row)

    def _keys(self, spender: Spender) -> list[tuple[_Rule, CounterKey]]:
        day = _day(self._now())
        return [
            (rule, CounterKey(rule.name, subject_of(spender, rule.rule.per), rule.period(day)))
            for rule in self._rules_for(spender)
        ]

    def _rules_for(self, spender: Spender) -> tuple[_Rule, ...]:
        pair = (spender.tool, spender.agent_id)
        found = self._covering.get(pair)
        if found is None:
            if len(self._covering) >= MAX_REMEMBERED:
                self._covering.clear()
            found = tuple(rule for rule in self._rules if rule.covers(*pair))
            self._covering[pair] = found
        return found

    async def _accounts_of(self, spender: Spender) -> list[_Account]:
        """The counters of a call; those that memory does not have are looked for on the disk."""
        keys = self._keys(spender)
        unknown = {key: rule for rule, key in keys if key not in self._accounts}
        if unknown:
            found = {key: _Account(rule, key) for key, rule in unknown.items()}
            for row in await self._table.find(unknown):
                found[row.key].begin_with(row)
            for key, account in found.items():
                self._accounts.setdefault(key, account)
        return [self._accounts[key] for _, key in keys]

    async def _reserve_blocks(self, accounts: Sequence[_Account]) -> None:
        marks = [(account, account.next_marks()) for account in accounts]
        rows = [row for account, figures in marks for row in account.rows(figures)]
        for account in accounts:
            account.writing += 1
        try:
            await self._table.reserve(rows, self._now())
        except BaseException:  # it may be written all the same
            for account in accounts:
                account.is_unsure = True
            raise
        finally:
            for account in accounts:
                account.writing -= 1
        for account, figures in marks:
            account.marks = _highest(account.marks, figures)

    def _lower(self, accounts: Iterable[_Account]) -> None:
        """Where much was held that was not spent, a crash would cost more than it must."""
        ahead = [account for account in accounts if account.is_far_ahead and not account.writing]
        if ahead:
            for account in ahead:  # in memory first, as when it is given back
                account.marks = account.next_marks()
            rows = [row for account in ahead for row in account.rows(account.marks)]
            self._table.give_back_soon(rows, self._now())

    async def _give_back(self, accounts: Iterable[_Account]) -> None:
        """Of those that nothing is held from. In memory first: whoever spends from now on, writes
        after this has been written."""
        rows: list[CounterRow] = []
        for account in accounts:
            if account.is_ahead:
                account.marks, account.is_unsure = list(account.spent), False
                rows += account.rows(account.spent)
        await self._table.give_back(rows, self._now())

    def _may_forget(self, account: _Account) -> bool:
        """Nothing is held, and its day is over, or nobody used its session for an hour."""
        was_used, account.was_used = account.was_used, False
        is_idle_session = account.key.subject.session is not None and not was_used
        return not any(account.held) and (is_idle_session or not self._is_now(account.key))

    def _is_now(self, key: CounterKey) -> bool:
        return key.period in (TOTAL, _day(self._now()))

    @staticmethod
    def _plain_subject(rule: _Rule, principal: Principal | None) -> Subject:
        is_by_principal = principal is not None and "principal" in rule.rule.per
        return Subject(principal=principal.id) if principal and is_by_principal else Subject()


@dataclass(frozen=True, slots=True)
class _Rule:
    """A budget's rule with its limits as figures."""

    rule: BudgetRule
    limits: tuple[tuple[int, int], ...]
    """The places of the units that have a limit, and the limits."""

    @classmethod
    def of(cls, rule: BudgetRule) -> _Rule:
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
        if self.rule.tools and not _any(self.rule.tools, tool):
            return False
        return not self.rule.agents or (agent_id is not None and _any(self.rule.agents, agent_id))


@dataclass(slots=True, eq=False)
class _Account:
    """One counter for each unit, of one budget, subject and period. Three figures each."""

    rule: _Rule
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
            and (not names.agents or any(_any(names.agents, one) for one in principal.agents))
        )

    def hold(self, needed: _Figures) -> None:
        self.was_used = True
        for i, _ in self.rule.limits:
            self.held[i] += needed[i]

    def settle(self, held: _Figures, taken: _Figures) -> None:
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

    def exceeded(self, needed: _Figures) -> Exceeded | None:
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


def estimate_of(tool: ToolDefinition, arguments: JsonObject, counter: TokenCounter) -> Amounts:
    """What a call is expected to take: one call, the arguments' tokens, and `cost_per_use`.

    `arguments` are those that the caller sees, as they are accounted. What the answer, the tool
    itself and resources take, is known only after.
    """
    text = strict_json.dumps(arguments).decode()
    return Amounts(1, counter.count(text, TextKind.JSON), tool.cost_per_use)


def taken_by(usage: UsageReport) -> Amounts:
    """What a call that ran took, as its envelope says."""
    tokens = usage.input_tokens + usage.output_tokens + usage.tokens_used
    return Amounts(1, tokens, Decimal(usage.cost))


def refusal(exceeded: Exceeded, now: datetime) -> QuotaExceeded:
    """The error: what is left, and when it resets."""
    resets_at = exceeded.resets_at
    if resets_at is None:
        when, wait_ms = "It does not reset: its owner has to raise it. Do not retry.", None
    else:
        when = f"It resets at {_in_words(resets_at)}. Do not retry before then."
        wait_ms = max(1, -(-(resets_at - now) // timedelta(milliseconds=1)))
    what = "(money)" if exceeded.unit is Unit.MONEY else exceeded.unit.value
    return QuotaExceeded(
        f"The budget {exceeded.budget} has {exceeded.left} of {exceeded.limit} {what} left, and "
        f"this call needs {exceeded.needed}. {when}",
        retry_after_ms=wait_ms,
        details={
            "budget": exceeded.budget,
            "unit": exceeded.unit.value,
            "limit": exceeded.limit,
            "left": exceeded.left,
            "resets_at": None if resets_at is None else _in_words(resets_at),
        },
    )


def _exceeded(accounts: Iterable[_Account], needed: _Figures) -> Exceeded | None:
    found = [exceeded for one in accounts if (exceeded := one.exceeded(needed)) is not None]
    if not found:
        return None
    never = datetime.max.replace(tzinfo=UTC)
    return max(found, key=lambda exceeded: exceeded.resets_at or never)


def _figures(amounts: Amounts, rounding: str) -> _Figures:
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


def _highest(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [max(pair) for pair in zip(one, other, strict=True)]


def _day(moment: datetime) -> str:
    return moment.date().isoformat()


def _in_words(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    """Exactly, or with a written `*` for any characters; linear in both."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == name
    *middle, last = rest
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


__all__ = ["Budgets", "Reservation", "estimate_of", "refusal", "taken_by"]
