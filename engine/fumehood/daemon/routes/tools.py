"""`/v1/tools` and `/v1/tools/{name}`: the registry, to read."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.daemon.answers import envelope_response
from fumehood.daemon.caller import require_principal
from fumehood.engine import Engine
from fumehood.model.json_types import JsonObject
from fumehood.model.tool import ToolDefinition


async def list_tools(request: Request) -> Response:
    """The preferred version of every tool."""
    require_principal(request)
    engine: Engine = request.app.state.engine
    items = [definition_json(tool) for tool in engine.tools()]
    pagination = {"has_more": False, "next_cursor": None, "total_count": len(items)}
    return envelope_response(engine.answer({"items": items, "pagination": pagination}))


async def show_tool(request: Request) -> Response:
    """One tool by `name` or `name@version`, with its other versions."""
    require_principal(request)
    engine: Engine = request.app.state.engine
    definition = engine.tool(request.path_params["name"]).definition
    shown = definition_json(definition)
    return envelope_response(
        engine.answer({"tool": shown, "versions": engine.versions(definition.name)})
    )


def definition_json(tool: ToolDefinition) -> JsonObject:
    """A definition as JSON."""
    return tool.model_dump(mode="json")
