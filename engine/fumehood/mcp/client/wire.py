"""MCP's wire protocol for a client: JSON-RPC over the streams of a program, or over HTTP.

Host side. The MCP SDK is not used, because it takes 57 MB, and because servers are treated as
hostile here. The size of each message is limited. A program that violates the framing is ended. A
request ends when it is answered, when its caller cancels it, or when its time limit is over.
*Source*: the specification of MCP, revisions 2025-11-25 (with the handshake "initialize") and
2026-07-28 (without a handshake; each request names its version).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import math
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import anyio

from fumehood.core.errors import EngineError, NetworkError
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import is_header_value
from fumehood.mcp.server.messages import is_id
from fumehood.outgoing.secret_values import SecretValues
from fumehood.outgoing.upstreams import (
    Attempt,
    BodyTooLarge,
    UpstreamAnswer,
    UpstreamRequest,
    Upstreams,
)
from fumehood.protocol import strict_json
from fumehood.protocol.framing import MAX_REPORT_CHARACTERS, whole_words
from fumehood.sandbox.wall import rest_after

MODERN = "2026-07-28"
"""The protocol version without a handshake that the engine supports."""

HANDSHAKE = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""The protocol versions with a handshake (`initialize`) that the engine supports, newest first."""

MAX_MESSAGE = 4 << 20
"""Maximum size of one message in bytes. This is enough for a list of tools, and for a result within
the limit of the host.
"""

NUMBER_WITHIN = 200
"""If an answer is discarded, its first and its last bytes are searched for the id of the request.
This is the number of bytes at each end.
"""

PROBE_S = 4.0
"""Maximum seconds for a server to answer the request that tests whether it supports the version
without a handshake.
"""

STOP_S = 2.0
"""Seconds that a program has to end after its input was closed, again after SIGTERM, and again
after SIGKILL. Also the maximum seconds for notifying a server that a request was cancelled.
"""

CHUNK = 64 * 1024
"""Maximum number of bytes that are read from a program at once."""

SAID_BYTES = 2000
"""Maximum number of bytes, from the end of a program's standard error, that are logged."""

METHOD_NOT_FOUND = -32601
"""JSON-RPC's code for an unknown method. *Source*: JSON-RPC 2.0, 5.1."""

LIST_MAY_HAVE_CHANGED = frozenset(
    {"notifications/tools/list_changed", "notifications/subscriptions/acknowledged"}
)
"""The notifications after which the engine requests the list of tools again. The acknowledgement of
a subscription is one of them, because a change before the subscription was not reported.
"""

CLIENT = {"name": "fumehood", "version": "1"}
"""The name and the version of the engine, as servers see them."""

_META = "io.modelcontextprotocol/"
"""How those keys in `_meta` begin that MCP itself defines."""

OnProgress = Callable[[float, str], None]
"""A function that receives the progress of a call: a percentage from 0 to 100, and a message."""


class RpcError(Exception):
    """The server answered a request with an error. The text is the server's message."""


class Lost(Exception):
    """The server cannot be reached, or its connection has ended. The text tells the operator
    why.
    """


@dataclass(slots=True)
class Request:
    """A request to a server, and the future for its result. `attempt` records whether the request
    was sent.
    """

    method: str
    params: JsonObject
    on_progress: OnProgress | None = None
    attempt: Attempt = field(default_factory=Attempt)
    max_bytes: int = MAX_MESSAGE
    """Maximum size of the answer in bytes, if the server is used over HTTP. Over the streams of a
    program, it is always `MAX_MESSAGE`.
    """
    future: asyncio.Future[JsonObject] | None = None
    """The future result, or None until the request is about to be sent."""


class Wire(ABC):
    """A connection to one server. `version` is the agreed protocol version, or None until
    `negotiate` has succeeded.
    """

    def __init__(self) -> None:
        self.version: str | None = None
        self.changed = asyncio.Event()
        """Set when the server has reported that its list of tools may have changed. The user of the
        wire clears it.
        """
        self._numbers = 0

    async def negotiate(self, *, skip_probe: bool = False) -> None:
        """Agree with the server on a protocol version. First try `MODERN`, the version that needs
        no handshake. If the server does not support it, or `skip_probe` is True, do the handshake
        of older versions.

        Raises:
            RpcError, Lost, EngineError, TimeoutError: the server supports neither `MODERN` nor a
                version in `HANDSHAKE`, or did not answer.
        """
        if not skip_probe and await self._is_modern():
            return
        greeting = {"protocolVersion": HANDSHAKE[0], "capabilities": {}, "clientInfo": CLIENT}
        try:
            found = await self.send(Request("initialize", greeting))
        except RpcError:
            # A slow server may have answered the first request too late, and may refuse a handshake
            # now.
            if skip_probe or not await self._is_modern():
                raise
            return
        version = found.get("protocolVersion")
        if version not in HANDSHAKE:
            raise Lost(f"it speaks version {str(version)[:40]!a} of MCP, which is not known here")
        self.version = version
        await self.notify("notifications/initialized", {})

    async def _is_modern(self) -> bool:
        with contextlib.suppress(RpcError, TimeoutError), anyio.fail_after(PROBE_S):
            found = await self.send(Request("server/discover", self._stamped({})))
            supported = found.get("supportedVersions")
            if isinstance(supported, list) and MODERN in supported:
                self.version = MODERN
                return True
        return False

    async def ask(self, method: str, params: JsonObject, made: Request | None = None) -> JsonObject:
        """Send a request in the agreed protocol version, and return its result.

        `made` is the request object to use; by default, a new one is created. If the caller's task
        is cancelled, the server is notified.

        Raises:
            RpcError, Lost, BodyTooLarge, EngineError: the server returned no result.
        """
        made = made or Request(method, params)
        made.params = self._stamped(params) if self.version == MODERN else params
        return await self.send(made)

    @abstractmethod
    async def send(self, request: Request) -> JsonObject:
        """Send `request` and return its result. Raises the same errors as `ask`."""

    @abstractmethod
    async def notify(self, method: str, params: JsonObject) -> None:
        """Send a notification. If the server cannot be reached, the notification is lost, and no
        error is raised.
        """

    def _stamped(self, params: JsonObject) -> JsonObject:
        meta = {
            **params.get("_meta", {}),
            f"{_META}protocolVersion": MODERN,
            f"{_META}clientInfo": CLIENT,
            f"{_META}clientCapabilities": {},
        }
        return {**params, "_meta": meta}

    def _begin(self, request: Request) -> tuple[int, JsonObject, asyncio.Future[JsonObject]]:
        """Give a new id to a request. Return the id, the message to send, and the future result."""
        self._numbers += 1
        number, params = self._numbers, request.params
        request.future = asyncio.get_running_loop().create_future()
        if request.on_progress is not None:
            params = {**params, "_meta": {**params.get("_meta", {}), "progressToken": number}}
        message = {"jsonrpc": "2.0", "id": number, "method": request.method, "params": params}
        return number, message, request.future

    def _hear(self, message: Any, waiting: Mapping[int, Request]) -> JsonObject | None:
        """Process a message from the server. If it is a request, return the reply to send.
        Otherwise return None.

        `waiting` maps the ids of requests that are not answered yet to these requests.

        Raises ValueError if the message is not an object.
        """
        if not isinstance(message, dict):
            raise ValueError("not an object")  # noqa: TRY004  # handled like invalid JSON
        method, number = message.get("method"), message.get("id")
        params = message.get("params")
        params = params if isinstance(params, dict) else {}
        if not isinstance(method, str):
            _settle(message, waiting.get(number) if _is_own(number) else None)
        elif is_id(number):
            # A server may not call the engine, so sampling, elicitation and roots are not
            # supported.
            reply: JsonObject = {"jsonrpc": "2.0", "id": number}
            error = {"code": METHOD_NOT_FOUND, "message": "not offered"}
            return {**reply, "result": {}} if method == "ping" else {**reply, "error": error}
        elif method in LIST_MAY_HAVE_CHANGED:
            self.changed.set()
        elif method == "notifications/progress":
            token = params.get("progressToken")
            _report(params, waiting.get(token) if _is_own(token) else None)
        return None


def _is_own(value: Any) -> TypeGuard[int]:
    """Return whether `value` can be an id that `Wire` has given. JSON's `true` cannot, although it
    equals 1 in Python.
    """
    return is_id(value) and isinstance(value, int)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _settle(message: JsonObject, request: Request | None) -> None:
    if request is None or request.future is None or request.future.done():
        return
    error, result = message.get("error"), message.get("result")
    if isinstance(result, dict):
        request.future.set_result(result)
    elif isinstance(error, dict):
        request.future.set_exception(RpcError(str(error.get("message", ""))))
    else:
        request.future.set_exception(RpcError("an answer that is neither result nor error"))


def _retrieve(future: asyncio.Future[JsonObject]) -> None:
    """Retrieve the error of a future that has failed. Otherwise asyncio would log that nobody
    retrieved it.
    """
    if future.done() and not future.cancelled():
        future.exception()


def _report(params: JsonObject, request: Request | None) -> None:
    done, total = params.get("progress"), params.get("total")
    if request is None or request.on_progress is None or not _is_number(done):
        return
    whole = total if _is_number(total) and total > 0 else 100
    percent = float(done / whole * 100) if abs(done) < 1e15 and whole < 1e15 else 100.0
    if math.isfinite(percent):
        text = whole_words(str(params.get("message") or ""), MAX_REPORT_CHARACTERS)
        text = text.encode("utf-8", "replace").decode()
        request.on_progress(min(max(percent, 0.0), 100.0), text)


# -- programs --------------------------------------------------------------------------------


class Streams(Protocol):
    """The standard streams of the program of an MCP server."""

    @property
    def said(self) -> bytes:
        """The end of what the program has written to standard error so far."""

    async def read(self) -> bytes:
        """Return the next bytes of the program's standard output. At the end of the output, return
        empty bytes.
        """

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input.

        Raises OSError if the input is closed, or if the program has left too much of it unread.
        """

    async def stop(self) -> None:
        """End the program."""


class StreamWire(Wire):
    """JSON-RPC over the standard streams of a program. Each message is one line.

    Answers arrive only while `serve` runs.
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams
        self._waiting: dict[int, Request] = {}
        self._writing = asyncio.Lock()
        self._why: str | None = None

    async def send(self, request: Request) -> JsonObject:
        if self._why is not None:
            raise Lost(self._why)
        number, message, future = self._begin(request)
        self._waiting[number] = request
        try:
            request.attempt.was_sent = True
            await self._write(message)
            return await future
        except asyncio.CancelledError:
            if request.method not in ("initialize", "server/discover"):
                with anyio.CancelScope(shield=True), anyio.move_on_after(STOP_S):
                    await self.notify("notifications/cancelled", {"requestId": number})
            raise
        finally:
            del self._waiting[number]
            _retrieve(future)

    async def notify(self, method: str, params: JsonObject) -> None:
        with contextlib.suppress(Lost):
            await self._write({"jsonrpc": "2.0", "method": method, "params": params})

    async def _write(self, message: JsonObject) -> None:
        try:
            async with self._writing:
                await self._streams.write(strict_json.dumps(message) + b"\n")
        except OSError as error:
            raise Lost(f"it takes no input any more ({error.strerror})") from None

    async def serve(self) -> str:
        """Process the messages of the program until it ends or its output breaks off. Return the
        reason why this happened.

        All requests that are not answered by then fail with `Lost`.
        """
        try:
            self._why = await self._read()
        except OSError:
            self._why = "its output broke off"
        finally:
            self._why = self._why or "the engine ended it"
            for request in self._waiting.values():
                if request.future is not None and not request.future.done():
                    request.future.set_exception(Lost(self._why))
        return self._why

    async def _read(self) -> str:
        line, is_dropped = bytearray(), False
        while chunk := await self._streams.read():
            began = time.monotonic()
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                if is_dropped:
                    self._fail_named(bytes(line) + end[-NUMBER_WITHIN:], BodyTooLarge())
                else:
                    await self._take(bytes(line + end))
                line.clear()
                is_dropped = False
            line += rest
            if is_dropped or len(line) > MAX_MESSAGE:
                is_dropped = True
                line = line[:NUMBER_WITHIN] + line[-NUMBER_WITHIN:]
            await rest_after(time.monotonic() - began)  # a flood must not block other calls
        return "it ended"

    def _fail_named(self, ends: bytes, fault: Exception) -> None:
        """Fail the request to which an unreadable answer belongs. `ends` are the first and the last
        bytes of this answer, which are searched for the id of the request.
        """
        for number in re.findall(rb'"id" ?: ?([0-9]{1,9})[,}]', ends):
            request = self._waiting.get(int(number))
            if request is not None and request.future is not None and not request.future.done():
                request.future.set_exception(fault)

    async def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            reply = self._hear(strict_json.loads(line), self._waiting)
        except ValueError:
            ends = line[:NUMBER_WITHIN] + line[-NUMBER_WITHIN:]
            self._fail_named(ends, RpcError("an answer that is not valid JSON"))
            return
        if reply is not None:
            # This never waits for the program to read the reply, because it may never do so.
            with contextlib.suppress(OSError), anyio.move_on_after(0):
                await self._streams.write(strict_json.dumps(reply) + b"\n")


class HostProgram:
    """A program that runs on the host, in a process group of its own.

    It is started in the directory `/`, because programs such as `npx` and `python -m` load code
    from the current directory.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._in, self._out, self._err = process.stdin, process.stdout, process.stderr
        self.said = b""
        self._listener = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(cls, command: tuple[str, ...], env: Mapping[str, str]) -> HostProgram:
        """Start a program, with a few variables of the engine's environment and those in `env`.
        Raises OSError if this fails.
        """
        kept = {k: v for k in ("HOME", "LANG", "PATH", "TMPDIR") if (v := os.environ.get(k))}
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, env={**kept, **env}, cwd="/",
                start_new_session=True,
            )
        )  # fmt: skip

    async def read(self) -> bytes:
        return await self._out.read(CHUNK)

    async def write(self, data: bytes) -> None:
        if self._in.transport.get_write_buffer_size() > MAX_MESSAGE:
            raise BlockingIOError(errno.EAGAIN, "it reads nothing")
        self._in.write(data)
        await self._in.drain()

    async def _listen(self) -> None:
        while chunk := await self._err.read(CHUNK):
            self.said = (self.said + chunk)[-SAID_BYTES:]

    async def stop(self) -> None:
        """End the program: close its standard input, then send SIGTERM to its process group, and
        finally SIGKILL.

        After each of these steps, the program has `STOP_S` seconds to end.
        """
        with anyio.CancelScope(shield=True):
            self._in.close()
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number is not None:  # even if it has ended: its children may still run
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, number)
                with anyio.move_on_after(STOP_S):
                    await self._until_dead()
            self._listener.cancel()
            self._process._transport.close()  # type: ignore[attr-defined]  # a child may hold it

    async def _until_dead(self) -> None:
        # `wait` is not used, because it would also wait for the pipes, which the program's children
        # may hold open.
        while self._process.returncode is None:  # noqa: ASYNC110
            await anyio.sleep(0.01)


# -- HTTP ------------------------------------------------------------------------------------


_SESSION_REFUSED = re.compile(
    rb"session[ -]id\b|session (not found|has been terminated)"
    rb"|(no|invalid|unknown) (valid )?session",
    re.IGNORECASE,
)
"""Matches the texts of errors with which MCP SDKs say that a session is unknown. The result of a
tool that mentions sessions may match too.
"""


class HttpWire(Wire):
    """JSON-RPC over MCP's streamable HTTP. Each message is one POST request.

    `secrets` returns the headers that contain secrets, and the values of these secrets, which are
    redacted in answers.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        upstreams: Upstreams,
        secrets: Callable[[], Awaitable[tuple[tuple[tuple[str, str], ...], SecretValues]]],
    ) -> None:
        super().__init__()
        self._url = url
        self._headers = {name.lower(): value for name, value in headers.items()}
        self._upstreams = upstreams
        self._secrets = secrets
        self._session: str | None = None
        self._renewing = asyncio.Lock()

    async def send(self, request: Request) -> JsonObject:
        """Send a request and return its result. Raises the same errors as `ask`.

        If the server no longer knows the session, begin a new session, and repeat the request once.
        *Source*: MCP 2025-11-25, "Session management".
        """
        session = self._session
        with contextlib.suppress(_Forgotten):
            return await self._send(request)
        request.attempt.was_sent = False
        async with self._renewing:
            if session == self._session:
                await self._renew()
        try:
            return await self._send(request)
        except _Forgotten:
            request.attempt.was_sent = False
            raise Lost("it forgets every session") from None

    async def _renew(self) -> None:
        """Begin a new session on the server. Raises Lost or EngineError."""
        try:
            await self.negotiate(skip_probe=True)
        except RpcError as refusal:
            raise Lost(f"it has forgotten the session and begins no other ({refusal})") from None

    async def _send(self, request: Request) -> JsonObject:
        number, body, future = self._begin(request)
        waiting = {number: request}
        try:
            with contextlib.suppress(_Answered):
                answer = await self._post(body, request, waiting)
                if not future.done():
                    self._without_result(answer, waiting)
            return await future
        except asyncio.CancelledError:
            if self.version != MODERN and request.method == "tools/call":
                with anyio.CancelScope(shield=True), anyio.move_on_after(STOP_S):
                    await self.notify("notifications/cancelled", {"requestId": number})
            raise
        finally:
            _retrieve(future)

    def _without_result(self, answer: UpstreamAnswer, waiting: Mapping[int, Request]) -> None:
        """Look for the result in the whole body of `answer`, and give it to the request. The caller
        must do this only if no result was found while the body arrived.

        `waiting` maps the id of the request to the request.

        Raises:
            NetworkError, RpcError: the body contains no result.
            _Forgotten: the server does not know the session.
        """
        with contextlib.suppress(ValueError):
            self._hear(strict_json.loads(answer.body), waiting)
        (request,) = waiting.values()
        is_answered = request.future is not None and request.future.done()
        if request.method != "initialize" and self._is_forgotten(answer, is_answered=is_answered):
            raise _Forgotten
        if is_answered:
            return
        if answer.status >= 500 and request.method != "server/discover":
            raise NetworkError(f"The MCP server answered with the status {answer.status}.")
        raise RpcError(f"the status {answer.status} without a result")

    def _is_forgotten(self, answer: UpstreamAnswer, *, is_answered: bool) -> bool:
        """Return whether the server refused a request, without processing it, because it does not
        know the session. `is_answered` is True if the answer contains a result or an error.
        """
        if self._session is None or self.version == MODERN:
            return False
        names_it = _SESSION_REFUSED.search(answer.body) is not None
        if answer.status == 404:
            return names_it or not is_answered
        # The specification names no such statuses. They are those of servers that follow the SDKs'
        # examples.
        return answer.status in (400, 401) and names_it and not is_answered

    async def notify(self, method: str, params: JsonObject) -> None:
        body = {"jsonrpc": "2.0", "method": method, "params": params}
        with contextlib.suppress(EngineError, BodyTooLarge, _Answered):
            await self._post(body, Request(method, params), {})

    async def _post(
        self, body: JsonObject, request: Request, waiting: Mapping[int, Request]
    ) -> UpstreamAnswer:
        secret_headers, values = await self._secrets()
        headers = {
            **self._headers,
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "user-agent": "fumehood",
            "mcp-method": request.method,
        }
        name = body["params"].get("name")
        if isinstance(name, str):
            headers["mcp-name"] = _header(name)
        if request.method != "initialize":
            headers["mcp-protocol-version"] = self.version or MODERN
        if self._session is not None and request.method != "initialize":
            headers["mcp-session-id"] = self._session
        reader = _Reader(lambda message: self._hear(message, waiting), values, request.max_bytes)

        async def relay(piece: bytes, kind: str) -> None:
            reader.feed(piece, kind)
            is_over = request.future is not None and request.future.done()
            # The answer to "initialize" is read to its end, because its headers name the session.
            if is_over and request.method != "initialize":
                raise _Answered

        answer = await self._upstreams.ask(
            UpstreamRequest(
                "POST", self._url, tuple(headers.items()), secret_headers, strict_json.dumps(body)
            ),
            request.max_bytes, request.attempt, values, relay,
        )  # fmt: skip
        reader.finish()
        # Any other answer repeats the session of its own request, which may have ended meanwhile.
        if request.method == "initialize" and answer.status < 300:
            session = answer.headers.get("mcp-session-id")
            self._session = session if session and is_header_value(session) else None
        return answer


class _Forgotten(Exception):
    """The server does not know the session, so it has not processed the request."""


class _Answered(Exception):
    """The result has arrived. This is raised to stop reading the rest of the stream."""


class _Reader:
    """Reads the messages in the body of an HTTP response. The body is one JSON document, or a
    stream of server-sent events.

    Each message is passed to `hear`, after the values of secrets in it were replaced.
    """

    def __init__(self, hear: Callable[[Any], object], values: SecretValues, max_bytes: int) -> None:
        self._hear = hear
        self._values = values
        self._buffer = bytearray()
        self._is_stream = False
        self._max_bytes = max_bytes

    def feed(self, piece: bytes, kind: str) -> None:
        self._is_stream = kind.lower().startswith("text/event-stream")
        self._buffer += piece
        if len(self._buffer) > self._max_bytes:
            raise BodyTooLarge
        end = self._buffer[-len(piece) - 3 :]
        if self._is_stream and (b"\n\n" in end or b"\r\n\r\n" in end):
            *events, rest = re.split(rb"\r?\n\r?\n", bytes(self._buffer))
            self._buffer[:] = rest
            for event in map(strict_json.unmarked, events):
                self._take(b"\n".join(re.findall(rb"^data: ?(.*?)\r?$", event, re.MULTILINE)))

    def finish(self) -> None:
        if not self._is_stream:
            self._take(bytes(self._buffer))

    def _take(self, data: bytes) -> None:
        if data:
            with contextlib.suppress(ValueError):
                self._hear(self._values.value(strict_json.loads(data)))


def _header(value: str) -> str:
    """Return `value`, the name of a tool, as the value of an HTTP header. If headers cannot contain
    the name, encode it in base64. *Source*: MCP 2026-07-28, "Standard headers".
    """
    if value and is_header_value(value) and not value.startswith("=?"):
        return value
    return f"=?base64?{base64.b64encode(value.encode()).decode()}?="


@contextlib.asynccontextmanager
async def served(streams: Streams) -> AsyncIterator[tuple[StreamWire, asyncio.Task[str]]]:
    """Yield a wire to a program, and the task that runs `serve` of this wire. The task ends when
    the program does.

    When the `async with` block ends, stop the program.
    """
    wire = StreamWire(streams)
    reading = asyncio.ensure_future(wire.serve())
    try:
        yield wire, reading
    finally:
        reading.cancel()
        await streams.stop()
