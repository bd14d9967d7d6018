"""The writer: one thread with one connection, which groups what waits into one commit.

Host side, inside `database`. Invariant: a durable job's future is resolved only after the
commit that holds it was flushed to the disk; a job that fails takes nothing else with it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine, Insert
from sqlalchemy.exc import DatabaseError

from fumehood.store.errors import WriteFailed

T = TypeVar("T")
Job = Callable[[Connection], T]
Row = dict[str, Any]

MAX_GROUP = 500
MAX_POSTS = 20_000
"""Posted rows that may wait; beyond it the newest are dropped and counted."""

GATHER_S = 0.2
"""How long posted changes are gathered: one transaction for many costs the calls least."""


@dataclass(slots=True)
class _Waiting(Generic[T]):
    job: Job[T]
    future: Future[T]
    durable: bool


class Writer:
    """Runs jobs in order of arrival, posts in an order of their own."""

    def __init__(self, engine: Engine, in_words: Callable[[BaseException], str]) -> None:
        self._engine = engine
        self._in_words = in_words
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._waiting: deque[_Waiting[Any]] = deque()
        self._posts: deque[tuple[Insert, Row]] = deque()
        self._closing = False
        self._level = ""
        self.lost = 0
        self._thread: threading.Thread | None = None

    def submit(self, job: Job[T], *, durable: bool) -> Future[T]:
        """Queue a job; its future holds its result once it is committed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closing:
                future.set_exception(WriteFailed("the engine's state is closed"))
                return future
            self._waiting.append(_Waiting(job, future, durable))
            self._start()
        self._wake.set()
        return future

    def post(self, statement: Insert, row: Row) -> None:
        """Queue a row that nobody waits for."""
        if self._closing or len(self._posts) >= MAX_POSTS:
            self.lost += 1
            return
        self._posts.append((statement, row))
        if self._thread is None:
            with self._lock:
                self._start()

    def close(self) -> None:
        """Write what waits and end the thread."""
        with self._lock:
            self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        """The first row starts the thread: many an embedded engine never has one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="state-writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with self._engine.connect() as connection:
            while True:
                # Posts need no wake-up of their own: it would cost a call more than its row.
                self._wake.wait(GATHER_S)
                self._wake.clear()
                closing = self._closing
                self._write_waiting(connection)
                self._write_posts(connection)
                if closing and not self._waiting and not self._posts:
                    return

    def _write_waiting(self, connection: Connection) -> None:
        while self._waiting:
            with self._lock:
                count = min(len(self._waiting), MAX_GROUP)
                group = [self._waiting.popleft() for _ in range(count)]
            self._write_group(connection, group)

    def _write_group(self, connection: Connection, group: list[_Waiting[Any]]) -> None:
        level = "FULL" if any(waiting.durable for waiting in group) else "NORMAL"
        done: list[tuple[Future[Any], Any]] = []
        try:
            self._flush_at_commit(connection, level)
            with connection.begin():
                for waiting in group:
                    self._try(connection, waiting, done)
        except DatabaseError as error:
            failure = WriteFailed(self._in_words(error))
            for waiting in group:
                if not waiting.future.done():
                    waiting.future.set_exception(failure)
            return
        for future, result in done:
            future.set_result(result)

    def _try(
        self, connection: Connection, waiting: _Waiting[Any], done: list[tuple[Future[Any], Any]]
    ) -> None:
        """One job in a savepoint of its own: its failure is its own."""
        try:
            with connection.begin_nested():
                result = waiting.job(connection)
        except DatabaseError as error:
            if connection.invalidated or _ends_the_transaction(error):
                raise
            waiting.future.set_exception(WriteFailed(self._in_words(error)))
        except Exception as error:
            waiting.future.set_exception(error)
        else:
            done.append((waiting.future, result))

    def _flush_at_commit(self, connection: Connection, level: str) -> None:
        """`FULL`: a commit is on the disk when it returns. Between transactions only."""
        if level != self._level:
            raw: Any = connection.connection.driver_connection
            raw.execute(f"PRAGMA synchronous = {level}")
            self._level = level

    def _write_posts(self, connection: Connection) -> None:
        while self._posts:
            count = min(len(self._posts), MAX_GROUP)
            group = [self._posts.popleft() for _ in range(count)]
            try:
                self._flush_at_commit(connection, "NORMAL")
                with connection.begin():
                    for statement, rows in itertools.groupby(group, key=lambda post: post[0]):
                        connection.execute(statement, [row for _, row in rows])
            except Exception:  # nobody waits, and the thread must go on
                self.lost += len(group)
                connection.rollback()


def _ends_the_transaction(error: DatabaseError) -> bool:
    """SQLite has rolled everything back by itself: full, I/O error, no memory."""
    name = getattr(error.orig, "sqlite_errorname", "")
    return name.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_NOMEM", "SQLITE_READONLY"))
