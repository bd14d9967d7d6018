"""`/v1/sessions`: places that their owner keeps from one call to the next."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import SessionAnswer, SessionList
from fumehood.core.errors import (
    InternalError,
    InvalidParams,
    QuotaExceeded,
    ResourceNotFound,
    SandboxUnavailable,
    ShuttingDown,
)
from fumehood.core.new_session import NewSession
from fumehood.http.answers import answer, engine_of, parse_body, read_json
from fumehood.http.caller import require_principal
from fumehood.http.operation import Needs, Operation

SESSION = {"session_id": "The session's id, `sess_…`."}


async def list_sessions(request: Request) -> Response:
    """The caller's own sessions, newest first: the active ones, then those of the last day."""
    principal = require_principal(request)
    if request.query_params:
        raise InvalidParams(
            "The list of sessions takes no query.", fields=sorted(request.query_params)[:20]
        )
    found = engine_of(request).sessions.list(principal)
    return answer(request, SessionList(items=tuple(found)))


async def create_session(request: Request) -> Response:
    """Make a session: a container of the caller's own, until it ends.

    Every wish may be left out. A call is made in it with the option `session_id`.
    """
    wishes = parse_body(NewSession, await read_json(request))
    principal = require_principal(request)
    engine = engine_of(request)
    if engine.is_draining:
        raise ShuttingDown("The engine is stopping. Repeat it when it is back.")
    record = await engine.sessions.create(principal, **wishes.model_dump())
    return answer(request, SessionAnswer(session=record))


async def show_session(request: Request) -> Response:
    """One session of the caller's own, also one that is over."""
    principal = require_principal(request)
    record = engine_of(request).sessions.find(principal, request.path_params["session_id"])
    return answer(request, SessionAnswer(session=record))


async def end_session(request: Request) -> Response:
    """End a session of the caller's own, with whatever runs in it; its files are gone.

    One that is over stays as it is.
    """
    principal = require_principal(request)
    sessions = engine_of(request).sessions
    record = await sessions.end(principal, request.path_params["session_id"])
    return answer(request, SessionAnswer(session=record))


OPERATIONS = [
    Operation(
        "GET",
        "/v1/sessions",
        list_sessions,
        Needs.CALLER,
        data=SessionList,
        errors=frozenset({InvalidParams}),
    ),
    Operation(
        "POST",
        "/v1/sessions",
        create_session,
        Needs.CALLER,
        data=SessionAnswer,
        body=NewSession,
        errors=frozenset(
            {QuotaExceeded, ResourceNotFound, SandboxUnavailable, ShuttingDown, InternalError}
        ),
    ),
    Operation(
        "GET",
        "/v1/sessions/{session_id}",
        show_session,
        Needs.CALLER,
        data=SessionAnswer,
        parameters=SESSION,
        errors=frozenset({ResourceNotFound}),
    ),
    Operation(
        "DELETE",
        "/v1/sessions/{session_id}",
        end_session,
        Needs.CALLER,
        data=SessionAnswer,
        parameters=SESSION,
        errors=frozenset({ResourceNotFound}),
    ),
]
