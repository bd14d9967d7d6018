"""Approvals know which calls are repeats of theirs."""

from __future__ import annotations

from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.exec_driver_sql("ALTER TABLE approvals ADD COLUMN repeat_key VARCHAR")
    connection.exec_driver_sql(
        "CREATE UNIQUE INDEX approvals_by_repeat_key ON approvals (repeat_key)"
    )
