"""Fallback: if a tool's service fails, call the tool's fallback, another tool, once.

Called by `run` after the last attempt. The fallback's call passes the whole pipeline for the same
caller and agent, with the same arguments, and is recorded under its own id. Invariants: there is no
fallback if the first tool may have acted and is not idempotent, if the fallback needs approval, or
if a human approved the call, because the approval is for the first tool only; a fallback's own
fallback is not called; a call whose fallback may have acted is never reported as retryable, unless
repeating it is harmless.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope, ErrorInfo, FallbackReport
from fumehood.core.errors import EngineError, Fault, RequiresHumanApproval
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.context import CallContext, CallTrace, FallbackAnswer
from fumehood.pipeline.retry import is_harmless, is_of_service, is_passing
from fumehood.pipeline.services import PipelineServices
from fumehood.policy.model import Verdict

ID_SUFFIX = "_fallback"
"""Added to the first call's id to make the id of the fallback's call."""


def fallback_of(call: CallContext, error: EngineError) -> str | None:
    """Return the fallback that is called after this error, or None."""
    if call.resolved is None or call.handle.is_cancelled:
        return None
    if call.handle.has_output:  # listeners have already received a part of the first tool's result
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


async def fall_back(
    call: CallContext,
    name: str,
    services: PipelineServices,
    run: Callable[[CallContext, PipelineServices], Awaitable[Envelope]],
) -> None:
    """Call the fallback `name` and store its answer in `call.fallback`. `run` is the pipeline."""
    request = _request(call.request, name)
    trace = CallTrace(name, request.call_id, request.trace_id, services.clock, services.log)
    other = CallContext(request, trace, call.handle.for_fallback())
    other.handle.attach()
    call.trace.tell("call.fallback", fallback=name)
    if not call.has_begun:
        call.release()  # the first tool did not run
    try:
        envelope = await run(other, services)
    finally:
        call.has_begun |= other.has_begun
    tool = other.resolved.tool.definition if other.resolved is not None else None
    acted = other.has_begun and not (tool is not None and tool.idempotent)
    call.fallback = FallbackAnswer(name, envelope, may_have_acted=acted)


def require_no_approval(permitted: PermittedCall) -> None:
    """Raise RequiresHumanApproval: fallbacks never wait for approval or use a remembered rule."""
    if permitted.decision.verdict is Verdict.ASK:
        raise RequiresHumanApproval(
            "The fallback needs approval, and a fallback waits for nobody. It was not called."
        )


def with_fallback(envelope: Envelope, answer: FallbackAnswer) -> Envelope:
    """Return the envelope of a failed call with the fallback's answer.

    If the fallback also failed, the first tool's error stays the answer.
    """
    other, told = answer.envelope, envelope.error
    warnings = tuple(f"fallback: {warning}" for warning in other.metadata.warnings)
    if not other.success:
        code = other.error.code if other.error is not None else ""
        warnings += (f"fallback: {answer.tool} gave no answer ({code})",)
    report = FallbackReport(
        tool=answer.tool,
        tool_version=other.metadata.tool_version,
        call_id=other.metadata.call_id,
        answered=other.success,
        error=_brief(told if other.success else other.error),
        usage=other.metadata.usage,
    )
    metadata = envelope.metadata.model_copy(
        update={
            "fallback": report,
            "warnings": (*envelope.metadata.warnings, *warnings),
            "redacted": envelope.metadata.redacted + other.metadata.redacted,
            "metacognition": other.metadata.metacognition,
        }
    )
    changes: dict[str, object] = {"metadata": metadata}
    if other.success:
        changes |= {"success": True, "status": "success", "data": other.data, "error": None}
    elif told is not None and answer.may_have_acted:
        changes["error"] = told.model_copy(update={"retryable": False, "retry_after_ms": None})
    return envelope.model_copy(update=changes)


def _request(request: CallRequest, name: str) -> CallRequest:
    """Return the same call for another tool, without the idempotency key, which covers both."""
    return replace(
        request,
        tool=name,
        call_id=request.call_id + ID_SUFFIX,
        options=request.options.model_copy(
            update={"idempotency_key": None, "wait_for_approval": None}
        ),
        is_fallback=True,
    )


def _brief(error: ErrorInfo | None) -> ErrorInfo | None:
    return error.model_copy(update={"details": None}) if error is not None else None
