"""Compose: from what became of a call to its envelope. Nothing is recorded here.

Beside the spine, asked once a call has ended, whichever way it went: shape, shorten, account,
and the metadata from the stages that it passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.approvals.edit import edit_warning
from fumehood.approvals.model import ApprovalState, StoredApproval
from fumehood.core.call import CallRequest
from fumehood.core.envelope import (
    Envelope,
    ErrorInfo,
    LimitsApplied,
    Metadata,
    Performance,
    Resources,
    SandboxReport,
)
from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.executors.function import HostFunctionFailed
from fumehood.executors.outcome import Outcome
from fumehood.observe.clock import timestamp
from fumehood.observe.trail import CallTrace
from fumehood.pipeline.admit import AdmittedCall
from fumehood.pipeline.approve import ApprovedCall
from fumehood.pipeline.plan import Plan
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.result import ShapedOutcome, account, shape, shape_error, shorten, shortened
from fumehood.pipeline.services import PipelineServices
from fumehood.pipeline.validate import ValidatedCall, mask_fixed_arguments
from fumehood.protocol import strict_json

HAS_BEGUN = frozenset({ApprovalState.STARTED, ApprovalState.INTERRUPTED})


async def compose(
    request: CallRequest, ending: Outcome | EngineError, trail: CallTrace, rooms: PipelineServices
) -> Envelope:
    """The envelope of one ending. Nothing is recorded."""
    facts = _facts(trail)
    shaped: ShapedOutcome | None = None
    error = ending if isinstance(ending, EngineError) else ending.error
    if isinstance(ending, Outcome):
        if facts.resolved is not None:
            max_bytes = facts.plan.limits.output_bytes if facts.plan is not None else MB
            shaped = shape(ending, facts.resolved.tool, max_bytes)
            shaped = await _shorten(shaped, request, facts.resolved, rooms)
            error = shaped.outcome.error
        if isinstance(error, HostFunctionFailed):
            trail.fault("call.tool_failed", error.cause)
    if facts.validated is not None:
        error = mask_fixed_arguments(error, facts.validated)
    return _envelope(request, facts, shaped, error, trail, rooms)


async def _shorten(
    shaped: ShapedOutcome, request: CallRequest, resolved: ResolvedCall, rooms: PipelineServices
) -> ShapedOutcome:
    """A rehearsal keeps nothing."""
    is_owned = request.principal is not None and not shaped.outcome.is_rehearsal
    return await shorten(
        shaped,
        blobs=rooms.blobs,
        principal_id=request.principal.id if request.principal is not None and is_owned else None,
        with_value=resolved.tool.definition.executor.startswith("code:"),
        with_summary=request.options.return_summary,
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of a call at the stage that it reached."""

    resolved: ResolvedCall | None = None
    validated: ValidatedCall | None = None
    plan: Plan | None = None
    queue_ms: float | None = None
    ran: bool = False
    stored: StoredApproval | None = None
    """Of a call that goes on, or ends, after it has waited for a human."""
    was_carried_out: bool = False
    """Whether it went on with its yes, as far as is known."""


def plan_of(trail: CallTrace) -> Plan | None:
    """Where a call has its place, if it got one."""
    return _facts(trail).plan


def _facts(trail: CallTrace) -> _Facts:
    reached = {type(value): value for value in trail.values}
    resolved = reached.get(ResolvedCall)
    admitted: AdmittedCall | None = reached.get(AdmittedCall)
    stored: StoredApproval | None = reached.get(StoredApproval)
    return _Facts(
        resolved=resolved,
        validated=reached.get(ValidatedCall),
        plan=admitted.plan if admitted is not None else None,
        queue_ms=admitted.lease.queue_ms if admitted is not None else None,
        ran=Outcome in reached and not reached[Outcome].is_rehearsal,
        stored=stored,
        was_carried_out=stored is not None
        and (ApprovedCall in reached or stored.approval.state in HAS_BEGUN),
    )


def _envelope(
    request: CallRequest,
    facts: _Facts,
    shaped: ShapedOutcome | None,
    error: EngineError | None,
    trail: CallTrace,
    rooms: PipelineServices,
) -> Envelope:
    outcome = shaped.outcome if shaped is not None else None
    tool = facts.resolved.tool.definition if facts.resolved is not None else None
    stages_ms = trail.stages_ms()
    usage = account(
        arguments_json=_accounted_arguments(facts),
        data=shaped.data if shaped is not None else {},
        data_json=shaped.text if shaped is not None else "",
        tool=tool,
        outcome=outcome if outcome is not None and not outcome.is_rehearsal else None,
        limits=facts.plan.limits if facts.plan is not None else None,
        processing_s=stages_ms.get("execute", 0.0) / 1e3,
        counter=rooms.counter,
        prices=rooms.prices,
    )
    total_ms = _total_ms(trail, facts.stored, rooms)
    name, version = _tool_names(request, facts)
    return Envelope(
        success=error is None,
        status="success" if error is None else "error",
        data=shaped.data if shaped is not None and error is None else {},
        error=_error_info(error, shaped),
        metadata=Metadata(
            tool_name=name,
            tool_version=version,
            call_id=request.call_id,
            trace_id=request.trace_id,
            timestamp=timestamp(rooms.clock.now()),
            execution_time_ms=total_ms,
            performance=_performance(stages_ms, facts, total_ms),
            sandbox=_sandbox(outcome, facts.plan),
            resources=_resources(outcome),
            usage=usage,
            warnings=_warnings(request, facts, outcome, rooms),
        ),
        debug_info=_debug_info(request, facts, trail, rooms),
    )


def _error_info(error: EngineError | None, shaped: ShapedOutcome | None) -> ErrorInfo | None:
    if error is None:
        return None
    # What was shortened is that of the outcome's own error; another has taken its place.
    is_own = shaped is not None and error is shaped.outcome.error
    return shape_error(error, shaped.details if shaped is not None and is_own else None)


def _accounted_arguments(facts: _Facts) -> str:
    """The arguments as JSON; of a call that was refused before they were checked, nothing."""
    if facts.validated is None:
        return ""
    return strict_json.dumps(facts.validated.shown_arguments).decode()


def _performance(stages_ms: dict[str, float], facts: _Facts, total_ms: float) -> Performance:
    return Performance(
        total_ms=total_ms,
        validation_ms=stages_ms.get("validate"),
        queue_ms=_rounded(facts.queue_ms),
        approval_ms=_waited_ms(facts.stored) or stages_ms.get("approve"),
        processing_ms=stages_ms.get("execute"),
        network_ms=0.0 if facts.ran else None,
    )


def _total_ms(trail: CallTrace, stored: StoredApproval | None, rooms: PipelineServices) -> float:
    """From the call's arrival to its answer; this trail of one that has waited began after that.

    Where the clock was set back meanwhile, at least what was measured of it.
    """
    if stored is None:
        return round(trail.total_ms, 3)
    since_asked = rooms.clock.now() - stored.approval.created_at
    measured_ms = (_waited_ms(stored) or 0.0) + trail.total_ms
    return round(max(since_asked.total_seconds() * 1e3, measured_ms), 3)


def _tool_names(request: CallRequest, facts: _Facts) -> tuple[str, str | None]:
    """Name and version of what was called; where it was not found, what was asked for."""
    if facts.resolved is not None:
        tool = facts.resolved.tool.definition
        return tool.name, tool.version
    if facts.stored is not None:  # it was found when it was asked for
        return facts.stored.approval.tool, facts.stored.approval.tool_version
    return request.tool[:80], None


def _waited_ms(stored: StoredApproval | None) -> float | None:
    """How long the call waited for its human."""
    approval = stored.approval if stored is not None else None
    if approval is None or approval.decided_at is None:
        return None
    return round((approval.decided_at - approval.created_at).total_seconds() * 1e3, 3)


def _sandbox(outcome: Outcome | None, plan: Plan | None) -> SandboxReport | None:
    if outcome is None or plan is None:
        return None
    return SandboxReport(
        placement=plan.placement.kind,
        isolation=outcome.isolation,
        ended_by=outcome.ended_by,
        limits=LimitsApplied(timeout_seconds=plan.limits.wall_s, memory_mb=plan.limits.memory_mb),
    )


def _resources(outcome: Outcome | None) -> Resources:
    if outcome is None or outcome.is_rehearsal:
        return Resources()
    peak = outcome.peak_memory_bytes
    return Resources(
        cpu_ms=_rounded(outcome.cpu_ms),
        peak_memory_mb=None if peak is None else round(peak / MB, 2),
        output_bytes=outcome.output_bytes,
    )


def _warnings(
    request: CallRequest, facts: _Facts, outcome: Outcome | None, rooms: PipelineServices
) -> tuple[str, ...]:
    warnings: tuple[str, ...] = ()
    if facts.validated is not None:
        warnings = facts.validated.warnings
    elif facts.resolved is not None:
        warnings = facts.resolved.warnings
    if facts.plan is not None:
        warnings += facts.plan.warnings
    if outcome is not None:
        warnings += outcome.warnings
    edited = edit_warning(facts.stored) if facts.stored and facts.was_carried_out else None
    if edited is not None:
        warnings += (edited,)
    if request.options.debug and not rooms.allow_debug:
        warnings += ("debug: the engine's configuration does not allow it",)
    return warnings


def _debug_info(
    request: CallRequest, facts: _Facts, trail: CallTrace, rooms: PipelineServices
) -> JsonObject | None:
    if not (request.options.debug and rooms.allow_debug):
        return None
    return {
        "stages_ms": trail.stages_ms(),
        "placement": facts.plan.placement.why if facts.plan is not None else None,
        "limits_enforced": sorted(facts.plan.wall.enforced) if facts.plan is not None else [],
        "arguments": (
            shortened(facts.validated.shown_arguments) if facts.validated is not None else None
        ),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
