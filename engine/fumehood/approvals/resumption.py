"""The way of a call, as the desk needs it: a protocol, which `resume` fulfils.

Host side. It is what keeps the imports in one direction: `resume` needs the desk, which ends and
starts calls, and the desk has calls carried out, edited and answered without knowing how.
"""

from __future__ import annotations

from typing import Protocol

from fumehood.approvals.edit import Edited
from fumehood.approvals.model import Resolution
from fumehood.approvals.store import StoredApproval
from fumehood.core.envelope import Envelope
from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.executors.handle import CallHandle


class CallWay(Protocol):
    """What the desk needs of the way of a call (`resume`)."""

    async def carry_out(self, stored: StoredApproval, live: CallHandle) -> None:
        """Carry an approved call out and keep its answer.

        Raises:
            ReadFailed, WriteFailed, ShuttingDown, SandboxUnavailable, Stale: nothing was done, and
                it is as the database says.
        """
        ...

    async def edited(self, stored: StoredApproval, arguments: JsonObject) -> Edited:
        """Check other arguments like those of a new call. Raises EngineError."""
        ...

    async def answer(self, stored: StoredApproval, error: EngineError) -> Envelope:
        """The envelope of a call that ends here."""
        ...

    async def resolved(self, stored: StoredApproval, resolution: Resolution, by: str) -> Envelope:
        """The envelope of a call of which a human has found out what became of it."""
        ...

    def record(self, stored: StoredApproval, envelope: Envelope) -> None:
        """Enter the end of a call into the call log."""
        ...
