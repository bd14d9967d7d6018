"""Approvals know which calls are repeats of theirs."""

from __future__ import annotations

from sqlalchemy import Connection, text


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.execute(text("ALTER TABLE approvals ADD COLUMN repeat_key VARCHAR"))
    connection.execute(
        text("CREATE UNIQUE INDEX approvals_by_repeat_key ON approvals (repeat_key)")
    )
