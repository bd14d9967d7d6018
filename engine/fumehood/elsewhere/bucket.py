"""Files in an S3-compatible bucket.

Host side. `storage/files` imports this module only if the files' URL begins with `s3://`; s3fs is
imported when the bucket is opened. Invariants: only objects below the bucket's path whose names
have the expected form are listed, read or deleted; a bucket that does not answer blocks no thread
longer than a deadline.
"""

from __future__ import annotations

import io
import re
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from fumehood.storage.errors import FilesAway, StoreError
from fumehood.storage.files import Found, RemoteFiles

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/\w[\w.-]*)*", re.ASCII)
"""The form of a bucket's URL, with an optional prefix. No part of the prefix begins with a dot."""

KEYS = re.compile(r"[a-z]+\.key")
"""The names of the key files, which are the only files directly below the prefix."""

DEADLINE_S = 10.0
"""Seconds for one request to a bucket, its retries included."""

MIN_BYTES_PER_S = 5 << 20
"""Minimum expected transfer rate, in bytes per second. The deadline of a transfer is computed from
this rate."""

LISTING_S = 60.0
"""Additional seconds for listing the objects in a bucket, which takes one request for each 1,000
objects."""

PAUSE_S = 5.0
"""Seconds for which the client refuses all requests after a request got no answer."""

PART_BYTES = 8 << 20
"""Size in bytes of each part of an upload. Two parts of each upload are in memory at once."""

READ_BYTES = 1 << 20
"""Number of bytes that a reader of an object requests at a time, unless the reader reads the whole
rest."""

MAX_DELETED = 1000
"""Maximum number of objects that one request can delete. *Source*: S3's `DeleteObjects`."""


@dataclass(frozen=True, slots=True)
class Bucket(RemoteFiles):
    """Objects directly below a path, `BUCKET/PREFIX`, whose names match a pattern."""

    client: Client
    path: str
    names: re.Pattern[str]

    form: ClassVar = "s3://BUCKET/PREFIX"

    @classmethod
    def is_url(cls, url: str) -> bool:
        return URL.fullmatch(url) is not None

    @classmethod
    def at(cls, url: str) -> Bucket:
        return cls(Client(), url.removeprefix("s3://"), KEYS)

    def below(self, folder: str, names: re.Pattern[str]) -> Bucket:
        """Return a folder of this bucket. The names of its objects match the pattern `names`."""
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
        # Another engine may write it now, or a request that was given up may still arrive.
        try:
            self.client.do("pipe_file", path, content, mode="create")
        except FilesAway as refused:
            if NOT_CONDITIONAL in str(refused):  # not every service has this
                self.client.do("pipe_file", path, content)
            elif EXISTS not in str(refused):
                raise
        return self._read(path, 0, size)

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


EXISTS, NOT_CONDITIONAL = "PreconditionFailed", "NotImplemented"
"""Codes with which S3 answers a conditional request: the object exists, or the service has no such
requests.
"""


class Client:
    """Calls s3fs, with a deadline for each request. The endpoint and the credentials come from the
    environment and the AWS configuration files.

    Raises:
        StoreError: s3fs is missing.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
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
        """Call the method `method` of s3fs with the arguments `given` and `options`, and return its
        result. The deadline of the call is that of a short request plus `longer_s` seconds.

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
