"""The parts that a state needs, because each has promised something about it that lasts.

Host side. A part calls `need_part` in the transaction of its promise. From then on, an engine
without the part refuses the state: it would break the promise, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, insert, select

from fumehood.core.part import PartError
from fumehood.storage.database import Database
from fumehood.storage.schema import META

PREFIX = "needs."
"""The beginning of the keys in the table `meta`, before the part's name."""


def need_part(connection: Connection, name: str) -> None:
    """Record that the state needs a part from now on, in the caller's transaction."""
    key = f"{PREFIX}{name}"
    if connection.execute(select(META).where(META.c.key == key)).first() is None:
        connection.execute(insert(META), {"key": key, "value": ""})


def require_parts(database: Database, known: Collection[str]) -> None:
    """Raise PartError if the state needs a part that is not among the `known` ones."""
    query = select(META.c.key).where(META.c.key.startswith(PREFIX))
    keys = database.read_now(lambda connection: connection.execute(query).scalars().all())
    if missing := {key.removeprefix(PREFIX) for key in keys}.difference(known):
        raise PartError(
            f"The state needs the part {min(missing)!r}, which is not installed. It was left as it "
            "is. Install the part again, or begin with another state."
        )
