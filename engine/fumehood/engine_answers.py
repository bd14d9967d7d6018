"""The engine's answers to what is no call: a list of tools, or a refusal before there was one.

Host side, part of the composition root. Above it `engine_composition`, below it `pipeline/`.
Invariant: such an answer looks like that of a call, and has no call's id.
"""

from __future__ import annotations

from fumehood.core.envelope import Envelope, Metadata, Performance, Resources, UsageReport
from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.observe.clock import Clock, IdSource, timestamp
from fumehood.pipeline.result import shape_error

MAX_SHOWN_TOOL = 80
"""Characters: what was asked for need not be a tool's name."""


class EngineAnswers:
    """Makes envelopes for faces. `currency` is that of the engine's prices."""

    def __init__(self, clock: Clock, ids: IdSource, currency: str) -> None:
        self._clock = clock
        self._ids = ids
        self._currency = currency

    def envelope(
        self, data: JsonObject, error: EngineError | None = None, tool: str | None = None
    ) -> Envelope:
        """A success with `data`, or the refusal of `error`, of what may have been a `tool`."""
        now = self._clock.now()
        return Envelope(
            success=error is None,
            status="success" if error is None else "error",
            data=data,
            error=shape_error(error) if error is not None else None,
            metadata=Metadata(
                tool_name=tool[:MAX_SHOWN_TOOL] if tool is not None else None,
                tool_version=None,
                call_id=None,
                trace_id=self._ids.trace_id(now),
                timestamp=timestamp(now),
                execution_time_ms=0.0,
                performance=Performance(total_ms=0.0),
                sandbox=None,
                resources=Resources(),
                usage=UsageReport(currency=self._currency),
            ),
        )
