"""The metrics, alerts and spans of one engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from fumehood.core.names import EXTERNAL
from fumehood.core.status import Alert
from fumehood.engine_part import EnginePart, Kernel
from fumehood.observe.ended_call import EndedCall
from fumehood.observe.figures import Figure
from fumehood.sight.alerts import Alerts
from fumehood.sight.metrics import CallMetrics
from fumehood.sight.settings import AlertSettings
from fumehood.sight.spans import CallSpans, close_provider, otlp_provider

if TYPE_CHECKING:
    from fumehood.compose import Composition

UNDECLARED = f"{EXTERNAL}(undeclared)"
"""The name under which external tools are counted if the configuration does not name them. Callers
can invent such names, and a few hundred invented names would leave no counters for the engine's own
tools."""


class Sight(EnginePart):
    """Counts ended calls for metrics and alerts, and creates their spans. `spans` is None if no
    traces are sent.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        settings = kernel.config.of("alerts", AlertSettings)
        assert settings is not None
        self._settings = settings
        clock, provider = kernel.clock, kernel.tracer_provider
        self._own_provider: Any = None
        if provider == "environment":
            provider = self._own_provider = otlp_provider(os.environ, kernel.log)
        self.spans = CallSpans(provider, clock.monotonic) if provider is not None else None
        self.metrics = CallMetrics()
        self.alerts = Alerts(settings, clock.monotonic, clock.now, kernel.log)
        self._declared = frozenset(EXTERNAL + name for name in kernel.config.external_tools)

    def on_call(self, call: EndedCall) -> None:
        """Count one call that has ended, and create its spans."""
        tool, counted = call.tool, call
        if tool is not None and tool.startswith(EXTERNAL) and tool not in self._declared:
            counted = replace(call, tool=UNDECLARED)
        self.metrics.add(counted)
        self.alerts.add(counted)
        if call.trace is not None and self.spans is not None and self.spans.wants():
            self.spans.record(call.trace())

    def figures(self) -> Iterator[Figure]:
        """Yield the metrics of alerts and traces."""
        alerts = self.alerts.look().alerts
        firing: dict[str, float] = {
            one.name: float(one.firing) for one in alerts if one.tool is None
        }
        yield Figure("alert_firing", "1 while an alert of the engine fires.", firing, "alert")
        if self.spans is not None:
            yield Figure("traces_left_out", "Calls without spans, because there were too many.",
                         self.spans.left_out, kind="counter")  # fmt: skip

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Check the thresholds of alerts periodically during the block, if alerts are enabled."""
        if not self._settings.enabled:
            yield
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self.alerts.watch, self._tell)
            yield
            group.cancel_scope.cancel()

    async def _tell(self, alert: Alert) -> None:
        if self._settings.webhook:
            event = "alert.firing" if alert.firing else "alert.resolved"
            await self.kernel.notify(event, {"alert": alert.model_dump(mode="json")})

    def close(self) -> None:
        """Send the remaining spans."""
        if self._own_provider is not None:
            close_provider(self._own_provider)
