"""Bodies of requests and responses: bounded in size, time and memory.

Host side. A request's body is strict JSON, or a file that arrives in pieces. A file in a response
is sent in pieces. The bytes of bodies in transit count against the share of the user who sends or
receives them. Invariants: a client that sends slowly, stops or disconnects ends only its own
request. The bytes sent are always the beginning of one file. The response to a download announces
the file's length, so that clients can detect that the body ended too early.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
import anyio.to_thread
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fumehood.core.errors import (
    EngineError,
    InvalidParams,
    RateLimited,
    RequestTooLarge,
    UnsupportedMediaType,
)
from fumehood.core.limits import MAX_BODY_BYTES
from fumehood.core.session import UPLOAD_PIECE_BYTES
from fumehood.http.answers import Headers, when_left
from fumehood.http.peer import MAX_HELD_BYTES
from fumehood.pipeline.incoming import parsed
from fumehood.protocol import strict_json

M = TypeVar("M", bound=BaseModel)

SMALL_BODY_BYTES = 64 * 1024
"""A body with more bytes is parsed in a thread, so that parsing does not block other calls."""

PIECE_DEADLINE_S = 60.0
"""Seconds within which a whole JSON body, or one piece of an upload, must arrive. A slower client
is refused."""

UPLOAD_DEADLINE_S = 900.0
"""Seconds within which a whole upload must arrive."""

DRAIN_DEADLINE_S = 10.0
"""Maximum seconds for which the rest of a refused body is read and discarded. Some clients send
their whole body before they read. Such a client then gets the refusal instead of a broken pipe."""

HELD_BYTES = 1 << 20
"""Estimated memory of one download, in bytes. It counts against the share of the user who
downloads. The estimate covers the piece that is read, the piece that is sent, and the server's
buffer."""

SEND_DEADLINE_S = 60.0
"""Seconds within which a client must receive one piece. A slower client is disconnected."""


async def read_json(request: Request) -> Any:
    """Read and parse the request's body.

    Raises:
        InvalidParams: the body is not strict JSON.
        EngineError: for the same reasons as in `read_raw`.
    """
    body = await read_raw(request)
    return parse_json(body) if len(body) <= SMALL_BODY_BYTES else await parse_in_thread(body)


async def parse_in_thread(body: bytes) -> Any:
    """Parse a complete body of any size in a thread. Raises InvalidParams if it is not strict
    JSON.
    """
    return await anyio.to_thread.run_sync(parse_json, body)


def parse_json(body: bytes) -> Any:
    """Parse a body in the current thread, which is right only for small bodies. Raises
    InvalidParams if the body is not strict JSON.
    """
    try:
        return strict_json.loads(body)
    except strict_json.StrictJsonError as error:
        raise InvalidParams(f"The body cannot be read: {error}.") from None


async def read_raw(request: Request) -> bytes:
    """Read the complete body of a request, which must declare it as JSON.

    Raises:
        UnsupportedMediaType: the body is not declared as `application/json`.
        RequestTooLarge: the body is larger than 8 MB.
        InvalidParams: the body did not arrive in time, or the client disconnected.
        RateLimited: the user's unfinished bodies are too large in total.
    """
    body = _arrived(request)
    if body is not None:
        return body
    return await IncomingBody(request).whole()


def _arrived(request: Request) -> bytes | None:
    """Return the whole body of a request, or None if a part of the body has not arrived yet.
    Usually, the whole body has arrived.

    Raises:
        UnsupportedMediaType: the body is not declared as JSON.
    """
    _require_json(request.scope["headers"])
    body: bytes | None = request.scope["state"]["take_body"]()
    return body


def parse_body(model: type[M], document: Any) -> M:
    """Validate a parsed body, and return it as an instance of `model`.

    Raises:
        InvalidParams: the body is invalid. The error names at most 20 invalid fields.
    """
    if not isinstance(document, dict):
        raise InvalidParams("The body must be a JSON object.")
    return parsed(model, document, "body")


def parse_query(model: type[M], request: Request) -> M:
    """Validate the request's query, and return it as an instance of `model`. The model converts the
    query's texts to booleans and numbers.

    Raises:
        InvalidParams: the query is invalid. The error names the invalid parameters.
    """
    given = request.query_params.multi_items()
    query = dict(given)
    if len(query) != len(given):
        raise InvalidParams("A parameter of the query is given twice.")
    if any("\0" in value for value in query.values()):
        raise InvalidParams("A parameter of the query has a NUL character.")
    return parsed(model, query, "query")


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


def require_plain_bytes(request: Request) -> None:
    """Raise UnsupportedMediaType if the body has a content encoding, such as gzip."""
    if request.headers.get("content-encoding", "identity") not in ("", "identity"):
        raise UnsupportedMediaType("Send the file as it is, without a content encoding.")


class IncomingBody:
    """The body of one request. The body can be read only once, either as a whole or in pieces."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._held = 0
        self._is_over = False

    async def whole(self) -> bytes:
        """Return the whole body. If the body is refused, the rest of it is read and discarded
        before the exception is raised.

        Raises:
            RequestTooLarge: the body is larger than 8 MB.
            InvalidParams, RateLimited: for the same reasons as in `pieces`.
        """
        body = bytearray()
        end = anyio.current_time() + PIECE_DEADLINE_S
        try:
            while not self._is_over:
                body += await self._next_chunk(end)
                if len(body) > MAX_BODY_BYTES:
                    raise RequestTooLarge("The request is over 8 MB. Send less.")
            return bytes(body)
        except EngineError:
            body.clear()
            self._release()
            await self.drain()
            raise
        finally:
            self._release()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body in pieces of 1 MB. Only the last piece may be smaller.

        The caller must close the generator.

        Raises:
            InvalidParams: the body did not arrive in time, or the client disconnected.
            RateLimited: the user's unfinished bodies are too large in total.
        """
        end = anyio.current_time() + UPLOAD_DEADLINE_S
        buffer = bytearray()
        while not self._is_over:
            try:
                by = min(end, anyio.current_time() + PIECE_DEADLINE_S)
                while len(buffer) < UPLOAD_PIECE_BYTES and not self._is_over:
                    buffer += await self._next_chunk(by)
                while len(buffer) >= UPLOAD_PIECE_BYTES or (buffer and self._is_over):
                    piece = bytes(buffer[:UPLOAD_PIECE_BYTES])
                    del buffer[:UPLOAD_PIECE_BYTES]
                    yield piece
            finally:
                self._release()

    async def drain(self) -> None:
        """Read and discard the rest of the body, for at most `DRAIN_DEADLINE_S` seconds."""
        end = anyio.current_time() + DRAIN_DEADLINE_S
        with suppress(InvalidParams):
            while not self._is_over:
                await self._received(end)

    async def _next_chunk(self, by: float) -> bytes:
        chunk = await self._received(by)
        if not self._is_over:
            require_room(self._request, len(chunk))
            _hold(self._request.scope, len(chunk))
            self._held += len(chunk)
        return chunk

    def _release(self) -> None:
        _give_back(self._request.scope, self._held)
        self._held = 0

    async def _received(self, by: float) -> bytes:
        message = None
        with anyio.move_on_after(max(0.0, by - anyio.current_time())):
            message = await self._request.receive()
        if message is None:
            raise InvalidParams(
                f"The body did not arrive in time: {PIECE_DEADLINE_S:g} s for a megabyte and "
                f"{UPLOAD_DEADLINE_S:g} s in all are allowed."
            )
        if message["type"] == "http.disconnect":
            self._is_over = True
            raise InvalidParams("The connection ended before the body did.")
        self._is_over = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk


def _hold(scope: Scope, size: int) -> None:
    """Add `size` bytes to the memory that unfinished requests of the request's user occupy."""
    scope["state"]["held_bytes"].add(scope["state"]["who"], size)


def _give_back(scope: Scope, size: int) -> None:
    scope["state"]["held_bytes"].give_back(scope["state"]["who"], size)


def require_room(request: Request, size: int = HELD_BYTES) -> None:
    """Check that the request's user may occupy `size` more bytes of memory with unfinished
    requests. Raises RateLimited if this would be too much memory.
    """
    state = request.scope["state"]
    if state["held_bytes"].lacks(state["who"], size) is not None:
        raise RateLimited(
            f"This user already has {MAX_HELD_BYTES >> 20} MB of requests in progress. Send fewer "
            "at a time.",
            retry_after_ms=1000,
        )


def attachment_headers(path: str, content_type: str, size: int | None) -> dict[str, str]:
    """Return headers that make browsers save an untrusted file, and that forbid caching."""
    name = quote(path.rpartition("/")[2], safe="")
    return {
        "content-type": content_type,
        **({"content-length": str(size)} if size is not None else {}),
        "content-disposition": f"attachment; filename*=UTF-8''{name}",
        "x-content-type-options": "nosniff",
        "cache-control": "private, no-store",
    }


class FileBody(Response):
    """A response that sends the file whose content `pieces` yields.

    If `pieces` raises an exception of the type `broken`, or if the client is too slow, the
    connection is closed early. In this case, `on_break` is called with the reason as text. `on_end`
    is always called at the end.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        headers: dict[str, str],
        broken: type[Exception],
        on_break: Callable[[str], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._broken = broken
        self._on_break = on_break
        self._on_end = on_end
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file. If this method returns before the file's end, the server closes the
        connection.
        """
        _hold(scope, HELD_BYTES)
        try:
            await self._send(receive, send)
        finally:
            _give_back(scope, HELD_BYTES)
            self._on_end()

    async def _send(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with anyio.create_task_group() as group:
            group.start_soon(when_left, receive, group.cancel_scope.cancel)
            try:
                if await self._send_all(send):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except self._broken as why:
                self._on_break(str(why))
            group.cancel_scope.cancel()

    async def _send_all(self, send: Send) -> bool:
        async for piece in self._pieces:
            with anyio.move_on_after(SEND_DEADLINE_S) as waiting:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if waiting.cancelled_caught:
                self._on_break("the client does not take it")
                return False
        return True
