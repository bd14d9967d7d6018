"""The executors of the tools that work on session files.

Host side, between `pipeline/execute` and the lease on a session. Each call becomes one request to
the guest's program `files`, and runs no code of the caller. Invariants: paths are validated before
they are sent; an answer that does not have the expected form is an error.
"""

from __future__ import annotations

import base64
from codecs import getincrementaldecoder
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from fumehood.core.errors import (
    EngineError,
    InternalError,
    InvalidParams,
    WorkspaceChanged,
)
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.pages import DEFAULT_PAGE
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import Executor, ToolRun, in_session
from fumehood.executors.claims import Claim
from fumehood.executors.effects import Effect
from fumehood.executors.endings import state_words
from fumehood.executors.outcome import MAX_DATA_BYTES, Outcome
from fumehood.executors.program import session_fields
from fumehood.executors.workspace_guest import (
    Deletion,
    Piece,
    Said,
    Written,
    ask,
    not_as_agreed,
)
from fumehood.protocol.cursors import Cursors
from fumehood.sandbox.wall import Lease, RunEnding
from fumehood.workspace.previews import PREVIEWS, effect_of
from fumehood.workspace.requests import (
    ListingQuery,
    delete_request,
    deletion_error,
    list_page,
    write_request,
)

M = TypeVar("M", bound=Claim)
T = TypeVar("T")

DEFAULT_READ_BYTES = 10 * 1024
"""Number of bytes that a call reads from a file if it has no argument `limit`. Other texts in an
answer have the same maximum size.
"""

FILE_CONTENTS = frozenset({"content", "content_base64"})
"""The fields with the content of a file. They are never shortened in an answer, because the caller
chose their size.
"""


@dataclass(slots=True)
class _Place:
    """What an action on files needs to run: the lease on the session, and the limits, the trust
    domain and the cursors of the call.
    """

    lease: Lease
    limits: Limits
    domain: TrustDomain
    cursors: Cursors
    guard: JsonObject
    """If a human has approved a preview, the field `expected` for the guest's request, with the
    preview's `base`. Otherwise empty.
    """
    ending: RunEnding | None = None
    """How the last request to the guest ended, or None before the first."""

    async def ask(self, request: JsonObject, model: type[M]) -> M:
        """Send one request to the guest. Return the answer, parsed as `model`.

        Raises EngineError.
        """
        return self.taken(await ask(self.lease, request, self.limits, model))

    def taken(self, said: Said[T]) -> T:
        """Store how the guest's run ended in `ending`, and return the value in the guest's answer
        `said`.

        Raises EngineError if the answer is an error.
        """
        self.ending = said.ending
        return said.required


class WorkspaceExecutor(Executor):
    """Performs an action on the files of a session. The field `executor` of the tool's definition
    names the action.
    """

    place = in_session(
        "executors 'workspace:…' always run in the guest, in the container of the call's session, "
        "as its unprivileged user"
    )

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


class PreviewedExecutor(WorkspaceExecutor):
    """Performs an action that changes files. Before an approver decides, the executor can show the
    approver a preview of the changes.
    """

    has_preview = True

    async def preview(
        self, tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
    ) -> Effect | None:
        return await effect_of(tool, arguments, limits, lease)


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
    """Perform the action of `tool` in the workspace of the call's session. `cursors` makes and
    reads the cursors of listings with several pages.

    `expected` is None, or the `base` of an `effects.Effect` that a human has approved as a preview.
    The `base` is a hash of everything that the action reads or changes. In a single request, the
    guest compares the hash, and acts only if it is still the same.

    Raises:
        WorkspaceChanged: the hash differs from `expected`. Nothing was changed.
    """
    assert domain.session_id is not None  # the placement requires a session
    if expected is not None and tool.executor not in PREVIEWS:
        raise InternalError("A tool without previews cannot be compared with one.")
    guard: JsonObject = {} if expected is None else {"expected": expected}
    place = _Place(lease, limits, domain, cursors, guard)
    data: JsonObject | None = None
    error: EngineError | None = None
    try:
        data = await _ACTIONS[tool.executor](arguments, place)
    except EngineError as refused:
        if place.ending is None or isinstance(refused, WorkspaceChanged):
            raise
        error = refused
    ending = place.ending
    assert ending is not None
    session = session_fields(domain.session_id, ending)
    if error is not None:
        error.details = {**(error.details or {}), "session": session}
    return Outcome(
        ended_by=ending.ended_by,
        isolation=ending.isolation,
        node=ending.node,
        data={**data, "session": session} if data is not None else None,
        error=error,
        cpu_ms=ending.cpu_ms,
        peak_memory_bytes=ending.peak_memory_bytes,
        warnings=state_words(ending),
        max_data_bytes=MAX_DATA_BYTES,
        whole_fields=FILE_CONTENTS,
    )


async def _read(arguments: JsonObject, place: _Place) -> JsonObject:
    path, offset = arguments["path"], arguments.get("offset") or 0
    length = arguments.get("limit") or DEFAULT_READ_BYTES
    request = {"do": "read", "path": path, "offset": offset, "length": length}
    piece = await place.ask(request, Piece)
    if not piece.is_of(offset, length):
        raise not_as_agreed()
    raw, size = piece.content, piece.size
    encoding = arguments.get("encoding")
    is_last = offset + len(raw) >= size
    text = None if encoding == "base64" else _as_text(raw, is_last=is_last)
    if text is not None:
        raw = text.encode()
        content: JsonObject = {"content": text}
    elif encoding == "text":
        raise _no_text(offset)
    else:
        content = {"content_base64": base64.b64encode(raw).decode("ascii")}
    end = offset + len(raw)
    has_more = end < size
    return {
        "path": path,
        **content,
        "size": size,
        "has_more": has_more,
        "next_offset": end if has_more else None,
    }


def _as_text(raw: bytes, *, is_last: bool) -> str | None:
    """Return the bytes as UTF-8 text, or None if they are not text.

    `is_last` says that the file ends with these bytes. Otherwise, an incomplete character at their
    end is left out.
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


async def _write(arguments: JsonObject, place: _Place) -> JsonObject:
    written = await place.ask(write_request(arguments) | place.guard, Written)
    return {"path": arguments["path"], "size": written.size}


async def _list(arguments: JsonObject, place: _Place) -> JsonObject:
    domain = place.domain
    query = ListingQuery(
        session_id=domain.session_id or "",
        principal_id=domain.principal_id,
        path=arguments.get("path") or "",
        recursive=arguments.get("recursive") or False,
        limit=arguments.get("limit") or DEFAULT_PAGE,
        cursor=arguments.get("cursor"),
    )
    page = place.taken(await list_page(place.lease, query, place.limits, place.cursors))
    items = [entry.model_dump() for entry in page.items]
    return {"items": items, "pagination": page.pagination}


async def _delete(arguments: JsonObject, place: _Place) -> JsonObject:
    request = delete_request(arguments) | place.guard
    deletion = await place.ask(request, Deletion)
    if not deletion.is_of(request["paths"]):
        raise not_as_agreed()
    error = deletion_error(deletion)
    if error is not None:
        raise error
    return deletion.model_dump()


_ACTIONS: Mapping[str, Callable[[JsonObject, _Place], Awaitable[JsonObject]]] = MappingProxyType(
    {
        "workspace:read": _read,
        "workspace:write": _write,
        "workspace:list": _list,
        "workspace:delete": _delete,
    }
)
