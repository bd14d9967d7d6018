"""`POST /v1/tools/{name}/call`: the way in for every call."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from fumehood.daemon.answers import envelope_response, read_json
from fumehood.daemon.caller import principal_of
from fumehood.daemon.operation import Needs, Operation
from fumehood.daemon.routes.tools import TOOL
from fumehood.engine import Engine, parse_call_body
from fumehood.model.call import CallBody
from fumehood.model.errors import (
    ERROR_CODES,
    EngineError,
    MethodNotAllowed,
    ShuttingDown,
    Unauthorized,
)

CALL_ERRORS = frozenset(ERROR_CODES.values()) - {MethodNotAllowed}
"""Every code of the table: a client that knows them is not broken by the next gate."""


async def call_tool(request: Request) -> Response:
    """Call a tool.

    A client that leaves does not stop the call: its limits do.
    """
    engine: Engine = request.app.state.engine
    name: str = request.path_params["name"]
    try:
        body = parse_call_body(await read_json(request))
    except EngineError as error:
        return envelope_response(engine.refusal(error, tool=name))
    try:
        envelope = await engine.run(name, body, principal_of(request))
    except Unauthorized as error:
        return envelope_response(engine.refusal(error, tool=name))
    except asyncio.CancelledError:
        if not engine.is_draining:
            raise
        # The time for running calls is over; the client is still owed an answer.
        ended = ShuttingDown("The engine stopped before the call ended.", retryable=False)
        envelope = engine.refusal(ended, tool=name)
    return envelope_response(envelope)


OPERATIONS = [
    Operation(
        "POST",
        "/v1/tools/{name}/call",
        call_tool,
        Needs.CALLER,
        body=CallBody,
        parameters=TOOL,
        errors=CALL_ERRORS,
        has_tool_codes=True,
    ),
]
