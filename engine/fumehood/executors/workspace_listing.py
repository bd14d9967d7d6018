"""A page of what is in a workspace, and where the next one begins.

Host side. The guest gives the first entries in order of their paths, at most a thousand; a
page is a part of those. What lies beyond them is found by naming a directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from fumehood.executors.workspace_claims import MAX_LISTED, Entry, Listing
from fumehood.executors.workspace_guest import Said, ask
from fumehood.model.errors import InvalidParams
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import Limits
from fumehood.model.workspace import WorkspaceEntry
from fumehood.observe.clock import timestamp
from fumehood.sandbox.wall import Lease
from fumehood.wire.cursors import Cursors

DEFAULT_LIMIT = 10
MAX_LIMIT = 100
"""Entries of a page (mission E5)."""

BEYOND = (
    f"list: only the first {MAX_LISTED} entries can be listed, and there are more; name a "
    "directory (path), or count and filter with run_shell"
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ListingQuery:
    """Which part of which directory. An empty `path` is the workspace itself."""

    session_id: str
    principal_id: str
    path: str = ""
    recursive: bool = False
    limit: int = DEFAULT_LIMIT
    cursor: str | None = None

    @property
    def listing(self) -> str:
        """The list's name for its cursors."""
        return f"files:{self.session_id}:{self.recursive}:{self.path}"

    def start(self, cursors: Cursors) -> int:
        """Where the page begins. Raises InvalidParams where the cursor is another list's."""
        if self.cursor is None:
            return 0
        return int(cursors.read(self.cursor, self.listing, self.principal_id))


@dataclass(frozen=True, slots=True)
class ListingPage:
    """Some entries, and `data.pagination` (mission E5)."""

    items: tuple[WorkspaceEntry, ...]
    pagination: JsonObject
    is_cut: bool
    """Whether there is more that no cursor leads to."""


async def list_page(
    lease: Lease, query: ListingQuery, limits: Limits, cursors: Cursors
) -> tuple[Said[Listing], ListingPage | None]:
    """One page.

    Raises:
        InvalidParams: a cursor of another list, or a limit out of range.
    """
    if not 1 <= query.limit <= MAX_LIMIT:
        raise InvalidParams(f"limit must be from 1 to {MAX_LIMIT}.", fields=["limit"])
    start = query.start(cursors)
    end = start + query.limit
    request: JsonObject = {
        "do": "list",
        "path": query.path,
        "recursive": query.recursive,
        "most": min(MAX_LISTED, end + 1),
    }
    said = await ask(lease, request, limits, Listing)
    if said.value is None:
        return said, None
    entries, has_more = said.value.entries, said.value.has_more
    goes_on = len(entries) > end
    next_cursor = cursors.make(query.listing, query.principal_id, str(end)) if goes_on else None
    page = ListingPage(
        items=tuple(map(as_shown, entries[start:end])),
        pagination={
            "has_more": goes_on or has_more,
            "next_cursor": next_cursor,
            "total_count": None if has_more else len(entries),
        },
        is_cut=has_more and not goes_on,
    )
    return said, page


def as_shown(entry: Entry) -> WorkspaceEntry:
    """An entry as answers show it."""
    modified = EPOCH + timedelta(microseconds=entry.modified_ns // 1000)
    return WorkspaceEntry(
        path=entry.path, kind=entry.kind, size=entry.size, modified_at=timestamp(modified)
    )
