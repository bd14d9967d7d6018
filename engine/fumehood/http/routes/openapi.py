"""`/v1/openapi.json`: the document of the socket that is asked."""

from __future__ import annotations

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.http.operation import Needs, Operation


async def openapi(request: Request) -> Response:
    """The OpenAPI document of this socket."""
    document = await anyio.to_thread.run_sync(request.app.state.openapi)
    return JSONResponse(document)


OPERATIONS = [Operation("GET", "/v1/openapi.json", openapi, Needs.NOBODY, plain=(200,))]
