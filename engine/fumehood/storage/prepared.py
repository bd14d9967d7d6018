"""Prepared: a statement whose text is made once, for what runs on the way of every call.

Host side. Building, looking up and compiling a statement takes longer than SQLite takes to
carry it out. Only for values that SQLite itself knows: no type of a column is consulted.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, CursorResult
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql.expression import ClauseElement


class Prepared:
    """A statement with named parameters; a column that is given no value is null."""

    def __init__(self, statement: ClauseElement) -> None:
        compiled = statement.compile(dialect=sqlite.dialect(paramstyle="named"))
        self._text = str(compiled)
        self._fixed: dict[str, Any] = dict(compiled.params)

    def execute(self, connection: Connection, values: dict[str, Any]) -> CursorResult[Any]:
        """Carry it out in the caller's transaction, with these values: text, numbers, bytes."""
        return connection.exec_driver_sql(self._text, {**self._fixed, **values})
