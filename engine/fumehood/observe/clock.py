"""Clocks, identifiers, and sums over the last seconds.

Clocks and identifier sources are passed as arguments, so that tests can replace them.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

POOL_BYTES = 12 * 150
"""Number of random bytes that are requested at once. They are enough for 150 identifiers."""

_TIMESTAMP = "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ"


class Clock(Protocol):
    """Two clocks: the wall clock for times that are shown or stored, and the monotonic clock for
    durations.
    """

    def now(self) -> datetime: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The clocks of this machine."""

    now = staticmethod(partial(datetime.now, UTC))
    monotonic = staticmethod(time.perf_counter)


class IdSource:
    """Creates unguessable identifiers from random bytes that are requested in advance.

    Requesting random bytes from the operating system for each identifier would be slower. An
    `IdSource` must not be used after a fork, because both processes would create the same
    identifiers.
    """

    def __init__(self) -> None:
        self._pool: list[str] = []

    def call_id(self) -> str:
        """Return the id for a new call: `call_` and 24 random hexadecimal digits."""
        return f"call_{self._draw()}"

    def approval_id(self) -> str:
        """Return the id for a new approval: `apr_` and 24 random hexadecimal digits."""
        return f"apr_{self._draw()}"

    def trace_id(self, now: datetime) -> str:
        """Return the id for a new trace: `trace_YYYYMMDD_` and 12 random hexadecimal digits."""
        return f"trace_{now.year * 10_000 + now.month * 100 + now.day}_{self._draw()[:12]}"

    def _draw(self) -> str:
        """Return 24 random hexadecimal digits."""
        if not self._pool:
            drawn = secrets.token_hex(POOL_BYTES)
            self._pool = [drawn[at : at + 24] for at in range(0, len(drawn), 24)]
        return self._pool.pop()


def timestamp(now: datetime) -> str:
    """Format a UTC time in ISO 8601 with milliseconds."""
    return _TIMESTAMP % (
        now.year, now.month, now.day, now.hour, now.minute, now.second, now.microsecond // 1000,
    )  # fmt: skip


# -- sums over time -------------------------------------------------------------------------

SLOTS = 12
"""Number of slots into which a window of time is divided. An event may be forgotten too early, but
only by the duration of one slot."""


class Window:
    """Keeps sums of the values that were added in the last `window_s` seconds. `sums` is the number
    of sums. Older values no longer count.

    The time `now` that is passed to `add` and `totals` must not decrease.
    """

    __slots__ = ("_slot_s", "_slots", "_sums")

    def __init__(self, window_s: float, sums: int = 2) -> None:
        self._slot_s = window_s / SLOTS
        self._sums = sums
        self._slots: deque[tuple[int, list[float]]] = deque()
        """The slots that contain events, oldest first. Each entry has the number of a slot and the
        sums in it."""

    def add(self, now: float, *values: float) -> None:
        """Add one value to each sum."""
        number = int(now // self._slot_s)
        if not self._slots or self._slots[-1][0] != number:
            self._forget(number)
            self._slots.append((number, [0] * self._sums))
        sums = self._slots[-1][1]
        for index, value in enumerate(values):
            sums[index] += value

    def totals(self, now: float) -> list[float]:
        """Return the sums of the values that were added in the last `window_s` seconds before
        `now`.
        """
        self._forget(int(now // self._slot_s))
        return [sum(slot[1][index] for slot in self._slots) for index in range(self._sums)]

    def clear(self) -> None:
        """Forget all values that were added."""
        self._slots.clear()

    def _forget(self, number: int) -> None:
        while self._slots and self._slots[0][0] <= number - SLOTS:
            self._slots.popleft()
