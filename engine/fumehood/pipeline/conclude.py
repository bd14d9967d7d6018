"""Conclude: every call ends here, with exactly one envelope.

If the engine itself fails, the cause is logged and hidden from the caller. If the call's task is
cancelled, the end of the call is recorded before the cancellation takes effect.
"""

from __future__ import annotations

import anyio

from fumehood.core.envelope import Envelope
from fumehood.core.errors import Cancelled, EngineError, InternalError
from fumehood.executors.outcome import Outcome, cancelled
from fumehood.pipeline.context import CallContext, PipelineServices
from fumehood.pipeline.record import make_long_record, record_ending
from fumehood.pipeline.result import build_envelope

CONCLUDE_S = 5.0
"""Maximum seconds for storing the end of a call whose task was cancelled."""


async def conclude(
    call: CallContext, ending: Outcome | EngineError, services: PipelineServices
) -> Envelope:
    """Build and return the call's envelope, settle what gates have reserved for the call, and
    record the call's end.

    If the call has an idempotency key, this function waits until the answer is on disk.
    """
    envelope = await call.settle(await build_envelope(call, ending, services))
    try:
        await make_long_record(call, envelope, services)
    finally:
        record_ending(call, envelope, services)
    return envelope


def cancelled_ending(call: CallContext) -> Outcome | EngineError:
    """Return the ending of a call that its caller cancelled, with the partial outcome if there is
    one.
    """
    outcome, plan = call.handle.partial, call.plan
    if outcome is None and plan is not None:
        isolation = call.request.options.isolation or "call"
        outcome = Outcome.cancelled("none" if plan.placement.wall == "host" else isolation)
    return cancelled() if outcome is None else call.trace.passed("execute", outcome)


async def conclude_fault(
    call: CallContext, fault: BaseException, services: PipelineServices
) -> Envelope:
    """Conclude a call that ended with an unexpected exception, or whose task was cancelled.

    If `fault` is an exception, return an envelope with an `InternalError`. If it is a cancellation,
    record the cancellation and raise it again.
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
