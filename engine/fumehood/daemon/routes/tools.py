"""`/v1/tools` and `/v1/tools/{name}`: the registry, to read, a page at a time."""

from __future__ import annotations

import re
from decimal import Decimal

from starlette.requests import Request
from starlette.responses import Response

from fumehood.daemon.answers import envelope_response
from fumehood.daemon.caller import require_principal
from fumehood.engine import Engine
from fumehood.model.errors import InvalidParams
from fumehood.model.identity import Principal
from fumehood.model.json_types import JsonObject
from fumehood.model.tool import ToolDefinition, ToolType
from fumehood.registry.listing import DEFAULT_LIMIT, MAX_LIMIT, ToolFilter

PARAMETERS = ("category", "cursor", "limit", "tag", "type")
AGENT_PARAMETERS = ("agent_id", "at_most", "categories", "exclude_dangerous", "max_cost")
"""With `agent_id` the list is that agent's, whole and in its order."""

_BOOLEANS = {"true": True, "false": False}


async def list_tools(request: Request) -> Response:
    """The preferred version of each tool that the filters let through, one page of them.

    What source a tool has stands beside the items, so that each item is a definition that
    could be registered elsewhere as it is.
    """
    principal = require_principal(request)
    engine: Engine = request.app.state.engine
    if "agent_id" in request.query_params:
        return _agent_tools(engine, principal, _query(request, AGENT_PARAMETERS))
    given = _query(request, PARAMETERS)
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


def _agent_tools(engine: Engine, principal: Principal, given: dict[str, str]) -> Response:
    categories = given.get("categories")
    selection = engine.agent_tools(
        principal,
        given["agent_id"],
        categories=None if categories is None else set(filter(None, categories.split(","))),
        exclude_dangerous=_boolean(given.get("exclude_dangerous", "true")),
        max_cost=_money(given.get("max_cost")),
        at_most=_number(given.get("at_most"), "at_most"),
    )
    items = [definition_json(tool) for tool in selection.tools]
    data: JsonObject = {
        "items": items,
        "left_out": [{"name": each.name, "reason": each.reason} for each in selection.left_out],
        "pagination": {"has_more": False, "next_cursor": None, "total_count": len(items)},
    }
    return envelope_response(engine.answer(data))


def _boolean(text: str) -> bool:
    if text not in _BOOLEANS:
        raise InvalidParams(
            "exclude_dangerous must be true or false.", fields=["exclude_dangerous"]
        )
    return _BOOLEANS[text]


def _money(text: str | None) -> Decimal | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text, re.ASCII):
        raise InvalidParams("max_cost must be an amount such as 0.05.", fields=["max_cost"])
    return Decimal(text)


def _number(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 4:
        raise InvalidParams(f"{name} must be a number.", fields=[name])
    return int(text)


def _query(request: Request, parameters: tuple[str, ...]) -> dict[str, str]:
    """The query, each parameter known and given once: what is ignored is believed to work."""
    given = request.query_params.multi_items()
    query = dict(given)
    wrong = sorted({name[:40] for name, _ in given if name not in parameters})
    if wrong or len(query) != len(given):
        raise InvalidParams(
            f"The query takes {', '.join(parameters)}, each at most once.", fields=wrong
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
