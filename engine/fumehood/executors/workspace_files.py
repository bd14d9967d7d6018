"""The files that a run leaves behind: from a wall's frames to what an answer says of them.

Host side, a `FileSink`. Names and bytes are a stranger's. Small files stand in the answer,
larger ones become blobs, which are written while they come, so that no file is held in memory
whole. What the caller sent in and the program left as it was is not sent back.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import mimetypes
from dataclasses import dataclass, field
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.returned_file import FILE_CONTENT, PNG
from fumehood.core.workspace import FileKind
from fumehood.core.workspace_path import path_fault
from fumehood.executors.code_arguments import SentFile
from fumehood.observe.clock import timestamp
from fumehood.storage.blobs import BlobStore, Draft, NotKept

MAX_LISTED = 100
MAX_INLINE_BYTES = 1_000_000
"""Smaller files stand in the answer (mission E7)."""

MAX_INLINE_TOTAL_BYTES = 4_000_000
"""Of one answer; files beyond are blobs, however small, or it could not be read as one."""

UNKNOWN_TYPE = "application/octet-stream"

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
"""*Source*: PNG specification, 5.2."""

_TYPES = mimetypes.MimeTypes(filenames=())
"""Python's own table alone: what a name means must not depend on the host's files."""


@dataclass(slots=True)
class _Coming:
    """A file that is coming in."""

    path: str
    announced: int
    kind: FileKind = "file"
    received: int = 0
    start: bytearray = field(default_factory=bytearray)
    """Its bytes, while they may stand in the answer."""
    draft: Draft | None = None
    digest: Any = None
    """SHA-256 so far, where it may be what the caller sent."""


class WorkspaceFiles:
    """Takes files as they come. Afterwards `entries`, or `discard`."""

    def __init__(self, blobs: BlobStore, principal_id: str, sent: list[SentFile]) -> None:
        self._blobs = blobs
        self._principal_id = principal_id
        self._sent = {file.path: file.content for file in sent}
        self._coming: _Coming | None = None
        self._done: list[_Coming] = []
        self._names: set[tuple[FileKind, str]] = set()
        self._inline_total = 0
        self.pictures: list[JsonObject] = []
        """What the answer says of each picture, once `entries` came back."""
        self.left_out = 0
        """Files that were not taken: too many, cut short, or with names that are none."""

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        """A file begins."""
        self._end_file()
        if path_fault(path) is not None or (kind, path) in self._names:
            self.left_out += 1
            return
        self._names.add((kind, path))
        self._coming = _Coming(path, size, kind)
        sent = self._sent.get(path) if kind == "file" else None
        if sent is not None and len(sent) == size:
            self._coming.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """The next bytes of the file that began last."""
        coming = self._coming
        if coming is None:
            return
        if coming.kind == "image" and not coming.received and not data.startswith(PNG_SIGNATURE):
            self.left_out += 1  # the program put it there
            self._coming = None
            return
        coming.received += len(data)
        if coming.digest is not None:
            coming.digest.update(data)
        if coming.draft is None:
            coming.start += data
            if self._is_for_a_blob(coming):
                self._to_draft(coming)
        else:
            coming.draft.feed(data)

    async def entries(self) -> list[JsonObject]:
        """What the answer says of each file. Cancelling this may leave blobs nobody knows."""
        self._end_file()
        done, self._done = self._done, []
        entries = list(zip(done, await asyncio.gather(*map(self._entry, done)), strict=True))
        pictures = [entry for coming, entry in entries if coming.kind == "image"]
        # As they were drawn: the tenth after the second.
        self.pictures = sorted(pictures, key=lambda one: (len(one["filename"]), one["filename"]))
        return [entry for coming, entry in entries if coming.kind == "file"]

    def discard(self) -> None:
        """Forget everything, for a run whose answer nobody gets."""
        self._end_file()
        for coming in self._done:
            if coming.draft is not None:
                coming.draft.discard()
        self._done = []

    def _is_for_a_blob(self, coming: _Coming) -> bool:
        """Whether it is too large for the answer, by itself or beside the others."""
        size = len(coming.start)
        total = self._inline_total + size
        return size >= MAX_INLINE_BYTES or total > MAX_INLINE_TOTAL_BYTES

    def _to_draft(self, coming: _Coming) -> None:
        coming.draft = self._blobs.draft(self._principal_id)
        coming.draft.feed(bytes(coming.start))
        coming.start = bytearray()

    def _end_file(self) -> None:
        coming, self._coming = self._coming, None
        if coming is None:
            return
        if self._is_as_sent(coming):
            self._give_up(coming)
        elif coming.received != coming.announced or self._is_one_too_many(coming):
            self.left_out += 1
            self._give_up(coming)
        else:
            self._inline_total += len(coming.start)
            self._done.append(coming)

    def _is_one_too_many(self, coming: _Coming) -> bool:
        return len(self._done) >= MAX_LISTED or (coming.kind == "image" and not coming.received)

    def _is_as_sent(self, coming: _Coming) -> bool:
        if coming.digest is None or coming.received != coming.announced:
            return False
        sent = hashlib.sha256(self._sent[coming.path])
        same: bool = coming.digest.digest() == sent.digest()
        return same

    @staticmethod
    def _give_up(coming: _Coming) -> None:
        if coming.draft is not None:
            coming.draft.discard()

    async def _entry(self, coming: _Coming) -> JsonObject:
        content_type = PNG if coming.kind == "image" else content_type_of(coming.path)
        entry: JsonObject = {
            "filename": coming.path,
            "content_type": content_type,
            "size": coming.received,
        }
        if coming.draft is None:
            return {**entry, FILE_CONTENT: base64.b64encode(coming.start).decode("ascii")}
        try:
            blob = await self._blobs.keep(coming.draft, coming.path, content_type)
        except NotKept as reason:
            return {**entry, "not_kept": f"{reason}, so its content is lost"}
        return {**entry, "url": blob.url, "expires_at": timestamp(blob.expires_at)}


def content_type_of(path: str) -> str:
    """By the name alone. What is compressed is not called what it holds."""
    kind, encoding = _TYPES.guess_type(path.rpartition("/")[2])
    return kind if kind is not None and encoding is None else UNKNOWN_TYPE
