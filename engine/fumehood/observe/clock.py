"""Clocks and identifiers, passed in so that tests can hold them still."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

POOL_BYTES = 12 * 150

_TIMESTAMP = "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ"


class Clock(Protocol):
    """Wall-clock time for people, monotonic time for durations."""

    def now(self) -> datetime: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    now = staticmethod(partial(datetime.now, UTC))
    monotonic = staticmethod(time.perf_counter)


class IdSource:
    """Unguessable identifiers, from randomness that is drawn in advance.

    Asking the kernel for each identifier would cost more than making it. Not for use after a fork:
    two processes would make the same ones.
    """

    def __init__(self) -> None:
        self._pool: list[str] = []

    def call_id(self) -> str:
        """`call_` and 24 random hexadecimal digits."""
        return f"call_{self._draw()}"

    def approval_id(self) -> str:
        """`apr_` and 24 random hexadecimal digits."""
        return f"apr_{self._draw()}"

    def trace_id(self, now: datetime) -> str:
        """`trace_YYYYMMDD_` and twelve random hexadecimal digits (mission E)."""
        return f"trace_{now.year * 10_000 + now.month * 100 + now.day}_{self._draw()[:12]}"

    def _draw(self) -> str:
        """24 random digits."""
        if not self._pool:
            drawn = secrets.token_hex(POOL_BYTES)
            self._pool = [drawn[at : at + 24] for at in range(0, len(drawn), 24)]
        return self._pool.pop()


def timestamp(now: datetime) -> str:
    """ISO 8601 in UTC with milliseconds."""
    return _TIMESTAMP % (
        now.year, now.month, now.day, now.hour, now.minute, now.second, now.microsecond // 1000,
    )  # fmt: skip
