"""A remembered rule says whether other arguments are free; in earlier ones they are not."""

from __future__ import annotations

from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.exec_driver_sql(
        "ALTER TABLE remembered ADD COLUMN any_others BOOLEAN NOT NULL DEFAULT 0"
    )
