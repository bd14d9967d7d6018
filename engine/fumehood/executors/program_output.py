"""A program's output and the files that it leaves: from a wall's frames to the answer.

Host side. Names and bytes are untrusted. Invariants: at most about `SPILL_CHARACTERS` of a stream
are in memory; a longer stream goes to disk as a blob, and only its head and tail stay in memory.
Small files are part of the answer, larger ones become blobs and are written as they arrive. Files
that the program left unchanged are not sent back.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import mimetypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import CONTAINER_FILES_OUT
from fumehood.core.returned_file import FILE_CONTENT, PNG
from fumehood.core.session import FileKind
from fumehood.core.workspace_path import path_fault
from fumehood.executors.outcome import CutText
from fumehood.observe.clock import timestamp
from fumehood.redaction.redactor import Redactor
from fumehood.sandbox.wall import OnOutput
from fumehood.storage.blobs import BlobStore, Draft, NotKept

SPILL_CHARACTERS = 2 << 20
"""Characters of a stream that may stay in memory; a longer stream spills to disk. It is larger than
the default output limit, so streams spill only if that limit was raised."""

SIDE_CHARACTERS = 5000
"""Length of a spilled stream's head and tail, in characters each. The answer shows only these."""

FEED_CHARACTERS = 256 * 1024
"""Number of characters of a spilled stream that are collected before they are written to disk."""

MANY_PIECES = 1024
"""Number of pieces of a stream above which they are joined: small ones take more memory than their
text."""


@dataclass(frozen=True, slots=True)
class KeptText:
    """A complete stream as `text`, or a spilled one as `cut` with an empty `text`."""

    text: str
    cut: CutText | None = None


class KeptStreams:
    """Collects both streams of one run, redacted, and passes each piece on to `output`.

    Of each stream, characters beyond `most_characters` are dropped.
    """

    def __init__(
        self,
        blobs: BlobStore,
        principal_id: str,
        most_characters: int,
        redactor: Redactor,
        output: OnOutput | None = None,
        session_id: str | None = None,
    ) -> None:
        self._has_heard = False
        self._output = output
        self._streams = {
            name: _Stream(blobs, lambda: blobs.draft(principal_id, session_id), most_characters)
            for name in ("stdout", "stderr")
        }
        self._redactors = {name: redactor.stream() for name in self._streams}

    @property
    def redacted(self) -> int:
        """Number of matches that redaction replaced in both streams."""
        return sum(redactor.count for redactor in self._redactors.values())

    def hear(self, stream: str, text: str) -> None:
        """Add the next characters of a stream."""
        self._has_heard = True
        self._keep(stream, self._redactors[stream].feed(text))

    def _keep(self, stream: str, text: str) -> None:
        kept = self._streams[stream].add(text)
        if kept and self._output is not None:
            self._output(stream, kept)

    async def finish(self) -> dict[str, KeptText]:
        """Return both streams by name, or an empty dict if there was no output.

        Takes only as long as writing to disk.
        """
        if not self._has_heard:
            return {}
        for name, redactor in self._redactors.items():
            self._keep(name, redactor.finish())
        return {name: await stream.finish(name) for name, stream in self._streams.items()}

    def discard(self) -> None:
        """Drop both streams."""
        for stream in self._streams.values():
            stream.discard()


class _Stream:
    def __init__(
        self, blobs: BlobStore, make_draft: Callable[[], Draft], most_characters: int
    ) -> None:
        self._blobs = blobs
        self._make_draft = make_draft
        self._left = most_characters
        self._length = 0
        self._parts: list[str] = []
        self._unfed = 0
        self._head = self._tail = ""
        self._draft: Draft | None = None

    def add(self, text: str) -> str:
        """Add text and return the part of it that is within the limit."""
        kept = text if len(text) <= self._left else text[: self._left]
        if not kept:
            return ""
        self._left -= len(kept)
        self._length += len(kept)
        self._parts.append(kept)
        self._unfed += len(kept)
        if len(self._parts) > MANY_PIECES:
            self._parts = ["".join(self._parts)]
        if self._unfed > (SPILL_CHARACTERS if self._draft is None else FEED_CHARACTERS):
            self._feed()
        return kept

    def _feed(self) -> None:
        text = "".join(self._parts)
        self._parts, self._unfed = [], 0
        if self._draft is None:
            self._draft = self._make_draft()
            self._head = text[:SIDE_CHARACTERS]
        self._tail = (self._tail + text[-SIDE_CHARACTERS:])[-SIDE_CHARACTERS:]
        self._draft.feed(text.encode("utf-8", "replace"))

    async def finish(self, name: str) -> KeptText:
        if self._draft is None:
            return KeptText("".join(self._parts))
        if self._parts:
            self._feed()
        cut = CutText(name, self._head, self._tail, self._length, await self._link(name))
        return KeptText("", cut)

    async def _link(self, name: str) -> JsonObject:
        assert self._draft is not None
        try:
            blob = await self._blobs.keep(self._draft, f"{name}.txt", "text/plain; charset=utf-8")
        except NotKept as reason:
            return {"not_kept": f"{reason}, so the rest is lost"}
        return {"resource_url": blob.url, "expires_at": timestamp(blob.expires_at)}

    def discard(self) -> None:
        if self._draft is not None:
            self._draft.discard()


# -- files ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file that the caller sent, decoded."""

    path: str
    content: bytes


MAX_INLINE_BYTES = 1_000_000
"""Size in bytes from which a file becomes a blob; smaller ones are inline in the answer (mission
E7)."""

MAX_INLINE_TOTAL_BYTES = 4_000_000
"""Total bytes of the inline files of one answer. Further files become blobs, so that the answer
stays readable."""

UNKNOWN_TYPE = "application/octet-stream"
"""The media type of a file whose name does not tell another."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
"""*Source*: PNG specification, 5.2."""

_TYPES = mimetypes.MimeTypes(filenames=())
"""Python's built-in table only: a file's media type must not depend on the host's configuration."""


@dataclass(slots=True)
class _Coming:
    """A file of the program that is being received, or has been received."""

    path: str
    announced: int
    kind: FileKind = "file"
    received: int = 0
    start: bytearray = field(default_factory=bytearray)
    """Its bytes so far while it is small enough to be inline, otherwise empty."""
    draft: Draft | None = None
    digest: Any = None
    """SHA-256 so far, if the file may be an unchanged file of the caller, otherwise None."""


class ProgramFiles:
    """Receives a program's files piece by piece. Call `entries` or `discard` at the end."""

    def __init__(
        self,
        blobs: BlobStore,
        principal_id: str,
        sent: list[SentFile],
        session_id: str | None = None,
        *,
        with_files: bool = True,
        with_digests: bool = False,
    ) -> None:
        """Prepare to receive files. Without `with_files`, only figures are kept."""
        self._blobs = blobs
        self._principal_id = principal_id
        self._session_id = session_id
        self._with_files = with_files
        self._with_digests = with_digests
        self.digests: dict[tuple[str, str], str] = {}
        """Kind and path → SHA-256, of all if asked for."""
        self._sent = {file.path: file.content for file in sent}
        self._coming: _Coming | None = None
        self._done: list[_Coming] = []
        self._names: set[tuple[FileKind, str]] = set()
        self._inline_total = 0
        self.files: list[JsonObject] = []
        self.pictures: list[JsonObject] = []
        """The answer's entry for each file and each picture, once `entries` has returned."""
        self.left_out = 0
        """Files left out: too many, cut short, or with invalid names."""

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        """Begin a file of `size` bytes, and end the one before it."""
        self._end_file()
        if kind == "file" and not self._with_files:
            return
        if path_fault(path) is not None or (kind, path) in self._names:
            self.left_out += 1
            return
        self._names.add((kind, path))
        self._coming = _Coming(path, size, kind)
        sent = self._sent.get(path) if kind == "file" else None
        if self._with_digests or (sent is not None and len(sent) == size):
            self._coming.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Add the next bytes of the file that began last."""
        coming = self._coming
        if coming is None:
            return
        if coming.kind == "image" and not coming.received and not data.startswith(PNG_SIGNATURE):
            self.left_out += 1  # not a PNG: the program wrote it, not the guest
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
        """Set `files` and `pictures`, and return the former.

        If it is cancelled, blobs may stay that no answer refers to.
        """
        self._end_file()
        done, self._done = self._done, []
        entries = list(zip(done, await asyncio.gather(*map(self._entry, done)), strict=True))
        pictures = [entry for coming, entry in entries if coming.kind == "image"]
        # In the order in which they were drawn: figure 10 comes after figure 2.
        self.pictures = sorted(pictures, key=lambda one: (len(one["filename"]), one["filename"]))
        self.files = [entry for coming, entry in entries if coming.kind == "file"]
        return self.files

    def discard(self) -> None:
        """Discard all files, if the run has no answer."""
        self._end_file()
        self.left_out = 0
        for coming in self._done:
            if coming.draft is not None:
                coming.draft.discard()
        self._done = []

    def _is_for_a_blob(self, coming: _Coming) -> bool:
        """Whether it is too large for the answer, alone or together with the other files."""
        size = len(coming.start)
        total = self._inline_total + size
        return size >= MAX_INLINE_BYTES or total > MAX_INLINE_TOTAL_BYTES

    def _to_draft(self, coming: _Coming) -> None:
        coming.draft = self._blobs.draft(self._principal_id, self._session_id)
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
            if coming.digest is not None:
                self.digests[coming.kind, coming.path] = coming.digest.hexdigest()

    def _is_one_too_many(self, coming: _Coming) -> bool:
        is_empty_figure = coming.kind == "image" and not coming.received
        return is_empty_figure or len(self._done) >= CONTAINER_FILES_OUT

    def _is_as_sent(self, coming: _Coming) -> bool:
        sent = self._sent.get(coming.path) if coming.kind == "file" else None
        if sent is None or coming.digest is None or coming.received != coming.announced:
            return False
        same: bool = coming.digest.digest() == hashlib.sha256(sent).digest()
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
    """Return the media type of a file by its name. Compressed files have `UNKNOWN_TYPE`."""
    kind, encoding = _TYPES.guess_type(path.rpartition("/")[2])
    return kind if kind is not None and encoding is None else UNKNOWN_TYPE
