"""Approve: hold a call for a human's approval if the policy asks for one.

Fifth stage. Takes a `ClaimedCall`, returns an `ApprovedCall`, or the final answer if the caller
waited for the approval. A call that needs approval is parked: it is stored with everything that
decides what it will do, and its caller is told that it waits. `approvals/scheduler` runs it after
its approval; nothing in this module does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import anyio.to_thread

from fumehood.approvals.model import Approval, ApprovalState, StoredApproval, StoredRequest
from fumehood.approvals.preview import (
    action_of,
    definition_digest,
    full_reason,
    preview,
    sends_of,
)
from fumehood.approvals.refusals import denial
from fumehood.approvals.requests import ApprovalRequests
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    CallInProgress,
    InvalidParams,
    RequiresHumanApproval,
)
from fumehood.core.json_types import JsonValue
from fumehood.core.names import EXTERNAL
from fumehood.core.tasks import run_to_completion
from fumehood.executors.effects import Effect
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.claim import ClaimedCall, context_of
from fumehood.pipeline.context import CallContext, PipelineServices
from fumehood.pipeline.plan import Plan, can_be_tried, place_of, plan_now
from fumehood.policy.model import Verdict
from fumehood.protocol.messages import decode_envelope

MAX_READ_VALUES = 20_000
"""Maximum number of values in a call that needs approval. Hashing more would delay other calls."""


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that is approved or needs no approval."""

    permitted: PermittedCall
    approval: StoredApproval | None = None
    """Its approval, which is used up when the call starts."""
    require_unchanged: Callable[[Plan], Awaitable[None]] | None = None
    """Awaited just before the approval is used up. Raises if the approval no longer covers the
    call."""
    remembered: str | None = None
    """The remembered rule that permits the call, and whose uses are counted."""


def require_readable(permitted: PermittedCall) -> None:
    """Raise InvalidParams if a call has more values than can be shown to a human."""
    count = 0
    left: list[JsonValue] = [permitted.arguments, permitted.request.context]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        count += 1
        if count + len(left) > MAX_READ_VALUES:
            raise InvalidParams(
                f"A human has to read this call, and it has over {MAX_READ_VALUES:,} values. Send "
                "fewer.",
                fields=["arguments"],
            )


async def approve(
    claimed: ClaimedCall, services: PipelineServices, call: CallContext
) -> ApprovedCall | Envelope:
    """Pass a call that needs no approval. Park any other call, and wait if its caller requests it.

    Raises:
        RequiresHumanApproval: the call waits for a human, or there are too few approvers.
        CallInProgress: the call was approved meanwhile and still runs.
        ApprovalDenied: a human denied the same call a short time ago.
        EngineError: the preview shows that the tool would fail with this error.
        RateLimited: too many calls are already waiting.
    """
    permitted = claimed.permitted
    decision = permitted.decision
    if decision.verdict is Verdict.ALLOW:
        return ApprovedCall(permitted)
    approvals = services.approvals
    plan = await plan_now(permitted, services.walls, services.sessions)
    if decision.wants_trial and can_be_tried(permitted, plan):
        call.request = replace(
            call.request, options=call.request.options.model_copy(update={"preview": True})
        )
        return ApprovedCall(permitted.with_request(call.request))
    sends = sends_of(permitted, plan, services)
    definition = definition_digest(permitted.tool, permitted.request.context, sends)
    remembered = approvals.remembered_for(permitted, definition)
    held = permitted.request.held
    if remembered is not None and not (held is not None and held.always_asks):
        return ApprovedCall(permitted, remembered=remembered)
    approvals.eligibility.require_enough(
        permitted.tool.definition.name, decision, permitted.principal.id
    )
    key = claimed.claim.key if claimed.claim is not None else None
    stored, effect = await new_approval(permitted, plan, services, key, call.repeat_key)
    if effect is not None and effect.error is not None:
        raise effect.error
    denied = await approvals.denied_before(stored.approval)
    if denied is not None:
        raise denial(denied, again=True)
    if plan.session is not None:
        services.sessions.note_use(plan.session.id)
    approval_id = await run_to_completion(_park(stored, claimed, approvals, call))
    return await wait_for(approval_id, call, approvals)


async def wait_for(approval_id: str, call: CallContext, approvals: ApprovalRequests) -> Envelope:
    """Wait for the answer of a parked call, at most as long as the caller's option allows.

    Raises:
        RequiresHumanApproval: the call still waits for a human.
        CallInProgress: the call is running.
    """
    wait_s = approvals.wait_s(call.request.options.wait_for_approval)
    handle = call.handle
    if wait_s:
        handle.begin()
        handle.report(0, f"waits for approval: {approval_id}")
        with handle.waiting_for_human():
            answer = await approvals.wait(approval_id, wait_s, handle)
        if answer is not None:
            return await _answered(answer, call, approvals)
    stored = await approvals.table.get(approval_id)
    if stored.answer is not None:  # it was stored in this moment
        return await _answered(decode_envelope(stored.answer.encode()), call, approvals)
    approval = stored.approval
    # A repeat answers under the id of the call that it repeats.
    call.request = replace(call.request, call_id=approval.call_id)
    approvals.told(approval.call_id)
    raise waits(approval, approvals)


async def _answered(answer: Envelope, call: CallContext, approvals: ApprovalRequests) -> Envelope:
    """Return the stored answer. If this call repeats the stored one, the answer is marked as
    replay.

    An action runs once, however often its answer is fetched. The approval of a tool that the caller
    runs itself can be fetched only once, because each fetch could lead to another run.

    Raises:
        ApprovalExpired: such an approval was fetched before.
    """
    first, own = answer.metadata.call_id or "", call.request.call_id
    if answer.success and call.repeat_key is not None and call.request.tool.startswith(EXTERNAL):
        await approvals.use_decision(first)
    else:
        call.handle.answered_call = first
    if first == own or call.repeat_key is None:
        return answer
    call.trace.tell("call.repeated", first_call_id=first)
    metadata = answer.metadata.model_copy(update={"idempotent_replay": True})
    return answer.model_copy(update={"metadata": metadata})


async def _park(
    stored: StoredApproval, claimed: ClaimedCall, approvals: ApprovalRequests, call: CallContext
) -> str:
    """Store the call, whose key then belongs to its approval, and return the approval's id."""
    held = claimed.permitted.request.held
    call.parked_as = approval_id = await approvals.create(stored, held)
    if claimed.claim is not None:
        claimed.claim.handed_over()
    return approval_id


def approved_by_human(
    permitted: PermittedCall,
    stored: StoredApproval,
    require_unchanged: Callable[[Plan], Awaitable[None]],
) -> ApprovedCall:
    """Return the call of a stored approval, which is used up when the call starts."""
    return ApprovedCall(permitted, stored, require_unchanged)


def waits(
    approval: Approval, approvals: ApprovalRequests
) -> RequiresHumanApproval | CallInProgress:
    """Return the error for the caller of a parked call that has not ended."""
    if approval.state is not ApprovalState.PENDING:
        return CallInProgress(
            f"This call of {approval.tool} was approved and is running. Fetch its answer with the "
            f"call id {approval.call_id}.",
            retry_after_ms=1000,
            extra={"approval_id": approval.id},
        )
    why = f" {approval.reason}" if approval.reason else ""
    return RequiresHumanApproval(
        f"{approval.tool} waits for approval.{why} It runs by itself once it is approved. "
        "Tell the user what you want to do. After the decision, get the answer with the call id "
        f"{approval.call_id}, or by exactly the same call again.",
        extra={"approval_id": approval.id, "approval_url": approvals.url_of(approval.id)},
        details={"expires_at": approval.expires_at.isoformat(), "rule": approval.rule},
    )


async def new_approval(
    permitted: PermittedCall,
    plan: Plan,
    services: PipelineServices,
    idempotency_key: str | None = None,
    repeat_key: str | None = None,
) -> tuple[StoredApproval, Effect | None]:
    """Return the approval record that a call would get now, and the call's effect.

    Raises:
        EngineError: its effect cannot be computed, or its request cannot be made.
    """
    place = await place_of(plan, services.sessions)
    effect = await preview(permitted, plan, services.sessions)
    sends = sends_of(permitted, plan, services)
    action = action_of(permitted, plan, place, effect, sends)
    unusable: list[str] = []
    if names := action.document["secrets"]:
        report = services.upstreams.secrets.report_unusable
        unusable = await anyio.to_thread.run_sync(report, names)
    approvals, now = services.approvals, services.approvals.now()
    last_end = services.sessions.last_end(plan.session.id) if plan.session is not None else None
    ends = [approvals.expiry(), *([last_end] if last_end is not None else [])]
    held = permitted.request.held
    if held is not None:  # its program waits no longer, and without it the call cannot run
        wait_s = approvals.wait_s(permitted.request.options.wait_for_approval)
        ends.append(now + timedelta(seconds=wait_s))
    request, decision = permitted.request, permitted.decision
    found = services.excesses(permitted.validated) if decision.may_exceed_budget else ()
    excess = next((excess for _, excess in found if excess.record is not None), None)
    binding = permitted.validated.binding
    tool, options = permitted.tool.definition, request.options
    approval = Approval(
        id=approvals.new_id(),
        version=1,
        state=ApprovalState.PENDING,
        call_id=request.call_id,
        trace_id=request.trace_id,
        tool=tool.name,
        tool_version=tool.version,
        principal_id=permitted.principal.id,
        agent_id=options.agent_id,
        session_id=options.session_id,
        arguments=permitted.arguments,
        sends=sends,
        preview=effect.shown if effect is not None else context_of(request) or None,
        previewed_at=now if effect is not None else None,
        rule=decision.rule,
        asked_by=decision.asked_by,
        reason=full_reason(decision, excess.words if excess is not None else None, unusable),
        budget=excess.record if excess is not None else None,
        dangerous=tool.dangerous,
        approvers=decision.approvers,
        quorum=decision.quorum,
        decisions=(),
        policy_version=decision.policy_version,
        action_digest=action.digest,
        binding=action.document,
        created_at=now,
        expires_at=min(ends),
    )
    kept = StoredRequest(
        arguments=request.arguments,
        options=options.model_dump(mode="json"),
        token_id=permitted.principal.token_id,
        expected=effect.base if effect is not None else None,
        may_exceed_budget=decision.may_exceed_budget,
        hidden=tuple(sorted(binding.fixed)) if binding is not None else (),
        is_program=permitted.principal.is_program,
        parent_id=request.parent_id,
        context=request.context,
        traceparent=str(request.traceparent) if request.traceparent is not None else None,
        needs=held.needs if held is not None else None,
    )
    return StoredApproval(approval, kept, idempotency_key, repeat_key=repeat_key), effect
