"""The saved files of durable sessions: pieces of workspaces, and manifests that name them.

Host side, in a directory or a bucket; written by `executors/session_saver`. A name has the session,
a random number of the attempt that wrote it, and the digest of its content. So no session can tell
what another one has saved, and a failed attempt can be undone whatever other ones have written.
Invariants: a file with a name is complete, and is read only if its content has the digest; the
files of a session that is not over are never swept.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from fumehood.storage.directory import StateError, private_directory
from fumehood.storage.errors import FilesAway
from fumehood.storage.files import Bucket, Directory, Files

T = TypeVar("T")

SESSIONS, PROJECTS = "sessions", "projects"
"""Folders: of the workspaces of durable sessions, and of what was copied into sessions."""

NAME = re.compile(r"(sess_[0-9a-f]{32})\.[0-9a-f]{8}\.([0-9a-f]{64})(\.new)?")
"""The session, the attempt and the digest. `.new` is a file that a crash left incomplete."""

THREADS = 8
"""Files that are read or written at once."""

SWEPT_AFTER_S = 3600.0
"""Age from which files of unknown sessions are removed. Their rows may not be written yet."""


def file_name(session_id: str, content: bytes) -> str:
    """Return a new name for a file of a session."""
    return f"{session_id}.{secrets.token_hex(4)}.{hashlib.sha256(content).hexdigest()}"


class Missing(Exception):
    """A file is missing or damaged."""


class SavedFiles:
    """The files in a directory below `shared`, or in a folder of a bucket. Used until `close`."""

    def __init__(self, shared: Path | None, bucket: Bucket | None, folder: str = SESSIONS) -> None:
        """One of `shared` and `bucket` is given."""
        self._directory = shared / folder if shared is not None else None
        self._bucket = bucket.below(folder, NAME) if bucket is not None else None
        self._threads = ThreadPoolExecutor(THREADS, folder)
        self.overdue = asyncio.Event()
        """Set when a session has ended whose files could not be deleted."""

    def close(self) -> None:
        """Wait for the threads. Blocks."""
        self._threads.shutdown()

    async def put(self, contents: Mapping[str, bytes]) -> None:
        """Store files by name. Raises OSError, after which some of them may be stored."""
        files = self._files
        await self._all(lambda one: files().put_bytes(*one), contents.items())

    async def get(self, names: Mapping[str, int]) -> dict[str, bytes]:
        """Return the contents of files by name and size.

        Raises:
            Missing: one is missing or damaged.
            OSError: they cannot be read now.
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
        """Delete the files of the sessions that are `over`, and old ones of those that are not
        `live`; return their number. Raises OSError.
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
        """Call a function for each item, in the threads; wait for all. Raises the first error."""
        try:
            asked = [asyncio.wrap_future(self._threads.submit(work, item)) for item in items]
        except RuntimeError:
            raise FilesAway("the engine stops") from None
        done = await asyncio.gather(*asked, return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException):
                raise one
        return done  # type: ignore[return-value]  # they are not errors
