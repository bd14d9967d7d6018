"""Files: complete files by name, in a directory or in a bucket with the interface of S3.

Host side, below the stores of blobs and recordings. The engines of one state can share a place, of
which only the active one changes anything. All methods block, so they run in threads. Invariants: a
file is complete and durable when `put` returns, and a file that was not put completely does not
exist; in a bucket only objects below its path whose names are of the expected form are listed, read
or deleted; a bucket that does not answer holds no thread longer than a deadline.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from fumehood.storage.directory import flush, random_file, write_private
from fumehood.storage.errors import FilesAway, StoreError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MIN_FREE_BYTES = 64 << 20
"""Bytes of disk space that are left free for the engine's database."""

DEADLINE_S = 10.0
"""Seconds for one request to a bucket, its retries included."""

MIN_BYTES_PER_S = 5 << 20
"""Bytes in a second that the deadline of a transfer allows for."""

LISTING_S = 60.0
"""More seconds for a listing, which takes a request for each 1,000 objects."""

PAUSE_S = 5.0
"""Seconds for which requests are refused after one that got no answer."""

PART_BYTES = 8 << 20
"""Bytes of a part of an upload. Two parts of each upload are in memory at once."""

READ_BYTES = 1 << 20
"""Bytes that a reader of an object requests at once, unless it wants the rest."""

MAX_DELETED = 1000
"""Objects that one request can delete. *Source*: S3's `DeleteObjects`."""


class Found(NamedTuple):
    """A listed file. The size is -1 for what is not a file."""

    size: int
    changed_at: float


class Files(ABC):
    """A place for files. In a bucket, every method can raise FilesAway."""

    @abstractmethod
    def put(self, name: str, source: Path) -> None:
        """Store a complete local file on the same file system, which may be moved."""

    @abstractmethod
    def put_bytes(self, name: str, content: bytes) -> None:
        """Store a file with this content. Raises OSError if there is no room."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of a file, or None if it does not exist."""

    @abstractmethod
    def open(self, name: str, size: int) -> BinaryIO:
        """Open a file of this size to read.

        Raises:
            FileNotFoundError: there is no such file, or it has another size.
            OSError: it cannot be read.
        """

    @abstractmethod
    def found(self, prefix: str = "") -> dict[str, Found]:
        """List the files whose names begin with a prefix."""

    @abstractmethod
    def delete(self, names: Collection[str]) -> None:
        """Delete the files that exist."""

    @abstractmethod
    def secret(self, name: str, size: int) -> bytes:
        """Return the random bytes of a file, which is created on first use."""


@dataclass(frozen=True, slots=True)
class Directory(Files):
    """Files in a private directory."""

    path: Path

    def put(self, name: str, source: Path) -> None:
        flush(source)
        source.rename(self.path / name)
        flush(self.path)

    def put_bytes(self, name: str, content: bytes) -> None:
        disk = os.statvfs(self.path)
        if disk.f_bavail * disk.f_frsize < len(content) + MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_private(self.path / name, content)

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return (self.path / name).lstat().st_size
        return None

    def open(self, name: str, size: int) -> BinaryIO:
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if os.fstat(descriptor).st_size != size:
            os.close(descriptor)
            raise FileNotFoundError
        return os.fdopen(descriptor, "rb")

    def found(self, prefix: str = "") -> dict[str, Found]:
        found = {}
        for path in self.path.iterdir():
            if path.name.startswith(prefix):
                status = path.lstat()
                size = status.st_size if stat.S_ISREG(status.st_mode) else -1
                found[path.name] = Found(size, status.st_mtime)
        return found

    def delete(self, names: Collection[str]) -> None:
        for name in names:
            with suppress(OSError):  # not a file: a directory of this name stays
                (self.path / name).unlink(missing_ok=True)

    def secret(self, name: str, size: int) -> bytes:
        return random_file(self.path / name, size)[0]


# -- S3 ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket(Files):
    """Objects directly below a path, `BUCKET/PREFIX`, whose names match a pattern."""

    client: Client
    path: str
    names: re.Pattern[str]

    def below(self, folder: str, names: re.Pattern[str]) -> Bucket:
        """Return a folder of it, with other names."""
        return Bucket(self.client, f"{self.path}/{folder}", names)

    def put(self, name: str, source: Path) -> None:
        how = {"chunksize": PART_BYTES, "max_concurrency": 2}
        longer_s = source.stat().st_size / MIN_BYTES_PER_S
        self.client.do("put_file", str(source), self._at(name), longer_s=longer_s, **how)

    def put_bytes(self, name: str, content: bytes) -> None:
        longer_s = len(content) / MIN_BYTES_PER_S
        self.client.do("pipe_file", self._at(name), content, longer_s=longer_s)

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return int(self.client.do("info", self._at(name))["size"])
        return None

    def open(self, name: str, size: int) -> BinaryIO:
        if self.size(name) != size:
            raise FileNotFoundError
        path = self._at(name)
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


class Client:
    """s3fs, with a deadline for each request. Endpoint and credentials come from the environment
    and the files of AWS.

    Raises:
        StoreError: s3fs is missing.
    """

    def __init__(self, deadline_s: float) -> None:
        try:
            from s3fs import S3FileSystem
        except ImportError:
            raise StoreError("Files in S3 need s3fs: pip install 'fumehood[s3]'") from None
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
        """Call a method of s3fs, which may take `longer_s` seconds longer than a short request.

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
    """Reads an object of known size in parts, each with a request."""

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
