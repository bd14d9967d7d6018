"""The limiter: what starts, what is refused until when, who waits, and what a restart keeps."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import insert

from fumehood.budgets import limiter
from fumehood.budgets.limiter import RateHold, RateLimits
from fumehood.budgets.model import Spender
from fumehood.budgets.settings import RateLimitRule
from fumehood.budgets.store import CounterTable
from fumehood.core.errors import RateLimited
from fumehood.storage.database import Database, open_database
from fumehood.storage.schema import COUNTERS
from fumehood.testing import ManualClock
from support.budgets import spender

pytestmark = [pytest.mark.anyio, pytest.mark.row("P5")]


def rule(tool: str = "*", limit: int = 1, **more: Any) -> RateLimitRule:
    """A limit of so many calls a minute, if nothing else is said."""
    return RateLimitRule(tool=tool, limit=limit, **more)


def limits_on(
    database: Database, *rules: RateLimitRule, clock: ManualClock | None = None
) -> RateLimits:
    """As after a start on this database."""
    return RateLimits(rules, CounterTable(database), clock or ManualClock())


async def start(
    limits: RateLimits, who: Spender | None = None, per_minute: int | None = None
) -> None:
    """A call that starts at once."""
    hold = await limits.hold(who or spender(), per_minute)
    hold.take()


async def refused(
    limits: RateLimits, who: Spender | None = None, per_minute: int | None = None
) -> RateLimited:
    """The refusal of a call."""
    with pytest.raises(RateLimited) as caught:
        await limits.hold(who or spender(), per_minute)
    return caught.value


# ── what is limited ──────────────────────────────────────────────────────────────────────────


async def test_call_after_a_burst_is_refused_with_the_exact_retry_time(database: Database) -> None:
    clock = ManualClock()
    limits = limits_on(database, clock=clock)
    for _ in range(5):
        await start(limits, per_minute=5)
    error = await refused(limits, per_minute=5)
    assert error.retry_after_ms == 12_000
    assert error.may_retry
    assert error.details == {
        "limit": "definition", "tool": "calculator", "per": "all", "calls": 5,
        "period_seconds": 60, "burst": 5,
    }  # fmt: skip
    assert "calculator allows 5 calls in 60 s" in error.message
    assert "after 12 s" in error.message
    clock.advance(11.999)
    assert (await refused(limits, per_minute=5)).retry_after_ms == 1
    clock.advance(0.001)
    await start(limits, per_minute=5)
    await refused(limits, per_minute=5)


@pytest.mark.parametrize("per", ["agent", "session"])
async def test_call_without_agent_or_session_counts_for_its_principal(
    database: Database, per: Any
) -> None:
    limits = limits_on(database, rule(per=per))
    await start(limits, spender(principal="uid:1"))
    await start(limits, spender(principal="uid:2"))
    await refused(limits, spender(principal="uid:1"))


COVERED = [
    pytest.param("send_mail", "send_mail", True, id="exact"),
    pytest.param("send", "send_mail", False, id="exact-is-no-prefix"),
    pytest.param("send_*", "send_mail", True, id="written-star"),
    pytest.param("Send_*", "send_mail", False, id="case"),
]


@pytest.mark.parametrize(("pattern", "tool", "is_covered"), COVERED)
async def test_rate_limit_applies_exactly_to_what_it_names(
    database: Database, pattern: str, tool: str, is_covered: bool
) -> None:
    limits = limits_on(database, rule(pattern))
    hold = await limits.hold(spender(tool), None)
    assert (hold is not None) == is_covered
    assert limits.unmatched([tool]) == ([] if is_covered else [pattern])


async def test_call_refused_by_one_limit_consumes_no_other(database: Database) -> None:
    limits = limits_on(database, rule("a", 1), rule("*", 2, per="principal"), rule("*", 3))
    await start(limits, spender("a"))
    for _ in range(9):
        await refused(limits, spender("a"))
    await start(limits, spender("b"))
    error = await refused(limits, spender("b"))
    assert error.details["per"] == "principal"
    await start(limits, spender("b", principal="uid:2"))


async def test_refusal_names_the_longest_wait_and_no_caller(
    database: Database,
) -> None:
    limits = limits_on(
        database, rule(per="principal", period_seconds=5), rule(limit=1, period_seconds=30)
    )
    await start(limits, spender(principal="uid:SECRET"))
    error = await refused(limits, spender(principal="uid:1"))
    assert error.retry_after_ms == 30_000
    assert "SECRET" not in f"{error.message}{error.details}"


async def test_versions_of_a_tool_share_one_rate_limit(database: Database) -> None:
    limits = limits_on(database)
    await start(limits, per_minute=1)
    assert (await refused(limits, per_minute=2)).retry_after_ms == 30_000


# ── what is held ─────────────────────────────────────────────────────────────────────────────


async def test_started_call_is_not_refunded(database: Database) -> None:
    limits = limits_on(database, rule())
    hold = await limits.hold(spender(), None)
    hold.take()
    hold.release()
    hold.take()
    assert (await refused(limits)).retry_after_ms == 60_000


# ── waiting ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class Waiting:
    """Calls that wait in tasks; `order` has those that got their place."""

    limits: RateLimits
    order: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def call(self, name: str, who: Spender | None = None) -> None:
        try:
            hold = await self.limits.hold(who or spender(), None)
        except RateLimited:
            self.errors.append(name)
            return
        assert hold is not None
        self.order.append(name)
        hold.take()


async def settled() -> None:
    """Let every task run that can."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


async def test_call_that_would_wait_too_long_is_refused_at_once(database: Database) -> None:
    clock = ManualClock()
    limits = limits_on(database, rule(max_wait_seconds=130), clock=clock)
    waiting = Waiting(limits)
    async with anyio.create_task_group() as group:
        for name in "abcd":
            group.start_soon(waiting.call, name)
            await settled()
        assert (waiting.order, waiting.errors) == (["a"], ["d"])  # b waits 60 s, c 120 s
        assert (await refused(limits)).retry_after_ms == 180_000
        assert limits.exceeded(spender(), None) is not None
        group.cancel_scope.cancel()


async def test_cancelled_waiter_lets_the_next_one_start(
    database: Database,
) -> None:
    clock = ManualClock()
    limits = limits_on(database, rule(max_wait_seconds=300), clock=clock)
    waiting = Waiting(limits)
    tasks = {}
    for name in "abcd":
        tasks[name] = asyncio.create_task(waiting.call(name))
        await settled()
    assert waiting.order == ["a"]
    tasks["b"].cancel()
    await asyncio.gather(tasks["b"], return_exceptions=True)
    clock.advance(60)
    late = asyncio.create_task(waiting.call("late"))
    tasks["c"].cancel()  # its turn, and it leaves
    await asyncio.gather(tasks["d"])
    assert waiting.order == ["a", "d"]
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    again = await restarted(limits, database, rule(), clock=clock)
    assert (await refused(again)).retry_after_ms == 60_000  # two calls were counted


async def test_released_hold_lets_the_first_waiter_start(database: Database) -> None:
    limits = limits_on(database, rule(max_wait_seconds=300))
    hold = await limits.hold(spender(), None)
    assert isinstance(hold, RateHold)
    waiting = Waiting(limits)
    async with anyio.create_task_group() as group:
        for name in "ab":
            group.start_soon(waiting.call, name)
            await settled()
        assert waiting.order == []
        hold.release()
        await settled()
        assert waiting.order == ["a"]
        group.cancel_scope.cancel()


async def test_waiters_of_one_principal_do_not_block_others_on_a_shared_limit(
    database: Database,
) -> None:
    limits = limits_on(
        database,
        rule(per="principal", max_wait_seconds=300),
        rule(limit=100, max_wait_seconds=300),
    )
    waiting = Waiting(limits)
    async with anyio.create_task_group() as group:
        for name in "abc":
            group.start_soon(waiting.call, name)
            await settled()
        assert waiting.order == ["a"]
        await start(limits, spender(principal="uid:2"))
        group.cancel_scope.cancel()


async def test_limit_without_waiting_refuses_even_if_another_limit_allows_it(
    database: Database,
) -> None:
    limits = limits_on(database, rule("a", max_wait_seconds=300), rule("*"))
    await start(limits, spender("a"))
    assert (await refused(limits, spender("a"))).retry_after_ms == 60_000


# ── memory and state ─────────────────────────────────────────────────────────────────────────


async def test_expired_counts_are_dropped(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "FIRST_SWEEP", 4)
    clock = ManualClock()
    limits = limits_on(database, rule(per="session", limit=2), clock=clock)
    for number in range(300):
        await start(limits, spender(session=f"s{number}"))
        clock.advance(15)  # two of them are not free again at any time
    assert len(limits._counts) <= 16
    clock.advance(60)
    limits.write()
    await database.flush()
    assert await limits.prune(clock.now()) == 300
    assert not limits._counts
    assert not limits._sessions


async def test_counts_of_a_call_do_not_evict_each_other(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first count is free again when the second is made, and counts are dropped."""
    monkeypatch.setattr(limiter, "FIRST_SWEEP", 1)
    clock = ManualClock()
    limits = limits_on(database, rule(), rule(per="agent", limit=100), clock=clock)
    for number in range(20):
        await start(limits, spender(agent=f"a{number}"))
        await refused(limits, spender(agent=f"a{number}"))
        await refused(limits, spender(agent=f"b{number}"))
        clock.advance(60)


async def test_a_held_count_is_not_dropped(database: Database) -> None:
    clock = ManualClock()
    limits = limits_on(database, rule(), clock=clock)
    hold = await limits.hold(spender(), None)
    assert hold is not None
    await limits.prune(clock.now())
    await refused(limits)
    hold.take()
    await refused(limits)


async def test_sessions_beyond_the_limit_share_one_count(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "MAX_SESSIONS", 3)
    clock = ManualClock()
    limits = limits_on(database, rule(per="session"), clock=clock)
    for name in "abcd":
        await start(limits, spender(session=name))
    await refused(limits, spender(session="e"))
    await start(limits, spender(session="e", principal="uid:2"))  # no other principal's trouble
    clock.advance(60)
    await start(limits, spender(session="e"))  # still on the shared one
    await limits.prune(clock.now())
    await start(limits, spender(session="f"))
    await start(limits, spender(session="g"))


async def restarted(
    before: RateLimits, database: Database, *rules: RateLimitRule, clock: ManualClock
) -> RateLimits:
    """The limits of the next engine on this database; the machine was started anew as well."""
    before.write()
    await database.flush()
    return limits_on(database, *rules, clock=ManualClock(clock.moment, seconds=7.0))


@pytest.mark.parametrize("back", [timedelta(hours=1), timedelta(days=4000)])
async def test_clock_set_back_blocks_a_count_for_at_most_one_burst(
    database: Database, back: timedelta
) -> None:
    clock = ManualClock()
    limits = limits_on(database, rule(limit=4, burst=2), clock=clock)
    await start(limits)
    clock.moment -= back
    await start(limits)  # while it runs, the clock on the wall decides nothing
    assert (await refused(limits)).retry_after_ms == 15_000
    clock.moment -= back
    again_clock = ManualClock(clock.moment)
    limits.write()
    await database.flush()
    again = limits_on(database, rule(limit=4, burst=2), clock=again_clock)
    assert (await refused(again)).retry_after_ms == 15_000
    again_clock.advance(30)
    for _ in range(2):
        await start(again)


async def test_clock_set_back_blocks_a_definition_for_at_most_a_minute(
    database: Database,
) -> None:
    clock = ManualClock()
    limits = limits_on(database, clock=clock)
    await start(limits, per_minute=1)
    clock.moment -= timedelta(days=1)
    again = await restarted(limits, database, clock=clock)
    assert (await refused(again, per_minute=1)).retry_after_ms == 60_000


async def test_rows_of_removed_limits_are_ignored(database: Database) -> None:
    clock = ManualClock()
    limits = limits_on(database, rule(), clock=clock)
    await start(limits)
    again = await restarted(limits, database, rule(limit=2), clock=clock)
    await start(again)


@pytest.mark.parametrize(
    ("subject", "free_at"), [("nobody=x", 2**62), ("principal", 2**62), ("", "soon")]
)
async def test_malformed_counter_rows_are_detected_at_start(
    database: Database, subject: str, free_at: Any
) -> None:
    values = {"name": "definition:a", "subject": subject, "period": "rate", "unit": "free_at",
              "settled": 0, "reserved": free_at, "until": "9999"}  # fmt: skip
    await database.write(lambda connection: connection.execute(insert(COUNTERS), values))
    with pytest.raises((ValueError, TypeError)):
        limits_on(database)


# ── settings ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0}, {"limit": 1, "period_seconds": 0}, {"limit": 1, "burst": 0},
        {"limit": 1, "per": "tool"}, {"limit": 1, "max_wait_seconds": 301},
        {"limit": 1, "max_wait_seconds": -1}, {"limit": 1, "period_seconds": float("nan")},
        {"limit": 1, "period_seconds": 86_400, "burst": 367}, {"limit": 1, "tool": ""},
        {"limit": 1, "calls": 1}, {},
    ],
)  # fmt: skip
def test_rate_limit_rule_with_useless_values_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RateLimitRule(**({"tool": "*"} | wrong))


# ── the property ─────────────────────────────────────────────────────────────────────────────


@dataclass
class Model:
    """Every start, and the plain truth: in any window at most `burst + time / interval` of them."""

    interval_s: float
    burst: int
    starts: list[float] = field(default_factory=list)

    def allows(self, now: float) -> bool:
        """Whether one more start now breaks no window that ends now."""
        starts = [*self.starts, now]
        return all(
            len(starts) - first <= self.burst + (now - starts[first]) / self.interval_s + 1e-6
            for first in range(len(starts))
        )


CALL = st.tuples(st.just("call"), st.sampled_from([0, 0, 0, 1]))
STEPS = st.lists(
    st.one_of(
        CALL, CALL, CALL, CALL,
        st.tuples(st.just("pass"), st.integers(0, 2500)),
        st.tuples(st.just("restart"), st.integers(0, 2500)),
        st.tuples(st.just("set_back"), st.integers(1, 10**6)),
    ),
    min_size=10,
    max_size=80,
)  # fmt: skip


@given(limit=st.integers(1, 6), burst=st.integers(1, 4), steps=STEPS)
def test_calls_never_exceed_burst_and_rate_in_any_window(
    limit: int, burst: int, steps: list[tuple[str, int]]
) -> None:
    """And no fewer while the clock is not set back: the limiter is the model exactly."""

    async def run() -> None:
        database = open_database(None)
        clock = ManualClock(seconds=50.0)
        one = rule(limit=limit, burst=burst, period_seconds=limit)  # a call a second
        limits = limits_on(database, one, clock=clock)
        model, truth, is_exact = Model(1.0, burst), 0.0, True
        for kind, value in steps:
            if kind == "pass":
                clock.advance(value / 1000)
                truth += value / 1000
            elif kind == "set_back":
                clock.moment -= timedelta(seconds=value)
                is_exact = False
            elif kind == "restart":
                truth += value / 1000
                clock.advance(value / 1000)
                limits = await restarted(limits, database, one, clock=clock)
                clock = limits._clock  # type: ignore[assignment]
                event("restart")
            else:
                exceeded = limits.exceeded(spender(), None)
                if exceeded is not None:
                    assert 0 < exceeded.retry_after_ms <= burst * 1000
                    assert not (is_exact and model.allows(truth - 1e-5))
                    await refused(limits)
                    event("refused")
                    continue
                hold = await limits.hold(spender(), None)
                assert hold is not None
                if value:
                    hold.release()
                else:
                    assert model.allows(truth)
                    model.starts.append(truth)
                    hold.take()
        database.close()

    asyncio.run(run())
