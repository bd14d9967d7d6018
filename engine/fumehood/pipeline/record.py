"""Record: leave a trace before anything runs, and of how it ended.

Last stage, in two halves around `execute`. The ending goes to the log and, where somebody is
known to have asked, into the call log. Argument values appear in the log at the level `debug`
and nowhere else.
"""

from __future__ import annotations

from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope, Resources, UsageReport
from fumehood.pipeline.admit import AdmittedCall
from fumehood.pipeline.context import CallContext
from fumehood.storage.calls import CallLog, CallRow

MAX_NAME_CHARACTERS = 140
"""Of a name or a version that may be no tool's."""


def record_intent(admitted: AdmittedCall, call: CallContext) -> None:
    """Say what is about to run. If this fails, nothing runs."""
    call.trace.note(
        "call.intent",
        placement=admitted.plan.placement.kind,
        timeout_s=admitted.plan.limits.wall_s,
        memory_mb=admitted.plan.limits.memory_mb,
        arguments=admitted.permitted.arguments,
    )


def record_ending(call: CallContext, envelope: Envelope, calls: CallLog) -> None:
    """Record an ending with the time that each stage took; also that of a refused call.

    Dry runs, calls without a principal, and calls that still wait for a human are in the log
    only.
    """
    request = call.request
    metadata = envelope.metadata
    code = envelope.error.code if envelope.error is not None else "OK"
    ended_by = metadata.sandbox.ended_by.value if metadata.sandbox is not None else None
    call.trace.conclude(
        "call.ended",
        tool_version=metadata.tool_version,
        code=code,
        ended_by=ended_by,
        total_ms=metadata.execution_time_ms,
        cpu_ms=metadata.resources.cpu_ms,
        cost=metadata.usage.cost,
        **({"cache_hit": metadata.cache.hit} if metadata.cache is not None else {}),
        **({"parent_id": request.parent_id} if request.parent_id is not None else {}),
    )
    is_over = not call.is_parked
    if is_over and request.principal is not None and not request.options.dry_run:
        row = _row(request, request.principal.id, envelope, code, ended_by)
        row["stages"] = call.trace.stages_ms()
        calls.record(row)


def record_replay(call: CallContext, envelope: Envelope, calls: CallLog, timestamp: str) -> None:
    """Record a call that was answered with the stored answer of an earlier one.

    It is a call of its own in the log, which ran nothing and cost nothing.
    """
    request = call.request
    code = envelope.error.code if envelope.error is not None else "OK"
    total_ms = round(call.trace.total_ms, 3)
    call.trace.conclude(
        "call.replayed", code=code, first_call_id=envelope.metadata.call_id, total_ms=total_ms
    )
    if request.principal is None:
        return
    usage = UsageReport(currency=envelope.metadata.usage.currency)
    metadata = envelope.metadata.model_copy(
        update={
            "timestamp": timestamp,
            "execution_time_ms": total_ms,
            "resources": Resources(),
            "usage": usage,
        }
    )
    again = envelope.model_copy(update={"metadata": metadata})
    calls.record(_row(request, request.principal.id, again, code, None))


def _row(
    request: CallRequest, principal_id: str, envelope: Envelope, code: str, ended_by: str | None
) -> CallRow:
    metadata, options = envelope.metadata, request.options
    tool, version = metadata.tool_name, metadata.tool_version
    if version is None:  # nothing was found under what was asked for
        tool, _, version = request.tool.partition("@")
        version = version[:MAX_NAME_CHARACTERS] or None
    usage = metadata.usage
    return {
        "id": request.call_id,
        "at": metadata.timestamp,
        "principal_id": principal_id,
        "agent_id": options.agent_id,
        "session_id": options.session_id,
        "trace_id": request.trace_id,
        "tool": (tool or "")[:MAX_NAME_CHARACTERS],
        "version": version,
        "code": code,
        "ended_by": ended_by,
        "total_ms": metadata.execution_time_ms,
        "cpu_ms": metadata.resources.cpu_ms,
        "cost": usage.cost,
        "currency": usage.currency,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "tokens_used": usage.tokens_used,
        "cache_hit": True if metadata.cache is not None and metadata.cache.hit else None,
        "parent_id": request.parent_id,
    }
