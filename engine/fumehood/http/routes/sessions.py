"""`/v1/sessions`: a principal's sessions. Only the owner has access."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request

from fumehood.core.errors import (
    InternalError,
    InvalidParams,
    QuotaExceeded,
    ResourceNotFound,
    SandboxUnavailable,
    ShuttingDown,
)
from fumehood.core.identity import Principal
from fumehood.core.session import (
    MAKING_S,
    TURN_S,
    NewSession,
    SessionRecord,
)
from fumehood.core.value import Value
from fumehood.engine import Engine
from fumehood.http.answers import engine_of
from fumehood.http.endpoint import As, Needs, endpoint

LIFE_ERRORS = frozenset({ResourceNotFound, SandboxUnavailable})
COPY_ERRORS = LIFE_ERRORS | {InvalidParams, InternalError, QuotaExceeded, ShuttingDown}
FILE_ERRORS = frozenset({InvalidParams, ResourceNotFound, SandboxUnavailable})


class NoQuery(Value):
    """A query without parameters. Parameters are refused, since a client might believe that they
    had an effect.
    """


def refuse_while_draining(request: Request) -> None:
    """Raise ShuttingDown if the engine is stopping."""
    if engine_of(request).is_draining:
        raise ShuttingDown("The engine is stopping. Retry when it runs again.")


SESSION = (
    "The session's id, `sess_…`, or its name. A name refers to the active session with this name "
    "or, if there is none, to the last ended one."
)
SessionId = Annotated[str, SESSION]
SessionAnswer = Annotated[
    SessionRecord, As("session", "SessionAnswer", "The current state of a session.")
]


@endpoint("GET", "/v1/sessions", Needs.CALLER, client="sessions")
async def list_sessions(
    engine: Engine, caller: Principal, query: NoQuery
) -> Annotated[
    tuple[SessionRecord, ...],
    As(
        "items",
        "SessionList",
        "The caller's own sessions: active ones, then recently ended ones, newest first.",
    ),
]:
    """List the caller's own sessions: active ones, then those that ended in the last day.

    Both groups are sorted from newest to oldest.
    """
    return tuple(engine.sessions.list(caller))


@endpoint(
    "POST",
    "/v1/sessions",
    Needs.CALLER,
    errors=[QuotaExceeded, ResourceNotFound, SandboxUnavailable, ShuttingDown, InternalError],
    work_s=MAKING_S,
    before_reading=refuse_while_draining,
)
async def create_session(engine: Engine, body: NewSession, caller: Principal) -> SessionAnswer:
    """Create a session, which is a container for the caller's calls alone.

    Every field is optional. A call runs in the session if the call's option `session_id` names it.
    """
    return await engine.sessions.create(caller, **body.model_dump(exclude_unset=True))


@endpoint(
    "GET", "/v1/sessions/{session_id}", Needs.CALLER, errors=[ResourceNotFound], client="session"
)
async def show_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """Show one of the caller's own sessions, including ended ones."""
    return engine.sessions.find(caller, session_id)


@endpoint(
    "DELETE", "/v1/sessions/{session_id}", Needs.CALLER, errors=[ResourceNotFound], work_s=TURN_S
)
async def end_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """End one of the caller's own sessions and everything that runs in it, and delete its files.

    A session that has already ended is not changed.
    """
    return await engine.sessions.end(caller, session_id)


@endpoint(
    "POST", "/v1/sessions/{session_id}/pause", Needs.CALLER, errors=LIFE_ERRORS, work_s=TURN_S
)
async def pause_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """Freeze one of the caller's own sessions until its next use.

    The session is frozen once its running and waiting calls have finished.
    """
    return await engine.sessions.pause(caller, session_id)


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/stop",
    Needs.CALLER,
    errors=LIFE_ERRORS | {InvalidParams},
    work_s=TURN_S,
)
async def stop_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """End everything that runs in one of the caller's own sessions, and keep its disk.

    The session is stopped once its running and waiting calls have finished. Only a session with a
    disk can be stopped. The next use starts the session again, without its variables.
    """
    return await engine.sessions.stop(caller, session_id)


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/resume",
    Needs.CALLER,
    errors=LIFE_ERRORS | {QuotaExceeded},
    work_s=TURN_S,
)
async def resume_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """Resume one of the caller's own sessions that is paused or stopped.

    A call in the session resumes it as well.
    """
    return await engine.sessions.resume(caller, session_id)


OPERATIONS = [
    list_sessions,
    create_session,
    show_session,
    end_session,
    pause_session,
    resume_session,
    stop_session,
]
