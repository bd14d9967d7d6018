"""The database with the rows of the state. One thread writes to it, and other threads read from it.

Host side, used by every package that stores rows. Invariant: a change is durable once `write` has
returned.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
from sqlalchemy import Column, Connection, delete
from sqlalchemy.exc import DBAPIError

from fumehood.core.errors import ResourceNotFound
from fumehood.storage.audit_chain import (
    IN_MEMORY_KEPT,
    AuditChain,
    attach_chain,
    head_of,
    key_id_after,
)
from fumehood.storage.audit_keys import new_key, open_key
from fumehood.storage.backend import READ_THREADS, Backend, remote_backend
from fumehood.storage.errors import DamagedState, ReadFailed, ReadUnavailable, Standby
from fumehood.storage.schema import UnstorableText
from fumehood.storage.sqlite import SQLite, open_file, open_memory, open_to_read
from fumehood.storage.writer import Batch, CommitHook, Job, OnEvent, Row, Writer

DELETED_AT_ONCE = 500
"""Maximum number of rows that are deleted in one transaction. Other writes wait for the
transaction, so it must be short."""

T = TypeVar("T")

FILE_NAME = "state.db"


class Database:
    """An open database with its audit chain, a table in which tampering can be detected. `close`
    writes pending rows before it closes the database.
    """

    def __init__(
        self,
        backend: Backend,
        directory: Path | None,
        on_event: OnEvent,
        audit: AuditChain,
        commit_hook: CommitHook | None = None,
    ) -> None:
        self.directory = directory
        """The state directory, or None if the state is only in memory."""
        self.audit = audit
        self._backend = backend
        self._on_event = on_event
        attach_chain(backend.writing, audit)
        self._writer = Writer(backend, on_event, commit_hook)
        self._readers = anyio.CapacityLimiter(READ_THREADS)
        self._is_closed = False
        self._reads = 0
        """Number of queries that are running now."""
        self._reads_end = threading.Condition()
        self._cannot_read = False

    async def write(self, job: Job[T]) -> T:
        """Run a job in a transaction, and return the job's result. The transaction is on disk when
        this method returns.

        If this method is cancelled, the job still runs. An exception raised by `job` rolls back the
        job's changes and is raised here.

        Raises:
            WriteFailed: the database failed. None of the job's changes is guaranteed to be stored.
        """
        return await asyncio.wrap_future(self._writer.submit(job, durable=True))

    async def check(self) -> None:
        """Check that this engine may still write to the database, by running an empty transaction.

        Raises:
            WriteFailed: another engine has taken over the database, or the database failed.
        """
        await asyncio.wrap_future(self._writer.submit(lambda connection: None, durable=False))

    async def repeat(self, job: Job[int]) -> int:
        """Run a job repeatedly until it returns 0. Each run of the job must process a few rows and
        return the number of these rows. Return the total.

        Raises:
            WriteFailed: the database failed; the remaining rows are not processed.
        """
        total = 0
        while count := await self.write(job):
            total += count
        return total

    async def delete(self, column: Column[T], values: Sequence[T]) -> None:
        """Delete the rows in which `column` has one of the values. The rows are deleted in batches,
        each in its own transaction.

        Raises:
            WriteFailed: the database failed; the remaining rows stay.
        """
        for start in range(0, len(values), DELETED_AT_ONCE):
            gone = delete(column.table).where(column.in_(values[start : start + DELETED_AT_ONCE]))
            await self.write(partial(Connection.execute, statement=gone))

    def write_soon(self, job: Job[Any]) -> None:
        """Queue a job without waiting for it. The job runs in order with the jobs that are passed
        to `write`.
        """
        self._writer.submit(job, durable=True)

    def post(self, how: Batch, row: Row) -> None:
        """Queue a row without waiting. `how` is the function that writes the row.

        The row is written within a second. If the engine crashes before that, the row is lost.
        """
        self._writer.post(how, row)

    def note_dropped(self) -> None:
        """Count and report a row that the caller dropped. The caller drops a row instead of posting
        it if too many rows wait to be written.
        """
        self._writer.note_dropped()

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query in a thread, and return the query's result. The query sees every change for
        which `write` has returned.

        Raises:
            ReadFailed: the database cannot be read.
            ResourceNotFound: the query searches for a text that the database cannot store, so no
                row can contain the text.
        """
        try:
            # A database in memory has only the writer's connection.
            if not self._backend.has_readers:
                return await asyncio.wrap_future(self._writer.submit(query, durable=False))
            return await anyio.to_thread.run_sync(self._read, query, limiter=self._readers)
        except UnstorableText:
            raise ResourceNotFound("Nothing has a NUL character in its name.") from None

    def read_now(self, query: Callable[[Connection], T]) -> T:
        """Run a query and return its result. Blocks this thread. Only for the engine's start."""
        if not self._backend.has_readers and self._writer.is_running:
            return self._writer.submit(query, durable=False).result()
        return self._read(query)

    def write_now(self, job: Job[T]) -> T:
        """Run a job as `write` does, but block this thread. For commands without an event loop."""
        return self._writer.submit(job, durable=True).result()

    async def flush(self) -> None:
        """Wait until every row that was posted before this call has been written or could not be
        written.
        """
        await asyncio.sleep(0)  # a call's row is posted just after its answer was sent
        await asyncio.wrap_future(self._writer.flush())

    @property
    def waiting(self) -> int:
        """The number of jobs and rows that are waiting to be written."""
        return self._writer.waiting

    @property
    def lost_posts(self) -> int:
        """The number of posted rows that were lost since the engine's start."""
        return self._writer.lost

    @property
    def is_fenced(self) -> bool:
        """Whether another engine has taken over the database, so that this engine can no longer
        write.
        """
        return self._writer.is_fenced

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed, or the current write hangs."""
        return self._writer.is_failing

    def close(self) -> None:
        """Write pending rows and wait for running queries. Then close the database."""
        self._writer.close()
        with self._reads_end:
            self._is_closed = True
            # A cancelled task leaves its query running, and its connection would not be closed.
            self._reads_end.wait_for(lambda: self._reads == 0)
        self._backend.close()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Delay `close` until the block has ended. Raises ReadFailed if the database is already
        closed.
        """
        with self._reads_end:
            if self._is_closed:
                raise ReadFailed("it is closed")
            self._reads += 1
        try:
            yield
        finally:
            with self._reads_end:
                self._reads -= 1
                self._reads_end.notify_all()

    def _read(self, query: Callable[[Connection], T]) -> T:
        try:
            with self._open(), self._backend.reading.connect() as connection:
                result = query(connection)
        except DBAPIError as error:
            reason = self._backend.in_words(error)
            if not self._cannot_read:  # report each period of failures once
                self._cannot_read = True
                self._on_event("state.read_failed", {"reason": reason})
            is_unreachable = self._backend.is_unreachable(error)
            raise (ReadUnavailable if is_unreachable else ReadFailed)(reason) from error
        self._cannot_read = False
        return result


def open_database(
    path: Path | None,
    on_event: OnEvent = lambda event, values: None,
    commit_hook: CommitHook | None = None,
    *,
    url: str | None = None,
) -> Database:
    """Open the database of a state, or create it. Migrate it to the newest schema.

    `path` is the database's SQLite file. If `path` is None, the database is in memory. If `url` is
    given, the rows are instead in the database at this URL, and the directory of `path` contains
    only files and keys.

    `on_event` receives failures while the database is open: `state.write_failed`,
    `state.rows_dropped`, `state.rows_refused`, `state.read_failed` and `state.fenced` (another
    engine has taken over the database, so this engine can no longer write). It also receives
    `state.write_works_again`, at the first successful write after `state.write_failed`.
    `commit_hook` is called before and after each commit that is flushed to disk, for crash tests.
    Both functions are called in threads.

    Raises:
        NewerState, ForeignState, DamagedState: this engine cannot use the database, and has not
            changed it.
        AuditKeyLost: the database has an audit chain (a table in which tampering can be detected),
            but the key of the chain is missing or unusable.
        Standby: another engine is using the state at `url`.
        StoreError: the file or `url` cannot be opened.
    """
    if path is None:
        chain = AuditChain(new_key(), kept=IN_MEMORY_KEPT)
        return Database(open_memory(), None, on_event, chain, commit_hook)
    backend = open_file(path) if url is None else _open_remote(url, path.parent)
    try:
        chain = _open_chain(path.parent, backend)
    except BaseException:
        backend.close()
        raise
    return Database(backend, path.parent, on_event, chain, commit_hook)


def _open_remote(url: str, directory: Path) -> Backend:
    backend = remote_backend(url).open(url)
    if backend is not None:
        return backend
    with reading(directory, url) as connection:
        head = head_of(connection)
    if head is not None:  # without its key, this engine could not take over
        open_key(directory, key_id_after(head))
    raise Standby


def _open_chain(directory: Path, backend: Backend) -> AuditChain:
    try:
        with backend.reading.connect() as connection:
            head = head_of(connection)
    except DBAPIError as error:
        raise DamagedState(
            "The audit chain of the state is damaged. It was left as it is. Restore a copy of the "
            "state."
        ) from error
    return AuditChain(open_key(directory, key_id_after(head) if head is not None else None))


@contextmanager
def reading(state: Path, url: str | None = None) -> Iterator[Connection]:
    """Open the database in a state directory, or the database at `url`, for reading during the
    block. This is possible while an engine is running. Nothing is written, created or migrated.

    Raises:
        StoreError: the database is missing or cannot be read.
    """
    backend: type[Backend] = SQLite
    if url is None:
        engine = open_to_read(state / FILE_NAME)
    else:
        backend = remote = remote_backend(url)
        engine = remote.open_to_read(url)
    try:
        with engine.connect() as connection:
            yield connection
    except DBAPIError as error:
        raise ReadFailed(backend.in_words(error)) from error
    finally:
        engine.dispose()
