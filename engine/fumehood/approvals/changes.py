"""Changes: an approval is changed in the database, and then everybody is told.

Host side, between the files that the desk is made of and `approvals/store`. Invariants: nobody is
told of what is not durable; a step that has begun is carried through to its being told, also
where whoever made it is cancelled; an ending is written until the disk takes it or the engine
stops.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from fumehood.approvals import refusals
from fumehood.approvals.model import Approval
from fumehood.approvals.run_to_completion import run_to_completion
from fumehood.approvals.store import ApprovalTable, Stale, Step, StoredApproval, UnknownApproval
from fumehood.core.json_types import JsonObject
from fumehood.storage.errors import WriteFailed

RETRY_S = 5.0
"""How long until the disk is asked again to take an ending."""


class ApprovalChanges:
    """The rows of one engine's approvals, and how often one of them has changed.

    `then` acts on a change, at once; `is_draining` says whether the engine is about to stop.
    """

    def __init__(
        self,
        table: ApprovalTable,
        *,
        then: Callable[[Approval], None],
        is_draining: Callable[[], bool],
        on_event: Callable[[str, JsonObject], None],
    ) -> None:
        self.number = 0
        """Grows with every change."""
        self._table = table
        self._then = then
        self._is_draining = is_draining
        self._on_event = on_event
        self._changed = anyio.Event()

    async def get(self, approval_id: str) -> StoredApproval:
        """One, as it is now. Raises ResourceNotFound, ReadFailed."""
        try:
            return await self._table.get(approval_id)
        except UnknownApproval:
            raise refusals.unknown() from None

    async def change(self, approval_id: str, step: Step) -> StoredApproval:
        """One step of one.

        Raises:
            UnknownApproval, Stale, TooLate: it cannot be.
            WriteFailed: nothing of it is promised.
        """
        return (await run_to_completion(self.change_all([(approval_id, step)])))[0]

    async def change_all(self, steps: Sequence[tuple[str, Step]]) -> Sequence[StoredApproval]:
        """Several in one transaction, as `change`; to be carried through."""
        after = await self._table.change(steps)
        for stored in after:
            self.tell(stored.approval)
        return after

    async def change_unless_stale(self, approval_id: str, step: Step) -> StoredApproval | None:
        """A change that somebody else may have made needless."""
        try:
            return await self.change(approval_id, step)
        except Stale:
            return None

    async def change_for(self, approval_id: str, step: Step) -> StoredApproval:
        """A change that somebody asked for. Raises ResourceNotFound, IdempotencyConflict."""
        try:
            return await self.change(approval_id, step)
        except UnknownApproval:
            raise refusals.unknown() from None
        except Stale as stale:
            raise refusals.conflict(stale.approval) from None

    async def until_kept(self, write: Callable[[], Awaitable[object]]) -> None:
        """Write how something ended that cannot be done again: also once there is room again."""
        while True:
            try:
                await write()
            except WriteFailed as fault:
                if self._is_draining():
                    raise
                self._on_event("approval.end_not_kept", {"reason": str(fault)})
                await anyio.sleep(RETRY_S)
            else:
                return

    def tell(self, approval: Approval) -> None:
        """Say what is in the database now, and act on it."""
        self._on_event(
            "approval.changed",
            {"approval_id": approval.id, "state": approval.state.value, "tool": approval.tool},
        )
        self.number += 1
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        self._then(approval)

    def tell_fault(self, approval_id: str, fault: Exception) -> None:
        """A bug, or a row that cannot be understood: said in the log, and it stays as it is."""
        values: JsonObject = {"approval_id": approval_id, "reason": repr(fault)[:500]}
        self._on_event("approval.fault", values)

    async def until_beyond(self, number: int) -> None:
        """Wait for a change after this many."""
        while self.number <= number:
            await self._changed.wait()
