"""The files of one session, which its owner can list, upload, download and delete without calling
tools.

Host side. The daemon and embedding programs use this module, which uses the sessions. A file is
transferred in pieces. The session's container is used for one piece at a time, so a slow client
does not delay calls. Invariants:

* A transfer keeps only one piece of a file in memory.
* An unfinished upload is removed.
* If a file changes during its download, the download ends early. It never mixes two versions.
"""

from __future__ import annotations

import base64
import secrets
import tarfile
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar

import anyio

from fumehood.core.arguments import MAX_READ_BYTES
from fumehood.core.errors import EngineError, InvalidParams, RequestTooLarge, ResourceNotFound
from fumehood.core.escaping import visible
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits
from fumehood.core.pages import DEFAULT_PAGE
from fumehood.core.session import UPLOAD_PIECE_BYTES, SessionRecord
from fumehood.core.workspace_path import path_fault
from fumehood.executors.claims import Claim
from fumehood.executors.workspace_guest import (
    MAX_LISTED,
    SHOWN_CHARACTERS,
    Deletion,
    Entry,
    Listing,
    Piece,
    Pieces,
    Unpacked,
    Written,
    ask,
    not_as_agreed,
)
from fumehood.protocol.cursors import Cursors
from fumehood.sandbox.session import workspace_mb
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.workspace.requests import (
    Dropped,
    ListingPage,
    ListingQuery,
    goes_forward,
    list_page,
)

REQUEST_S = 30.0
"""Maximum seconds for one request to the guest, for example to copy up to 1 MB or to list names."""

DROP_S = 40.0
"""Maximum seconds for the removal of an unfinished upload. This is slightly more than the longest
time that a request waits for another call in the session.
"""

REQUEST_LIMITS = Limits(wall_s=REQUEST_S, cpu_s=REQUEST_S, memory_mb=None, output_bytes=MB)

TOKEN_BYTES = 16
"""Length in bytes of the random token that names an upload."""

Mode = Literal["create", "replace"]
"""What an upload does if the file exists: `create` refuses, `replace` replaces the file."""

M = TypeVar("M", bound=Claim)


class FileChanged(Exception):
    """Raised if a file changed or became unreadable after its first piece was read."""


class SessionFiles:
    """The files of one principal's session. The argument `path` of the methods is relative to the
    session's workspace.

    Every method may also raise:
        ResourceNotFound: the principal has no such session, the session has ended, or there is no
            such file.
        InvalidParams: a path leads out of the workspace, contains a symbolic link, or is not the
            path of a regular file.
        SandboxUnavailable: the session is too busy, or its container was lost.
    """

    def __init__(
        self, sessions: SessionKeeper, cursors: Cursors, principal: Principal, session_id: str
    ) -> None:
        self._sessions = sessions
        self._cursors = cursors
        self._principal = principal
        self.session_id = session_id

    @property
    def _record(self) -> SessionRecord:
        return self._sessions.find(self._principal, self.session_id)

    @property
    def most_bytes(self) -> int:
        """The capacity of the workspace in bytes. A file cannot be larger."""
        return workspace_mb(self._record.memory_mb, self._record.disk_mb) * MB

    def require_room(self, size: int) -> None:
        """Raise RequestTooLarge if `size`, in bytes, is more than the capacity of the workspace."""
        if size > self.most_bytes:
            more = "more memory" if self._record.disk_mb is None else "a larger disk"
            raise RequestTooLarge(
                "The file is larger than this session's workspace "
                f"({self.most_bytes // MB} MB). Send less, or start a session with {more}."
            )

    async def page(
        self,
        path: str = "",
        *,
        recursive: bool = False,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
    ) -> ListingPage:
        """Return one page of the entries of the directory `path`. If `path` is empty, the directory
        is the workspace itself. `cursor` comes from the previous page.
        """
        if path:
            _require_plain(path)
        query = ListingQuery(self.session_id, self._principal.id, path, recursive, limit, cursor)
        turn = await self._sessions.files(self._principal, self.session_id)
        async with turn as lease:
            said = await list_page(lease, query, REQUEST_LIMITS, self._cursors)
        return said.required

    async def download(self, path: str) -> Download:
        """Return a download of the file `path`. Its first piece has already been read."""
        _require_plain(path)
        download = Download(self, path)
        await download.begin()
        return download

    async def read(self, path: str) -> bytes:
        """Return the content of a whole file.

        Raises:
            FileChanged: the file changed while it was read.
        """
        download = await self.download(path)
        return b"".join([piece async for piece in download.pieces()])

    def upload(self, path: str, mode: Mode = "replace") -> Upload:
        """Return an upload to the file `path`. Enter it with `async with`, pass the content to
        `feed`, and call `finish`.

        With the mode `create`, `finish` fails if the file exists.
        """
        _require_plain(path)
        return Upload(self, path, mode)

    async def write(
        self, path: str, source: bytes | AsyncIterable[bytes], mode: Mode = "replace"
    ) -> int:
        """Write a whole file, and return its size in bytes. `source` is the content, in one piece
        or several.

        Raises:
            RequestTooLarge: the content is larger than the workspace.
        """
        async with self.upload(path, mode) as upload:
            if isinstance(source, bytes):
                await upload.feed(source)
            else:
                async for piece in source:
                    await upload.feed(piece)
            return await upload.finish()

    async def pack(self, path: str = "") -> AsyncIterator[bytes]:
        """Yield, in pieces, a tar archive of everything in the directory `path`, without links. If
        an error is raised after the first piece, the archive is incomplete.

        Raises:
            InvalidParams: a file cannot be read, or the files in total are larger than the
                workspace.
            FileChanged: a file changed while it was read.
        """
        if path:
            _require_plain(path)
        after, room = "", self.most_bytes
        while True:
            request = {"do": "list", "path": path, "recursive": True, "most": MAX_LISTED}
            found = await self.ask({**request, **({"after": after} if after else {})}, Listing)
            if not goes_forward(found.entries, after) or found.has_more > len(found.entries):
                raise not_as_agreed()
            if path and [entry.path for entry in found.entries[:1]] == [path]:
                words = "The path is not a directory. Download it as a file."
                raise InvalidParams(words, fields=["path"])
            room -= sum(entry.size for entry in found.entries)
            if room < 0:
                raise InvalidParams(
                    "The directory's files are larger in total than the workspace: some are sparse "
                    "or hard-linked. Download them one by one.",
                    fields=["path"],
                )
            async for piece in self._packed(found.entries, f"{path}/" if path else ""):
                yield piece
            if not found.has_more:
                break
            after = found.entries[-1].path
        yield bytes(2 * tarfile.BLOCKSIZE)

    async def _packed(self, entries: Sequence[Entry], prefix: str) -> AsyncIterator[bytes]:
        """Yield the archive's members for `entries`, which are one page of a listing. `prefix` is
        the part of each path that the archive leaves out.
        """
        files = deque(entry for entry in entries if entry.kind == "file")
        for entry in entries:
            if entry.kind == "directory":
                yield _header(entry, prefix, tarfile.DIRTYPE, 0, is_executable=True)
        while files:
            asked = [files[n].path for n in range(min(len(files), MAX_LISTED))]
            request = {"do": "read_many", "paths": asked, "length": MAX_READ_BYTES}
            pieces = (await self.ask(request, Pieces)).pieces[: len(asked)]
            for piece in pieces:
                file = files.popleft()
                if piece is None:
                    words = f"{visible(file.path)[:SHOWN_CHARACTERS]} cannot be read."
                    raise InvalidParams(words, fields=["path"])
                _require_as_listed(file, piece.size)
                content = piece.content
                if len(content) != piece.size:
                    raise not_as_agreed()
                yield _header(
                    file, prefix, tarfile.REGTYPE, piece.size, is_executable=piece.executable
                )
                yield content + _padding(piece.size)
            if not pieces:
                file = files.popleft()  # larger than one answer
                download = await self.download(file.path)
                _require_as_listed(file, download.size)
                yield _header(
                    file, prefix, tarfile.REGTYPE, download.size,
                    is_executable=download.is_executable,
                )  # fmt: skip
                async for data in download.pieces():
                    yield data
                yield _padding(download.size)

    async def unpack(self, source: AsyncIterable[bytes], path: str = "") -> Unpacked:
        """Unpack a tar archive into the directory `path`, which is created if it is missing. Return
        the number of unpacked files and their total size.

        Existing files with the same paths are replaced; other files stay.

        Raises:
            RequestTooLarge: the archive is larger than the workspace.
            InvalidParams: the source is not a tar archive that contains only regular files and
                directories. Nothing was unpacked.
        """
        if path:
            _require_plain(path)
        async with Upload(self, path, "replace") as upload:
            async for piece in source:
                await upload.feed(piece)
            return await upload.unpack(path)

    async def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file, a directory, or a symbolic link (but not its target).

        A directory that is not empty is deleted only if `recursive` is True.
        """
        _require_plain(path)
        request = {"do": "delete", "paths": [path], "recursive": recursive}
        said = await self.ask(request, Deletion)
        if not said.is_of([path]):
            raise not_as_agreed()
        if said.missing:
            raise ResourceNotFound("There is no such file or directory in the workspace.")
        if said.failed:
            why = "".join(c for c in said.failed[0].why if c.isprintable())[:SHOWN_CHARACTERS]
            raise InvalidParams(
                f"The deletion failed ({why}). To delete a directory that is not empty, use "
                "recursive=true.",
                fields=["path"],
            )

    async def ask(self, request: JsonObject, model: type[M]) -> M:
        """Wait until the session's container is free, and send one request to its guest. Return the
        answer, parsed as `model`.

        The container is held only for this request. Between two requests, it can run calls.
        """
        turn = await self._sessions.files(self._principal, self.session_id)
        async with turn as lease:
            memory_mb, disk_mb = self._record.memory_mb, self._record.disk_mb
            limits = replace(REQUEST_LIMITS, memory_mb=memory_mb, disk_mb=disk_mb)
            said = await ask(lease, request, limits, model)
        return said.required


class Download:
    """A download of one file. `size` is the size of the whole file in bytes. If the file changes
    during the download, `pieces` raises FileChanged.
    """

    def __init__(self, files: SessionFiles, path: str) -> None:
        self.path = path
        self.size = 0
        self.is_executable = False
        self._files = files
        self._version = ""
        self._first = b""

    async def begin(self) -> None:
        """Read the first piece of the file, and set `size` and `is_executable`."""
        piece, self._first = await self._piece(0)
        self.size, self._version = piece.size, piece.version
        self.is_executable = piece.executable

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the content of the file in pieces. This method can be called only once.

        Raises:
            FileChanged: the file has changed, or the session or its container has ended.
        """
        content, self._first = self._first, b""
        sent = 0
        while content:
            yield content
            sent += len(content)
            if sent == self.size:
                return
            try:
                piece, content = await self._piece(sent)
            except EngineError as error:
                raise FileChanged(error.message) from None
            if (piece.size, piece.version) != (self.size, self._version):
                raise FileChanged("it changed during the download")

    async def _piece(self, offset: int) -> tuple[Piece, bytes]:
        request = {"do": "read", "path": self.path, "offset": offset, "length": MAX_READ_BYTES}
        piece = await self._files.ask(request, Piece)
        if not piece.is_of(offset, MAX_READ_BYTES):
            raise not_as_agreed()
        return piece, piece.content


class Upload:
    """An upload of one file. The guest stores the received bytes under a random token until
    `finish` moves them to the file's path.

    An unfinished upload is removed when the `async with` block ends.
    """

    def __init__(self, files: SessionFiles, path: str, mode: Mode) -> None:
        self._files = files
        self._path = path
        self._mode = mode
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._sent = 0
        self._has_begun = False
        self._is_finished = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._has_begun or self._is_finished:
            return
        with anyio.move_on_after(DROP_S, shield=True), suppress(EngineError):
            await self._files.ask({"do": "drop", "token": self._token}, Dropped)

    async def feed(self, data: bytes) -> None:
        """Send the next bytes of the file.

        Raises:
            RequestTooLarge: the file is larger than the workspace.
        """
        self._files.require_room(self._sent + len(data))
        for start in range(0, len(data), UPLOAD_PIECE_BYTES):
            await self._put(data[start : start + UPLOAD_PIECE_BYTES])

    async def finish(self) -> int:
        """Move the complete file to its path, and return its size in bytes."""
        if not self._has_begun:
            await self._put(b"")
        request: JsonObject = {
            "do": "finish",
            "token": self._token,
            "path": self._path,
            "size": self._sent,
            "mode": self._mode,
        }
        written = await self._files.ask(request, Written)
        self._is_finished = True
        return self._agreed(written)

    async def unpack(self, path: str) -> Unpacked:
        """Unpack the uploaded bytes, which must be a tar archive, into the directory `path`. Then
        remove the upload. Return the number of unpacked files and their total size.
        """
        if not self._has_begun:
            await self._put(b"")
        request: JsonObject = {
            "do": "unpack", "token": self._token, "path": path, "size": self._sent
        }  # fmt: skip
        unpacked = await self._files.ask(request, Unpacked)
        self._is_finished = True
        return unpacked

    async def _put(self, piece: bytes) -> None:
        self._has_begun = True
        request: JsonObject = {
            "do": "put",
            "token": self._token,
            "offset": self._sent,
            "content_base64": base64.b64encode(piece).decode("ascii"),
        }
        written = await self._files.ask(request, Written)
        self._sent += len(piece)
        self._agreed(written)

    def _agreed(self, written: Written) -> int:
        if written.size != self._sent:
            raise not_as_agreed()
        return written.size


def _require_as_listed(entry: Entry, size: int) -> None:
    """Raise FileChanged if the file, which now has `size` bytes, has grown since it was listed as
    `entry`.
    """
    if size > entry.size:
        name = visible(entry.path)[:SHOWN_CHARACTERS]
        raise FileChanged(f"{name} has grown since it was listed")


def _header(entry: Entry, prefix: str, kind: bytes, size: int, *, is_executable: bool) -> bytes:
    """Return the header of a file or directory in a tar archive. `kind` is the type of the entry in
    tar, and `size` is the size of its content in bytes. The archive leaves `prefix` out of the
    entry's path.
    """
    member = tarfile.TarInfo(entry.path.removeprefix(prefix))
    member.type, member.size = kind, size
    member.mode = 0o755 if is_executable else 0o644
    member.mtime = max(0, entry.modified_ns // 10**9)
    return member.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> bytes:
    """Return the zero bytes that follow a member of `size` bytes in an archive, to fill its last
    block.
    """
    return bytes(-size % tarfile.BLOCKSIZE)


def _require_plain(path: Any) -> None:
    fault = path_fault(path)
    if fault is not None:
        raise InvalidParams(f"The path {fault}.", fields=["path"])
