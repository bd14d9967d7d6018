"""File rooms: private directories with a size limit, each written by one thread.

Host side, used by `blobs` and by parts. The event loop never writes to the disk. Bytes are reserved
before they are written, so the size limit is never exceeded. One principal may use half of the
limit. If there are too many bytes or too many files, the engine evicts the oldest file of the
principal that has the most of them. Only kept files can be evicted. A kept file is complete (see
`keep`) and not held (see `hold`).

If there is a remote place (`RemoteFiles`), other threads copy complete files there (see `put`), so
that a slow remote place delays neither local writes nor the event loop. Before each copy, files
that were removed locally are deleted from the remote place, so that the limit also applies there.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import anyio
import anyio.to_thread

from fumehood.core.fair_share import FairShare, Lack
from fumehood.storage.directory import private, private_directory
from fumehood.storage.errors import FilesAway
from fumehood.storage.files import MIN_FREE_BYTES, Directory, Files

T = TypeVar("T")

REMOTE_THREADS = 8
"""Number of threads with which a room accesses its remote place."""

START_S = 2.0
"""Seconds that the engine's start waits for an answer of the remote place. The value is small, so
that the takeover from another engine is fast."""

MAX_WAITING_BYTES = 128 << 20
"""Maximum number of bytes in memory that wait for the room's thread to write them. One principal
may use half of this number."""

USED_UP = {
    Lack.SHARE: "your share of the engine's storage is used up",
    Lack.TOTAL: "the engine's storage is used up",
}
DISK_FAILED = "the engine's disk is full or failing"
TOO_SLOW = "the engine's disk is too slow"
CLOSED = "the engine keeps nothing now"

Work = Callable[[list[T]], Callable[[], object] | None]
"""A function that writes a list of queued items. It is called in the room's thread. If it returns a
function, the returned function is then called in the event loop."""


class NoRoom(Exception):
    """There is no space left for a file. The message is a clause that gives the reason. A model may
    see the message.
    """


class FileRoom:
    """A private directory of files with a limit of `max_bytes`. One thread of the room writes the
    files, so that the event loop never waits for the disk. If there is no space, old files are
    evicted (removed).

    `name` is the directory's name in the `state` directory. If `state` is None, the files are
    instead in a temporary directory, which `close` removes. `on_evicted` is called in the room's
    thread with the name of each evicted file. Complete files are copied to `remote` if it is given.
    """

    def __init__(
        self,
        state: Path | None,
        name: str,
        max_bytes: int,
        on_evicted: Callable[[str], object],
        *,
        max_files: int = sys.maxsize,
        remote: Files | None = None,
    ) -> None:
        self.share = FairShare(max_bytes, max_bytes // 2)
        self.directory = Path()
        self._state = state
        self._name = name
        self.remote = remote
        self._max_files = max_files
        self._on_evicted = on_evicted
        self._lock = threading.Lock()
        self._kept: dict[str, dict[str, int]] = {}
        """Principal id → name → size of each kept file of this principal, oldest first."""
        self._queue: list[tuple[str, int, Work[Any], Any]] = []
        self._waiting = FairShare(MAX_WAITING_BYTES, MAX_WAITING_BYTES // 2)
        self._thread: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._copiers = ThreadPoolExecutor(REMOTE_THREADS, f"{name}-remote")
        self._copied: set[str] = set()
        """Names of files that are being copied to the remote place."""
        self._gone: dict[str, None] = {}
        """Names of removed files that may still exist in the remote place."""
        self._deleting = threading.Lock()

    def prepare(self) -> bool:
        """Create the directory. Return True if the directory may contain files of an earlier
        engine.

        Raises:
            StateError, OSError: the directory is not private, or cannot be used.
        """
        if self._state is None:
            self._own = tempfile.TemporaryDirectory(prefix=f"fumehood-{self._name}-")
            self.directory = Path(self._own.name)
            return False
        self.directory = private_directory(self._state / self._name)
        return True

    def open(self) -> None:
        """Start the room's thread. From now on, the room accepts work. Must be called in the event
        loop.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, self._name)

    def close(self) -> None:
        """Finish all pending work, and remove the temporary directory if there is one. Blocks."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._copiers.shutdown()
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    async def aclose(self) -> None:
        """Wait for all submitted work, and then call `close` in a thread. `close` may wait for the
        remote place, to which files are still being copied.
        """
        with anyio.CancelScope(shield=True):
            await self.drained()  # so that files that have just been completed are copied
            await anyio.to_thread.run_sync(self.close)

    def submit(self, work: Callable[[], T]) -> Future[T] | None:
        """Run a function in the room's thread. Return the function's future, or None if the room is
        closed or closing.

        If the function raises an exception, it is also reported to the event loop.
        """
        with suppress(RuntimeError):
            if self._thread is not None:
                done = self._thread.submit(work)
                done.add_done_callback(self._report)  # few callers read the future
                return done
        return None

    @property
    def files(self) -> Files:
        """The place of complete files: the remote place if there is one, otherwise the room's
        directory.
        """
        return self.remote or Directory(self.directory)

    async def with_files(
        self, work: Callable[..., T], *given: Any, patience_s: float | None = None
    ) -> T:
        """Call a function that reads or changes `files`. Return the function's result.

        The function runs in a thread, with the arguments `given`. `patience_s` limits the wait for
        a remote place. None means no limit.

        Raises:
            FilesAway: the remote place has not answered within `patience_s` seconds, or the room is
                closed.
        """
        if self.remote is None:
            return await anyio.to_thread.run_sync(work, *given)
        try:
            done = asyncio.wrap_future(self._copiers.submit(work, *given))
        except RuntimeError:
            raise FilesAway(CLOSED) from None
        try:
            with anyio.CancelScope(shield=True):  # closing a file would block on a cancelled read
                await asyncio.wait([done], timeout=patience_s)
            if not done.done():
                raise FilesAway("no answer yet")
            return done.result()
        finally:
            done.cancel()

    def copy(self, name: str) -> None:
        """Copy a complete file to the remote place, in a thread and without waiting. Does nothing
        if the room is closed, the remote place cannot be used or the file has been removed.
        """

        def put() -> None:
            with suppress(OSError):
                self.put(name)

        with suppress(RuntimeError):
            self._copiers.submit(put).add_done_callback(self._report)

    def put(self, name: str) -> None:
        """Copy a complete file to the remote place. Blocks.

        Raises:
            FilesAway: the remote place cannot be used now.
            OSError: the file cannot be read, or has been removed.
        """
        assert self.remote is not None
        self._copied.add(name)
        try:
            self.delete_gone()
            self.remote.put(name, self.directory / name)
        finally:
            self._copied.discard(name)
        if name in self._gone:
            self.delete_gone()

    def delete_gone(self) -> None:
        """Delete from the remote place the files that were removed from the room. Blocks.

        Raises:
            FilesAway: the remote place cannot be used now. The next call tries again.
        """
        with self._deleting:
            gone = [name for name in tuple(self._gone) if name not in self._copied]
            if self.remote is not None and gone:
                self.remote.delete(gone)
                for name in gone:
                    del self._gone[name]

    def queue(self, principal_id: str, size: int, work: Work[T], item: T) -> str | None:
        """Queue an item, which the room's thread later passes to `work`. Return None if the item
        was queued. Otherwise, return the reason why not.

        `size` is the item's size in bytes. A principal can queue only a limited number of bytes.
        The thread calls `work` once with all waiting items that have the same `work`.
        """
        with self._lock:
            if self._thread is None:
                return CLOSED
            if self._waiting.take(principal_id, size) is not None:
                return TOO_SLOW
            self._queue.append((principal_id, size, work, item))
            if len(self._queue) > 1:
                return None
        return CLOSED if self.submit(self._run_queue) is None else None

    def call_in_loop(self, work: Callable[[], object]) -> None:
        """Call a function in the event loop. May be called in any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(work)

    def _report(self, done: Future[Any]) -> None:
        """If a submitted function raised an exception, which is a bug, report the exception to the
        event loop. `done` is the function's future. Runs in the thread that ran the function.
        """
        loop, error = self._loop, done.exception()
        if error is not None and loop is not None:
            where = traceback.extract_tb(error.__traceback__)[-1].name
            words = f"A thread of {self._name} failed: {type(error).__name__} in {where}"
            told = {"message": words, "exception": error}
            self.call_in_loop(partial(loop.call_exception_handler, told))

    async def drained(self) -> None:
        """Wait until all the work that was submitted before this call is done."""
        done = self.submit(lambda: None)
        if done is not None:
            await asyncio.wrap_future(done)

    def take(self, principal_id: str, size: int) -> None:
        """Reserve `size` bytes for a principal. Runs in the room's thread.

        If the principal's limit is reached, its own oldest files are evicted. If the whole room is
        full, the oldest files of the principal that uses the most bytes are evicted.

        Raises:
            NoRoom: no file is left to evict, or the disk is full.
            OSError: the file system's free space cannot be read.
        """
        while True:
            self.require_disk(size)
            with self._lock:
                lack = self.share.take(principal_id, size)
                if lack is None:
                    return
                whose = principal_id
                if lack is Lack.TOTAL:
                    whose = max(self._kept, key=self.share.of, default=principal_id)
            if not self._evict(whose):
                raise NoRoom(USED_UP[lack])

    def require_disk(self, size: int) -> None:
        """Raise NoRoom if the disk has no space for `size` bytes. Raise OSError if the check
        fails.
        """
        disk = os.statvfs(self.directory)
        if disk.f_bavail * disk.f_frsize < size + MIN_FREE_BYTES:
            raise NoRoom("the engine's disk is full")

    def keep(self, principal_id: str, name: str, size: int) -> None:
        """Register a complete file as the newest kept file. The file's bytes must already be
        reserved.
        """
        with self._lock:
            self._kept.setdefault(principal_id, {})[name] = size
            counts = {who: len(files) for who, files in self._kept.items()}
        if sum(counts.values()) > self._max_files:
            self.submit(partial(self._evict, max(counts, key=counts.__getitem__)))

    def restore(self, principal_id: str, name: str, size: int) -> None:
        """Register a file that an earlier engine kept, and reserve its bytes, even if the limit is
        exceeded.
        """
        with self._lock:
            self.share.add(principal_id, size)
        self.keep(principal_id, name, size)

    def hold(self, principal_id: str, name: str) -> int | None:
        """Protect a file from eviction until `keep` registers it again. The file's bytes stay
        reserved.

        Return the file's size in bytes, or None if the room has no registered file with this name
        for this principal.
        """
        with self._lock:
            files = self._kept.get(principal_id, {})
            size = files.pop(name, None)
            if not files:
                self._kept.pop(principal_id, None)
            return size

    def remove(self, principal_id: str, name: str) -> bool:
        """Remove a kept file, and release its bytes. Return False if the file is not kept. Runs in
        the room's thread.
        """
        size = self.hold(principal_id, name)
        if size is not None:
            self.discard(principal_id, name, size)
            if self.remote is not None:
                self._gone[name] = None
        return size is not None

    def discard(self, principal_id: str, name: str, size: int) -> None:
        """Remove a file for which `keep` was not called, and release the `size` bytes that are
        reserved for the file. Runs in the room's thread.
        """
        self.unlink(name)
        with self._lock:
            self.share.give_back(principal_id, size)

    def unlink(self, name: str) -> None:
        """Remove a file from the directory if it exists. The file's bytes stay reserved."""
        with suppress(OSError):  # not a file: a directory of this name stays
            (self.directory / name).unlink(missing_ok=True)

    def open_file(self, name: str, flags: int) -> BinaryIO:
        """Open a file of the room with these flags of `os.open`. The file must not be a symbolic
        link. Runs in a thread. Raises OSError.
        """
        descriptor = private(os.fspath(self.directory / name), flags)
        return os.fdopen(descriptor, "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "ab")

    def _run_queue(self) -> None:
        with self._lock:
            queue, self._queue = self._queue, []
        # One call for many items: the thread and the event loop do not wait for each other each
        # time.
        works: dict[Work[Any], list[Any]] = {}
        for _, _, work, item in queue:
            works.setdefault(work, []).append(item)
        try:
            done = [work(items) for work, items in works.items()]
        finally:  # even after an error, these bytes no longer count as waiting
            with self._lock:
                for principal_id, size, *_ in queue:
                    self._waiting.give_back(principal_id, size)
        afterwards = [after for after in done if after is not None]
        if afterwards:
            self.call_in_loop(lambda: [after() for after in afterwards])

    def _evict(self, principal_id: str) -> bool:
        """Evict the oldest kept file of a principal. Return False if the principal has no kept
        file.
        """
        with self._lock:
            oldest = next(iter(self._kept.get(principal_id, ())), None)
        if oldest is None:
            return False
        if self.remove(principal_id, oldest):
            self._on_evicted(oldest)
        return True


class RoomFile:
    """A file of a room that is being written. All methods except `keep` must run in the room's
    thread.
    """

    def __init__(self, room: FileRoom, principal_id: str, name: str, size: int = 0) -> None:
        self.size = size
        """Number of bytes that are reserved for the file."""
        self.fault: str | None = None
        """Why no more bytes can be appended, or None."""
        self.principal_id = principal_id
        self.room = room
        self.name = name
        self._file: BinaryIO | None = None

    def append(self, data: bytes) -> bool:
        """Append bytes. Return False if these bytes or earlier bytes could not be written."""
        if self.fault is None:
            try:
                self.room.take(self.principal_id, len(data))
                self.size += len(data)
                if self._file is None:
                    self._file = self.room.open_file(self.name, os.O_WRONLY | os.O_CREAT)
                self._file.write(data)
                self._file.flush()
            except NoRoom as reason:
                self.fault = str(reason)
            except OSError:
                self.fault = DISK_FAILED
        return self.fault is None

    def close(self) -> None:
        """Close the file. A closed file can be read and kept, but not appended to."""
        self.fault = self.fault or CLOSED
        if self._file is not None:
            with suppress(OSError):  # buffered bytes could not be written
                self._file.close()

    def keep(self) -> None:
        """Register the complete file in its room as the newest kept file."""
        self.room.keep(self.principal_id, self.name, self.size)

    def remove(self) -> None:
        """Close and delete this file, and release its reserved bytes. `keep` must not have been
        called for the file.
        """
        self.close()
        self.room.discard(self.principal_id, self.name, self.size)
        self.size = 0
