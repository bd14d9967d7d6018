"""The scheduler: starts approved calls, settles calls after a crash, and expires waiting calls.

Host side. Uses the pipeline and `requests`. Before an approved call runs, it passes every check
again with the current settings. A disabled tool, a revoked identity or a new deny rule ends the
call. A new rule that requires approval does not end the call, because a human has already approved
it. If the action differs from the approved action, the call ends with `APPROVAL_EXPIRED`, and the
error names the differences. A loop reads the waiting calls from the database. If a crash or a full
disk interrupts the work, a later round of the loop completes it.

Invariants: an approval is used up only once, when its call already holds a place in the sandbox and
starts; a running call never expires; no call starts while the engine is stopping; if a bug ends a
call after its start, the call is marked as interrupted and never runs again; an unreadable row does
not delay other rows, and its call is not ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType

import anyio

from fumehood.approvals import refusals
from fumehood.approvals import store as steps
from fumehood.approvals.model import (
    SESSION,
    ApprovalState,
    Resolution,
    StoredApproval,
)
from fumehood.approvals.preview import (
    action_of,
    changed_fields,
    edited,
    sends_of,
    with_action,
)
from fumehood.approvals.requests import RETRY_S, ApprovedRun, sessions_of
from fumehood.approvals.store import Waiting
from fumehood.approvals.stored_calls import StoredCalls
from fumehood.core.errors import (
    ApprovalExpired,
    Cancelled,
    CircuitOpen,
    EngineError,
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    SandboxUnavailable,
    ShuttingDown,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL
from fumehood.executors.effects import Effect
from fumehood.executors.outcome import Outcome, cancelled
from fumehood.pipeline.approve import Consent, with_consent
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.conclude import cancelled_ending, hidden_fault
from fumehood.pipeline.context import CallContext
from fumehood.pipeline.permit import permit
from fumehood.pipeline.plan import Plan, make_plan, place_of, plan_now
from fumehood.pipeline.record import record_ending
from fumehood.pipeline.result import build_envelope
from fumehood.pipeline.run import run_approved
from fumehood.policy.model import Verdict
from fumehood.storage.changes import stamp
from fumehood.storage.errors import ReadFailed, WriteFailed, WriteUnavailable

Outcomes = Mapping[str, EngineError | None]
"""Id of an interrupted call → the call's outcome. None means that everything was done. An error
means that nothing was done."""

NOT_KNOWN: Outcomes = MappingProxyType({})

LOOK_S = 2.0
"""Seconds between two rounds of the loop while any calls are waiting."""


class ApprovalScheduler:
    """Runs the approved calls of one engine, and expires waiting calls. It works only during the
    block of `running`.
    """

    def __init__(self, calls: StoredCalls) -> None:
        self.calls = calls
        self._services = calls.services
        self._requests = calls.asker.requests
        self._warn_before = timedelta(seconds=self._requests.settings.warn_seconds)
        self._tasks: anyio.abc.TaskGroup | None = None

    @asynccontextmanager
    async def running(self, outcomes: Outcomes) -> AsyncIterator[None]:
        """Run approved calls during the block. Before the block, end the calls that a crash
        interrupted.

        `outcomes` contains the outcomes of those interrupted calls whose outcome is known.
        """
        requests = self._requests
        await requests.count_pending()
        for approval_id in await requests.table.in_state(ApprovalState.STARTED):
            # A crash ended this call, because this engine has not started any call yet.
            await self._interrupt(approval_id, outcomes)
        for approval_id in await requests.table.maybe_lost():
            await self._expire_lost(approval_id)
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._keep_time)
            yield
            self._tasks.cancel_scope.cancel()

    def start(self, approval_id: str) -> None:
        """Run the call of an approval in the background. Does nothing if the call is already
        running or the engine refuses new calls.
        """
        requests = self._requests
        runs = requests.runs
        if self._tasks is None or approval_id in runs.running or requests.is_draining():
            return
        self._tasks.start_soon(self._run, approval_id, runs.enter(approval_id, requests.now()))

    async def catch_up(self) -> bool:
        """Handle each waiting call that is due: expire it, end it because its session has ended,
        start it if it is approved, or warn that it expires soon. Return whether any calls are
        waiting.
        """
        requests, now = self._requests, self._requests.now()
        waiting, any_waits = await requests.table.waiting(now + self._warn_before)
        self._services.sessions.keep_for_calls(sessions_of(waiting))
        for one in waiting:
            try:
                await self._attend(one, now)
            except (ReadFailed, WriteFailed):
                raise
            except IdempotencyConflict:
                pass  # decided or ended meanwhile
            except Exception as fault:
                requests.log_fault(one.id, fault)
        return any_waits

    def permit_again(self, stored: StoredApproval, call: CallContext) -> PermittedCall:
        """Resolve, validate and authorize a stored call again, with the current settings. `call` is
        the context of the stored call.

        Raises:
            PermissionDenied: the caller is no longer allowed to make calls.
            ApprovalExpired: the action to run was only in the memory of an engine that has ended.
            InvalidParams: this engine does not know one of the call's options.
            EngineError: a stage of the pipeline refuses the call.
        """
        if stored.request.needs is not None and call.request.held is None:
            raise refusals.lost_with_engine(stored.approval, stored.request.needs)
        refusals.require_known_options(stored.request.options)
        if call.request.principal is None:
            raise PermissionDenied(
                "The caller of this call is no longer allowed to make it. Do not retry."
            )
        return permit(call, self._services)

    async def edited(self, stored: StoredApproval, arguments: JsonObject) -> StoredApproval:
        """Return the approval as an edit would change it. Nothing is stored.

        `arguments` replace the call's arguments, and are checked like those of a new call.

        Raises:
            InvalidParams: the arguments do not fit the tool, change a fixed argument, or cannot be
                edited for this call.
            PermissionDenied: a rule denies the edited call, or the edited call needs other
                approvers.
        """
        approval = stored.approval
        if stored.request.needs is not None:
            raise refusals.cannot_be_edited(stored.request.needs)
        if approval.tool.startswith(EXTERNAL):
            raise InvalidParams(
                "The caller runs this tool itself, with its own arguments, so they cannot be "
                "edited. Deny the call, and say in the reason what should change.",
                fields=["arguments"],
            )
        given = _without_fixed(stored, arguments)
        permitted = self.permit_again(stored, self.calls.context_of(stored, arguments=given))
        new, _ = await self._asking_now(permitted)
        if new.approval.tool_version != approval.tool_version:
            raise InvalidParams("The tool has another version now.", fields=["arguments"])
        return edited(stored, new, is_asked=permitted.decision.verdict is Verdict.ASK)

    async def previewed(self, stored: StoredApproval) -> StoredApproval | None:
        """Return the approval with a new preview of the effect that the waiting call would have
        now. Nothing is stored.

        Return None if the tool has no preview, or if the session is missing or busy. Also return
        None if the call's action has changed in more than the workspace.

        Raises:
            EngineError: the preview cannot be computed now.
        """
        before = stored.approval.binding or {}
        if before.get("workspace") is None:
            return None
        permitted = self.permit_again(stored, self.calls.context_of(stored))
        plan = make_plan(permitted, self._services.walls, self._services.sessions)
        if plan.session is None or plan.session.is_busy:
            return None
        new, effect = await self._asking_now(permitted)
        changed = changed_fields(before, new.approval.binding or {})
        if effect is None or changed not in ((), ("workspace",)):
            return None  # if other fields have changed, the call will be refused when it starts
        return with_action(stored, new)

    async def _keep_time(self) -> None:
        requests = self._requests
        while True:
            requests.new_call = anyio.Event()
            pause_s = LOOK_S
            try:
                if not await self.catch_up():
                    pause_s = math.inf
            except Exception as fault:  # the engine must not end with this task
                requests.log.warning("approval.round_failed", reason=repr(fault)[:500])
            with anyio.move_on_after(pause_s):
                await requests.new_call.wait()

    async def _attend(self, one: Waiting, now: datetime) -> None:
        """Do what is due for one waiting call, if anything: expire it, start it, end it because its
        session has ended, or warn that it expires soon. `now` is the current time.
        """
        requests, calls = self._requests, self.calls
        session = one.own_session
        if one.expires_at <= stamp(now):
            if one.id not in requests.runs.running:
                stored = await requests.table.get(one.id)
                await calls.end(stored, refusals.expired(stored.approval), steps.expired)
        elif one.state == ApprovalState.APPROVED:
            self.start(one.id)
        elif session is not None and not self._services.sessions.is_active(session):
            stored = await requests.table.get(one.id)
            await calls.end(
                stored, refusals.session_over(stored.approval), partial(steps.outlived, SESSION)
            )
        elif one.warned_at is None and one.expires_at <= stamp(now + self._warn_before):
            await requests.change((one.id, steps.expiring(now)))

    async def _run(self, approval_id: str, run: ApprovedRun) -> None:
        requests = self._requests
        try:
            stored = await requests.table.get(approval_id)
            if stored.approval.state is ApprovalState.APPROVED:
                await self._carry_out(stored, run)
        except (*_LATER, IdempotencyConflict) as fault:
            # If the database still has the call as approved, the loop starts it again.
            requests.log.warning("approval.not_carried_out", reason=str(fault))
            if isinstance(fault, WriteUnavailable):
                await self._interrupt(approval_id)
        except Exception as fault:  # other approvals must not end with this task
            requests.log_fault(approval_id, fault)
            await self._interrupt(approval_id)
        finally:
            requests.runs.leave(approval_id)

    async def _carry_out(self, stored: StoredApproval, run: ApprovedRun) -> None:
        """Run an approved call, and store the call's answer.

        Raises:
            ReadFailed, WriteFailed, ShuttingDown, SandboxUnavailable, CircuitOpen, RateLimited:
                nothing was done, and the approval is still valid.
            IdempotencyConflict: the approval has already been ended in another way; nothing was
                done.
        """
        handle = run.handle
        handle.attach(self._services.redactor.line)
        call = self.calls.context_of(stored, handle)
        run.request = call.request
        try:
            ending = await self._ending(stored, call)
            handle.close()
            await self._end(stored, ending, call)
        finally:
            if not call.has_begun:  # a call that began may have used all of its budget
                call.release()
            call.close()

    async def _interrupt(self, approval_id: str, outcomes: Outcomes = NOT_KNOWN) -> None:
        """End a call that was started but is not running now. Do nothing if the call was not
        started, or if its row cannot be read.

        If `outcomes` has the call's outcome, the call ends with it. Otherwise, it ends as
        interrupted. While the database is unavailable, this method waits.
        """
        try:
            # Even if the write of the start seemed to fail, the database may have stored it.
            stored = await self._settled(approval_id)
            if stored.approval.state is not ApprovalState.STARTED:
                return
            call_id = stored.approval.call_id
            with suppress(IdempotencyConflict):
                if call_id in outcomes:
                    await self._end_known(stored, outcomes[call_id])
                else:
                    interrupted = refusals.interrupted(stored.approval)
                    await self.calls.end(stored, interrupted, steps.interrupted)
        except Exception as fault:
            self._requests.log_fault(approval_id, fault)

    async def _end_known(self, stored: StoredApproval, error: EngineError | None) -> None:
        """End an interrupted call whose outcome is known.

        If `error` is None, the call completed, and only its answer is lost. Otherwise, the call
        changed nothing, and `error` becomes its answer.
        """
        note = "Everything was done before the engine ended; only the answer is lost."
        answer = (
            await self.calls.resolved(stored, Resolution(outcome="done", note=note), "engine")
            if error is None
            else await self.calls.answer(stored, error)
        )
        to = ApprovalState.DONE if error is None else ApprovalState.FAILED
        step = steps.ended(to, answer, (), self._requests.now())
        (after,) = await self._requests.change((stored.approval.id, step))
        self.calls.record(after, answer)

    async def _expire_lost(self, approval_id: str) -> None:
        """End a waiting call whose program or trial was lost when an earlier engine ended."""
        try:
            stored = await self._requests.table.get(approval_id)
            if (what := stored.request.needs) is not None:
                lost = refusals.lost_with_engine(stored.approval, what)
                await self.calls.end(stored, lost, partial(steps.outlived, what))
        except Exception as fault:
            self._requests.log_fault(approval_id, fault)

    async def _settled(self, approval_id: str) -> StoredApproval:
        while True:
            try:
                return await self._requests.table.settled(approval_id)
            except WriteUnavailable:
                await anyio.sleep(RETRY_S)

    async def _ending(self, stored: StoredApproval, call: CallContext) -> Outcome | EngineError:
        try:
            permitted = self.permit_again(stored, call)
            consent = Consent(
                permitted,
                partial(self._use, stored, call),
                stored.request.expected,
                frozenset(stored.request.may_exceed),
            )
            approved = call.trace.passed("approve", with_consent(permitted, consent))
            return await run_approved(approved, call, self._services)
        except EngineError as refusal:
            if _passes(refusal) and not call.has_begun and not call.handle.is_cancelled:
                raise  # nothing was done: the approval stays valid, and the call is tried again
            return refusal
        except Exception as fault:
            return hidden_fault(call, fault)
        except asyncio.CancelledError:
            if not call.handle.close():
                raise  # the engine stops; a call that began becomes interrupted at the next start
            return cancelled_ending(call) if call.has_begun else cancelled()

    async def _end(
        self, stored: StoredApproval, ending: Outcome | EngineError, call: CallContext
    ) -> None:
        services = self._services
        envelope = await call.settle(await build_envelope(call, ending, services))
        changed: tuple[str, ...] = ()
        if isinstance(ending, ApprovalExpired):
            to = ApprovalState.EXPIRED
            changed = tuple((ending.details or {}).get("changed", ()))
        elif isinstance(ending, Cancelled) and not call.has_begun:
            to = ApprovalState.CANCELLED
        else:
            to = ApprovalState.DONE if envelope.success else ApprovalState.FAILED
        await self._requests.end(stored, to, envelope, changed=changed)
        record_ending(call, envelope, services)

    async def _asking_now(self, permitted: PermittedCall) -> tuple[StoredApproval, Effect | None]:
        """Return the approval that a call would request now, and the effect of the call, which is
        None if the tool has no preview.
        """
        services = self._services
        plan = await plan_now(permitted, services.walls, services.sessions)
        return await self.calls.asker.new_approval(permitted, plan, services)

    async def _use(self, stored: StoredApproval, call: CallContext, plan: Plan) -> None:
        """Check that the call's action is still the approved action, apart from the workspace. Then
        use up the approval.

        Raises:
            ApprovalExpired: the action differs from the approved action, or the approval is no
            longer valid.
            EngineError: a stage of the pipeline refuses the call now.
            WriteFailed: the approval was not used up. The call must not run.
        """
        # The call may have waited long for its place in the sandbox, so its action may be another
        # one now. The executor compares the workspace before it changes anything.
        place = await place_of(plan, self._services.sessions)
        again = self.calls.context_of(stored)
        again.holds = call.holds  # their cost must not count twice against the budget
        approval, permitted = stored.approval, self.permit_again(stored, again)
        workspace = (approval.binding or {}).get("workspace")
        effect = None if workspace is None else Effect({}, workspace["base"], workspace["effect"])
        sends = sends_of(permitted, plan, self._services)
        action = action_of(permitted, plan, place, effect, sends)
        if action.digest != approval.action_digest:
            raise refusals.not_as_approved(changed_fields(approval.binding or {}, action.document))
        await self._requests.begin(stored)
        call.trace.passed("start", None)


_LATER = (ReadFailed, WriteFailed, ShuttingDown, SandboxUnavailable, CircuitOpen, RateLimited)
"""Errors after which a call can still start later. After such an error, the approval stays
valid."""


def _passes(refusal: EngineError) -> bool:
    # A call may wait for a place in the sandbox, but not for a budget to be reset.
    if isinstance(refusal, SandboxUnavailable | QuotaExceeded):
        return refusal.may_retry
    return isinstance(refusal, _LATER)


def _without_fixed(stored: StoredApproval, arguments: JsonObject) -> JsonObject:
    """Return the edited arguments (`arguments`) without those that the agent's configuration fixes.

    Raises:
        InvalidParams: the edit would change a fixed argument.
    """
    hidden = stored.request.hidden
    shown = stored.approval.arguments
    touched = [n for n in hidden if n in arguments and arguments[n] != shown.get(n)]
    if touched:
        raise InvalidParams(
            f"{touched[0]} is fixed by the agent's configuration and cannot be edited here.",
            fields=[f"arguments.{name}" for name in touched],
        )
    return {name: value for name, value in arguments.items() if name not in hidden}
