"""The call log keeps the time of each stage and the call's audit row, and is searched by trace."""

from __future__ import annotations

from sqlalchemy import Connection, text


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.execute(text("ALTER TABLE calls ADD COLUMN stages JSON"))
    connection.execute(text("ALTER TABLE calls ADD COLUMN audit_seq INTEGER"))
    connection.execute(text("CREATE INDEX calls_by_trace ON calls (trace_id)"))
    connection.execute(
        text("CREATE INDEX calls_by_parent ON calls (parent_id) WHERE parent_id IS NOT NULL")
    )
