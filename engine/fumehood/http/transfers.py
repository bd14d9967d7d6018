"""Files as request and response bodies, piece by piece: bounded in size, time and memory.

Host side. At most a few pieces of a body are held, and they count against the user's share.
Invariants: a client that sends slowly, stops or disconnects ends only its own upload. A download
announces its length; whatever was sent is the beginning of one file, and a body that ends early is
an error to every client.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from urllib.parse import quote

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fumehood.core.errors import InvalidParams, UnsupportedMediaType
from fumehood.core.session import UPLOAD_PIECE_BYTES
from fumehood.http.answers import MAX_DRAINED_BYTES
from fumehood.http.shares import MAX_HELD_BYTES, Share, too_much_held

PIECE_DEADLINE_S = 60.0
"""For one piece of an upload; a slower client is disconnected."""

UPLOAD_DEADLINE_S = 900.0
"""For a whole upload."""

DRAIN_DEADLINE_S = 10.0

HELD_BYTES = 1 << 20
"""Memory of one download: a piece as read, as sent, and in the server's buffer. It counts against
the user's share."""

SEND_DEADLINE_S = 60.0
"""For a client to take one piece; a slower one is disconnected."""


def announced_bytes(request: Request) -> int | None:
    """Return the announced length, or None."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def require_plain_bytes(request: Request) -> None:
    """Raises UnsupportedMediaType if the body has a content encoding."""
    if request.headers.get("content-encoding", "identity") not in ("", "identity"):
        raise UnsupportedMediaType("Send the file as it is, without a content encoding.")


class UploadBody:
    """The body of one request, read once, in pieces or to discard it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._share: Share = request.scope["state"]["share"]
        self._is_over = False

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body in pieces of 1 MB, the last one smaller. Close it when done.

        Raises:
            InvalidParams: it did not arrive in time, or the client disconnected.
            RateLimited: this user's bodies in progress are too large together.
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
        """Discard the rest, up to a limit, so that a client that still writes gets an answer."""
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


def require_room(share: Share) -> None:
    """Raises RateLimited if this user's requests hold the maximum."""
    if share.held_bytes + HELD_BYTES > MAX_HELD_BYTES:
        raise too_much_held()


def attachment_headers(path: str, content_type: str, size: int) -> dict[str, str]:
    """Return headers for an untrusted file: always a download, never cached."""
    name = quote(path.rpartition("/")[2], safe="")
    return {
        "content-type": content_type,
        "content-length": str(size),
        "content-disposition": f"attachment; filename*=UTF-8''{name}",
        "x-content-type-options": "nosniff",
        "cache-control": "private, no-store",
    }


class FileBody(Response):
    """A response of known length. If `pieces` raises `broken`, the connection is closed."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        headers: dict[str, str],
        broken: type[Exception],
        on_break: Callable[[str], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._broken = broken
        self._on_break = on_break
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file. Returning before its end makes the server close the connection."""
        share: Share = scope["state"]["share"]
        share.held_bytes += HELD_BYTES
        try:
            await self._send(receive, send)
        finally:
            share.held_bytes -= HELD_BYTES

    async def _send(self, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with anyio.create_task_group() as group:
            group.start_soon(_end_with_the_client, receive, group.cancel_scope)
            try:
                if await self._send_all(send):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except self._broken as why:
                self._on_break(str(why))
            group.cancel_scope.cancel()

    async def _send_all(self, send: Send) -> bool:
        async for piece in self._pieces:
            with anyio.move_on_after(SEND_DEADLINE_S) as waiting:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if waiting.cancelled_caught:
                self._on_break("the client does not take it")
                return False
        return True


async def _end_with_the_client(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
