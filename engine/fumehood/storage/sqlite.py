"""The backend for SQLite: the state in one file. One thread writes the file, and others read it.

Host side, used by `storage/database`. Invariant: a file that this engine cannot use, because a
newer engine or another program wrote it or because it is damaged, stays unchanged, byte for byte,
including its write-ahead log. Therefore, a file is first checked with a connection that can neither
write nor merge the log into the file when it closes.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, QueuePool, StaticPool, create_engine, event
from sqlalchemy.exc import DatabaseError

from fumehood.storage.backend import READ_THREADS, Backend
from fumehood.storage.directory import PRIVATE_FILE, private
from fumehood.storage.errors import DamagedState, ForeignState, NewerState, StoreError
from fumehood.storage.schema import METADATA, STEPS

PAGE_CACHE_KB = 500
"""Size of each connection's page cache in KB. A large cache is not needed, because the operating
system caches the same pages. With SQLite's default of 2 MB, a daemon's memory grows by 4 MB over
its first 50,000 calls. With this value, it does not grow."""

BUSY_TIMEOUT_S = 5

APPLICATION_ID = 0x46554D45  # "FUME", the application id in SQLite's file header

SIDE_FILES = ("-wal", "-journal")
"""Suffixes of the files that SQLite leaves next to a database that was not closed. SQLite needs
these files to read the database."""


class SQLite(Backend):
    """The backend for a SQLite file, or for a SQLite database in memory."""

    @contextmanager
    def transaction(self, connection: Connection, *, flushed: bool) -> Iterator[None]:
        """Run the block in a transaction of this connection. With `flushed`, the commit is durable
        when the block exits.
        """
        level = "FULL" if flushed else "NORMAL"
        if connection.info.get("synchronous") != level:
            raw: Any = connection.connection.driver_connection
            raw.execute(f"PRAGMA synchronous = {level}")
            connection.info["synchronous"] = level
        with connection.begin():
            yield

    def is_in_transaction(self, connection: Connection) -> bool:
        """Return whether the connection's transaction is still open.

        SQLite itself rolls back a transaction if the disk is full, an I/O error occurs or memory
        runs out.
        """
        raw: Any = connection.connection.driver_connection
        return bool(raw.in_transaction)

    @staticmethod
    def in_words(error: BaseException) -> str:
        """Return SQLite's error message, which contains no stored values. If the error does not
        come from SQLite, return the name of the error's type.
        """
        cause = error.orig if isinstance(error, DatabaseError) else error
        return str(cause) if isinstance(cause, sqlite3.Error) else type(error).__name__


def open_file(path: Path) -> SQLite:
    """Open or create a database file, and migrate it to the newest schema.

    Raises:
        NewerState, ForeignState, DamagedState: this engine cannot use the file, and has not changed
            it.
        StoreError: the file cannot be opened.
    """
    with _opening(path):
        _check(path)
        _prepare(path)
        writing = _engine(path, "mode=rw", size=1)
        # Take the write lock when a transaction begins, so that it fails before the first job runs
        # if another process holds the lock.
        _begin_explicitly(writing, "BEGIN IMMEDIATE")
        try:
            _migrate(writing)
        except BaseException:
            writing.dispose()
            raise
    return SQLite(writing, _reading_engine(path), has_readers=True)


def open_to_read(path: Path) -> Engine:
    """Open a database file for reading, even while an engine writes to it. Nothing is created or
    migrated.

    Raises:
        NewerState, ForeignState, DamagedState: this engine cannot use the file.
        StoreError: the file is missing or cannot be opened, or an older engine wrote it.
    """
    with _opening(path):
        if not _has_content(path):
            raise StoreError(f"There is no database {path}.")
        _check(path)
        engine = _reading_engine(path)
        with engine.connect() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if version != len(STEPS):
        engine.dispose()
        raise StoreError(f"An older engine wrote the database {path}. Start this one once.")
    return engine


def open_memory() -> SQLite:
    """Create an empty database in memory, with one connection for reading and writing."""
    engine = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    _begin_explicitly(engine, "BEGIN")
    _migrate(engine)
    return SQLite(engine, engine, has_readers=False)


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Raise StoreError if the block raises an error of SQLite or of the file system."""
    try:
        yield
    except (sqlite3.DatabaseError, DatabaseError) as error:
        cause = error.orig if isinstance(error, DatabaseError) else error
        # the upper bits of the error code are details
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise _damaged(path) from None
        why = SQLite.in_words(error)
        raise StoreError(f"The database {path} cannot be opened: {why}.") from None
    except OSError as error:
        raise StoreError(f"The database {path} cannot be opened: {error.strerror}.") from None


def _damaged(path: Path) -> DamagedState:
    return DamagedState(
        f"The database {path} is damaged. It was left as it is. Restore a copy of it, or save "
        "what can be read with the sqlite3 shell's .recover; to start over, move it away "
        "together with the files beside it (-wal, -shm)."
    )


def _check(path: Path) -> None:
    """Raise StoreError if this engine cannot use the file. Neither the file nor its write-ahead log
    is changed.
    """
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
    uri = _uri(path, how)
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
        _check_content(connection, path, thoroughly=was_left_open)


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
    is_whole = version < len(STEPS) or tables >= set(METADATA.tables)
    if not is_whole or (thoroughly and one("PRAGMA quick_check(1)") != "ok"):
        raise _damaged(path)


def _has_content(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a file. Remove it, or use another FUMEHOOD_HOME.")
    return found.st_size > 0


def _prepare(path: Path) -> None:
    """Create the file if it is missing, allow only this user to access it, and enable its
    write-ahead log. SQLite gives the log and its other files the same access rights.

    Raises StoreError if the file system does not support such a log.
    """
    with open(path, "ab", opener=private) as file:
        os.fchmod(file.fileno(), PRIVATE_FILE)
    uri = _uri(path, "mode=rw")
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(
            f"The file system of {path} cannot hold the state (no write-ahead log). Set "
            "FUMEHOOD_HOME to a directory on a local disk."
        )


def _reading_engine(path: Path) -> Engine:
    engine = _engine(path, "mode=ro", size=READ_THREADS)
    _begin_explicitly(engine, "BEGIN")
    return engine


def _engine(path: Path, how: str, *, size: int) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            _uri(path, how), uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False
        )
        connection.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KB}")
        return connection

    return create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, pool_size=size, max_overflow=0
    )


def _begin_explicitly(engine: Engine, statement: str) -> None:
    """Begin each transaction with this SQL statement. The driver's own way to begin transactions
    breaks savepoints.
    """

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
