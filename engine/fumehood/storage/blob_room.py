"""Room for blobs: how many bytes are kept, of all principals and of each.

Host side, inside `blobs`, used by its thread and by the event loop. Invariant: bytes are
taken before they are written, so what lies on the disk is never more than what is allowed.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

MIN_FREE_BYTES = 64 << 20
"""What blobs leave free on the disk: the engine's state grows there, too."""


class NoRoom(Exception):
    """There is no room. The message is a clause fit for a model."""


class BlobRoom:
    """Counts what is taken. One principal may have half of it all."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    def take(self, principal_id: str, size: int, directory: Path) -> None:
        """Raises NoRoom where it would be too much, OSError where the disk cannot be asked."""
        disk = os.statvfs(directory)
        if disk.f_bavail * disk.f_frsize < size + MIN_FREE_BYTES:
            raise NoRoom("the engine's disk is full")
        with self._lock:
            if self._taken[principal_id] + size > self.max_bytes // 2:
                raise NoRoom("your share of what the engine keeps is used up")
            if self._taken.total() + size > self.max_bytes:
                raise NoRoom("what the engine keeps is used up")
            self._taken[principal_id] += size

    def restore(self, principal_id: str, size: int) -> None:
        """Count what was kept before this start."""
        with self._lock:
            self._taken[principal_id] += size

    def give_back(self, principal_id: str, size: int) -> None:
        """Let others have it."""
        with self._lock:
            self._taken[principal_id] -= size
            if self._taken[principal_id] <= 0:
                del self._taken[principal_id]

    @property
    def taken(self) -> int:
        """Bytes in all."""
        with self._lock:
            return self._taken.total()
