"""What a rate limit costs a call: a place is held, taken, and stored behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.line import Line
from fumehood.budgets.limiter import RateLimits
from fumehood.budgets.model import Spender
from fumehood.budgets.settings import RateLimitRule
from fumehood.budgets.store import CounterTable
from fumehood.observe.clock import SystemClock
from fumehood.storage.database import open_database

CALLS = 4000
ROUNDS = 5
TARGET_US = 10
PLENTY = 10**9
CALLER = Spender("uid:1000", "clerk", "session", "calculator")


def rate_limit_lines() -> Iterator[Line]:
    """In processor time, with what the thread of the database needs."""
    own = _mean_us((), PLENTY)
    yield Line(
        "rate limit: a call with a limit of its tool's own", f"≤ {TARGET_US} µs", f"{own:.2f} µs",
        own <= TARGET_US,
    )  # fmt: skip
    rules = tuple(
        RateLimitRule(tool="*", per=per, limit=PLENTY) for per in ("all", "agent", "session")
    )
    yield Line("rate limit: with three more", "–", f"{_mean_us(rules, PLENTY):.2f} µs", None)


def _mean_us(rules: tuple[RateLimitRule, ...], per_minute: int) -> float:
    with TemporaryDirectory() as directory:
        database = open_database(Path(directory) / "state.db")
        limits = RateLimits(rules, CounterTable(database), SystemClock())
        best = min(asyncio.run(_round_s(limits, per_minute)) for _ in range(ROUNDS))
        database.close()
    return best / CALLS * 1e6


async def _round_s(limits: RateLimits, per_minute: int) -> float:
    before = time.process_time()
    for _ in range(CALLS):
        hold = await limits.hold(CALLER, per_minute)
        assert hold is not None
        hold.take()
    limits.write()
    return time.process_time() - before
