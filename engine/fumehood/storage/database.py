"""The database: one file, opened carefully, written by one thread, read by others.

Host side, the ground floor of this room. Above it one file for each kind of row. Invariant:
what `write` has returned for is on the disk. How a file is opened, and which one is left
alone, is in `opening`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
from sqlalchemy import Connection, Engine, Insert
from sqlalchemy.exc import DatabaseError

from fumehood.audit.chain import (
    IN_MEMORY_KEPT,
    AuditChain,
    attach_chain,
    head_of,
    key_id_after,
)
from fumehood.audit.keys import new_key, open_key
from fumehood.storage.errors import DamagedState, ReadFailed, WriteFailed
from fumehood.storage.opening import READ_THREADS, damage_words, in_words, open_engines, open_memory
from fumehood.storage.writer import Batch, CommitHook, Job, OnEvent, Row, Writer

T = TypeVar("T")

FILE_NAME = "state.db"


def _silent(event: str, values: dict[str, Any]) -> None:
    """For embedding programs that keep nothing."""


class Database:
    """An open database with its audit chain. Made by `open_database`; `close` writes what waits."""

    def __init__(
        self,
        path: Path | None,
        writing: Engine,
        reading: Engine,
        on_event: OnEvent,
        audit: AuditChain,
        commit_hook: CommitHook | None = None,
    ) -> None:
        self.path = path
        self.audit = audit
        self._writing = writing
        self._reading = reading
        self._on_event = on_event
        attach_chain(writing, audit)
        self._writer = Writer(writing, in_words, on_event, commit_hook)
        self._readers = anyio.CapacityLimiter(READ_THREADS)
        self._is_closed = False
        self._cannot_read = False

    async def write(self, job: Job[T]) -> T:
        """Carry out a change in a transaction; when this returns, it is on the disk.

        Cancelling the wait does not stop the write.

        Raises:
            WriteFailed: nothing of it is promised. What `job` raises is passed on, and then
                nothing was kept either.
        """
        return await asyncio.wrap_future(self._writer.submit(job, durable=True))

    def write_soon(self, job: Job[Any]) -> None:
        """Carry out a change that nobody waits for, in order with those that somebody does."""
        self._writer.submit(job, durable=True)

    def post(self, how: Insert | Batch, row: Row) -> None:
        """A row that nobody waits for: written within a second, lost in a crash before."""
        self._writer.post(how, row)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Read in a thread; sees everything that `write` has returned for.

        Raises:
            ReadFailed: the database cannot be read.
        """
        if self.path is None:  # one connection in memory: the writer's
            return await asyncio.wrap_future(self._writer.submit(query, durable=False))
        return await anyio.to_thread.run_sync(self._read, query, limiter=self._readers)

    def read_now(self, query: Callable[[Connection], T]) -> T:
        """Read in this thread, for the start."""
        if self.path is None and self._writer.is_running:
            return self._writer.submit(query, durable=False).result()
        return self._read(query)

    def write_now(self, job: Job[T]) -> T:
        """Write and wait in this thread, for tools that run without an event loop."""
        return self._writer.submit(job, durable=True).result()

    async def flush(self) -> None:
        """Wait until everything that was posted has been written, or has failed."""
        await asyncio.wrap_future(self._writer.flush())

    @property
    def lost_posts(self) -> int:
        """Posted rows that could not be kept since the start."""
        return self._writer.lost

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed for a reason of the disk's."""
        return self._writer.is_failing

    def close(self) -> None:
        """Write what waits, then let go of the file."""
        self._writer.close()
        self._is_closed = True
        self._reading.dispose()
        self._writing.dispose()  # the last one to leave folds the write-ahead log in

    def _read(self, query: Callable[[Connection], T]) -> T:
        if self._is_closed:
            raise ReadFailed("it is closed")
        try:
            with self._reading.connect() as connection:
                result = query(connection)
        except DatabaseError as error:
            reason = in_words(error)
            if not self._cannot_read:  # once an episode
                self._cannot_read = True
                self._on_event("state.read_failed", {"reason": reason})
            raise ReadFailed(reason) from error
        self._cannot_read = False
        return result


def open_database(
    path: Path | None, on_event: OnEvent = _silent, commit_hook: CommitHook | None = None
) -> Database:
    """Open, or make, the database at `path`; None keeps one in memory.

    `on_event` hears of trouble while it is open: `state.write_failed` and
    `state.write_works_again` around each episode, `state.rows_dropped`,
    `state.rows_refused`, `state.read_failed`. It is called from threads. So is `commit_hook`,
    around each flushed commit: a seam for tests of crashes.

    Raises:
        NewerState, ForeignState, DamagedState: see there. The file is left as it is.
        AuditKeyLost: the database has an audit chain whose key is not beside it.
        StoreError: it cannot be opened.
    """
    if path is None:
        engine = open_memory()
        chain = AuditChain(new_key(), kept=IN_MEMORY_KEPT)
        return Database(None, engine, engine, on_event, chain, commit_hook)
    writing, reading = open_engines(path)
    try:
        chain = _open_chain(path, reading)
    except BaseException:
        reading.dispose()
        writing.dispose()
        raise
    return Database(path, writing, reading, on_event, chain, commit_hook)


def _open_chain(path: Path, reading: Engine) -> AuditChain:
    try:
        with reading.connect() as connection:
            head = head_of(connection)
    except DatabaseError as error:
        raise DamagedState(damage_words(path)) from error
    return AuditChain(open_key(path.parent, key_id_after(head) if head is not None else None))


__all__ = ["FILE_NAME", "Database", "WriteFailed", "open_database"]
