"""Backend: the code that differs between the kinds of databases that hold the state.

Host side, used by `storage/database` and `storage/writer`. All other code uses the same SQL
statements for all kinds of databases; only the backends, and the column type `RawBytes`, differ.
SQLite is the kernel's own backend. Parts add others, each a `RemoteBackend`.
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
"""Number of reader threads. Each has its own connection."""


class Backend(ABC):
    """An open database. "Engine" is SQLAlchemy's word for a source of connections."""

    def __init__(self, writing: Engine, reading: Engine, *, has_readers: bool) -> None:
        """Without `has_readers`, reads also use the writer's connection."""
        self.writing = writing
        self.reading = reading
        self.has_readers = has_readers

    @abstractmethod
    def transaction(self, connection: Connection, *, flushed: bool) -> AbstractContextManager[None]:
        """Run the block in a transaction. With `flushed`, the commit is durable when the block
        exits.
        """

    @abstractmethod
    def is_in_transaction(self, connection: Connection) -> bool:
        """Return whether the transaction can still be committed."""

    @staticmethod
    @abstractmethod
    def in_words(error: BaseException) -> str:
        """Return the database's error message, which contains no values. If the error does not come
        from the database, return the error's type.
        """

    def is_unreachable(self, error: BaseException) -> bool:
        """Return whether an error means that the database cannot be reached now."""
        return False

    def close(self) -> None:
        """Close all connections."""
        self.reading.dispose()
        self.writing.dispose()  # closing SQLite's last connection merges its write-ahead log


class RemoteBackend(Backend):
    """A database that has a URL. One engine at a time is active on it, that is, may write to it.

    A part names a subclass, by the scheme of its URLs (`Part.states`).
    """

    @classmethod
    @abstractmethod
    def open(cls, url: str) -> Self | None:
        """Become the active engine of a state, and migrate the state to the newest schema. Return
        None if another engine is active.

        Transactions of this backend raise Fenced once another engine has become active.

        Raises:
            NewerState, ForeignState, DamagedState: this engine cannot use the state, which stays as
                it is.
            StoreError: the URL is invalid, or the database cannot be reached. The message has no
                part of the URL.
        """

    @classmethod
    @abstractmethod
    def open_to_read(cls, url: str) -> Engine:
        """Open a state for reading, even while an engine is active on it. Creates and migrates
        nothing.

        Raises:
            NewerState, ForeignState, DamagedState: this engine cannot use the state.
            StoreError: the state cannot be opened, or no engine of this version has started on it.
        """


def remote_backend(url: str) -> type[RemoteBackend]:
    """Return the kind of database at a URL. Imports it.

    Raises:
        StoreError: no part adds the URL's scheme, or the kind's extra is missing. The message has
            no part of the URL.
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
    """The stored bytes of a text or JSON column."""

    type = LargeBinary()
    inherit_cache = True


@compiles(RawBytes)
def _cast(element: RawBytes, compiler: SQLCompiler, **options: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **options)} AS BLOB)"
