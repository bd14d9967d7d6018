"""Build the envelope of a call that has ended, whether it ran, failed or was refused.

It shapes and shortens the data, computes the usage, and fills the metadata from the call's context.
It records nothing.
"""

from __future__ import annotations

import copy

from fumehood.approvals.model import ApprovalState, StoredApproval
from fumehood.approvals.preview import edit_warning
from fumehood.core.call import CallRequest, CheckedResult
from fumehood.core.envelope import (
    CacheReport,
    Envelope,
    ErrorInfo,
    LimitsApplied,
    Metadata,
    Performance,
    ReceiptLink,
    Resources,
    SandboxReport,
)
from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.executors.function import HostFunctionFailed
from fumehood.executors.outcome import Outcome
from fumehood.observe.clock import timestamp
from fumehood.pipeline.check_result import CheckedData, ResultCheckers
from fumehood.pipeline.child_calls import MAX_RESULT_BYTES
from fumehood.pipeline.context import CallContext
from fumehood.pipeline.fallback import with_fallback
from fumehood.pipeline.plan import Plan
from fumehood.pipeline.receipt import keep_receipt
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.result import (
    ShapedOutcome,
    account,
    redact_error,
    shape,
    shape_error,
    shorten,
    shortened,
)
from fumehood.pipeline.services import PipelineServices
from fumehood.pipeline.validate import mask_fixed_arguments
from fumehood.protocol import strict_json

NOT_CHECKED = CheckedData()
"""The result of checkers if none ran."""

HAS_BEGUN = frozenset({ApprovalState.STARTED, ApprovalState.INTERRUPTED})
"""States of an approval whose call has started."""


async def build_envelope(
    call: CallContext, ending: Outcome | EngineError, services: PipelineServices
) -> Envelope:
    """Build the envelope of a call from its outcome or the error that refused it."""
    shaped: ShapedOutcome | None = None
    error = ending if isinstance(ending, EngineError) else ending.error
    redacted, link = 0, None
    if isinstance(ending, EngineError):
        redacted = redact_error(ending, services.redactor)
    else:
        if call.resolved is not None:
            max_bytes = call.plan.limits.output_bytes if call.plan is not None else MB
            shaped = shape(ending, call.resolved.tool, max_bytes, services.redactor)
            link = await keep_receipt(call, shaped, services)
            shaped = await _shorten(shaped, call.request, call.resolved, services)
            error = shaped.outcome.error
        if isinstance(error, HostFunctionFailed):
            call.trace.fault("call.tool_failed", error.cause)
    if call.validated is not None:
        error = mask_fixed_arguments(error, call.validated)
    if shaped is not None:
        redacted = shaped.outcome.redacted
    checked = NOT_CHECKED
    if services.checkers is not None and shaped is not None and error is None:
        checked = await _check(call, shaped, services.checkers)
    envelope = _envelope(call, shaped, error, services, redacted, checked, link)
    return with_fallback(envelope, call.fallback) if call.fallback is not None else envelope


async def _check(call: CallContext, shaped: ShapedOutcome, checkers: ResultCheckers) -> CheckedData:
    """Run the result checkers, except on the data of a dry run."""
    request, validated = call.request, call.validated
    if shaped.outcome.is_dry_run or validated is None:
        return NOT_CHECKED
    result = CheckedResult(
        tool=validated.tool.definition.name,
        arguments=copy.deepcopy(validated.shown_arguments),
        data=copy.deepcopy(shaped.data),
        principal=request.principal.id if request.principal is not None else None,
        agent_id=request.options.agent_id,
        session_id=request.options.session_id,
        trace_id=request.trace_id,
    )
    return await checkers.check(result)


async def _shorten(
    shaped: ShapedOutcome,
    request: CallRequest,
    resolved: ResolvedCall,
    services: PipelineServices,
) -> ShapedOutcome:
    """Shorten long texts. Dry runs store no blobs, and calls of programs get longer texts."""
    is_whole = len(shaped.text) <= MAX_RESULT_BYTES and not shaped.outcome.cuts
    if request.parent_id is not None and is_whole:
        return shaped
    is_owned = request.principal is not None and not shaped.outcome.is_dry_run
    return await shorten(
        shaped,
        blobs=services.blobs,
        principal_id=request.principal.id if request.principal is not None and is_owned else None,
        session_id=request.options.session_id,
        with_value=resolved.tool.definition.executor.startswith("code:"),
        with_summary=request.options.return_summary,
        max_length=request.options.max_length,
    )


def _envelope(
    call: CallContext,
    shaped: ShapedOutcome | None,
    error: EngineError | None,
    services: PipelineServices,
    redacted: int,
    checked: CheckedData,
    receipt: ReceiptLink | None,
) -> Envelope:
    request = call.request
    outcome = shaped.outcome if shaped is not None else None
    tool = call.resolved.tool.definition if call.resolved is not None else None
    stages_ms = call.trace.stages_ms()
    usage = account(
        arguments_json=_accounted_arguments(call),
        data=shaped.data if shaped is not None else {},
        data_json=shaped.text if shaped is not None else "",
        tool=tool,
        outcome=outcome if outcome is not None and not outcome.is_dry_run else None,
        limits=call.plan.limits if call.plan is not None else None,
        processing_s=stages_ms.get("execute", 0.0) / 1e3,
        counter=services.counter,
        prices=services.prices,
    )
    total_ms = _total_ms(call, services)
    name, version = _tool_names(call)
    return Envelope(
        success=error is None,
        status="success" if error is None else "error",
        data=shaped.data if shaped is not None and error is None else {},
        error=_error_info(error, shaped, call.attempts.max_retries),
        metadata=Metadata(
            tool_name=name,
            tool_version=version,
            call_id=request.call_id,
            trace_id=request.trace_id,
            timestamp=timestamp(services.clock.now()),
            execution_time_ms=total_ms,
            performance=_performance(stages_ms, call, total_ms, outcome),
            sandbox=_sandbox(outcome, call.plan),
            resources=_resources(outcome),
            usage=usage,
            retry_count=call.attempts.retry_count,
            warnings=_warnings(call, outcome, services) + checked.warnings,
            redacted=redacted,
            metacognition=checked.metacognition,
            cache=CacheReport(hit=False) if call.flight is not None else None,
            receipt=receipt,
        ),
        debug_info=_debug_info(call, services),
    )


def _error_info(
    error: EngineError | None, shaped: ShapedOutcome | None, max_retries: int | None
) -> ErrorInfo | None:
    if error is None:
        return None
    # `shaped.details` are the shortened details of the outcome's own error, not of another error
    # that has replaced it.
    is_own = shaped is not None and error is shaped.outcome.error
    told = shape_error(error, shaped.details if shaped is not None and is_own else None)
    return told.model_copy(update={"max_retries": max_retries}) if max_retries else told


def _accounted_arguments(call: CallContext) -> str:
    """Return the arguments as JSON, or an empty text if they were not validated."""
    if call.validated is None:
        return ""
    return strict_json.dumps(call.validated.shown_arguments).decode()


def _performance(
    stages_ms: dict[str, float], call: CallContext, total_ms: float, outcome: Outcome | None
) -> Performance:
    return Performance(
        total_ms=total_ms,
        validation_ms=stages_ms.get("validate"),
        queue_ms=_rounded(call.queue_ms),
        approval_ms=_waited_ms(call.approval) or stages_ms.get("approve"),
        processing_ms=stages_ms.get("execute"),
        network_ms=_network_ms(stages_ms, outcome),
    )


def _network_ms(stages_ms: dict[str, float], outcome: Outcome | None) -> float | None:
    if "execute" not in stages_ms:
        return None
    return 0.0 if outcome is None else round(outcome.network_ms, 3)


def _total_ms(call: CallContext, services: PipelineServices) -> float:
    """Return milliseconds from the call's arrival to its answer, including the wait for approval.

    The result is never less than the measured time, even if the clock was set back meanwhile.
    """
    if call.approval is None:
        return round(call.trace.total_ms, 3)
    since_asked = services.clock.now() - call.approval.approval.created_at
    measured_ms = (_waited_ms(call.approval) or 0.0) + call.trace.total_ms
    return round(max(since_asked.total_seconds() * 1e3, measured_ms), 3)


def _tool_names(call: CallContext) -> tuple[str, str | None]:
    """Return the tool's name and version. For an unknown tool, return the requested name."""
    if call.resolved is not None:
        tool = call.resolved.tool.definition
        return tool.name, tool.version
    if call.approval is not None:  # it existed when the approval was requested
        return call.approval.approval.tool, call.approval.approval.tool_version
    return call.request.tool[:80], None


def _waited_ms(stored: StoredApproval | None) -> float | None:
    """Return the milliseconds that the call waited for a human's decision, or None."""
    approval = stored.approval if stored is not None else None
    if approval is None or approval.decided_at is None:
        return None
    return round((approval.decided_at - approval.created_at).total_seconds() * 1e3, 3)


def _sandbox(outcome: Outcome | None, plan: Plan | None) -> SandboxReport | None:
    if outcome is None or plan is None or plan.placement.is_outside:
        return None
    return SandboxReport(
        placement=plan.placement.kind,
        isolation=outcome.isolation,
        ended_by=outcome.ended_by,
        limits=LimitsApplied(timeout_seconds=plan.limits.wall_s, memory_mb=plan.limits.memory_mb),
        node=outcome.node,
        network=outcome.network,
    )


def _resources(outcome: Outcome | None) -> Resources:
    if outcome is None or outcome.is_dry_run:
        return Resources()
    peak = outcome.peak_memory_bytes
    return Resources(
        cpu_ms=_rounded(outcome.cpu_ms),
        peak_memory_mb=None if peak is None else round(peak / MB, 2),
        output_bytes=outcome.output_bytes,
    )


def _warnings(
    call: CallContext, outcome: Outcome | None, services: PipelineServices
) -> tuple[str, ...]:
    warnings: tuple[str, ...] = ()
    if call.validated is not None:
        warnings = call.validated.warnings
    elif call.resolved is not None:
        warnings = call.resolved.warnings
    if call.plan is not None:
        warnings += call.plan.warnings
    if outcome is not None:
        warnings += outcome.warnings
    if call.attempts.warning is not None:
        warnings += (call.attempts.warning,)
    edited = edit_warning(call.approval) if call.approval and _has_run(call) else None
    if edited is not None:
        warnings += (edited,)
    if call.request.options.debug and not services.allow_debug:
        warnings += ("debug: the engine's configuration does not allow it",)
    return warnings


def _has_run(call: CallContext) -> bool:
    """Whether an approved call is known to have run."""
    approval = call.approval
    return approval is not None and (call.is_approved or approval.approval.state in HAS_BEGUN)


def _debug_info(call: CallContext, services: PipelineServices) -> JsonObject | None:
    if not (call.request.options.debug and services.allow_debug):
        return None
    return {
        "stages_ms": call.trace.stages_ms(),
        "placement": call.plan.placement.why if call.plan is not None else None,
        "limits_enforced": sorted(call.plan.wall.status.enforced) if call.plan is not None else [],
        "arguments": (
            shortened(call.validated.shown_arguments) if call.validated is not None else None
        ),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
