"""All files of a workspace: their listing, and their contents.

Host side, over the guest's program `files`. What the guest says is untrusted, but can only harm its
own session: paths are plain and in order, and numbers and sizes are limited.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from fumehood.core.arguments import MAX_READ_BYTES
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits
from fumehood.core.workspace_path import path_fault
from fumehood.executors.claims import Claim
from fumehood.executors.workspace_guest import (
    MAX_LISTED,
    SHOWN_CHARACTERS,
    Piece,
    Pieces,
    ask,
    not_as_agreed,
)
from fumehood.sandbox.wall import Lease

MAX_FILES = 20_000
"""Maximum number of files and directories of one listing."""

PIECE_BYTES = 4 << 20
"""Size of a piece of a large file."""

SCAN_BYTES = 400 * 1024
"""Bytes of rows in one answer of the guest, which has at most 512 KB."""

LIMITS = Limits(wall_s=30.0, cpu_s=30.0, memory_mb=None, output_bytes=MB)

DIRECTORY, LINK = -1, -2
"""Sizes of what is no file."""

MAX_TARGET = 4096
"""Characters of a link's target."""

MAX_VERSION = 100

M = TypeVar("M", bound=Claim)
Row = tuple[str, int, bool, str]


class NotRead(Exception):
    """The files of a workspace could not be read. The message is a clause."""


class Scanned(Claim):
    """A page of a workspace's files: path, size (-1 for a directory), whether it can be executed,
    and version. If links are wanted, they have the size -2 and their target as the version.
    """

    rows: list[Annotated[Row, Field(strict=False)]] = Field(max_length=MAX_FILES)  # JSON arrays
    has_more: bool
    too_many: bool
    others: list[Annotated[str, Field(max_length=MAX_TARGET)]] = Field(max_length=MAX_FILES)


async def answer_of(source: Lease, asked: JsonObject, model: type[M]) -> M:
    """Send a request to the guest's program `files`. Raises EngineError."""
    return (await ask(source, asked, LIMITS, model)).required


async def scan(
    source: Lease, *, links: bool = False, skip: Sequence[str] = ()
) -> tuple[list[Row], list[str]]:
    """Return the files and directories of a workspace in the order of their paths, and some of its
    links and special files. With `links`, links are rows. Directories called as one of `skip`
    are left out, with all that is below them.

    Raises:
        NotRead: there are too many.
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
            least, longest = (LINK, MAX_TARGET) if links else (DIRECTORY, MAX_VERSION)
            if path <= after or path_fault(path) or size < least or len(version) > longest:
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
    """Yield the pieces of files with their paths. An empty file has none. Raises as `scan`, and if
    one changes meanwhile.
    """
    small: list[Row] = []
    size = 0
    for row in rows:
        if row[1] > MAX_READ_BYTES:
            async for piece in _large(source, row):
                yield row[0], piece
        elif row[1] > 0:
            if size + row[1] > MAX_READ_BYTES or len(small) >= MAX_LISTED:
                for one in await _read_many(source, small):
                    yield one
                small, size = [], 0
            small.append(row)
            size += row[1]
    for one in await _read_many(source, small):
        yield one


async def _read_many(source: Lease, rows: list[Row]) -> list[tuple[str, bytes]]:
    if not rows:
        return []
    paths = [row[0] for row in rows]
    asked: JsonObject = {"do": "read_many", "paths": paths, "length": MAX_READ_BYTES}
    told = (await answer_of(source, asked, Pieces)).pieces
    if len(told) > len(rows):
        raise not_as_agreed()
    if len(told) < len(rows):  # the next one does not fit any more
        raise _changed(rows[len(told)][0])
    read = []
    for (path, size, _, _), piece in zip(rows, told, strict=True):
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
