"""Copy the state of a stopped engine into another, empty database.

Host side, for `fumehood state copy`. Files and keys stay in the state directory. Invariants: the
source is locked as if an engine used it, so that no engine changes it during the copy; the copy is
one transaction, and is compared with the source before the commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Integer, Table, func, select
from sqlalchemy.exc import DBAPIError

from fumehood.parts import places
from fumehood.storage.audit_chain import all_rows
from fumehood.storage.backend import Backend, remote_backend
from fumehood.storage.database import FILE_NAME
from fumehood.storage.directory import hold_lock
from fumehood.storage.errors import Standby, StoreError
from fumehood.storage.schema import METADATA
from fumehood.storage.sqlite import open_file

AT_ONCE = 1000
"""Number of rows that are read and inserted at a time."""

TABLES = METADATA.sorted_tables


def copy_state(source: str, target: str) -> dict[str, int]:
    """Copy a state from the database `source` to the empty database `target`. Return the name of
    each table with the number of its copied rows.

    `source` and `target` each have one of three forms: the path of a state directory,
    `sqlite:///FILE`, or a URL as in the setting `state.url`.

    Raises:
        StoreError: one of the databases cannot be used or is used by an engine, the target is not
            empty, or the copy differs from the source.
    """
    with _opened(source, is_new=False) as old, _opened(target, is_new=True) as new:
        try:
            with (
                old.reading.connect() as reading,
                new.writing.connect() as writing,
                new.transaction(writing, flushed=True),
            ):
                _let_wait(writing)
                _let_wait(reading)
                if reading.dialect.name == "postgresql":  # SQLite always reads a snapshot
                    reading.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                for table in TABLES:
                    if writing.execute(select(table).limit(1)).first() is not None:
                        raise StoreError("The target has a state already. Copy to an empty one.")
                counts = {table.name: _copy(table, reading, writing) for table in TABLES}
                _compare(reading, writing)
            return counts
        except DBAPIError as error:
            words = {backend.in_words(error) for backend in (old, new)}
            why = next(iter(words - {type(error).__name__}), type(error).__name__)
            raise StoreError(
                f"The state cannot be copied ({why}). The target stays empty."
            ) from error


@contextmanager
def _opened(place: str, *, is_new: bool) -> Iterator[Backend]:
    if _is_url(place):
        remote = remote_backend(place).open(place)
        if remote is None:
            raise Standby
        with closing(remote):
            yield remote
        return
    path = Path(place.removeprefix("sqlite:///"))
    if path.is_dir():
        path /= FILE_NAME
    if not is_new and not path.is_file():
        raise StoreError(f"There is no database {path}.")
    with (
        hold_lock(path.parent / "engine.lock", "this state directory"),
        closing(open_file(path)) as backend,
    ):
        yield backend


def _is_url(place: str) -> bool:
    """Return whether `place` is a URL, even an invalid one. Otherwise, it is a path or
    `sqlite:///FILE`.
    """
    # Error messages may show paths, but never URLs.
    scheme = place.partition(":")[0]
    return scheme in places("states") or ("://" in place and scheme != "sqlite")


def _let_wait(connection: Connection) -> None:
    """Disable PostgreSQL's time limits for slow statements, and for a transaction that is idle
    while the other database works.
    """
    if connection.dialect.name == "postgresql":
        raw: Any = connection.connection.driver_connection
        raw.answer_s = math.inf
        connection.exec_driver_sql("SET idle_in_transaction_session_timeout = 0")


def _copy(table: Table, reading: Connection, writing: Connection) -> int:
    """Copy a table's rows from the connection `reading` to `writing`, sorted by primary key. Return
    the number of rows.
    """
    found = reading.execute(select(table).order_by(*table.primary_key.columns))
    count = 0
    for part in found.mappings().partitions(AT_ONCE):
        writing.execute(table.insert(), [_without_nul(row) for row in part])
        count += len(part)
    (key, *others) = table.primary_key.columns
    has_numbers = not others and isinstance(key.type, Integer)
    if count and has_numbers and writing.dialect.name == "postgresql":
        # Number new rows after the copied ones, as SQLite does by itself.
        sequence = func.pg_get_serial_sequence(table.name, key.name)
        writing.execute(select(func.setval(sequence, func.max(key))))
    return count


def _without_nul(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a row to insert, in which U+FFFD replaces NUL characters in text. Early engines stored
    NUL characters, which PostgreSQL rejects.
    """
    return {
        key: value.replace("\0", "\ufffd") if isinstance(value, str) else value
        for key, value in row.items()
    }


def _compare(reading: Connection, writing: Connection) -> None:
    """Compare the databases of the connections `reading` and `writing`. Raise StoreError if a table
    has different numbers of rows, or if the audit chains differ in any byte.
    """
    for table in TABLES:
        count = select(func.count()).select_from(table)
        if reading.execute(count).scalar() != writing.execute(count).scalar():
            raise StoreError(f"The copy of the table {table.name} is not complete.")
    pairs = zip(all_rows(reading), all_rows(writing), strict=True)
    if any((one.seq, one.body, one.mac) != (two.seq, two.body, two.mac) for one, two in pairs):
        raise StoreError("The copy of the audit chain differs from its source.")
