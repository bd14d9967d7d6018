"""A page of the list of tools: filters, order, and where the next page begins.

Host side, read by the faces through the engine. Tools are in order of their names and a cursor
holds the last name seen, so a registry that changes meanwhile repeats and skips nothing that
was there all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition, ToolType
from fumehood.protocol import strict_json
from fumehood.protocol.cursors import Cursors
from fumehood.registry.index import RegisteredTool, ToolIndex

DEFAULT_LIMIT = 10
MAX_LIMIT = 100


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Which tools a list shows. An absent field filters nothing; others match exactly."""

    category: str | None = None
    tag: str | None = None
    type: ToolType | None = None

    def accepts(self, tool: ToolDefinition) -> bool:
        """Whether every given field matches."""
        return (
            (self.category is None or tool.category == self.category)
            and (self.tag is None or self.tag in tool.tags)
            and (self.type is None or tool.type == self.type)
        )

    @property
    def listing(self) -> str:
        """The list's name for its cursors: another filter is another list."""
        return "tools" + strict_json.dumps([self.category, self.tag, self.type]).decode()


@dataclass(frozen=True, slots=True)
class ToolPage:
    """Some tools of a list, and `data.pagination` (mission E5)."""

    tools: list[RegisteredTool]
    next_cursor: str | None
    total_count: int

    @property
    def pagination(self) -> JsonObject:
        """As the envelope shows it."""
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
    """One page of the preferred versions.

    Raises:
        InvalidParams: a limit out of range, or a cursor of another list or principal.
    """
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidParams(f"limit must be from 1 to {MAX_LIMIT}.", fields=["limit"])
    listing = filter_by.listing
    after = "" if cursor is None else cursors.read(cursor, listing, principal_id)
    found, total = index.page(filter_by.accepts, after, limit + 1)
    tools = found[:limit]
    more = len(found) > limit
    last = tools[-1].definition.name if more else ""
    return ToolPage(tools, cursors.make(listing, principal_id, last) if more else None, total)
