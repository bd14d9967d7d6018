"""The database: one SQLite file, opened carefully, written by one thread, read by others.

Host side, below every package that stores rows. Invariants: a change is durable once `write` has
returned; a file that this engine does not understand (a newer engine's, another program's, a
damaged one) stays as it was, byte for byte, including its write-ahead log. So a file is first read
by a connection that can neither write nor fold the log into the file when it closes.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import anyio.to_thread
from sqlalchemy import (
    Column,
    Connection,
    Delete,
    Engine,
    QueuePool,
    StaticPool,
    create_engine,
    delete,
    event,
)
from sqlalchemy.exc import DatabaseError

from fumehood.audit.chain import (
    IN_MEMORY_KEPT,
    AuditChain,
    attach_chain,
    head_of,
    key_id_after,
)
from fumehood.audit.keys import new_key, open_key
from fumehood.storage.directory import PRIVATE_FILE
from fumehood.storage.errors import (
    DamagedState,
    ForeignState,
    NewerState,
    ReadFailed,
    StoreError,
)
from fumehood.storage.schema import METADATA, STEPS
from fumehood.storage.writer import Batch, CommitHook, Job, OnEvent, Row, Writer

BUSY_TIMEOUT_S = 5
DELETED_AT_ONCE = 500
"""Rows in one deletion, so that other writes wait for a bounded time."""

READ_THREADS = 4

APPLICATION_ID = 0x46554D45  # "FUME", in SQLite's field for the owner of a file

SIDE_FILES = ("-wal", "-journal")
"""Files that SQLite keeps beside a database that was not closed, and needs to read it."""


def open_engines(path: Path) -> tuple[Engine, Engine]:
    """One engine to write and one to read, on a database with the newest schema.

    Raises:
        NewerState, ForeignState, DamagedState: the file stays unchanged.
        StoreError: it cannot be opened.
    """
    try:
        _check(path)
        _make_private(path)
        writing = _writing_engine(path)
        try:
            _migrate(writing)
        except BaseException:
            writing.dispose()
            raise
    except (sqlite3.DatabaseError, DatabaseError) as error:
        raise _refusal(path, error) from None
    except OSError as error:
        raise StoreError(f"The database {path} cannot be opened: {error.strerror}.") from None
    return writing, _reading_engine(path)


def open_to_read(path: Path) -> Engine:
    """One engine that only reads, beside a running writer; nothing is created or migrated.

    Raises:
        NewerState, ForeignState, DamagedState: the file stays unchanged.
        StoreError: it cannot be opened, or an older engine wrote it.
    """
    try:
        if not _has_content(path):
            raise StoreError(f"There is no database {path}.")
        _check(path)
        engine = _reading_engine(path)
        with engine.connect() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    except (sqlite3.DatabaseError, DatabaseError) as error:
        raise _refusal(path, error) from None
    except OSError as error:
        raise StoreError(f"The database {path} cannot be opened: {error.strerror}.") from None
    if version != len(STEPS):
        engine.dispose()
        raise StoreError(f"An older engine wrote the database {path}. Start this one once.")
    return engine


def open_memory() -> Engine:
    """An empty database in memory, with one connection for everything."""
    engine = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    _begin_explicitly(engine, "BEGIN")
    _migrate(engine)
    return engine


def in_words(error: BaseException) -> str:
    """SQLite's short message, which contains no values, or the type of another error."""
    cause = error.orig if isinstance(error, DatabaseError) else error
    return str(cause) if isinstance(cause, sqlite3.Error) else type(error).__name__


def damage_words(path: Path) -> str:
    """The remedy for a database that cannot be read."""
    return (
        f"The database {path} is damaged. It was left as it is. Restore a copy of it, or save "
        "what can be read with the sqlite3 shell's .recover; to start over, move it away "
        "together with the files beside it (-wal, -shm)."
    )


def _check(path: Path) -> None:
    """Refuse files that this engine must not open. Changes neither file nor log."""
    if not _has_content(path):
        for side in SIDE_FILES:
            if _has_content(path.with_name(path.name + side)):
                raise DamagedState(
                    f"The database {path} is missing, but its {side} file is there and may hold "
                    "changes that are not yet in it. Put both back, or move both away."
                )
        return
    was_left_open = _has_content(path.with_name(path.name + "-wal"))
    # `immutable` skips locks and side files, and so the log: only for databases without one.
    how = "mode=ro" if was_left_open else "mode=ro&immutable=1"
    connection = sqlite3.connect(_uri(path, how), uri=True, timeout=BUSY_TIMEOUT_S)
    try:
        _check_content(connection, path, thoroughly=was_left_open)
    finally:
        connection.close()


def _check_content(connection: sqlite3.Connection, path: Path, *, thoroughly: bool) -> None:
    def one(query: str) -> Any:
        return connection.execute(query).fetchone()[0]

    tables = {
        name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
    }
    version, owner = one("PRAGMA user_version"), one("PRAGMA application_id")
    if owner != APPLICATION_ID:
        if owner or version or tables:
            raise ForeignState(
                f"The database {path} is not fumehood's. Move it away, or use another "
                "FUMEHOOD_HOME."
            )
        return  # an empty file
    if version > len(STEPS):
        raise NewerState(
            f"The database {path} was written by a newer engine (schema {version}, this one "
            f"knows {len(STEPS)}). Start that one, or use another FUMEHOOD_HOME."
        )
    if version == len(STEPS) and not tables >= set(METADATA.tables):
        raise DamagedState(damage_words(path))
    if thoroughly and one("PRAGMA quick_check(1)") != "ok":
        raise DamagedState(damage_words(path))


def _has_content(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a file. Remove it, or use another FUMEHOOD_HOME.")
    return found.st_size > 0


def _make_private(path: Path) -> None:
    """Create the file, or remove other users' access. SQLite copies its mode to the side files."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, PRIVATE_FILE)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != PRIVATE_FILE:
            os.fchmod(descriptor, PRIVATE_FILE)
    finally:
        os.close(descriptor)


def _writing_engine(path: Path) -> Engine:
    def prepare(connection: sqlite3.Connection) -> None:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreError(
                f"The file system of {path} cannot hold the state (no write-ahead log). Set "
                "FUMEHOOD_HOME to a directory on a local disk."
            )
        connection.execute("PRAGMA synchronous = FULL")

    engine = _engine(path, "mode=rw", size=1, prepare=prepare)
    # Acquire the write lock at once, so that another holder is met before the first
    # job, not in each one.
    _begin_explicitly(engine, "BEGIN IMMEDIATE")
    return engine


def _reading_engine(path: Path) -> Engine:
    engine = _engine(path, "mode=ro", size=READ_THREADS, prepare=lambda connection: None)
    _begin_explicitly(engine, "BEGIN")
    return engine


def _engine(
    path: Path, how: str, *, size: int, prepare: Callable[[sqlite3.Connection], None]
) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            _uri(path, how), uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False
        )
        try:
            prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    return create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, pool_size=size, max_overflow=0
    )


def _begin_explicitly(engine: Engine, statement: str) -> None:
    """Transactions begin explicitly: the driver's implicit ones break savepoints."""

    @event.listens_for(engine, "connect")
    def no_guessing(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        raw: Any = (
            connection.connection.driver_connection
        )  # takes a third of the time of a statement
        raw.execute(statement)


def _migrate(engine: Engine) -> None:
    with engine.connect() as connection, connection.begin():
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        if version == len(STEPS):
            return
        for step in STEPS[version:]:
            step(connection)
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.exec_driver_sql(f"PRAGMA user_version = {len(STEPS)}")


def _uri(path: Path, how: str) -> str:
    return f"file:{quote(os.fspath(path.absolute()))}?{how}"


def _refusal(path: Path, error: BaseException) -> StoreError:
    if _is_damage(error):
        return DamagedState(damage_words(path))
    return StoreError(f"The database {path} cannot be opened: {in_words(error)}.")


def _is_damage(error: BaseException) -> bool:
    cause = error.orig if isinstance(error, DatabaseError) else error
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # the upper bits only say where
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


T = TypeVar("T")

FILE_NAME = "state.db"


def _silent(event: str, values: dict[str, Any]) -> None:
    """Ignore events, for embedding programs without state."""


class Database:
    """An open database with its audit chain. `close` writes pending rows."""

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
        """Run a job in a transaction; it is durable when this returns.

        Cancelling the wait does not stop the write.

        Raises:
            WriteFailed: none of it is guaranteed to be stored. An exception of `job` is passed on,
                and rolls everything back.
        """
        return await asyncio.wrap_future(self._writer.submit(job, durable=True))

    async def repeat(self, job: Job[int]) -> int:
        """Run a job that deletes a few rows until it finds none; returns how many there were.

        Raises:
            WriteFailed: the rest stays.
        """
        total = 0
        while count := await self.write(job):
            total += count
        return total

    async def delete(self, column: Column[T], values: Sequence[T]) -> None:
        """Delete the rows with these values of a column, a batch in each transaction.

        Raises:
            WriteFailed: the rest stays.
        """
        for start in range(0, len(values), DELETED_AT_ONCE):
            batch = values[start : start + DELETED_AT_ONCE]
            await self.write(_executing(delete(column.table).where(column.in_(batch))))

    def write_soon(self, job: Job[Any]) -> None:
        """Run a job without waiting, in order with those of `write`."""
        self._writer.submit(job, durable=True)

    def post(self, how: Batch, row: Row) -> None:
        """Add a row without waiting: written within a second, lost in an earlier crash."""
        self._writer.post(how, row)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Read in a thread; sees every change for which `write` has returned.

        Raises:
            ReadFailed: the database cannot be read.
        """
        if self.path is None:  # one connection in memory: the writer's
            return await asyncio.wrap_future(self._writer.submit(query, durable=False))
        return await anyio.to_thread.run_sync(self._read, query, limiter=self._readers)

    def read_now(self, query: Callable[[Connection], T]) -> T:
        """Read in this thread, during the start."""
        if self.path is None and self._writer.is_running:
            return self._writer.submit(query, durable=False).result()
        return self._read(query)

    def write_now(self, job: Job[T]) -> T:
        """Write and wait in this thread, for commands without an event loop."""
        return self._writer.submit(job, durable=True).result()

    async def flush(self) -> None:
        """Wait until every posted row has been written, or has failed."""
        await asyncio.sleep(0)  # the row of an answered call is posted just after its answer
        await asyncio.wrap_future(self._writer.flush())

    @property
    def waiting(self) -> int:
        """Changes that wait to be written."""
        return self._writer.waiting

    @property
    def lost_posts(self) -> int:
        """Posted rows that were lost since the start."""
        return self._writer.lost

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed because of the disk."""
        return self._writer.is_failing

    def close(self) -> None:
        """Write pending rows, then close the file."""
        self._writer.close()
        self._is_closed = True
        self._reading.dispose()
        self._writing.dispose()  # closing the last connection merges the write-ahead log

    def _read(self, query: Callable[[Connection], T]) -> T:
        if self._is_closed:
            raise ReadFailed("it is closed")
        try:
            with self._reading.connect() as connection:
                result = query(connection)
        except DatabaseError as error:
            reason = in_words(error)
            if not self._cannot_read:  # once per episode
                self._cannot_read = True
                self._on_event("state.read_failed", {"reason": reason})
            raise ReadFailed(reason) from error
        self._cannot_read = False
        return result


def _executing(statement: Delete) -> Job[object]:
    return lambda connection: connection.execute(statement)


def open_database(
    path: Path | None, on_event: OnEvent = _silent, commit_hook: CommitHook | None = None
) -> Database:
    """Open or create the database at `path`; None keeps one in memory.

    `on_event` receives failures while it is open: `state.write_failed` and
    `state.write_works_again` around each episode, `state.rows_dropped`, `state.rows_refused`,
    `state.read_failed`. It is called from threads, as is `commit_hook`, around each flushed commit,
    for tests of crashes.

    Raises:
        NewerState, ForeignState, DamagedState: see there. The file stays unchanged.
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


@contextmanager
def reading(state: Path) -> Iterator[Connection]:
    """A connection to the database of a state directory, beside a running engine or without one.

    Nothing is written, created or migrated.

    Raises:
        StoreError: there is no database that can be read.
    """
    engine = open_to_read(state / FILE_NAME)
    try:
        with engine.connect() as connection:
            yield connection
    except DatabaseError as error:
        raise ReadFailed(in_words(error)) from error
    finally:
        engine.dispose()
