"""Lost calls: followed calls that the engine's end cut short, and the answer that ends each.

Host side. After a crash the next engine looks, in this order, at the call's approval, at the answer
that its idempotency key keeps, and at the call log. Invariant: the answer is never better than what
a repeat of the call with its key would get; a call that may have acted is `OUTCOME_UNKNOWN`, unless
its tool may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fumehood.core.call import CallOptions, CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    EngineError,
    OutcomeUnknown,
    ResourceNotFound,
    SandboxUnavailable,
    ToolNotFound,
)
from fumehood.core.identity import Principal
from fumehood.executors.handle import CallHandle
from fumehood.pipeline.approve import waits
from fumehood.pipeline.build_envelope import build_envelope
from fumehood.pipeline.context import CallContext, CallTrace
from fumehood.pipeline.record import record_ending
from fumehood.pipeline.services import PipelineServices
from fumehood.protocol.messages import decode_envelope
from fumehood.storage.errors import StoreError
from fumehood.storage.recordings import RecordedCall

T = TypeVar("T")


async def lost_answer(
    call: RecordedCall, services: PipelineServices, made: Callable[[Envelope], T]
) -> T:
    """The answer of a call that ran when the engine before ended, made into something."""
    # Only to name the caller in the log: it has no rights.
    principal = Principal(call.principal_id, frozenset(), frozenset())
    request = CallRequest(call.tool, {}, CallOptions(), principal, call.call_id, call.trace_id)
    try:
        found = await _of_approval(call, services) or await _of_key(call, services)
        code = await _logged(call, services)
    except (StoreError, ValueError):  # or another version of the engine wrote the answer
        found, code = None, None
    if isinstance(found, Envelope):
        return made(found)
    error = found if found is not None else _lost(call, code, services)
    context = _context(request, services)
    envelope = await build_envelope(context, error, services)
    if found is None and code is None:  # an approval's end is recorded with it
        record_ending(context, envelope, services)
    return made(envelope)


async def answer_of_unrun(
    request: CallRequest, error: EngineError, services: PipelineServices
) -> Envelope:
    """The answer of a call of which nothing is known but the error."""
    return await build_envelope(_context(request, services), error, services)


async def _of_approval(
    call: RecordedCall, services: PipelineServices
) -> Envelope | EngineError | None:
    """The answer, or the state, of a call that had to wait for a human."""
    stored = await services.approvals.table.of_call(call.call_id)
    if stored is None or stored.approval.principal_id != call.principal_id:
        return None
    if stored.answer is None:
        return waits(stored.approval, services.approvals)
    return decode_envelope(stored.answer.encode())


async def _of_key(call: RecordedCall, services: PipelineServices) -> Envelope | None:
    """The answer that was stored for repeats before the engine ended."""
    answer = await services.keys.answer_of(call.principal_id, call.call_id)
    return None if answer is None else decode_envelope(answer.encode())


async def _logged(call: RecordedCall, services: PipelineServices) -> str | None:
    """How the call ended by the call log, which has no answers."""
    try:
        return (await services.calls.get(call.principal_id, call.call_id)).code
    except ResourceNotFound:
        return None


def _lost(call: RecordedCall, code: str | None, services: PipelineServices) -> EngineError:
    if code is not None:
        return OutcomeUnknown(
            f"The call ended with {code}, but the engine ended before its answer was kept. Do not "
            "retry; a human must check what it did.",
            details={"logged_code": code},
        )
    if _may_repeat(call, services):
        return SandboxUnavailable(
            "The engine ended while the call ran. Its tool may be repeated: make the call again."
        )
    return OutcomeUnknown(
        "The engine ended while the call ran. It may have taken effect. Do not retry; a human must "
        "check whether it did."
    )


def _may_repeat(call: RecordedCall, services: PipelineServices) -> bool:
    """Whether acting twice does no harm, as for idempotency keys."""
    try:
        tool = services.registry.get(call.tool).definition
    except ToolNotFound:
        return False
    return tool.idempotent or tool.read_only


def _context(request: CallRequest, services: PipelineServices) -> CallContext:
    name = request.tool.partition("@")[0]
    trace = CallTrace(name, request.call_id, request.trace_id, services.clock, services.log)
    return CallContext(request, trace, CallHandle())
