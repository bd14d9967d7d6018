"""Backend: the code that differs between the kinds of database that can hold the state.

Host side, used by `storage/database` and `storage/writer`. All other code uses the same SQL
statements for every kind of database. Only the backends and the column type `RawBytes` contain code
for one kind. The backend for SQLite is in `storage/sqlite`. Parts can add other backends, which are
subclasses of `RemoteBackend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Self

from sqlalchemy import Connection, Engine, LargeBinary
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from fumehood.core.part import imported
from fumehood.parts import listed, places
from fumehood.storage.errors import StoreError

READ_THREADS = 4
"""Number of threads that read the database. Each has its own connection."""


class Backend(ABC):
    """An open database. `writing` and `reading` are SQLAlchemy engines, from which callers get
    connections.
    """

    def __init__(self, writing: Engine, reading: Engine, *, has_readers: bool) -> None:
        """Use these SQLAlchemy engines. If `has_readers` is False, reads also use the writer's
        connection.
        """
        self.writing = writing
        self.reading = reading
        self.has_readers = has_readers

    @abstractmethod
    def transaction(self, connection: Connection, *, flushed: bool) -> AbstractContextManager[None]:
        """Run the block in a transaction of this connection. With `flushed`, the commit is durable
        when the block exits.
        """

    @abstractmethod
    def is_in_transaction(self, connection: Connection) -> bool:
        """Return whether the connection's transaction can still be committed."""

    @staticmethod
    @abstractmethod
    def in_words(error: BaseException) -> str:
        """Return the database's error message, which contains no stored values. If the error does
        not come from the database, return the name of the error's type.
        """

    def is_unreachable(self, error: BaseException) -> bool:
        """Return whether an error means that the database cannot be reached at the moment."""
        return False

    def close(self) -> None:
        """Close all connections."""
        self.reading.dispose()
        self.writing.dispose()  # closing SQLite's last connection merges its write-ahead log


class RemoteBackend(Backend):
    """A database that has a URL. Several engines may use the database, but only one of them at a
    time is active and may write to it.

    A part supports a URL scheme by naming a subclass of this class in `Part.states`.
    """

    @classmethod
    @abstractmethod
    def open(cls, url: str) -> Self | None:
        """Make this engine the active engine of the state at a URL, which is the only engine that
        may write to the state. Migrate the state to the newest schema. Return the opened backend.

        Return None if another engine is active. If another engine becomes active later,
        transactions of the returned backend raise Fenced.

        Raises:
            NewerState, ForeignState, DamagedState: this engine cannot use the state, and has not
                changed it.
            StoreError: the URL is invalid, or the database cannot be reached. The message does not
                contain any of the URL.
        """

    @classmethod
    @abstractmethod
    def open_to_read(cls, url: str) -> Engine:
        """Open the state at a URL for reading, even while an engine writes to it. Nothing is
        created or migrated.

        Raises:
            NewerState, ForeignState, DamagedState: this engine cannot use the state.
            StoreError: the state cannot be opened, or no engine of this version has started on it.
        """


def remote_backend(url: str) -> type[RemoteBackend]:
    """Import and return the backend class for the database at a URL.

    Raises:
        StoreError: no part provides a backend for the URL's scheme, or the backend's extra
            (optional dependencies) is not installed. The message does not contain any of the URL.
    """
    known = places("states")
    scheme = url.partition(":")[0]
    if scheme not in known:
        raise StoreError(
            f"The URL of the state has an unknown scheme. Known schemes: {listed(known)}."
        )
    found: type[RemoteBackend] = imported(known[scheme])
    return found


class RawBytes(FunctionElement[bytes]):
    """SQL function that returns the stored bytes of a text or JSON column."""

    type = LargeBinary()
    inherit_cache = True


@compiles(RawBytes)
def _cast(element: RawBytes, compiler: SQLCompiler, **options: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **options)} AS BLOB)"
