"""Record: log a call before it runs, and record how it ended.

Last stage, in two halves: one before `execute` and one after. The end of a call is reported to the
log, to the subscribers and, if the call has a principal, to the call log. Argument values are
recorded only in the log, at the level `debug`.
"""

from __future__ import annotations

import asyncio
from functools import partial

import anyio
import anyio.to_thread

from fumehood.core.call import MAX_TOOL_CHARACTERS, CallRequest
from fumehood.core.envelope import Envelope, Metadata, Resources, UsageReport
from fumehood.core.errors import NO_FAULT
from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import is_long
from fumehood.observe.ended_call import UNKNOWN, EndedCall, EndedStage, EndedTrace
from fumehood.observe.trace_context import context_of, span_id_of
from fumehood.pipeline.context import FALLBACK_SUFFIX, CallContext, PipelineServices
from fumehood.pipeline.execute import AdmittedCall
from fumehood.protocol.messages import encode_envelope
from fumehood.storage.calls import APPROVAL_WAIT, CallRow, Record, texts_in


def record_intent(admitted: AdmittedCall, call: CallContext) -> None:
    """Log, at the level `debug`, that the call is about to run, with its place, limits and
    arguments. If logging fails, the exception is not caught here, and the tool must not run.
    """
    placement, limits = admitted.plan.placement, admitted.plan.limits
    call.trace.note(
        "call.intent",
        placement=placement.kind,
        timeout_s=None if placement.is_outside else limits.wall_s,
        memory_mb=None if placement.is_outside else limits.memory_mb,
        arguments=admitted.permitted.arguments,
    )


def record_ending(call: CallContext, envelope: Envelope, services: PipelineServices) -> None:
    """Record the end of a call that ran or was refused, with the time of each stage.

    The recording runs in the next turn of the event loop, so that it does not delay the answer. Dry
    runs, and calls that still wait for a human, are recorded in the log only.
    """
    asyncio.get_running_loop().call_soon(_write_down, call, envelope, services)


async def make_long_record(
    call: CallContext, envelope: Envelope, services: PipelineServices
) -> None:
    """If the call's arguments or answer are long, make the call's record now, in a thread. If this
    function is cancelled, the call gets no record.
    """
    error = envelope.error
    answered = envelope.data if error is None else error.details
    is_kept = services.stores.calls.keeps_record_of(error.code if error is not None else "OK")
    if is_kept and (is_long(_given(call)) or is_long(answered)):
        call.has_record = True
        with anyio.CancelScope(shield=True):
            call.record = await anyio.to_thread.run_sync(_record, call, envelope, services)


def _write_down(call: CallContext, envelope: Envelope, services: PipelineServices) -> None:
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
    if call.parked_as is not None or request.options.dry_run:
        return
    _observe(call, metadata, code, services)
    if request.principal is not None:
        row = _row(request, request.principal.id, envelope, code, ended_by)
        waited_s = _waited_s(call, services)
        waited = {APPROVAL_WAIT: round(waited_s * 1e3, 3)} if waited_s is not None else {}
        row["stages"] = waited | call.trace.stages_ms()
        if metadata.sandbox is not None and metadata.sandbox.network is not None:
            row["network"] = metadata.sandbox.network.model_dump()
        if services.stores.calls.keeps_record_of(code):
            made = call.record if call.has_record else _record(call, envelope, services)
            row["record"] = made
        services.stores.calls.record(row)


def record_replay(
    call: CallContext, envelope: Envelope, services: PipelineServices, timestamp: str
) -> None:
    """Record a call whose caller received the stored answer to an earlier call. `timestamp` is the
    time of this call.

    The call log gets a separate entry for this call, with no resources and no cost.
    """
    request = call.request
    code = envelope.error.code if envelope.error is not None else "OK"
    total_ms = round(call.trace.total_ms, 3)
    call.trace.conclude(
        "call.replayed", code=code, first_call_id=envelope.metadata.call_id, total_ms=total_ms
    )
    usage = UsageReport(currency=envelope.metadata.usage.currency)
    metadata = envelope.metadata.model_copy(
        update={
            "retry_count": 0,
            "sandbox": None,
            "timestamp": timestamp,
            "execution_time_ms": total_ms,
            "resources": Resources(),
            "usage": usage,
        }
    )
    again = envelope.model_copy(update={"metadata": metadata})
    _observe(call, metadata, code, services)
    if request.principal is not None:
        services.stores.calls.record(_row(request, request.principal.id, again, code, None))


def _observe(call: CallContext, metadata: Metadata, code: str, services: PipelineServices) -> None:
    """Report an ended call to the subscribers."""
    if not services.parts.subscribers.take_calls:
        return
    tool = metadata.tool_name if call.resolved is not None or call.asked is not None else None
    waited_s = _waited_s(call, services)
    ended = EndedCall(
        tool,
        code,
        duration_s=max(0.0, metadata.execution_time_ms / 1e3 - (waited_s or 0.0)),
        is_fault=code not in NO_FAULT,
        retries=metadata.retry_count,
        ended_by=metadata.sandbox.ended_by.value if metadata.sandbox is not None else None,
        approval_s=waited_s,
        network=metadata.sandbox.network if metadata.sandbox is not None else None,
        trace=partial(_trace, call, metadata, code, tool or UNKNOWN, services),
    )
    services.parts.subscribers.ended(ended)


def _waited_s(call: CallContext, services: PipelineServices) -> float | None:
    """Return how many seconds the call waited for a human, or None if it did not wait."""
    if call.asked is None:
        return None
    # Without a decision, the wait ends now, together with the call.
    waited = (call.asked.decided_at or services.clock.now()) - call.asked.at
    return max(0.0, waited.total_seconds())


def _trace(
    call: CallContext, metadata: Metadata, code: str, tool: str, services: PipelineServices
) -> EndedTrace:
    """Return the data for a call's trace spans.

    If a program made the call, the call's span is a child of the span of the program's own call.
    """
    request, now = call.request, services.clock.now().timestamp()
    stages = [
        EndedStage(name, now + began, now + ended, _placement(metadata, name))
        for name, began, ended in call.trace.stages()
        if name != "approve"  # the stage itself takes no time; the wait for a human is added below
    ]
    if (asked := call.asked) is not None:
        decided = asked.decided_at.timestamp() if asked.decided_at is not None else now
        began = min(asked.at.timestamp(), stages[0].began)
        stages.insert(0, EndedStage(APPROVAL_WAIT, began, max(began, decided)))
    parent, parent_span = request.traceparent, None
    if request.is_fallback:
        parent_span = span_id_of(request.call_id.removesuffix(FALLBACK_SUFFIX))
    elif request.parent_id is not None:
        parent_span = span_id_of(request.parent_id)
    elif parent is not None:
        parent_span = parent.span_id
    return EndedTrace(
        tool=tool,
        call_id=request.call_id,
        span=context_of(request.trace_id, request.call_id, parent),
        parent_span=parent_span,
        code=code,
        attributes={
            "fumehood.trace_id": request.trace_id,
            **({"fumehood.retries": metadata.retry_count} if metadata.retry_count else {}),
            **({"fumehood.cache_hit": True} if metadata.cache and metadata.cache.hit else {}),
        },
        stages=stages,
    )


def _placement(metadata: Metadata, stage: str) -> dict[str, str] | None:
    """Return the attributes of the stage `execute` that describe where the tool ran. Return None
    for other stages.
    """
    sandbox = metadata.sandbox
    if stage != "execute" or sandbox is None:
        return None
    return {
        "fumehood.sandbox.placement": sandbox.placement,
        "fumehood.sandbox.isolation": sandbox.isolation,
        "fumehood.sandbox.ended_by": sandbox.ended_by.value,
    }


def _record(call: CallContext, envelope: Envelope, services: PipelineServices) -> Record | None:
    """Return the record of the call's arguments and answer, or None if these are too long."""
    given = _given(call)
    texts = texts_in(given)
    if not services.redactor.is_clean(texts):
        given = services.redactor.value(given)[0]
        texts = texts_in(given)
    error = envelope.error
    texts += texts_in(envelope.data if error is None else error.details)
    if error is not None:
        texts += (error.code, error.message)
    return Record.of(given, encode_envelope(envelope), texts)


def _given(call: CallContext) -> JsonObject:
    return call.validated.shown_arguments if call.validated else call.request.arguments


def _row(
    request: CallRequest, principal_id: str, envelope: Envelope, code: str, ended_by: str | None
) -> CallRow:
    metadata, options = envelope.metadata, request.options
    tool, version = metadata.tool_name, metadata.tool_version
    if version is None:  # the tool was not found, so the requested name and version are logged
        tool, _, version = request.tool.replace("\0", "\ufffd").partition("@")
        version = version[:MAX_TOOL_CHARACTERS] or None
    usage = metadata.usage
    return {
        "id": request.call_id,
        "at": metadata.timestamp,
        "principal_id": principal_id,
        "agent_id": options.agent_id,
        "session_id": options.session_id,
        "trace_id": request.trace_id,
        "tool": (tool or "")[:MAX_TOOL_CHARACTERS],
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
