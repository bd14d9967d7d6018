"""`/v1/sessions`: a principal's sessions, and the files in them. Only the owner has access.

Invariant: a file's path is taken from the address as it was sent, and decoded once and strictly;
an ambiguous one is refused.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from functools import partial
from typing import Literal
from urllib.parse import unquote_to_bytes

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import (
    Deleted,
    Pagination,
    SessionAnswer,
    SessionFileList,
    SessionList,
    WrittenFile,
)
from fumehood.core.errors import (
    EngineError,
    InternalError,
    InvalidParams,
    QuotaExceeded,
    RateLimited,
    ResourceNotFound,
    SandboxUnavailable,
    ShuttingDown,
)
from fumehood.core.new_session import NewSession
from fumehood.core.workspace_path import path_fault
from fumehood.engine import Engine
from fumehood.executors.program_output import content_type_of
from fumehood.executors.session_files import FileChanged, SessionFiles, too_large
from fumehood.executors.workspace_guest import DEFAULT_LIMIT, MAX_LIMIT
from fumehood.http.answers import answer, engine_of, parse_body, query_of, read_json
from fumehood.http.caller import require_principal
from fumehood.http.operation import Needs, Operation
from fumehood.http.transfers import (
    FileBody,
    UploadBody,
    announced_bytes,
    attachment_headers,
    require_plain_bytes,
    require_room,
)

SESSION = {"session_id": "The session's id, `sess_…`."}

ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
FILE = {**SESSION, "path": "The file's path in the workspace, with literal slashes."}
FILE_ERRORS = frozenset({InvalidParams, ResourceNotFound, SandboxUnavailable})


async def list_sessions(request: Request) -> Response:
    """List the caller's own sessions, newest first: active ones, then those of the last day."""
    principal = require_principal(request)
    if request.query_params:
        raise InvalidParams(
            "The list of sessions takes no query.", fields=sorted(request.query_params)[:20]
        )
    found = engine_of(request).sessions.list(principal)
    return answer(request, SessionList(items=tuple(found)))


async def create_session(request: Request) -> Response:
    """Create a session: a container of the caller's own, until it ends.

    Every field is optional. Calls use it with the option `session_id`.
    """
    wishes = parse_body(NewSession, await read_json(request))
    principal = require_principal(request)
    engine = engine_of(request)
    if engine.is_draining:
        raise ShuttingDown("The engine is stopping. Retry when it is back.")
    record = await engine.sessions.create(principal, **wishes.model_dump())
    return answer(request, SessionAnswer(session=record))


async def show_session(request: Request) -> Response:
    """Show one of the caller's own sessions, including ended ones."""
    principal = require_principal(request)
    record = engine_of(request).sessions.find(principal, request.path_params["session_id"])
    return answer(request, SessionAnswer(session=record))


async def end_session(request: Request) -> Response:
    """End one of the caller's own sessions and everything that runs in it; delete its files.

    An ended session stays as it is.
    """
    principal = require_principal(request)
    sessions = engine_of(request).sessions
    record = await sessions.end(principal, request.path_params["session_id"])
    return answer(request, SessionAnswer(session=record))


class FileListQuery(BaseModel):
    """Which files of a workspace to list."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(default="", description="A directory; default: the whole workspace.")
    recursive: bool = Field(default=False, description="Include subdirectories.")
    limit: int = Field(
        default=DEFAULT_LIMIT, ge=1, le=MAX_LIMIT, description="Maximum number of items."
    )
    cursor: str | None = Field(
        default=None, description="`data.pagination.next_cursor` of the previous page."
    )


class PutQuery(BaseModel):
    """How to write a file."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["create", "replace"] = Field(
        default="replace",
        description="`create` fails if the file exists, as `If-None-Match: *` does.",
    )


class DeleteQuery(BaseModel):
    """Whether to delete a directory's contents."""

    model_config = ConfigDict(extra="forbid")

    recursive: bool = Field(default=False, description="Delete a directory with its contents.")


async def list_session_files(request: Request) -> Response:
    """List the files of a session's workspace by path, one page at a time."""
    files, _ = _files(request)
    query = query_of(FileListQuery, request)
    page = await files.page(
        query.path, recursive=query.recursive, limit=query.limit, cursor=query.cursor
    )
    data = SessionFileList(items=page.items, pagination=Pagination(**page.pagination))
    return answer(request, data)


async def get_session_file(request: Request) -> Response:
    """Download a file.

    The response is always an attachment, of the media type that the file name implies. If the
    file changes during the download, the body ends before its announced length.
    """
    files, engine = _files(request)
    path = _path(request)
    require_room(request.scope["state"]["share"])
    download = await files.download(path)
    headers = attachment_headers(path, content_type_of(path), download.size)
    if request.method == "HEAD":
        return Response(headers=headers)
    on_break = partial(_log_break, engine)
    return FileBody(download.pieces(), headers, FileChanged, on_break)


async def put_session_file(request: Request) -> Response:
    """Write a file; directories are created as needed.

    The body is the raw file, of any type, at most as large as the session's workspace, sent at 1
    MB per minute or faster. The file appears completely or not at all.
    """
    body = UploadBody(request)
    try:
        return await _put(request, body)
    except EngineError:
        await body.drain()
        raise


async def delete_session_file(request: Request) -> Response:
    """Delete a file, link or directory.

    The owner needs no approval for this, unlike for the tool `delete_files`.
    """
    files, _ = _files(request)
    path = _path(request)
    await files.delete(path, recursive=query_of(DeleteQuery, request).recursive)
    return answer(request, Deleted(deleted=path))


async def _put(request: Request, body: UploadBody) -> Response:
    files, engine = _files(request)
    if engine.is_draining:
        raise ShuttingDown("The engine is stopping. Retry when it is back.")
    path = _path(request)
    mode = query_of(PutQuery, request).mode
    unless = request.headers.get("if-none-match")
    if unless not in (None, "*"):
        raise InvalidParams("If-None-Match can only be * here.")
    require_plain_bytes(request)
    async with files.upload(path, "create" if unless == "*" else mode) as upload:
        announced, most = announced_bytes(request), files.most_bytes
        if announced is not None and announced > most:
            raise too_large(most)
        async with aclosing(body.pieces()) as pieces:
            async for piece in pieces:
                await upload.feed(piece)
        size = await upload.finish()
    return answer(request, WrittenFile(path=path, size=size))


def _files(request: Request) -> tuple[SessionFiles, Engine]:
    principal = require_principal(request)
    engine = engine_of(request)
    return engine.session_files(request.path_params["session_id"], principal), engine


def _path(request: Request) -> str:
    """Decode the file's path from the raw bytes of the address.

    The server has decoded the address leniently, which could give one file two names, and turn an
    escape into a slash.
    """
    prefix = f"/v1/sessions/{request.path_params['session_id']}/files/".encode()
    raw: bytes = request.scope["raw_path"]
    if not raw.startswith(prefix):
        raise InvalidParams("Write the address without escapes before the path.", fields=["path"])
    rest = raw.removeprefix(prefix)
    if ESCAPE.search(rest) or b"%2f" in rest.lower():
        raise InvalidParams("The path has an escaped slash or an invalid escape.", fields=["path"])
    try:
        path = unquote_to_bytes(rest).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidParams("The path is not UTF-8.", fields=["path"]) from None
    fault = path_fault(path)
    if fault is not None:
        raise InvalidParams(f"The path {fault}.", fields=["path"])
    return path


def _log_break(engine: Engine, why: str) -> None:
    engine.log.warning("session.download_broke_off", why=why[:200])


OPERATIONS = [
    Operation(
        "GET",
        "/v1/sessions",
        list_sessions,
        Needs.CALLER,
        data=SessionList,
        errors=frozenset({InvalidParams}),
    ),
    Operation(
        "POST",
        "/v1/sessions",
        create_session,
        Needs.CALLER,
        data=SessionAnswer,
        body=NewSession,
        errors=frozenset(
            {QuotaExceeded, ResourceNotFound, SandboxUnavailable, ShuttingDown, InternalError}
        ),
    ),
    Operation(
        "GET",
        "/v1/sessions/{session_id}",
        show_session,
        Needs.CALLER,
        data=SessionAnswer,
        parameters=SESSION,
        errors=frozenset({ResourceNotFound}),
    ),
    Operation(
        "DELETE",
        "/v1/sessions/{session_id}",
        end_session,
        Needs.CALLER,
        data=SessionAnswer,
        parameters=SESSION,
        errors=frozenset({ResourceNotFound}),
    ),
    Operation(
        "GET",
        "/v1/sessions/{session_id}/files",
        list_session_files,
        Needs.CALLER,
        data=SessionFileList,
        query=FileListQuery,
        parameters=SESSION,
        errors=FILE_ERRORS,
    ),
    Operation(
        "GET",
        "/v1/sessions/{session_id}/files/{path}",
        get_session_file,
        Needs.CALLER,
        parameters=FILE,
        errors=FILE_ERRORS | {RateLimited},
        media="*/*",
        takes_rest=True,
    ),
    Operation(
        "PUT",
        "/v1/sessions/{session_id}/files/{path}",
        put_session_file,
        Needs.CALLER,
        data=WrittenFile,
        query=PutQuery,
        parameters=FILE,
        errors=FILE_ERRORS | {ShuttingDown},
        upload="*/*",
        takes_rest=True,
    ),
    Operation(
        "DELETE",
        "/v1/sessions/{session_id}/files/{path}",
        delete_session_file,
        Needs.CALLER,
        data=Deleted,
        query=DeleteQuery,
        parameters=FILE,
        errors=FILE_ERRORS,
        takes_rest=True,
    ),
]
