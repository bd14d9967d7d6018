"""An answer that goes on: a call's events to one client, as they come.

Host side, over a recording that a reader follows. By hand rather than with sse-starlette: events
lie in the recording as they go out, so nothing is left for it to do but pings and waiting, which
must here be bounded by the engine's own stop. Invariants: of a client that does not read, no more
is held than one step of the reader and the socket's buffer, and that not for ever; a client that
leaves ends nothing but its own reading, unless its call asked for that.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import anyio
import anyio.lowlevel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fumehood.engine import Engine
from fumehood.http.answers import stopped
from fumehood.pipeline.stream import StreamedCall
from fumehood.protocol import sse
from fumehood.protocol.messages import encode_envelope
from fumehood.storage.recordings import Record, RecordingReader

KEEP_ALIVE_S = 15.0
WRITE_DEADLINE_S = 60.0
"""For one step of the reader to go out: a client that takes nothing for so long is gone."""

LAST_WORD_S = 1.0
LAST_KINDS = ("tool_result", "tool_error")
HEADERS = [
    (b"content-type", f"{sse.MEDIA_TYPE}; charset=utf-8".encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # what stands between must not collect events
    (b"x-content-type-options", b"nosniff"),
]


class EventsResponse(Response):
    """The events of a call that has begun."""

    media_type = sse.MEDIA_TYPE

    def __init__(
        self, engine: Engine, call: StreamedCall, tool: str, *, cancel_on_disconnect: bool
    ) -> None:
        super().__init__()
        self._engine = engine
        self._call = call
        self._tool = tool
        self._cancels = cancel_on_disconnect
        self._reader: RecordingReader = call.reader()
        self._last = Record("", "0:0", b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch, receive, group.cancel_scope)
                try:
                    await self._send_all(send)
                except TimeoutError:  # it does not read
                    scope["state"]["abort"]()
                    await anyio.lowlevel.checkpoint()  # the server hears that it is gone
                group.cancel_scope.cancel()
        except asyncio.CancelledError:
            if not self._engine.is_draining:
                raise
            with suppress(TimeoutError):
                await self._say_that_it_stops(send)
        finally:
            self._reader.close()
            if self._cancels:
                self._call.live.cancel()

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        while True:
            records: list[Record] | None = None
            with anyio.move_on_after(KEEP_ALIVE_S):
                records = await self._reader.read()
            if records is None:
                await _write(send, sse.KEEP_ALIVE)
                continue
            if not records:
                break
            self._last = records[-1]
            await _write(send, b"".join([sse.encode(*record) for record in records]))
        if self._last.kind in LAST_KINDS:
            await _write(send, b"", more=False)
        else:  # the engine stops, and the call had no answer
            await self._say_that_it_stops(send)

    async def _say_that_it_stops(self, send: Send) -> None:
        sequence, _, offset = self._last.id.partition(":")
        data = encode_envelope(stopped(self._engine, self._tool))
        event = sse.encode("tool_error", f"{int(sequence) + 1}:{offset}", data)
        await _write(send, event, more=False, deadline_s=LAST_WORD_S)


async def _write(
    send: Send, body: bytes, *, more: bool = True, deadline_s: float | None = None
) -> None:
    """Raises TimeoutError."""
    with anyio.fail_after(WRITE_DEADLINE_S if deadline_s is None else deadline_s):
        await send({"type": "http.response.body", "body": body, "more_body": more})
