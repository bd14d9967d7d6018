"""Makes the ending of a run from a guest's frame or a child's reply.

Host side, pure functions. Invariant: a program's words may name its failure, never undo
one, and are bounded; success without a result does not exist.
"""

from __future__ import annotations

from typing import Any

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.protocol.messages import GuestEnding
from fumehood.sandbox.wall import RunEnding

MAX_CLAIM_CHARACTERS = 2000

LOST = RunEnding(EndedBy.SANDBOX_LOST, "call")

_CLAIMABLE = {
    "memory": EndedBy.MEMORY,
    "output": EndedBy.OUTPUT,
    "policy": EndedBy.POLICY,
}
"""The failures that a program may claim (ADR 0010)."""


def ending_of_reply(
    reply: JsonObject, *, isolation: str, cpu_ms: float | None, output_bytes: int | None
) -> RunEnding:
    """The ending of a run whose child answered this side directly. Figures are the host's."""
    error = reply.get("error")
    result = reply.get("result")
    if error is None and isinstance(result, dict):
        return RunEnding(
            EndedBy.OK, isolation, cpu_ms=cpu_ms, output_bytes=output_bytes, result=result
        )
    error = error if isinstance(error, dict) else {}
    kind = _text(error.get("kind"))
    return RunEnding(
        _CLAIMABLE.get(kind or "", EndedBy.EXCEPTION),
        isolation,
        cpu_ms=cpu_ms,
        output_bytes=output_bytes,
        claimed_kind=kind,
        claimed_message=_text(error.get("message")),
        claimed_error=error or None,
    )


def ending_of_frame(message: GuestEnding) -> RunEnding:
    """The ending of a run under the supervisor."""
    claim = message.claim or {}
    error = claim.get("error")
    error = error if isinstance(error, dict) else {}
    result = claim.get("result")
    ended_by = message.ended_by
    if ended_by is EndedBy.OK and not isinstance(result, dict):
        ended_by = EndedBy.SANDBOX_LOST
    return RunEnding(
        ended_by=ended_by,
        isolation=message.isolation,
        cpu_ms=message.cpu_ms,
        peak_memory_bytes=message.peak_memory_bytes,
        output_bytes=message.output_bytes,
        exit_code=message.exit_code,
        signal=message.signal,
        result=result if ended_by is EndedBy.OK else None,
        claimed_kind=_text(error.get("kind")),
        claimed_message=_text(error.get("message")),
        claimed_error=error or None,
    )


def _text(value: Any) -> str | None:
    return value[:MAX_CLAIM_CHARACTERS] if isinstance(value, str) else None
