"""The requests that the tools for session files send to the guest's program `files`, and the pages
of file listings.

Host side. Invariants: the survey before an approval and the action after it are made from the same
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
    """The guest's answer to the request to remove an unfinished upload. It has no fields."""


def write_request(arguments: JsonObject) -> JsonObject:
    """Return the request to the guest for a call of `write_file` with these arguments."""
    return {
        "do": "write",
        "path": arguments["path"],
        "content_base64": base64.b64encode(content_of(arguments)).decode("ascii"),
        "mode": arguments.get("mode") or "create",
    }


def content_of(arguments: JsonObject) -> bytes:
    """Return the bytes that a call of `write_file` with these arguments would write."""
    text = arguments.get("content")
    return base64.b64decode(arguments["content_base64"]) if text is None else text.encode()


def delete_request(arguments: JsonObject) -> JsonObject:
    """Return the request to the guest for a call of `delete_files` with these arguments. A path
    that occurs twice is sent once.
    """
    paths = list(dict.fromkeys(arguments["paths"]))
    return {"do": "delete", "paths": paths, "recursive": arguments.get("recursive") or False}


def deletion_error(done: Deletion) -> EngineError | None:
    """Return the error for a deletion that failed completely or in part. Return None if it
    succeeded.
    """
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
    """Asks for one page of a directory's entries. If `path` is empty, the directory is the
    workspace itself.
    """

    session_id: str
    principal_id: str
    path: str = ""
    recursive: bool = False
    limit: int = DEFAULT_PAGE
    cursor: str | None = None

    @property
    def listing(self) -> str:
        """The name of the listing to which the page belongs. A cursor is valid only for one
        listing.
        """
        return f"files:{self.session_id}:{self.recursive}:{self.path}"


@dataclass(frozen=True, slots=True)
class ListingPage:
    """One page of a directory's entries. `pagination` is the field of this name in the answer:
    whether there are more entries, the cursor of the next page, and the total number if it is
    known.
    """

    items: tuple[WorkspaceEntry, ...]
    pagination: JsonObject


async def list_page(
    lease: Lease, query: ListingQuery, limits: Limits, cursors: Cursors
) -> Said[ListingPage]:
    """Ask the guest for one page of a directory's entries. Return the page, or the guest's error,
    as a `Said`. `cursors` reads the query's cursor and makes the cursor of the next page.

    Raises:
        InvalidParams: the cursor is invalid or belongs to another listing, or `limit` is out of
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
    """Whether the paths of `entries` are in ascending order, and all come after the path
    `after`.
    """
    paths = [after, *(entry.path for entry in entries)]
    return all(before < other for before, other in pairwise(paths))


def as_shown(entry: Entry) -> WorkspaceEntry:
    """Return an entry of the guest's listing in the form in which callers see it."""
    modified = EPOCH + timedelta(microseconds=entry.modified_ns // 1000)
    return WorkspaceEntry(
        path=entry.path, kind=entry.kind, size=entry.size, modified_at=timestamp(modified)
    )
