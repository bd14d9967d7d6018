"""The database: one file, opened carefully, written by one thread, read by others.

Host side, the ground floor of this room. Above it one file for each kind of row. Invariant:
what `write` has returned for is on the disk; a database that this engine does not
understand, or that is damaged, is never touched.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
from sqlalchemy import Connection, Engine, Insert, StaticPool, create_engine, event, text
from sqlalchemy.exc import DatabaseError

from fumehood.store.errors import DamagedState, NewerState, StoreError, WriteFailed
from fumehood.store.migrations import STEPS
from fumehood.store.writer import Job, Row, Writer

T = TypeVar("T")

BUSY_TIMEOUT_S = 5
READ_THREADS = 4
FILE_NAME = "state.db"


class Database:
    """An open database. Made by `open_database`; `close` writes what waits."""

    def __init__(self, path: Path | None, writing: Engine, reading: Engine) -> None:
        self.path = path
        self._writing = writing
        self._reading = reading
        self._writer = Writer(writing, _in_words)
        self._readers = anyio.CapacityLimiter(READ_THREADS)

    async def write(self, job: Job[T]) -> T:
        """Carry out a change in a transaction; when this returns, it is on the disk.

        Cancelling the wait does not stop the write.

        Raises:
            WriteFailed: nothing of it was kept. What `job` raises is passed on, and then
                nothing was kept either.
        """
        return await asyncio.wrap_future(self._writer.submit(job, durable=True))

    def post(self, statement: Insert, row: Row) -> None:
        """A row that nobody waits for: written within a second, lost in a crash before."""
        self._writer.post(statement, row)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Read in a thread; sees everything that `write` has returned for.

        Raises:
            StoreError: the database cannot be read.
        """
        if self.path is None:  # one connection in memory: the writer's
            return await asyncio.wrap_future(self._writer.submit(query, durable=False))
        return await anyio.to_thread.run_sync(self._read, query, limiter=self._readers)

    def read_now(self, query: Callable[[Connection], T]) -> T:
        """Read in this thread, for the start: nobody else uses the database yet."""
        return self._read(query)

    def write_now(self, job: Job[T]) -> T:
        """Write and wait in this thread, for tools that run without an event loop."""
        return self._writer.submit(job, durable=True).result()

    async def flush(self) -> None:
        """Wait until everything that was posted has been written, or has failed."""
        await asyncio.wrap_future(self._writer.submit(lambda connection: None, durable=False))

    @property
    def lost_posts(self) -> int:
        """Posted changes that could not be written since the start."""
        return self._writer.lost

    def close(self) -> None:
        """Write what waits, then let go of the file."""
        self._writer.close()
        self._reading.dispose()
        self._writing.dispose()

    def _read(self, query: Callable[[Connection], T]) -> T:
        try:
            with self._reading.connect() as connection:
                return query(connection)
        except DatabaseError as error:
            raise StoreError(_in_words(error)) from None


def open_database(path: Path | None) -> Database:
    """Open, or make, the database at `path`; None keeps one in memory.

    Raises:
        NewerState, DamagedState: see there. The file is left as it is.
        StoreError: it cannot be opened.
    """
    if path is None:
        engine = create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
        )
        _begin_explicitly(engine)
        _migrate(engine)
        return Database(None, engine, engine)
    _make_private(path)
    was_left_open = path.with_name(path.name + "-wal").exists()
    reading, writing = _engine(path, readonly=True), _engine(path, readonly=False)
    try:
        with reading.connect() as connection:
            _check(connection, thoroughly=was_left_open)
        _migrate(writing)
    except DatabaseError as error:
        reading.dispose()
        writing.dispose()
        if _is_damage(error):
            raise DamagedState(_damage_words(path)) from None
        raise StoreError(f"The database {path} cannot be opened: {_in_words(error)}") from None
    except StoreError:
        reading.dispose()
        raise
    return Database(path, writing, reading)


def _make_private(path: Path) -> None:
    """The file is its owner's alone; SQLite gives the files beside it the same mode."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"The database {path} cannot be opened: {error.strerror}.") from None


def _engine(path: Path, *, readonly: bool) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}",
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=READ_THREADS if readonly else 1,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA query_only = ON" if readonly else "PRAGMA journal_mode = WAL")

    _begin_explicitly(engine)
    return engine


def _begin_explicitly(engine: Engine) -> None:
    """Transactions begin where the code says so: the driver's own guess breaks savepoints."""

    @event.listens_for(engine, "connect")
    def no_guessing(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")


def _check(connection: Connection, *, thoroughly: bool) -> None:
    """Refuse what another engine should open, or nobody. Reads only."""
    names = set(
        connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars()
    )
    version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if version > len(STEPS):
        raise NewerState(
            f"The database was written by a newer engine (schema {version}, this one knows "
            f"{len(STEPS)}). Start that one, or use another FUMEHOOD_HOME."
        )
    if version == 0 and names:
        raise DamagedState("The database holds tables that are not fumehood's. Move it away.")
    if thoroughly:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        if found != "ok":
            raise DamagedState(_damage_words(None))


def _migrate(engine: Engine) -> None:
    with engine.connect() as connection, connection.begin():
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        for step in STEPS[version:]:
            step(connection)
        connection.exec_driver_sql(f"PRAGMA user_version = {len(STEPS)}")


def _is_damage(error: DatabaseError) -> bool:
    cause = error.orig
    code = getattr(cause, "sqlite_errorcode", None)
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) or "malformed" in str(cause)


def _damage_words(path: Path | None) -> str:
    which = f"The database {path}" if path is not None else "The database"
    return (
        f"{which} is damaged. It was left as it is. Restore a copy of it with its -wal file, or "
        "save what can be read with the sqlite3 shell's .recover; to begin anew, move it away."
    )


def _in_words(error: BaseException) -> str:
    """SQLite's own short text, which names no values."""
    cause = error.orig if isinstance(error, DatabaseError) else error
    return str(cause)


__all__ = ["FILE_NAME", "Database", "WriteFailed", "open_database"]
