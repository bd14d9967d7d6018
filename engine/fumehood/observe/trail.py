"""The trace of one call: which stage it passed when. One event a stage, with both ids.

Host side, held by the call's context. Argument values are logged at the level `debug` only. The
call's last event is logged when the event loop comes round again, after the answer is out.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar

from fumehood.observe.clock import Clock
from fumehood.observe.log import Logger, log_fault

T = TypeVar("T")


class CallTrace:
    """Stamps and log events of one call."""

    __slots__ = ("_clock", "_ids", "_last", "_log", "_logs_stages", "_stages_ms", "_started")

    def __init__(self, tool: str, call_id: str, trace_id: str, clock: Clock, log: Logger) -> None:
        self._clock = clock
        self._log = log
        self._logs_stages = log.is_enabled_for(logging.DEBUG)
        self._ids = {"call_id": call_id, "trace_id": trace_id, "tool": tool[:80]}
        self._started = self._last = clock.monotonic()
        self._stages_ms: dict[str, float] = {}

    def passed(self, stage: str, value: T) -> T:
        """Note that a stage is done, and pass its value on."""
        now = self._clock.monotonic()
        self._stages_ms[stage] = elapsed_ms = round((now - self._last) * 1e3, 3)
        self._last = now
        if self._logs_stages:
            self._log.debug(f"call.{stage}", **self._ids, ms=elapsed_ms)
        return value

    def note(self, event: str, **values: Any) -> None:
        """An event between stages, at the level `debug`."""
        self._log.debug(event, **self._ids, **values)

    def conclude(self, event: str, **values: Any) -> None:
        """The call's last event, at the level `info`, with the time of every stage."""
        asyncio.get_running_loop().call_soon(self._log_ending, event, values)

    def _log_ending(self, event: str, values: dict[str, Any]) -> None:
        self._log.info(event, **self._ids, **values, stages_ms=self.stages_ms())

    def fault(self, event: str, error: BaseException) -> None:
        """A fault that the caller must not see."""
        log_fault(self._log, event, error, **self._ids)

    @property
    def total_ms(self) -> float:
        """Milliseconds since the call came in."""
        return (self._clock.monotonic() - self._started) * 1e3

    def stages_ms(self) -> dict[str, float]:
        """How long each passed stage took."""
        return dict(self._stages_ms)
