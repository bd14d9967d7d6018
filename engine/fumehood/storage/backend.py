"""Backend: the code that differs between the kinds of databases that hold the state.

Host side, used by `storage/database` and `storage/writer`. All other code uses the same SQL
statements for all kinds of databases; only `sqlite.py` and `postgres.py`, and the column type
`RawBytes`, differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection, Engine, LargeBinary
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

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


class RawBytes(FunctionElement[bytes]):
    """The stored bytes of a text or JSON column."""

    type = LargeBinary()
    inherit_cache = True


@compiles(RawBytes)
def _cast(element: RawBytes, compiler: SQLCompiler, **options: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **options)} AS BLOB)"


@compiles(RawBytes, "postgresql")
def _convert(element: RawBytes, compiler: SQLCompiler, **options: Any) -> str:
    # A cast of the text would read backslashes as escapes.
    return f"convert_to(CAST({compiler.process(element.clauses, **options)} AS TEXT), 'UTF8')"
