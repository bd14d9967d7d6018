"""Subscribers: how parts react to events of the engine.

Host side. Invariants: a method with the argument `connection` runs in the transaction of the event,
so the subscriber's rows and the event are stored together or not at all; `on_commit` runs after the
transaction, and must return immediately; a subscriber cannot change an event. If a subscriber
raises an error in a transaction, the event is undone. Any other error is logged, and the other
subscribers still receive the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from fumehood.core.json_types import JsonObject
from fumehood.observe.ended_call import EndedCall
from fumehood.observe.log import Logger, log_fault, quiet_logger

if TYPE_CHECKING:
    from sqlalchemy import Connection


class Subscriber:
    """Receives the events of one engine, such as the end of a call. Subclasses override the methods
    for the events that they handle. The methods of this class do nothing.
    """

    def on_approval(
        self, connection: Connection, approval_id: str, event: str, at: datetime
    ) -> None:
        """Handle a change of an approval: it was created, expires soon, was decided or has ended.
        `event` is the name of the change. The transaction of the change is still open on
        `connection`.
        """

    def on_anchor(self, connection: Connection, anchor: JsonObject, at: datetime) -> None:
        """Handle a new anchor of the audit chain (the engine's tamper-evident log). An anchor
        confirms the newest row of the chain.
        """

    def on_notice(
        self, connection: Connection, event: str, document: JsonObject, at: datetime
    ) -> None:
        """Handle a notice that a part sends to people (`Kernel.notify`)."""

    def on_commit(self) -> None:
        """Handle the commit of a transaction. The events that methods of this object received on
        the transaction's `connection` are now on disk.
        """

    def on_call(self, call: EndedCall) -> None:
        """Handle the end of a call. Must be fast, because it runs in the event loop for every
        call.
        """

    def forget(self, connection: Connection, before: str) -> None:
        """Delete the subscriber's stored data about approvals that ended before the time `before`
        (in the format of `storage.changes.stamp`).
        """


class Subscribers:
    """All subscribers of one engine, in a fixed order."""

    def __init__(self, members: Iterable[Subscriber], log: Logger) -> None:
        self._members = tuple(members)
        self._log = log
        self._of_calls = [m for m in self._members if type(m).on_call is not Subscriber.on_call]

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(self._members)

    @property
    def take_calls(self) -> bool:
        """Whether any subscriber overrides `on_call`, so that ended calls must be reported."""
        return bool(self._of_calls)

    def committed(self) -> None:
        """Notify all subscribers that the events of a transaction are on disk."""
        self._each(self._members, lambda member: member.on_commit())

    def ended(self, call: EndedCall) -> None:
        """Pass an ended call to the subscribers that handle ended calls."""
        self._each(self._of_calls, lambda member: member.on_call(call))

    def _each(self, members: Iterable[Subscriber], act: Callable[[Subscriber], None]) -> None:
        for member in members:
            try:
                act(member)
            except Exception as fault:
                name = type(member).__name__
                log_fault(self._log, "subscriber.internal_error", fault, subscriber=name)


def no_subscribers() -> Subscribers:
    """Return a `Subscribers` without members, for an engine without parts."""
    return Subscribers((), quiet_logger())
