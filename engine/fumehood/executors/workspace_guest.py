"""Requests to the guest's program `files`, about single files or whole workspaces.

Host side, below the parts that work on a session's files or save them. The program `files` runs no
user code, but shares a container with user code. Invariants: an answer is valid for its model and
fits its request, or it is an error; a path in an answer is plain and relative. The error for a
refused request contains the engine's text; the guest's own text is quoted only about an archive.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, field_validator

from fumehood.core.arguments import MAX_READ_BYTES
from fumehood.core.errors import (
    ENDING_ERRORS,
    EndedBy,
    EngineError,
    ExecutionError,
    InvalidParams,
    ResourceNotFound,
    SandboxUnavailable,
    WorkspaceChanged,
)
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits
from fumehood.core.workspace_path import path_fault
from fumehood.executors.claims import Claim, read_claim
from fumehood.executors.endings import Subject, refused_by, session_lost
from fumehood.protocol import strict_json
from fumehood.protocol.framing import MAX_TIME_NS
from fumehood.sandbox.wall import NO_SINKS, Lease, RunEnding, RunSinks

MAX_LISTED = 1000
"""Maximum number of entries in one answer."""

FaultKind = Literal[
    "not_found",
    "not_a_file",
    "link",
    "exists",
    "no_room",
    "not_empty",
    "changed",
    "invalid",
    "no_right",
    "unseen",
    "not_as_seen",
    "archive",
]
"""Why the guest refuses a request. `FAULT_WORDS` explains each reason."""


class Fault(Claim):
    """The reason for a refusal. The message is untrusted text from the guest."""

    kind: FaultKind
    message: str = Field(max_length=1000)


class _Refusal(Claim):
    fault: Fault


class Entry(Claim):
    """One entry of a workspace's directory. `size` is in bytes; `modified_ns` counts from 1970."""

    path: str
    kind: Literal["file", "directory", "link", "other"]
    size: int = Field(ge=0, le=strict_json.MAX_SAFE_INTEGER)
    modified_ns: int = Field(ge=-MAX_TIME_NS, le=MAX_TIME_NS)

    @field_validator("path")
    @classmethod
    def _is_plain(cls, value: str) -> str:
        if path_fault(value) is not None:
            raise ValueError("not a plain path")
        return value


class Listing(Claim):
    """Entries in the order of their paths. `has_more` is whether there are more entries than
    requested.
    """

    entries: list[Entry] = Field(max_length=MAX_LISTED)
    has_more: bool


class Piece(Claim):
    """A part of a file. `size` is the size of the whole file; `version` changes with the file."""

    content_base64: str = Field(max_length=MAX_READ_BYTES * 4 // 3 + 4)
    size: int = Field(ge=0, le=strict_json.MAX_SAFE_INTEGER)
    version: str = Field(max_length=200)
    executable: bool = False

    @field_validator("content_base64")
    @classmethod
    def _is_base64(cls, value: str) -> str:
        try:
            base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("not base64") from None
        return value

    @property
    def content(self) -> bytes:
        """The decoded bytes."""
        return base64.b64decode(self.content_base64)

    def is_of(self, offset: int, length: int) -> bool:
        """Whether the piece has as many bytes as the file has in the requested range."""
        return len(self.content) == min(length, max(0, self.size - offset))


class Pieces(Claim):
    """The contents of whole files, in the order of the request. If a file could not be read, its
    item is None. If not all files fit into one answer, the last ones are missing.
    """

    pieces: list[Piece | None] = Field(max_length=MAX_LISTED)


class Unpacked(Claim):
    """The number of files in an unpacked archive, and their total size in bytes."""

    files: int = Field(ge=0, le=strict_json.MAX_SAFE_INTEGER)
    size: int = Field(ge=0, le=strict_json.MAX_SAFE_INTEGER)


class Written(Claim):
    """The size in bytes of a file, or of an upload so far, after a write."""

    size: int = Field(ge=0, le=strict_json.MAX_SAFE_INTEGER)


class NotDeleted(Claim):
    """A path that could not be deleted, and the guest's reason."""

    path: str = Field(max_length=4096)
    why: str = Field(max_length=1000)


class Deletion(Claim):
    """The result of a deletion for each path."""

    deleted: list[str] = Field(max_length=MAX_LISTED)
    missing: list[str] = Field(max_length=MAX_LISTED)
    failed: list[NotDeleted] = Field(max_length=MAX_LISTED)

    def is_of(self, paths: list[str]) -> bool:
        """Whether there is exactly one result for each of these paths, and no other result."""
        said = [*self.deleted, *self.missing, *(entry.path for entry in self.failed)]
        return set(said) == set(paths) and len(said) == len(set(paths))


# -- requests ------------------------------------------------------------------------------

PROGRAM = "files"
"""The name by which a lease runs the guest's program."""

M = TypeVar("M", bound=Claim)
T = TypeVar("T")

FAULT_WORDS = {
    "not_found": "There is no such file or directory in the workspace.",
    "not_a_file": "Not a regular file. A directory is copied as a whole (sessions get "
    "--recursive); links, pipes and devices are not copied.",
    "link": "The path contains a symbolic link; links are not followed. Name the target.",
    "exists": "The file already exists. Replace it with mode 'replace', or choose another path.",
    "no_room": "The workspace is full. Delete something, or start a session with more room (a "
    "disk, or more memory).",
    "not_empty": "The directory is not empty. Use recursive to delete it with its contents.",
    "changed": "The file changed in the meantime. Start again.",
    "invalid": "This is not possible in a workspace.",
    "no_right": "Permission denied: neither the session's programs nor this call may change this.",
    "unseen": "The changes cannot be previewed: a file or directory there cannot be read, or is "
    "nested too deeply.",
    "not_as_seen": "The workspace has changed since the approval.",
    "archive": "Not an uncompressed tar archive of plain files and directories with relative "
    "paths. Links, devices, absolute paths and '..' are refused.",
}

_FIELD = "path"

SHOWN_CHARACTERS = 200
"""Maximum number of characters of the guest's text, such as a path, that an error message quotes.
"""


@dataclass(frozen=True, slots=True)
class Said(Generic[T]):
    """The guest's answer to a request: either a value or an error. `ending` describes how the
    guest's run that served the request ended.
    """

    ending: RunEnding
    value: T | None = None
    error: EngineError | None = None

    @property
    def required(self) -> T:
        """The value. If there is an error instead, it is raised."""
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value


async def ask(
    lease: Lease, request: JsonObject, limits: Limits, model: type[M], sinks: RunSinks = NO_SINKS
) -> Said[M]:
    """Send one request to the guest, and return the answer, parsed as `model`."""
    ending = await lease.run(PROGRAM, request, limits, sinks)
    if ending.ended_by is not EndedBy.OK:
        return Said(ending, error=_ended(ending, limits))
    value = read_claim(model, ending.result)
    if value is not None:
        return Said(ending, value)
    refusal = read_claim(_Refusal, ending.result)
    if refusal is not None:
        return Said(ending, error=refusal_of(refusal.fault.kind, refusal.fault.message))
    return Said(ending, error=not_as_agreed())


def not_as_agreed() -> SandboxUnavailable:
    """Return the error for an invalid answer. A program may have tampered with the guest."""
    return SandboxUnavailable(
        "The session's container gave an invalid answer, so nothing in it "
        "can be trusted. End the session and start another.",
        retryable=False,
    )


def refusal_of(kind: FaultKind, message: str = "") -> EngineError:
    """Return the error for a request that the guest refused. `message` is the guest's own text."""
    words = FAULT_WORDS[kind]
    if kind == "archive" and message:
        words = f"{words} Here: {visible(message)[:SHOWN_CHARACTERS]}."
    if kind == "not_as_seen":
        return WorkspaceChanged(
            f"{words} Nothing was changed. Make the call again to ask for a new approval.",
            details={"changed": ["workspace"]},
        )
    if kind == "not_found":
        return ResourceNotFound(words, fields=[_FIELD])
    return InvalidParams(words, fields=[_FIELD], details={"fault": kind})


def _ended(ending: RunEnding, limits: Limits) -> EngineError:
    if ending.ended_by is EndedBy.SANDBOX_LOST:
        return session_lost({}, ending, has_disk=limits.disk_mb is not None)
    error_class = ENDING_ERRORS[ending.ended_by] or ExecutionError
    why: Any = " ".join(refused_by(ending.limits_hit, limits, Subject(in_session=True)))
    return error_class(
        f"The request about files was stopped ({ending.ended_by.value}). Ask for less at a time."
        + (f" {why}" if why else "")
    )


# -- whole workspaces -----------------------------------------------------------------------

MAX_FILES = 20_000
"""Maximum number of files and directories in a workspace that can be scanned."""

PIECE_BYTES = 4 << 20
"""Size of the pieces into which a large file is divided, in bytes."""

SCAN_BYTES = 400 * 1024
"""Maximum size of the rows in one answer, in bytes. The whole answer may have 512 KB."""

LIMITS = Limits(wall_s=30.0, cpu_s=30.0, memory_mb=None, output_bytes=MB)

DIRECTORY, LINK = -1, -2
"""Values that rows have in place of a file's size."""

MAX_TARGET = 4096
"""Maximum number of characters of a link's target or of a file's version."""

Row = tuple[str, int, bool, str]


class NotRead(Exception):
    """The files of a workspace could not be read. The exception's message is a clause that states
    the reason.
    """


class Scanned(Claim):
    """A page of the list of a workspace's files.

    Each row has four values: the path, the size in bytes, whether the file is executable, and its
    version. If a file changes, its version changes. An empty version means that the guest
    cannot tell whether the file has changed. A directory has `DIRECTORY` in place of the size. If
    links are requested, each link has a row with `LINK` in place of the size, and its target in
    place of the version.
    """

    rows: list[Annotated[Row, Field(strict=False)]] = Field(max_length=MAX_FILES)  # JSON arrays
    has_more: bool
    too_many: bool
    others: list[Annotated[str, Field(max_length=MAX_TARGET)]] = Field(max_length=MAX_FILES)


async def answer_of(source: Lease, asked: JsonObject, model: type[M]) -> M:
    """Send a request to the guest's program `files`, and return the answer, parsed as `model`.
    Raises EngineError.
    """
    return (await ask(source, asked, LIMITS, model)).required


async def scan(
    source: Lease, *, links: bool = False, skip: Sequence[str] = ()
) -> tuple[list[Row], list[str]]:
    """List the files of a workspace. Return two lists:

    * a row (see `Scanned`) for each file and directory, sorted by path;
    * the paths of links and special files. If there are many, some may be missing.

    If `links` is True, each link has a row in the first list, and is not in the second. Directories
    whose name is in `skip` are left out, with everything below them.

    Raises:
        NotRead: there are too many files.
        EngineError: the guest failed.
    """
    rows: list[Row] = []
    others: list[str] = []
    after = ""
    while True:
        asked: JsonObject = {
            "do": "scan", "most": MAX_FILES, "after": after, "room": SCAN_BYTES,
            "links": links, "skip": list(skip),
        }  # fmt: skip
        page = await answer_of(source, asked, Scanned)
        if page.too_many or len(rows) + len(page.rows) > MAX_FILES:
            raise NotRead(f"the workspace has more than {MAX_FILES} files and directories")
        for row in page.rows:
            path, size, _, version = row
            least = LINK if links else DIRECTORY
            if path <= after or path_fault(path) or size < least or len(version) > MAX_TARGET:
                raise not_as_agreed()
            after = path
            rows.append(row)
        others += page.others
        if len(others) > MAX_FILES:
            raise NotRead(f"the workspace has more than {MAX_FILES} links and special files")
        if not page.has_more:
            return rows, others
        if not page.rows:
            raise not_as_agreed()


async def contents(source: Lease, rows: Iterable[Row]) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the contents of the files in `rows`, piece by piece, as pairs of a file's path and its
    next piece.

    An empty file has no pieces.

    Raises:
        NotRead: a file has changed since the scan.
        EngineError: the guest failed.
    """
    small: list[Row] = []
    size = 0
    for row in rows:
        if row[1] > MAX_READ_BYTES:
            async for piece in _large(source, row):
                yield row[0], piece
        elif row[1] > 0:
            if size + row[1] > MAX_READ_BYTES or len(small) >= MAX_LISTED:
                for file in await _read_many(source, small):
                    yield file
                small, size = [], 0
            small.append(row)
            size += row[1]
    for file in await _read_many(source, small):
        yield file


async def _read_many(source: Lease, rows: list[Row]) -> list[tuple[str, bytes]]:
    if not rows:
        return []
    paths = [row[0] for row in rows]
    asked: JsonObject = {"do": "read_many", "paths": paths, "length": MAX_READ_BYTES}
    pieces = (await answer_of(source, asked, Pieces)).pieces
    if len(pieces) > len(rows):
        raise not_as_agreed()
    if len(pieces) < len(rows):  # the next file has grown, and no longer fits into the answer
        raise _changed(rows[len(pieces)][0])
    read = []
    for (path, size, _, _), piece in zip(rows, pieces, strict=True):
        if piece is None or (piece.size, len(piece.content)) != (size, size):
            raise _changed(path)
        read.append((path, piece.content))
    return read


async def _large(source: Lease, row: Row) -> AsyncIterator[bytes]:
    path, size, _, _ = row
    content = b""
    for offset in range(0, size, MAX_READ_BYTES):
        asked: JsonObject = {
            "do": "read_closed", "path": path, "offset": offset, "length": MAX_READ_BYTES
        }  # fmt: skip
        piece = await answer_of(source, asked, Piece)
        if piece.size != size or not piece.is_of(offset, MAX_READ_BYTES):
            raise _changed(path)
        content += piece.content
        if len(content) >= PIECE_BYTES:
            yield content
            content = b""
    if content:
        yield content


def _changed(path: str) -> NotRead:
    return NotRead(f"{visible(path)[:SHOWN_CHARACTERS]} changed while it was read")
