"""Conversion of envelopes and other data to HTTP responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from fumehood.core.envelope import Envelope
from fumehood.core.errors import ERROR_CODES, TOOL_CODE_HTTP_STATUS, ShuttingDown
from fumehood.engine import Engine
from fumehood.protocol.messages import encode_envelope

Headers = Iterable[tuple[bytes, bytes]]
_IS_JSON = (b"content-type", b"application/json")


class JsonResponse(Response):
    """A response whose content is already JSON."""

    media_type = "application/json"

    def __init__(self, content: bytes, status_code: int = 200, headers: Headers = ()) -> None:
        self.body = content
        self.status_code = status_code
        self.background = None
        length = str(len(content)).encode("ascii")
        self.raw_headers = [(b"content-length", length), _IS_JSON, *headers]


def headers_of(scope: Scope, name: bytes) -> list[bytes]:
    """Return every value of the request header `name`, as raw bytes."""
    found: list[bytes] = []
    for key, value in scope["headers"]:  # a comprehension's function call would slow every call
        if key == name:
            found += (value,)
    return found


async def left(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def when_left(receive: Receive, act: Callable[[], object]) -> None:
    """Call `act` as soon as the client has disconnected."""
    await left(receive)
    act()


def engine_of(request: Request) -> Engine:
    """Return the engine that the request's application serves."""
    engine: Engine = request.scope["app"].engine
    return engine


def answer(engine: Engine, data: BaseModel) -> Response:
    """Return a response with a success envelope whose data is `data`. For a call, use
    `envelope_response` instead, because a call has its own envelope.
    """
    return envelope_response(engine.answer(data.model_dump(mode="json")))


def stopped(engine: Engine, tool: str | None) -> Envelope:
    """Return the error envelope for a call that ended because the engine stopped."""
    ended = ShuttingDown("The engine stopped before the call ended.", retryable=False)
    return engine.refusal(ended, tool=tool)


def envelope_response(envelope: Envelope) -> Response:
    """Return an envelope as a response. The HTTP status follows from the envelope's error code, and
    is 200 if there is no error.
    """
    status = 200
    headers: Headers = ()
    if envelope.error is not None:
        known = ERROR_CODES.get(envelope.error.code)
        status = known.http_status if known is not None else TOOL_CODE_HTTP_STATUS
        if envelope.error.retry_after_ms is not None:
            seconds = max(1, -(-envelope.error.retry_after_ms // 1000))
            headers = [(b"retry-after", str(seconds).encode("ascii"))]
    return JsonResponse(encode_envelope(envelope), status, headers)


def once_delivered(request: Request, response: Response, tell: Callable[[], None]) -> Response:
    """Arrange that `tell` is called once `response` has been sent, and return `response`. If the
    request is a HEAD request, or if the client has already disconnected, `tell` is not called.
    """

    async def told() -> None:
        tell()

    if request.method != "HEAD" and not request.scope["state"]["has_left"]():
        response.background = BackgroundTask(told)
    return response
