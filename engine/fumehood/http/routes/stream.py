"""`POST /v1/tools/{name}/sse`, a call that is followed, and the way to end a running one."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import CancelledCall
from fumehood.core.call import CallBody
from fumehood.core.errors import EngineError, InvalidParams, ResourceNotFound
from fumehood.engine import parse_call_body
from fumehood.http.answers import answer, engine_of, envelope_response, read_json, stopped
from fumehood.http.caller import principal_of, require_principal
from fumehood.http.following import EventsResponse
from fumehood.http.operation import Needs, Operation
from fumehood.http.routes.calls import CALL_ERRORS
from fumehood.http.routes.tools import TOOL
from fumehood.protocol import sse


async def stream_tool(request: Request) -> Response:
    """Call a tool and follow it: server-sent events, the answer as the last of them.

    What is refused before anything could run is an envelope under its HTTP status, as with
    `/call`, and so is a dry run. Else events come: `tool_progress` (the first at once),
    `tool_output`, `tool_notice` where some are missing, and at the end `tool_result` or
    `tool_error` with the envelope. Comments keep the connection alive. A client that leaves
    does not stop the call, unless `cancel_on_disconnect` says so.
    """
    engine = engine_of(request)
    name: str = request.path_params["name"]
    try:
        _refuse_resumption(request)
        body = parse_call_body(await read_json(request))
        call = engine.open_stream(name, body, principal_of(request))
    except EngineError as error:
        return envelope_response(engine.refusal(error, tool=name))
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


async def cancel_call(request: Request) -> Response:
    """End a running call of the caller's own.

    Answers when its program is gone. The call itself ends with `CANCELLED` for whoever waits
    for it, with what it had printed by then.
    """
    principal = require_principal(request)
    call_id: str = request.path_params["call_id"]
    await engine_of(request).cancel_call(call_id, principal)
    return answer(request, CancelledCall(call_id=call_id, cancelled=True))


def _refuse_resumption(request: Request) -> None:
    """Who asks for the rest of a call must not get a second call."""
    if "last-event-id" in request.headers:
        raise InvalidParams(
            "This version cannot resume a stream: leave Last-Event-ID out. That would call the "
            "tool anew.",
            fields=["Last-Event-ID"],
        )


OPERATIONS = [
    Operation(
        "POST",
        "/v1/tools/{name}/sse",
        stream_tool,
        Needs.CALLER,
        body=CallBody,
        parameters=TOOL,
        errors=CALL_ERRORS,
        has_tool_codes=True,
        events=sse.MEDIA_TYPE,
    ),
    Operation(
        "POST",
        "/v1/calls/{call_id}/cancel",
        cancel_call,
        Needs.CALLER,
        data=CancelledCall,
        parameters={"call_id": "The `call_id` in the metadata of a stream's events."},
        errors=frozenset({ResourceNotFound}),
    ),
]
