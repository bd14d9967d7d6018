"""The HTTP application: addresses, and an envelope for everything that is refused.

Host side. Above it the server, below it one engine. Invariant: whatever a client sends, it
gets JSON of a documented form; no stack, no path of this host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fumehood.daemon.answers import envelope_response
from fumehood.daemon.document import make_document
from fumehood.daemon.operation import Operation
from fumehood.daemon.peer import Face
from fumehood.daemon.routes import (
    agents,
    approvals,
    audit,
    authority,
    blobs,
    calls,
    health,
    openapi,
    policy,
    registry,
    session_files,
    sessions,
    stream,
    tools,
    usage,
)
from fumehood.engine import Engine
from fumehood.model.errors import (
    EngineError,
    InternalError,
    InvalidParams,
    MethodNotAllowed,
    ResourceNotFound,
)
from fumehood.observe.log import log_fault

OPERATIONS = [
    *calls.OPERATIONS,
    *stream.OPERATIONS,
    *approvals.OPERATIONS,
    *tools.OPERATIONS,
    *blobs.OPERATIONS,
    *sessions.OPERATIONS,
    *session_files.OPERATIONS,
    *usage.OPERATIONS,
    *health.OPERATIONS,
    *openapi.OPERATIONS,
]
"""What the callers' socket serves."""

CONTROL_OPERATIONS = [
    *policy.OPERATIONS,
    *agents.OPERATIONS,
    *registry.OPERATIONS,
    *authority.OPERATIONS,
    *approvals.CONTROL_OPERATIONS,
    *audit.OPERATIONS,
    *usage.CONTROL_OPERATIONS,
    *health.OPERATIONS,
    *openapi.OPERATIONS,
]
"""What changes authority exists here only; on the callers' socket it is RESOURCE_NOT_FOUND."""


class Faces:
    """Both applications, as the one that the server calls: the socket decides which."""

    def __init__(self, engine: Engine) -> None:
        self._engine = make_app(engine, "fumehood", OPERATIONS)
        self._control = make_app(engine, "fumehood, control socket", CONTROL_OPERATIONS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        control = scope["state"]["face"] is Face.CONTROL
        await (self._control if control else self._engine)(scope, receive, send)


def make_app(engine: Engine, title: str, operations: Sequence[Operation]) -> Starlette:
    """An application around one engine that somebody else has entered."""
    app = Starlette(
        routes=[operation.route for operation in operations],
        exception_handlers={
            EngineError: _on_engine_error,
            HTTPException: _on_http_exception,
            Exception: _on_fault,
        },
    )
    app.router.redirect_slashes = False
    app.state.engine = engine
    # Made once it is asked for: it takes megabytes, and few ever ask.
    app.state.openapi = cache(partial(make_document, title, _version(), operations))
    return app


async def _on_engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    engine: Engine = request.app.state.engine
    return envelope_response(engine.refusal(error, tool=request.path_params.get("name")))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    engine: Engine = request.app.state.engine
    refusals = {
        404: ResourceNotFound("There is nothing at this address. See /v1/openapi.json."),
        405: MethodNotAllowed("This address takes another HTTP method. See /v1/openapi.json."),
    }
    refusal = refusals.get(error.status_code, InvalidParams("The request cannot be read."))
    return envelope_response(engine.refusal(refusal))


async def _on_fault(request: Request, error: Exception) -> Response:
    engine: Engine = request.app.state.engine
    log_fault(engine.log, "daemon.internal_error", error)
    return envelope_response(engine.refusal(InternalError("The engine failed inside.")))


def _version() -> str:
    try:
        return version("fumehood")
    except PackageNotFoundError:
        return "0"
