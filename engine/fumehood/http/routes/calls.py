"""Single calls, the call log and its blobs, and decisions.

A blob is content that was too large for an answer. Only the owner of the call can read it here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, BinaryIO

import anyio
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import CallAnswer, CallList, CancelledCall, Pagination
from fumehood.approvals.model import Approval, ApprovalState
from fumehood.call_options import CallBody
from fumehood.core.call import CallBody as AnyCallBody
from fumehood.core.call_log import CallQuery, CallRecord
from fumehood.core.decision import Decision, DecisionBody, decided
from fumehood.core.envelope import Envelope, UsageReport
from fumehood.core.errors import (
    ERROR_CODES,
    MethodNotAllowed,
    RequiresHumanApproval,
    ResourceNotFound,
)
from fumehood.core.identity import Principal
from fumehood.core.value import Value
from fumehood.engine import Engine, parse_call_body
from fumehood.executors.base import CallHandle
from fumehood.http.answers import (
    answer,
    engine_of,
    envelope_response,
    once_delivered,
    when_left,
)
from fumehood.http.bodies import FileBody, attachment_headers
from fumehood.http.caller import principal_of
from fumehood.http.endpoint import ANY_MEDIA, Needs, ParsedBy, endpoint
from fumehood.http.routes.tools import ToolName
from fumehood.observe.clock import timestamp
from fumehood.protocol.messages import decode_envelope
from fumehood.storage.blobs import Blob
from fumehood.storage.calls import NO_SUCH_CALL

NewCall = Annotated[CallBody, ParsedBy(parse_call_body, CallBody)]

CALL_ERRORS = frozenset(ERROR_CODES.values()) - {MethodNotAllowed}
"""The errors that a call may have: all codes. Clients that handle all of them also work with checks
that are added later."""


@endpoint(
    "POST",
    "/v1/tools/{name}/call",
    Needs.CALLER,
    authorize=principal_of,
    errors=CALL_ERRORS,
    has_tool_codes=True,
    client=None,
)
def call_tool(
    request: Request, engine: Engine, name: ToolName, body: NewCall, caller: Principal | None
) -> Awaitable[Response]:
    """Call a tool.

    If the client disconnects, the call continues until it ends or reaches one of its limits, unless
    `cancel_on_disconnect` is set.
    """
    return run_plainly(request, engine, name, body, caller)


async def run_plainly(
    request: Request,
    engine: Engine,
    tool: str,
    body: AnyCallBody,
    caller: Principal | None,
    shown: Callable[[Envelope], Envelope] | None = None,
) -> Response:
    """Run a call, and return its envelope as one response. If `shown` is given, it converts the
    call's envelope to the envelope that is returned.
    """
    handle = CallHandle()
    handle.is_delivered_later = True
    if body.options.cancel_on_disconnect:
        async with cancelled_with(request, handle.cancel):
            envelope = await engine.run(tool, body, caller, handle)
    else:
        envelope = await engine.run(tool, body, caller, handle)
    response = envelope_response(envelope if shown is None else shown(envelope))
    if handle.on_delivered is None:
        return response
    return once_delivered(request, response, lambda: engine.delivered(handle))


@endpoint("GET", "/v1/calls", Needs.CALLER, errors=[ResourceNotFound], client="calls")
async def list_calls(engine: Engine, caller: Principal, query: CallQuery) -> CallList:
    """List the caller's own calls, newest first.

    If `state` is `running`, only calls that are running now are listed, oldest first.
    """
    page = await engine.calls_of(caller, query)
    return CallList(items=page.items, pagination=Pagination.of(page))


@endpoint(
    "GET",
    "/v1/calls/{call_id}",
    Needs.CALLER,
    errors=[ResourceNotFound],
    data=CallAnswer,
    client="call_state",
)
async def show_call(
    request: Request,
    engine: Engine,
    caller: Principal,
    call_id: Annotated[str, "The `call_id` of an envelope."],
) -> Response:
    """Show one of the caller's own calls.

    The answer includes the call's arguments and envelope if they are kept, and the approval if the
    call needed one.
    """
    approval = await engine.approvals.of_call(call_id, caller)
    envelope = await engine.approvals.answer_of(call_id, caller, is_fetched=False)
    is_approvals = envelope is not None
    record, kept = await engine.call_log.find(caller.id, call_id) or (None, None)
    arguments = kept.arguments if kept is not None else None
    if record is None:  # a call that has not ended is not in the log yet
        running = engine.overview.running_call(call_id, caller.id)
        if approval is not None and (running is None or approval.state is ApprovalState.PENDING):
            record = _waiting(approval, engine)
        elif running is not None:
            record, arguments = running
        else:
            raise ResourceNotFound(NO_SUCH_CALL)
    if envelope is None and kept is not None:
        envelope = decode_envelope(kept.envelope)
    response = answer(
        engine,
        CallAnswer(call=record, arguments=arguments, approval=approval, envelope=envelope),
    )
    if not is_approvals:
        return response
    return once_delivered(request, response, lambda: engine.approvals.fetched(call_id))


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
async def cancelled_with(request: Request, cancel: Callable[[], object]) -> AsyncIterator[None]:
    """Call `cancel` if the client of the request disconnects before the block ends."""
    async with anyio.create_task_group() as group:
        group.start_soon(when_left, request.receive, cancel)
        yield
        group.cancel_scope.cancel()


@endpoint(
    "POST",
    "/v1/decisions",
    Needs.CALLER,
    authorize=principal_of,
    errors=CALL_ERRORS,
    data=Decision,
    client=None,
)
async def decide(
    request: Request, engine: Engine, body: DecisionBody, caller: Principal | None
) -> Response:
    """Decide on a call of a tool that the caller runs itself. The engine runs nothing.

    The caller may run the tool only if the decision is `allow`, and then only once. A denial is a
    successful answer. An error means that nothing was decided, and the tool must not run.
    """
    tool = body.reference
    return await run_plainly(
        request, engine, tool, body.call, caller, lambda envelope: decided(envelope, tool)
    )


CHUNK_BYTES = 64 * 1024


class BlobQuery(Value):
    """The query parameters of a blob's address."""

    expires: str = Field(
        description="The value in the `url` or `resource_url` of the answer that has the blob."
    )
    signature: str = Field(
        description="The value in the `url` or `resource_url` of the answer that has the blob."
    )


@endpoint(
    "GET",
    "/v1/blobs/{blob_id}",
    Needs.CALLER,
    errors=[ResourceNotFound],
    media=ANY_MEDIA,
    client=None,
)
async def get_blob(
    request: Request,
    engine: Engine,
    caller: Principal,
    blob_id: Annotated[str, "The blob's id, `blob_…`."],
    query: BlobQuery,
) -> Response:
    """Download one of the caller's own blobs.

    Use the address in `url` or `resource_url` of an answer unchanged. The address is valid until
    the answer's `expires_at`, and only for the principal that made the call. The response is always
    an attachment. Its media type follows from the file name.
    """
    blob, file = await engine.blobs.open_blob(blob_id, caller.id, query.expires, query.signature)
    return sent_blob(request, blob, file)


def sent_blob(request: Request, blob: Blob, file: BinaryIO) -> Response:
    """Return a blob as a download. For `HEAD`, return only the headers."""
    headers = attachment_headers(blob.filename, blob.content_type, blob.size)
    if request.method == "HEAD":
        file.close()
        return Response(headers=headers)
    engine = engine_of(request)
    return FileBody(
        _chunks(engine, file), headers, OSError,
        lambda why: engine.log.warning("blob.download_broke_off", why=why[:200]), file.close,
    )  # fmt: skip


async def _chunks(engine: Engine, file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await engine.blobs.read(file, CHUNK_BYTES):
        yield chunk


@endpoint(
    "POST", "/v1/calls/{call_id}/cancel", Needs.CALLER, errors=[ResourceNotFound], client="cancel"
)
async def cancel_call(
    engine: Engine,
    caller: Principal,
    call_id: Annotated[str, "The `call_id` in the metadata of a stream's events."],
) -> CancelledCall:
    """Cancel one of the caller's own running calls.

    The answer is sent once the program has ended. The cancelled call itself gets the error
    `CANCELLED`, with the program's output so far.
    """
    await engine.cancel_call(call_id, caller)
    return CancelledCall(call_id=call_id, cancelled=True)


OPERATIONS = [call_tool, list_calls, show_call, decide, get_blob, cancel_call]
