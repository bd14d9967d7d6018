"""The session of a blob: its blobs end with it."""

from __future__ import annotations

from sqlalchemy import Connection, text


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.execute(text("ALTER TABLE blobs ADD COLUMN session_id VARCHAR"))
