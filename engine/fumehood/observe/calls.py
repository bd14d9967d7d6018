"""What is made of each call that has ended: metrics, alerts and, where they are sent, spans."""

from __future__ import annotations

from fumehood.observe.alerts import Alerts
from fumehood.observe.metrics import CallMetrics, EndedCall
from fumehood.observe.tracing import CallSpans


class CallObserver:
    """The observers of one engine. `spans` is None where none are sent."""

    __slots__ = ("alerts", "metrics", "spans")

    def __init__(self, alerts: Alerts, spans: CallSpans | None) -> None:
        self.metrics = CallMetrics()
        self.alerts = alerts
        self.spans = spans

    def ended(self, call: EndedCall) -> None:
        """Count one call that has ended."""
        self.metrics.add(call)
        self.alerts.add(call)


__all__ = ["CallObserver"]
