"""Blobs: what was too large for an answer, in files of their own, for a while.

Host side. Written by executors and `pipeline/shorten`, read by the faces. A blob belongs to one
principal; for everybody else it does not exist. Invariants: a file is complete before its
row is made and its row is gone before its file goes, so that a crash leaves at most a file
without a row, which the next start removes; a row without its file is removed there, too. The
event loop writes to no disk: one thread does, and what it cannot follow is not kept.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import anyio.to_thread
from sqlalchemy import ColumnElement, delete, insert, select, true

from fumehood.core.errors import ResourceNotFound
from fumehood.storage.blob_links import KEY_BYTES, BlobLinks, load_key
from fumehood.storage.blob_room import BlobRoom, NoRoom
from fumehood.storage.changes import stamp
from fumehood.storage.database import Database
from fumehood.storage.directory import PRIVATE_FILE, private_directory
from fumehood.storage.errors import StoreError
from fumehood.storage.schema import BLOBS
from fumehood.storage.writer import Job

T = TypeVar("T")

DIRECTORY_NAME = "blobs"
KEY_NAME = "blobs.key"
DRAFT_SUFFIX = ".new"
MAX_PENDING_BYTES = 64 << 20
"""Waiting for the disk, of all drafts together."""

PRUNED_AT_ONCE = 200
NO_STORE = "the engine keeps nothing now"
NO_SUCH_BLOB = "There is no such blob of yours. Take its address from an answer, whole."
EXPIRED = "This blob has expired and is no longer there. Make the call again to get a new one."


@dataclass(frozen=True, slots=True)
class Blob:
    """What is known of a blob that is kept."""

    id: str
    filename: str
    content_type: str
    size: int
    expires_at: datetime
    url: str


class NotKept(Exception):
    """It could not be kept. The message is a clause fit for a model."""


class Draft:
    """A blob in the making. Fed from the event loop, written by the store's thread."""

    def __init__(self, store: BlobStore, principal_id: str) -> None:
        self.id = f"blob_{secrets.token_hex(16)}"
        self.principal_id = principal_id
        self.size = 0
        """Bytes that were fed."""
        self.fault = None if store.is_open else NO_STORE
        """Why it cannot be kept, as soon as that is known."""
        self._store = store
        self._file: BinaryIO | None = None
        self._written = 0

    def feed(self, data: bytes) -> None:
        """The next bytes. Waits for nothing and raises nothing."""
        self.size += len(data)
        if self.fault is None and not self._store.queue(self._write, data):
            self.fault = "the engine's disk is too slow"

    def discard(self) -> None:
        """Forget it, whatever was written. Waits for nothing."""
        self.fault = self.fault or "it was given up"
        self._store.submit(self._remove)

    def _write(self, data: bytes) -> None:
        """In the thread: the next bytes to the disk."""
        if self.fault is not None:
            return
        try:
            if self._file is None:
                self._file = self._store.new_file(self.id)
            self._store.room.take(self.principal_id, len(data), self._store.directory)
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
        except OSError:
            self.fault = "the engine's disk is full or failing"
        if self.fault is not None:
            self._remove()

    def _remove(self) -> None:
        """In the thread: leave nothing behind, under either name."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        path = self._store.directory / self.id
        for name in (path, path.with_suffix(DRAFT_SUFFIX)):
            with suppress(OSError):
                name.unlink(missing_ok=True)
        self._store.room.give_back(self.principal_id, self._written)
        self._written = 0


class BlobStore:
    """The blobs of one engine. `open` before the first, `close` after the last.

    Without a `state` directory they lie in one of their own, which goes with the engine.
    `overdue` is set when there was no room, so that what has expired should go.
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

    @property
    def is_open(self) -> bool:
        """Whether anything can be kept now."""
        return self._thread is not None

    async def open(self) -> None:
        """Make ready, and remove what a crash has left.

        Raises:
            StoreError: the place is not private, or cannot be used.
        """
        try:
            if self._state is not None:
                self.directory = private_directory(self._state / DIRECTORY_NAME)
                self._links = BlobLinks(load_key(self._state / KEY_NAME))
                await self._sweep()
            self._thread = ThreadPoolExecutor(1, "blobs")
        except OSError as error:
            raise StoreError(f"The blobs cannot be kept: {error.strerror}.") from None

    def close(self) -> None:
        """Finish what was begun; a directory of one's own goes."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def draft(self, principal_id: str) -> Draft:
        """A new blob of a principal's, to be fed and then kept or discarded."""
        return Draft(self, principal_id)

    async def keep(self, draft: Draft, filename: str, content_type: str) -> Blob:
        """Make a draft a blob. Whatever happens, the draft is gone afterwards.

        Cancelling the wait does not stop it.

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
        """A blob and its file, open at the beginning. The caller closes it.

        Raises:
            ResourceNotFound: no such blob of this principal's, or no longer.
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
            file = await anyio.to_thread.run_sync(_open_to_read, self.directory / blob_id)
        except OSError:  # it went in this moment, or the disk has lost it
            raise ResourceNotFound(EXPIRED) from None
        return self._blob(rows[0]), file

    async def prune(self, now: datetime) -> int:
        """Remove what has expired; returns how many.

        Raises:
            ReadFailed, WriteFailed: the rest stays until the next time.
        """
        self.overdue.clear()
        if self._thread is None:
            return 0
        has_ended = BLOBS.c.expires_at <= int(now.timestamp())
        rows = await self._database.read(_matching(has_ended))
        for start in range(0, len(rows), PRUNED_AT_ONCE):
            await self._delete(rows[start : start + PRUNED_AT_ONCE])
        return len(rows)

    # -- for drafts ----------------------------------------------------------------------

    def submit(self, work: Callable[[], T]) -> Future[T] | None:
        """Have the thread do something; None where there is none any more."""
        return None if self._thread is None else self._thread.submit(work)

    def queue(self, write: Callable[[bytes], None], data: bytes) -> bool:
        """Have the thread write something, if it can follow."""
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
        """Files without a row, rows without their file, and drafts: a crash has left them."""
        rows = {row["id"]: row for row in await self._database.read(_matching(true()))}
        found = await anyio.to_thread.run_sync(_files_below, self.directory)
        lost = [row for row in rows.values() if found.get(row["id"]) != row["size"]]
        for start in range(0, len(lost), PRUNED_AT_ONCE):
            batch = [row["id"] for row in lost[start : start + PRUNED_AT_ONCE]]
            await self._database.write(_deletion(batch))
        kept = rows.keys() - {row["id"] for row in lost}
        await anyio.to_thread.run_sync(_unlink, self.directory, found.keys() - kept)
        for blob_id in kept:
            self.room.restore(rows[blob_id]["principal_id"], rows[blob_id]["size"])

    async def _delete(self, rows: list[dict[str, Any]]) -> None:
        ids = [row["id"] for row in rows]
        await self._database.write(_deletion(ids))
        await anyio.to_thread.run_sync(_unlink, self.directory, ids)
        for row in rows:
            self.room.give_back(row["principal_id"], row["size"])

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
    """Name and size of everything that lies there; what is no file has no size that fits."""
    found = {}
    for path in directory.iterdir():
        status = path.lstat()
        found[path.name] = status.st_size if stat.S_ISREG(status.st_mode) else -1
    return found


def _unlink(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):  # a directory of somebody's stays, and is no blob
            (directory / name).unlink(missing_ok=True)


def _open_to_read(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")
