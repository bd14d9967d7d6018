"""The HTTP application: routing, and an envelope for every refusal.

Host side, between the server and one engine. Invariant: whatever a client sends, it gets JSON of a
documented form, without stack traces or host paths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import lru_cache, partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fumehood.core.errors import (
    EngineError,
    InternalError,
    MethodNotAllowed,
    ResourceNotFound,
)
from fumehood.core.status import engine_version
from fumehood.engine import Engine
from fumehood.http.answers import envelope_response, headers_of, stopped
from fumehood.http.caller import refusal_over_tcp
from fumehood.http.endpoint import Operation, Respond
from fumehood.http.mcp import MCP_PATH, McpEndpoint
from fumehood.http.openapi import make_document
from fumehood.http.peer import Face
from fumehood.http.routes import (
    about,
    approvals,
    authority,
    calls,
    overview,
    sessions,
    stream,
    tools,
)
from fumehood.observe.log import log_fault
from fumehood.observe.tracing import HEADER, INCOMING

TRACEPARENT = HEADER.encode()

OPERATIONS = [
    *calls.OPERATIONS,
    *stream.OPERATIONS,
    *approvals.OPERATIONS,
    *tools.OPERATIONS,
    *sessions.OPERATIONS,
    *about.OPERATIONS,
]
"""Operations of the callers' socket."""

CONTROL_OPERATIONS = [
    *authority.OPERATIONS,
    *tools.CONTROL_OPERATIONS,
    *approvals.CONTROL_OPERATIONS,
    *overview.OPERATIONS,
    *about.CONTROL_OPERATIONS,
]
"""Operations of the control socket. On the callers' socket they are RESOURCE_NOT_FOUND."""


class Faces:
    """Both applications behind one ASGI callable; the socket selects the application."""

    def __init__(self, engine: Engine) -> None:
        self._engine = Application(engine, "fumehood", OPERATIONS)
        self._mcp = McpEndpoint(engine)
        self._control = Application(engine, "fumehood, control socket", CONTROL_OPERATIONS)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request. No coroutine of its own: each nested one costs every call a bit."""
        face = scope["state"]["face"]
        given = headers_of(scope, TRACEPARENT)
        # Also where there is none: a request behind another one may begin in that one's context.
        INCOMING.set(given[0].decode("latin-1") if len(given) == 1 else None)
        app: Application | McpEndpoint = self._engine
        if face is Face.CONTROL:
            app = self._control
        elif scope["path"] == MCP_PATH:
            app = self._mcp
        if face is Face.TCP:
            scope["app"] = app
            refusal = refusal_over_tcp(Request(scope))
            if refusal is not None:
                return envelope_response(app.engine.refusal(refusal))(scope, receive, send)
        return app(scope, receive, send)


class Application:
    """The operations of one socket, for an engine that the caller has started.

    It uses Starlette's requests and responses without its application and routes, which cost every
    call about as much as a gate.
    """

    def __init__(self, engine: Engine, title: str, operations: Sequence[Operation]) -> None:
        self._operations = tuple(operations)
        self.engine = engine
        # Made on first request: it takes megabytes and is rarely needed.
        self.openapi = lru_cache(maxsize=1)(
            partial(make_document, title, engine_version(), operations)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; internal errors are logged and hidden."""
        scope["app"] = self
        try:
            response = await self._found(scope)(Request(scope, receive, send))
        except EngineError as error:
            response = self._refuse(error, scope)
        except asyncio.CancelledError:
            if not self.engine.is_draining:
                raise
            # The time for running requests is over, but the client still gets an answer.
            response = envelope_response(stopped(self.engine, _tool_of(scope)))
        except Exception as fault:
            self._log(fault)
            response = self._refuse(InternalError("The engine failed internally."), scope)
        try:
            await response(scope, receive, send)
        except Exception as fault:
            self._log(fault)
            raise  # the response has begun: the server closes the connection

    def _refuse(self, error: EngineError, scope: Scope) -> Response:
        return envelope_response(self.engine.refusal(error, tool=_tool_of(scope)))

    def _found(self, scope: Scope) -> Respond:
        """Find the operation of this address and method.

        Raises:
            MethodNotAllowed: the address exists with another method only.
            ResourceNotFound: the address does not exist.
        """
        path, method = scope["path"], scope["method"]
        is_known = False
        for operation in self._operations:
            match = operation.address.fullmatch(path)
            if match is not None:
                if method in operation.methods:
                    scope["path_params"] = match.groupdict()
                    return operation.respond
                is_known = True
        if is_known:
            raise MethodNotAllowed(
                "This address does not accept this method. See /v1/openapi.json."
            )
        raise ResourceNotFound("This address does not exist. See /v1/openapi.json.")

    def _log(self, fault: Exception) -> None:
        log_fault(self.engine.log, "daemon.internal_error", fault)


def _tool_of(scope: Scope) -> str | None:
    name: str | None = scope.get("path_params", {}).get("name")
    return name
