"""The scheduler: starts approved calls, expires overdue ones, warns before expiry, and recovers.
A waiting call whose session has ended can no longer run, so it expires at once.

Host side, one task of the engine, above `requests` and `resume`. It works from the database, not
from memory, so work that a crash or a full disk has left undone is done in a later round.
Invariants: a running call does not expire; no call starts while the engine stops; a call that a
bug cut short after its start is interrupted and never run again; one unreadable row delays no
other and ends nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from datetime import timedelta

import anyio

from fumehood.approvals import refusals
from fumehood.approvals import states as steps
from fumehood.approvals.model import ApprovalState
from fumehood.approvals.requests import ApprovalRequests, ApprovedRun
from fumehood.approvals.resume import CallResumption
from fumehood.approvals.store import Stale
from fumehood.core.errors import CircuitOpen, RateLimited, SandboxUnavailable, ShuttingDown
from fumehood.storage.errors import ReadFailed, WriteFailed

LOOK_S = 5.0
"""The longest pause between two rounds while calls wait."""

IDLE_S = 60.0
"""The pause between two rounds if none waits."""


class ApprovalScheduler:
    """The clock of one engine's approvals. Works while it is entered."""

    def __init__(self, requests: ApprovalRequests, resumption: CallResumption) -> None:
        self._requests = requests
        self._resumption = resumption
        self._warn_before = timedelta(seconds=requests.settings.warn_seconds)
        self._look = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ApprovalScheduler:
        requests = self._requests
        await requests.count_pending()
        for approval_id in await requests.table.in_state(ApprovalState.STARTED):
            await self._interrupt(approval_id)  # a crash cut it short: nothing has started yet
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(self._tasks.cancel_scope.cancel)
        self._tasks.start_soon(self._keep_time)
        self._tasks.start_soon(self._look_after_changes)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def start(self, approval_id: str) -> None:
        """Run an approved call, unless it runs already or the engine takes no calls."""
        requests = self._requests
        runs = requests.runs
        if self._tasks is None or approval_id in runs.running or requests.is_draining():
            return
        self._tasks.start_soon(self._run, approval_id, runs.enter(approval_id))

    async def drained(self) -> None:
        """Wait until no approved call runs. None starts while the engine stops."""
        await self._requests.runs.drained()

    def look(self) -> None:
        """Begin the next round at once."""
        self._look.set()

    async def pause_s(self) -> float:
        """How long until an approval expires or needs a warning."""
        end, unwarned = await self._requests.table.next_ends()
        if end is None:
            return IDLE_S
        moments = [end] if unwarned is None else [end, unwarned - self._warn_before]
        left_s = (min(moments) - self._requests.now()).total_seconds()
        # An overdue approval that is still there is running, or the disk accepts nothing.
        return min(max(left_s, 0.02), LOOK_S) if left_s > 0 else 1.0

    async def _look_after_changes(self) -> None:
        while True:
            seen = self._requests.changes
            await self._requests.until_beyond(seen)
            self.look()

    async def _keep_time(self) -> None:
        while True:
            self._look = anyio.Event()
            try:
                await self._round()
                pause_s = await self.pause_s()
            except (ReadFailed, WriteFailed) as fault:
                pause_s = await self._pause_after(str(fault))
            except Exception as fault:  # the engine must not end with this task
                pause_s = await self._pause_after(type(fault).__name__)
            with anyio.move_on_after(pause_s):
                await self._look.wait()

    async def _round(self) -> None:
        """Start approved calls, expire overdue ones and those without a session; warn before."""
        now, table = self._requests.now(), self._requests.table
        overdue, near = await table.due(now, now + self._warn_before)
        all_readable = await self._for_each(overdue, self._expire)
        all_readable &= await self._for_each(near, self._warn)
        all_readable &= await self._for_each(await self._without_session(), self._end_with_session)
        for approval_id in await table.in_state(ApprovalState.APPROVED):
            self.start(approval_id)
        if not all_readable:  # the next round would find them at once
            await anyio.sleep(LOOK_S)

    async def _for_each(
        self, approval_ids: Iterable[str], work: Callable[[str], Awaitable[None]]
    ) -> bool:
        """Whether all rows could be read; the readable ones are worked on in any case."""
        all_readable = True
        for approval_id in approval_ids:
            try:
                await work(approval_id)
            except (ReadFailed, WriteFailed):
                raise
            except Exception as fault:
                self._requests.log_fault(approval_id, fault)
                all_readable = False
        return all_readable

    async def _pause_after(self, reason: str) -> float:
        """Log a failed round and wait; the seconds of further pause."""
        self._requests.log.warning("approval.not_looked_after", reason=reason)
        await anyio.sleep(LOOK_S)
        return 0.0

    async def _warn(self, approval_id: str) -> None:
        requests = self._requests
        await requests.change_unless_stale(approval_id, steps.expiring(requests.now()))

    async def _expire(self, approval_id: str) -> None:
        if approval_id in self._requests.runs.running:
            return
        stored = await self._requests.get(approval_id)
        expired = refusals.expired(stored.approval)
        await self._resumption.calls.end_if_current(stored, expired, steps.expired)

    async def _without_session(self) -> list[str]:
        sessions = self._resumption.services.sessions
        waiting = await self._requests.table.pending_in_sessions()
        return [one for one, session in waiting if not sessions.is_active(session)]

    async def _end_with_session(self, approval_id: str) -> None:
        stored = await self._requests.get(approval_id)
        over = refusals.session_over(stored.approval)
        await self._resumption.calls.end_if_current(stored, over, steps.outlived)

    async def _run(self, approval_id: str, run: ApprovedRun) -> None:
        requests = self._requests
        try:
            stored = await requests.get(approval_id)
            if stored.approval.state is ApprovalState.APPROVED:
                await self._resumption.run(stored, run.handle)
        except (
            ReadFailed, WriteFailed, ShuttingDown, SandboxUnavailable, CircuitOpen, RateLimited,
            Stale,
        ) as fault:  # fmt: skip
            # The database has the truth; a call that is still approved is found again.
            requests.log.warning("approval.not_carried_out", reason=str(fault))
        except Exception as fault:  # other approvals must not end with this task
            requests.log_fault(approval_id, fault)
            await self._interrupt(approval_id)
        finally:
            requests.runs.leave(approval_id)

    async def _interrupt(self, approval_id: str) -> None:
        """End a call as interrupted if it has started and its row can be read."""
        try:
            stored = await self._requests.get(approval_id)
            if stored.approval.state is ApprovalState.STARTED:
                interrupted = refusals.interrupted(stored.approval)
                await self._resumption.calls.end_if_current(stored, interrupted, steps.interrupted)
        except (ReadFailed, WriteFailed) as fault:
            self._requests.log.warning("approval.not_looked_after", reason=str(fault))
        except Exception as fault:
            self._requests.log_fault(approval_id, fault)
