"""Files: complete files by name, in a directory or in an S3-compatible bucket.

Host side, below the stores of blobs and recordings. Engines that share a state can also share its
files, which only the active engine changes. All methods block, so they run in threads. Invariants:
a file is complete and durable when `put` returns, and an incomplete file is never visible; in a
bucket, only objects below its path whose names have the expected form are listed, read or deleted;
a bucket that does not answer blocks no thread longer than a deadline.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from fumehood.storage.directory import (
    StateError,
    flush,
    private_directory,
    random_file,
    write_private,
)
from fumehood.storage.errors import FilesAway, StoreError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")

MIN_FREE_BYTES = 64 << 20
"""Minimum disk space in bytes that is left free for the engine's database."""

DEADLINE_S = 10.0
"""Seconds for one request to a bucket, its retries included."""

MIN_BYTES_PER_S = 5 << 20
"""Transfer rate, in bytes per second, from which the deadline of a transfer is computed."""

LISTING_S = 60.0
"""Additional seconds for listing the objects in a bucket, which takes one request for each 1,000
objects."""

PAUSE_S = 5.0
"""Seconds for which requests are refused after a request got no answer."""

PART_BYTES = 8 << 20
"""Bytes of a part of an upload. Two parts of each upload are in memory at once."""

READ_BYTES = 1 << 20
"""Number of bytes that a reader of an object requests at a time, unless the reader reads the whole
rest."""

MAX_DELETED = 1000
"""Maximum number of objects that one request can delete. *Source*: S3's `DeleteObjects`."""


class Found(NamedTuple):
    """A listed file. The size is -1 if it is not a regular file."""

    size: int
    changed_at: float


@dataclass(frozen=True, slots=True)
class Directory:
    """Files in a private directory. `Bucket` has the same methods, except that they can also raise
    FilesAway.
    """

    path: Path

    def put(self, name: str, source: Path) -> None:
        """Store a complete local file, which must be on the same file system and may be moved."""
        flush(source)
        source.rename(self.path / name)
        flush(self.path)

    def put_bytes(self, name: str, content: bytes) -> None:
        """Store a file with this content. Raises OSError if there is no room."""
        disk = os.statvfs(self.path)
        if disk.f_bavail * disk.f_frsize < len(content) + MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_private(self.path / name, content)

    def open(self, name: str, size: int) -> BinaryIO:
        """Open a file of `size` bytes for reading.

        Raises:
            FileNotFoundError: there is no such file, or it has another size.
            OSError: the file cannot be read.
        """
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if os.fstat(descriptor).st_size != size:
            os.close(descriptor)
            raise FileNotFoundError
        return os.fdopen(descriptor, "rb")

    def found(self, prefix: str = "") -> dict[str, Found]:
        """List the files whose names begin with a prefix."""
        found = {}
        for path in self.path.iterdir():
            if path.name.startswith(prefix):
                status = path.lstat()
                size = status.st_size if stat.S_ISREG(status.st_mode) else -1
                found[path.name] = Found(size, status.st_mtime)
        return found

    def delete(self, names: Collection[str]) -> None:
        """Delete these files. Missing files are ignored."""
        for name in names:
            with suppress(OSError):  # not a file: a directory of this name stays
                (self.path / name).unlink(missing_ok=True)

    def secret(self, name: str, size: int) -> bytes:
        """Return the random bytes of a file, which is created on first use."""
        return random_file(self.path / name, size)[0]


# -- S3 ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket:
    """Objects directly below a path, `BUCKET/PREFIX`, whose names match a pattern."""

    client: Client
    path: str
    names: re.Pattern[str]

    def below(self, folder: str, names: re.Pattern[str]) -> Bucket:
        """Return a folder of this bucket, whose object names match another pattern."""
        return Bucket(self.client, f"{self.path}/{folder}", names)

    def put(self, name: str, source: Path) -> None:
        how = {"chunksize": PART_BYTES, "max_concurrency": 2}
        longer_s = source.stat().st_size / MIN_BYTES_PER_S
        self.client.do("put_file", str(source), self._at(name), longer_s=longer_s, **how)

    def put_bytes(self, name: str, content: bytes) -> None:
        longer_s = len(content) / MIN_BYTES_PER_S
        self.client.do("pipe_file", self._at(name), content, longer_s=longer_s)

    def open(self, name: str, size: int) -> BinaryIO:
        path = self._at(name)
        if self.client.do("info", path)["size"] != size:
            raise FileNotFoundError
        return io.BufferedReader(_Reader(lambda *part: self._read(path, *part), size), READ_BYTES)

    def found(self, prefix: str = "") -> dict[str, Found]:
        options = {"detail": True, "prefix": prefix}
        listed = self.client.do("find", self.path, longer_s=LISTING_S, **options)
        found = {}
        for path, info in listed.items():
            name = path.removeprefix(f"{self.path}/")
            if self.names.fullmatch(name):
                found[name] = Found(info["size"], info["LastModified"].timestamp())
        return found

    def delete(self, names: Collection[str]) -> None:
        bucket, *prefix = self.path.split("/")
        keys = [{"Key": "/".join([*prefix, self._checked(name)])} for name in names]
        for begin in range(0, len(keys), MAX_DELETED):
            part = {"Objects": keys[begin : begin + MAX_DELETED], "Quiet": True}
            answer = self.client.do("call_s3", "delete_objects", Bucket=bucket, Delete=part)
            if answer.get("Errors"):
                raise FilesAway(f"a deletion failed with {answer['Errors'][0].get('Code')}")

    def secret(self, name: str, size: int) -> bytes:
        path = self._at(name)
        try:
            return self._read(path, 0, size)
        except FileNotFoundError:
            content = secrets.token_bytes(size)
            self.client.do("pipe_file", path, content)
            return content

    def _at(self, name: str) -> str:
        return f"{self.path}/{self._checked(name)}"

    def _checked(self, name: str) -> str:
        if not self.names.fullmatch(name):
            raise ValueError("not the name of a file of this place")
        return name

    def _read(self, path: str, start: int, end: int) -> bytes:
        part = {"start": start, "end": end}
        longer_s = (end - start) / MIN_BYTES_PER_S
        read = self.client.do("cat_file", path, longer_s=longer_s, **part)
        if len(read) != end - start:
            raise FilesAway("an object has become shorter")
        return bytes(read)


Files = Directory | Bucket
"""A place for files."""


class Client:
    """Calls s3fs, with a deadline for each request. The endpoint and the credentials come from the
    environment and the AWS configuration files.

    Raises:
        StoreError: s3fs is missing.
    """

    def __init__(self, deadline_s: float) -> None:
        try:
            from s3fs import S3FileSystem
        except ImportError:
            raise StoreError(
                "Files in S3 need s3fs: pip install 'PATH_OF_THE_CHECKOUT[s3]'"
            ) from None
        self._s3 = S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": deadline_s / 3,
                "read_timeout": deadline_s / 2,
                "retries": {"mode": "standard", "total_max_attempts": 2},
            },
        )
        self._s3.retries = 1  # botocore retries
        self._deadline_s = deadline_s
        self._away_until = 0.0

    def do(self, method: str, *given: Any, longer_s: float = 0, **options: Any) -> Any:
        """Call an s3fs method, with a deadline `longer_s` seconds longer than that of a short
        request.

        Raises:
            FileNotFoundError: there is no such object.
            FilesAway: the bucket refused the request, or did not answer.
        """
        if time.monotonic() < self._away_until:
            raise FilesAway("no answer a moment ago")
        try:
            timeout = self._deadline_s + longer_s
            return getattr(self._s3, method)(*given, timeout=timeout, **options)
        except Exception as error:  # botocore's errors have no common root
            answer = getattr(error.__cause__, "response", None)
            code = answer["Error"].get("Code", "") if answer is not None else ""
            if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
                raise
            if answer is None:
                self._away_until = time.monotonic() + PAUSE_S
            is_late = isinstance(error, TimeoutError)
            why = "no answer in time" if is_late else code or type(error).__name__
            raise FilesAway(why) from error


class _Reader(io.RawIOBase):
    """Reads an object of known size in pieces, with one request for each piece."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._fetch = read
        self._place = 0
        self._size = size

    def readable(self) -> bool:
        return True

    def readall(self) -> bytes:
        return self._next(self._size)

    def readinto(self, buffer: WriteableBuffer) -> int:
        with memoryview(buffer).cast("B") as room:
            part = self._next(len(room))
            room[: len(part)] = part
        return len(part)

    def _next(self, most: int) -> bytes:
        start, end = self._place, min(self._place + most, self._size)
        if start == end:
            return b""
        try:
            part = self._fetch(start, end)
        except FileNotFoundError:
            raise FilesAway("an object was deleted") from None
        self._place = end
        return part


def open_bucket(path: str, deadline_s: float = DEADLINE_S) -> Bucket:
    """Return the bucket `BUCKET/PREFIX`. Makes no request.

    Raises:
        StoreError: s3fs is missing.
    """
    return Bucket(Client(deadline_s), path, re.compile(r"[a-z]+\.key"))


# -- the saved files of durable sessions ---------------------------------------------------


SESSIONS, PROJECTS = "sessions", "projects"
"""Folders for the workspaces of durable sessions, and for the projects copied into sessions."""

NAME = re.compile(r"(sess_[0-9a-f]{32})\.[0-9a-f]{8}\.([0-9a-f]{64})(\.new)?")
"""The form of a file's name: session id, a random number, and SHA-256 of the content. The suffix
`.new` marks a file that a crash left incomplete."""

SAVING_THREADS = 8
"""Maximum number of files that are read or written at the same time."""

SWEPT_AFTER_S = 3600.0
"""Age in seconds from which files of unknown sessions are removed. The session of a newer file may
not have its row yet."""


def file_name(session_id: str, content: bytes) -> str:
    """Return a new, unique name for a file of a session with this content."""
    return f"{session_id}.{secrets.token_hex(4)}.{hashlib.sha256(content).hexdigest()}"


class Missing(Exception):
    """A file is missing or damaged."""


class SavedFiles:
    """Saved files in a directory below `shared`, or in a folder of a bucket. Call `close` at the
    end.
    """

    def __init__(self, shared: Path | None, bucket: Bucket | None, folder: str = SESSIONS) -> None:
        """Exactly one of `shared` and `bucket` must be given."""
        self._directory = shared / folder if shared is not None else None
        self._bucket = bucket.below(folder, NAME) if bucket is not None else None
        self._threads = ThreadPoolExecutor(SAVING_THREADS, folder)
        self.overdue = asyncio.Event()
        """Set when a session has ended whose files could not be deleted."""

    def close(self) -> None:
        """Wait until the threads have ended. This blocks the calling thread."""
        self._threads.shutdown()

    async def put(self, contents: Mapping[str, bytes]) -> None:
        """Store files by name. Raises OSError, after which some of them may be stored."""
        files = self._files
        await self._all(lambda one: files().put_bytes(*one), contents.items())

    async def get(self, names: Mapping[str, int]) -> dict[str, bytes]:
        """Return file contents by name. `names` has the expected size of each file.

        Raises:
            Missing: a file is missing or damaged.
            OSError: a file cannot be read now.
        """

        def read(one: tuple[str, int]) -> tuple[str, bytes]:
            name, size = one
            found = NAME.fullmatch(name)
            try:
                with self._files().open(name, size) as file:
                    content = file.read()
            except FileNotFoundError:
                raise Missing(name) from None
            if found is None or hashlib.sha256(content).hexdigest() != found[2]:
                raise Missing(name)
            return name, content

        return dict(await self._all(read, names.items()))

    async def names(self, session_id: str) -> set[str]:
        """Return the names of all files of a session. Raises OSError."""
        (found,) = await self._all(lambda prefix: self._files().found(prefix), [f"{session_id}."])
        return {name for name in found if NAME.fullmatch(name)}

    async def delete(self, names: Collection[str]) -> None:
        """Delete files. Raises OSError."""
        if names:
            await self._all(lambda these: self._files().delete(these), [names])

    async def sweep(self, live: Iterable[str], over: Iterable[str], now: datetime) -> int:
        """Delete the files of sessions in `over`, and old files of sessions that are neither in
        `over` nor in `live`. Return the number of deleted files. Raises OSError.
        """
        (found,) = await self._all(lambda prefix: self._files().found(prefix), ["sess_"])
        oldest, spared, ended = now.timestamp() - SWEPT_AFTER_S, {*live}, {*over}
        gone = []
        for name, file in found.items():
            known = NAME.fullmatch(name)
            if known is None or known[1] in spared:
                continue
            if known[1] in ended or file.changed_at < oldest:
                gone.append(name)
        await self.delete(gone)
        return len(gone)

    def _files(self) -> Files:
        if self._bucket is not None:
            return self._bucket
        assert self._directory is not None
        try:
            return Directory(private_directory(self._directory))
        except StateError:
            raise FilesAway("its directory cannot be used") from None

    async def _all(self, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Call a function for each item in the threads; return the results. Raises the first error
        after all calls have ended.
        """
        try:
            asked = [asyncio.wrap_future(self._threads.submit(work, item)) for item in items]
        except RuntimeError:
            raise FilesAway("the engine stops") from None
        done = await asyncio.gather(*asked, return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException):
                raise one
        return done  # type: ignore[return-value]  # they are not errors
