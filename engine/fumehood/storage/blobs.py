"""Blobs: content too large for an answer, kept in files for a limited time.

Host side. The files are in a `file_room`. The executors and `pipeline/result` write blobs, and the
public interfaces read them. A blob belongs to one principal. Other principals cannot find out that
the blob exists. A blob is removed when it expires, when its session ends, or when a newer blob
needs its space. If the disk is too slow, new blobs are refused. Invariants: a file is complete
before its row is inserted; if there is a remote place, the file is also in that place before its
row is inserted; the engine's next start removes files without a row and rows without a file.

A blob's URL is signed for the blob, its principal and its expiry, so that nobody else can make such
a URL. The signing key is a file in the state directory or in the remote place.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import ColumnElement, insert, select, true

from fumehood.core.errors import ResourceNotFound
from fumehood.core.session import SessionStatus
from fumehood.storage.changes import stamp
from fumehood.storage.database import Database
from fumehood.storage.errors import FilesAway, StoreError
from fumehood.storage.file_room import CLOSED, START_S, FileRoom, RoomFile
from fumehood.storage.files import Directory, RemoteFiles
from fumehood.storage.schema import BLOBS, SESSIONS
from fumehood.storage.writer import Job

DIRECTORY_NAME = "blobs"
DRAFTS_NAME = "uploads"
"""Name of the directory for blobs that have not been uploaded to the remote place yet."""

BLOB_ID = re.compile("blob_[0-9a-f]{32}")
KEY_NAME = "blobs.key"
KEY_BYTES = 32
NO_SUCH_BLOB = "You have no such blob. Copy its complete address from an answer."
GIVEN_UP = "it was given up"
EXPIRED = (
    "This blob has expired and is no longer there: its time is over, its session has ended, or "
    "newer ones took its place. Make the call again to get a new one."
)


@dataclass(frozen=True, slots=True)
class Blob:
    """The description of a stored blob, which is a file whose content was too large for a call's
    answer.
    """

    id: str
    filename: str
    content_type: str
    size: int
    expires_at: datetime
    url: str


class NotKept(Exception):
    """A blob could not be stored. The message is a clause that gives the reason. A model may see
    the message.
    """


class Draft(RoomFile):
    """A blob that is being written. The event loop passes data to `feed`. The thread of the file
    room (the directory of blobs) writes the data to the file.
    """

    def __init__(self, room: FileRoom, principal_id: str, session_id: str | None) -> None:
        super().__init__(room, principal_id, f"blob_{secrets.token_hex(16)}")
        self.session_id = session_id
        self._is_kept = False

    def feed(self, data: bytes) -> None:
        """Append bytes to the draft. Never waits and never raises. If the bytes cannot be queued,
        `fault` is set to the reason.
        """
        if self.fault is None:
            fault = self.room.queue(self.principal_id, len(data), self._write, data)
            if fault is not None:
                self.fault = fault

    def discard(self) -> None:
        """Discard the draft, and remove its file in the background. Never waits."""
        self.fault = self.fault or GIVEN_UP
        self.room.submit(self._remove)

    def finish(self) -> str | None:
        """Complete the file and register it in the file room, which is the directory of blobs.
        Return None on success, otherwise the reason for the failure. Runs in the room's thread.
        """
        if not self.append(b""):
            self.remove()
            return self.fault
        self.close()
        self.keep()
        self._is_kept = True
        return None

    def upload(self) -> None:
        """Copy the finished file to the remote place, and remove the local file. Blocks. Raises
        OSError.
        """
        self.room.put(self.name)
        self.room.unlink(self.name)

    def _write(self, parts: list[bytes]) -> None:
        self.append(b"".join(parts))

    def _remove(self) -> None:
        """Remove the draft's file, even if `finish` has already registered it as a blob's file.
        Runs in the room's thread.
        """
        if self._is_kept:
            self.room.remove(self.principal_id, self.name)
        else:
            self.remove()


class BlobStore:
    """The blobs of one engine. Call `open` before the first use, and `room.close` after the last
    use.

    If there is too little space or a session has ended, the store sets the event `overdue`. `prune`
    should then run soon.
    """

    def __init__(
        self,
        database: Database,
        state: Path | None,
        *,
        max_bytes: int,
        lifetime_s: int,
        now: Callable[[], datetime],
        remote: RemoteFiles | None = None,
    ) -> None:
        blobs = None if remote is None else remote.below(DIRECTORY_NAME, BLOB_ID)
        name = DIRECTORY_NAME if blobs is None else DRAFTS_NAME
        self.room = FileRoom(state, name, max_bytes, self._has_gone, remote=blobs)
        self.overdue = asyncio.Event()
        self._database = database
        self._state = state
        self._remote = remote
        self._is_open = False
        self._lifetime_s = lifetime_s
        self._now = now
        self._links = BlobLinks(secrets.token_bytes(KEY_BYTES))
        self._replaced: deque[str] = deque()
        """Ids of blobs whose files were evicted to make room, and whose rows still exist."""

    async def open(self, patience_s: float | None = START_S) -> None:
        """Prepare the directory, and remove everything that a crashed engine left incomplete.

        If there is a remote place, each access to it may take `patience_s` seconds. None means no
        limit.

        Raises:
            StoreError: the directory is not private or cannot be used, or the remote place cannot
                be used now. If the remote place was the reason, `prune` opens the store later.
        """
        try:
            if self.room.prepare() and self._state is not None:
                keys = self._remote or Directory(self._state)
                key = await self.room.with_files(
                    keys.secret, KEY_NAME, KEY_BYTES, patience_s=patience_s
                )
                self._links = BlobLinks(key)
                await self._sweep(patience_s)
        except OSError as error:
            raise StoreError(f"The blobs cannot be kept: {error.strerror}.") from None
        self.room.open()
        self._is_open = True

    def draft(self, principal_id: str, session_id: str | None = None) -> Draft:
        """Return a new draft for a blob that belongs to the principal. If `session_id` is given,
        the blob is removed when this session ends.

        The caller passes the data to `Draft.feed`, and then calls `keep` or `Draft.discard`.
        """
        return Draft(self.room, principal_id, session_id)

    async def keep(self, draft: Draft, filename: str, content_type: str) -> Blob:
        """Turn a draft into a blob with this file name and content type. Return the blob.

        Afterwards, the draft cannot be used again, even if this method fails. If this method is
        cancelled, the file is still written.

        Raises:
            NotKept: the blob could not be stored; the message gives the reason.
        """
        finished = self.room.submit(draft.finish)
        if finished is None:
            self.overdue.set()  # `prune` tries to open a remote place again
            raise NotKept(CLOSED)
        fault = await asyncio.wrap_future(finished)
        if fault is None and self._remote is not None:
            fault = await self._upload(draft)
        if fault is not None:
            self.overdue.set()
            raise NotKept(fault)
        now = self._now()
        row = {
            "id": draft.name,
            "principal_id": draft.principal_id,
            "session_id": draft.session_id,
            "filename": filename,
            "content_type": content_type,
            "size": draft.size,
            "created_at": stamp(now),
            "expires_at": int(now.timestamp()) + self._lifetime_s,
        }
        try:
            await self._database.write(lambda connection: connection.execute(insert(BLOBS), row))
        except StoreError:
            draft.discard()
            raise NotKept("the engine's state cannot be written") from None
        return self._blob(row)

    async def open_blob(
        self, blob_id: str, principal_id: str, expires: str, signature: str
    ) -> tuple[Blob, BinaryIO]:
        """Return a blob and its open file. The caller must close the file.

        `expires` and `signature` are the query parameters of the blob's URL.

        Raises:
            ResourceNotFound: the signature is wrong, this principal has no such blob, or the blob
                has expired.
            ReadFailed: the database cannot be read.
            FilesAway: the remote place cannot be used now.
        """
        if self._remote is not None and not self._is_open:
            self.overdue.set()
            raise FilesAway("since the start")  # the signing key is also in the remote place
        if not self._links.is_genuine(blob_id, principal_id, expires, signature):
            raise ResourceNotFound(NO_SUCH_BLOB)
        if int(expires) <= self._now().timestamp():
            raise ResourceNotFound(EXPIRED)
        own = (BLOBS.c.id == blob_id) & (BLOBS.c.principal_id == principal_id)
        rows = await self._database.read(_matching(own))
        try:
            if not rows:
                raise FileNotFoundError
            file = await self.room.with_files(self.room.files.open, blob_id, rows[0]["size"])
        except FilesAway:
            raise
        except OSError:  # the file was just evicted, or was lost on disk
            raise ResourceNotFound(EXPIRED) from None
        return self._blob(rows[0]), file

    async def read(self, file: BinaryIO, size: int = -1) -> bytes:
        """Read `size` bytes of a blob's open file, or the rest if `size` is -1. Raises OSError."""
        return await self.room.with_files(file.read, size)

    async def prune(self, now: datetime) -> int:
        """Remove blobs that have expired, blobs whose session has ended, and the rows of blobs
        whose file was removed to make space. Return the number of removed blobs.

        Raises:
            ReadFailed, WriteFailed: the database failed; the remaining blobs stay until the next
                run.
            StoreError, FilesAway: the remote place failed; the remaining blobs stay until the next
                run.
        """
        if self._remote is not None and not self._is_open:
            await self.open(None)
        over = [state.value for state in SessionStatus if state.is_over]
        lives = select(SESSIONS.c.id).where(SESSIONS.c.state.not_in(over))
        replaced = [self._replaced.popleft() for _ in range(len(self._replaced))]
        has_ended = (
            (BLOBS.c.expires_at <= int(now.timestamp()))
            | (BLOBS.c.session_id.is_not(None) & BLOBS.c.session_id.not_in(lives))
            | BLOBS.c.id.in_(replaced)
        )
        rows = await self._database.read(_matching(has_ended))
        for row in rows:  # files first: if that is interrupted, the next run finds the row again
            self.room.submit(partial(self.room.remove, row["principal_id"], row["id"]))
        await self.room.drained()
        if self._remote is not None:
            await self.room.with_files(self.room.delete_gone)
        await self._database.delete(BLOBS.c.id, [row["id"] for row in rows])
        return len(rows)

    async def _upload(self, draft: Draft) -> str | None:
        """Move the file of a finished draft to the remote place. Return None on success, otherwise
        the reason for the failure.
        """
        try:
            await self.room.with_files(draft.upload)
        except FilesAway as error:
            draft.discard()
            return f"the engine's files cannot be reached ({error.reason})"
        except OSError:  # the file was evicted
            draft.discard()
            return GIVEN_UP
        return None

    def _has_gone(self, blob_id: str) -> None:
        """Record that the file of a blob was removed to make space, so that `prune` removes the
        blob's row. Runs in the room's thread.
        """
        self._replaced.append(blob_id)
        self.room.call_in_loop(self.overdue.set)

    # -- rows and files ------------------------------------------------------------------

    async def _sweep(self, patience_s: float | None) -> None:
        """Remove what a crashed engine left behind: files without a row, rows without a file, and
        drafts.

        If there is a remote place, each access to it may take `patience_s` seconds. None means no
        limit.
        """
        room, files = self.room, self.room.files
        rows = {row["id"]: row for row in await self._database.read(_matching(true()))}
        found = await room.with_files(files.found, patience_s=patience_s)
        sizes = {name: one.size for name, one in found.items()}
        lost = [row["id"] for row in rows.values() if sizes.get(row["id"]) != row["size"]]
        await self._database.delete(BLOBS.c.id, lost)
        kept = rows.keys() - set(lost)
        await room.with_files(files.delete, found.keys() - kept, patience_s=patience_s)
        if self._remote is not None:
            drafts = Directory(room.directory)
            drafts.delete(drafts.found())
        for row in sorted((rows[blob_id] for blob_id in kept), key=lambda row: row["created_at"]):
            room.restore(row["principal_id"], row["id"], row["size"])

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


# -- signed URLs ---------------------------------------------------------------------------


class BlobLinks:
    """Signs and verifies the URLs of blobs with one secret key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def make(self, blob_id: str, principal_id: str, expires_at: int) -> str:
        """Return the signed URL of a blob. The URL is a path on the socket that clients use for
        calls. `expires_at` is in Unix seconds.
        """
        signature = self._signature(blob_id, principal_id, expires_at)
        return f"/v1/blobs/{blob_id}?expires={expires_at}&signature={signature}"

    def is_genuine(
        self, blob_id: str, principal_id: str, expires_at: int | str, signature: str
    ) -> bool:
        """Return whether `signature` is the signature that `make` computes for these values.

        The comparison takes constant time.
        """
        expected = self._signature(blob_id, principal_id, expires_at)
        return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace"))

    def _signature(self, *parts: str | int) -> str:
        # Each value is prefixed with its length, so that different values never give the same text.
        text = "blob:" + "".join(f"{len(str(part))}:{part}" for part in parts)
        return hmac.digest(self._key, text.encode(), hashlib.sha256).hex()
