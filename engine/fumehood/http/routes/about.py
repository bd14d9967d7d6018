"""The engine about itself: health, metrics, alerts, usage, the result cache and the audit chain."""

from __future__ import annotations

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.answers import AuditPage, Pagination
from fumehood.audit.model import AuditQuery, AuditRotation, AuditVerdict
from fumehood.budgets.model import AllUsageQuery, UsageQuery, UsageTable
from fumehood.cache.model import CacheStatus, ClearedCache
from fumehood.core.identity import Principal
from fumehood.core.status import AlertList, Health, Readiness
from fumehood.engine import Engine
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import Needs, endpoint

VERIFY_S = 600.0
"""Time to verify some ten million rows."""


@endpoint("GET", "/v1/health", Needs.NOBODY, data=Health, plain=(200,))
async def health() -> Response:
    """Answer while the process runs."""
    return JSONResponse(Health().model_dump(mode="json"))


@endpoint("GET", "/v1/ready", Needs.NOBODY, data=Readiness, plain=(200, 503))
async def ready(engine: Engine) -> Response:
    """200 if calls are served, 503 if not; in both cases with what each wall enforces."""
    readiness = engine.ready()
    status = 200 if readiness.status == "ready" else 503
    return JSONResponse(readiness.model_dump(mode="json"), status_code=status)


@endpoint("GET", "/v1/openapi.json", Needs.NOBODY, plain=(200,), client=None)
async def openapi(request: Request) -> Response:
    """The OpenAPI document of this socket."""
    document = await anyio.to_thread.run_sync(request.app.openapi)
    return JSONResponse(document)


@endpoint(
    "GET", "/metrics", Needs.APPROVER, authorize=require_authority, media="text/plain", client=None
)
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


@endpoint("GET", "/v1/usage", Needs.CALLER, client="usage")
async def show_usage(engine: Engine, caller: Principal, query: UsageQuery) -> UsageTable:
    """Show the usage of the caller's own calls, and the remaining amounts of its budgets.

    It is summed from the call log, which keeps a limited number of calls.
    """
    return await engine.usage_of(caller, query)


@endpoint("GET", "/v1/usage", Needs.ADMIN, client="usage")
async def show_all_usage(engine: Engine, query: AllUsageQuery) -> UsageTable:
    """Show the usage of all principals, and the remaining amount of every budget.

    It is summed from the call log, which keeps a limited number of calls of each principal.
    """
    return await engine.all_usage(query)


@endpoint("GET", "/v1/cache", Needs.ADMIN, client="cache.show")
async def show_cache(engine: Engine) -> CacheStatus:
    """Show how much the result cache holds, and its hits and misses since the start."""
    return engine.cache.status()


@endpoint("DELETE", "/v1/cache", Needs.ADMIN, client="cache.clear")
async def clear_cache(engine: Engine, caller: Principal) -> ClearedCache:
    """Drop every answer of the result cache, of all principals.

    Runs that have begun answer the calls that wait for them already, and no later ones.
    """
    done = engine.cache.clear()
    engine.log.info("cache.cleared", by=caller.id, entries=done.cleared)
    return done


@endpoint("GET", "/v1/audit", Needs.ADMIN, client="audit.page")
async def list_audit(engine: Engine, query: AuditQuery) -> AuditPage:
    """List rows of the audit chain after row `after`, oldest first."""
    found = await engine.audit.page(query.after, query.limit + 1)
    items = found[: query.limit]
    has_more = len(found) > query.limit
    pagination = Pagination(
        has_more=has_more, next_cursor=str(items[-1].seq) if has_more else None, total_count=None
    )
    return AuditPage(items=items, pagination=pagination)


@endpoint("GET", "/v1/audit/verify", Needs.ADMIN, work_s=VERIFY_S, client="audit.verify")
async def verify_audit(engine: Engine) -> AuditVerdict:
    """Verify the whole chain with the keys and anchors in the state directory."""
    return await engine.audit.verify()


@endpoint("POST", "/v1/audit/rotate", Needs.ADMIN, client="audit.rotate")
async def rotate_audit_key(engine: Engine, caller: Principal) -> AuditRotation:
    """Continue the chain under a new key. The old key is kept for verification."""
    return await engine.audit.rotate(caller)


COMMON = [health, ready, openapi]
OPERATIONS = [show_usage, *COMMON]
CONTROL_OPERATIONS = [
    list_audit,
    verify_audit,
    rotate_audit_key,
    show_all_usage,
    show_cache,
    clear_cache,
    show_metrics,
    show_alerts,
    *COMMON,
]
