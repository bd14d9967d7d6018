"""The body of an upload, piece by piece: bounded in size, in time and in memory.

Host side, between the server and whoever takes the pieces. No more of a body is held than one
piece, and that counts as its user's. Invariant: a client that sends slowly, stops, or leaves
ends its upload and nobody else's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress

import anyio
from starlette.requests import Request

from fumehood.core.errors import InvalidParams, UnsupportedMediaType
from fumehood.core.workspace import UPLOAD_PIECE_BYTES
from fumehood.http.answers import MAX_DRAINED_BYTES
from fumehood.http.shares import MAX_HELD_BYTES, Share, too_much_held

PIECE_DEADLINE_S = 60.0
"""For one piece, or as much of one as is sent: a client slower than that is let go."""

UPLOAD_DEADLINE_S = 900.0
"""For all of a body."""

DRAIN_DEADLINE_S = 10.0


def announced_bytes(request: Request) -> int | None:
    """What the client says that it will send; None where it says nothing."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def require_plain_bytes(request: Request) -> None:
    """Raises UnsupportedMediaType where the bytes would have to be decoded first."""
    if request.headers.get("content-encoding", "identity") not in ("", "identity"):
        raise UnsupportedMediaType("Send the file as it is, without a content encoding.")


class UploadBody:
    """The body of one request, read once: in pieces, or drained."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._share: Share = request.scope["state"]["share"]
        self._is_over = False

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces of a megabyte, the last one smaller. Close it when done.

        Raises:
            InvalidParams: it did not come in time, or the client left before its end.
            RateLimited: this user's bodies under way are too many.
        """
        end = anyio.current_time() + UPLOAD_DEADLINE_S
        buffer = bytearray()
        while not self._is_over:
            held = 0
            try:
                by = min(end, anyio.current_time() + PIECE_DEADLINE_S)
                while len(buffer) < UPLOAD_PIECE_BYTES and not self._is_over:
                    chunk = await self._next_chunk(by)
                    self._hold(len(chunk))
                    held += len(chunk)
                    buffer += chunk
                while len(buffer) >= UPLOAD_PIECE_BYTES or (buffer and self._is_over):
                    piece = bytes(buffer[:UPLOAD_PIECE_BYTES])
                    del buffer[:UPLOAD_PIECE_BYTES]
                    yield piece
            finally:
                self._share.held_bytes -= held

    async def drain(self) -> None:
        """Read on, bounded, what nobody wants: who writes first gets the answer then."""
        left = MAX_DRAINED_BYTES
        end = anyio.current_time() + DRAIN_DEADLINE_S
        with suppress(InvalidParams):
            while not self._is_over and left > 0:
                left -= len(await self._next_chunk(end))

    def _hold(self, size: int) -> None:
        if self._share.held_bytes + size > MAX_HELD_BYTES:
            raise too_much_held()
        self._share.held_bytes += size

    async def _next_chunk(self, by: float) -> bytes:
        message = None
        with anyio.move_on_after(max(0.0, by - anyio.current_time())):
            message = await self._request.receive()
        if message is None:
            raise InvalidParams(
                f"The file did not arrive in time: {PIECE_DEADLINE_S:g} s for a megabyte and "
                f"{UPLOAD_DEADLINE_S:g} s in all are allowed."
            )
        if message["type"] == "http.disconnect":
            self._is_over = True
            raise InvalidParams("The connection ended before the file did.")
        self._is_over = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk
