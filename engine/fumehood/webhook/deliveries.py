"""Webhook messages that are owed: written with what they tell, struck off when they arrived."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, insert, or_, select, update

from fumehood.core.json_types import JsonObject
from fumehood.storage.changes import stamp
from fumehood.storage.schema import DELIVERIES

_IS_OWED = DELIVERIES.c.delivered_at.is_(None) & DELIVERIES.c.given_up_at.is_(None)


@dataclass(frozen=True, slots=True)
class Owed:
    """A message that has not arrived yet. `attempts` counts those that were begun."""

    seq: int
    approval_id: str
    """Empty where the message is about none."""
    event: str
    attempts: int
    document: JsonObject | None
    """What is told, where it is about no approval."""


def owe(connection: Connection, approval_id: str, event: str, at: datetime) -> None:
    """Promise a message about an approval, in the transaction of what it tells."""
    _owe(connection, event, at, approval_id=approval_id, document=None)


def owe_newest(connection: Connection, event: str, document: JsonObject, at: datetime) -> None:
    """Promise a message that says all that earlier ones of its kind would have said.

    Those go only once it is there: a number that is free again would be given to it, and an
    earlier one that is just being sent would then strike this one off.
    """
    seq = _owe(connection, event, at, approval_id="", document=document)
    earlier = _IS_OWED & (DELIVERIES.c.event == event) & (DELIVERIES.c.seq < seq)
    connection.execute(delete(DELIVERIES).where(earlier))


def list_owed(connection: Connection, after: int, limit: int) -> list[Owed]:
    """What is owed, oldest first, beginning behind the number `after`."""
    found = connection.execute(
        select(DELIVERIES)
        .where(_IS_OWED, DELIVERIES.c.seq > after)
        .order_by(DELIVERIES.c.seq)
        .limit(limit)
    )
    return [Owed(row.seq, row.approval_id, row.event, row.attempts, row.document) for row in found]


def note_attempt(connection: Connection, seq: int) -> None:
    """Count an attempt before it is made: a crash in the middle has made it."""
    connection.execute(
        update(DELIVERIES).where(DELIVERIES.c.seq == seq).values(attempts=DELIVERIES.c.attempts + 1)
    )


def note_delivered(connection: Connection, seq: int, at: datetime) -> None:
    """It has arrived."""
    _end(connection, seq, "delivered_at", at)


def give_up(connection: Connection, seq: int, at: datetime) -> None:
    """It is not tried again."""
    _end(connection, seq, "given_up_at", at)


def forget_old(connection: Connection, before: datetime) -> int:
    """Remove what has ended, and was promised before this moment; how many."""
    ended = or_(DELIVERIES.c.delivered_at.is_not(None), DELIVERIES.c.given_up_at.is_not(None))
    removed = connection.execute(
        delete(DELIVERIES).where(ended, DELIVERIES.c.created_at < stamp(before))
    )
    return removed.rowcount


def _end(connection: Connection, seq: int, column: str, at: datetime) -> None:
    connection.execute(
        update(DELIVERIES).where(DELIVERIES.c.seq == seq, _IS_OWED).values({column: stamp(at)})
    )


def _owe(connection: Connection, event: str, at: datetime, **about: Any) -> int:
    """Its number."""
    row = {
        "event": event,
        "created_at": stamp(at),
        "attempts": 0,
        "delivered_at": None,
        "given_up_at": None,
        **about,
    }
    made = connection.execute(insert(DELIVERIES).values(row)).inserted_primary_key
    assert made is not None
    return int(made[0])
