"""The call log says which program made a call."""

from __future__ import annotations

from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.exec_driver_sql("ALTER TABLE calls ADD COLUMN parent_id VARCHAR")
