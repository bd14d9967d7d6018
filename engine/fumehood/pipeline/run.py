"""The pipeline: run a call through every stage, and catch all its errors in one place.

    resolve → validate → authorize → claim → approve → reserve, admit → start → execute
        → shape, shorten → account → settle → record

Each stage takes the value that the previous stage returned, and returns its own value or raises one
`EngineError`. No stage changes the value of an earlier stage. The answer is always an envelope
(`conclude.py`). `CallContext` collects what is known about the call.
"""

from __future__ import annotations

import asyncio

from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import CircuitOpen, EngineError, RequiresHumanApproval
from fumehood.executors.base import CallHandle
from fumehood.executors.outcome import Outcome
from fumehood.observe.clock import timestamp
from fumehood.pipeline.approve import ApprovedCall, approve, require_readable
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.claim import Claim, Replay, Waiting, claimed, key_of, repeat_key_of
from fumehood.pipeline.conclude import cancelled_ending, conclude, conclude_fault
from fumehood.pipeline.context import CallContext, CallTrace, PipelineServices
from fumehood.pipeline.execute import dry_run, execute, plan_admission
from fumehood.pipeline.fall_back import fall_back, fallback_of
from fumehood.pipeline.pass_gates import answer_of_gates, hold_gates, refuse_early
from fumehood.pipeline.permit import log_shadow, permit_apart
from fumehood.pipeline.record import record_ending, record_intent, record_replay
from fumehood.policy.model import Verdict


async def run_call(
    request: CallRequest, services: PipelineServices, handle: CallHandle
) -> Envelope:
    """Run one call through every stage. Always returns an envelope.

    The caller uses `handle` to follow the call's events and to cancel the call.
    """
    handle.attach(services.redactor.line)
    trace = CallTrace(request.tool, request.call_id, request.trace_id, services.clock, services.log)
    return await _run(CallContext(request, trace, handle), services)


async def _run(call: CallContext, services: PipelineServices) -> Envelope:
    """Run the call that `call` describes through every stage, and return its envelope.

    The caller must have called `call.handle.attach` before.
    """
    request, trace, handle = call.request, call.trace, call.handle
    try:
        permitted = await permit_apart(call, services)
        if request.options.dry_run:
            planned = await dry_run(permitted, services)
            return await conclude(call, trace.passed("dry_run", planned), services)
        log_shadow(permitted, services)
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
        own = trace.passed("claim", claimed(permitted, found))
        approved = await approve(own, services, call)
        if isinstance(approved, Envelope):  # the final answer after an approval, already recorded
            return approved
        ending = await _run_or_fall_back(trace.passed("approve", approved), call, services)
        return await conclude(call, ending, services)
    except EngineError as refused:
        handle.close()
        return await conclude(call, refused, services)
    except BaseException as fault:
        if isinstance(fault, asyncio.CancelledError) and handle.is_cancelled and call.parked_as:
            await services.asker.take_back(call.parked_as, call, services)
        if handle.close() and isinstance(fault, asyncio.CancelledError):
            return await conclude(call, cancelled_ending(call), services)
        return await conclude_fault(call, fault, services)
    finally:
        call.close()


async def _claim(
    permitted: PermittedCall, call: CallContext, services: PipelineServices
) -> Claim | Replay | Waiting | None:
    """Claim the call's idempotency key, or find the earlier call that this call repeats.

    * If the call has a key, it repeats the earlier call with the same key, if there is one.
    * If the call has no key and needs approval, it can repeat an identical earlier call (see
      `same_call`).
    * If the call has no key and needs no approval, it repeats no call.
    * If the call is a fallback's, no key is claimed, and it repeats no call.

    Return `Claim` if the key was claimed. If an earlier call with the key was found, return
    `Replay` with its answer if it has ended, or `Waiting` if it is stored for approval. If an
    earlier call without a key was found, return `Waiting`. In all other cases, return None.

    Raises:
        RequiresHumanApproval: the call is a fallback's, and needs approval.
        EngineError: the key is invalid or cannot be claimed, as by `Keys.claim`.
        InvalidParams: the call needs approval, but has too many values for a human to read.
    """
    if permitted.request.is_fallback:
        if permitted.decision.verdict is Verdict.ASK:
            raise RequiresHumanApproval(
                "The fallback needs approval. Fallbacks never wait, so it was not called."
            )
        return None  # the first tool's call holds the key for both calls
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
    approval_id = await services.asker.same_call(call.repeat_key, tool)
    return Waiting(approval_id) if approval_id is not None else None


async def _run_or_fall_back(
    approved: ApprovedCall, call: CallContext, services: PipelineServices
) -> Outcome | EngineError:
    """Run a call, and return how it ended.

    If the tool's service failed, also run the tool's fallback, and store the fallback's answer in
    `call.fallback`. The returned value still describes how the first tool ended. If the caller has
    cancelled the call meanwhile, it is the ending of a cancelled call instead.
    """
    try:
        ending: Outcome | EngineError = await run_approved(approved, call, services)
    except CircuitOpen as refused:
        ending = refused
    error = ending.error if isinstance(ending, Outcome) else ending
    fallback = fallback_of(call, error) if error is not None else None
    if fallback is not None:
        await fall_back(call, fallback, services, _run)
        if call.handle.close():  # the caller cancelled, but the fallback could not be stopped
            call.fallback = None
            return cancelled_ending(call)
    return ending


async def run_approved(
    approved: ApprovedCall, call: CallContext, services: PipelineServices
) -> Outcome:
    """Run a call that has passed the stage `approve` through the stages from `reserve` to
    `execute`. Return the outcome of its execution.
    """
    call.is_approved = True
    await hold_gates(approved, call, services)
    admission = await plan_admission(approved, services)
    call.handle.begin()
    async with admission as admitted:
        call.plan, call.queue_ms = admitted.plan, admitted.lease.queue_ms
        record_intent(call.trace.passed("admit", admitted), call)  # if this fails, nothing runs
        if approved.consent is not None:
            await approved.consent.use(admitted.plan)
        call.begin()
        outcome = await execute(admitted, call=call, services=services, run_call=run_call)
        is_over = outcome.error is None or fallback_of(call, outcome.error) is None
        if (
            is_over and outcome.held is None and call.handle.close()
        ):  # the caller cancelled, but the tool ran to its end
            outcome = Outcome.cancelled(outcome.isolation)
        outcome = call.trace.passed("execute", outcome)
    if outcome.held is None:
        return outcome
    assert services.parts.holding is not None
    return await services.parts.holding.decide(outcome, call, services, run_call)


async def _answer_of_another(
    found: Replay | Waiting, call: CallContext, services: PipelineServices
) -> Envelope:
    """Return the answer to the earlier call that this call repeats. If `found` is `Waiting`, first
    wait for this answer, as long as the options of this call allow.

    Raises:
        RequiresHumanApproval: the earlier call still waits for a decision.
        CallInProgress: the earlier call is still running.
    """
    if isinstance(found, Replay):
        now = timestamp(services.clock.now())
        record_replay(call, found.envelope, services, now)
        return found.envelope
    call.parked_as = found.approval_id
    return await services.asker.wait_for(found.approval_id, call)
