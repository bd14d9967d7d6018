"""HTTP routes of metrics and alerts, for approvers and administrators."""

from __future__ import annotations

import anyio.to_thread
from starlette.responses import Response

from fumehood.core.status import AlertList
from fumehood.engine import Engine
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import Needs, endpoint
from fumehood.sight.in_engine import Sight
from fumehood.sight.metrics import exposition


@endpoint(
    "GET", "/metrics", Needs.APPROVER, authorize=require_authority, media="text/plain", client=None
)
async def show_metrics(engine: Engine) -> Response:
    """Show all metrics of the engine in Prometheus' text format.

    Needs the scope `approve` or `admin`.
    """
    figures = await engine.figures()
    counted = engine.part(Sight).metrics
    text, media_type = await anyio.to_thread.run_sync(exposition, counted, figures)
    return Response(text, media_type=media_type)


@endpoint("GET", "/v1/alerts", Needs.APPROVER, authorize=require_authority, client="alerts")
async def show_alerts(engine: Engine) -> AlertList:
    """Show the engine's alerts with their current values, and the firing alerts of single tools.

    Needs the scope `approve` or `admin`.
    """
    return engine.part(Sight).alerts.look()


CONTROL_OPERATIONS = [show_metrics, show_alerts]
