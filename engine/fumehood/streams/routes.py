"""HTTP routes of calls whose events are streamed as they happen.

`POST /v1/tools/{name}/sse` starts a call and streams its events. `GET /v1/calls/{id}/events`
streams the same events again, from any event on.

Host side. Events are read from a recording, which contains them in the form in which they are sent.
The library sse-starlette is not used: it would only send keep-alive comments and wait, and this
wait would have to end when the engine stops. Invariants: for a slow client, memory holds only one
batch of events and the socket's buffer, and only for a limited time; if a client disconnects, the
call continues, unless it has the option `cancel_on_disconnect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import anyio
import anyio.lowlevel
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fumehood.core.errors import InvalidParams, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.value import Value
from fumehood.engine import Engine
from fumehood.http.answers import envelope_response, once_delivered, stopped, when_left
from fumehood.http.caller import principal_of
from fumehood.http.endpoint import Needs, endpoint
from fumehood.http.event_stream import HEADERS, KEEP_ALIVE, KEEP_ALIVE_S, WRITE_DEADLINE_S
from fumehood.http.routes.calls import CALL_ERRORS, NewCall
from fumehood.http.routes.tools import ToolName
from fumehood.protocol.messages import encode_envelope
from fumehood.streams import sse
from fumehood.streams.in_engine import Streams
from fumehood.streams.recordings import Record, RecordingReader

LAST_WORD_S = 1.0


def _refuse_resumption(request: Request) -> None:
    """Refuse a request in which the client tries to resume a stream, because this route would start
    a second call.
    """
    if "last-event-id" in request.headers:
        raise InvalidParams(
            "Calling again would start another call. To resume, send Last-Event-ID to "
            "GET /v1/calls/CALL_ID/events.",
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
    client=None,
)
async def stream_tool(
    request: Request, engine: Engine, name: ToolName, body: NewCall, caller: Principal | None
) -> Response:
    """Call a tool and stream its events (SSE). The last event is the answer.

    If the call is refused before anything runs, or is a dry run, the response is a single envelope
    with its HTTP status, as for `/call`. Otherwise the response is a stream of the events
    `tool_progress` (the first one immediately), `tool_output`, `tool_retrying`, `tool_notice` (if
    events were dropped), and finally `tool_result` or `tool_error`, which has the envelope.
    Comments keep the connection alive. If the client disconnects, the call continues, unless
    `cancel_on_disconnect` is set. `/v1/calls/{call_id}/events` streams the call's events again.
    """
    call = engine.part(Streams).open(name, body, caller)
    refusal = await call.begun()
    if refusal is not None:
        response = envelope_response(refusal)
        return once_delivered(request, response, lambda: engine.delivered(call.live))
    on_end = call.live.cancel if body.options.cancel_on_disconnect else None
    return EventsResponse(
        engine, call.reader(), name, on_end, on_sent=lambda: engine.delivered(call.live)
    )


class EventsQuery(Value):
    """The query of a request for a call's events. `last_event_id` is the id of the event after
    which the stream begins.
    """

    last_event_id: str | None = Field(
        default=None,
        description="The same as the header `Last-Event-ID`, which is used if both are given.",
    )


@endpoint(
    "GET",
    "/v1/calls/{call_id}/events",
    Needs.CALLER,
    errors=[ResourceNotFound],
    events=sse.MEDIA_TYPE,
    client=None,
)
async def follow_call(
    request: Request,
    engine: Engine,
    caller: Principal,
    call_id: Annotated[str, "The `call_id` in the metadata of a stream's events."],
    query: EventsQuery,
) -> Response:
    """Stream the events (SSE) of one of the caller's own calls, even if the call has ended.

    The call must have been started at `/sse`. The stream begins with the call's first event or, if
    the header `Last-Event-ID` is given, with the event that follows the event with this `id`. If
    the call has no event with this `id`, the stream begins with an event `resync`, followed by all
    events of the call. Disconnecting never stops the call.
    """
    after = request.headers.get("last-event-id") or query.last_event_id or None
    reader = await engine.part(Streams).follow(call_id, caller, after)
    if request.method == "HEAD":
        reader.close()
        return Response(headers={name.decode(): value.decode() for name, value in HEADERS})
    return EventsResponse(engine, reader)


class EventsResponse(Response):
    """The event stream of a call that has begun.

    `on_end` is called when the stream ends. `on_sent` is called when the last event was sent to a
    client that is still connected.
    """

    media_type = sse.MEDIA_TYPE

    def __init__(
        self,
        engine: Engine,
        reader: RecordingReader,
        tool: str | None = None,
        on_end: Callable[[], object] | None = None,
        on_sent: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._reader = reader
        self._tool = tool
        self._on_end = on_end
        self._on_sent = on_sent
        self._last = Record("", "0:0", b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last event was sent or the client disconnects."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(when_left, receive, group.cancel_scope.cancel)
                try:
                    await self._send_all(send)
                    is_here = self._on_sent is not None and not scope["state"]["has_left"]()
                    await _write(send, b"", more=False)
                    if self._on_sent is not None and is_here:
                        self._on_sent()
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
            if self._on_end is not None:
                self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await _write(send, sse.retry())
        while True:
            pause = asyncio.timeout(KEEP_ALIVE_S)  # a cancel scope would cost each event 10 % more
            try:
                async with pause:
                    records = await self._reader.read()
            except TimeoutError:
                if not pause.expired():
                    raise
                await _write(send, KEEP_ALIVE)
                continue
            if not records:
                break
            self._last = records[-1]
            await _write(send, b"".join([sse.encode(*record) for record in records]))

    async def _say_that_it_stops(self, send: Send) -> None:
        sequence, _, offset = self._last.id.partition(":")
        data = encode_envelope(stopped(self._engine, self._tool))
        event = sse.encode("tool_error", f"{int(sequence) + 1}:{offset}", data)
        await _write(send, event, more=False, deadline_s=LAST_WORD_S)


async def _write(
    send: Send, body: bytes, *, more: bool = True, deadline_s: float | None = None
) -> None:
    """Send bytes of the response body. Raises TimeoutError if the client does not read them within
    `deadline_s` seconds.
    """
    async with asyncio.timeout(WRITE_DEADLINE_S if deadline_s is None else deadline_s):
        await send({"type": "http.response.body", "body": body, "more_body": more})


OPERATIONS = [stream_tool, follow_call]
