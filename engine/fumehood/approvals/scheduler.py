"""The keeper: lets approvals expire, warns of their end, and starts what has its yes.

Host side, one task of the engine, entered by the desk. It looks at the database, not at what it
remembers, so what a crash or a full disk left undone is done at one of its next looks.
Invariants: what is being carried out does not expire; one row that cannot be understood holds
up no other, and ends nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timedelta

import anyio

from fumehood.approvals import refusals
from fumehood.approvals import states as steps
from fumehood.approvals.changes import ApprovalChanges
from fumehood.approvals.model import ApprovalState
from fumehood.approvals.resumption import CallWay
from fumehood.approvals.runs import ApprovalRuns
from fumehood.approvals.store import ApprovalTable
from fumehood.core.json_types import JsonObject
from fumehood.storage.errors import ReadFailed, WriteFailed

LOOK_S = 5.0
"""How often the keeper looks for what has expired, besides when it knows of an end."""

IDLE_S = 60.0
"""How often it looks where nothing waits."""


class ApprovalScheduler:
    """The clock of one engine's approvals."""

    def __init__(
        self,
        table: ApprovalTable,
        changes: ApprovalChanges,
        runs: ApprovalRuns,
        *,
        warn_s: float,
        way: Callable[[], CallWay],
        now: Callable[[], datetime],
        on_event: Callable[[str, JsonObject], None],
    ) -> None:
        self._table = table
        self._changes = changes
        self._runs = runs
        self._warn_before = timedelta(seconds=warn_s)
        self._way = way
        self._now = now
        self._on_event = on_event
        self._look = anyio.Event()

    async def interrupt_what_had_begun(self) -> None:
        """Before anything starts: what is `started` now was cut short by a crash."""
        for approval_id in await self._table.in_state(ApprovalState.STARTED):
            await self._runs.interrupt(approval_id)

    def look(self) -> None:
        """Something has changed: look at once."""
        self._look.set()

    async def keep_time(self) -> None:
        """Start what has its yes, let expire what is over, warn of what is about to be."""
        while True:
            self._look = anyio.Event()
            try:
                await self._look_round()
                pause_s = await self.pause_s()
            except (ReadFailed, WriteFailed) as fault:
                pause_s = await self._not_looked(str(fault))
            except Exception as fault:  # the engine must not end with this task
                pause_s = await self._not_looked(type(fault).__name__)
            with anyio.move_on_after(pause_s):
                await self._look.wait()

    async def pause_s(self) -> float:
        """How long until there is something to look for: an end, or a warning that is due."""
        end, unwarned = await self._table.next_ends()
        if end is None:
            return IDLE_S
        moments = [end] if unwarned is None else [end, unwarned - self._warn_before]
        left_s = (min(moments) - self._now()).total_seconds()
        # What is over and still here is being carried out, or the disk takes nothing.
        return min(max(left_s, 0.02), LOOK_S) if left_s > 0 else 1.0

    async def _look_round(self) -> None:
        now = self._now()
        over, near = await self._table.due(now, now + self._warn_before)
        all_understood = await self._of_each(over, self._expire)
        all_understood &= await self._of_each(near, self._warn)
        for approval_id in await self._table.in_state(ApprovalState.APPROVED):
            self._runs.start(approval_id)
        if not all_understood:  # they are found again at once
            await anyio.sleep(LOOK_S)

    async def _of_each(
        self, approval_ids: Iterable[str], work: Callable[[str], Awaitable[None]]
    ) -> bool:
        """Whether every one could be understood; those that can are worked on all the same."""
        all_understood = True
        for approval_id in approval_ids:
            try:
                await work(approval_id)
            except (ReadFailed, WriteFailed):
                raise
            except Exception as fault:
                self._changes.tell_fault(approval_id, fault)
                all_understood = False
        return all_understood

    async def _not_looked(self, reason: str) -> float:
        """Say so, and look again a little later; no pause is needed after that."""
        self._on_event("approval.not_looked_after", {"reason": reason})
        await anyio.sleep(LOOK_S)
        return 0.0

    async def _warn(self, approval_id: str) -> None:
        await self._changes.change_unless_stale(approval_id, steps.expiring(self._now()))

    async def _expire(self, approval_id: str) -> None:
        if approval_id in self._runs.running:
            return
        stored = await self._changes.get(approval_id)
        answer = await self._way().answer(stored, refusals.expired(stored.approval))
        step = steps.expired(self._now(), answer)
        after = await self._changes.change_unless_stale(approval_id, step)
        if after is not None:
            self._way().record(after, answer)
