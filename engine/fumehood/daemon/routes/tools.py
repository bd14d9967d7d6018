"""`/v1/tools` and `/v1/tools/{name}`: the registry, to read, a page at a time."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.daemon.answers import envelope_response
from fumehood.daemon.caller import require_principal
from fumehood.engine import Engine
from fumehood.model.errors import InvalidParams
from fumehood.model.json_types import JsonObject
from fumehood.model.tool import ToolDefinition, ToolType
from fumehood.registry.listing import DEFAULT_LIMIT, MAX_LIMIT, ToolFilter

PARAMETERS = ("category", "cursor", "limit", "tag", "type")


async def list_tools(request: Request) -> Response:
    """The preferred version of each tool that the filters let through, one page of them.

    What source a tool has stands beside the items, so that each item is a definition that
    could be registered elsewhere as it is.
    """
    principal = require_principal(request)
    engine: Engine = request.app.state.engine
    given = _query(request)
    page = engine.tools_page(
        principal,
        filter_by=ToolFilter(given.get("category"), given.get("tag"), _type(given.get("type"))),
        limit=_limit(given.get("limit")),
        cursor=given.get("cursor"),
    )
    data = {
        "items": [definition_json(tool.definition) for tool in page.tools],
        "sources": {tool.definition.name: tool.source.value for tool in page.tools},
        "pagination": page.pagination,
    }
    return envelope_response(engine.answer(data))


async def show_tool(request: Request) -> Response:
    """One tool by `name` or `name@version`, with its other versions."""
    require_principal(request)
    engine: Engine = request.app.state.engine
    tool = engine.tool(request.path_params["name"])
    shown = {
        "tool": definition_json(tool.definition),
        "versions": engine.versions(tool.definition.name),
        "source": tool.source.value,
    }
    return envelope_response(engine.answer(shown))


def definition_json(tool: ToolDefinition) -> JsonObject:
    """A definition as JSON."""
    return tool.model_dump(mode="json")


def _query(request: Request) -> dict[str, str]:
    """The query, each parameter known and given once: what is ignored is believed to work."""
    given = request.query_params.multi_items()
    query = dict(given)
    wrong = sorted({name[:40] for name, _ in given if name not in PARAMETERS})
    if wrong or len(query) != len(given):
        raise InvalidParams(
            f"The query takes {', '.join(PARAMETERS)}, each at most once.", fields=wrong
        )
    return query


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not text.isascii() or not text.isdigit() or len(text) > 4:
        raise InvalidParams(f"limit must be a number from 1 to {MAX_LIMIT}.", fields=["limit"])
    return int(text)


def _type(text: str | None) -> ToolType | None:
    if text is None:
        return None
    if text not in set(ToolType):
        known = ", ".join(sorted(ToolType))
        raise InvalidParams(f"type must be one of {known}.", fields=["type"])
    return ToolType(text)
