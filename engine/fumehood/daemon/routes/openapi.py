"""`/v1/openapi.json`: the document of the socket that is asked."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.daemon.operation import Needs, Operation


async def openapi(request: Request) -> Response:
    """The OpenAPI document of this socket."""
    return JSONResponse(request.app.state.openapi)


OPERATIONS = [Operation("GET", "/v1/openapi.json", openapi, Needs.NOBODY, plain=(200,))]
