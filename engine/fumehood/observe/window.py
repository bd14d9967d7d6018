"""Sums over the last seconds, kept in slots of time, so that memory is the same at any rate."""

from __future__ import annotations

from collections import deque

SLOTS = 12
"""Number of slots in a window. An event is forgotten up to one slot's time too early."""


class Window:
    """Several sums over the last `window_s` seconds. The argument `now` must never decrease."""

    __slots__ = ("_slot_s", "_slots", "_sums")

    def __init__(self, window_s: float, sums: int = 2) -> None:
        self._slot_s = window_s / SLOTS
        self._sums = sums
        self._slots: deque[tuple[int, list[float]]] = deque()
        """Each slot with events: its number and its sums, oldest first."""

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


__all__ = ["Window"]
