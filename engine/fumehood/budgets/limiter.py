"""The limiter decides whether the rate limits let a call start now and, if not, when.

The pipeline calls this module, which uses `budgets/store`. The algorithm is GCRA, the generic cell
rate algorithm. A limit allows `burst` calls at once, and one more call after each interval of
`period / limit`. Its count is a single number, the time `free`: if no more calls start, the whole
burst can be used again from this time on. Each start of a call moves `free` ahead by one interval.
A call may start if `free` is at most `burst - 1` intervals after now. One decision covers all
limits of a call. It is made in memory without an `await` in between.

In each of its limits, a call *holds* one interval until it starts (`take`) or ends without having
started (`release`). So a call that is refused later uses nothing. Invariant: `max(now, free) + held
<= now + interval * burst`. So within any time at most `burst + time / interval` calls start.

Counts use the monotonic clock, which is never adjusted. The wall clock serves only to keep counts
across a restart. After a restart, no `free` is later than one whole burst after now. Counts are
written to the database in the background, after the calls' answers, so a crash may lose the counts
of the last second. Times are integers in nanoseconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from fumehood.budgets.model import Spender, Subject, subject_of
from fumehood.budgets.settings import RateLimitRule
from fumehood.budgets.store import CounterKey, CounterRow, CounterTable
from fumehood.core.errors import RateLimited
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL, any_matches
from fumehood.observe.clock import Clock

SECOND_NS = 1_000_000_000
MINUTE_S = 60

DEFINITION = "definition:"
"""How the id of a limit begins if a tool's definition declares the limit. The id of a limit in the
configuration begins with `rule:`.
"""

PERIOD, UNIT = "rate", "free_at"
"""The period and the unit under which a rate limit's count is stored. The stored value is the time
from which the whole burst can be used again, in Unix nanoseconds.
"""

MAX_SESSIONS = 10_000
"""Maximum number of sessions of one principal that a limit counts separately. All further sessions
share one count. Otherwise callers could fill the memory with invented session ids.
"""

FIRST_SWEEP = 1024
"""When this many counts are in memory, those whose whole burst can be used again are dropped for
the first time.
"""

GATHER_S = 0.1
"""Seconds for which changed counts are collected before they are passed to the database
together.
"""


class Limit:
    """One rate limit, declared by a tool's definition or by the configuration."""

    def __init__(self, rule: RateLimitRule, *, is_of_definition: bool = False) -> None:
        """`is_of_definition` says that a tool's definition declares the limit. All versions of the
        tool then share one count, even if they have different rates.
        """
        self.rule = rule
        self.id = f"{DEFINITION}{rule.tool}" if is_of_definition else rule.id
        self.is_of_definition = is_of_definition
        self.burst = rule.burst or rule.limit
        # The interval is rounded up, so that no more calls than allowed fit into the period.
        self.interval_ns = -(-round(rule.period_seconds * SECOND_NS) // rule.limit)
        self.tolerance_ns = self.interval_ns * (self.burst - 1)
        """A call may start if `free` is at most this many nanoseconds after now."""
        self.max_wait_ns = int(rule.max_wait_seconds * SECOND_NS)

    def subject(self, caller: Spender) -> Subject:
        """Return the subject under which the calls of this caller are counted. Calls with the same
        subject, for example those of the same principal, share one count.
        """
        per = self.rule.per
        return EVERYBODY if per == "all" else subject_of(caller, (per,))

    @property
    def in_words(self) -> str:
        """The limit as a clause for error messages."""
        rule = self.rule
        each = "" if rule.per == "all" else f" for each {rule.per}"
        calls = "1 call" if rule.limit == 1 else f"{rule.limit} calls"
        return f"{rule.tool} allows {calls} in {rule.period_seconds:.15g} s{each}"

    @property
    def details(self) -> JsonObject:
        """The limit as JSON, for the details of errors and for dry runs. It does not contain the
        caller.
        """
        return {
            "limit": "definition" if self.is_of_definition else "configuration",
            "tool": self.rule.tool,
            "per": self.rule.per,
            "calls": self.rule.limit,
            "period_seconds": self.rule.period_seconds,
            "burst": self.burst,
        }


EVERYBODY = Subject()
"""The subject of a count that all callers share."""


class Exceeded(NamedTuple):
    """The limit that prevents a call from starting now, and the delay after which the call can
    start. If several limits prevent this, `limit` is the one with the longest delay.
    """

    limit: Limit
    retry_after_ms: int

    def refusal(self) -> RateLimited:
        """Return the error with which the caller is refused."""
        return RateLimited(
            f"Too many calls: the rate limit of {self.limit.in_words}. Repeat the call after "
            f"{self.retry_after_ms / 1000:.15g} s.",
            retry_after_ms=self.retry_after_ms,
            details=self.limit.details,
        )


@dataclass(slots=True, eq=False)
class _Waiter:
    """A call that waits to start. Of the waiting calls, the one with the lowest `number` starts
    first. When `turn` is set, the call checks again whether it can start.
    """

    number: int
    turn: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Count:
    """The count of one limit for one subject (the caller or callers who share the limit).

    `free_ns` is the time, by the monotonic clock, from which the whole burst can be used again.
    `held_ns` is the sum of the intervals that are reserved for calls that have not started yet.
    `waiters` are the calls that wait to start, in order of arrival.
    """

    key: CounterKey
    free_ns: int = 0
    held_ns: int = 0
    waiters: list[_Waiter] = field(default_factory=list)

    def allows_at(self, limit: Limit, now_ns: int, *, before: int | None = None) -> int:
        """Return the time at which one more call can start, in nanoseconds of the monotonic clock.
        The time is at or before `now_ns` if the call can start now.

        The new call starts after all calls with a reserved start, and after the waiting calls. If
        `before` is given, waiting calls with this number or a higher one are ignored.
        """
        ahead_ns = self.held_ns
        if self.waiters:
            older = sum(before is None or one.number < before for one in self.waiters)
            ahead_ns += older * limit.interval_ns
        return max(now_ns, self.free_ns) + ahead_ns - limit.tolerance_ns

    def is_idle(self, now_ns: int) -> bool:
        """Whether the count can be dropped, because a new count would be in the same state."""
        return self.free_ns <= now_ns and not self.held_ns and not self.waiters

    def wake(self) -> None:
        """Wake the first waiting call, so that it checks again whether it may start."""
        if self.waiters:
            self.waiters[0].turn.set()


_Counts = Sequence[tuple[Limit, _Count]]


class RateHold:
    """The starts that are reserved for one call, one in each of its limits. The first call of
    `take` or `release` ends the reservation; later calls do nothing.
    """

    __slots__ = ("_counts", "_is_open", "_limits")

    def __init__(self, limits: RateLimits, counts: _Counts) -> None:
        self._limits = limits
        self._counts = counts
        self._is_open = True
        for limit, count in counts:
            count.held_ns += limit.interval_ns

    def take(self) -> None:
        """Count the call in its limits, because it starts now. This method neither waits nor
        fails.
        """
        if self._is_open:
            self._is_open = False
            self._limits.count(self._counts)

    def release(self) -> None:
        """Cancel the starts that are reserved for the call, because it will not start. The next
        waiting call is woken.
        """
        if self._is_open:
            self._is_open = False
            for limit, count in self._counts:
                count.held_ns -= limit.interval_ns
                count.wake()


class RateLimits:
    """All rate limits of one engine, with their counts.

    Raises (from the constructor):
        ReadFailed: the counts cannot be read.
        ValueError, TypeError: a count in the database is invalid.
    """

    def __init__(self, rules: Sequence[RateLimitRule], table: CounterTable, clock: Clock) -> None:
        self._rules = tuple(Limit(rule) for rule in rules)
        self._table = table
        self._clock = clock
        self._counts: dict[CounterKey, _Count] = {}
        self._sessions: Counter[tuple[str, str | None]] = Counter()
        self._limits_of = lru_cache(self._limits_covering)
        self._unwritten: dict[CounterKey, _Count] = {}
        self._arrivals = 0
        self._sweep_at = FIRST_SWEEP
        self.has_rules = bool(rules)
        self._load()

    def exceeded(self, caller: Spender, per_minute: int | None) -> Exceeded | None:
        """Return None if no limit would refuse a call now. Otherwise, return the exceeded limit
        with the longest delay. A limit refuses a call that would have to wait longer than the limit
        lets calls wait. Nothing is reserved.

        `per_minute` is the rate in the tool's definition, or None if the definition has no rate.
        """
        now_ns = self._now_ns()
        over: list[tuple[int, Limit]] = []
        for limit in self._limits_of(caller.tool, per_minute):
            key = self._key(limit, caller)
            count = self._counts.get(key) or _Count(key)
            over.append((count.allows_at(limit, now_ns), limit))
        return _refused(over, now_ns, now_ns)

    async def hold(self, caller: Spender, per_minute: int | None) -> RateHold | None:
        """Reserve one start for a call in each limit that applies to the call. Return None if no
        limit applies.

        If a limit is exceeded, wait until the call may start, at most for as long as the limit lets
        calls wait. Calls that arrived earlier go first. `per_minute` is the rate in the tool's
        definition, or None if the definition has no rate.

        Raises:
            RateLimited: a limit would stay exceeded for longer than it lets calls wait. The error
                contains the delay after which the caller can repeat the call. Nothing is reserved.
        """
        limits = self._limits_of(caller.tool, per_minute)
        if not limits:
            return None
        arrived_ns = self._now_ns()
        counts = self._counts_of(limits, caller)
        for limit, count in counts:
            if count.allows_at(limit, arrived_ns) > arrived_ns:
                return await self._wait(limits, caller, arrived_ns)
        return RateHold(self, counts)

    def count(self, counts: _Counts) -> None:
        """Count one started call in each limit. This ends the call's reservations. The new counts
        are written to the database shortly afterwards, together with the counts of other calls.
        """
        now_ns = self._now_ns()
        if not self._unwritten:
            asyncio.get_running_loop().call_later(GATHER_S, self.write)
        for limit, count in counts:
            count.held_ns -= limit.interval_ns
            count.free_ns = max(now_ns, count.free_ns) + limit.interval_ns
            self._unwritten[count.key] = count

    def write(self) -> None:
        """Pass the counts that have changed to the database, without waiting for the write."""
        ahead_ns = self._wall_ns() - self._now_ns()
        for count in self._unwritten.values():
            free_ns = count.free_ns + ahead_ns
            until = datetime.fromtimestamp(free_ns / SECOND_NS, UTC)
            self._table.note(CounterRow(count.key, 0, free_ns), until)
        self._unwritten.clear()

    def unmatched(self, tools: Iterable[str]) -> list[str]:
        """Return the tool patterns of those limits that match no registered tool, for example
        because of a typo. `tools` are the names of the registered tools.
        """
        names = list(tools)
        return [
            rule.tool
            for rule in (limit.rule for limit in self._rules)
            if not rule.tool.startswith(EXTERNAL)
            and not any(any_matches((rule.tool,), name) for name in names)
        ]

    async def prune(self, now: datetime) -> int:
        """Drop those counts from memory whose whole burst can be used again. Also delete expired
        rows from the database. Return the number of deleted rows.

        Raises:
            WriteFailed: the database failed. The next run deletes the rows that are left.
        """
        self._sweep()
        return await self._table.prune(now)

    def _load(self) -> None:
        now_ns, wall_ns = self._now_ns(), self._wall_ns()
        longest = {rule.id: rule.interval_ns * rule.burst for rule in self._rules}
        for row in self._table.load_now(PERIOD, sessions=True):
            key, left_ns = row.key, row.reserved - wall_ns
            of_rule = longest.get(key.name)
            if left_ns > 0 and (of_rule is not None or key.name.startswith(DEFINITION)):
                count = self._add(key)
                count.free_ns = now_ns + min(left_ns, of_rule or MINUTE_S * SECOND_NS)

    async def _wait(self, limits: Sequence[Limit], caller: Spender, arrived_ns: int) -> RateHold:
        """Wait until no limit is exceeded, then reserve one start in each limit. `arrived_ns` is
        the time at which the call arrived, in nanoseconds of the monotonic clock.

        While limits are exceeded, wait for the limit with the longest delay, and then check all
        limits again.

        Raises:
            RateLimited: a limit would stay exceeded for longer than it lets calls wait.
        """
        self._arrivals += 1
        me = _Waiter(self._arrivals)
        while True:
            now_ns = self._now_ns()
            # Each round looks the counts up again, because idle counts may have been dropped
            # meanwhile.
            counts = self._counts_of(limits, caller)
            over = [
                (count.allows_at(limit, now_ns, before=me.number), limit) for limit, count in counts
            ]
            refused = _refused(over, now_ns, arrived_ns)
            if refused is not None:
                raise refused.refusal()
            at_ns, last = max(over, key=lambda one: one[0])
            if at_ns <= now_ns:
                return RateHold(self, counts)
            count = next(count for limit, count in counts if limit is last)
            await _queue(count, me, (at_ns - now_ns) / SECOND_NS)

    def _limits_covering(self, tool: str, per_minute: int | None) -> tuple[Limit, ...]:
        of_rules = tuple(one for one in self._rules if any_matches((one.rule.tool,), tool))
        if per_minute is None:
            return of_rules
        own = RateLimitRule.model_construct(tool=tool, limit=per_minute, period_seconds=MINUTE_S)
        return (Limit(own, is_of_definition=True), *of_rules)

    def _key(self, limit: Limit, caller: Spender) -> CounterKey:
        key = CounterKey(limit.id, limit.subject(caller), PERIOD, UNIT)
        is_new = key.subject.session is not None and key not in self._counts
        if is_new and self._sessions[_owner(key)] >= MAX_SESSIONS:
            return key._replace(subject=Subject(principal=key.subject.principal))
        return key

    def _counts_of(self, limits: Sequence[Limit], caller: Spender) -> list[tuple[Limit, _Count]]:
        if len(self._counts) >= self._sweep_at:  # only here, where no caller uses a count
            self._sweep()
        keys = [(limit, self._key(limit, caller)) for limit in limits]
        return [(limit, self._counts.get(key) or self._add(key)) for limit, key in keys]

    def _add(self, key: CounterKey) -> _Count:
        count = self._counts[key] = _Count(key)
        if key.subject.session is not None:
            self._sessions[_owner(key)] += 1
        return count

    def _sweep(self) -> None:
        """Drop those counts whose whole burst can be used again."""
        now_ns = self._now_ns()
        for count in [one for one in self._counts.values() if one.is_idle(now_ns)]:
            del self._counts[count.key]
            if count.key.subject.session is not None:
                self._sessions[_owner(count.key)] -= 1
        self._sessions += Counter()  # removes entries that are zero
        self._sweep_at = max(FIRST_SWEEP, 2 * len(self._counts))

    def _now_ns(self) -> int:
        return int(self._clock.monotonic() * SECOND_NS)

    def _wall_ns(self) -> int:
        """Return the Unix time in nanoseconds, accurate to a microsecond."""
        return round(self._clock.now().timestamp() * 1e6) * 1000


async def _queue(count: _Count, me: _Waiter, seconds: float) -> None:
    """Wait in the queue of `count`, as the waiter `me`, for `seconds` or until another call wakes
    this one.
    """
    me.turn.clear()
    count.waiters.append(me)
    count.waiters.sort(key=lambda one: one.number)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await me.turn.wait()
    finally:
        count.waiters.remove(me)
        count.wake()


def _refused(over: Iterable[tuple[int, Limit]], now_ns: int, arrived_ns: int) -> Exceeded | None:
    """Return None if no limit refuses the call. Otherwise, return the exceeded limit with the
    longest delay, whether or not this limit refuses the call.

    A limit refuses the call if the call would have to wait longer than the limit lets calls wait.
    The wait is counted from the call's arrival at `arrived_ns`. `over` contains a pair for each
    limit: the time at which the limit lets the call start, and the limit. All times are in
    nanoseconds of the monotonic clock.
    """
    late = [one for one in over if one[0] > now_ns]
    if all(at_ns <= arrived_ns + limit.max_wait_ns for at_ns, limit in late):
        return None
    at_ns, limit = max(late, key=lambda one: one[0])
    return Exceeded(limit, -(-(at_ns - now_ns) // 1_000_000))


def _owner(key: CounterKey) -> tuple[str, str | None]:
    return key.name, key.subject.principal
