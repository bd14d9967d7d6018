"""The executor of tools for a session's workspace: read, write, list and delete its files.

Host side, between `pipeline/execute` and the lease on a session. No code of the caller runs: each
call is one request to the guest's program `files`. Invariant: paths are validated before they are
sent, and an answer that does not have the expected form is an error.
"""

from __future__ import annotations

import base64
from codecs import getincrementaldecoder
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from fumehood.core.errors import (
    InternalError,
    InvalidParams,
    WorkspaceChanged,
)
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.pages import DEFAULT_PAGE
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import A_SESSION, Executor, Placement, ToolRun
from fumehood.executors.effects import PREVIEWS, Effect, effect_of
from fumehood.executors.endings import state_words
from fumehood.executors.outcome import MAX_DATA_BYTES, Outcome
from fumehood.executors.program import session_fields
from fumehood.executors.workspace_guest import (
    Deletion,
    ListingQuery,
    Piece,
    Said,
    Written,
    ask,
    delete_request,
    deletion_error,
    list_page,
    not_as_agreed,
    write_request,
)
from fumehood.protocol.cursors import Cursors
from fumehood.sandbox.wall import Lease

DEFAULT_READ_BYTES = 10 * 1024
"""Bytes of a file that a call without `limit` reads: as many as other texts may have in an answer
(mission E6)."""

FILE_CONTENTS = frozenset({"content", "content_base64"})
"""Fields that hold a file's content. The caller chose its size, so they are never shortened."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The session's container and the caller for whom an action is done."""

    lease: Lease
    limits: Limits
    domain: TrustDomain
    cursors: Cursors
    guard: JsonObject
    """The request's field `expected` with the approved `base`; empty if nothing was previewed."""


_PLACEMENT = Placement(
    "container",
    "container",
    "executors 'workspace:…' always run in the guest, in the container of the call's session, as "
    "its unprivileged user",
    isolations=A_SESSION,
    is_of_session=True,
)


class WorkspaceExecutor(Executor):
    """One action on the files of a session: read, write, list or delete."""

    def __init__(self, action: str) -> None:
        self.has_preview = f"workspace:{action}" in PREVIEWS

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _PLACEMENT

    async def preview(
        self, tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
    ) -> Effect | None:
        return await effect_of(tool, arguments, limits, lease)

    def run(self, run: ToolRun) -> Coroutine[Any, Any, Outcome]:
        return run_workspace(
            run.tool.definition,
            run.arguments,
            run.limits,
            run.lease,
            run.domain,
            run.cursors,
            expected=run.expected,
        )


async def run_workspace(
    tool: ToolDefinition,
    arguments: JsonObject,
    limits: Limits,
    lease: Lease,
    domain: TrustDomain,
    cursors: Cursors,
    *,
    expected: str | None = None,
) -> Outcome:
    """Carry out the tool's action in the workspace of the call's session.

    `expected` is the `base` of an approved `effects.Effect`. The guest then acts only if everything
    that the action reads or changes is still the same; it compares and acts in one request.

    Raises:
        WorkspaceChanged: something differs from `expected`. Nothing was changed.
    """
    assert domain.session_id is not None  # its placement is in a session
    if expected is not None and tool.executor not in PREVIEWS:
        raise InternalError("A tool without a preview was to be held to one.")
    guard: JsonObject = {} if expected is None else {"expected": expected}
    place = _Place(lease, limits, domain, cursors, guard)
    match tool.executor:
        case "workspace:read":
            done = await _read(arguments, place)
        case "workspace:write":
            done = await _write(arguments, place)
        case "workspace:list":
            done = await _list(arguments, place)
        case _:
            done = await _delete(arguments, place)
    ending, error = done.ending, done.error
    session = session_fields(domain.session_id, ending)
    if isinstance(error, WorkspaceChanged):
        raise error
    if error is not None:
        error.details = {**(error.details or {}), "session": session}
    return Outcome(
        ended_by=ending.ended_by,
        isolation=ending.isolation,
        node=ending.node,
        data={**done.required, "session": session} if error is None else None,
        error=error,
        cpu_ms=ending.cpu_ms,
        peak_memory_bytes=ending.peak_memory_bytes,
        warnings=state_words(ending),
        max_data_bytes=MAX_DATA_BYTES,
        whole_fields=FILE_CONTENTS,
    )


async def _read(arguments: JsonObject, place: _Place) -> Said[JsonObject]:
    path, offset = arguments["path"], arguments.get("offset") or 0
    length = arguments.get("limit") or DEFAULT_READ_BYTES
    request = {"do": "read", "path": path, "offset": offset, "length": length}
    said = await ask(place.lease, request, place.limits, Piece)
    if said.value is None:
        return Said(said.ending, error=said.error)
    if not said.value.is_of(offset, length):
        return Said(said.ending, error=not_as_agreed())
    raw, size = said.value.content, said.value.size
    encoding = arguments.get("encoding")
    is_last = offset + len(raw) >= size
    text = None if encoding == "base64" else _as_text(raw, is_last=is_last)
    if text is not None:
        raw = text.encode()
        content: JsonObject = {"content": text}
    elif encoding == "text":
        return Said(said.ending, error=_no_text(offset))
    else:
        content = {"content_base64": base64.b64encode(raw).decode("ascii")}
    end = offset + len(raw)
    has_more = end < size
    data = {
        "path": path,
        **content,
        "size": size,
        "has_more": has_more,
        "next_offset": end if has_more else None,
    }
    return Said(said.ending, data)


def _as_text(raw: bytes, *, is_last: bool) -> str | None:
    """Decode UTF-8 text, or return None if the bytes are not text.

    Unless these are the last bytes of the file, an incomplete character at the end is left out.
    """
    try:
        text = getincrementaldecoder("utf-8")().decode(raw, final=is_last)
    except UnicodeDecodeError:
        return None
    return text if text or not raw else None


def _no_text(offset: int) -> InvalidParams:
    where = "" if not offset else ", or offset is in the middle of a character"
    return InvalidParams(
        f"This is not UTF-8 text{where}. Read it with encoding 'base64'.", fields=["encoding"]
    )


async def _write(arguments: JsonObject, place: _Place) -> Said[JsonObject]:
    request = write_request(arguments) | place.guard
    said = await ask(place.lease, request, place.limits, Written)
    if said.value is None:
        return Said(said.ending, error=said.error)
    return Said(said.ending, {"path": arguments["path"], "size": said.value.size})


async def _list(arguments: JsonObject, place: _Place) -> Said[JsonObject]:
    domain = place.domain
    query = ListingQuery(
        session_id=domain.session_id or "",
        principal_id=domain.principal_id,
        path=arguments.get("path") or "",
        recursive=arguments.get("recursive") or False,
        limit=arguments.get("limit") or DEFAULT_PAGE,
        cursor=arguments.get("cursor"),
    )
    said = await list_page(place.lease, query, place.limits, place.cursors)
    if said.value is None:
        return Said(said.ending, error=said.error)
    items = [entry.model_dump() for entry in said.value.items]
    return Said(said.ending, {"items": items, "pagination": said.value.pagination})


async def _delete(arguments: JsonObject, place: _Place) -> Said[JsonObject]:
    request = delete_request(arguments) | place.guard
    paths = request["paths"]
    said = await ask(place.lease, request, place.limits, Deletion)
    if said.value is None:
        return Said(said.ending, error=said.error)
    if not said.value.is_of(paths):
        return Said(said.ending, error=not_as_agreed())
    return Said(said.ending, said.value.model_dump(), deletion_error(said.value))
