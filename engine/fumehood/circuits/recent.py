"""How many of two kinds of events happened lately, counted in slots of time."""

from __future__ import annotations

from collections import deque

SLOTS = 12
"""Slots of one window. An event is forgotten up to one slot early."""


class RecentCounts:
    """Two counters over the last `window_s` seconds. Takes the same memory at any rate."""

    __slots__ = ("_slot_s", "_slots")

    def __init__(self, window_s: float) -> None:
        self._slot_s = window_s / SLOTS
        self._slots: deque[list[int]] = deque()
        """Each slot with events: its number and the two counts, oldest first."""

    def add(self, kind: int, now: float) -> None:
        """Count one event; `kind` is 0 or 1, and `now` never goes back."""
        number = int(now // self._slot_s)
        if not self._slots or self._slots[-1][0] != number:
            self._forget(number)
            self._slots.append([number, 0, 0])
        self._slots[-1][1 + kind] += 1

    def totals(self, now: float) -> tuple[int, int]:
        """The counts of the current slot and those before it, `SLOTS` in all."""
        self._forget(int(now // self._slot_s))
        return sum(slot[1] for slot in self._slots), sum(slot[2] for slot in self._slots)

    def clear(self) -> None:
        """Forget all events."""
        self._slots.clear()

    def _forget(self, number: int) -> None:
        while self._slots and self._slots[0][0] <= number - SLOTS:
            self._slots.popleft()


__all__ = ["RecentCounts"]
