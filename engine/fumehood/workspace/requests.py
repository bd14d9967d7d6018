"""Requests to the guest's program `files` for the tools on session files, and pages of listings.

Host side. Invariants: the survey before an approval and the action after it are built from the same
request; each page of a listing begins after the previous page, so every listing ends.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from fumehood.core.errors import EngineError, ExecutionError, InvalidParams, ResourceNotFound
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.pages import DEFAULT_PAGE, MAX_PAGE
from fumehood.core.session import WorkspaceEntry
from fumehood.executors.claims import Claim
from fumehood.executors.workspace_guest import (
    FAULT_WORDS,
    Deletion,
    Entry,
    Listing,
    Said,
    ask,
    not_as_agreed,
)
from fumehood.observe.clock import timestamp
from fumehood.protocol.cursors import Cursors
from fumehood.sandbox.wall import Lease


class Dropped(Claim):
    """The guest's answer after it has removed an upload. It has no fields."""


def write_request(arguments: JsonObject) -> JsonObject:
    """Return the guest's request for the tool `write_file`."""
    return {
        "do": "write",
        "path": arguments["path"],
        "content_base64": base64.b64encode(content_of(arguments)).decode("ascii"),
        "mode": arguments.get("mode") or "create",
    }


def content_of(arguments: JsonObject) -> bytes:
    """Return the bytes that a call of `write_file` would write."""
    text = arguments.get("content")
    return base64.b64decode(arguments["content_base64"]) if text is None else text.encode()


def delete_request(arguments: JsonObject) -> JsonObject:
    """Return the guest's request for the tool `delete_files`. Repeated paths are sent once."""
    paths = list(dict.fromkeys(arguments["paths"]))
    return {"do": "delete", "paths": paths, "recursive": arguments.get("recursive") or False}


def deletion_error(done: Deletion) -> EngineError | None:
    """Return the error of a deletion that failed completely or in part, or None if it succeeded."""
    if done.failed:
        names = "; ".join(entry.path for entry in done.failed[:5])[:300]
        rest = "" if done.deleted else " Nothing was deleted."
        words = f"These paths could not be deleted: {names}.{rest}"
        return ExecutionError(words, details=done.model_dump())
    if not done.deleted:
        words = FAULT_WORDS["not_found"]
        return ResourceNotFound(words, fields=["paths"], details=done.model_dump())
    return None


# -- listings ------------------------------------------------------------------------------

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ListingQuery:
    """A request for one page of a directory's entries. An empty `path` is the workspace itself."""

    session_id: str
    principal_id: str
    path: str = ""
    recursive: bool = False
    limit: int = DEFAULT_PAGE
    cursor: str | None = None

    @property
    def listing(self) -> str:
        """The name of this listing. A cursor is valid only for the listing that it names."""
        return f"files:{self.session_id}:{self.recursive}:{self.path}"


@dataclass(frozen=True, slots=True)
class ListingPage:
    """The entries of one page, and the answer's field `pagination`."""

    items: tuple[WorkspaceEntry, ...]
    pagination: JsonObject


async def list_page(
    lease: Lease, query: ListingQuery, limits: Limits, cursors: Cursors
) -> Said[ListingPage]:
    """Request one page of a directory's entries from the guest, and return it.

    Raises:
        InvalidParams: the cursor is invalid or belongs to another list, or the limit is out of
            range.
    """
    if not 1 <= query.limit <= MAX_PAGE:
        raise InvalidParams(f"limit must be from 1 to {MAX_PAGE}.", fields=["limit"])
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
        return Said(said.ending, error=said.error)
    entries, has_more = said.value.entries, said.value.has_more
    if not goes_forward(entries, after) or len(entries) > query.limit or has_more > len(entries):
        return Said(said.ending, error=not_as_agreed())
    cursor = cursors.make(query.listing, query.principal_id, entries[-1].path) if has_more else None
    pagination: JsonObject = {
        "has_more": has_more,
        "next_cursor": cursor,
        "total_count": None if has_more or after else len(entries),
    }
    return Said(said.ending, ListingPage(tuple(map(as_shown, entries)), pagination))


def goes_forward(entries: list[Entry], after: str) -> bool:
    """Whether the paths are in ascending order and come after `after`."""
    paths = [after, *(entry.path for entry in entries)]
    return all(before < other for before, other in pairwise(paths))


def as_shown(entry: Entry) -> WorkspaceEntry:
    """Convert a guest's entry to the form that is used in answers to callers."""
    modified = EPOCH + timedelta(microseconds=entry.modified_ns // 1000)
    return WorkspaceEntry(
        path=entry.path, kind=entry.kind, size=entry.size, modified_at=timestamp(modified)
    )
