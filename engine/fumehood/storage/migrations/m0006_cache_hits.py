"""The call log says which calls were answered from the result cache."""

from __future__ import annotations

from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.exec_driver_sql("ALTER TABLE calls ADD COLUMN cache_hit BOOLEAN")
