"""Approval channels: how people outside the engine are notified of approvals, and may decide them.

Host side. Each channel is one file in this folder and one row of `CHANNELS` in `compose.py`. Above
it are the store, which calls `owe` in its transactions, and the engine's life, which enters
`running`; below it is the database.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from sqlalchemy import Connection

from fumehood.approvals.model import Approval
from fumehood.observe.log import Logger
from fumehood.storage.database import Database

Show = Callable[[str], Awaitable[Approval]]
"""Returns an approval as approvers see it now. Raises ResourceNotFound, ReadFailed."""


@dataclass(frozen=True, slots=True)
class ChannelContext:
    """The parts of the engine that a channel may use."""

    database: Database
    now: Callable[[], datetime]
    log: Logger


class ApprovalChannel(ABC):
    """A way to notify people about approvals. It may also deliver their decisions.

    An implementer guarantees:

    - `owe` only writes rows. It runs in the transaction of the change that it reports, so the
      message exists if and only if the change does, also after a crash.
    - Sending happens in `running` and nowhere else. No call, decision or transaction waits for
      it, and no failure of it leaves `running`.
    - A message is sent at least once, or given up after a bounded number of attempts. Receivers
      may see one twice.
    - No message contains `Approval.binding` or a secret.
    - A decision is authenticated before its content is looked at, and is made only through
      `ApprovalService.decide(…, channel=name)`, as the principal `decides_as`. The service checks
      scope, quorum and self-approval as for any approver. Without `decides_as` there are none.
    """

    name: ClassVar[str]
    """Its section in the configuration, and the `channel` of decisions made through it."""
    decides_as: str | None = None
    """The principal of its decisions, which then counts as an approver."""

    @abstractmethod
    def owe(self, connection: Connection, approval_id: str, event: str, at: datetime) -> None:
        """Store a message about `event` (such as `approval.created`), without sending it."""

    @abstractmethod
    def wake(self) -> None:
        """Note that messages were stored. Returns at once; may be called when nothing runs."""

    @abstractmethod
    def running(self, show: Show) -> AbstractAsyncContextManager[None]:
        """Send stored messages, those of an earlier engine included, while the context lasts.

        A message has the approval as `show` returns it when sent, which may be newer than the
        event.
        """
