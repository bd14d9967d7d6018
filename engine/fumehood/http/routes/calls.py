"""`POST /v1/tools/{name}/call`, the entrance of every plain call, and `/v1/calls`, the call log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import CallAnswer, CallList, Pagination
from fumehood.approvals.model import Approval
from fumehood.core.call import CallBody
from fumehood.core.call_log import CallQuery, CallRecord
from fumehood.core.envelope import UsageReport
from fumehood.core.errors import (
    ERROR_CODES,
    EngineError,
    InvalidParams,
    MethodNotAllowed,
    RequiresHumanApproval,
    ResourceNotFound,
    Unauthorized,
)
from fumehood.engine import Engine, parse_call_body, parse_call_query
from fumehood.executors.handle import CallHandle
from fumehood.http.answers import answer, engine_of, envelope_response, read_json, stopped
from fumehood.http.caller import principal_of, require_principal
from fumehood.http.operation import Needs, Operation
from fumehood.http.routes.tools import TOOL
from fumehood.observe.clock import timestamp

CALL_ERRORS = frozenset(ERROR_CODES.values()) - {MethodNotAllowed}
"""All codes: a client that handles them is not broken by a new gate."""


async def call_tool(request: Request) -> Response:
    """Call a tool.

    Disconnecting does not stop the call, unless `cancel_on_disconnect` is set; its limits do.
    """
    engine: Engine = request.app.state.engine
    name: str = request.path_params["name"]
    try:
        body = parse_call_body(await read_json(request))
    except EngineError as error:
        return envelope_response(engine.refusal(error, tool=name))
    try:
        principal = principal_of(request)
        if body.options.cancel_on_disconnect:
            async with cancelled_with(request) as live:
                envelope = await engine.run(name, body, principal, live)
        else:
            envelope = await engine.run(name, body, principal)
    except Unauthorized as error:
        return envelope_response(engine.refusal(error, tool=name))
    except asyncio.CancelledError:
        if not engine.is_draining:
            raise
        # The time for running calls is over, but the client still gets an answer.
        envelope = stopped(engine, name)
    return envelope_response(envelope)


async def list_calls(request: Request) -> Response:
    """List the caller's own calls, newest first."""
    principal = require_principal(request)
    given = request.query_params.multi_items()
    query = dict(given)
    if len(query) != len(given):
        raise InvalidParams("A parameter of the query is given twice.")
    page = await engine_of(request).list_calls(parse_call_query(query), principal)
    pagination = Pagination(**page.model_dump(exclude={"items"}))
    return answer(request, CallList(items=page.items, pagination=pagination))


async def show_call(request: Request) -> Response:
    """Show one of the caller's own calls.

    If it needed approval, also the approval and, once the call has ended, its envelope.
    """
    principal = require_principal(request)
    call_id: str = request.path_params["call_id"]
    engine = engine_of(request)
    approval = await engine.desk.of_call(call_id, principal)
    envelope = await engine.desk.answer_of(call_id, principal)
    try:
        record = await engine.find_call(call_id, principal)
    except ResourceNotFound:  # a call whose caller waits for approval is not in the log yet
        if approval is None:
            raise
        record = _waiting(approval, engine)
    return answer(request, CallAnswer(call=record, approval=approval, envelope=envelope))


def _waiting(approval: Approval, engine: Engine) -> CallRecord:
    return CallRecord(
        call_id=approval.call_id,
        timestamp=timestamp(approval.created_at),
        principal_id=approval.principal_id,
        agent_id=approval.agent_id,
        session_id=approval.session_id,
        trace_id=approval.trace_id,
        tool_name=approval.tool,
        tool_version=approval.tool_version,
        code=RequiresHumanApproval.code,
        ended_by=None,
        execution_time_ms=0,
        cpu_ms=None,
        cost=UsageReport().cost,
        currency=engine.config.prices.currency,
        input_tokens=0,
        output_tokens=0,
        tokens_used=0,
    )


@asynccontextmanager
async def cancelled_with(request: Request) -> AsyncIterator[CallHandle]:
    """Yield a handle for a call, and cancel the call as soon as its client disconnects."""
    live = CallHandle()
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_when_gone, request, live)
        yield live
        group.cancel_scope.cancel()


async def _cancel_when_gone(request: Request, live: CallHandle) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    live.cancel()


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
    Operation(
        "GET",
        "/v1/calls",
        list_calls,
        Needs.CALLER,
        data=CallList,
        query=CallQuery,
        errors=frozenset({ResourceNotFound}),
    ),
    Operation(
        "GET",
        "/v1/calls/{call_id}",
        show_call,
        Needs.CALLER,
        data=CallAnswer,
        parameters={"call_id": "The `call_id` of an envelope."},
        errors=frozenset({ResourceNotFound}),
    ),
]
