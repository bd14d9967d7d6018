"""Pass a call through the gates (`gate.py`). A gate can answer or refuse the call, or reserve what
the call needs.

Invariant: the gates are called in order, and the first refusal ends the call. A call can be
answered with the result of an identical call only if the policy allows the call without approval.
"""

from __future__ import annotations

from functools import lru_cache

from pydantic_core import from_json

from fumehood.core.call import replaced
from fumehood.core.envelope import Envelope, Metadata, Performance, Resources, UsageReport
from fumehood.observe.clock import timestamp
from fumehood.pipeline.approve import ApprovedCall
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.context import CallContext, PipelineServices
from fumehood.pipeline.gate import Gate, KnownAnswer
from fumehood.pipeline.plan import make_plan
from fumehood.policy.model import Decision, Verdict


async def answer_of_gates(
    permitted: PermittedCall, call: CallContext, services: PipelineServices
) -> Envelope | None:
    """Return an envelope with the result of an identical call, or None if this call must run.

    Raises:
        EngineError: a gate refuses the call.
    """
    if permitted.decision.verdict is not Verdict.ALLOW or permitted.request.held is not None:
        return None

    def limit_s() -> float:
        return make_plan(permitted, services.walls, services.sessions).limits.wall_s

    for gate in services.parts.gates:
        found = await gate.answer(permitted, limit_s)
        if isinstance(found, KnownAnswer):
            call.handle.close()
            call.release()
            return _envelope(found, permitted, call, services)
        if found is not None:
            call.holds.append((gate, found))
    return None


def refuses(gate: Gate, decision: Decision) -> bool:
    """Return whether a gate refuses a call even if a human approves the call. `decision` is the
    policy's decision on the call.

    The caller must know that the gate refuses the call without approval.
    """
    return gate.key not in decision.may_exceed


def refuse_early(permitted: PermittedCall, services: PipelineServices) -> None:
    """Refuse a call now, before approval is requested, if a gate would refuse it even with
    approval.

    Raises:
        EngineError: a gate refuses the call.
    """
    if permitted.decision.verdict is not Verdict.ASK:
        return
    for gate, excess in services.parts.excesses(permitted.validated):
        if refuses(gate, permitted.decision):
            raise excess.error


async def hold_gates(approved: ApprovedCall, call: CallContext, services: PipelineServices) -> None:
    """Let every gate reserve what the call needs to run, and add the holds to `call.holds`.

    Raises:
        EngineError: a gate refuses the call.
    """
    may_exceed = approved.consent.may_exceed if approved.consent is not None else ()
    for gate in services.parts.gates:
        held = await gate.hold(approved.permitted, is_let_pass=gate.key in may_exceed)
        if held is not None:
            call.holds.append((gate, held))


def _envelope(
    known: KnownAnswer, permitted: PermittedCall, call: CallContext, services: PipelineServices
) -> Envelope:
    tool, request, trace = permitted.tool.definition, call.request, call.trace
    total_ms = round(trace.total_ms, 3)
    metadata = replaced(
        _METADATA,
        tool_name=tool.name,
        tool_version=tool.version,
        call_id=request.call_id,
        trace_id=request.trace_id,
        timestamp=timestamp(services.clock.now()),
        execution_time_ms=total_ms,
        performance=replaced(
            _METADATA.performance, total_ms=total_ms, validation_ms=trace.stage_ms("validate")
        ),
        usage=_nothing_used(services.answers.prices.currency),
        warnings=permitted.validated.warnings + known.warnings,
        redacted=known.redacted,
        metacognition=known.metacognition,
        **known.metadata,
    )
    return replaced(_ANSWER, data=from_json(known.data), metadata=metadata)


_METADATA = Metadata(
    tool_name=None,
    tool_version=None,
    call_id=None,
    trace_id="",
    timestamp="",
    execution_time_ms=0.0,
    performance=Performance(total_ms=0.0, validation_ms=None),
    sandbox=None,
    resources=Resources(),
    usage=UsageReport(),
    warnings=(),
    redacted=0,
    metacognition=None,
)
_ANSWER = Envelope(success=True, status="success", data={}, error=None, metadata=_METADATA)
"""Template for the answer to a call that did not run. Fields that differ between such answers are
not set."""

_nothing_used = lru_cache(maxsize=8)(lambda currency: UsageReport(currency=currency))
