"""Places for complete files, which are found by name. A place is a directory, or something that a
part adds, such as a bucket.

Host side. The stores for blobs, for sessions and for parts use this module. Engines that share a
state can also share its files. Only the active engine changes them. All methods block, so they run
in threads. Invariant: a file is complete and durable when `put` returns, and an incomplete file is
never visible.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import secrets
import stat
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Protocol, Self, TypeVar

from fumehood.core.part import imported
from fumehood.parts import places
from fumehood.storage.directory import (
    StateError,
    flush,
    private_directory,
    random_file,
    write_private,
)
from fumehood.storage.errors import FilesAway

T = TypeVar("T")

MIN_FREE_BYTES = 64 << 20
"""Number of bytes of disk space that are left free for the engine's database."""


class Found(NamedTuple):
    """The status of a file in a listing. `size` is in bytes, or -1 for a directory, a symbolic link
    or another special file. `changed_at` is in Unix seconds.
    """

    size: int
    changed_at: float


class Files(Protocol):
    """A place for files. All methods block. They raise OSError if the place cannot be used. If the
    place is not on this machine, this error is a FilesAway.
    """

    @abstractmethod
    def put(self, name: str, source: Path) -> None:
        """Store the complete local file `source` under a name. The local file may be moved. If the
        place is a directory, the local file must be on the same file system.
        """

    @abstractmethod
    def put_bytes(self, name: str, content: bytes) -> None:
        """Store a file with this name and content."""

    @abstractmethod
    def open(self, name: str, size: int) -> BinaryIO:
        """Open the file with this name for reading. `size` is the size in bytes that it must have.

        Raises:
            FileNotFoundError: there is no such file, or it has another size.
            OSError: the file cannot be read.
        """

    @abstractmethod
    def found(self, prefix: str = "") -> dict[str, Found]:
        """List the files whose names begin with a prefix. Return the status of each file, by
        name.
        """

    @abstractmethod
    def delete(self, names: Collection[str]) -> None:
        """Delete the files with these names. Missing files are ignored."""

    @abstractmethod
    def secret(self, name: str, size: int) -> bytes:
        """Return the random bytes in a file. The file is created on first use, with `size` random
        bytes.
        """


class RemoteFiles(Files):
    """A place for files at a URL. The engines of one state share the place. A part supports a URL
    scheme by naming a subclass of this class in `Part.files`.

    Each place has a pattern for the names of its files (see `below`). Files with other names are
    not listed, and a method that gets such a name raises ValueError. If the place does not answer
    before a deadline, its methods stop waiting and raise FilesAway.
    """

    form: ClassVar[str]
    """The form of the URLs, as shown to people who write them."""

    @classmethod
    @abstractmethod
    def is_url(cls, url: str) -> bool:
        """Return whether a text is a URL of this kind of place."""

    @classmethod
    @abstractmethod
    def at(cls, url: str) -> Self:
        """Return the place at a URL. Makes no request.

        Raises:
            StoreError: the optional dependencies for this kind of place are not installed.
        """

    @abstractmethod
    def below(self, folder: str, names: re.Pattern[str]) -> Self:
        """Return the place that is the folder `folder` of this place. File names in the folder must
        match the pattern `names`.
        """


@dataclass(frozen=True, slots=True)
class FilePlaces:
    """The places in which an engine and its parts keep files."""

    directory: Path | None = None
    """The directory with the folders of files, or None if the engine keeps no state."""
    remote: RemoteFiles | None = None
    """The remote place for complete files, or None if they are in `directory`."""

    def saved(self, folder: str) -> SavedFiles | None:
        """Return the store that keeps files of sessions in the folder `folder`. Return None if the
        engine keeps no state.
        """
        if self.directory is None:
            return None
        place = self.directory if self.remote is None else None
        return SavedFiles(place, self.remote, folder)


def remote_kind(url: str) -> type[RemoteFiles]:
    """Import and return the class for the place at a URL.

    Raises:
        ValueError: no part adds a kind of place with such URLs. The message contains the accepted
            forms.
    """
    known = places("files")
    kind: type[RemoteFiles] | None = imported(known.get(url.partition(":")[0]), None)
    if kind is None or not kind.is_url(url):
        forms = [imported(place).form for place in known.values()]
        raise ValueError(", or ".join(["must be the absolute path of a directory", *forms]))
    return kind


@dataclass(frozen=True, slots=True)
class Directory:
    """A place for files that is a private local directory."""

    path: Path

    def put(self, name: str, source: Path) -> None:
        """Move the complete local file `source` to this name. `source` must be on the same file
        system as this directory.
        """
        flush(source)
        source.rename(self.path / name)
        flush(self.path)

    def put_bytes(self, name: str, content: bytes) -> None:
        """Store a file with this name and content. Raises OSError if the disk has too little
        space.
        """
        disk = os.statvfs(self.path)
        if disk.f_bavail * disk.f_frsize < len(content) + MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_private(self.path / name, content)

    def open(self, name: str, size: int) -> BinaryIO:
        """Open the file with this name for reading. `size` is the size in bytes that it must have.

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
        """List the files whose names begin with a prefix. Return the status of each file, by
        name.
        """
        found = {}
        for path in self.path.iterdir():
            if path.name.startswith(prefix):
                status = path.lstat()
                size = status.st_size if stat.S_ISREG(status.st_mode) else -1
                found[path.name] = Found(size, status.st_mtime)
        return found

    def delete(self, names: Collection[str]) -> None:
        """Delete the files with these names. Missing files are ignored."""
        for name in names:
            with suppress(OSError):  # not a file: a directory of this name stays
                (self.path / name).unlink(missing_ok=True)

    def secret(self, name: str, size: int) -> bytes:
        """Return the random bytes in a file. The file is created on first use, with `size` random
        bytes.
        """
        return random_file(self.path / name, size)[0]


# -- saved files of sessions ---------------------------------------------------------------


NAME = re.compile(r"(sess_[0-9a-f]{32})\.[0-9a-f]{8}\.([0-9a-f]{64})(\.new)?")
"""The form of the name of a saved file: the session id, a random number, and the SHA-256 of the
content. The suffix `.new` marks a file that a crash left incomplete."""

SAVING_THREADS = 8
"""Maximum number of files that are read or written at the same time."""

SWEPT_AFTER_S = 3600.0
"""Age in seconds from which the files of unknown sessions are removed. Younger files stay, because
the row of their session may not be stored yet."""


def file_name(session_id: str, content: bytes) -> str:
    """Return a new, unique name for a file with this content that belongs to a session."""
    return f"{session_id}.{secrets.token_hex(4)}.{hashlib.sha256(content).hexdigest()}"


class Missing(Exception):
    """A saved file is missing or damaged. The message is the file's name."""


class SavedFiles:
    """A store for the saved files of sessions. The files are in the folder `folder`, which is below
    the directory `shared` or in the place `remote`. Call `close` at the end.
    """

    def __init__(self, shared: Path | None, remote: RemoteFiles | None, folder: str) -> None:
        """Keep the files in the folder `folder`, which is below the directory `shared` or in the
        place `remote`. Exactly one of `shared` and `remote` must be given.
        """
        self._directory = shared / folder if shared is not None else None
        self._remote = remote.below(folder, NAME) if remote is not None else None
        self._threads = ThreadPoolExecutor(SAVING_THREADS, folder)
        self.overdue = asyncio.Event()
        """An event. It is set when a session has ended and its files could not be deleted."""

    def close(self) -> None:
        """Wait until the running reads and writes of files have ended, and end their threads.
        Blocks.
        """
        self._threads.shutdown()

    async def put(self, contents: Mapping[str, bytes]) -> None:
        """Store files, given by name and content. Raises OSError; some of the files may then be
        stored.
        """
        files = self._files
        await self._all(lambda one: files().put_bytes(*one), contents.items())

    async def get(self, names: Mapping[str, int]) -> dict[str, bytes]:
        """Return the contents of files, by name. `names` maps each name to the expected size of the
        file.

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
        """Delete the files with these names. Raises OSError."""
        if names:
            await self._all(lambda these: self._files().delete(these), [names])

    async def sweep(self, live: Iterable[str], over: Iterable[str], now: datetime) -> int:
        """Delete the saved files of ended sessions, and old files of unknown sessions. Return the
        number of deleted files.

        `over` are the ids of the ended sessions, and `live` those of the sessions that still exist.
        All other sessions are unknown. Their files are deleted if they are older than
        `SWEPT_AFTER_S`.

        Raises OSError if the files cannot be listed or deleted.
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
        if self._remote is not None:
            return self._remote
        assert self._directory is not None
        try:
            return Directory(private_directory(self._directory))
        except StateError:
            raise FilesAway("its directory cannot be used") from None

    async def _all(self, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Call a function for each item, in the threads of this store. Return the results in the
        order of the items. If calls raise errors, wait until all calls have ended, and then raise
        the first error.
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
