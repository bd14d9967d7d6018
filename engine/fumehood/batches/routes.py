"""HTTP route of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from fumehood.batches.batch import parse_batch
from fumehood.batches.model import MAX_CALLS, BatchAnswer, RawBatch
from fumehood.call_options import CallBody
from fumehood.core.call import MAX_TOOL_CHARACTERS
from fumehood.core.errors import ShuttingDown
from fumehood.core.identity import Principal
from fumehood.engine_with_parts import Engine
from fumehood.http.answers import JsonResponse
from fumehood.http.endpoint import Needs, ParsedBy, endpoint
from fumehood.http.routes.calls import cancelled_with
from fumehood.protocol.messages import encode_envelope


class BatchCall(CallBody):
    """One call of a batch."""

    tool: str = Field(max_length=MAX_TOOL_CHARACTERS)


class BatchBody(RawBatch):
    """The body of `POST /v1/calls`. The envelope of a malformed call reports the fault."""

    calls: list[BatchCall | Any] = Field(min_length=1, max_length=MAX_CALLS)


NewBatch = Annotated[RawBatch, ParsedBy(parse_batch, BatchBody)]


@endpoint("POST", "/v1/calls", Needs.CALLER, errors=[ShuttingDown], data=BatchAnswer, client=None)
async def call_tools(
    request: Request, engine: Engine, body: NewBatch, caller: Principal
) -> Response:
    """Make 1 to 1000 calls in one request. The answer has one envelope per call, in their order.

    A call that is malformed, refused or fails does not affect the others. If the client
    disconnects, running calls are cancelled, and no further call is started.
    """
    batch = engine.open_batch(body, caller)
    async with cancelled_with(request, batch.cancel):
        await batch.run()
    return _response(engine, batch.texts)


def _response(engine: Engine, texts: Sequence[bytes]) -> Response:
    """Return a response with a success envelope. `texts` are the results as JSON, which become the
    list `data.results` of the envelope.
    """
    head, results, tail = encode_envelope(engine.answer({"results": []})).partition(b'"results":[')
    content = b"".join((head, results, b",".join(texts), tail))
    return JsonResponse(content)


OPERATIONS = [call_tools]
