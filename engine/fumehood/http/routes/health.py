"""`/v1/health` (the process answers) and `/v1/ready` (calls would be served, and how)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.core.status import Health, Readiness
from fumehood.http.answers import engine_of
from fumehood.http.operation import Needs, Operation


async def health(request: Request) -> Response:
    """The process answers."""
    return JSONResponse(Health().model_dump(mode="json"))


async def ready(request: Request) -> Response:
    """200 where calls are served, 503 where not; what each wall in use enforces, either way."""
    readiness = engine_of(request).ready()
    status = 200 if readiness.status == "ready" else 503
    return JSONResponse(readiness.model_dump(mode="json"), status_code=status)


OPERATIONS = [
    Operation("GET", "/v1/health", health, Needs.NOBODY, data=Health, plain=(200,)),
    Operation("GET", "/v1/ready", ready, Needs.NOBODY, data=Readiness, plain=(200, 503)),
]
