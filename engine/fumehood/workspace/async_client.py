"""Those methods of `AsyncClient` that work on session files.

Client side: this module uses the protocol and plain values, but not the engine.
"""

from __future__ import annotations

from pathlib import Path

from fumehood.answers import UnpackedArchive, WrittenFile
from fumehood.client.api_request import (
    ApiRequest,
    address,
    ask,
    ask_for_bytes,
    data_of,
    query_text,
)
from fumehood.client.async_client import AsyncClient
from fumehood.client.exchange import Write
from fumehood.client.files import Source, chunks_of_async, new_file, opened, size_of
from fumehood.core.session import TURN_S
from fumehood.core.workspace_path import path_fault
from fumehood.workspace.directories import new_directory, packed

UPLOAD_S = 900.0
"""The time limit in seconds that the engine has for an upload."""


class AsyncClientWithFiles(AsyncClient):
    """A client that can also copy files to and from sessions."""

    async def put_file(
        self, session_id: str, path: str, source: Source, *, mode: str = "replace"
    ) -> WrittenFile:
        """Write a file of a session. `path` is relative to the session's workspace. `source` is the
        bytes, the path of a local file, or an open file.

        The file appears completely or not at all. With `mode="replace"`, an existing file is
        replaced. With `mode="create"`, the request is refused if the file exists.

        Raises:
            ValueError: `source` is not a regular file, or `path` is invalid.
        """
        query = {"mode": None if mode == "replace" else mode}
        parts = _file(session_id, path)
        request = ask("PUT", data_of(WrittenFile), *parts, query=query, work_s=UPLOAD_S)
        with opened(source) as content:
            size = size_of(content)
            return await self._transport.upload(request, chunks_of_async(content, size), size)

    async def get_file(self, session_id: str, path: str) -> bytes:
        """Read a whole file of a session into memory, and return its bytes. `path` is relative to
        the session's workspace.

        Raises:
            DaemonUnavailable: no server answers, or the file changed while it was read.
        """
        return await self._transport.fetch(_bytes_of_file(session_id, path))

    async def download_file(self, session_id: str, path: str, target: Path | str | Write) -> None:
        """Download a file of a session. `path` is relative to the session's workspace.

        `target` is the path of the local file to create, or a function that receives the content
        piece by piece.

        Raises:
            FileExistsError: the local file exists already.
            DaemonUnavailable: no server answers, or the file changed while it was read. The local
                file does not exist then.
        """
        request = _bytes_of_file(session_id, path)
        if not isinstance(target, Path | str):
            await self._transport.download(request, target)
            return
        with new_file(Path(target)) as file:
            await self._transport.download(request, file.write)

    async def put_directory(
        self, session_id: str, source: Path | str, path: str = ""
    ) -> UnpackedArchive:
        """Copy the local directory `source` into the directory `path` of a session's workspace. If
        `path` is empty, copy it into the workspace itself.

        Existing files with the same names are replaced, and other files stay. Links are not copied.

        Raises:
            OSError: the local directory cannot be read.
        """
        parts, query = ("sessions", session_id, "archive"), {"path": path or None}
        request = ask("PUT", data_of(UnpackedArchive), *parts, query=query, work_s=UPLOAD_S)
        with packed(Path(source)) as content:
            size = size_of(content)
            return await self._transport.upload(request, chunks_of_async(content, size), size)

    async def get_directory(self, session_id: str, path: str, target: Path | str) -> None:
        """Save the directory `path` of a session's workspace as the new local directory `target`,
        without links. If `path` is "", save the whole workspace.

        The local directory appears completely or not at all.

        Raises:
            OSError: `target` exists and is not an empty directory, or it cannot be created.
            DaemonUnavailable: no server answers, or a file changed while it was read.
        """
        query = query_text({"path": path or None})
        request = ask_for_bytes(address("sessions", session_id, "archive") + query, TURN_S)
        with new_directory(Path(target)) as file:
            await self._transport.download(request, file.write)


def _file(session_id: str, path: str) -> tuple[str, ...]:
    """Return the parts of the HTTP address of a session's file. Raises ValueError if `path` is
    invalid.
    """
    fault = path_fault(path)
    if fault is not None:
        raise ValueError(f"The path {path[:80]!r} {fault}.")
    return ("sessions", session_id, "files", *path.split("/"))


def _bytes_of_file(session_id: str, path: str) -> ApiRequest[None]:
    return ask_for_bytes(address(*_file(session_id, path)), TURN_S)
