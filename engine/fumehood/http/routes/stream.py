"""`POST /v1/tools/{name}/sse`, a call with its events as they happen; and cancelling a call.

Host side, over a recording. Without sse-starlette: events are recorded in the form they are sent
in, so only pings and waiting are left, which must be bounded by the engine's own stop.
Invariants: for a slow client no more is held than one step of the reader and the socket's buffer,
and not forever. A client that disconnects stops only its own reading, unless the call has
`cancel_on_disconnect`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

import anyio
import anyio.lowlevel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fumehood.answers import CancelledCall
from fumehood.core.errors import InvalidParams, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.answers import envelope_response, stopped
from fumehood.http.caller import principal_of
from fumehood.http.endpoint import Needs, endpoint
from fumehood.http.routes.calls import CALL_ERRORS, NewCall
from fumehood.http.routes.tools import ToolName
from fumehood.pipeline.stream import StreamedCall
from fumehood.protocol import sse
from fumehood.protocol.messages import encode_envelope
from fumehood.storage.recordings import Record, RecordingReader

KEEP_ALIVE_S = 15.0
WRITE_DEADLINE_S = 60.0
"""For sending one step of the reader; a client that does not read this long is disconnected."""

LAST_WORD_S = 1.0
LAST_KINDS = ("tool_result", "tool_error")
HEADERS = [
    (b"content-type", f"{sse.MEDIA_TYPE}; charset=utf-8".encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer events
    (b"x-content-type-options", b"nosniff"),
]


def _refuse_resumption(request: Request) -> None:
    """Refuse a client that wants to resume a stream: it must not start a second call."""
    if "last-event-id" in request.headers:
        raise InvalidParams(
            "This version cannot resume a stream. Without Last-Event-ID, the tool is called again.",
            fields=["Last-Event-ID"],
        )


@endpoint(
    "POST",
    "/v1/tools/{name}/sse",
    Needs.CALLER,
    authorize=principal_of,
    before_reading=_refuse_resumption,
    errors=CALL_ERRORS,
    has_tool_codes=True,
    events=sse.MEDIA_TYPE,
)
async def stream_tool(
    engine: Engine, name: ToolName, body: NewCall, caller: Principal | None
) -> Response:
    """Call a tool and stream its events (SSE); the last one is the answer.

    A refusal before anything ran is an envelope with its HTTP status, as with `/call`, and so is
    a dry run. Otherwise events follow: `tool_progress` (the first at once), `tool_output`,
    `tool_retrying`, `tool_notice` if some were dropped, and finally `tool_result` or `tool_error`
    with the envelope. Comments keep the connection alive. Disconnecting does not stop the call,
    unless `cancel_on_disconnect` is set.
    """
    call = engine.open_stream(name, body, caller)
    try:
        refusal = await call.begun()
    except asyncio.CancelledError:
        if not engine.is_draining:
            raise
        return envelope_response(stopped(engine, name))
    if refusal is not None:
        return envelope_response(refusal)
    cancels = body.options.cancel_on_disconnect
    return EventsResponse(engine, call, name, cancel_on_disconnect=cancels)


@endpoint("POST", "/v1/calls/{call_id}/cancel", Needs.CALLER, errors=[ResourceNotFound])
async def cancel_call(
    engine: Engine,
    caller: Principal,
    call_id: Annotated[str, "The `call_id` in the metadata of a stream's events."],
) -> CancelledCall:
    """Cancel one of the caller's own running calls.

    It answers once the program has ended. The call itself is answered with `CANCELLED` and its
    output so far.
    """
    await engine.cancel_call(call_id, caller)
    return CancelledCall(call_id=call_id, cancelled=True)


class EventsResponse(Response):
    """The event stream of a call that has begun."""

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
        """Send the events."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch, receive, group.cancel_scope)
                try:
                    await self._send_all(send)
                except TimeoutError:  # the client does not read
                    scope["state"]["abort"]()
                    await anyio.lowlevel.checkpoint()  # let the server notice the abort
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
        else:  # the engine is stopping, and the call has no answer
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


OPERATIONS = [stream_tool, cancel_call]
