"""The line in front of the pool: who waits for a container, and whose turn it is.

Host side, pure. Invariant: the line is bounded, for everybody together and for each trust
domain; between trust domains it goes round, within one it is first come, first served.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Granted = TypeVar("Granted")

MAX_WAITING = 2000
MAX_WAITING_OF_ONE = 500
"""Of one trust domain, so that one cannot fill the line."""


class LineFull(Exception):
    """Too many wait already."""


@dataclass(eq=False, slots=True)
class Waiter(Generic[Granted]):
    """One call that wants a container."""

    domain: str
    memory_mb: int
    fresh: bool
    granted: asyncio.Future[Granted] = field(repr=False)
    is_being_made: bool = False
    """Whether a container is being made for it."""


class Line(Generic[Granted]):
    """Waiters of all domains."""

    def __init__(self, most: int = MAX_WAITING, most_of_one: int = MAX_WAITING_OF_ONE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._domains: OrderedDict[str, list[Waiter[Granted]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def join(self, waiter: Waiter[Granted]) -> None:
        """Stand at the end of one's own domain. Raises LineFull."""
        mine = self._domains.get(waiter.domain, [])
        if self._count >= self._most or len(mine) >= self._most_of_one:
            raise LineFull
        self._domains.setdefault(waiter.domain, mine).append(waiter)
        self._count += 1

    def leave(self, waiter: Waiter[Granted]) -> None:
        """Wait no more. Harmless for one that does not stand here."""
        mine = self._domains.get(waiter.domain, [])
        if waiter in mine:
            mine.remove(waiter)
            self._count -= 1
            if not mine:
                del self._domains[waiter.domain]

    def serve(self, waiter: Waiter[Granted]) -> None:
        """It is served: its domain goes to the end of the round."""
        self.leave(waiter)
        if waiter.domain in self._domains:
            self._domains.move_to_end(waiter.domain)

    def pass_on(self, waiter: Waiter[Granted]) -> None:
        """It gets one later, but its domain has had this turn."""
        self._domains.move_to_end(waiter.domain)

    def in_turn(self) -> Iterator[list[Waiter[Granted]]]:
        """The waiters of each domain, in the order of the round. Safe against changes."""
        for domain in list(self._domains):
            yield list(self._domains.get(domain, ()))

    def __iter__(self) -> Iterator[Waiter[Granted]]:
        return iter([waiter for mine in self._domains.values() for waiter in mine])
