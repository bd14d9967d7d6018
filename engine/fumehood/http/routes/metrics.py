"""`/metrics` and `/v1/alerts`, on the control socket: what an operator's monitoring reads."""

from __future__ import annotations

from starlette.responses import Response

from fumehood.core.status import AlertList
from fumehood.engine import Engine
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import Needs, endpoint

TEXT = "text/plain"


@endpoint("GET", "/metrics", Needs.APPROVER, authorize=require_authority, media=TEXT, client=None)
async def show_metrics(engine: Engine) -> Response:
    """All figures of the engine as text for Prometheus, with an approver's or admin credential."""
    text, media_type = await engine.metrics()
    return Response(text, media_type=media_type)


@endpoint("GET", "/v1/alerts", Needs.APPROVER, authorize=require_authority, client="alerts")
async def show_alerts(engine: Engine) -> AlertList:
    """Show the alerts of the engine with their present values, and those of tools that are firing.

    With an approver's or admin credential.
    """
    return engine.alerts.look()


OPERATIONS = [show_metrics, show_alerts]
