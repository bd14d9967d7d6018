"""The table of rate limits."""

from __future__ import annotations

from sqlalchemy import Connection, text


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.execute(
        text(
            """CREATE TABLE rate_limits ( seq INTEGER NOT NULL, "limit" VARCHAR NOT NULL,
            subject VARCHAR NOT NULL, free_at INTEGER NOT NULL, PRIMARY KEY (seq),
            UNIQUE ("limit", subject) )"""
        )
    )
    connection.execute(text("CREATE INDEX rate_limits_by_end ON rate_limits (free_at)"))
