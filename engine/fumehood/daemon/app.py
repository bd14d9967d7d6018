"""The HTTP application: addresses, and an envelope for everything that is refused.

Host side. Above it the server, below it one engine. Invariant: whatever a client sends, it
gets JSON of a documented form; no stack, no path of this host.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fumehood.daemon.answers import envelope_response
from fumehood.daemon.peer import Face
from fumehood.daemon.routes import agents, authority, registry
from fumehood.daemon.routes.calls import call_tool, list_calls, show_call
from fumehood.daemon.routes.health import health, ready
from fumehood.daemon.routes.openapi import make_document, openapi
from fumehood.daemon.routes.tools import list_tools, show_tool
from fumehood.engine import Engine
from fumehood.model.errors import (
    EngineError,
    InternalError,
    InvalidParams,
    MethodNotAllowed,
    ResourceNotFound,
)
from fumehood.observe.log import log_fault

ROUTES = [
    Route("/v1/tools/{name}/call", call_tool, methods=["POST"]),
    Route("/v1/tools/{name}", show_tool, methods=["GET"]),
    Route("/v1/tools", list_tools, methods=["GET"]),
    Route("/v1/calls", list_calls, methods=["GET"]),
    Route("/v1/calls/{call_id}", show_call, methods=["GET"]),
    Route("/v1/health", health, methods=["GET"]),
    Route("/v1/ready", ready, methods=["GET"]),
    Route("/v1/openapi.json", openapi, methods=["GET"]),
]

CONTROL_ROUTES = [
    Route("/v1/agents", agents.list_agents, methods=["GET"]),
    Route("/v1/agents", agents.create_agent, methods=["POST"]),
    Route("/v1/agents/{agent_id}", agents.show_agent, methods=["GET"]),
    Route("/v1/agents/{agent_id}", agents.update_agent, methods=["PUT", "PATCH"]),
    Route("/v1/agents/{agent_id}", agents.delete_agent, methods=["DELETE"]),
    Route("/v1/agents/{agent_id}/tools", agents.list_bindings, methods=["GET"]),
    Route("/v1/agents/{agent_id}/tools/{tool}", agents.bind_tool, methods=["PUT"]),
    Route("/v1/agents/{agent_id}/tools/{tool}", agents.unbind_tool, methods=["DELETE"]),
    Route("/v1/tools", registry.register_tool, methods=["POST"]),
    Route("/v1/tools/{name}", registry.replace_tool, methods=["PUT"]),
    Route("/v1/tools/{name}", registry.delete_tool, methods=["DELETE"]),
    Route("/v1/tools/{name}/activate", registry.activate_tool, methods=["POST"]),
    Route("/v1/tools/{name}/deactivate", registry.deactivate_tool, methods=["POST"]),
    Route("/v1/tokens", authority.list_tokens, methods=["GET"]),
    Route("/v1/tokens", authority.new_token, methods=["POST"]),
    Route("/v1/tokens/{token_id}", authority.revoke_token, methods=["DELETE"]),
    Route("/v1/approvers", authority.list_approvers, methods=["GET"]),
    Route("/v1/approvers", authority.add_approver, methods=["POST"]),
    Route("/v1/approvers/{approver}", authority.remove_approver, methods=["DELETE"]),
    Route("/v1/changes", authority.list_changes, methods=["GET"]),
    Route("/v1/health", health, methods=["GET"]),
    Route("/v1/ready", ready, methods=["GET"]),
    Route("/v1/openapi.json", openapi, methods=["GET"]),
]
"""What changes authority exists here only; on the callers' socket it is RESOURCE_NOT_FOUND."""


class Faces:
    """Both applications, as the one that the server calls: the socket decides which."""

    def __init__(self, engine: Engine) -> None:
        self._engine = make_app(engine, ROUTES)
        self._control = make_app(engine, CONTROL_ROUTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        control = scope["state"]["face"] is Face.CONTROL
        await (self._control if control else self._engine)(scope, receive, send)


def make_app(engine: Engine, routes: Sequence[Route]) -> Starlette:
    """An application around one engine that somebody else has entered."""
    app = Starlette(
        routes=routes,
        exception_handlers={
            EngineError: _on_engine_error,
            HTTPException: _on_http_exception,
            Exception: _on_fault,
        },
    )
    app.router.redirect_slashes = False
    app.state.engine = engine
    app.state.openapi = make_document(_version())
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
