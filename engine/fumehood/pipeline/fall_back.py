"""Fall back: call another tool once, because the service of the first tool failed.

The fallback's call passes through the whole pipeline. It has its own id, but the same caller, agent
and arguments. The fallback is not called in three cases: the first tool may have acted and is not
idempotent; the fallback needs approval; or a human approved the call, because that approval is for
the first tool only. A call whose fallback may have acted is never reported as retryable, unless
repeating the call is harmless.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from fumehood.core.envelope import Envelope
from fumehood.core.errors import EngineError, Fault
from fumehood.pipeline.context import (
    FALLBACK_SUFFIX,
    CallContext,
    CallTrace,
    FallbackAnswer,
    PipelineServices,
)
from fumehood.pipeline.retry import is_harmless, is_of_service, is_passing

Run = Callable[[CallContext, PipelineServices], Awaitable[Envelope]]
"""Runs the call of a context through the whole pipeline, and returns its envelope."""


def fallback_of(call: CallContext, error: EngineError) -> str | None:
    """Return the name of the fallback tool to call after this error, or None if no fallback is
    called.
    """
    # After output, listeners have already received a part of the first tool's result.
    if call.resolved is None or call.handle.is_cancelled or call.handle.has_output:
        return None
    tool = call.resolved.tool.definition
    is_called = (
        not call.request.is_fallback
        and call.asked is None
        and is_of_service(tool)
        and (is_passing(error) or error.fault is Fault.UPSTREAM)
        and is_harmless(tool, error)
    )
    return tool.fallback if is_called else None


async def fall_back(call: CallContext, name: str, services: PipelineServices, run: Run) -> None:
    """Call the fallback `name` and store its answer in `call.fallback`."""
    # The first tool's call holds the idempotency key for both calls.
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
    other.handle.attach(services.redactor.line)
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
