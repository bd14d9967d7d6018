"""Blobs: content too large for an answer, kept in files for a limited time.

Host side. Written by the executors and `pipeline/result`, read by the faces. A blob belongs to one
principal; to any other principal it does not exist. It ends with its session, at its expiry, or
when a newer one needs its space: the oldest go first. Invariants: a file is complete before its row
is inserted; a file without a row and a row without a file are no blob, and the next start removes
them. The event loop never writes to the disk:
one thread does, and a blob is not kept if the thread falls behind. Bytes are reserved before they
are written, so the disk never holds more than is allowed. A signed address proves that this engine
made it for this blob, principal and expiry; the key lies beside the database, not in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import anyio.to_thread
from sqlalchemy import ColumnElement, delete, insert, select, true

from fumehood.core.errors import ResourceNotFound
from fumehood.core.session import SessionStatus
from fumehood.storage.changes import stamp
from fumehood.storage.database import Database
from fumehood.storage.directory import PRIVATE_FILE, private_directory
from fumehood.storage.errors import StoreError
from fumehood.storage.schema import BLOBS, SESSIONS
from fumehood.storage.writer import Job

T = TypeVar("T")

DIRECTORY_NAME = "blobs"
KEY_NAME = "blobs.key"
KEY_BYTES = 32
DRAFT_SUFFIX = ".new"
MAX_PENDING_BYTES = 64 << 20
"""The most bytes of all drafts that may wait for the disk."""

MIN_FREE_BYTES = 64 << 20
"""Free space that blobs leave on the disk, because the engine's state grows there, too."""

PRUNED_AT_ONCE = 200
NO_STORE = "the engine keeps nothing now"
NO_SUCH_BLOB = "You have no such blob. Copy its complete address from an answer."
EXPIRED = (
    "This blob has expired and is no longer there: its time is over, its session has ended, or "
    "newer ones took its place. Make the call again to get a new one."
)


@dataclass(frozen=True, slots=True)
class Blob:
    """The description of a kept blob."""

    id: str
    filename: str
    content_type: str
    size: int
    expires_at: datetime
    url: str


class NotKept(Exception):
    """A blob could not be kept. The message is a clause that may be shown to a model."""


class Draft:
    """A blob that is being written. Fed from the event loop, written by the store's thread."""

    def __init__(self, store: BlobStore, principal_id: str, session_id: str | None) -> None:
        self.id = f"blob_{secrets.token_hex(16)}"
        self.principal_id = principal_id
        self.session_id = session_id
        self.size = 0
        """Bytes fed so far."""
        self.fault = None if store.is_open else NO_STORE
        """The reason why it cannot be kept, once that is known."""
        self._store = store
        self._file: BinaryIO | None = None
        self._written = 0

    def feed(self, data: bytes) -> None:
        """Add bytes. Never waits and never raises."""
        self.size += len(data)
        if self.fault is None and not self._store.queue(self._write, data):
            self.fault = "the engine's disk is too slow"

    def discard(self) -> None:
        """Drop the draft and remove its file. Never waits."""
        self.fault = self.fault or "it was given up"
        self._store.submit(self._remove)

    def _write(self, data: bytes) -> None:
        """In the thread: the next bytes to the disk."""
        if self.fault is not None:
            return
        try:
            if self._file is None:
                self._file = self._store.new_file(self.id)
            self._store.take(self.principal_id, len(data))
            self._written += len(data)
            self._file.write(data)
        except NoRoom as reason:
            self.fault = str(reason)
        except OSError:
            self.fault = "the engine's disk is full or failing"

    def _finish(self) -> None:
        """In the thread: close it and give it its name."""
        try:
            if self.fault is None and self._file is None:
                self._file = self._store.new_file(self.id)
            if self._file is not None:
                self._file.close()
            if self.fault is None:
                path = self._store.directory / self.id
                path.with_suffix(DRAFT_SUFFIX).rename(path)
                self._store.add(self.principal_id, self.id, self._written)
                self._written = 0
        except OSError:
            self.fault = "the engine's disk is full or failing"
        if self.fault is not None:
            self._remove()

    def _remove(self) -> None:
        """In the thread: leave nothing behind, under either name."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._store.remove(self.principal_id, self.id)
        with suppress(OSError):
            (self._store.directory / self.id).with_suffix(DRAFT_SUFFIX).unlink(missing_ok=True)
        self._store.room.give_back(self.principal_id, self._written)
        self._written = 0


class BlobStore:
    """The blobs of one engine. Call `open` before the first and `close` after the last.

    Without a `state` directory they lie in a temporary one, which is removed with the engine.
    `overdue` is set when there was no space, or a session has ended, so that `prune` runs soon.
    """

    def __init__(
        self,
        database: Database,
        state: Path | None,
        *,
        max_bytes: int,
        lifetime_s: int,
        now: Callable[[], datetime],
    ) -> None:
        self.room = BlobRoom(max_bytes)
        self.directory = Path()
        self.overdue = asyncio.Event()
        self._database = database
        self._state = state
        self._lifetime_s = lifetime_s
        self._now = now
        self._links = BlobLinks(secrets.token_bytes(KEY_BYTES))
        self._thread: ThreadPoolExecutor | None = None
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._pending = 0
        self._kept: dict[str, dict[str, int]] = {}
        """The sizes of all blobs by principal and id, the oldest first. Only the thread uses it."""
        self._replaced: deque[str] = deque()
        """Blobs that made room for newer ones, and whose rows are still there."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_open(self) -> bool:
        """Whether anything can be kept now."""
        return self._thread is not None

    async def open(self) -> None:
        """Prepare the directory and remove the leftovers of a crash.

        Raises:
            StoreError: the directory is not private, or cannot be used.
        """
        try:
            if self._state is not None:
                self.directory = private_directory(self._state / DIRECTORY_NAME)
                self._links = BlobLinks(load_key(self._state / KEY_NAME))
                await self._sweep()
            self._loop = asyncio.get_running_loop()
            self._thread = ThreadPoolExecutor(1, "blobs")
        except OSError as error:
            raise StoreError(f"The blobs cannot be kept: {error.strerror}.") from None

    def close(self) -> None:
        """Finish pending writes and remove a temporary directory."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def draft(self, principal_id: str, session_id: str | None = None) -> Draft:
        """A new blob of a principal or of its session, to be fed and then kept or discarded."""
        return Draft(self, principal_id, session_id)

    async def keep(self, draft: Draft, filename: str, content_type: str) -> Blob:
        """Turn a draft into a blob. The draft is used up even if that fails.

        Cancelling the wait does not stop the write.

        Raises:
            NotKept: with the reason.
        """
        finished = self.submit(draft._finish)
        if finished is None:
            raise NotKept(NO_STORE)
        await asyncio.wrap_future(finished)
        if draft.fault is not None:
            self.overdue.set()
            raise NotKept(draft.fault)
        now = self._now()
        row = {
            "id": draft.id,
            "principal_id": draft.principal_id,
            "session_id": draft.session_id,
            "filename": filename,
            "content_type": content_type,
            "size": draft.size,
            "created_at": stamp(now),
            "expires_at": int(now.timestamp()) + self._lifetime_s,
        }
        try:
            await self._database.write(_insertion(row))
        except StoreError:
            draft.discard()
            raise NotKept("the engine's state cannot be written") from None
        return self._blob(row)

    async def open_blob(
        self, blob_id: str, principal_id: str, expires: str, signature: str
    ) -> tuple[Blob, BinaryIO]:
        """A blob and its open file. The caller closes the file.

        Raises:
            ResourceNotFound: this principal has no such blob, or it has expired.
            ReadFailed: the state cannot be read.
        """
        is_number = expires.isascii() and expires.isdigit() and len(expires) <= 12
        if not is_number or not self._links.is_genuine(
            blob_id, principal_id, int(expires), signature
        ):
            raise ResourceNotFound(NO_SUCH_BLOB)
        if int(expires) <= self._now().timestamp():
            raise ResourceNotFound(EXPIRED)
        own = (BLOBS.c.id == blob_id) & (BLOBS.c.principal_id == principal_id)
        rows = await self._database.read(_matching(own))
        try:
            if not rows:
                raise FileNotFoundError
            path, size = self.directory / blob_id, rows[0]["size"]
            file = await anyio.to_thread.run_sync(_open_to_read, path, size)
        except OSError:  # it went in this moment, or the disk has lost it
            raise ResourceNotFound(EXPIRED) from None
        return self._blob(rows[0]), file

    async def prune(self, now: datetime) -> int:
        """Remove blobs that have expired, or whose session is over; returns their number.

        Raises:
            ReadFailed, WriteFailed: the rest stays until the next run.
        """
        self.overdue.clear()
        if self._thread is None:
            return 0
        active = select(SESSIONS.c.id).where(SESSIONS.c.state == SessionStatus.ACTIVE.value)
        replaced = [self._replaced.popleft() for _ in range(len(self._replaced))]
        has_ended = (
            (BLOBS.c.expires_at <= int(now.timestamp()))
            | (BLOBS.c.session_id.is_not(None) & BLOBS.c.session_id.not_in(active))
            | BLOBS.c.id.in_(replaced)
        )
        rows = await self._database.read(_matching(has_ended))
        for start in range(0, len(rows), PRUNED_AT_ONCE):
            await self._delete(rows[start : start + PRUNED_AT_ONCE])
        return len(rows)

    # -- for drafts ----------------------------------------------------------------------

    def submit(self, work: Callable[[], T]) -> Future[T] | None:
        """Run something in the thread; None if the store is closed."""
        return None if self._thread is None else self._thread.submit(work)

    def queue(self, write: Callable[[bytes], None], data: bytes) -> bool:
        """Queue a write for the thread; False if it has fallen behind."""
        if self._pending + len(data) > MAX_PENDING_BYTES or self._thread is None:
            return False
        loop = asyncio.get_running_loop()
        self._pending += len(data)

        def work() -> None:
            write(data)
            with suppress(RuntimeError):  # the loop has ended, and nobody counts any more
                loop.call_soon_threadsafe(self._written, len(data))

        self._thread.submit(work)
        return True

    async def drained(self) -> None:
        """Wait until everything that drafts were fed before is written."""
        written = self.submit(_nothing)
        if written is not None:
            await asyncio.wrap_future(written)

    def take(self, principal_id: str, size: int) -> None:
        """In the thread: reserve bytes. Older blobs of the principal make room, or where others
        have used up the total, those of the principal that has most.

        Raises:
            NoRoom, OSError: as `BlobRoom.take`; there is no such blob left.
        """
        while True:
            try:
                return self.room.take(principal_id, size, self.directory)
            except NoRoom as reason:
                whose = principal_id
                if isinstance(reason, NoTotal):
                    whose = max(self._kept, key=self.room.taken_by, default=principal_id)
                oldest = next(iter(self._kept.get(whose, ())), None)
                if oldest is None:
                    raise
                self.remove(whose, oldest)
                self._replaced.append(oldest)
                if self._loop is not None:
                    with suppress(RuntimeError):  # the loop has ended; the next start removes rows
                        self._loop.call_soon_threadsafe(self.overdue.set)

    def add(self, principal_id: str, blob_id: str, size: int) -> None:
        """In the thread: count a complete blob, whose bytes are reserved."""
        self._kept.setdefault(principal_id, {})[blob_id] = size

    def remove(self, principal_id: str, blob_id: str) -> None:
        """In the thread: remove the file of a blob, and give its bytes back."""
        size = self._kept.get(principal_id, {}).pop(blob_id, None)
        if size is None:
            return
        if not self._kept[principal_id]:
            del self._kept[principal_id]
        _unlink(self.directory, [blob_id])
        self.room.give_back(principal_id, size)

    def new_file(self, blob_id: str) -> BinaryIO:
        """In the thread: a draft's file."""
        if self._state is None and self._own is None:
            self._own = tempfile.TemporaryDirectory(prefix="fumehood-blobs-")
            self.directory = Path(self._own.name)
        path = (self.directory / blob_id).with_suffix(DRAFT_SUFFIX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb")

    def _written(self, size: int) -> None:
        self._pending -= size

    # -- rows and files ------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Remove what a crash left: files without a row, rows without a file, and drafts."""
        rows = {row["id"]: row for row in await self._database.read(_matching(true()))}
        found = await anyio.to_thread.run_sync(_files_below, self.directory)
        lost = [row for row in rows.values() if found.get(row["id"]) != row["size"]]
        for start in range(0, len(lost), PRUNED_AT_ONCE):
            batch = [row["id"] for row in lost[start : start + PRUNED_AT_ONCE]]
            await self._database.write(_deletion(batch))
        kept = rows.keys() - {row["id"] for row in lost}
        await anyio.to_thread.run_sync(_unlink, self.directory, found.keys() - kept)
        for row in sorted((rows[blob_id] for blob_id in kept), key=lambda row: row["created_at"]):
            self.room.restore(row["principal_id"], row["size"])
            self.add(row["principal_id"], row["id"], row["size"])

    async def _delete(self, rows: list[dict[str, Any]]) -> None:
        await self._database.write(_deletion([row["id"] for row in rows]))
        for row in rows:
            self.submit(partial(self.remove, row["principal_id"], row["id"]))
        await self.drained()

    def _blob(self, row: dict[str, Any]) -> Blob:
        return Blob(
            id=row["id"],
            filename=row["filename"],
            content_type=row["content_type"],
            size=row["size"],
            expires_at=datetime.fromtimestamp(row["expires_at"], UTC),
            url=self._links.make(row["id"], row["principal_id"], row["expires_at"]),
        )


def _matching(wanted: ColumnElement[bool]) -> Job[list[dict[str, Any]]]:
    found = select(BLOBS).where(wanted)
    return lambda connection: [dict(row) for row in connection.execute(found).mappings()]


def _insertion(row: dict[str, Any]) -> Job[int]:
    return lambda connection: connection.execute(insert(BLOBS), row).rowcount


def _deletion(ids: list[str]) -> Job[int]:
    chosen = delete(BLOBS).where(BLOBS.c.id.in_(ids))
    return lambda connection: connection.execute(chosen).rowcount


def _files_below(directory: Path) -> dict[str, int]:
    """Name and size of every entry below; a non-file gets a size that never matches."""
    found = {}
    for path in directory.iterdir():
        status = path.lstat()
        found[path.name] = status.st_size if stat.S_ISREG(status.st_mode) else -1
    return found


def _unlink(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):  # a directory of somebody's stays, and is no blob
            (directory / name).unlink(missing_ok=True)


def _nothing() -> None:
    pass


def _open_to_read(path: Path, size: int) -> BinaryIO:
    """Raises OSError, also where the disk has lost a part of the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_size != size:
        os.close(descriptor)
        raise FileNotFoundError
    return os.fdopen(descriptor, "rb")


# -- room -----------------------------------------------------------------------------


class NoRoom(Exception):
    """There is no space left. The message is a clause that may be shown to a model."""


class NoShare(NoRoom):
    """One principal has used up its share."""


class NoTotal(NoRoom):
    """All principals together have used up the total."""


class BlobRoom:
    """The bytes reserved, in all and by principal. One principal may have half of the total.

    Used by the store's thread and by the event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    def take(self, principal_id: str, size: int, directory: Path) -> None:
        """Reserve bytes.

        Raises:
            NoRoom: the disk, the principal's share (NoShare) or the total (NoTotal) is used up.
            OSError: the file system's free space cannot be read.
        """
        disk = os.statvfs(directory)
        if disk.f_bavail * disk.f_frsize < size + MIN_FREE_BYTES:
            raise NoRoom("the engine's disk is full")
        with self._lock:
            if self._taken[principal_id] + size > self.max_bytes // 2:
                raise NoShare("your share of the engine's storage is used up")
            if self._taken.total() + size > self.max_bytes:
                raise NoTotal("the engine's storage is used up")
            self._taken[principal_id] += size

    def restore(self, principal_id: str, size: int) -> None:
        """Count bytes that were kept before this start."""
        with self._lock:
            self._taken[principal_id] += size

    def give_back(self, principal_id: str, size: int) -> None:
        """Release bytes."""
        with self._lock:
            self._taken[principal_id] -= size
            if self._taken[principal_id] <= 0:
                del self._taken[principal_id]

    def taken_by(self, principal_id: str) -> int:
        """Bytes reserved by one principal."""
        with self._lock:
            return self._taken[principal_id]

    @property
    def taken(self) -> int:
        """Bytes reserved by all principals."""
        with self._lock:
            return self._taken.total()


# -- signed addresses ----------------------------------------------------------------------


class BlobLinks:
    """Signs and verifies the addresses of blobs with one secret key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def make(self, blob_id: str, principal_id: str, expires_at: int) -> str:
        """The address, as a path on the callers' socket."""
        signature = self._signature(blob_id, principal_id, expires_at)
        return f"/v1/blobs/{blob_id}?expires={expires_at}&signature={signature}"

    def is_genuine(self, blob_id: str, principal_id: str, expires_at: int, signature: str) -> bool:
        """Whether `make` signed exactly this. Compared in constant time."""
        expected = self._signature(blob_id, principal_id, expires_at)
        return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace"))

    def _signature(self, *parts: str | int) -> str:
        # Each part is prefixed with its length, so that no two lists of parts share a signature.
        text = "blob:" + "".join(f"{len(str(part))}:{part}" for part in parts)
        return hmac.digest(self._key, text.encode(), hashlib.sha256).hex()


def load_key(path: Path) -> bytes:
    """Read the key file; create it if it is missing or does not hold a key.

    Raises:
        OSError: the file can be neither read nor created.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _make_key(path)
    with os.fdopen(descriptor, "rb") as file:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != PRIVATE_FILE:
            os.fchmod(descriptor, PRIVATE_FILE)
        key = file.read(KEY_BYTES + 1)
    return key if len(key) == KEY_BYTES else _make_key(path)


def _make_key(path: Path) -> bytes:
    """Write a new key to the file atomically."""
    key = secrets.token_bytes(KEY_BYTES)
    made = path.with_name(f"{path.name}.new")
    made.unlink(missing_ok=True)
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(descriptor)
    made.replace(path)
    return key
