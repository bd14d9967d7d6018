"""Lists of tools: a page with filters and a cursor, and the tools that suit an agent.

Host side, used by the faces through the engine. Tools are sorted by name and a cursor holds the
last name, so a registry that changes meanwhile neither repeats nor skips tools that stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from decimal import Decimal

from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.pages import MAX_PAGE
from fumehood.core.tool import ToolDefinition, ToolType
from fumehood.protocol import strict_json
from fumehood.protocol.cursors import Cursors
from fumehood.registry.index import RegisteredTool, ToolIndex


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """The filters of a list. None accepts every tool; other values must match exactly."""

    category: str | None = None
    tag: str | None = None
    type: ToolType | None = None

    def accepts(self, tool: ToolDefinition) -> bool:
        """Whether a tool matches every given filter."""
        return (
            (self.category is None or tool.category == self.category)
            and (self.tag is None or self.tag in tool.tags)
            and (self.type is None or tool.type == self.type)
        )

    @property
    def listing(self) -> str:
        """The list's name, to which its cursors are bound. Each combination of filters is a list of
        its own.
        """
        return "tools" + strict_json.dumps([self.category, self.tag, self.type]).decode()


@dataclass(frozen=True, slots=True)
class ToolPage:
    """One page of a list of tools."""

    tools: list[RegisteredTool]
    next_cursor: str | None
    total_count: int

    @property
    def pagination(self) -> JsonObject:
        """The envelope's `data.pagination` (mission E5)."""
        return {
            "has_more": self.next_cursor is not None,
            "next_cursor": self.next_cursor,
            "total_count": self.total_count,
        }


def page_of_tools(
    index: ToolIndex,
    cursors: Cursors,
    principal_id: str,
    *,
    filter_by: ToolFilter,
    limit: int,
    cursor: str | None,
) -> ToolPage:
    """Return one page of the preferred versions.

    Raises:
        InvalidParams: the limit is out of range, or the cursor is of another list or principal.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidParams(f"limit must be from 1 to {MAX_PAGE}.", fields=["limit"])
    listing = filter_by.listing
    after = "" if cursor is None else cursors.read(cursor, listing, principal_id)
    found, total = index.page(filter_by.accepts, after, limit + 1)
    tools = found[:limit]
    more = len(found) > limit
    last = tools[-1].definition.name if more else ""
    return ToolPage(tools, cursors.make(listing, principal_id, last) if more else None, total)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A tool that was not chosen, and the first reason against it."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen tools in their given order, and those that were not chosen."""

    tools: tuple[ToolDefinition, ...]
    left_out: tuple[LeftOut, ...]


def filter_tools(
    tools: Iterable[ToolDefinition],
    *,
    categories: Collection[str] | None = None,
    exclude_dangerous: bool = True,
    max_cost: Decimal | None = None,
    at_most: int | None = None,
) -> Selection:
    """Choose tools (mission R2), at most `at_most` of them, in their given order.

    If `categories` is None, every category is allowed; if it is empty, none is. `max_cost` is the
    highest allowed `cost_per_use`. Disabled tools are never chosen.
    """
    kept: list[ToolDefinition] = []
    left_out: list[LeftOut] = []
    for tool in tools:
        reason = _reason_against(tool, categories, exclude_dangerous, max_cost)
        if reason is None and at_most is not None and len(kept) >= at_most:
            reason = f"more than {at_most} tools"
        if reason is None:
            kept.append(tool)
        else:
            left_out.append(LeftOut(tool.name, reason))
    return Selection(tuple(kept), tuple(left_out))


def _reason_against(
    tool: ToolDefinition,
    categories: Collection[str] | None,
    exclude_dangerous: bool,
    max_cost: Decimal | None,
) -> str | None:
    if not tool.is_active:
        return "it is disabled"
    if exclude_dangerous and tool.dangerous:
        return "it is dangerous"
    if categories is not None and tool.category not in categories:
        return f"its category is {tool.category or 'none'}"
    if max_cost is not None and tool.cost_per_use > max_cost:
        return f"it costs {tool.cost_per_use} a use"
    return None
