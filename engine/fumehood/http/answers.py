"""Envelopes as HTTP responses, and request bodies as strict JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    ERROR_CODES,
    TOOL_CODE_HTTP_STATUS,
    InvalidParams,
    RequestTooLarge,
    ShuttingDown,
    UnsupportedMediaType,
)
from fumehood.engine import Engine
from fumehood.http.shares import MAX_HELD_BYTES, Share, too_much_held
from fumehood.pipeline.incoming import validated
from fumehood.protocol import strict_json
from fumehood.protocol.messages import encode_envelope

M = TypeVar("M", bound=BaseModel)
Headers = Iterable[tuple[bytes, bytes]]
_IS_JSON = (b"content-type", b"application/json")

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DRAINED_BYTES = 64 * 1024 * 1024
"""How much of an oversized body is read and discarded, so that a client that writes before it
reads gets an answer instead of a broken pipe."""

BODY_DEADLINE_S = 60.0
SMALL_BODY_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread, so that they do not block other calls."""


class JsonResponse(Response):
    """A response whose content is JSON already."""

    media_type = "application/json"

    def __init__(self, content: bytes, status_code: int = 200, headers: Headers = ()) -> None:
        self.body = content
        self.status_code = status_code
        self.background = None
        length = str(len(content)).encode("ascii")
        self.raw_headers = [(b"content-length", length), _IS_JSON, *headers]


def headers_of(scope: Scope, name: bytes) -> list[bytes]:
    """Return every value of a header, as sent."""
    found: list[bytes] = []
    for key, value in scope["headers"]:  # a comprehension is a function call, on every call's way
        if key == name:
            found += (value,)
    return found


def engine_of(request: Request) -> Engine:
    """Return the application's engine."""
    engine: Engine = request.scope["app"].engine
    return engine


def answer(engine: Engine, data: BaseModel) -> Response:
    """Wrap `data` in a success envelope, for operations other than calls."""
    return envelope_response(engine.answer(data.model_dump(mode="json")))


def results_response(engine: Engine, texts: Sequence[bytes]) -> Response:
    """Return a success envelope with these results, which are JSON already, in `data`."""
    head, results, tail = encode_envelope(engine.answer({"results": []})).partition(b'"results":[')
    content = b"".join((head, results, b",".join(texts), tail))
    return JsonResponse(content)


def stopped(engine: Engine, tool: str | None) -> Envelope:
    """Make the envelope for a call that the engine's stop has ended."""
    ended = ShuttingDown("The engine stopped before the call ended.", retryable=False)
    return engine.refusal(ended, tool=tool)


def envelope_response(envelope: Envelope) -> Response:
    """Return the envelope with the HTTP status of its error code."""
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
    """Call `tell` once the response has left for a client that is still there."""

    async def told() -> None:
        tell()

    if request.method != "HEAD" and not request.scope["state"]["has_left"]():
        response.background = BackgroundTask(told)
    return response


async def read_json(request: Request) -> Any:
    """Read and parse the request's body.

    Raises:
        InvalidParams: not strict JSON; and the errors of `read_raw`.
    """
    body = _arrived(request) or await read_raw(request)
    return parse_json(body) if len(body) <= SMALL_BODY_BYTES else await parse_in_thread(body)


async def parse_in_thread(body: bytes) -> Any:
    """Parse a received body of any size. Raises InvalidParams if it is not strict JSON."""
    return await anyio.to_thread.run_sync(parse_json, body)


def parse_json(body: bytes) -> Any:
    """Parse a small body. Raises InvalidParams if it is not strict JSON."""
    try:
        return strict_json.loads(body)
    except strict_json.StrictJsonError as error:
        raise InvalidParams(f"The body cannot be read: {error}.") from None


async def read_raw(request: Request) -> bytes:
    """Read the bytes of a body that is declared as JSON.

    Raises:
        UnsupportedMediaType: not `application/json`.
        RequestTooLarge: over 8 MB.
        InvalidParams: it did not arrive within 60 s.
        RateLimited: the user's unfinished bodies are too large together.
    """
    body = _arrived(request)
    if body is not None:
        return body
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await _read_body(request)
    except TimeoutError:
        raise InvalidParams("The body did not arrive within 60 s.") from None
    except ClientDisconnect:
        raise InvalidParams("The connection ended before the body did.") from None


def _arrived(request: Request) -> bytes | None:
    """The body, if all of it is here already, as nearly always."""
    _require_json(request.scope["headers"])
    body: bytes | None = request.scope["state"]["take_body"]()
    return body


def parse_body(model: type[M], document: Any) -> M:
    """Validate a body with a model.

    Raises:
        InvalidParams: naming every invalid field.
    """
    if not isinstance(document, dict):
        raise InvalidParams("The body must be a JSON object.")
    try:
        return validated(model, document)
    except ValidationError as error:
        raise _wrong("body", error) from None


def parse_query(model: type[M], request: Request) -> M:
    """Validate the query with a model, which converts text to booleans and numbers.

    Raises:
        InvalidParams: naming every invalid parameter.
    """
    given = request.query_params.multi_items()
    query = dict(given)
    if len(query) != len(given):
        raise InvalidParams("A parameter of the query is given twice.")
    try:
        return model.model_validate(query)
    except ValidationError as error:
        raise _wrong("query", error) from None


def _wrong(part: str, error: ValidationError) -> InvalidParams:
    """Name the invalid fields, at most 20. Faults of the whole body have no path."""
    faults = error.errors(include_url=False, include_input=False)[:20]
    named = [(".".join(map(str, fault["loc"]))[:120], _words(fault)) for fault in faults]
    words = "; ".join(f"{field}: {said}" if field else said for field, said in named)
    fields = [field for field, _ in named if field]
    return InvalidParams(f"The {part} is wrong: {words}.", fields=fields)


def _words(fault: ErrorDetails) -> str:
    """Return the message, without the prefix that pydantic adds to our own errors."""
    return fault["msg"].removeprefix("Value error, ")


def _require_json(headers: Headers) -> None:
    kinds = []
    for name, value in headers:
        if name == b"content-type":
            kinds.append(value)
        elif name == b"content-encoding" and value not in (b"", b"identity"):
            raise UnsupportedMediaType("Send the body as it is, without a content encoding.")
    if kinds != [b"application/json"] and not (len(kinds) == 1 and _is_json(kinds[0])):
        raise UnsupportedMediaType("Send the body as application/json in UTF-8.")


def _is_json(content_type: bytes) -> bool:
    kind, _, parameters = content_type.decode("latin-1").partition(";")
    charset = parameters.replace(" ", "").lower()
    return kind.strip().lower() == "application/json" and charset in ("", "charset=utf-8")


async def _read_body(request: Request) -> bytes:
    announced = b"".join(headers_of(request.scope, b"content-length"))
    too_large = announced.isdigit() and int(announced) > MAX_BODY_BYTES
    too_many = False
    share: Share = request.scope["state"]["share"]
    body = bytearray()
    received = held = 0
    more = True
    try:
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            more = message.get("more_body", False)
            chunk = message.get("body", b"")
            received += len(chunk)
            too_large = too_large or received > MAX_BODY_BYTES
            too_many = too_many or (more and share.held_bytes + len(chunk) > MAX_HELD_BYTES)
            if too_large or too_many:
                body.clear()
                share.held_bytes -= held
                held = 0
                if received > MAX_DRAINED_BYTES:
                    break
                continue
            body += chunk
            if more:
                share.held_bytes += len(chunk)
                held += len(chunk)
    finally:
        share.held_bytes -= held
    if too_large:
        raise RequestTooLarge("The request is over 8 MB. Send less.")
    if too_many:
        raise too_much_held()
    return bytes(body)
