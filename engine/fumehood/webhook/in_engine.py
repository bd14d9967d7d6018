"""The webhook of one engine: stores messages in their events' transactions, and sends them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from fumehood.core.json_types import JsonObject
from fumehood.engine_part import EnginePart, Kernel
from fumehood.webhook.channel import WebhookChannel, forget_old, owe, owe_anchor
from fumehood.webhook.settings import WebhookSettings

if TYPE_CHECKING:
    from fumehood.compose import Composition


class Webhook(EnginePart):
    """Stores messages about the engine's events, which `channel` sends to the configured address.
    `channel` is None if no address is configured.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        settings = kernel.config.of("webhook", WebhookSettings)
        self.channel: WebhookChannel | None = None
        if settings is not None:
            self.channel = WebhookChannel(settings, kernel.database, kernel.clock.now, kernel.log)

    @property
    def approver(self) -> str | None:
        """The name of the principal of signed callbacks, or None if callbacks may not decide."""
        return self.channel.decides_as if self.channel is not None else None

    def on_approval(
        self, connection: Connection, approval_id: str, event: str, at: datetime
    ) -> None:
        """Store a message about an approval, in the event's transaction."""
        if self.channel is not None:
            owe(connection, event, at, approval_id=approval_id)

    def on_anchor(self, connection: Connection, anchor: JsonObject, at: datetime) -> None:
        """Store a message with an anchor of the audit chain (a copy of a row's authentication
        code), in the event's transaction.
        """
        if self.channel is not None:
            owe_anchor(connection, anchor, at)

    def on_notice(
        self, connection: Connection, event: str, document: JsonObject, at: datetime
    ) -> None:
        """Store a message about another event, such as an alert, in the event's transaction."""
        if self.channel is not None:
            owe(connection, event, at, document=document)

    def on_commit(self) -> None:
        """Wake the sender for the messages that were committed."""
        if self.channel is not None:
            self.channel.wake()

    def forget(self, connection: Connection, before: str) -> None:
        """Delete messages that were stored before the time `before`, if they were delivered or
        given up. This happens even if no address is configured any more.
        """
        forget_old(connection, before)

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Send messages while the engine runs."""
        if self.channel is None:
            yield
            return
        async with self.channel.running(made.approvals.show):
            yield
