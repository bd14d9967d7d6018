"""The spine: the way of one call through all rooms, and the one net under it.

    resolve → validate → authorize → claim → approve → reserve, admit → start → execute
        → shape, shorten → account → settle → record

Each stage takes the previous one's value and returns the next, or raises one `EngineError`.
Nothing reaches back. The answer is always an envelope; a fault of the engine is logged and
hidden, a cancellation is concluded and passed on.
"""

from __future__ import annotations

import asyncio

import anyio

from fumehood.approvals.stored_calls import StoredCalls
from fumehood.budgets.ledger import Reservation, refusal, taken_by
from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import Cancelled, EngineError, InternalError
from fumehood.executors.live import CallHandle
from fumehood.executors.outcome import Outcome, cancelled
from fumehood.observe.clock import timestamp
from fumehood.observe.trail import CallTrace
from fumehood.pipeline.admit import plan_admission
from fumehood.pipeline.approve import ApprovedCall, WaitCancelled, approve, wait_for
from fumehood.pipeline.authorize import PermittedCall, authorize
from fumehood.pipeline.build_envelope import compose, plan_of
from fumehood.pipeline.claim import Claim, Replay, Waiting, claimed
from fumehood.pipeline.dry_run import rehearse
from fumehood.pipeline.execute import execute
from fumehood.pipeline.record import record_ending, record_intent, record_replay
from fumehood.pipeline.resolve import resolve
from fumehood.pipeline.services import PipelineServices, spender_of
from fumehood.pipeline.validate import validate
from fumehood.policy.decision import Verdict

CONCLUDE_S = 5.0
"""How long a call that is cancelled from outside may take to keep what it has promised."""


class CallResources:
    """What a call holds on its way, and gives back at its end."""

    __slots__ = ("claim", "has_begun", "reservation")

    def __init__(self) -> None:
        self.claim: Claim | None = None
        self.reservation: Reservation | None = None
        self.has_begun = False
        """Whether it may have acted."""

    def release(self) -> None:
        """It took nothing."""
        if self.reservation is not None:
            self.reservation.release()

    async def settle(self, envelope: Envelope) -> Envelope:
        """Count what it took, and keep its answer under its key; what the caller is to have."""
        if self.reservation is not None:
            if self.has_begun:
                self.reservation.settle(taken_by(envelope.metadata.usage))
            else:
                self.release()
        if self.claim is None:
            return envelope
        return await self.claim.settle(envelope, acted=self.has_begun)


async def run_call(
    request: CallRequest, rooms: PipelineServices, live: CallHandle | None = None
) -> Envelope:
    """Carry one call through every room; the answer is always an envelope.

    `live` hears of it meanwhile, and lets its caller end it.
    """
    live = live if live is not None else CallHandle()
    live.attach()
    trail = CallTrace(request.tool, request.call_id, request.trace_id, rooms.clock, rooms.log)
    held = CallResources()
    try:
        resolved = trail.passed(
            "resolve", resolve(request, rooms.registry, rooms.agents, rooms.clock.now().date())
        )
        validated = trail.passed("validate", validate(resolved))
        permitted = trail.passed(
            "authorize", authorize(validated, rooms.policy, rooms.over_budget(validated))
        )
        if request.options.dry_run:
            exceeded = rooms.exceeded(validated)
            rehearsed = await rehearse(permitted, rooms.walls, rooms.sessions, exceeded)
            return await conclude(request, trail.passed("rehearse", rehearsed), trail, rooms)
        if permitted.decision.shadow:
            _tell_shadow(permitted, rooms)
        found = await rooms.keys.claim(permitted, request.call_id, rooms.clock.now())
        if isinstance(found, Replay | Waiting):
            return await _answer_of_another(found, request, trail, rooms, live)
        held.claim = found
        if permitted.decision.verdict is Verdict.ASK:
            _refuse_unpayable(permitted, rooms)
        mine = trail.passed("claim", claimed(permitted, found))
        try:
            approved = await approve(mine, rooms.asking, trail, live)
        except WaitCancelled as waiting:
            await _take_back(waiting.approval_id, request, rooms, live)
            raise
        if isinstance(approved, Envelope):  # it was waited for, and is recorded already
            return approved
        outcome = await run_approved(trail.passed("approve", approved), trail, rooms, live, held)
        return await conclude(request, outcome, trail, rooms, held)
    except EngineError as refused:
        live.close()
        return await conclude(request, refused, trail, rooms, held)
    except BaseException as fault:
        if live.close() and isinstance(fault, asyncio.CancelledError):
            ending = cancelled_ending(request, live, trail)
            return await conclude(request, ending, trail, rooms, held)
        return await conclude_fault(request, fault, trail, rooms, held)


def _tell_shadow(permitted: PermittedCall, rooms: PipelineServices) -> None:
    """Say in the log what rules that are only tried out would have done."""
    rooms.policy.count(permitted.decision)
    rooms.log.info(
        "policy.shadow",
        tool=permitted.tool.definition.name,
        call_id=permitted.request.call_id,
        rules=list(permitted.decision.shadow),
    )


async def run_approved(
    approved: ApprovedCall,
    trail: CallTrace,
    rooms: PipelineServices,
    live: CallHandle,
    held: CallResources | None = None,
) -> Outcome:
    """Reserve, admit, start and execute a call that every gate has let through."""
    held = held if held is not None else CallResources()
    await _reserve(approved, rooms, held)
    admission = await plan_admission(
        approved, rooms.walls, is_draining=rooms.is_draining(), sessions=rooms.sessions
    )
    live.begin()
    async with admission as admitted:
        record_intent(trail.passed("admit", admitted), trail)  # if this fails, nothing runs
        if approved.require_unchanged is not None:
            approved.require_unchanged()  # it may have waited long for its place
        if approved.approval is not None:
            await rooms.approvals.begin(approved.approval)
            trail.passed("start", None)
        elif approved.remembered is not None:
            await rooms.approvals.remembered.use(approved.remembered)
        held.has_begun = True
        outcome = await execute(admitted, blobs=rooms.blobs, cursors=rooms.cursors, live=live)
        if live.close():  # the tool did not let itself be cancelled, and is over now
            outcome = Outcome.cancelled(outcome.isolation)
        return trail.passed("execute", outcome)


async def conclude(
    request: CallRequest,
    ending: Outcome | EngineError,
    trail: CallTrace,
    rooms: PipelineServices,
    held: CallResources | None = None,
) -> Envelope:
    """Shape, shorten, account, give back what was held, and record one ending.

    A refusal is concluded without waiting for anything, also while the call is cancelled; only
    what a key has promised is on the disk before the answer leaves.
    """
    envelope = await compose(request, ending, trail, rooms)
    if held is not None:
        envelope = await held.settle(envelope)
    record_ending(request, envelope, trail, rooms.calls)
    return envelope


async def _answer_of_another(
    found: Replay | Waiting,
    request: CallRequest,
    trail: CallTrace,
    rooms: PipelineServices,
    live: CallHandle,
) -> Envelope:
    """What a call hears whose key has been used before."""
    if isinstance(found, Replay):
        now = timestamp(rooms.clock.now())
        record_replay(request, found.envelope, trail, rooms.calls, now)
        return found.envelope
    trail.is_parked = True
    try:
        return await wait_for(found.approval_id, request, rooms.approvals, live)
    except WaitCancelled as waiting:
        await _take_back(waiting.approval_id, request, rooms, live)
        raise


async def _take_back(
    approval_id: str, request: CallRequest, rooms: PipelineServices, live: CallHandle
) -> None:
    """Cancel the stored call as well if it was its caller who cancelled."""
    if live.is_cancelled:
        by = request.principal.id if request.principal is not None else ""
        await StoredCalls(rooms).take_back(approval_id, by)


def _refuse_unpayable(permitted: PermittedCall, rooms: PipelineServices) -> None:
    """Ask no human for what could not be carried out after the yes.

    Raises:
        QuotaExceeded: a budget has too little left, and no rule lets a human exceed it.
    """
    exceeded = rooms.exceeded(permitted.validated)
    if exceeded is not None and not permitted.decision.may_exceed_budget:
        raise refusal(exceeded, rooms.clock.now())


async def _reserve(approved: ApprovedCall, rooms: PipelineServices, held: CallResources) -> None:
    """Take what the call is expected to cost out of the budgets that count it."""
    if rooms.budgets.is_empty:
        return
    validated = approved.claimed.permitted.validated
    force = approved.approval is not None and approved.approval.request.may_exceed_budget
    held.reservation = await rooms.budgets.reserve(
        spender_of(validated), rooms.estimate(validated), force=force
    )


def cancelled_ending(
    request: CallRequest, live: CallHandle, trail: CallTrace
) -> Outcome | EngineError:
    """What became of a call that its caller has ended, with what is known of its run."""
    outcome, plan = live.partial, plan_of(trail)
    if outcome is None and plan is not None:
        isolation = "none" if plan.placement.kind == "host" else request.options.isolation or "call"
        outcome = Outcome.cancelled(isolation)
    return cancelled() if outcome is None else trail.passed("execute", outcome)


async def conclude_fault(
    request: CallRequest,
    fault: BaseException,
    trail: CallTrace,
    rooms: PipelineServices,
    held: CallResources,
) -> Envelope:
    """Conclude what is no refusal: a bug becomes an answer, a cancellation goes on."""
    if isinstance(fault, Exception):
        trail.fault("call.internal_error", fault)
        error: EngineError = InternalError(
            "The engine failed inside. Its owner finds the reason in the log under this trace id."
        )
        return await conclude(request, error, trail, rooms, held)
    error = Cancelled("The call was cancelled before it ended.")
    with anyio.CancelScope(shield=True), anyio.move_on_after(CONCLUDE_S):
        await conclude(request, error, trail, rooms, held)
    raise fault
