"""All principals' sessions on the control socket, and the engine's own state.

Requests for sessions need `approve` or `admin`. Only `admin` may end a session. This gives
administrators no additional access, because they could create a token for the session's owner.

The state of the engine: health, readiness, the OpenAPI document and usage, on both sockets.
"""

from __future__ import annotations

from typing import Annotated

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.core.errors import ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.session import TURN_S, OwnedSession
from fumehood.core.status import Health, Readiness
from fumehood.core.usage_table import AllUsageQuery, UsageQuery, UsageTable
from fumehood.engine import Engine
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import As, Needs, endpoint
from fumehood.http.routes.sessions import SessionId

OwnedSessionAnswer = Annotated[
    OwnedSession,
    As("session", "OwnedSessionAnswer", "The current state of a session, with its owner."),
]


@endpoint(
    "GET", "/v1/sessions", Needs.APPROVER, authorize=require_authority, client="sessions.list"
)
async def list_all_sessions(
    engine: Engine,
) -> Annotated[
    tuple[OwnedSession, ...],
    As(
        "items",
        "OwnedSessionList",
        "The sessions of all principals: active ones, then recently ended ones, newest first.",
    ),
]:
    """List the sessions of all principals: active ones, then those that ended in the last day.

    Needs the scope `approve` or `admin`.
    """
    return engine.overview.sessions()


@endpoint(
    "GET",
    "/v1/sessions/{session_id}",
    Needs.APPROVER,
    authorize=require_authority,
    errors=[ResourceNotFound],
    client="sessions.show",
)
async def show_any_session(engine: Engine, session_id: SessionId) -> OwnedSessionAnswer:
    """Show one session of any principal. Needs the scope `approve` or `admin`."""
    return engine.overview.session(session_id)


@endpoint(
    "DELETE",
    "/v1/sessions/{session_id}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    work_s=TURN_S,
    client="sessions.end",
)
async def end_any_session(
    engine: Engine, caller: Principal, session_id: SessionId
) -> OwnedSessionAnswer:
    """End a session of any principal and everything that runs in it, and delete its files.

    The audit chain records this as an administrative change. A session that has already ended is
    not changed.
    """
    return await engine.overview.end_session(session_id, caller)


# -- the engine about itself ----------------------------------------------------------------


@endpoint("GET", "/v1/health", Needs.NOBODY, data=Health, plain=(200,))
async def health() -> Response:
    """Report that the engine's process is running."""
    return JSONResponse(Health().model_dump(mode="json"))


@endpoint("GET", "/v1/ready", Needs.NOBODY, data=Readiness, plain=(200, 503))
async def ready(engine: Engine) -> Response:
    """Show whether calls are served, and the limits that each wall enforces.

    The status is 200 if calls are served, and 503 otherwise.
    """
    readiness = engine.ready()
    status = 200 if readiness.status == "ready" else 503
    return JSONResponse(readiness.model_dump(mode="json"), status_code=status)


@endpoint("GET", "/v1/openapi.json", Needs.NOBODY, plain=(200,), client=None)
async def openapi(request: Request) -> Response:
    """Return the OpenAPI document of this socket."""
    document = await anyio.to_thread.run_sync(request.app.openapi)
    return JSONResponse(document)


@endpoint("GET", "/v1/usage", Needs.CALLER, client="usage")
async def show_usage(engine: Engine, caller: Principal, query: UsageQuery) -> UsageTable:
    """Show the usage of the caller's own calls, and what is left of the caller's budgets.

    Usage is summed from the call log, which keeps a limited number of calls.
    """
    return await engine.usage_of(caller, query)


@endpoint("GET", "/v1/usage", Needs.ADMIN, client="usage")
async def show_all_usage(engine: Engine, query: AllUsageQuery) -> UsageTable:
    """Show the usage of all principals, and what is left of every budget.

    Usage is summed from the call log, which keeps a limited number of calls of each principal.
    """
    return await engine.all_usage(query)


COMMON = [health, ready, openapi]
OPERATIONS = [show_usage, *COMMON]
CONTROL_OPERATIONS = [
    list_all_sessions,
    show_any_session,
    end_any_session,
    show_all_usage,
    *COMMON,
]
