"""Counts how often engines have started on a state, so that nodes can recognize the last start."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from fumehood.storage.schema import META

OWNER, NUMBER = "cluster.owner", "cluster.starts"
"""Keys of the rows in the table `meta`."""

ID_BYTES = 16
"""Length of a state's random id, in bytes."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of an engine: the id of its state, and a number that grows with each start."""

    owner: str
    number: int


def count_start(connection: Connection) -> Start:
    """Increment the state's number of engine starts. Return the new start."""
    rows = connection.execute(select(META).where(META.c.key.in_((OWNER, NUMBER))))
    found = {row.key: row.value for row in rows}
    start = Start(
        found.get(OWNER) or secrets.token_hex(ID_BYTES), int(found.get(NUMBER) or "0") + 1
    )
    connection.execute(delete(META).where(META.c.key.in_((OWNER, NUMBER))))
    values = {OWNER: start.owner, NUMBER: str(start.number)}
    connection.execute(
        insert(META), [{"key": key, "value": value} for key, value in values.items()]
    )
    return start
