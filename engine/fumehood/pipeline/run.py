"""The pipeline: run a call through every stage, and catch all its errors in one place.

    resolve → validate → authorize → claim → approve → reserve, admit → start → execute
        → shape, shorten → account → settle → record

Each stage takes the value of the stage before it and returns its own, or raises one `EngineError`.
No stage changes an earlier one's value. The answer is always an envelope. A failure of the engine
itself is logged, and its cause is hidden from the caller. A cancelled task records the call's end
and is then cancelled. `CallContext` collects what is known about the call.

If a tool's service fails, its fallback, another tool, is called once: through the whole pipeline,
for the same caller and agent, with the same arguments, under its own id. There is no fallback if
the first tool may have acted and is not idempotent, if the fallback needs approval, or if a human
approved the call, because the approval is for the first tool only. A call whose fallback may have
acted is never reported as retryable, unless repeating it is harmless.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import anyio
import anyio.to_thread

from fumehood.approvals.stored_calls import StoredCalls
from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    Cancelled,
    CircuitOpen,
    EngineError,
    Fault,
    InternalError,
    RequiresHumanApproval,
)
from fumehood.core.long_text import is_long
from fumehood.executors.base import CallHandle
from fumehood.executors.outcome import HeldTrial, Outcome, cancelled
from fumehood.executors.program import TrialDecision
from fumehood.observe.clock import timestamp
from fumehood.pipeline.approve import (
    ApprovedCall,
    approve,
    require_readable,
    wait_for,
)
from fumehood.pipeline.authorize import PermittedCall, authorize
from fumehood.pipeline.child_calls import ChildCalls, require_for_program, tools_of
from fumehood.pipeline.claim import (
    Claim,
    Replay,
    Waiting,
    claimed,
    key_of,
    repeat_key_of,
)
from fumehood.pipeline.context import (
    FALLBACK_SUFFIX,
    CallContext,
    CallTrace,
    FallbackAnswer,
    PipelineServices,
)
from fumehood.pipeline.execute import dry_run, execute, plan_admission
from fumehood.pipeline.pass_gates import answer_of_gates, hold_gates, refuse_early
from fumehood.pipeline.record import (
    make_long_record,
    record_ending,
    record_intent,
    record_replay,
)
from fumehood.pipeline.resolve import ResolvedCall, resolve
from fumehood.pipeline.result import build_envelope
from fumehood.pipeline.retry import is_harmless, is_of_service, is_passing
from fumehood.pipeline.validate import ValidatedCall, validate
from fumehood.policy.model import Verdict
from fumehood.sandbox.session_use import SessionLease

CONCLUDE_S = 5.0
"""Seconds that a call has to store its ending after its task was cancelled."""


async def run_call(
    request: CallRequest, services: PipelineServices, handle: CallHandle
) -> Envelope:
    """Run one call through every stage. Always returns an envelope.

    `handle` reports the call's events and allows its caller to cancel it.
    """
    handle.attach()
    trace = CallTrace(request.tool, request.call_id, request.trace_id, services.clock, services.log)
    return await _run(CallContext(request, trace, handle), services)


async def _run(call: CallContext, services: PipelineServices) -> Envelope:
    """Run the call of a context. Its handle must be attached."""
    request, trace, handle = call.request, call.trace, call.handle
    try:
        permitted = await _permit_apart(call, services)
        if request.options.dry_run:
            planned = await dry_run(permitted, services)
            return await conclude(call, trace.passed("dry_run", planned), services)
        _log_shadow(permitted, services)
        found = await _claim(permitted, call, services)
        if found is None:
            known = await answer_of_gates(permitted, call, services)
            if known is not None:
                record_ending(call, known, services)
                return known
        if found is not None and not isinstance(found, Claim):
            return await _answer_of_another(found, call, services)
        call.claim = found
        refuse_early(permitted, services)
        mine = trace.passed("claim", claimed(permitted, found))
        approved = await approve(mine, services, call)
        if isinstance(approved, Envelope):  # the final answer after an approval, already recorded
            return approved
        ending = await _run_or_fall_back(trace.passed("approve", approved), call, services)
        return await conclude(call, ending, services)
    except EngineError as refused:
        handle.close()
        return await conclude(call, refused, services)
    except BaseException as fault:
        if call.parked_as is not None and isinstance(fault, asyncio.CancelledError):
            await _take_back(call.parked_as, call, services)
        if handle.close() and isinstance(fault, asyncio.CancelledError):
            return await conclude(call, cancelled_ending(call), services)
        return await conclude_fault(call, fault, services)
    finally:
        call.close()


async def _claim(
    permitted: PermittedCall, call: CallContext, services: PipelineServices
) -> Claim | Replay | Waiting | None:
    """Claim the call's key, or return the earlier call that this one repeats.

    A call without a key can also repeat an earlier one if it needs approval. A fallback's call has
    no key, because the first tool's call holds it for both.
    """
    if permitted.request.is_fallback:
        if permitted.decision.verdict is Verdict.ASK:
            raise RequiresHumanApproval(
                "The fallback needs approval, and a fallback waits for nobody. It was not called."
            )
        return None
    if permitted.decision.verdict is Verdict.ASK:
        require_readable(permitted)
    if key_of(permitted) is not None:
        now = services.clock.now()
        return await services.keys.claim(permitted, permitted.request.call_id, now)
    if permitted.decision.verdict is not Verdict.ASK:
        return None
    call.repeat_key = await repeat_key_of(permitted)
    if call.repeat_key is None:
        return None
    tool = permitted.tool.definition.name
    approval_id = await services.approvals.same_call(call.repeat_key, tool)
    return Waiting(approval_id) if approval_id is not None else None


def permit(call: CallContext, services: PipelineServices) -> PermittedCall:
    """Resolve, validate and authorize a call.

    Raises:
        EngineError: as these three stages.
    """
    return _authorized(call, validate(_resolved(call, services)), services)


async def _permit_apart(call: CallContext, services: PipelineServices) -> PermittedCall:
    """As `permit`, with long arguments validated in a thread."""
    resolved = _resolved(call, services)
    if not is_long(call.request.arguments):
        return _authorized(call, validate(resolved), services)
    return _authorized(call, await anyio.to_thread.run_sync(validate, resolved), services)


def _resolved(call: CallContext, services: PipelineServices) -> ResolvedCall:
    call.resolved = resolved = call.trace.passed(
        "resolve", resolve(call.request, services.registry, services.agents, services.clock.now)
    )
    if call.request.parent_id is not None and call.request.held is None:
        require_for_program(resolved.tool.definition)
    return resolved


def _authorized(
    call: CallContext, validated: ValidatedCall, services: PipelineServices
) -> PermittedCall:
    trace = call.trace
    call.validated = trace.passed("validate", validated)

    def is_over_budget() -> bool:
        found = services.excesses(validated, but={gate for gate, _ in call.holds})
        return any(excess.record is not None for _, excess in found)

    permitted = trace.passed(
        "authorize",
        authorize(validated, services.policy, is_over_budget, services.sessions.own_env),
    )
    if "tools" in validated.arguments:
        call.tools = tools_of(permitted, services)
    return permitted


def _log_shadow(permitted: PermittedCall, services: PipelineServices) -> None:
    """Count the rule that decided, and log the rules in shadow mode that would have decided."""
    services.policy.count(permitted.decision)
    if not permitted.decision.shadow:
        return
    services.log.info(
        "policy.shadow",
        tool=permitted.tool.definition.name,
        call_id=permitted.request.call_id,
        trace_id=permitted.request.trace_id,
        rules=list(permitted.decision.shadow),
    )


async def _run_or_fall_back(
    approved: ApprovedCall, call: CallContext, services: PipelineServices
) -> Outcome | EngineError:
    """Run a call, and its tool's fallback if its service failed."""
    try:
        ending: Outcome | EngineError = await run_approved(approved, call, services)
    except CircuitOpen as refused:
        ending = refused
    error = ending.error if isinstance(ending, Outcome) else ending
    fallback = _fallback_of(call, error) if error is not None else None
    if fallback is not None:
        await _fall_back(call, fallback, services)
        if call.handle.close():  # the caller cancelled, but the fallback could not be stopped
            call.fallback = None
            return cancelled_ending(call)
    return ending


def _fallback_of(call: CallContext, error: EngineError) -> str | None:
    """Return the fallback that is called after this error, or None."""
    # After output, listeners have already received a part of the first tool's result.
    if call.resolved is None or call.handle.is_cancelled or call.handle.has_output:
        return None
    tool = call.resolved.tool.definition
    is_called = (
        not call.request.is_fallback
        and call.approval is None
        and is_of_service(tool)
        and (is_passing(error) or error.fault is Fault.UPSTREAM)
        and is_harmless(tool, error)
    )
    return tool.fallback if is_called else None


async def _fall_back(call: CallContext, name: str, services: PipelineServices) -> None:
    """Call the fallback `name` and store its answer in `call.fallback`."""
    # The idempotency key of the first tool's call covers both.
    options = {"idempotency_key": None, "wait_for_approval": None}
    request = replace(
        call.request,
        tool=name,
        call_id=call.request.call_id + FALLBACK_SUFFIX,
        options=call.request.options.model_copy(update=options),
        is_fallback=True,
    )
    trace = CallTrace(name, request.call_id, request.trace_id, services.clock, services.log)
    other = CallContext(request, trace, call.handle.for_fallback())
    other.handle.attach()
    call.trace.tell("call.fallback", fallback=name)
    if not call.has_begun:
        call.release()  # the first tool did not run
    try:
        envelope = await _run(other, services)
    finally:
        call.has_begun |= other.has_begun
    tool = other.resolved.tool.definition if other.resolved is not None else None
    acted = other.has_begun and not (tool is not None and tool.idempotent)
    call.fallback = FallbackAnswer(name, envelope, may_have_acted=acted)


async def run_approved(
    approved: ApprovedCall, call: CallContext, services: PipelineServices
) -> Outcome:
    """Reserve, admit, start and execute a call that needs no more approval."""
    call.is_approved = True
    await hold_gates(approved, call, services)
    admission = await plan_admission(approved, services)
    call.handle.begin()
    async with admission as admitted:
        call.plan, call.queue_ms = admitted.plan, admitted.lease.queue_ms
        record_intent(call.trace.passed("admit", admitted), call)  # if this fails, nothing runs
        if approved.require_unchanged is not None:
            # Checked here because the call may have waited long for its place.
            await approved.require_unchanged(admitted.plan)
        if approved.approval is not None:
            await services.approvals.begin(approved.approval)
            call.trace.passed("start", None)
        elif approved.remembered is not None:
            await services.approvals.remembered.use(approved.remembered)
        call.begin()
        outcome = await execute(admitted, call=call, services=services, run_call=run_call)
        is_over = outcome.error is None or _fallback_of(call, outcome.error) is None
        if (
            is_over and outcome.held is None and call.handle.close()
        ):  # the caller cancelled, but the tool ran to its end
            outcome = Outcome.cancelled(outcome.isolation)
        outcome = call.trace.passed("execute", outcome)
    return outcome if outcome.held is None else await _settle_trial(outcome.held, call, services)


async def _settle_trial(held: HeldTrial, call: CallContext, services: PipelineServices) -> Outcome:
    """Ask a human about the effect of a trial, put it in or drop it; return the call's outcome."""
    assert call.plan is not None
    decision = TrialDecision(held, call.plan.executor.language)
    try:
        why = await ChildCalls(call, [], services, run_call).ask_about(decision)
        if why is None:
            await decision.over.wait()
    finally:
        if not decision.has_begun:
            with anyio.CancelScope(shield=True), suppress(EngineError):
                await _drop_trial(held, call, services)
    if isinstance(decision.result, Outcome):
        outcome = decision.result
    else:
        why = decision.result or why
        assert why is not None
        why.details = {**(why.details or {}), **(held.outcome.data or {})}
        outcome = replace(held.outcome, data=None, error=why)
    if call.handle.close():
        outcome = Outcome.cancelled(outcome.isolation)
    return outcome


async def _drop_trial(held: HeldTrial, call: CallContext, services: PipelineServices) -> None:
    plan, request = call.plan, call.request
    assert plan is not None
    assert plan.session is not None
    assert request.principal is not None
    async with services.sessions.lease(
        request.principal, request.options.agent_id, plan.session.id,
        language=plan.executor.language, memory_mb=plan.limits.memory_mb,
    ) as lease:  # fmt: skip
        if isinstance(lease, SessionLease) and lease.trials is not None:
            await lease.trials.drop(held.files)


async def conclude(
    call: CallContext, ending: Outcome | EngineError, services: PipelineServices
) -> Envelope:
    """Build the envelope of one ending, release what the call holds, and record the ending.

    Return the envelope. If the call has an idempotency key, this waits until the answer is on disk.
    """
    envelope = await call.settle(await build_envelope(call, ending, services))
    try:
        await make_long_record(call, envelope, services)
    finally:
        record_ending(call, envelope, services)
    return envelope


async def _answer_of_another(
    found: Replay | Waiting, call: CallContext, services: PipelineServices
) -> Envelope:
    """Return the answer to a call that repeats an earlier one."""
    if isinstance(found, Replay):
        now = timestamp(services.clock.now())
        record_replay(call, found.envelope, services, now)
        return found.envelope
    call.parked_as = found.approval_id
    return await wait_for(found.approval_id, call, services.approvals)


async def _take_back(approval_id: str, call: CallContext, services: PipelineServices) -> None:
    """If the caller cancelled this call, withdraw the stored call, unless others wait for it."""
    if call.handle.is_cancelled:
        by = call.request.principal.id if call.request.principal is not None else ""
        by_program = call.request.parent_id is not None
        await StoredCalls(services).take_back(approval_id, by, by_program=by_program)


def cancelled_ending(call: CallContext) -> Outcome | EngineError:
    """Return the ending of a call that its caller cancelled, with what is known about its run."""
    outcome, plan = call.handle.partial, call.plan
    if outcome is None and plan is not None:
        isolation = call.request.options.isolation or "call"
        outcome = Outcome.cancelled("none" if plan.placement.wall == "host" else isolation)
    return cancelled() if outcome is None else call.trace.passed("execute", outcome)


async def conclude_fault(
    call: CallContext, fault: BaseException, services: PipelineServices
) -> Envelope:
    """Conclude a call that ended with an unexpected exception, or whose task was cancelled.

    An exception becomes an `InternalError`. A cancellation is recorded and raised again.
    """
    if isinstance(fault, Exception):
        return await conclude(call, hidden_fault(call, fault), services)
    error = Cancelled("The call was cancelled before it ended.")
    with anyio.CancelScope(shield=True), anyio.move_on_after(CONCLUDE_S):
        await conclude(call, error, services)
    raise fault


def hidden_fault(call: CallContext, fault: Exception) -> InternalError:
    """Log an unexpected exception, and return the error that the caller gets instead."""
    call.trace.fault("call.internal_error", fault)
    return InternalError("The engine failed internally. The log has the cause under this trace id.")
