"""`/v1/tools`: the registry. Callers read it, a page at a time; the control socket changes it."""

from __future__ import annotations

import re
from decimal import Decimal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import (
    AgentTools,
    AnyToolList,
    ChangedTools,
    Deleted,
    LeftOutTool,
    Pagination,
    ToolDetails,
    ToolList,
    ToolWithSource,
)
from fumehood.core.call import Id
from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    ResourceNotFound,
    ToolNotFound,
)
from fumehood.core.identity import Principal
from fumehood.core.tool import ToolDefinition, ToolType
from fumehood.http.answers import answer, engine_of, read_json
from fumehood.http.caller import require_admin, require_principal
from fumehood.http.operation import Needs, Operation
from fumehood.registry.index import RegisteredTool
from fumehood.registry.listing import DEFAULT_LIMIT, MAX_LIMIT, ToolFilter

PARAMETERS = ("category", "cursor", "limit", "tag", "type")
AGENT_PARAMETERS = ("agent_id", "at_most", "categories", "exclude_dangerous", "max_cost")
"""With `agent_id`, the complete list of that agent, in its order."""

TOOL = {"name": "A tool's name, or `name@version`."}

PINNED = {"name": "`name@version`."}


class ToolQuery(BaseModel):
    """The query parameters, for the document; they are parsed below."""

    limit: int = Field(
        default=DEFAULT_LIMIT, ge=1, le=MAX_LIMIT, description="Maximum number of items."
    )
    cursor: str | None = Field(
        default=None, description="`data.pagination.next_cursor` of the previous page."
    )
    category: str | None = Field(default=None, description="Only this category.")
    tag: str | None = Field(default=None, description="Only tools with this tag.")
    type: ToolType | None = Field(default=None, description="Only this type.")
    agent_id: Id | None = Field(
        default=None, description="All tools of that agent; required for the parameters below."
    )
    categories: str | None = Field(default=None, description="Only these, separated by commas.")
    exclude_dangerous: bool = Field(default=True, description="Leave out dangerous tools.")
    max_cost: str | None = Field(default=None, description="Only up to this cost per use: `0.05`.")
    at_most: int | None = Field(default=None, ge=0, description="Only this many.")


_BOOLEANS = {"true": True, "false": False}


async def list_tools(request: Request) -> Response:
    """List the preferred version of each matching tool, one page at a time.

    Sources are beside the items, so that each item is a definition that could be registered
    elsewhere unchanged.
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
    """Show one tool by `name` or `name@version`, and its other versions."""
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
    """Read the query strictly: an ignored parameter would be believed to work."""
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


async def register_tool(request: Request) -> Response:
    """Add one version of a REST or MCP tool."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = engine_of(request)
    tool = await engine.registrations.register(document, by=by, now=engine.now())
    return _changed(request, [tool])


async def replace_tool(request: Request) -> Response:
    """Replace the definition of a registered version."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = engine_of(request)
    name, version = _pinned(request)
    tool = await engine.registrations.replace(name, version, document, by=by, now=engine.now())
    return _changed(request, [tool])


async def delete_tool(request: Request) -> Response:
    """Remove a registered version."""
    by = await require_admin(request)
    engine = engine_of(request)
    name, version = _pinned(request)
    await engine.registrations.delete(name, version, by=by, now=engine.now())
    return answer(request, Deleted(deleted=f"{name}@{version}"))


async def activate_tool(request: Request) -> Response:
    """Enable one version (`name@version`), or all versions, of a tool."""
    return await _switch(request, is_active=True)


async def deactivate_tool(request: Request) -> Response:
    """Disable one version (`name@version`), or all versions, of a tool."""
    return await _switch(request, is_active=False)


async def _switch(request: Request, *, is_active: bool) -> Response:
    by = await require_admin(request)
    engine = engine_of(request)
    name, _, version = request.path_params["name"].partition("@")
    tools = await engine.registrations.switch(
        name, version or None, is_active=is_active, by=by, now=engine.now()
    )
    return _changed(request, tools)


def _pinned(request: Request) -> tuple[str, str]:
    name, _, version = request.path_params["name"].partition("@")
    if not version:
        raise InvalidParams("Give the version: name@1.2.0.", fields=["name"])
    return name, version


def _changed(request: Request, tools: list[RegisteredTool]) -> Response:
    items = tuple(
        ToolWithSource(**dict(tool.definition), source=tool.source.value) for tool in tools
    )
    return answer(request, ChangedTools(items=items))


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

CONTROL_OPERATIONS = [
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
