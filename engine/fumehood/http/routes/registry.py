"""Changes of the registry, on the control socket: register, replace, delete, switch."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import ChangedTools, Deleted, ToolWithSource
from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    ToolNotFound,
)
from fumehood.core.tool import ToolDefinition
from fumehood.http.answers import answer, engine_of, read_json
from fumehood.http.caller import require_admin
from fumehood.http.operation import Needs, Operation
from fumehood.http.routes.tools import TOOL
from fumehood.registry.index import RegisteredTool

PINNED = {"name": "`name@version`."}


async def register_tool(request: Request) -> Response:
    """Add one version of a REST or MCP tool."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = engine_of(request)
    tool = await engine.registrations.register(document, by=by, now=engine.now())
    return _answer(request, [tool])


async def replace_tool(request: Request) -> Response:
    """Put another definition in place of a registered one."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = engine_of(request)
    name, version = _pinned(request)
    tool = await engine.registrations.replace(name, version, document, by=by, now=engine.now())
    return _answer(request, [tool])


async def delete_tool(request: Request) -> Response:
    """Forget a registered version."""
    by = await require_admin(request)
    engine = engine_of(request)
    name, version = _pinned(request)
    await engine.registrations.delete(name, version, by=by, now=engine.now())
    return answer(request, Deleted(deleted=f"{name}@{version}"))


async def activate_tool(request: Request) -> Response:
    """Switch one version (`name@version`), or every one, on."""
    return await _switch(request, is_active=True)


async def deactivate_tool(request: Request) -> Response:
    """Switch one version (`name@version`), or every one, off."""
    return await _switch(request, is_active=False)


async def _switch(request: Request, *, is_active: bool) -> Response:
    by = await require_admin(request)
    engine = engine_of(request)
    name, _, version = request.path_params["name"].partition("@")
    tools = await engine.registrations.switch(
        name, version or None, is_active=is_active, by=by, now=engine.now()
    )
    return _answer(request, tools)


def _pinned(request: Request) -> tuple[str, str]:
    name, _, version = request.path_params["name"].partition("@")
    if not version:
        raise InvalidParams("Say which version: name@1.2.0.", fields=["name"])
    return name, version


def _answer(request: Request, tools: list[RegisteredTool]) -> Response:
    items = tuple(
        ToolWithSource(**dict(tool.definition), source=tool.source.value) for tool in tools
    )
    return answer(request, ChangedTools(items=items))


OPERATIONS = [
    Operation(
        "POST",
        "/v1/tools",
        register_tool,
        Needs.ADMIN,
        data=ChangedTools,
        body=ToolDefinition,
        errors=frozenset({IdempotencyConflict}),
    ),
    Operation(
        "PUT",
        "/v1/tools/{name}",
        replace_tool,
        Needs.ADMIN,
        data=ChangedTools,
        body=ToolDefinition,
        parameters=PINNED,
        errors=frozenset({ToolNotFound, PermissionDenied}),
    ),
    Operation(
        "DELETE",
        "/v1/tools/{name}",
        delete_tool,
        Needs.ADMIN,
        data=Deleted,
        parameters=PINNED,
        errors=frozenset({InvalidParams, ToolNotFound, PermissionDenied}),
    ),
    Operation(
        "POST",
        "/v1/tools/{name}/activate",
        activate_tool,
        Needs.ADMIN,
        data=ChangedTools,
        parameters=TOOL,
        errors=frozenset({ToolNotFound}),
    ),
    Operation(
        "POST",
        "/v1/tools/{name}/deactivate",
        deactivate_tool,
        Needs.ADMIN,
        data=ChangedTools,
        parameters=TOOL,
        errors=frozenset({ToolNotFound}),
    ),
]
