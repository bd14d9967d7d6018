"""Tools on the workspace of a session: read, write, list and delete its files.

Host side, between `pipeline/execute` and the lease on a session. No code of the caller's runs:
each call is one request to the guest's program `files`. Invariant: a path was checked here
before it was sent, and what comes back is in the agreed form or an error.
"""

from __future__ import annotations

import base64
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from fumehood.core.errors import (
    EngineError,
    InternalError,
    InvalidParams,
    WorkspaceChanged,
)
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import A_SESSION, Executor, Placement, ToolRun
from fumehood.executors.effects import PREVIEWS, Effect, effect_of
from fumehood.executors.outcome import Outcome
from fumehood.executors.program import session_fields
from fumehood.executors.workspace_guest import (
    DEFAULT_LIMIT,
    Deletion,
    ListingQuery,
    NotAsAgreed,
    Piece,
    Written,
    ask,
    delete_request,
    deletion_error,
    fitting_piece,
    list_page,
    not_as_agreed,
    write_request,
)
from fumehood.protocol.cursors import Cursors
from fumehood.sandbox.wall import Lease, RunEnding

DEFAULT_READ_BYTES = 10 * 1024
"""The inline limit of any other text (mission E6)."""

MAX_DATA_BYTES = 2 << 20
"""The largest piece of a file in JSON's escapes fits in it."""

FILE_CONTENTS = frozenset({"content", "content_base64"})
"""Fields that hold a file's content: asked for by size, and never shortened."""

MAX_CHARACTER_BYTES = 4
"""*Source*: RFC 3629."""


@dataclass(frozen=True, slots=True)
class _Done:
    """What one action came to: `data`, or `error` in its place."""

    ending: RunEnding
    data: JsonObject
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where, and for whom."""

    lease: Lease
    limits: Limits
    domain: TrustDomain
    cursors: Cursors
    guard: JsonObject
    """The hash of what was approved, where there was one."""


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
    """Do what the tool's executor names to the workspace of the call's session.

    With `expected`, the `base` of an `effects.Effect`, it is done only where everything that it
    looks at or changes is as it was then: the guest compares and acts in one request.

    Raises:
        WorkspaceChanged: it is not, and nothing was changed.
    """
    if domain.session_id is None:
        raise InternalError("A tool on a workspace was let through without a session.")
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
        data={**done.data, "session": session} if error is None else None,
        error=error,
        cpu_ms=ending.cpu_ms,
        peak_memory_bytes=ending.peak_memory_bytes,
        max_data_bytes=MAX_DATA_BYTES,
        whole_fields=FILE_CONTENTS,
    )


async def _read(arguments: JsonObject, place: _Place) -> _Done:
    path, offset = arguments["path"], arguments.get("offset") or 0
    length = arguments.get("limit") or DEFAULT_READ_BYTES
    request = {"do": "read", "path": path, "offset": offset, "length": length}
    said = await ask(place.lease, request, place.limits, Piece)
    if said.value is None:
        return _Done(said.ending, {}, said.error)
    size = said.value.size
    try:
        raw = fitting_piece(said.value, offset, length)
    except NotAsAgreed:
        return _Done(said.ending, {}, not_as_agreed())
    encoding = arguments.get("encoding")
    is_last = offset + len(raw) >= size
    text = None if encoding == "base64" else _as_text(raw, is_last=is_last)
    if text is not None:
        raw = text.encode()
        content: JsonObject = {"content": text}
    elif encoding == "text":
        return _Done(said.ending, {}, _no_text(offset))
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
    return _Done(said.ending, data)


def _as_text(raw: bytes, *, is_last: bool) -> str | None:
    """The bytes as text, without a character cut at the end, or None if they are not text."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        is_cut = error.reason == "unexpected end of data" and error.start > 0
        if is_last or not is_cut or len(raw) - error.start >= MAX_CHARACTER_BYTES:
            return None
        return raw[: error.start].decode()


def _no_text(offset: int) -> InvalidParams:
    where = "" if not offset else ", or offset is in the middle of a character"
    return InvalidParams(
        f"This is not UTF-8 text{where}. Read it with encoding 'base64'.", fields=["encoding"]
    )


async def _write(arguments: JsonObject, place: _Place) -> _Done:
    request = write_request(arguments) | place.guard
    said = await ask(place.lease, request, place.limits, Written)
    if said.value is None:
        return _Done(said.ending, {}, said.error)
    return _Done(said.ending, {"path": arguments["path"], "size": said.value.size})


async def _list(arguments: JsonObject, place: _Place) -> _Done:
    domain = place.domain
    query = ListingQuery(
        session_id=domain.session_id or "",
        principal_id=domain.principal_id,
        path=arguments.get("path") or "",
        recursive=arguments.get("recursive") or False,
        limit=arguments.get("limit") or DEFAULT_LIMIT,
        cursor=arguments.get("cursor"),
    )
    end = await list_page(place.lease, query, place.limits, place.cursors)
    if end.page is None:
        return _Done(end.ending, {}, end.error)
    items = [entry.model_dump() for entry in end.page.items]
    return _Done(end.ending, {"items": items, "pagination": end.page.pagination})


async def _delete(arguments: JsonObject, place: _Place) -> _Done:
    request = delete_request(arguments) | place.guard
    paths = request["paths"]
    said = await ask(place.lease, request, place.limits, Deletion)
    if said.value is None:
        return _Done(said.ending, {}, said.error)
    if not said.value.is_of(paths):
        return _Done(said.ending, {}, not_as_agreed())
    return _Done(said.ending, said.value.model_dump(), deletion_error(said.value))
