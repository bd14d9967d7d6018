"""What is made of each call that has ended: metrics, alerts and, where they are sent, spans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fumehood.core.names import EXTERNAL
from fumehood.observe.alerts import Alerts
from fumehood.observe.metrics import CallMetrics, EndedCall
from fumehood.observe.tracing import CallSpans

UNDECLARED = f"{EXTERNAL}(undeclared)"
"""Counts for all tools of others that the configuration does not name: callers make up those names,
and a few hundred would take the places of the engine's own tools."""


class CallObserver:
    """The observers of one engine. `spans` is None where none are sent.

    `declared` has the names of the tools of others in the configuration, without `external:`.
    """

    __slots__ = ("_declared", "alerts", "metrics", "spans")

    def __init__(
        self, alerts: Alerts, spans: CallSpans | None, declared: Iterable[str] = ()
    ) -> None:
        self.metrics = CallMetrics()
        self.alerts = alerts
        self.spans = spans
        self._declared = frozenset(EXTERNAL + name for name in declared)

    def ended(self, call: EndedCall) -> None:
        """Count one call that has ended."""
        tool = call.tool
        if tool is not None and tool.startswith(EXTERNAL) and tool not in self._declared:
            call = replace(call, tool=UNDECLARED)
        self.metrics.add(call)
        self.alerts.add(call)


__all__ = ["CallObserver"]
