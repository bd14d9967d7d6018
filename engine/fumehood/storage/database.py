"""The database: one SQLite file, written by one thread and read by others.

Host side, used by every package that stores rows. Invariants: a change is durable once `write` has
returned; a file that this engine cannot use (a newer engine's, another program's, a damaged one)
stays unchanged, byte for byte, including its write-ahead log. Therefore a file is first checked
with a connection that can neither write nor merge the log into the file when it closes.
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

PAGE_CACHE_KB = 500
"""Pages that each connection keeps, a second time beside the kernel. With SQLite's default of 2 MB,
a daemon's memory grew by 4 MB over its first 50,000 calls; with this it stays.
"""

BUSY_TIMEOUT_S = 5
DELETED_AT_ONCE = 500
"""Rows deleted in one transaction. Limited so that other writes do not wait long."""

READ_THREADS = 4

APPLICATION_ID = 0x46554D45  # "FUME", the application id in SQLite's file header

SIDE_FILES = ("-wal", "-journal")
"""Suffixes of files beside a database that was not closed. SQLite needs them to read it."""


def open_engines(path: Path) -> tuple[Engine, Engine]:
    """Open a database and bring it to the newest schema; return an engine to write and one to read.

    "Engine" is SQLAlchemy's word for a source of connections.

    Raises:
        NewerState, ForeignState, DamagedState: this engine cannot use the file; it stays unchanged.
        StoreError: the file cannot be opened.
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
    """Open a database only to read, also beside a running writer. Creates and migrates nothing.

    Raises:
        NewerState, ForeignState, DamagedState: this engine cannot use the file.
        StoreError: the file cannot be opened, or an older engine wrote it.
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
    """Create an empty database in memory, with one connection for reading and writing."""
    engine = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    _begin_explicitly(engine, "BEGIN")
    _migrate(engine)
    return engine


def in_words(error: BaseException) -> str:
    """Return SQLite's message, which contains no values, or the type of another error."""
    cause = error.orig if isinstance(error, DatabaseError) else error
    return str(cause) if isinstance(cause, sqlite3.Error) else type(error).__name__


def damage_words(path: Path) -> str:
    """Return the remedy for a database that cannot be read."""
    return (
        f"The database {path} is damaged. It was left as it is. Restore a copy of it, or save "
        "what can be read with the sqlite3 shell's .recover; to start over, move it away "
        "together with the files beside it (-wal, -shm)."
    )


def _check(path: Path) -> None:
    """Refuse a file that this engine cannot use. Changes neither the file nor its log."""
    if not _has_content(path):
        for side in SIDE_FILES:
            if _has_content(path.with_name(path.name + side)):
                raise DamagedState(
                    f"The database {path} is missing, but its {side} file is there and may hold "
                    "changes that are not yet in it. Put both back, or move both away."
                )
        return
    was_left_open = _has_content(path.with_name(path.name + "-wal"))
    # `immutable` ignores locks and side files, so it is only for databases without a log.
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
        return  # an empty file is a new database
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
    """Create the file, or remove other users' access. SQLite's side files get the same mode."""
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
    # Take the write lock when a transaction begins, so that a lock held by another process fails
    # it before the first job runs.
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
            connection.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KB}")
            prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    return create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, pool_size=size, max_overflow=0
    )


def _begin_explicitly(engine: Engine, statement: str) -> None:
    """Begin transactions with this statement: the driver's implicit ones break savepoints."""

    @event.listens_for(engine, "connect")
    def no_guessing(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        raw: Any = (
            connection.connection.driver_connection
        )  # takes a third of the time that SQLAlchemy would
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
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # the upper bits are details
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


T = TypeVar("T")

FILE_NAME = "state.db"


def _silent(event: str, values: dict[str, Any]) -> None:
    """Ignore events: the default if nobody listens to the database."""


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
        """Run a job in a transaction, which is durable when this returns; return the job's result.

        Cancelling it does not stop the write. An exception of `job` rolls its changes back and is
        raised here.

        Raises:
            WriteFailed: the database failed. None of the changes is guaranteed to be stored.
        """
        return await asyncio.wrap_future(self._writer.submit(job, durable=True))

    async def repeat(self, job: Job[int]) -> int:
        """Run a job that deletes a few rows, until it finds no more; return how many it deleted.

        Raises:
            WriteFailed: the database failed; the remaining rows stay.
        """
        total = 0
        while count := await self.write(job):
            total += count
        return total

    async def delete(self, column: Column[T], values: Sequence[T]) -> None:
        """Delete the rows with these values of a column, in batches, each in its own transaction.

        Raises:
            WriteFailed: the database failed; the remaining rows stay.
        """
        for start in range(0, len(values), DELETED_AT_ONCE):
            batch = values[start : start + DELETED_AT_ONCE]
            await self.write(_executing(delete(column.table).where(column.in_(batch))))

    def write_soon(self, job: Job[Any]) -> None:
        """Queue a job without waiting for it. It runs in order with the jobs of `write`."""
        self._writer.submit(job, durable=True)

    def post(self, how: Batch, row: Row) -> None:
        """Queue a row without waiting.

        It is written within a second; a crash before that loses it.
        """
        self._writer.post(how, row)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query in a thread. It sees every change for which `write` has returned.

        Raises:
            ReadFailed: the database cannot be read.
        """
        if self.path is None:  # a database in memory has only the writer's connection
            return await asyncio.wrap_future(self._writer.submit(query, durable=False))
        return await anyio.to_thread.run_sync(self._read, query, limiter=self._readers)

    def read_now(self, query: Callable[[Connection], T]) -> T:
        """Run a query in this thread, which it blocks. For the engine's start."""
        if self.path is None and self._writer.is_running:
            return self._writer.submit(query, durable=False).result()
        return self._read(query)

    def write_now(self, job: Job[T]) -> T:
        """Run a job as `write` does, but block this thread. For commands without an event loop."""
        return self._writer.submit(job, durable=True).result()

    async def flush(self) -> None:
        """Wait until every row that was posted before has been written or has failed."""
        await asyncio.sleep(0)  # the row of a call is posted just after its answer was sent
        await asyncio.wrap_future(self._writer.flush())

    @property
    def waiting(self) -> int:
        """The number of jobs and rows that wait to be written."""
        return self._writer.waiting

    @property
    def lost_posts(self) -> int:
        """How many posted rows were lost since the start."""
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
            if not self._cannot_read:  # report each period of failures once
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

    `on_event` receives failures while the database is open: `state.write_failed` and later
    `state.write_works_again`, `state.rows_dropped`, `state.rows_refused` and `state.read_failed`.
    Tests of crashes use `commit_hook`, which is called before and after each flushed commit. Both
    are called from threads.

    Raises:
        NewerState, ForeignState, DamagedState: this engine cannot use the file; it stays unchanged.
        AuditKeyLost: the database has an audit chain, but its key is missing.
        StoreError: the file cannot be opened.
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
    """Open the database of a state directory only to read, whether or not an engine is running.

    Nothing is written, created or migrated.

    Raises:
        StoreError: the database is missing or cannot be read.
    """
    engine = open_to_read(state / FILE_NAME)
    try:
        with engine.connect() as connection:
            yield connection
    except DatabaseError as error:
        raise ReadFailed(in_words(error)) from error
    finally:
        engine.dispose()
