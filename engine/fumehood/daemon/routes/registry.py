"""Changes of the registry, on the control socket: register, replace, delete, switch."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.daemon.answers import envelope_response, read_json
from fumehood.daemon.caller import require_admin
from fumehood.daemon.routes.tools import definition_json
from fumehood.engine import Engine
from fumehood.model.errors import InvalidParams
from fumehood.registry.index import RegisteredTool


async def register_tool(request: Request) -> Response:
    """Add one version of a REST or MCP tool."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = _engine(request)
    tool = await engine.registrations.register(document, by=by, now=engine.now())
    return _answer(engine, [tool])


async def replace_tool(request: Request) -> Response:
    """Put another definition in place of a registered one."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = _engine(request)
    name, version = _pinned(request)
    tool = await engine.registrations.replace(name, version, document, by=by, now=engine.now())
    return _answer(engine, [tool])


async def delete_tool(request: Request) -> Response:
    """Forget a registered version."""
    by = await require_admin(request)
    engine = _engine(request)
    name, version = _pinned(request)
    await engine.registrations.delete(name, version, by=by, now=engine.now())
    return envelope_response(engine.answer({"deleted": f"{name}@{version}"}))


async def activate_tool(request: Request) -> Response:
    """Switch one version (`name@version`), or every one, on."""
    return await _switch(request, is_active=True)


async def deactivate_tool(request: Request) -> Response:
    """Switch one version (`name@version`), or every one, off."""
    return await _switch(request, is_active=False)


async def _switch(request: Request, *, is_active: bool) -> Response:
    by = await require_admin(request)
    engine = _engine(request)
    name, _, version = request.path_params["name"].partition("@")
    tools = await engine.registrations.switch(
        name, version or None, is_active=is_active, by=by, now=engine.now()
    )
    return _answer(engine, tools)


def _pinned(request: Request) -> tuple[str, str]:
    name, _, version = request.path_params["name"].partition("@")
    if not version:
        raise InvalidParams("Say which version: name@1.2.0.", fields=["name"])
    return name, version


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


def _answer(engine: Engine, tools: list[RegisteredTool]) -> Response:
    items = [{**definition_json(tool.definition), "source": tool.source.value} for tool in tools]
    return envelope_response(engine.answer({"items": items}))
