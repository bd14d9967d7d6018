"""The call log keeps the time of each stage and the call's audit row, and is searched by trace."""

from __future__ import annotations

from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.exec_driver_sql("ALTER TABLE calls ADD COLUMN stages JSON")
    connection.exec_driver_sql("ALTER TABLE calls ADD COLUMN audit_seq INTEGER")
    connection.exec_driver_sql("CREATE INDEX calls_by_trace ON calls (trace_id)")
    connection.exec_driver_sql(
        "CREATE INDEX calls_by_parent ON calls (parent_id) WHERE parent_id IS NOT NULL"
    )
