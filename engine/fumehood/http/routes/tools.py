"""`/v1/tools`: the registry. Callers read it page by page; administrators change it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from fumehood.answers import (
    AgentTools,
    AnyToolList,
    Deleted,
    LeftOutTool,
    Pagination,
    ToolDetails,
    ToolList,
    ToolWithSource,
)
from fumehood.core.call import ID_PATTERN
from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    ResourceNotFound,
    ToolNotFound,
)
from fumehood.core.identity import Principal
from fumehood.core.pages import DEFAULT_PAGE, MAX_PAGE
from fumehood.core.tool import ToolDefinition, ToolType
from fumehood.core.value import Value
from fumehood.engine import Engine
from fumehood.http.endpoint import As, Method, Needs, ParsedBy, endpoint
from fumehood.registry.index import RegisteredTool, ToolFilter

ToolName = Annotated[str, "A tool's name, or `name@version`."]
PinnedName = Annotated[str, "`name@version`."]
RawDefinition = Annotated[Any, ParsedBy(lambda document: document, ToolDefinition)]
"""A definition that is not validated here. The registry validates it, and reports faults that a
model cannot detect."""


REFERENCE = {"name": "reference"}
"""Renames the path parameter to `reference` in the clients' methods. Its value is `name` or
`name@version`."""

ChangedTools = Annotated[
    tuple[ToolWithSource, ...],
    As("items", "ChangedTools", "The current definitions of the changed tools."),
]

AMOUNT = r"^[0-9]{1,9}(\.[0-9]{1,9})?$"
MOST_TOOLS = 9999


def _amount(text: str) -> str:
    if not re.fullmatch(AMOUNT, text):
        raise ValueError("must be an amount such as 0.05")
    return text


class ToolQuery(Value):
    """Which tools to list: one page of all tools, or with `agent_id` all tools of that agent."""

    limit: int = Field(
        default=DEFAULT_PAGE, ge=1, le=MAX_PAGE, description="Maximum number of items."
    )
    cursor: str | None = Field(
        default=None, description="`data.pagination.next_cursor` of the previous page."
    )
    category: str | None = Field(default=None, description="Only tools of this category.")
    tag: str | None = Field(default=None, description="Only tools with this tag.")
    type: ToolType | None = Field(default=None, description="Only tools of this type.")
    # A malformed id is answered like an unknown one.
    agent_id: Annotated[str, Field(json_schema_extra={"pattern": ID_PATTERN})] | None = Field(
        default=None,
        description="All tools of this agent. Required for `categories`, `exclude_dangerous`, "
        "`max_cost` and `at_most`.",
    )
    categories: str | None = Field(
        default=None, description="Only tools of these categories, separated by commas."
    )
    exclude_dangerous: bool = Field(default=True, description="Leave out dangerous tools.")
    max_cost: Annotated[str, AfterValidator(_amount)] | None = Field(
        default=None,
        description="Only tools that cost at most this much per use, such as `0.05`.",
        json_schema_extra={"pattern": AMOUNT},
    )
    at_most: Annotated[int, Field(ge=0, le=MOST_TOOLS)] | None = Field(
        default=None, description="Maximum number of tools."
    )

    @property
    def taken(self) -> frozenset[str]:
        """The names of the parameters that this query may contain. They depend on whether
        `agent_id` is given.
        """
        if self.agent_id is None:
            return frozenset({"category", "cursor", "limit", "tag", "type"})
        return frozenset({"agent_id", "at_most", "categories", "exclude_dangerous", "max_cost"})

    def require_taken(self) -> None:
        """Raise InvalidParams if the query contains parameters that are not in `taken`."""
        wrong = sorted(self.model_fields_set - self.taken)
        if wrong:
            raise InvalidParams(f"The query takes {', '.join(sorted(self.taken))}.", fields=wrong)


@endpoint(
    "GET",
    "/v1/tools",
    Needs.CALLER,
    data=AnyToolList,
    errors=[ResourceNotFound, ToolNotFound],
    client=None,
)
async def list_tools(engine: Engine, caller: Principal, query: ToolQuery) -> ToolList | AgentTools:
    """List the preferred version of each matching tool, one page at a time.

    The tools' sources are in a separate field, so that each item is a definition that could be
    registered unchanged in another engine.
    """
    query.require_taken()
    if query.agent_id is not None:
        return _agent_tools(engine, caller, query.agent_id, query)
    page = engine.tools_page(
        caller,
        filter_by=ToolFilter(query.category, query.tag, query.type),
        limit=query.limit,
        cursor=query.cursor,
    )
    return ToolList(
        items=tuple(tool.definition for tool in page.tools),
        sources={tool.definition.name: str(tool.source) for tool in page.tools},
        unavailable=tuple(
            tool.definition.name for tool in page.tools if not engine.can_run_now(tool.definition)
        ),
        pagination=Pagination(**page.pagination),
    )


def _agent_tools(engine: Engine, caller: Principal, agent_id: str, query: ToolQuery) -> AgentTools:
    categories = query.categories
    selection = engine.agent_tools(
        caller,
        agent_id,
        categories=None if categories is None else set(filter(None, categories.split(","))),
        exclude_dangerous=query.exclude_dangerous,
        max_cost=None if query.max_cost is None else Decimal(query.max_cost),
        at_most=query.at_most,
    )
    return AgentTools(
        items=selection.tools,
        left_out=tuple(LeftOutTool(name=t.name, reason=t.reason) for t in selection.left_out),
        pagination=Pagination(has_more=False, next_cursor=None, total_count=len(selection.tools)),
    )


@endpoint(
    "GET",
    "/v1/tools/{name}",
    Needs.CALLER,
    errors=[ToolNotFound],
    client=Method("tool", renamed=REFERENCE),
)
async def show_tool(engine: Engine, name: ToolName) -> ToolDetails:
    """Show one tool, named `name` or `name@version`, and its other versions."""
    return engine.tool(name)


@endpoint(
    "POST",
    "/v1/tools",
    Needs.ADMIN,
    errors=[IdempotencyConflict],
    client=Method("tools.add", whole="document", is_one=True),
)
async def register_tool(engine: Engine, caller: Principal, body: RawDefinition) -> ChangedTools:
    """Add one version of a REST or MCP tool."""
    tool = await engine.registrations.register(body, by=caller, now=engine.now())
    return _changed(engine, [tool])


@endpoint(
    "PUT",
    "/v1/tools/{name}",
    Needs.ADMIN,
    errors=[ToolNotFound, PermissionDenied],
    client=Method("tools.replace", renamed=REFERENCE, whole="document", is_one=True),
)
async def replace_tool(
    engine: Engine, caller: Principal, name: PinnedName, body: RawDefinition
) -> ChangedTools:
    """Replace the definition of a registered version of a tool."""
    tool_name, version = _pinned(name)
    tool = await engine.registrations.replace(tool_name, version, body, by=caller, now=engine.now())
    return _changed(engine, [tool])


@endpoint(
    "DELETE",
    "/v1/tools/{name}",
    Needs.ADMIN,
    errors=[InvalidParams, ToolNotFound, PermissionDenied],
    client=Method("tools.remove", renamed=REFERENCE),
)
async def delete_tool(engine: Engine, caller: Principal, name: PinnedName) -> Deleted:
    """Remove a registered version of a tool."""
    tool_name, version = _pinned(name)
    await engine.registrations.delete(tool_name, version, by=caller, now=engine.now())
    return Deleted(deleted=name)


@endpoint(
    "POST",
    "/v1/tools/{name}/activate",
    Needs.ADMIN,
    errors=[ToolNotFound],
    client=Method("tools.enable", renamed=REFERENCE),
)
async def activate_tool(engine: Engine, caller: Principal, name: ToolName) -> ChangedTools:
    """Enable one version (`name@version`), or all versions, of a tool."""
    return await _switch(engine, caller, name, is_active=True)


@endpoint(
    "POST",
    "/v1/tools/{name}/deactivate",
    Needs.ADMIN,
    errors=[ToolNotFound],
    client=Method("tools.disable", renamed=REFERENCE),
)
async def deactivate_tool(engine: Engine, caller: Principal, name: ToolName) -> ChangedTools:
    """Disable one version (`name@version`), or all versions, of a tool."""
    return await _switch(engine, caller, name, is_active=False)


async def _switch(
    engine: Engine, by: Principal, reference: str, *, is_active: bool
) -> ChangedTools:
    name, _, version = reference.partition("@")
    tools = await engine.registrations.switch(
        name, version or None, is_active=is_active, by=by, now=engine.now()
    )
    return _changed(engine, tools)


def _pinned(reference: str) -> tuple[str, str]:
    name, _, version = reference.partition("@")
    if not version:
        raise InvalidParams("Give the version: name@1.2.0.", fields=["name"])
    return name, version


def _changed(engine: Engine, tools: Iterable[RegisteredTool]) -> ChangedTools:
    return tuple(
        ToolWithSource(
            **dict(tool.definition),
            source=str(tool.source),
            findings=engine.findings(tool),
        )
        for tool in tools
    )


OPERATIONS = [list_tools, show_tool]
CONTROL_OPERATIONS = [register_tool, replace_tool, delete_tool, activate_tool, deactivate_tool]
