"""The parts that a state needs, because each of them has made a lasting promise about this state.

Host side. A part calls `need_part` in the transaction in which it makes its promise. From then on,
an engine without this part refuses the state, because it would break the promise unnoticed. If the
promise ends, the part calls `release_part`.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, delete, insert, select

from fumehood.core.part import PartError
from fumehood.storage.database import Database
from fumehood.storage.schema import META

PREFIX = "needs."
"""Prefix of the keys in the table `meta`. The part's name follows the prefix."""


def need_part(connection: Connection, name: str) -> None:
    """Record that the state needs a part from now on, in the caller's transaction."""
    if name not in needed_parts(connection):
        connection.execute(insert(META), {"key": f"{PREFIX}{name}", "value": ""})


def release_part(connection: Connection, name: str) -> None:
    """Record that the state does not need a part any more, in the caller's transaction."""
    connection.execute(delete(META).where(META.c.key == f"{PREFIX}{name}"))


def needed_parts(connection: Connection) -> set[str]:
    """Return the names of the parts that the state needs."""
    keys = connection.execute(select(META.c.key).where(META.c.key.startswith(PREFIX))).scalars()
    return {key.removeprefix(PREFIX) for key in keys}


def require_parts(database: Database, known: Collection[str]) -> None:
    """Raise PartError if the state needs a part whose name is not in `known`."""
    if missing := database.read_now(needed_parts).difference(known):
        raise PartError(
            f"The state needs the part {min(missing)!r}, which is not installed. It was left as it "
            "is. Install the part again, or begin with another state."
        )
