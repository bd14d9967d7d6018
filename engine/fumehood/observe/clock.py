"""Clocks, identifiers, and sums over the last seconds.

Clocks and sources of identifiers are passed as arguments, so that tests can control them.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

POOL_BYTES = 12 * 150
"""Random bytes that are drawn at once: enough for 150 identifiers."""

_TIMESTAMP = "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ"


class Clock(Protocol):
    """The wall clock, for times that are shown or stored, and the monotonic clock, for
    durations."""

    def now(self) -> datetime: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    now = staticmethod(partial(datetime.now, UTC))
    monotonic = staticmethod(time.perf_counter)


class IdSource:
    """Creates unguessable identifiers from random bytes that are drawn in advance.

    Requesting random bytes from the kernel for each identifier would be slower. An object must not
    be used after a fork, because both processes would create the same identifiers.
    """

    def __init__(self) -> None:
        self._pool: list[str] = []

    def call_id(self) -> str:
        """Return a new id of a call: `call_` and 24 random hexadecimal digits."""
        return f"call_{self._draw()}"

    def approval_id(self) -> str:
        """Return a new id of an approval: `apr_` and 24 random hexadecimal digits."""
        return f"apr_{self._draw()}"

    def trace_id(self, now: datetime) -> str:
        """Return a new id of a trace: `trace_YYYYMMDD_` and 12 random hexadecimal digits."""
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
"""Number of slots in a window. An event may be forgotten too early, by at most the duration of one
slot."""


class Window:
    """Several sums over the last `window_s` seconds. The argument `now` must never decrease."""

    __slots__ = ("_slot_s", "_slots", "_sums")

    def __init__(self, window_s: float, sums: int = 2) -> None:
        self._slot_s = window_s / SLOTS
        self._sums = sums
        self._slots: deque[tuple[int, list[float]]] = deque()
        """The slots that contain events, oldest first. Each entry is a slot's number and the slot's
        sums."""

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
        """Return the sums over the last `SLOTS` slots, including the current one."""
        self._forget(int(now // self._slot_s))
        return [sum(slot[1][index] for slot in self._slots) for index in range(self._sums)]

    def clear(self) -> None:
        """Forget all events."""
        self._slots.clear()

    def _forget(self, number: int) -> None:
        while self._slots and self._slots[0][0] <= number - SLOTS:
            self._slots.popleft()
