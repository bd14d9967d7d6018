"""The writer: one thread with one connection. It groups pending changes, so that many changes need
only one commit.

Host side, used by `storage/database`. Invariants: a durable job's future is resolved only after the
commit was flushed to disk; a failing job affects no other job, unless the database rolls back the
whole transaction (then all its jobs fail); only `close` ends the thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from fumehood.storage.backend import Backend
from fumehood.storage.errors import Fenced, WriteFailed, WriteUnavailable

T = TypeVar("T")
Job = Callable[[Connection], T]
Row = dict[str, Any]
Batch = Callable[[Connection, list[Row]], None]
"""A function that writes a list of posted rows. The writer calls it once for a group of rows. If
this call fails, the writer calls the function again for each row separately."""
OnEvent = Callable[[str, dict[str, Any]], None]
"""A function that receives an event's name and values. It is called in the writer's thread."""
CommitHook = Callable[[str, int], None]
"""A function that is called before and after each flushed commit. Its arguments are the text
`before` or `after`, and the commit's number, counted from 1."""

MAX_GROUP = 500
MAX_POSTS = 20_000
"""Maximum number of posted rows that wait to be written. Further rows are dropped and counted."""

GATHER_S = 0.2
"""Seconds for which posted rows are collected before they are written together. Writing many rows
in one transaction slows calls down the least."""

HANGS_S = 10.0
"""If a transaction takes longer than this many seconds, the state is reported as failing until the
transaction ends. The value is greater than the time after which an unresponsive PostgreSQL
connection is closed."""


@dataclass(slots=True)
class _Waiting(Generic[T]):
    job: Job[T]
    future: Future[T]
    durable: bool


class _RolledBack(Exception):
    """The database has rolled back the whole transaction, so all its jobs have failed. The writer
    raises this error even if a job has caught and ignored the database's own error.
    """


class _Refused(Exception):
    """The only job of a transaction failed. The job's future already has the error."""


class Writer:
    """Writes to the database in one thread. The writer runs submitted jobs and writes posted rows,
    both in the order of their arrival. Between a job and a posted row, there is no fixed order.
    """

    def __init__(
        self,
        backend: Backend,
        on_event: OnEvent,
        commit_hook: CommitHook | None = None,
    ) -> None:
        self._backend = backend
        self._on_event = on_event
        self._commit_hook = commit_hook
        self._commits = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._waiting: deque[_Waiting[Any]] = deque()
        self._posts: deque[tuple[Batch, Row]] = deque()
        self._flushing: list[Future[None]] = []
        self._closing = False
        self.lost = 0
        """The number of posted rows that were not stored."""
        self._has_dropped = False
        """Whether a row was dropped since the last report."""
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._wrote_posts_at = time.monotonic()
        self._has_failed = False
        """Whether the last write failed."""
        self._writing_since: float | None = None
        """Start of the current transaction by the monotonic clock, or None."""
        self.is_fenced = False

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed, or the current write has taken at least `HANGS_S`
        seconds.
        """
        since = self._writing_since
        return self._has_failed or (since is not None and time.monotonic() - since >= HANGS_S)

    @property
    def waiting(self) -> int:
        """The number of jobs and rows that are waiting to be written."""
        return len(self._waiting) + len(self._posts)

    def submit(self, job: Job[T], *, durable: bool) -> Future[T]:
        """Queue a job. The returned future gets the job's result after the commit. If `durable` is
        True, it gets the result only after the commit has been flushed to disk.

        If the writer is closing, the future fails with WriteFailed.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # cancelling the wait must not cancel the job
        with self._lock:
            if self._closing:
                future.set_exception(WriteFailed("it is closed"))
                return future
            self._waiting.append(_Waiting(job, future, durable))
            self._start()
        self._wake.set()
        return future

    def post(self, how: Batch, row: Row) -> None:
        """Queue a row without waiting. `how` is the function that writes the row. Rows posted with
        the same `how` are written together.
        """
        if self._closing or len(self._posts) >= MAX_POSTS:
            self.note_dropped()
            return
        self._posts.append((how, row))
        if self._thread is None:
            with self._lock:
                self._start()

    def note_dropped(self) -> None:
        """Count a row that was dropped because too many rows wait to be written. The writer's
        thread later reports the number of dropped rows.
        """
        self.lost += 1
        self._has_dropped = True

    def flush(self) -> Future[None]:
        """Return a future that is resolved once every row posted before this call has been written
        or has failed.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closing or (self._thread is None and not self._posts):
                future.set_result(None)
                return future
            self._flushing.append(future)
        self._wake.set()
        return future

    def close(self) -> None:
        """Write pending changes and end the thread. If the database cannot be reached, pending
        changes are dropped.
        """
        with self._lock:
            self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.lost += len(self._posts)  # rows posted while the writer was closing
        self._posts.clear()

    def _start(self) -> None:
        """Start the thread if it is not running. If the writer is closing, do nothing."""
        # Not already at the engine's start, because many embedded engines never write.
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="state-writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            if not self._waiting:
                # Posted rows do not wake the thread: waking it would cost a call more than
                # writing its row.
                self._wake.wait(GATHER_S)
            self._wake.clear()
            closing = self._closing
            self._take_turn()
            if closing and not (self._waiting or self._posts or self._flushing):
                self._disconnect()
                return

    def _take_turn(self) -> None:
        """Write pending jobs and posted rows alternately, so that neither can delay the other
        forever.
        """
        with self._lock:
            flushing, self._flushing = self._flushing, []
            owed = len(self._posts) if flushing or self._posts_are_due() else 0
        self._write_jobs()
        while owed > 0 and self._posts:
            owed -= self._write_posts(min(owed, len(self._posts), MAX_GROUP))
            self._write_jobs()
        if self._has_dropped:
            self._has_dropped = False
            self._on_event("state.rows_dropped", {"dropped_rows": self.lost})
        for future in flushing:
            future.set_result(None)

    def _posts_are_due(self) -> bool:
        """Return whether posted rows should be written now: enough rows wait, enough time has
        passed, or the writer is closing.
        """
        # Writing them after every group of jobs would delay the next jobs.
        is_time = time.monotonic() - self._wrote_posts_at >= GATHER_S
        return is_time or self._closing or len(self._posts) >= MAX_GROUP

    def _write_jobs(self) -> None:
        with self._lock:
            count = min(len(self._waiting), MAX_GROUP)
            group = [self._waiting.popleft() for _ in range(count)]
        if group:
            self._run_jobs(group)

    def _run_jobs(self, group: list[_Waiting[Any]]) -> None:
        """Run jobs in one transaction. After the commit, resolve their futures."""
        done: list[tuple[Future[Any], Any]] = []
        writes = any(waiting.durable for waiting in group)
        self._writing_since = time.monotonic()
        try:
            with self._transaction(flushed=writes) as connection:
                for waiting in group:
                    self._try(connection, waiting, done, is_alone=len(group) == 1)
        except _Refused:
            return
        except Exception as error:
            self._note_failure(error)
            if self._closing and self._backend.is_unreachable(_first_cause(error)):
                group = [*group, *self._drop_pending()]
            for waiting in group:
                if not waiting.future.done():
                    waiting.future.set_exception(self._failure(error))
            return
        finally:
            self._writing_since = None
        if writes:
            self._note_success()
        for future, result in done:
            future.set_result(result)

    def _drop_pending(self) -> list[_Waiting[Any]]:
        """Drop all pending jobs and rows. Count the rows in `lost`, and return the jobs. The caller
        must still resolve their futures.

        The writer calls this if the database is unreachable while the writer closes.
        """
        # Each further attempt to write would take seconds.
        with self._lock:
            jobs = list(self._waiting)
            self._waiting.clear()
        self.lost += len(self._posts)
        self._posts.clear()
        return jobs

    def _try(
        self,
        connection: Connection,
        waiting: _Waiting[Any],
        done: list[tuple[Future[Any], Any]],
        *,
        is_alone: bool,
    ) -> None:
        """Run one job. If the job succeeds, append its future and its result to `done`. If it
        fails, no other job is affected.

        `is_alone` says that the transaction contains no other job.

        Raises:
            _RolledBack: the database has rolled back the whole transaction.
            _Refused: the job failed, and is alone in its transaction.
        """
        try:
            # A savepoint takes as long as a small job, so a job that is alone gets none.
            with nullcontext() if is_alone else connection.begin_nested():
                result = waiting.job(connection)
        except BaseException as error:
            if not self._is_in_transaction(connection):
                raise _RolledBack from error
            if isinstance(error, DBAPIError):
                waiting.future.set_exception(self._failure(error))
            else:
                waiting.future.set_exception(error)
            if is_alone:
                raise _Refused from None
        else:
            # The job may have ignored the error. Other jobs must still not be reported as
            # stored.
            if not self._is_in_transaction(connection):
                raise _RolledBack
            done.append((waiting.future, result))

    @contextmanager
    def _transaction(self, *, flushed: bool) -> Iterator[Connection]:
        """Run the block in a transaction. With `flushed`, the commit is durable when the block
        exits.
        """
        if self._connection is None:  # kept: the pool takes as long as a small job
            self._connection = self._backend.writing.connect()
        connection = self._connection
        try:
            with self._backend.transaction(connection, flushed=flushed):
                yield connection
                if flushed:
                    self._at_commit("before")
        except BaseException:
            self._disconnect()
            raise
        if connection.invalidated:  # the commit took place, and then the connection was lost
            self._disconnect()
        if flushed:
            self._at_commit("after")

    def _is_in_transaction(self, connection: Connection) -> bool:
        """Return whether the connection's transaction is still open."""
        return not connection.invalidated and self._backend.is_in_transaction(connection)

    def _disconnect(self) -> None:
        """Give the connection back to its pool. The pool rolls back an unfinished transaction."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _at_commit(self, moment: str) -> None:
        """Call the commit hook if there is one. Tests use the hook to examine every commit."""
        if self._commit_hook is not None:
            self._commits += moment == "before"
            self._commit_hook(moment, self._commits)

    def _write_posts(self, count: int) -> int:
        group = [self._posts.popleft() for _ in range(count)]
        self._wrote_posts_at = time.monotonic()
        refused = self._write_batches(
            [
                (how, [row for _, row in posts])
                for how, posts in itertools.groupby(group, key=lambda post: post[0])
            ]
        )
        # Write the rows of refused batches one by one, so that a refused row affects no other.
        refused = self._write_batches([(how, [row]) for how, rows, _ in refused for row in rows])
        self.lost += len(refused)
        if len(refused) < count:
            self._note_success()
        if refused and not self._has_failed:
            told = {"refused_rows": len(refused), "reason": self._reason(refused[-1][2])}
            self._on_event("state.rows_refused", told)
        return count

    def _write_batches(
        self, batches: list[tuple[Batch, list[Row]]]
    ) -> list[tuple[Batch, list[Row], BaseException]]:
        """Write batches of rows in one transaction. A batch is a pair: the function that writes,
        and its rows. Return the failed batches, each as the function, the rows, and the error.
        """
        if not batches:
            return []
        jobs = [_Waiting(_batch_job(*batch), Future(), durable=False) for batch in batches]
        self._run_jobs(jobs)
        return [
            (*batch, error)
            for batch, job in zip(batches, jobs, strict=True)
            if (error := job.future.exception()) is not None
        ]

    def _failure(self, error: BaseException) -> WriteFailed:
        is_unreachable = self._backend.is_unreachable(_first_cause(error))
        failure = (WriteUnavailable if is_unreachable else WriteFailed)(self._reason(error))
        failure.__cause__ = error
        return failure

    def _reason(self, error: BaseException) -> str:
        words = self._backend.in_words(_first_cause(error))
        # After a rollback of the transaction, the missing savepoint's error hides the cause.
        return "the transaction was given up" if words.startswith("no such savepoint") else words

    def _note_failure(self, error: BaseException) -> None:
        """Report a failure if it is the first since the last successful write. If another engine
        has taken over the database (Fenced), report this once in any case.
        """
        if isinstance(error, Fenced) and not self.is_fenced:
            self.is_fenced = self._has_failed = True
            self._on_event("state.fenced", {"reason": self._reason(error)})
        if not self._has_failed:  # failures may go on for days
            self._has_failed = True
            self._on_event("state.write_failed", {"reason": self._reason(error)})

    def _note_success(self) -> None:
        if self._has_failed:
            self._has_failed = False
            self._on_event("state.write_works_again", {"lost_rows": self.lost})


def _batch_job(how: Batch, rows: list[Row]) -> Job[None]:
    return lambda connection: how(connection, rows)


def _first_cause(error: BaseException) -> BaseException:
    """Return the innermost database error in the chain of causes, or the error itself."""
    found = error
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DBAPIError):
            found = seen
        seen = seen.__cause__ or seen.__context__
    return found
