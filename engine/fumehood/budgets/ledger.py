"""The ledger of budgets: it reserves a call's expected cost before the call runs, and replaces it
by the actual cost afterwards.

The pipeline calls this module, which uses `budgets/store`. Each decision is made in memory without
an `await` in between, so two concurrent calls cannot both use the last amount of a budget.

Each counter has a *mark* in the database: the amount that calls may use in total before the engine
must write again. The used amount is what calls have spent, plus what is held for running calls.
Invariant: the used amount is at most the mark, except just after a call cost more than expected. A
mark is usually above the used amount, so most calls write nothing.

After a restart, the whole mark counts as spent, because the database does not record which calls
ran. Therefore, a crash can reduce what is left of a budget, but never increase it. To limit this
loss, a mark is set above the used amount only by half of what was used since the engine's start,
but by at least one step and at most one block.

In this module, all amounts are integers. Money is in millionths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from functools import lru_cache

from fumehood.budgets.model import (
    Amounts,
    Exceeded,
    Spender,
    Subject,
    subject_of,
)
from fumehood.budgets.settings import BudgetRule
from fumehood.budgets.store import CounterKey, CounterRow, CounterTable
from fumehood.core.envelope import UsageReport
from fumehood.core.errors import QuotaExceeded
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL, any_matches
from fumehood.core.tool import ToolDefinition
from fumehood.core.usage import TextKind, TokenCounter, money
from fumehood.core.usage_table import BudgetStanding, Period, Unit
from fumehood.protocol import strict_json

BLOCKS = 20
"""Number of blocks in one budget. A new mark is at most one block above the used amount. So the use
of a whole budget takes about this many database writes, and a few more after each start of the
engine. A crash can lose one block, or two blocks if calls cost less than expected.
"""

STEPS = 1000
"""Number of steps in one budget. A new mark is at least one step above the used amount, unless the
limit is lower. An engine that is killed just after its start loses no more than one step.
"""

MICROS = 6
"""Number of decimal places of money amounts, the same as in envelopes."""

TOTAL = Period.TOTAL.value

UNITS = tuple(Unit)

Figures = tuple[int, int, int, int, int]
"""The amounts that one call uses, in the order of `UNITS`. Money is in millionths."""

NOTHING: Figures = (0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class LimitedRule:
    """The limit of a budget rule on one unit, such as tokens. `limit` is an integer."""

    rule: BudgetRule
    place: int
    """The index of the limited unit in `Figures`."""
    limit: int

    @classmethod
    def all_of(cls, rule: BudgetRule) -> list[LimitedRule]:
        """Return the limits of a budget rule, one for each unit on which it has a limit."""
        allowed = None if rule.money is None else _micros(rule.money, ROUND_FLOOR)
        limits = (rule.calls, rule.tokens, allowed, rule.requests, rule.network_bytes)
        return [cls(rule, place, limit) for place, limit in enumerate(limits) if limit is not None]

    @property
    def unit(self) -> Unit:
        return UNITS[self.place]

    def key(self, subject: Subject, day: str) -> CounterKey:
        """Return the key of the counter for `subject` on `day`, which has the form `2026-01-31`. If
        the budget never resets, the day does not matter.
        """
        period = TOTAL if self.rule.period is Period.TOTAL else day
        return CounterKey(self.rule.name, subject, period, self.unit)

    def counts_by(self, key: CounterKey, day: str) -> bool:
        """Whether a stored counter still fits this rule on `day`. `key` is the counter's key.

        A counter of an earlier day does not fit a daily budget. A counter also does not fit if the
        rule's `per` or `period` has changed since the counter was stored.
        """
        of = key.subject
        spender = Spender(of.principal or "", of.agent, of.session, of.tool or "")
        return key == self.key(subject_of(spender, self.rule.per), day)

    def covers(self, tool: str, agent_id: str | None) -> bool:
        """Whether the rule limits calls of this tool by this agent. `agent_id` is None for a call
        without an agent.
        """
        if self.rule.tools and not any_matches(self.rule.tools, tool):
            return False
        return not self.rule.agents or (
            agent_id is not None and any_matches(self.rule.agents, agent_id)
        )


@dataclass(slots=True, eq=False)
class Account:
    """The counter of one `LimitedRule` for one subject and period. `spent` is the amount that ended
    calls have cost; `held` is the amount that is reserved for running calls.
    """

    rule: LimitedRule
    key: CounterKey
    spent: int = 0
    held: int = 0
    began: int = 0
    """The value of `spent` when the counter was read from the database."""
    mark: int = 0
    """The amount that calls may use in total before the engine must write to the database again."""
    was_used: bool = True
    """Whether a call has used the counter since `prune` last checked it."""
    writing: int = 0
    """Number of writes of a higher mark that have not ended yet."""
    is_unsure: bool = False
    """Whether the mark in the database may be higher than `mark`, because a write failed or was
    cancelled.
    """

    @property
    def used(self) -> int:
        """The spent and the held amount together."""
        return self.spent + self.held

    @property
    def is_short(self) -> bool:
        """Whether the used amount exceeds the mark. A mark is the amount up to which calls may use
        the budget before the engine must write to the database again.
        """
        return self.spent + self.held > self.mark

    @property
    def is_ahead(self) -> bool:
        """False if the mark in the database surely equals the spent amount, otherwise True. A mark
        is the amount that counts as spent after a restart.
        """
        return self.is_unsure or self.mark != self.spent

    @property
    def is_far_ahead(self) -> bool:
        """Whether the mark (the amount that counts as spent after a restart) exceeds the used
        amount by more than two blocks. A block is the part `1 / BLOCKS` of the budget's limit.
        """
        return self.mark - self.spent - self.held > 2 * (self.rule.limit // BLOCKS)

    @property
    def resets_at(self) -> datetime | None:
        """The time at which the counter's day ends, or None if the budget never resets."""
        if self.key.period == TOTAL:
            return None
        day = date.fromisoformat(self.key.period)
        return datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)

    def is_for(self, principal: Principal | None) -> bool:
        """Whether the counter limits `principal`. If `principal` is None, the result is True."""
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
        """The mark that the next write stores. A mark is the amount up to which calls may use the
        budget before the engine must write again. After a crash, it counts as spent.

        The mark is never below the used amount. Unless more than the budget's limit is used, the
        mark is at most the limit. The more has been used since the engine's start, the further the
        mark is above the used amount.
        """
        # An engine that is killed often has small marks, so it loses little of a budget.
        limit, since_start = self.rule.limit, self.used - self.began
        ahead = min(limit // BLOCKS, max(limit // STEPS, since_start // 2))
        return max(self.used, min(limit, self.used + ahead))

    def row(self, reserved: int) -> CounterRow:
        """Return the database row of the counter. `reserved` is the mark in this row, that is, the
        amount that counts as spent after a restart.
        """
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


class Reservation:
    """The amount that is held for one call in its budgets. The first call of `settle` or `release`
    ends the reservation; later calls do nothing.
    """

    __slots__ = ("_accounts", "_budgets", "_held", "_is_open")

    def __init__(self, budgets: Budgets, accounts: Sequence[Account], held: Figures) -> None:
        self._budgets = budgets
        self._accounts = accounts
        self._held = held
        self._is_open = True
        for account in accounts:
            account.hold(held)

    def settle(self, actual: Amounts) -> None:
        """End the reservation: replace the held amount by the actual cost, which may be higher or
        lower.

        The requests and bytes in `actual` are ignored. They must already have been charged by
        `take`.
        """
        if self._is_open:
            self._is_open = False
            taken = (*figures_of(actual, ROUND_HALF_EVEN)[:3], *self._held[3:])
            self._budgets.spend(self._accounts, self._held, taken)

    def take(self, *, requests: int = 0, passed_bytes: int = 0) -> bool:
        """Charge requests and bytes that a running program sends through the gateway.

        Return True if they were charged. If a budget has too little left, charge nothing and return
        False.
        """
        more = (0, 0, 0, requests, passed_bytes)
        touched = [one for one in self._accounts if more[one.rule.place]]
        if any(one.exceeded(more) for one in touched):
            return False
        for account in touched:
            account.hold(more)
        calls, tokens, micros, sent, passed = self._held
        self._held = (calls, tokens, micros, sent + requests, passed + passed_bytes)
        self._budgets.cover(touched)
        return True

    def release(self) -> None:
        """End the reservation without a cost, because the call did not run."""
        if self._is_open:
            self._is_open = False
            self._budgets.let_go(self._accounts, self._held)


class Budgets:
    """All budgets of one engine, with their counters. `now` returns the current time in UTC.

    Raises (from the constructor):
        ReadFailed: the counters cannot be read.
        ValueError: a counter in the database is invalid.
    """

    def __init__(
        self, rules: Sequence[BudgetRule], counters: CounterTable, now: Callable[[], datetime]
    ) -> None:
        self._table = counters
        self._now = now
        self._accounts: dict[CounterKey, Account] = {}
        self._covering = lru_cache(self._rules_covering)
        self.replace(rules)
        self.load()

    def replace(self, rules: Sequence[BudgetRule]) -> None:
        """Replace the present budget rules by `rules`. If a new rule has the name of a present one,
        limits the same unit, and has the same `per` and `period`, the spent amount is kept.
        """
        self._rules = tuple(one for rule in rules for one in LimitedRule.all_of(rule))
        self._covering.cache_clear()
        by_name, day = self._by_name(), day_of(self._now())
        for key, account in self._accounts.items():
            rule = by_name.get((key.name, key.unit))
            if rule is not None and rule.counts_by(key, day):
                account.rule = rule

    def load(self) -> None:
        """Read the counters from the database. This call blocks. It must be called only while the
        engine starts.

        The amounts that an earlier engine reserved count as spent.

        Raises:
            ReadFailed: the counters cannot be read.
            ValueError: a counter in the database is invalid.
        """
        if not self._rules:
            return
        by_name, day = self._by_name(), day_of(self._now())
        for key, _, reserved in self._table.load_now(day, TOTAL):
            rule = by_name.get((key.name, key.unit))
            if key not in self._accounts and rule is not None and rule.counts_by(key, day):
                self._accounts[key] = Account(
                    rule, key, spent=reserved, began=reserved, mark=reserved
                )

    @property
    def is_empty(self) -> bool:
        """Whether the engine has no budgets."""
        return not self._rules

    def exceeded(self, spender: Spender, estimate: Amounts) -> Exceeded | None:
        """Return the budget that has too little left for a call, or None if all have enough. If
        several have too little left, return the one that resets last.

        `estimate` is the expected cost of the call. Only counters in memory are read. If a
        session's counter is not in memory, nothing counts as spent in the session.
        """
        keys = self._keys(spender)
        known = [self._accounts.get(key) or Account(rule, key) for rule, key in keys]
        return _exceeded(known, figures_of(estimate, ROUND_CEILING))

    async def reserve(
        self, spender: Spender, estimate: Amounts, *, force: bool = False
    ) -> Reservation:
        """Hold the expected cost of a call in all budgets that cover the call. If `force` is True,
        hold the cost even if too little is left.

        Raises:
            QuotaExceeded: a budget has too little left. The error contains the remaining amount and
                the time at which the budget resets.
            WriteFailed, ReadFailed: the database failed, so nothing is held.
        """
        if self.is_empty:
            return Reservation(self, (), NOTHING)
        accounts = await self._accounts_of(spender)
        needed = figures_of(estimate, ROUND_CEILING)
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

    def spend(self, accounts: Sequence[Account], held: Figures, taken: Figures) -> None:
        """Replace the amount `held` for a call by the amount `taken`, which is the actual cost.
        This method neither waits nor fails.
        """
        for account in accounts:
            account.settle(held, taken)
        short = [account for account in accounts if account.is_short]
        if short:  # the call cost more than expected
            rows = [account.row(account.used) for account in short]
            self._table.reserve_soon(rows, self._now())
        self._lower(accounts)

    def cover(self, accounts: Sequence[Account]) -> None:
        """Raise the marks of those `accounts` whose used amount exceeds the mark. A mark is the
        amount that counts as spent after a restart.

        The marks are written to the database in the background. This method neither waits nor
        fails.
        """
        short = [account for account in accounts if account.is_short]
        if short:
            for account in short:
                account.mark = account.next_mark
            self._table.reserve_soon([one.row(one.mark) for one in short], self._now())

    def let_go(self, accounts: Sequence[Account], held: Figures) -> None:
        """Release the amount `held` for a call that did not run. This method neither waits nor
        fails.
        """
        for account in accounts:
            account.settle(held, NOTHING)
            is_known = self._accounts.get(account.key) is account
            if is_known and not account.used and account.key.subject.session is not None:
                # Callers can invent session ids. The counters of such sessions would fill the
                # table.
                del self._accounts[account.key]
                self._table.forget_soon(account.key)
        self._lower(account for account in accounts if account.key in self._accounts)

    def standings(self, principal: Principal | None = None) -> list[BudgetStanding]:
        """Return, for every budget, the amounts that are left, spent, and held for running calls.
        If `principal` is given, include only the budgets that limit this principal.
        """
        rules = set(self._rules)
        current = {
            key: account
            for key, account in self._accounts.items()
            if self._is_now(key) and account.rule in rules
        }
        day = day_of(self._now())
        for rule in self._rules:
            key = rule.key(self._plain_subject(rule, principal), day)
            if set(rule.rule.per) <= ({"principal"} if principal is not None else set()):
                current.setdefault(key, Account(rule, key))
        seen = (account for account in current.values() if account.is_for(principal))
        ordered = sorted(seen, key=lambda one: (one.key.name, one.key.subject.text, one.rule.place))
        return [account.standing() for account in ordered]

    def unmatched(self, tools: Iterable[str]) -> list[str]:
        """Return the names of the budgets that cover no registered tool, for example because of a
        typo. `tools` are the names of the registered tools.
        """
        names = list(tools)
        return [
            rule.name
            for rule in dict.fromkeys(one.rule for one in self._rules)
            if rule.tools
            and not any(tool.startswith(EXTERNAL) for tool in rule.tools)
            and not any(any_matches(rule.tools, name) for name in names)
        ]

    async def prune(self, now: datetime) -> int:
        """Drop counters that are no longer needed from memory, and delete expired rows from the
        database. Return the number of deleted rows.

        Raises:
            WriteFailed: the database failed. The next run deletes the rows that are left.
        """
        if self.is_empty and not self._accounts:
            return 0
        idle = [account for account in self._accounts.values() if self._may_forget(account)]
        if idle:
            await self._give_back(idle)
        for account in idle:
            if not account.was_used:  # nor was it used during the write
                self._accounts.pop(account.key, None)
        return await self._table.prune(now)

    async def close(self) -> None:
        """Lower the marks in the database to the spent amounts, except those of counters that hold
        something for running calls. A mark is the amount that counts as spent after a restart.

        Raises:
            WriteFailed: the marks could not be lowered.
        """
        if self._rules or self._accounts:
            # This runs even if there is nothing to lower, because it also waits for unfinished
            # writes.
            await self._give_back([one for one in self._accounts.values() if not one.held])

    def _by_name(self) -> dict[tuple[str, str], LimitedRule]:
        return {(rule.rule.name, rule.unit.value): rule for rule in self._rules}

    def _keys(self, spender: Spender) -> list[tuple[LimitedRule, CounterKey]]:
        day = day_of(self._now())
        return [
            (rule, rule.key(subject_of(spender, rule.rule.per), day))
            for rule in self._covering(spender.tool, spender.agent_id)
        ]

    def _rules_covering(self, tool: str, agent_id: str | None) -> tuple[LimitedRule, ...]:
        return tuple(rule for rule in self._rules if rule.covers(tool, agent_id))

    async def _accounts_of(self, spender: Spender) -> list[Account]:
        """Return the counters that limit a call by `spender`. Read those that are not in memory
        from the database.
        """
        keys = self._keys(spender)
        # This checks again after each wait, because a counter may have been dropped during the
        # wait.
        while unknown := {key: rule for rule, key in keys if key not in self._accounts}:
            found = {key: Account(rule, key) for key, rule in unknown.items()}
            for key, _, reserved in await self._table.find(unknown):
                found[key].spent = found[key].began = found[key].mark = reserved
            for key, account in found.items():
                self._accounts.setdefault(key, account)
        return [self._accounts[key] for _, key in keys]

    async def _reserve_blocks(self, accounts: Sequence[Account]) -> None:
        marks = [(account, account.next_mark) for account in accounts]
        rows = [account.row(mark) for account, mark in marks]
        for account in accounts:
            account.writing += 1
        try:
            await self._table.reserve(rows, self._now())
        except BaseException:  # the write may still succeed
            for account in accounts:
                account.is_unsure = True
            raise
        finally:
            for account in accounts:
                account.writing -= 1
        for account, mark in marks:
            account.mark = max(account.mark, mark)

    def _lower(self, accounts: Iterable[Account]) -> None:
        """Lower those marks that are far above the used amounts, so that a crash cannot lose much
        of a budget. A mark is the amount that counts as spent after a restart. The marks are
        written to the database in the background.
        """
        ahead = [account for account in accounts if account.is_far_ahead and not account.writing]
        if ahead:
            for account in ahead:  # in memory first, for the reason that `_give_back` explains
                account.mark = account.next_mark
            rows = [account.row(account.mark) for account in ahead]
            self._table.give_back_soon(rows, self._now())

    async def _give_back(self, accounts: Iterable[Account]) -> None:
        """Lower the marks of `accounts` to the spent amounts, in memory and in the database. A mark
        is the amount that counts as spent after a restart.
        """
        rows: list[CounterRow] = []
        # The marks in memory are lowered first. If a call spends something during the write, the
        # engine writes a higher mark after this write, and this write cannot overwrite it.
        for account in accounts:
            if account.is_ahead:
                account.mark, account.is_unsure = account.spent, False
                rows.append(account.row(account.spent))
        await self._table.give_back(rows, self._now())

    def _may_forget(self, account: Account) -> bool:
        """Whether a counter can be dropped from memory. It can be dropped if it holds nothing for
        running calls and one of these is true:

        * The counter's day has ended.
        * The counter belongs to a session, and was not used since this method last checked it.
        """
        was_used, account.was_used = account.was_used, False
        is_idle_session = account.key.subject.session is not None and not was_used
        return not account.held and (is_idle_session or not self._is_now(account.key))

    def _is_now(self, key: CounterKey) -> bool:
        return key.period in (TOTAL, day_of(self._now()))

    @staticmethod
    def _plain_subject(rule: LimitedRule, principal: Principal | None) -> Subject:
        is_by_principal = principal is not None and "principal" in rule.rule.per
        return Subject(principal=principal.id) if principal and is_by_principal else Subject()


def estimate_of(tool: ToolDefinition, arguments: JsonObject, counter: TokenCounter) -> Amounts:
    """Return the expected cost of a call: one call, the tokens of its arguments, and the tool's
    `cost_per_use`.

    `arguments` must omit the arguments that the agent's configuration fixes, because their tokens
    do not count. The cost of the answer, of the tool itself and of resources is only known after
    the call.
    """
    text = strict_json.dumps(arguments).decode()
    return Amounts(1, counter.count(text, TextKind.JSON), tool.cost_per_use)


def taken_by(usage: UsageReport) -> Amounts:
    """Return the amounts that an ended call has used. `usage` is the usage report in its
    envelope.
    """
    tokens = usage.input_tokens + usage.output_tokens + usage.tokens_used
    return Amounts(1, tokens, Decimal(usage.cost))


def refusal(exceeded: Exceeded, now: datetime) -> QuotaExceeded:
    """Return the error for a call that the exceeded budget refuses. The error reports the remaining
    amount and the time at which the budget resets.
    """
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
        details=details_of(exceeded),
    )


def details_of(exceeded: Exceeded) -> JsonObject:
    """Return the budget's name, its unit and limit, what is left, and the time of its reset as
    JSON.
    """
    resets_at = exceeded.resets_at
    return {
        "budget": exceeded.budget,
        "unit": exceeded.unit.value,
        "limit": exceeded.limit,
        "left": exceeded.left,
        "resets_at": None if resets_at is None else _in_words(resets_at),
    }


def _exceeded(accounts: Iterable[Account], needed: Figures) -> Exceeded | None:
    found = [exceeded for one in accounts if (exceeded := one.exceeded(needed)) is not None]
    if not found:
        return None
    never = datetime.max.replace(tzinfo=UTC)
    return max(found, key=lambda exceeded: exceeded.resets_at or never)


def _in_words(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def figures_of(amounts: Amounts, rounding: str) -> Figures:
    return (
        max(0, amounts.calls),
        max(0, amounts.tokens),
        max(0, _micros(amounts.money, rounding)),
        0,
        0,
    )


def _micros(amount: Decimal, rounding: str) -> int:
    if not amount:
        return 0
    return int(amount.scaleb(MICROS).to_integral_value(rounding))


def _shown(rule: LimitedRule, figure: int) -> int | str:
    """Return an amount in the form that users see: money as a text with decimal places, any other
    amount as an integer.
    """
    return money(Decimal(figure).scaleb(-MICROS)) if rule.unit is Unit.MONEY else figure


def day_of(moment: datetime) -> str:
    return moment.date().isoformat()
