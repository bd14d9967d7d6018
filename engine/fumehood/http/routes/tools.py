"""`/v1/tools` and `/v1/tools/{name}`: the registry, to read, a page at a time."""

from __future__ import annotations

import re
from decimal import Decimal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import (
    AgentTools,
    AnyToolList,
    LeftOutTool,
    Pagination,
    ToolDetails,
    ToolList,
)
from fumehood.core.call import Id
from fumehood.core.errors import InvalidParams, ResourceNotFound, ToolNotFound
from fumehood.core.identity import Principal
from fumehood.core.tool import ToolType
from fumehood.http.answers import answer, engine_of
from fumehood.http.caller import require_principal
from fumehood.http.operation import Needs, Operation
from fumehood.registry.listing import DEFAULT_LIMIT, MAX_LIMIT, ToolFilter

PARAMETERS = ("category", "cursor", "limit", "tag", "type")
AGENT_PARAMETERS = ("agent_id", "at_most", "categories", "exclude_dangerous", "max_cost")
"""With `agent_id` the list is that agent's, whole and in its order."""

TOOL = {"name": "A tool's name, or `name@version`."}


class ToolQuery(BaseModel):
    """What the list can be asked for, for the document; it is read below."""

    limit: int = Field(default=DEFAULT_LIMIT, ge=1, le=MAX_LIMIT, description="At most so many.")
    cursor: str | None = Field(
        default=None, description="`data.pagination.next_cursor` of the page before."
    )
    category: str | None = Field(default=None, description="Only this category.")
    tag: str | None = Field(default=None, description="Only tools with this tag.")
    type: ToolType | None = Field(default=None, description="Only this type.")
    agent_id: Id | None = Field(
        default=None, description="That agent's tools, all of them; with those below only."
    )
    categories: str | None = Field(default=None, description="Only these, with commas between.")
    exclude_dangerous: bool = Field(default=True, description="Leave out dangerous ones.")
    max_cost: str | None = Field(default=None, description="Only up to this cost a use: `0.05`.")
    at_most: int | None = Field(default=None, ge=0, description="The first so many.")


_BOOLEANS = {"true": True, "false": False}


async def list_tools(request: Request) -> Response:
    """The preferred version of each tool that the filters let through, one page of them.

    What source a tool has stands beside the items, so that each item is a definition that
    could be registered elsewhere as it is.
    """
    principal = require_principal(request)
    if "agent_id" in request.query_params:
        given = _query(request, AGENT_PARAMETERS)
        return answer(request, _agent_tools(request, principal, given))
    given = _query(request, PARAMETERS)
    page = engine_of(request).tools_page(
        principal,
        filter_by=ToolFilter(given.get("category"), given.get("tag"), _type(given.get("type"))),
        limit=_limit(given.get("limit")),
        cursor=given.get("cursor"),
    )
    data = ToolList(
        items=tuple(tool.definition for tool in page.tools),
        sources={tool.definition.name: tool.source.value for tool in page.tools},
        pagination=Pagination(**page.pagination),
    )
    return answer(request, data)


async def show_tool(request: Request) -> Response:
    """One tool by `name` or `name@version`, with its other versions."""
    require_principal(request)
    return answer(request, engine_of(request).tool(request.path_params["name"]))


def _agent_tools(request: Request, principal: Principal, given: dict[str, str]) -> AgentTools:
    categories = given.get("categories")
    selection = engine_of(request).agent_tools(
        principal,
        given["agent_id"],
        categories=None if categories is None else set(filter(None, categories.split(","))),
        exclude_dangerous=_boolean(given.get("exclude_dangerous", "true")),
        max_cost=_money(given.get("max_cost")),
        at_most=_number(given.get("at_most"), "at_most"),
    )
    return AgentTools(
        items=selection.tools,
        left_out=tuple(LeftOutTool(name=t.name, reason=t.reason) for t in selection.left_out),
        pagination=Pagination(has_more=False, next_cursor=None, total_count=len(selection.tools)),
    )


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


OPERATIONS = [
    Operation(
        "GET",
        "/v1/tools",
        list_tools,
        Needs.CALLER,
        data=AnyToolList,
        query=ToolQuery,
        errors=frozenset({ResourceNotFound}),
    ),
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
