"""Opening the database: look first, touch afterwards.

Host side, inside `database`. Invariant: a file that this engine does not understand (a
newer engine's, somebody else's, a damaged one) is left as it was found, byte for byte, its
write-ahead log too. So it is first read by a connection that can neither write nor, on
closing, fold the log into the file.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, QueuePool, StaticPool, create_engine, event
from sqlalchemy.exc import DatabaseError

from fumehood.storage.directory import PRIVATE_FILE
from fumehood.storage.errors import DamagedState, ForeignState, NewerState, StoreError
from fumehood.storage.migrations import STEPS
from fumehood.storage.schema import METADATA

BUSY_TIMEOUT_S = 5
READ_THREADS = 4

APPLICATION_ID = 0x46554D45  # "FUME": says whose file this is, in SQLite's own field for it

SIDE_FILES = ("-wal", "-journal")
"""What SQLite keeps beside a database that was not closed, and needs to read it."""


def open_engines(path: Path) -> tuple[Engine, Engine]:
    """One engine to write and one to read, on a database with the newest schema.

    Raises:
        NewerState, ForeignState, DamagedState: the file is left as it is.
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
    """One engine to read, beside whoever may be writing; nothing is made or migrated.

    Raises:
        NewerState, ForeignState, DamagedState: the file is left as it is.
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
    """SQLite's own short text, which names no values; of anything else only its kind."""
    cause = error.orig if isinstance(error, DatabaseError) else error
    return str(cause) if isinstance(cause, sqlite3.Error) else type(error).__name__


def damage_words(path: Path) -> str:
    """What to do with a database that cannot be read."""
    return (
        f"The database {path} is damaged. It was left as it is. Restore a copy of it, or save "
        "what can be read with the sqlite3 shell's .recover; to begin anew, move it away "
        "together with the files beside it (-wal, -shm)."
    )


def _check(path: Path) -> None:
    """Refuse what another engine should open, or nobody. Changes neither file nor log."""
    if not _has_content(path):
        for side in SIDE_FILES:
            if _has_content(path.with_name(path.name + side)):
                raise DamagedState(
                    f"The database {path} is missing, but its {side} file is there and may hold "
                    "what is not yet in it. Put both back, or move both away."
                )
        return
    was_left_open = _has_content(path.with_name(path.name + "-wal"))
    # Immutable means without locks and side files; it also overlooks the log, so only there.
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
        return  # nobody's yet
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
        raise StoreError(f"{path} is no file. Remove it, or use another FUMEHOOD_HOME.")
    return found.st_size > 0


def _make_private(path: Path) -> None:
    """Make the file, or close it to others. SQLite gives its mode to the files beside it."""
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
    # At once with the intent to write: whoever else holds the file is met before the first
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
    """Transactions begin where the code says so: the driver's own guess breaks savepoints."""

    @event.listens_for(engine, "connect")
    def no_guessing(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        raw: Any = connection.connection.driver_connection  # a third of the time of a statement
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
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # the rest says where, not what
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
