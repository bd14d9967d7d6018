"""Limits per user: connections, and memory for unfinished bodies.

Host side, used by `peer` for each connection and by `answers` and `transfers` for each body that
arrives or leaves in parts. Invariant: whatever one user holds open, every other user has room, and
so has the control socket, even for the same user.
"""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass, field

from fumehood.core.errors import RateLimited

MAX_CONNECTIONS = 1024
"""Per user and socket."""

MAX_HELD_BYTES = 128 << 20
"""For one user's unfinished bodies: sixteen of the largest."""


@dataclass(eq=False, slots=True)
class Share:
    """What one user holds."""

    most_connections: int
    connections: Counter[str] = field(default_factory=Counter)
    held_bytes: int = 0

    def connect(self, face: str) -> bool:
        """Count a new connection; return False if that would be too many."""
        if self.connections[face] >= self.most_connections:
            return False
        self.connections[face] += 1
        return True

    def leave(self, face: str) -> None:
        """Discount a connection that has ended."""
        self.connections[face] -= 1


class Shares:
    """The shares of connected users."""

    def __init__(self, most_connections: int) -> None:
        self._most_connections = most_connections
        self._by_uid: dict[int, Share] = {}

    def of(self, uid: int) -> Share:
        """Return a user's share; shares of users without connections are dropped."""
        share = self._by_uid.get(uid)
        if share is None:
            unused = [who for who, held in self._by_uid.items() if not held.connections.total()]
            for who in unused:
                del self._by_uid[who]
            share = self._by_uid[uid] = Share(self._most_connections)
        return share


def too_much_held() -> RateLimited:
    """Make the refusal for a user whose requests hold the maximum."""
    return RateLimited(
        f"This user already has {MAX_HELD_BYTES >> 20} MB of requests in progress. Send fewer at "
        "a time.",
        retry_after_ms=1000,
    )


def most_connections() -> int:
    """Return half of this process's open files at most: one user never takes them all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)
