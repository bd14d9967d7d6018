"""Requests: stores calls that need approval, waits for them, and records their start and end.

Host side. This module neither runs calls nor builds envelopes. `stored_calls.py`, `scheduler.py`
and `service.py` share one `ApprovalRequests`. Invariants: a change is durable before it is
reported; a change that has begun is completed and reported, even if the task that requested it is
cancelled; a call is counted against the quota before it is stored, so two calls never get the same
free place; if the end of a call cannot be stored, this is retried until it succeeds or the engine
stops.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import anyio

from fumehood.approvals import refusals
from fumehood.approvals import store as steps
from fumehood.approvals.eligibility import Eligibility
from fumehood.approvals.model import (
    OPEN_STATES,
    Approval,
    ApprovalSettings,
    ApprovalState,
    StoredApproval,
)
from fumehood.approvals.remembered import RememberedRules
from fumehood.approvals.store import ApprovalTable, Step, Waiting, size_of
from fumehood.core.call import CallRequest, Held
from fumehood.core.envelope import Envelope
from fumehood.core.errors import ApprovalExpired, IdempotencyConflict, ResourceNotFound
from fumehood.core.fair_share import FairShare
from fumehood.core.names import EXTERNAL
from fumehood.core.tasks import run_to_completion
from fumehood.executors.base import CallHandle
from fumehood.identity.identities import Identities
from fumehood.observe.log import Logger
from fumehood.observe.subscriber import Subscribers, no_subscribers
from fumehood.protocol.messages import decode_envelope
from fumehood.storage.database import Database
from fumehood.storage.errors import WriteFailed, understood

RETRY_S = 5.0
"""Seconds between two attempts to store the end of a call."""

STOP_S = 15.0
"""Maximum number of seconds that `ApprovedRuns.stop` waits for the end of a cancelled call."""


class ApprovalRequests:
    """All approvals of one engine, and the calls that wait for them.

    `is_draining` returns True while the engine refuses new calls.
    """

    def __init__(
        self,
        table: ApprovalTable,
        remembered: RememberedRules,
        eligibility: Eligibility,
        settings: ApprovalSettings,
        *,
        subscribers: Subscribers | None = None,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        is_draining: Callable[[], bool],
        log: Logger,
    ) -> None:
        self.table = table
        self.remembered = remembered
        self.eligibility = eligibility
        self.settings = settings
        self.new_id = new_id
        self.is_draining = is_draining
        self.log = log
        self.runs = ApprovedRuns()
        self.changes = 0
        """The number of changes of approvals since the engine's start."""
        self.new_call = anyio.Event()
        """An event. It is set when a call begins to wait."""
        self._changed = anyio.Event()
        self._subscribers = subscribers or no_subscribers()
        self._quota = PendingQuota(settings)
        self._now = now
        self._latest = now()
        self.held: dict[str, Held] = {}
        """Approval id → the call's held action, which runs after approval instead of the tool. Held
        actions exist only in memory."""
        self._untold: set[str] = set()
        """Ids of waiting calls whose callers have not received the id of the approval yet."""
        self._fetched: dict[str, asyncio.Future[None]] = {}
        """Call id → the pending write that marks the call's answer as fetched."""

    def now(self) -> datetime:
        """Return the current time. The returned time never goes back, even if the clock is set
        back.
        """
        # So an expired approval stays expired.
        self._latest = max(self._latest, self._now())
        return self._latest

    # -- a call asks, waits, starts and ends ---------------------------------------------

    async def count_pending(self) -> None:
        """Count the waiting calls in the database against the quota. The engine calls this once,
        when it starts.
        """
        for pending in await self.table.pending():
            self._quota.add(*pending)

    async def awaited_sessions(self) -> frozenset[str]:
        """Return the ids of the sessions that waiting calls need."""
        waiting, _ = await self.table.waiting(self.now())
        return sessions_of(waiting)

    async def same_call(self, repeat_key: str, tool: str) -> str | None:
        """Return the approval id of the stored call that a new call of the tool repeats, or None.

        `repeat_key` identifies the new call's caller and action. The stored call has the same key.
        It is waiting or running, or it ended recently and nobody has fetched its answer.
        """
        found = await self.table.of_repeat(repeat_key, self._repeated_since(tool))
        return found[0] if found is not None and found[1] not in self._fetched else None

    def fetched(self, call_id: str) -> None:
        """Record that the caller of a call has received the call's answer.

        From now on, an identical call counts as a new call, not as a repeat. The record is written
        in the background. If the engine crashes before that, a repeat gets the answer again.
        """
        self._fetched[call_id] = asyncio.ensure_future(self._store_fetched(call_id))

    async def use_decision(self, call_id: str) -> None:
        """Use up the approval of an `external:` call, which the client runs itself. The caller must
        call this before it hands out the approval.

        Raises:
            ApprovalExpired: an identical call has already received the approval.
            WriteFailed: it is not certain that the approval is used up. It must not be handed out.
        """
        if not await self.table.fetched(call_id, is_decision=True):
            raise refusals.used_decision()

    async def create(self, stored: StoredApproval, held: Held | None = None) -> str:
        """Store a call that waits for approval, and return the id of its approval. If the call
        repeats a stored call, return the approval id of the stored call instead.

        `held` is the action that runs after approval instead of the tool, or None. The caller must
        not cancel this method.

        Raises:
            RateLimited: too many calls are waiting.
            WriteFailed: the call was not stored.
        """
        own_id = stored.approval.id
        self._quota.take(stored)
        if held is not None:
            self.held[own_id] = held
        try:
            since = self._repeated_since(stored.approval.tool)
            # If this were cancelled, the transaction could already be committed.
            approval_id = await self.table.create(stored, since)
        except BaseException:
            self._release(own_id)
            raise
        if approval_id != own_id:
            self._release(own_id)
        else:
            self._untold.add(stored.approval.call_id)
            self._tell(stored.approval)
            self.new_call.set()
        return approval_id

    def told(self, call_id: str) -> None:
        """Record that the caller of a call has received the id of the approval, with which the
        caller can fetch the answer later.
        """
        self._untold.discard(call_id)

    def is_wanted(self, approval: Approval, *, by_program: bool) -> bool:
        """Return whether a stored call must continue after one of the callers that wait for it
        gives up.

        The result is True if another caller waits for the call. If a program gives up
        (`by_program`), the result is also True if any caller has received the id of the approval.
        """
        if self.runs.followers(approval.id):
            return True
        return by_program and approval.call_id not in self._untold

    async def wait(self, approval_id: str, seconds: float, handle: CallHandle) -> Envelope | None:
        """Wait for the answer to a stored call. Return None if there is no answer after `seconds`.

        Meanwhile, `handle` receives the stored call's output and progress.
        """
        with anyio.move_on_after(seconds), self.runs.followed_by(handle, approval_id):
            while True:
                seen = self.changes
                stored = await self.table.get(approval_id)
                if stored.answer is not None:
                    return decode_envelope(stored.answer.encode())
                await self.until_beyond(seen)
        return None

    async def begin(self, stored: StoredApproval) -> None:
        """Record that an approved call starts. This uses up the approval, so the call can never
        start again.

        Raises:
            ApprovalExpired: the approval has expired, or its state has changed since it was read.
            WriteFailed: the approval was not used up, and nothing may run.
        """
        step = steps.started(stored.approval, self.now())
        try:
            await self.change((stored.approval.id, step))
        except (ApprovalExpired, IdempotencyConflict, ResourceNotFound):
            raise refusals.unusable_approval() from None

    async def end(
        self,
        stored: StoredApproval,
        to: ApprovalState,
        envelope: Envelope,
        *,
        changed: Sequence[str] = (),
    ) -> None:
        """Store how an approved call ended. If the write fails, retry until it succeeds.

        `to` is the new state, and `envelope` the call's answer. `changed` names the fields of the
        action that differed from the approved action.

        Raises:
            IdempotencyConflict: the approval has already been ended in another way.
            WriteFailed: the engine is stopping. The call will count as interrupted.
        """
        step = steps.ended(to, envelope, changed, self.now())
        while True:
            try:
                await self.change((stored.approval.id, step))
            except WriteFailed as fault:
                if self.is_draining():
                    raise
                self.log.warning("approval.end_not_stored", reason=str(fault))
                await anyio.sleep(RETRY_S)
            else:
                return

    # -- changes -------------------------------------------------------------------------

    async def change(self, *changes: tuple[str, Step]) -> list[StoredApproval]:
        """Change several approvals in one transaction, and return the changed approvals. Each of
        `changes` is a pair of an approval id and the step (the change) to apply to that approval.

        Raises:
            ResourceNotFound, IdempotencyConflict, ApprovalExpired: a step cannot be applied;
                nothing was changed.
            WriteFailed: nothing was changed.
        """
        return await run_to_completion(self._change(changes))

    async def until_beyond(self, number: int) -> None:
        """Wait until the number of changes (`self.changes`) exceeds `number`."""
        while self.changes <= number:
            await self._changed.wait()

    def log_fault(self, approval_id: str, fault: Exception) -> None:
        """Log an exception that was caused by a bug or by an unreadable row. The approval stays
        unchanged.
        """
        self.log.warning("approval.fault", approval_id=approval_id, reason=repr(fault)[:500])

    async def _change(self, changes: Sequence[tuple[str, Step]]) -> list[StoredApproval]:
        after = await self.table.change(changes)
        for stored in after:
            self._tell(stored.approval)
        return after

    def _tell(self, approval: Approval) -> None:
        """Report a change of an approval to the log, the subscribers and all waiting tasks. The
        change must already be durable.
        """
        self.log.info(
            "approval.changed",
            approval_id=approval.id,
            call_id=approval.call_id,
            trace_id=approval.trace_id,
            state=approval.state.value,
            tool=approval.tool,
        )
        if approval.state is not ApprovalState.PENDING:
            self._quota.release(approval.id)
        if approval.state not in OPEN_STATES:
            self.held.pop(approval.id, None)
            self._untold.discard(approval.call_id)
        self._subscribers.committed()
        self.changes += 1
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _release(self, approval_id: str) -> None:
        """Undo the preparations for a call that was then not stored: stop counting the call against
        the quota, and drop its held action (the action that would run instead of the tool).
        """
        self._quota.release(approval_id)
        self.held.pop(approval_id, None)

    async def _store_fetched(self, call_id: str) -> None:
        try:
            with suppress(WriteFailed):  # the answer is then delivered again
                await self.table.fetched(call_id)
        finally:
            self._fetched.pop(call_id, None)

    def _repeated_since(self, tool: str) -> datetime:
        """Return a time in the past. If a stored call of `tool` has ended after this time, and
        nobody has fetched its answer, a repeat of the call receives the stored answer.
        """
        # Fetching the answer of an `external:` tool uses up the approval. So the answer can be
        # fetched for as long as an approved call can wait to start.
        settings, is_decision = self.settings, tool.startswith(EXTERNAL)
        kept_s = settings.start_within_seconds if is_decision else settings.repeat_seconds
        return self.now() - timedelta(seconds=kept_s)


def read_requests(
    database: Database,
    identities: Identities,
    settings: ApprovalSettings,
    subscribers: Subscribers,
    *,
    others: Iterable[str],
    now: Callable[[], datetime],
    new_id: Callable[[], str],
    is_draining: Callable[[], bool],
    log: Logger,
) -> ApprovalRequests:
    """Create the `ApprovalRequests` of one engine from the database. `others` are ids of further
    principals that can approve.

    Raises:
        DamagedState: the database has invalid rows.
    """
    self_approval = settings.allow_self_approval
    with understood("approvals"):
        return ApprovalRequests(
            ApprovalTable(database, subscribers=subscribers, kept_days=settings.kept_days),
            RememberedRules(database),
            Eligibility(
                identities, others=frozenset(others), allow_self_approval=self_approval, now=now
            ),
            settings,
            subscribers=subscribers,
            now=now,
            new_id=new_id,
            is_draining=is_draining,
            log=log,
        )


@dataclass(slots=True)
class ApprovedRun:
    """A call that was approved and is now running."""

    handle: CallHandle
    began_at: datetime
    request: CallRequest | None = None
    """The call's request, or None until it has been read from the database."""
    over: anyio.Event = field(default_factory=anyio.Event)


class ApprovedRuns:
    """The approved calls that are running, at most one for each approval, and the handles of the
    callers that wait for these calls.
    """

    def __init__(self) -> None:
        self.running: dict[str, ApprovedRun] = {}
        """Approval id → the running call."""
        self._followers: dict[str, list[CallHandle]] = {}

    def enter(self, approval_id: str, now: datetime) -> ApprovedRun:
        """Add the run of an approved call, and return it."""
        followers = self._followers.setdefault(approval_id, [])
        self.running[approval_id] = run = ApprovedRun(_handle_for(followers), now)
        return run

    def leave(self, approval_id: str) -> None:
        """Remove a run that has ended."""
        run = self.running.pop(approval_id)
        if not self._followers.get(approval_id):
            self._followers.pop(approval_id, None)
        run.over.set()

    async def stop(self, approval_id: str) -> bool:
        """Cancel a run, and wait at most `STOP_S` seconds for its end.

        Return True if the run was cancelled, even if it has not ended in this time. Return False if
        there is no such run, or if the run cannot be cancelled.
        """
        run = self.running.get(approval_id)
        if run is None or not run.handle.cancel():
            return False
        with anyio.move_on_after(STOP_S):
            await run.over.wait()
        return True

    async def drained(self) -> None:
        """Wait until all runs have ended."""
        while self.running:
            await next(iter(self.running.values())).over.wait()

    def followers(self, approval_id: str) -> Sequence[CallHandle]:
        """Return the handles of the callers that wait for the answer to the call of this
        approval.
        """
        return self._followers.get(approval_id, ())

    @contextmanager
    def followed_by(self, handle: CallHandle, approval_id: str) -> Iterator[None]:
        """Pass the output and the progress of the approval's call to `handle` during the block. The
        call may start later.
        """
        followers = self._followers.setdefault(approval_id, [])
        followers.append(handle)
        try:
            yield
        finally:
            followers.remove(handle)
            if not followers and approval_id not in self.running:
                self._followers.pop(approval_id, None)


class PendingQuota:
    """Limits how many calls wait for approval, in total and for each caller, and how much disk
    space they use.
    """

    def __init__(self, settings: ApprovalSettings) -> None:
        self._places = FairShare(settings.max_pending, settings.max_pending_per_principal)
        self._bytes = FairShare(sys.maxsize, settings.max_pending_mb_per_principal << 20)
        self._held: dict[str, tuple[str, int]] = {}
        """Approval id → the principal id and the size in bytes of each counted call."""

    def add(self, approval_id: str, principal_id: str, size: int) -> None:
        """Count a waiting call of this size in bytes, even if this exceeds the quota."""
        self._places.add(principal_id)
        self._bytes.add(principal_id, size)
        self._held[approval_id] = principal_id, size

    def take(self, stored: StoredApproval) -> None:
        """Count a new call. Raises RateLimited, without counting the call, if the quota is full."""
        approval, size = stored.approval, size_of(stored)
        who = approval.principal_id
        if self._places.lacks(who) or self._bytes.lacks(who, size):
            raise refusals.too_many_wait(self._places.of(who))
        self.add(approval.id, who, size)

    def release(self, approval_id: str) -> None:
        """Stop counting a call. Does nothing if the call is not counted."""
        if approval_id in self._held:
            principal_id, size = self._held.pop(approval_id)
            self._places.give_back(principal_id)
            self._bytes.give_back(principal_id, size)


def sessions_of(waiting: Sequence[Waiting]) -> frozenset[str]:
    """Return the ids of those sessions of this engine that the waiting calls need."""
    return frozenset(one.own_session for one in waiting if one.own_session is not None)


def _handle_for(followers: Sequence[CallHandle]) -> CallHandle:
    """Return a handle that passes all its output and progress to the followers."""

    def output(stream: str, text: str) -> None:
        for handle in followers:
            if handle.output is not None:
                handle.output(stream, text)

    def progress(percent: float, message: str) -> None:
        for handle in followers:
            handle.report(percent, message)

    return CallHandle(output=output if followers else None, progress=progress)
