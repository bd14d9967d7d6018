"""What a program prints, kept as it comes: short streams in memory, long ones as blobs.

Host side, used by `code`; told by a wall, from the event loop. Invariant: of a stream no more
is in memory than `SPILL_CHARACTERS`, however long it is; what is beyond goes to the disk, and
both ends stay here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.core.json_types import JsonObject
from fumehood.executors.outcome import CutText
from fumehood.observe.clock import timestamp
from fumehood.sandbox.wall import OnOutput
from fumehood.storage.blobs import BlobStore, Draft, NotKept

SPILL_CHARACTERS = 2 << 20
"""More than the default output limit: only who raises that has streams as long as this."""

SIDE_CHARACTERS = 5000
"""Of either end; what is shown of them in the answer is no more."""

FEED_CHARACTERS = 256 * 1024
"""What is handed to the disk at once."""

MANY_PIECES = 1024
"""Small pieces take more room than their text."""


@dataclass(frozen=True, slots=True)
class KeptText:
    """A stream after the end: all of it, or what stands in its place."""

    text: str
    cut: CutText | None = None


class KeptStreams:
    """Both streams of one run. `output` hears the same, piece by piece."""

    def __init__(
        self,
        blobs: BlobStore,
        principal_id: str,
        most_characters: int,
        output: OnOutput | None = None,
    ) -> None:
        self._has_heard = False
        self._output = output
        self._streams = {
            name: _Stream(blobs, principal_id, most_characters) for name in ("stdout", "stderr")
        }

    def hear(self, stream: str, text: str) -> None:
        """The next characters of a stream."""
        self._has_heard = True
        kept = self._streams[stream].add(text)
        if kept and self._output is not None:
            self._output(stream, kept)

    async def finish(self) -> dict[str, KeptText]:
        """Both, by name; none where nothing was ever told. Bounded by the disk."""
        if not self._has_heard:
            return {}
        return {name: await stream.finish(name) for name, stream in self._streams.items()}

    def discard(self) -> None:
        """Nobody wants them."""
        for stream in self._streams.values():
            stream.discard()


class _Stream:
    def __init__(self, blobs: BlobStore, principal_id: str, most_characters: int) -> None:
        self._blobs = blobs
        self._principal_id = principal_id
        self._left = most_characters
        self._length = 0
        self._parts: list[str] = []
        self._unfed = 0
        self._head = self._tail = ""
        self._draft: Draft | None = None

    def add(self, text: str) -> str:
        """Returns what of it was within the limit."""
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
            self._draft = self._blobs.draft(self._principal_id)
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
