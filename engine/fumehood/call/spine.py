"""The spine: the way of one call through all rooms, and the one net under it.

    resolve → validate → authorise → claim → approve → admit → execute
        → shape, shorten → account → record

Each stage takes the previous one's value and returns the next, or raises one `EngineError`.
Nothing reaches back. The answer is always an envelope; a fault of the engine is logged and
hidden, a cancellation is concluded and passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from fumehood.call.account import account
from fumehood.call.admit import AdmittedCall, Plan, admit
from fumehood.call.approve import approve
from fumehood.call.authorise import authorise
from fumehood.call.claim import claim
from fumehood.call.execute import execute
from fumehood.call.record import record_ending, record_intent
from fumehood.call.rehearse import rehearse
from fumehood.call.resolve import ResolvedCall, resolve
from fumehood.call.shape import ShapedOutcome, shape, shape_error
from fumehood.call.shorten import shorten, shortened
from fumehood.call.validate import ValidatedCall, spare_fixed, validate
from fumehood.executors.function import HostFunctionFailed
from fumehood.executors.live import Live
from fumehood.executors.outcome import Outcome, cancelled
from fumehood.model.call import CallRequest
from fumehood.model.envelope import (
    Envelope,
    ErrorInfo,
    LimitsApplied,
    Metadata,
    Performance,
    Resources,
    SandboxReport,
)
from fumehood.model.errors import Cancelled, EngineError, InternalError
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import MB
from fumehood.model.usage import Prices, TokenCounter
from fumehood.observe.clock import Clock, timestamp
from fumehood.observe.log import Logger
from fumehood.observe.trail import Trail
from fumehood.registry.agents import Agents
from fumehood.registry.index import ToolIndex
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.sandbox.wall import Walls
from fumehood.store.blobs import BlobStore
from fumehood.store.calls import CallLog
from fumehood.wire import strict_json
from fumehood.wire.cursors import Cursors


@dataclass(frozen=True, slots=True)
class Rooms:
    """What a call passes through; put together in `engine.py`."""

    registry: ToolIndex
    agents: Agents
    walls: Walls
    clock: Clock
    log: Logger
    counter: TokenCounter
    prices: Prices
    allow_debug: bool
    is_draining: Callable[[], bool]
    calls: CallLog
    blobs: BlobStore
    cursors: Cursors
    sessions: SessionKeeper


async def run_call(request: CallRequest, rooms: Rooms, live: Live | None = None) -> Envelope:
    """Carry one call through every room; the answer is always an envelope.

    `live` hears of it meanwhile, and lets its caller end it.
    """
    live = live if live is not None else Live()
    live.attach()
    trail = Trail(request.tool, request.call_id, request.trace_id, rooms.clock, rooms.log)
    try:
        resolved = trail.passed(
            "resolve", resolve(request, rooms.registry, rooms.agents, rooms.clock.now().date())
        )
        validated = trail.passed("validate", validate(resolved))
        permitted = trail.passed("authorise", authorise(validated))
        if request.options.dry_run:
            return await conclude(
                request,
                trail.passed("rehearse", rehearse(permitted, rooms.walls, rooms.sessions)),
                trail,
                rooms,
            )
        with claim(permitted) as claimed:
            approved = trail.passed("approve", approve(trail.passed("claim", claimed)))
            admission = admit(
                approved, rooms.walls, is_draining=rooms.is_draining(), sessions=rooms.sessions
            )
            live.begin()
            async with admission as admitted:
                record_intent(trail.passed("admit", admitted), trail)  # if this fails, nothing runs
                outcome = await execute(
                    admitted, blobs=rooms.blobs, cursors=rooms.cursors, live=live
                )
                if live.close():  # the tool did not let itself be cancelled, and is over now
                    outcome = Outcome.cancelled(outcome.isolation)
                ending = trail.passed("execute", outcome)
        return await conclude(request, ending, trail, rooms)
    except EngineError as refusal:
        live.close()
        return await conclude(request, refusal, trail, rooms)
    except BaseException as fault:
        if live.close() and isinstance(fault, asyncio.CancelledError):
            return await conclude_cancelled(request, live, trail, rooms)
        return await conclude_fault(request, fault, trail, rooms)


async def conclude(
    request: CallRequest, ending: Outcome | EngineError, trail: Trail, rooms: Rooms
) -> Envelope:
    """Shape, shorten, account and record one ending.

    A refusal is concluded without waiting for anything, also while the call is cancelled.
    """
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
        error = spare_fixed(error, facts.validated)
    envelope = _envelope(request, facts, shaped, error, trail, rooms)
    record_ending(request, envelope, trail, rooms.calls)
    return envelope


async def _shorten(
    shaped: ShapedOutcome, request: CallRequest, resolved: ResolvedCall, rooms: Rooms
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


async def conclude_cancelled(
    request: CallRequest, live: Live, trail: Trail, rooms: Rooms
) -> Envelope:
    """Conclude what its caller has ended, with what is known of the run, if there was one."""
    outcome = live.partial
    plan = _facts(trail).plan
    if outcome is None and plan is not None:
        isolation = "none" if plan.placement.kind == "host" else request.options.isolation or "call"
        outcome = Outcome.cancelled(isolation)
    if outcome is None:
        return await conclude(request, cancelled(), trail, rooms)
    return await conclude(request, trail.passed("execute", outcome), trail, rooms)


async def conclude_fault(
    request: CallRequest, fault: BaseException, trail: Trail, rooms: Rooms
) -> Envelope:
    """Conclude what is no refusal: a bug becomes an answer, a cancellation goes on."""
    if isinstance(fault, Exception):
        trail.fault("call.internal_error", fault)
        error: EngineError = InternalError(
            "The engine failed inside. Its owner finds the reason in the log under this trace id."
        )
        return await conclude(request, error, trail, rooms)
    error = Cancelled("The call was cancelled before it ended.")
    await conclude(request, error, trail, rooms)
    raise fault


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of a call at the stage that it reached."""

    resolved: ResolvedCall | None = None
    validated: ValidatedCall | None = None
    plan: Plan | None = None
    queue_ms: float | None = None
    ran: bool = False


def _facts(trail: Trail) -> _Facts:
    reached = {type(value): value for value in trail.values}
    resolved = reached.get(ResolvedCall)
    admitted: AdmittedCall | None = reached.get(AdmittedCall)
    return _Facts(
        resolved=resolved,
        validated=reached.get(ValidatedCall),
        plan=admitted.plan if admitted is not None else None,
        queue_ms=admitted.lease.queue_ms if admitted is not None else None,
        ran=Outcome in reached and not reached[Outcome].is_rehearsal,
    )


def _envelope(
    request: CallRequest,
    facts: _Facts,
    shaped: ShapedOutcome | None,
    error: EngineError | None,
    trail: Trail,
    rooms: Rooms,
) -> Envelope:
    outcome = shaped.outcome if shaped is not None else None
    tool = facts.resolved.tool.definition if facts.resolved is not None else None
    stages_ms = trail.stages_ms()
    usage = account(
        arguments_json=_accounted_arguments(facts),
        data_json=shaped.text if shaped is not None else "",
        tool=tool,
        outcome=outcome if outcome is not None and not outcome.is_rehearsal else None,
        limits=facts.plan.limits if facts.plan is not None else None,
        processing_s=stages_ms.get("execute", 0.0) / 1e3,
        counter=rooms.counter,
        prices=rooms.prices,
    )
    total_ms = round(trail.total_ms, 3)
    return Envelope(
        success=error is None,
        status="success" if error is None else "error",
        data=shaped.data if shaped is not None and error is None else {},
        error=_error_info(error, shaped),
        metadata=Metadata(
            tool_name=tool.name if tool is not None else request.tool[:80],
            tool_version=tool.version if tool is not None else None,
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
        approval_ms=stages_ms.get("approve"),
        processing_ms=stages_ms.get("execute"),
        network_ms=0.0 if facts.ran else None,
    )


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
    request: CallRequest, facts: _Facts, outcome: Outcome | None, rooms: Rooms
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
    if request.options.debug and not rooms.allow_debug:
        warnings += ("debug: the engine's configuration does not allow it",)
    return warnings


def _debug_info(
    request: CallRequest, facts: _Facts, trail: Trail, rooms: Rooms
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
