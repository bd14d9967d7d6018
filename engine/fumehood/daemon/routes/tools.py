"""`/v1/tools` and `/v1/tools/{name}`: the registry, to read."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.daemon.answers import answer, engine_of
from fumehood.daemon.caller import require_principal
from fumehood.daemon.operation import Needs, Operation
from fumehood.model.answers import Pagination, ToolDetails, ToolList
from fumehood.model.errors import ToolNotFound

TOOL = {"name": "A tool's name, or `name@version`."}


async def list_tools(request: Request) -> Response:
    """The preferred version of every tool."""
    require_principal(request)
    items = tuple(engine_of(request).tools())
    pagination = Pagination(has_more=False, next_cursor=None, total_count=len(items))
    return answer(request, ToolList(items=items, pagination=pagination))


async def show_tool(request: Request) -> Response:
    """One tool by `name` or `name@version`, with its other versions."""
    require_principal(request)
    return answer(request, engine_of(request).tool(request.path_params["name"]))


OPERATIONS = [
    Operation("GET", "/v1/tools", list_tools, Needs.CALLER, data=ToolList),
    Operation(
        "GET",
        "/v1/tools/{name}",
        show_tool,
        Needs.CALLER,
        data=ToolDetails,
        parameters=TOOL,
        errors=frozenset({ToolNotFound}),
    ),
]
