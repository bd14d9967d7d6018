"""The quota: how many calls may wait for a human, of everybody and of one caller.

Host side, below the desk. What was decided meanwhile is taken off only once there seems to be no
room: then the database is asked. Invariant: a call is counted before it is kept, so that two at
once never share the last place.
"""

from __future__ import annotations

from fumehood.approvals import refusals
from fumehood.approvals.settings import ApprovalSettings
from fumehood.approvals.store import ApprovalTable, PendingOf, StoredApproval, size_of


class ApprovalQuota:
    """What waits, by caller, as far as was counted."""

    def __init__(self, table: ApprovalTable, rules: ApprovalSettings) -> None:
        self._table = table
        self._rules = rules
        self._pending: dict[str, PendingOf] = {}

    async def count(self) -> None:
        """Count again what the database has."""
        self._pending = await self._table.pending()

    async def take(self, stored: StoredApproval) -> None:
        """Give a call its place among those that wait. Raises RateLimited."""
        who, size = stored.approval.principal_id, size_of(stored)
        if self._is_full(who, size):  # as far as was counted: what is over was not taken off
            await self.count()
        if self._is_full(who, size):
            raise refusals.too_many_wait(self._of(who).count)
        self._add(who, size)

    def add(self, stored: StoredApproval) -> None:
        """Count one that waits already, whether there is room or not."""
        self._add(stored.approval.principal_id, size_of(stored))

    def _add(self, who: str, size: int) -> None:
        own = self._of(who)
        self._pending[who] = PendingOf(own.count + 1, own.size_bytes + size)

    def _is_full(self, who: str, size: int) -> bool:
        rules, own = self._rules, self._of(who)
        return (
            sum(one.count for one in self._pending.values()) >= rules.max_pending
            or own.count >= rules.max_pending_per_principal
            or own.size_bytes + size > rules.max_pending_bytes_per_principal
        )

    def _of(self, who: str) -> PendingOf:
        return self._pending.get(who, PendingOf())
