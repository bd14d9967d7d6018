"""File rooms: private directories with a size limit, each written by one thread.

Host side, used by `blobs` and `recordings`. The event loop never writes to the disk. Bytes are
reserved before they are written, so the limit is never exceeded; one principal may have half of it.
If there are too many bytes or files, the oldest kept file of the principal that has most is
evicted. Only complete files (see `keep`) that are not held are evicted.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from fumehood.core.fair_share import FairShare, Lack
from fumehood.storage.directory import PRIVATE_FILE, private_directory

T = TypeVar("T")

MIN_FREE_BYTES = 64 << 20
"""Bytes of disk space that are left free for the engine's database."""

USED_UP = {
    Lack.SHARE: "your share of the engine's storage is used up",
    Lack.TOTAL: "the engine's storage is used up",
}
DISK_FAILED = "the engine's disk is full or failing"
TOO_SLOW = "the engine's disk is too slow"


class NoRoom(Exception):
    """There is no space left. The message is a clause that may be shown to a model."""


class FileRoom:
    """A directory of files, used by its thread and by the event loop.

    Without a `state` directory the files are in a temporary one, which `close` removes.
    `on_evicted` is called in the thread, with the name of each evicted file.
    """

    def __init__(
        self,
        state: Path | None,
        name: str,
        max_bytes: int,
        on_evicted: Callable[[str], object],
        *,
        max_files: int = sys.maxsize,
    ) -> None:
        self.share = FairShare(max_bytes, max_bytes // 2)
        self.directory = Path()
        self._state = state
        self._name = name
        self._max_files = max_files
        self._on_evicted = on_evicted
        self._lock = threading.Lock()
        self._kept: dict[str, dict[str, int]] = {}
        """Principal → name → size of complete files, oldest first."""
        self._thread: ThreadPoolExecutor | None = None
        self._own: tempfile.TemporaryDirectory[str] | None = None

    @property
    def is_open(self) -> bool:
        """Whether files can be written: True between `open` and `close`."""
        return self._thread is not None

    @property
    def taken(self) -> int:
        """Bytes reserved by all principals."""
        return self.share.total

    def prepare(self) -> bool:
        """Create the directory; return whether it may have files of an earlier engine.

        Raises:
            StateError, OSError: the directory is not private, or cannot be used.
        """
        if self._state is not None:
            self.directory = private_directory(self._state / self._name)
        return self._state is not None

    def open(self) -> None:
        """Start to accept work. The thread starts with the first work."""
        self._thread = ThreadPoolExecutor(1, self._name)

    def close(self) -> None:
        """Finish pending work and remove a temporary directory."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def submit(self, work: Callable[[], T]) -> Future[T] | None:
        """Run a function in the thread. Returns None if the room is closed or closing."""
        with suppress(RuntimeError):
            return None if self._thread is None else self._thread.submit(work)
        return None

    async def drained(self) -> None:
        """Wait until all work submitted so far is done."""
        done = self.submit(_nothing)
        if done is not None:
            await asyncio.wrap_future(done)

    def create(self, name: str) -> int:
        """Open a new file to write and read. Runs in the thread."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._directory() / name, flags, PRIVATE_FILE)

    def take(self, principal_id: str, size: int) -> None:
        """Reserve bytes. Runs in the thread.

        Evicts kept files if necessary: the principal's own, or, if the total is used up, those of
        the principal that has most.

        Raises:
            NoRoom: no file is left to evict, or the disk is full.
            OSError: the file system's free space cannot be read.
        """
        while True:
            disk = os.statvfs(self._directory())
            if disk.f_bavail * disk.f_frsize < size + MIN_FREE_BYTES:
                raise NoRoom("the engine's disk is full")
            with self._lock:
                lack = self.share.take(principal_id, size)
                if lack is None:
                    return
                whose = principal_id
                if lack is Lack.TOTAL:
                    whose = max(self._kept, key=self.share.of, default=principal_id)
            if not self._evict(whose):
                raise NoRoom(USED_UP[lack])

    def give_back(self, principal_id: str, size: int) -> None:
        """Release reserved bytes."""
        with self._lock:
            self.share.give_back(principal_id, size)

    def keep(self, principal_id: str, name: str, size: int) -> None:
        """Register a complete file, whose bytes are already reserved, as the newest one."""
        with self._lock:
            self._kept.setdefault(principal_id, {})[name] = size
            counts = {who: len(files) for who, files in self._kept.items()}
        if sum(counts.values()) > self._max_files:
            self.submit(partial(self._evict, max(counts, key=counts.__getitem__)))

    def restore(self, principal_id: str, name: str, size: int) -> None:
        """Register a file of an earlier engine, even if it exceeds the limit."""
        with self._lock:
            self.share.add(principal_id, size)
        self.keep(principal_id, name, size)

    def hold(self, principal_id: str, name: str) -> bool:
        """Protect a kept file from eviction; return False if it is not kept.

        Its bytes stay reserved.
        """
        return self._pop(principal_id, name) is not None

    def remove(self, principal_id: str, name: str) -> bool:
        """Remove a kept file, or return False if it is not kept. Runs in the thread."""
        size = self._pop(principal_id, name)
        if size is not None:
            self.discard(principal_id, name, size)
        return size is not None

    def discard(self, principal_id: str, name: str, size: int) -> None:
        """Remove a file that is not kept, and release its bytes. Runs in the thread."""
        self.unlink(name)
        self.give_back(principal_id, size)

    def unlink(self, name: str) -> None:
        """Remove a file without a change to the reserved bytes, if it exists."""
        with suppress(OSError):  # not a file: a directory of this name stays
            (self.directory / name).unlink(missing_ok=True)

    def _pop(self, principal_id: str, name: str) -> int | None:
        with self._lock:
            files = self._kept.get(principal_id, {})
            size = files.pop(name, None)
            if not files:
                self._kept.pop(principal_id, None)
            return size

    def _evict(self, principal_id: str) -> bool:
        """Evict the oldest kept file of a principal; return whether there was one."""
        with self._lock:
            oldest = next(iter(self._kept.get(principal_id, ())), None)
        if oldest is None:
            return False
        if self.remove(principal_id, oldest):
            self._on_evicted(oldest)
        return True

    def _directory(self) -> Path:
        if self._state is None and self._own is None:
            self._own = tempfile.TemporaryDirectory(prefix=f"fumehood-{self._name}-")
            self.directory = Path(self._own.name)
        return self.directory


def _nothing() -> None:
    pass


__all__ = ["DISK_FAILED", "MIN_FREE_BYTES", "TOO_SLOW", "FileRoom", "NoRoom"]
