"""How much of the daemon one user may hold: connections, and bodies that have not ended.

Host side, asked by `peer` for each connection and by `answers` for each body that comes in
parts. Invariant: whatever one user holds open, there is room for every other one, and on the
control socket for those with authority, also where it is the same user.
"""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass, field

from fumehood.core.errors import RateLimited

MAX_CONNECTIONS = 1024
"""Of one user to one of the two sockets."""

MAX_HELD_BYTES = 128 << 20
"""Of one user's bodies that have not wholly arrived: sixteen of the largest."""


@dataclass(eq=False, slots=True)
class Share:
    """What one user holds now."""

    most_connections: int
    connections: Counter[str] = field(default_factory=Counter)
    held_bytes: int = 0

    def connect(self, face: str) -> bool:
        """Count one connection more; False where it would be too many."""
        if self.connections[face] >= self.most_connections:
            return False
        self.connections[face] += 1
        return True

    def leave(self, face: str) -> None:
        """A counted connection has ended."""
        self.connections[face] -= 1


class Shares:
    """The share of each user who is connected."""

    def __init__(self, most_connections: int) -> None:
        self._most_connections = most_connections
        self._by_uid: dict[int, Share] = {}

    def of(self, uid: int) -> Share:
        """This user's share. Those of users who hold nothing are forgotten."""
        share = self._by_uid.get(uid)
        if share is None:
            unused = [who for who, held in self._by_uid.items() if not held.connections.total()]
            for who in unused:
                del self._by_uid[who]
            share = self._by_uid[uid] = Share(self._most_connections)
        return share


def too_much_held() -> RateLimited:
    """What a user hears whose requests hold all that one user's may."""
    return RateLimited(
        f"This user has {MAX_HELD_BYTES >> 20} MB of requests under way already. Send fewer at a "
        "time.",
        retry_after_ms=1000,
    )


def most_connections() -> int:
    """As many as fit twice into this process's open files: one user never takes them all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)
