"""`POST /v1/tools/{name}/call`, the way in for every call, and `/v1/calls`, the call log."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from fumehood.daemon.answers import envelope_response, read_json
from fumehood.daemon.caller import principal_of, require_principal
from fumehood.engine import Engine, parse_call_body, parse_call_query
from fumehood.model.errors import EngineError, InvalidParams, ShuttingDown, Unauthorized


async def call_tool(request: Request) -> Response:
    """Carry out one call. A client that leaves does not stop it: its limits do."""
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


async def list_calls(request: Request) -> Response:
    """The caller's own calls, newest first."""
    principal = require_principal(request)
    engine: Engine = request.app.state.engine
    given = request.query_params.multi_items()
    query = dict(given)
    if len(query) != len(given):
        raise InvalidParams("A parameter of the query is given twice.")
    page = await engine.list_calls(parse_call_query(query), principal)
    items = [record.model_dump(mode="json") for record in page.items]
    pagination = page.model_dump(mode="json", exclude={"items"})
    return envelope_response(engine.answer({"items": items, "pagination": pagination}))


async def show_call(request: Request) -> Response:
    """One call of the caller's own."""
    principal = require_principal(request)
    engine: Engine = request.app.state.engine
    record = await engine.find_call(request.path_params["call_id"], principal)
    return envelope_response(engine.answer({"call": record.model_dump(mode="json")}))
