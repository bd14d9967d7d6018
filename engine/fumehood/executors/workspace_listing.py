"""A page of what is in a workspace, and where the next one begins.

Host side. The guest gives entries in the order of their paths, after one that is named; a
cursor holds the last path seen, so that what changes meanwhile repeats and skips nothing that
was there all the time. Invariant: each page begins after the one before it, whatever the guest
says, so that no list is without an end.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from fumehood.core.errors import EngineError, InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.workspace import WorkspaceEntry
from fumehood.executors.workspace_claims import Entry, Listing
from fumehood.executors.workspace_guest import Said, ask, not_as_agreed
from fumehood.observe.clock import timestamp
from fumehood.protocol.cursors import Cursors
from fumehood.sandbox.wall import Lease, RunEnding

DEFAULT_LIMIT = 10
MAX_LIMIT = 100
"""Entries of a page (mission E5)."""

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


@dataclass(frozen=True, slots=True)
class ListingPage:
    """Some entries, and `data.pagination` (mission E5)."""

    items: tuple[WorkspaceEntry, ...]
    pagination: JsonObject


@dataclass(frozen=True, slots=True)
class ListingEnd:
    """How the request ended: with a page, or an error in its place."""

    ending: RunEnding
    page: ListingPage | None = None
    error: EngineError | None = None


async def list_page(
    lease: Lease, query: ListingQuery, limits: Limits, cursors: Cursors
) -> ListingEnd:
    """One page.

    Raises:
        InvalidParams: a cursor of another list, or a limit out of range.
    """
    if not 1 <= query.limit <= MAX_LIMIT:
        raise InvalidParams(f"limit must be from 1 to {MAX_LIMIT}.", fields=["limit"])
    after = ""
    if query.cursor is not None:
        after = cursors.read(query.cursor, query.listing, query.principal_id)
    request: JsonObject = {
        "do": "list",
        "path": query.path,
        "recursive": query.recursive,
        "most": query.limit,
    }
    if after:
        request["after"] = after
    said: Said[Listing] = await ask(lease, request, limits, Listing)
    if said.value is None:
        return ListingEnd(said.ending, error=said.error)
    entries, has_more = said.value.entries, said.value.has_more
    if not _goes_forward(entries, after) or len(entries) > query.limit or has_more > len(entries):
        return ListingEnd(said.ending, error=not_as_agreed())
    cursor = cursors.make(query.listing, query.principal_id, entries[-1].path) if has_more else None
    pagination: JsonObject = {
        "has_more": has_more,
        "next_cursor": cursor,
        "total_count": None if has_more or after else len(entries),
    }
    return ListingEnd(said.ending, ListingPage(tuple(map(as_shown, entries)), pagination))


def _goes_forward(entries: list[Entry], after: str) -> bool:
    """Whether each path comes after the one before it."""
    paths = [after, *(entry.path for entry in entries)]
    return all(one < other for one, other in pairwise(paths))


def as_shown(entry: Entry) -> WorkspaceEntry:
    """An entry as answers show it."""
    modified = EPOCH + timedelta(microseconds=entry.modified_ns // 1000)
    return WorkspaceEntry(
        path=entry.path, kind=entry.kind, size=entry.size, modified_at=timestamp(modified)
    )
