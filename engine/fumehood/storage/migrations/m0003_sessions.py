"""The table of sessions: what their owners are told after a restart, too."""

from __future__ import annotations

from sqlalchemy import Connection

_STATEMENT = """CREATE TABLE sessions (
    id VARCHAR NOT NULL PRIMARY KEY, principal_id VARCHAR NOT NULL, agent_id VARCHAR,
    state VARCHAR NOT NULL, why VARCHAR, image VARCHAR NOT NULL, languages JSON NOT NULL,
    memory_mb INTEGER NOT NULL, created_at VARCHAR NOT NULL, last_used_at VARCHAR NOT NULL,
    expires_at VARCHAR NOT NULL, finished_at VARCHAR, calls INTEGER NOT NULL)"""


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.exec_driver_sql(_STATEMENT)
