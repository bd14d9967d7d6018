"""The record of every change of authority: who changed what, in the change's transaction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select

from fumehood.model.json_types import JsonObject
from fumehood.store.schema import CHANGES


def stamp(moment: datetime) -> str:
    """A time as the tables keep it: UTC, microseconds."""
    return moment.isoformat(timespec="microseconds")


def record_change(
    connection: Connection,
    *,
    at: datetime,
    by: str,
    action: str,
    subject: str,
    details: JsonObject | None = None,
) -> None:
    """Add one row. It is kept exactly if the change is."""
    row = {
        "at": stamp(at),
        "principal_id": by,
        "action": action,
        "subject": subject,
        "details": details or {},
    }
    connection.execute(insert(CHANGES), row)


def recorded(
    change: Callable[[Connection], None],
    *,
    at: datetime,
    by: str,
    action: str,
    subject: str,
    details: JsonObject | None = None,
) -> Callable[[Connection], None]:
    """A job that makes a change and records it, both or neither."""

    def job(connection: Connection) -> None:
        change(connection)
        record_change(connection, at=at, by=by, action=action, subject=subject, details=details)

    return job


def list_changes(connection: Connection, limit: int) -> list[dict[str, Any]]:
    """The newest changes first."""
    rows = connection.execute(select(CHANGES).order_by(CHANGES.c.seq.desc()).limit(limit))
    return [dict(row) for row in rows.mappings()]
