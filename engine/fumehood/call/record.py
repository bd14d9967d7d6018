"""Record: leave a trace before anything runs, and of how it ended.

Last stage, in two halves around `execute`. This version keeps its record in the log only;
argument values appear there at the level `debug` and nowhere else.
"""

from __future__ import annotations

from fumehood.call.admit import AdmittedCall
from fumehood.model.envelope import Envelope
from fumehood.observe.trail import Trail


def record_intent(admitted: AdmittedCall, trail: Trail) -> None:
    """Say what is about to run. If this fails, nothing runs."""
    trail.note(
        "call.intent",
        placement=admitted.plan.placement.kind,
        timeout_s=admitted.plan.limits.wall_s,
        memory_mb=admitted.plan.limits.memory_mb,
        arguments=admitted.permitted.validated.arguments,
    )


def record_ending(envelope: Envelope, trail: Trail) -> None:
    """Say how it ended, with the time that each stage took."""
    metadata = envelope.metadata
    trail.conclude(
        "call.ended",
        tool_version=metadata.tool_version,
        code=envelope.error.code if envelope.error else "OK",
        ended_by=metadata.sandbox.ended_by if metadata.sandbox else None,
        total_ms=metadata.execution_time_ms,
        cpu_ms=metadata.resources.cpu_ms,
        cost=metadata.usage.cost,
    )
