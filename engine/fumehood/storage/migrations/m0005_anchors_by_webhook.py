"""Webhook messages that tell of no approval hold what they tell themselves."""

from __future__ import annotations

from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Run the step."""
    connection.exec_driver_sql("ALTER TABLE deliveries ADD COLUMN document JSON")
