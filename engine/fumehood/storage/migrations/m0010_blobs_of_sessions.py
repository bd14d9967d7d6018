"""The session of a blob: its blobs end with it."""

from __future__ import annotations

from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.exec_driver_sql("ALTER TABLE blobs ADD COLUMN session_id VARCHAR")
