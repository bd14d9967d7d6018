"""A fair share: one limit for all principals together, and one for each principal.

The module only counts slots, queue places, sessions or bytes, without I/O. The code that uses it
decides whether a request over a limit is refused, waits or makes room.
"""

from __future__ import annotations

from enum import Enum


class Lack(Enum):
    """Says which limit of a `FairShare` would be exceeded."""

    SHARE = "share"
    """The principal has used up its share."""

    TOTAL = "total"
    """All principals together have used up the total."""


class FairShare:
    """Counts how much of a limited resource, such as slots or bytes, principals have taken. There
    is a limit for each principal (`most_of_one`) and a limit for all together (`most`). Not
    thread-safe.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self.most = most
        self.most_of_one = most_of_one
        self.total = 0
        self._taken: dict[str, int] = {}

    def of(self, principal_id: str) -> int:
        """Return the amount that one principal has taken."""
        return self._taken.get(principal_id, 0)

    def take(self, principal_id: str, amount: int = 1) -> Lack | None:
        """Take an amount for a principal, unless that would exceed a limit.

        Return None if the amount was taken, otherwise the limit that it would exceed.
        """
        lack = self.lacks(principal_id, amount)
        if lack is None:
            self.add(principal_id, amount)
        return lack

    def lacks(self, principal_id: str, amount: int = 1) -> Lack | None:
        """Return the limit that would be exceeded if a principal took an amount, or None if no
        limit would be exceeded.

        Nothing is taken.
        """
        if self.of(principal_id) + amount > self.most_of_one:
            return Lack.SHARE
        return Lack.TOTAL if self.total + amount > self.most else None

    def add(self, principal_id: str, amount: int = 1) -> None:
        """Take an amount for a principal, even if that exceeds a limit."""
        self.total += amount
        self._taken[principal_id] = self.of(principal_id) + amount

    def give_back(self, principal_id: str, amount: int = 1) -> None:
        """Give back an amount that a principal has taken."""
        self.add(principal_id, -amount)
        if not self._taken[principal_id]:
            del self._taken[principal_id]


__all__ = ["FairShare", "Lack"]
