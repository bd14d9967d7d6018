"""Subscribers: what parts do when something happened that they want to know.

Host side. Invariants: a method with a connection runs in the transaction of the event, so both are
stored or neither; `on_commit` runs after it, and returns at once. A subscriber cannot change or
refuse the event.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from fumehood.core.json_types import JsonObject
from fumehood.observe.ended_call import EndedCall

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

    def on_notice(
        self, connection: Connection, event: str, document: JsonObject, at: datetime
    ) -> None:
        """A part has something to tell people (`Kernel.notify`)."""

    def on_commit(self) -> None:
        """One or more of these events are on disk."""

    def on_call(self, call: EndedCall) -> None:
        """A call has ended. Called in the event loop for every call, so it must be cheap."""

    def forget(self, connection: Connection, before: str) -> None:
        """Delete what is stored about approvals that ended before a time (as `storage.stamp`)."""
