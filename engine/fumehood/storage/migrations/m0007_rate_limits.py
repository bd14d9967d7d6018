"""The table of rate limits."""

from __future__ import annotations

from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.exec_driver_sql(
        """CREATE TABLE rate_limits ( seq INTEGER NOT NULL, "limit" VARCHAR NOT NULL,
            subject VARCHAR NOT NULL, free_at INTEGER NOT NULL, PRIMARY KEY (seq),
            UNIQUE ("limit", subject) )"""
    )
    connection.exec_driver_sql("CREATE INDEX rate_limits_by_end ON rate_limits (free_at)")
