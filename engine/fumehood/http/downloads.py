"""A file as an answer, piece by piece; one that cannot be sent whole breaks off visibly.

Host side. The length stands in the head, so that a body which ends before it is an error to
every client. Invariant: what was sent is the beginning of one file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from urllib.parse import quote

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fumehood.http.shares import MAX_HELD_BYTES, Share, too_much_held

HELD_BYTES = 1 << 20
"""What a download may hold at a time: a piece as it comes, as it is sent, and in the server's
hands. It counts as its user's."""

SEND_DEADLINE_S = 60.0
"""For a client to take one piece. One that takes none is let go."""


def require_room(share: Share) -> None:
    """Raises RateLimited where this user's requests hold all that one user's may."""
    if share.held_bytes + HELD_BYTES > MAX_HELD_BYTES:
        raise too_much_held()


def attachment_headers(path: str, content_type: str, size: int) -> dict[str, str]:
    """Those of a stranger's file: never shown in place, never kept by anybody between."""
    name = quote(path.rpartition("/")[2], safe="")
    return {
        "content-type": content_type,
        "content-length": str(size),
        "content-disposition": f"attachment; filename*=UTF-8''{name}",
        "x-content-type-options": "nosniff",
        "cache-control": "private, no-store",
    }


class FileBody(Response):
    """An answer of known length. `pieces` may raise `broken`: then the connection ends."""

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
        """Send it. Returning before its end makes the server close the connection."""
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
