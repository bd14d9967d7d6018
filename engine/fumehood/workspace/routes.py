"""The HTTP routes for session files. On the API, a caller reaches the files of their own sessions.
On the control socket, administrators reach the files of any session.

The control socket gives administrators no more access than they have anyway, because they could
create a token for the owner of the session.

Invariant: the path of a file is taken from the address as it was sent. It is decoded once and
strictly, and an ambiguous path is refused.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal
from urllib.parse import unquote_to_bytes

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import Deleted, Pagination, SessionFileList, UnpackedArchive, WrittenFile
from fumehood.core.errors import EngineError, InvalidParams, RateLimited, ShuttingDown
from fumehood.core.identity import Principal
from fumehood.core.pages import DEFAULT_PAGE, MAX_PAGE
from fumehood.core.session import TURN_S
from fumehood.core.value import Value
from fumehood.core.workspace_path import path_fault
from fumehood.engine import Engine
from fumehood.executors.program import content_type_of
from fumehood.http.answers import engine_of
from fumehood.http.bodies import (
    FileBody,
    IncomingBody,
    attachment_headers,
    require_plain_bytes,
    require_room,
)
from fumehood.http.endpoint import ANY_MEDIA, Given, Needs, endpoint
from fumehood.http.routes.sessions import FILE_ERRORS, SESSION, refuse_while_draining
from fumehood.workspace.in_engine import WorkspacePart
from fumehood.workspace.session_files import FileChanged, SessionFiles

ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


class FileListQuery(Value):
    """The query of a request that lists the files of a workspace: the directory, and the page of
    the list.
    """

    path: str = Field(default="", description="A directory. By default, the whole workspace.")
    recursive: bool = Field(default=False, description="Include subdirectories.")
    limit: int = Field(
        default=DEFAULT_PAGE, ge=1, le=MAX_PAGE, description="Maximum number of items."
    )
    cursor: str | None = Field(
        default=None, description="`data.pagination.next_cursor` of the previous page."
    )


class ArchiveQuery(Value):
    """The query of a request for an archive. `path` is the directory that is packed as an archive,
    or into which an archive is unpacked.
    """

    path: str = Field(default="", description="A directory. By default, the whole workspace.")


class PutQuery(Value):
    """The query of a request that writes a file. `mode` says whether an existing file is
    replaced.
    """

    mode: Literal["create", "replace"] = Field(
        default="replace",
        description="`create` fails if the file exists, like the header `If-None-Match: *`.",
    )


class DeleteQuery(Value):
    """The query of a request that deletes a file or directory. `recursive` says whether a directory
    is deleted with its contents.
    """

    recursive: bool = Field(default=False, description="Delete a directory with its contents.")


def _files(request: Request, caller: Principal) -> SessionFiles:
    return engine_of(request).part(WorkspacePart).files(request.path_params["session_id"], caller)


def _any_files(request: Request, _: Principal) -> SessionFiles:
    engine = engine_of(request)
    session = engine.overview.session(request.path_params["session_id"])
    return engine.part(WorkspacePart).files(session.id, Principal(session.principal_id))


def file_path(request: Request, _: Principal) -> str:
    """Return the path of the file from the request's address. The path is decoded and checked.

    Raises:
        InvalidParams: the path is invalid.
    """
    prefix = f"/v1/sessions/{request.path_params['session_id']}/files/".encode()
    # Not the path that the server has decoded: its decoding is lenient, so one file could have two
    # names. A slash may be escaped, because generated clients escape it.
    raw: bytes = request.scope["raw_path"]
    if not raw.startswith(prefix):
        raise InvalidParams("Write the address without escapes before the path.", fields=["path"])
    rest = raw.removeprefix(prefix)
    if ESCAPE.search(rest):
        raise InvalidParams("The path has an invalid escape.", fields=["path"])
    try:
        path = unquote_to_bytes(rest).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidParams("The path is not UTF-8.", fields=["path"]) from None
    fault = path_fault(path)
    if fault is not None:
        raise InvalidParams(f"The path {fault}.", fields=["path"])
    return path


Files = Annotated[SessionFiles, Given(_files, {"session_id": SESSION})]
FilePath = Annotated[str, "The file's path in the workspace.", Given(file_path)]
AnyFiles = Annotated[SessionFiles, Given(_any_files, {"session_id": SESSION})]


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/files",
    Needs.CALLER,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="session_files",
)
async def list_session_files(files: Files, query: FileListQuery) -> SessionFileList:
    """List the files of a session's workspace, sorted by path, one page at a time."""
    page = await files.page(
        query.path, recursive=query.recursive, limit=query.limit, cursor=query.cursor
    )
    return SessionFileList(items=page.items, pagination=Pagination(**page.pagination))


async def sent_file(request: Request, engine: Engine, files: SessionFiles, path: str) -> Response:
    """Return a response with a session's file as an attachment. For the method `HEAD`, return only
    the headers.
    """
    require_room(request)
    download = await files.download(path)
    headers = attachment_headers(path, content_type_of(path), download.size)
    if request.method == "HEAD":
        return Response(headers=headers)
    return FileBody(download.pieces(), headers, FileChanged, partial(_log_break, engine))


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/files/{path:path}",
    Needs.CALLER,
    errors=FILE_ERRORS | {RateLimited},
    media=ANY_MEDIA,
    client=None,
)
async def get_session_file(
    request: Request, engine: Engine, files: Files, path: FilePath
) -> Response:
    """Download a file.

    The response is always an attachment. Its media type follows from the file name. If the file
    changes during the download, the body ends before its announced length.
    """
    return await sent_file(request, engine, files, path)


@endpoint(
    "PUT",
    "/v1/sessions/{session_id}/files/{path:path}",
    Needs.CALLER,
    errors=FILE_ERRORS | {ShuttingDown},
    client=None,
    before_reading=refuse_while_draining,
)
async def put_session_file(
    request: Request, files: Files, path: FilePath, query: PutQuery, body: IncomingBody
) -> WrittenFile:
    """Write a file. Missing directories are created.

    The body is the raw file, of any type and at most as large as the session's workspace. It must
    be sent at 1 MB per minute or faster. The file appears completely or not at all.
    """
    unless = request.headers.get("if-none-match")
    if unless not in (None, "*"):
        raise InvalidParams("If-None-Match can only be * here.")
    require_plain_bytes(request)
    async with files.upload(path, "create" if unless == "*" else query.mode) as upload:
        _require_room_for(request, files)
        async with aclosing(body.pieces()) as pieces:
            async for piece in pieces:
                await upload.feed(piece)
        size = await upload.finish()
    return WrittenFile(path=path, size=size)


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/archive",
    Needs.CALLER,
    errors=FILE_ERRORS | {RateLimited},
    media=ANY_MEDIA,
    client=None,
)
async def get_session_archive(
    request: Request, engine: Engine, files: Files, query: ArchiveQuery
) -> Response:
    """Download a directory as a tar archive, without links.

    The files are read one after the other. If a file changes during the download, the body ends
    before the archive's last block.
    """
    require_room(request)
    headers = attachment_headers("workspace.tar", "application/x-tar", None)
    if request.method == "HEAD":
        return Response(headers=headers)
    pieces = files.pack(query.path)
    first = await anext(pieces)
    return FileBody(_after(first, pieces), headers, FileChanged, partial(_log_break, engine))


async def _after(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for piece in pieces:
            yield piece
    except EngineError as error:
        raise FileChanged(error.message) from None


@endpoint(
    "PUT",
    "/v1/sessions/{session_id}/archive",
    Needs.CALLER,
    errors=FILE_ERRORS | {ShuttingDown},
    client=None,
    before_reading=refuse_while_draining,
)
async def put_session_archive(
    request: Request, files: Files, query: ArchiveQuery, body: IncomingBody
) -> UnpackedArchive:
    """Unpack a tar archive into a directory.

    The whole archive is checked before anything is written. The body is an uncompressed archive of
    regular files and directories with relative paths. The session's workspace must have room for
    both the archive and its files.
    """
    require_plain_bytes(request)
    _require_room_for(request, files)
    async with aclosing(body.pieces()) as pieces:
        unpacked = await files.unpack(pieces, query.path)
    return UnpackedArchive(path=query.path, files=unpacked.files, size=unpacked.size)


@endpoint(
    "DELETE",
    "/v1/sessions/{session_id}/files/{path:path}",
    Needs.CALLER,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="delete_file",
)
async def delete_session_file(files: Files, path: FilePath, query: DeleteQuery) -> Deleted:
    """Delete a file, link or directory.

    Unlike the tool `delete_files`, this request never needs approval.
    """
    await files.delete(path, recursive=query.recursive)
    return Deleted(deleted=path)


def _require_room_for(request: Request, files: SessionFiles) -> None:
    files.require_room(int(request.headers.get("content-length", "0")))  # h11 accepts only digits


def _log_break(engine: Engine, why: str) -> None:
    """Log that a download ended early. `why` is the reason."""
    engine.log.warning("session.download_broke_off", why=why[:200])


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/files",
    Needs.ADMIN,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="sessions.files",
)
async def list_files_of_session(
    caller: Principal, files: AnyFiles, query: FileListQuery
) -> SessionFileList:
    """List the files of any principal's session, sorted by path, one page at a time."""
    page = await files.page(
        query.path, recursive=query.recursive, limit=query.limit, cursor=query.cursor
    )
    return SessionFileList(items=page.items, pagination=Pagination(**page.pagination))


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/files/{path:path}",
    Needs.ADMIN,
    errors=FILE_ERRORS | {RateLimited},
    media=ANY_MEDIA,
    client=None,
)
async def get_file_of_session(
    request: Request, engine: Engine, caller: Principal, files: AnyFiles, path: FilePath
) -> Response:
    """Download a file of any principal's session.

    The engine's log records who downloaded the file.
    """
    response = await sent_file(request, engine, files, path)
    engine.log.info("session.file_read", session_id=files.session_id, by=caller.id)
    return response


OPERATIONS = [
    list_session_files,
    get_session_file,
    put_session_file,
    get_session_archive,
    put_session_archive,
    delete_session_file,
]
CONTROL_OPERATIONS = [list_files_of_session, get_file_of_session]
