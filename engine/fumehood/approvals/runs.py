"""Runs: calls that are being carried out after their yes.

Host side, below the desk and `approval_keeper`. Each is a task of its own, and whoever waits for
the call follows what it tells. Invariants: an approval has at most one run; none begins while
the engine stops; what a bug cut short after its start is interrupted, and never run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import anyio

from fumehood.approvals import refusals
from fumehood.approvals import states as steps
from fumehood.approvals.changes import ApprovalChanges
from fumehood.approvals.model import ApprovalState
from fumehood.approvals.resumption import CallWay
from fumehood.approvals.store import Stale, StoredApproval
from fumehood.core.errors import SandboxUnavailable, ShuttingDown
from fumehood.core.json_types import JsonObject
from fumehood.executors.handle import CallHandle
from fumehood.storage.errors import ReadFailed, WriteFailed

STOP_S = 15.0
"""How long whoever cancels a running call waits for its end."""


@dataclass(slots=True)
class Run:
    """A call that is being carried out after its yes."""

    live: CallHandle
    over: anyio.Event = field(default_factory=anyio.Event)


class ApprovalRuns:
    """What runs after a yes, and who follows it. Nothing starts before `tasks` is there."""

    def __init__(
        self,
        changes: ApprovalChanges,
        *,
        way: Callable[[], CallWay],
        is_draining: Callable[[], bool],
        now: Callable[[], datetime],
        on_event: Callable[[str, JsonObject], None],
    ) -> None:
        self.tasks: anyio.abc.TaskGroup | None = None
        self.running: dict[str, Run] = {}
        """By approval."""
        self._changes = changes
        self._way = way
        self._is_draining = is_draining
        self._now = now
        self._on_event = on_event
        self._followers: dict[str, list[CallHandle]] = {}

    def start(self, approval_id: str) -> None:
        """Have it carried out, unless it is already, or the engine is about to stop."""
        if self.tasks is None or approval_id in self.running or self._is_draining():
            return
        followers = self._followers.setdefault(approval_id, [])
        self.running[approval_id] = run = Run(_live_for(followers))
        self.tasks.start_soon(self._carry_out, approval_id, run)

    async def stop(self, approval_id: str) -> bool:
        """End one for its caller, and wait, bounded; False: there is nothing to be ended here."""
        run = self.running.get(approval_id)
        if run is None or not run.live.cancel():
            return False
        with anyio.move_on_after(STOP_S):
            await run.over.wait()
        return True

    async def drained(self) -> None:
        """Wait until none runs any more."""
        while self.running:
            await next(iter(self.running.values())).over.wait()

    def follow(self, approval_id: str, live: CallHandle) -> None:
        """Hand on to this one what the call tells, once it runs."""
        followers = self._followers.setdefault(approval_id, [])
        if live not in followers:
            followers.append(live)

    def unfollow(self, live: CallHandle) -> None:
        """Hand on nothing more."""
        for waiting in self._followers.values():
            if live in waiting:
                waiting.remove(live)

    def follow_on(self, approval_id: str, new_id: str) -> None:
        """Whoever follows one follows the one that asks again in its place, too."""
        for live in self._followers.get(approval_id, []):
            self.follow(new_id, live)

    async def interrupt(self, approval_id: str) -> None:
        """End it as interrupted where it has begun, as far as it can be understood."""
        try:
            stored = await self._changes.get(approval_id)
            if stored.approval.state is ApprovalState.STARTED:
                await self._interrupt(stored)
        except (ReadFailed, WriteFailed) as fault:
            self._on_event("approval.not_looked_after", {"reason": str(fault)})
        except Exception as fault:
            self._changes.tell_fault(approval_id, fault)

    async def _carry_out(self, approval_id: str, run: Run) -> None:
        try:
            stored = await self._changes.get(approval_id)
            if stored.approval.state is ApprovalState.APPROVED:
                await self._way().carry_out(stored, run.live)
        except (ReadFailed, WriteFailed, ShuttingDown, SandboxUnavailable, Stale) as fault:
            # It is as the database says; what still has its yes is looked for again.
            self._on_event("approval.not_carried_out", {"reason": str(fault)})
        except Exception as fault:  # others wait, too
            self._changes.tell_fault(approval_id, fault)
            await self.interrupt(approval_id)
        finally:
            del self.running[approval_id]
            if not self._followers.get(approval_id):
                self._followers.pop(approval_id, None)
            run.over.set()

    async def _interrupt(self, stored: StoredApproval) -> None:
        answer = await self._way().answer(stored, refusals.interrupted(stored.approval))
        step = steps.interrupted(self._now(), answer)
        after = await self._changes.change(stored.approval.id, step)
        self._way().record(after, answer)


def _live_for(followers: Sequence[CallHandle]) -> CallHandle:
    """One that hands on to whoever follows the call."""

    def output(stream: str, text: str) -> None:
        for live in followers:
            if live.output is not None:
                live.output(stream, text)

    def progress(percent: float, message: str) -> None:
        for live in followers:
            live.report(percent, message)

    return CallHandle(output=output if followers else None, progress=progress)
