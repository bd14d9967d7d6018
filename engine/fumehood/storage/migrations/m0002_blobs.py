"""The table of blobs: what was too large for an answer, kept for a while."""

from __future__ import annotations

from sqlalchemy import Connection

_STATEMENTS = (
    """CREATE TABLE blobs (
        id VARCHAR NOT NULL PRIMARY KEY, principal_id VARCHAR NOT NULL, filename VARCHAR NOT NULL,
        content_type VARCHAR NOT NULL, size INTEGER NOT NULL, created_at VARCHAR NOT NULL,
        expires_at INTEGER NOT NULL)""",
    "CREATE INDEX blobs_by_end ON blobs (expires_at)",
)


def upgrade(connection: Connection) -> None:
    """Run the step."""
    for statement in _STATEMENTS:
        connection.exec_driver_sql(statement)
