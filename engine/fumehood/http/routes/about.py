"""`/v1/health`, `/v1/ready` and `/v1/openapi.json`: the daemon about itself."""

from __future__ import annotations

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.core.status import Health, Readiness
from fumehood.http.answers import engine_of
from fumehood.http.operation import Needs, Operation


async def health(request: Request) -> Response:
    """Answer while the process runs."""
    return JSONResponse(Health().model_dump(mode="json"))


async def ready(request: Request) -> Response:
    """200 if calls are served, 503 if not; in both cases with what each wall enforces."""
    readiness = engine_of(request).ready()
    status = 200 if readiness.status == "ready" else 503
    return JSONResponse(readiness.model_dump(mode="json"), status_code=status)


async def openapi(request: Request) -> Response:
    """The OpenAPI document of this socket."""
    document = await anyio.to_thread.run_sync(request.app.state.openapi)
    return JSONResponse(document)


OPERATIONS = [
    Operation("GET", "/v1/health", health, Needs.NOBODY, data=Health, plain=(200,)),
    Operation("GET", "/v1/ready", ready, Needs.NOBODY, data=Readiness, plain=(200, 503)),
    Operation("GET", "/v1/openapi.json", openapi, Needs.NOBODY, plain=(200,)),
]
