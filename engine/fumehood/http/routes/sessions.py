"""`/v1/sessions`: a principal's sessions and their files. Only the owner has access.

Invariant: a file's path is taken from the address as it was sent, and is decoded once and strictly.
An ambiguous path is refused.
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

from fumehood.answers import (
    Deleted,
    Pagination,
    SessionFileList,
    UnpackedArchive,
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
from fumehood.core.identity import Principal
from fumehood.core.pages import DEFAULT_PAGE, MAX_PAGE
from fumehood.core.session import (
    MAKING_S,
    TURN_S,
    ForkWish,
    NewSession,
    NewSnapshot,
    Restoration,
    SessionRecord,
    Snapshot,
)
from fumehood.core.value import Value
from fumehood.core.workspace_path import path_fault
from fumehood.engine import Engine
from fumehood.executors.program import content_type_of
from fumehood.executors.session_files import FileChanged, SessionFiles
from fumehood.http.answers import engine_of
from fumehood.http.bodies import (
    FileBody,
    IncomingBody,
    attachment_headers,
    require_plain_bytes,
    require_room,
)
from fumehood.http.endpoint import ANY_MEDIA, As, Given, Needs, endpoint

ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
LIFE_ERRORS = frozenset({ResourceNotFound, SandboxUnavailable})
COPY_ERRORS = LIFE_ERRORS | {InvalidParams, InternalError, QuotaExceeded, ShuttingDown}
FILE_ERRORS = frozenset({InvalidParams, ResourceNotFound, SandboxUnavailable})


class NoQuery(Value):
    """No parameters. Others are refused, since a client might believe that they had an effect."""


class FileListQuery(Value):
    """Which files of a workspace to list."""

    path: str = Field(default="", description="A directory. By default, the whole workspace.")
    recursive: bool = Field(default=False, description="Include subdirectories.")
    limit: int = Field(
        default=DEFAULT_PAGE, ge=1, le=MAX_PAGE, description="Maximum number of items."
    )
    cursor: str | None = Field(
        default=None, description="`data.pagination.next_cursor` of the previous page."
    )


class ArchiveQuery(Value):
    """The directory to pack as an archive, or into which to unpack one."""

    path: str = Field(default="", description="A directory. By default, the whole workspace.")


class PutQuery(Value):
    """How to write a file."""

    mode: Literal["create", "replace"] = Field(
        default="replace",
        description="`create` fails if the file exists, like the header `If-None-Match: *`.",
    )


class DeleteQuery(Value):
    """Whether to delete a directory's contents."""

    recursive: bool = Field(default=False, description="Delete a directory with its contents.")


def _files(request: Request, caller: Principal) -> SessionFiles:
    return engine_of(request).session_files(request.path_params["session_id"], caller)


def refuse_while_draining(request: Request) -> None:
    """Raise ShuttingDown if the engine is stopping."""
    if engine_of(request).is_draining:
        raise ShuttingDown("The engine is stopping. Retry when it runs again.")


def file_path(request: Request, _: Principal) -> str:
    """Decode the file's path from the raw bytes of the address, and check the path.

    The server itself decodes the address leniently, which could give one file two names. A slash
    may be escaped, because generated clients escape it.

    Raises:
        InvalidParams: the path is invalid.
    """
    prefix = f"/v1/sessions/{request.path_params['session_id']}/files/".encode()
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


SESSION = (
    "The session's id, `sess_…`, or its name. A name refers to the active session with this name "
    "or, if there is none, to the last ended one."
)
SessionId = Annotated[str, SESSION]
SessionAnswer = Annotated[
    SessionRecord, As("session", "SessionAnswer", "The current state of a session.")
]
SnapshotAnswer = Annotated[
    Snapshot, As("snapshot", "SnapshotAnswer", "A snapshot: a copy of a session's files.")
]
Files = Annotated[SessionFiles, Given(_files, {"session_id": SESSION})]
FilePath = Annotated[str, "The file's path in the workspace.", Given(file_path)]


@endpoint("GET", "/v1/sessions", Needs.CALLER, client="sessions")
async def list_sessions(
    engine: Engine, caller: Principal, query: NoQuery
) -> Annotated[
    tuple[SessionRecord, ...],
    As(
        "items",
        "SessionList",
        "The caller's own sessions: active ones, then recently ended ones, newest first.",
    ),
]:
    """List the caller's own sessions: active ones, then those that ended in the last day.

    Both groups are sorted from newest to oldest.
    """
    return tuple(engine.sessions.list(caller))


@endpoint(
    "POST",
    "/v1/sessions",
    Needs.CALLER,
    errors=[QuotaExceeded, ResourceNotFound, SandboxUnavailable, ShuttingDown, InternalError],
    work_s=MAKING_S,
    before_reading=refuse_while_draining,
)
async def create_session(engine: Engine, body: NewSession, caller: Principal) -> SessionAnswer:
    """Create a session, which is a container for the caller's calls alone.

    Every field is optional. A call runs in the session if the call's option `session_id` names it.
    """
    return await engine.sessions.create(caller, **body.model_dump(exclude_unset=True))


@endpoint(
    "GET", "/v1/sessions/{session_id}", Needs.CALLER, errors=[ResourceNotFound], client="session"
)
async def show_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """Show one of the caller's own sessions, including ended ones."""
    return engine.sessions.find(caller, session_id)


@endpoint(
    "DELETE", "/v1/sessions/{session_id}", Needs.CALLER, errors=[ResourceNotFound], work_s=TURN_S
)
async def end_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """End one of the caller's own sessions and everything that runs in it, and delete its files.

    A session that has already ended is not changed.
    """
    return await engine.sessions.end(caller, session_id)


@endpoint(
    "POST", "/v1/sessions/{session_id}/pause", Needs.CALLER, errors=LIFE_ERRORS, work_s=TURN_S
)
async def pause_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """Freeze one of the caller's own sessions until its next use.

    The session is frozen once its running and waiting calls have finished.
    """
    return await engine.sessions.pause(caller, session_id)


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/stop",
    Needs.CALLER,
    errors=LIFE_ERRORS | {InvalidParams},
    work_s=TURN_S,
)
async def stop_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """End everything that runs in one of the caller's own sessions, and keep its disk.

    The session is stopped once its running and waiting calls have finished. Only a session with a
    disk can be stopped. The next use starts the session again, without its variables.
    """
    return await engine.sessions.stop(caller, session_id)


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/resume",
    Needs.CALLER,
    errors=LIFE_ERRORS | {QuotaExceeded},
    work_s=TURN_S,
)
async def resume_session(engine: Engine, caller: Principal, session_id: SessionId) -> SessionAnswer:
    """Resume one of the caller's own sessions that is paused or stopped.

    A call in the session resumes it as well.
    """
    return await engine.sessions.resume(caller, session_id)


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/snapshots",
    Needs.CALLER,
    errors=[ResourceNotFound],
    client="snapshots",
)
async def list_snapshots(
    engine: Engine, caller: Principal, session_id: SessionId
) -> Annotated[
    tuple[Snapshot, ...], As("items", "SnapshotList", "A session's snapshots, oldest first.")
]:
    """List the snapshots of one of the caller's own sessions, oldest first."""
    return engine.sessions.find(caller, session_id).snapshots


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/snapshots",
    Needs.CALLER,
    errors=COPY_ERRORS,
    work_s=MAKING_S,
    before_reading=refuse_while_draining,
)
async def snapshot_session(
    engine: Engine, body: NewSnapshot, caller: Principal, session_id: SessionId
) -> SnapshotAnswer:
    """Copy the files of one of the caller's own sessions to a snapshot.

    The session must have a disk. The copy is made once the session's running and waiting calls have
    finished. It is kept until it is deleted or the session ends.
    """
    return await engine.sessions.snapshot(caller, session_id, body.name)


@endpoint(
    "DELETE",
    "/v1/sessions/{session_id}/snapshots/{snapshot_id}",
    Needs.CALLER,
    errors=[ResourceNotFound, InternalError],
    work_s=TURN_S,
)
async def delete_snapshot(
    engine: Engine,
    caller: Principal,
    session_id: SessionId,
    snapshot_id: Annotated[str, "The snapshot's id, `snap_…`, or its name."],
) -> SnapshotAnswer:
    """Delete a snapshot of one of the caller's own sessions."""
    return await engine.sessions.delete_snapshot(caller, session_id, snapshot_id)


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/restore",
    Needs.CALLER,
    errors=COPY_ERRORS,
    work_s=MAKING_S,
    before_reading=refuse_while_draining,
)
async def restore_session(
    engine: Engine, body: Restoration, caller: Principal, session_id: SessionId
) -> SessionAnswer:
    """Restore the files of one of the caller's own sessions from one of its snapshots.

    The restore waits for the session's running and waiting calls to finish, and then ends
    everything else that runs in the session. The next use starts the session again, without its
    variables.
    """
    return await engine.sessions.restore(caller, session_id, body.snapshot_id)


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/fork",
    Needs.CALLER,
    errors=COPY_ERRORS,
    work_s=MAKING_S,
    before_reading=refuse_while_draining,
)
async def fork_session(
    engine: Engine, body: ForkWish, caller: Principal, session_id: SessionId
) -> Annotated[tuple[SessionRecord, ...], As("items", "ForkList", "The new sessions.")]:
    """Create sessions with the files of one of the caller's own sessions or of its snapshots.

    The new sessions are stopped until their first use. Variables are not copied. The snapshots of a
    lost session can be forked for a day.
    """
    return tuple(await engine.sessions.fork(caller, session_id, **body.model_dump()))


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
    """Return a session's file as an attachment, or its headers only for `HEAD`."""
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
    files.require_room(int(request.headers.get("content-length", "0")))  # digits, by h11


def _log_break(engine: Engine, why: str) -> None:
    """Log that a download ended early."""
    engine.log.warning("session.download_broke_off", why=why[:200])


OPERATIONS = [
    list_sessions,
    create_session,
    show_session,
    end_session,
    pause_session,
    resume_session,
    stop_session,
    list_snapshots,
    snapshot_session,
    delete_snapshot,
    restore_session,
    fork_session,
    list_session_files,
    get_session_file,
    put_session_file,
    get_session_archive,
    put_session_archive,
    delete_session_file,
]
