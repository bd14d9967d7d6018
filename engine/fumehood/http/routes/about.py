"""`/v1/health`, `/v1/ready` and `/v1/openapi.json`: the daemon about itself."""

from __future__ import annotations

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.core.status import Health, Readiness
from fumehood.engine import Engine
from fumehood.http.endpoint import Needs, endpoint


@endpoint("GET", "/v1/health", Needs.NOBODY, data=Health, plain=(200,))
async def health() -> Response:
    """Answer while the process runs."""
    return JSONResponse(Health().model_dump(mode="json"))


@endpoint("GET", "/v1/ready", Needs.NOBODY, data=Readiness, plain=(200, 503))
async def ready(engine: Engine) -> Response:
    """200 if calls are served, 503 if not; in both cases with what each wall enforces."""
    readiness = engine.ready()
    status = 200 if readiness.status == "ready" else 503
    return JSONResponse(readiness.model_dump(mode="json"), status_code=status)


@endpoint("GET", "/v1/openapi.json", Needs.NOBODY, plain=(200,), client=None)
async def openapi(request: Request) -> Response:
    """The OpenAPI document of this socket."""
    document = await anyio.to_thread.run_sync(request.app.openapi)
    return JSONResponse(document)


OPERATIONS = [health, ready, openapi]
