"""Marks and user ids of new sandboxes.

Host side. Each sandbox has a mark that no other process of the host has. If the engine is root, the
sandbox also has a user id of its own.
"""

from __future__ import annotations

import resource
import secrets
from collections.abc import Collection
from pathlib import Path

from fumehood.guest.core.marks import marked

LEAST_MARK, MOST_MARK = 1 << 30, 1 << 50
"""Marks are even numbers in this range: no limit that an operator sets is like them."""

FIRST_USER = 2_000_100_000
"""The first user id of sandboxes if all ids exist. *Source*: `direct/ids.py` explains the range."""

USERS = 1000


class NoUser(Exception):
    """All user ids of sandboxes are in use."""


def new_mark() -> int:
    """Return a mark that no process has."""
    hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    most = MOST_MARK if hard == resource.RLIM_INFINITY else min(hard, MOST_MARK)
    while True:
        mark = (LEAST_MARK + secrets.randbelow(most - LEAST_MARK)) & ~1
        if not marked(mark):
            return mark


def new_user(used: Collection[int]) -> int:
    """Return a user id that is not in `used`. Raises NoUser if there is none."""
    first = _first_user(Path("/proc/self/uid_map").read_text(encoding="ascii"))
    for user in range(first, first + USERS):
        if user not in used:
            return user
    raise NoUser


def _first_user(uid_map: str) -> int:
    """Return the first user id of sandboxes in a user namespace with this map of ids."""
    ranges = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    start, _, count = max(ranges, key=lambda one: one[2])
    return min(FIRST_USER, start + count - USERS)
