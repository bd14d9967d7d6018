"""Subscribers: what parts do when something happened that they want to know.

Host side. Invariants: `on_…` runs in the transaction of the event, so both are stored or neither;
`on_commit` runs after it, and returns at once. A subscriber cannot change or refuse the event.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from fumehood.core.json_types import JsonObject
from fumehood.core.status import Alert

if TYPE_CHECKING:
    from sqlalchemy import Connection


class Subscriber:
    """Receives events. Each method may be overridden; none of these does anything."""

    def on_approval(
        self, connection: Connection, approval_id: str, event: str, at: datetime
    ) -> None:
        """An approval was made, is about to expire, was decided or has ended."""

    def on_anchor(self, connection: Connection, anchor: JsonObject, at: datetime) -> None:
        """The audit chain was anchored."""

    def on_alert(self, connection: Connection, alert: Alert, at: datetime) -> None:
        """An alert fires or is resolved."""

    def on_commit(self) -> None:
        """One or more of these events are on disk."""

    def forget(self, connection: Connection, before: str) -> None:
        """Delete what is stored about approvals that ended before a time (as `storage.stamp`)."""
