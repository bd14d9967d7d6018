"""`/mcp`: the Model Context Protocol over streamable HTTP, on the same addresses as the API.

Host side, between the HTTP server and `dispatch.py`. An HTTP response is one JSON document. If the
server sends other messages before this document, the HTTP response is a stream of events instead.
Invariants: the headers of a request agree with its body; if a client disconnects, its request is
cancelled; a client that does not read is disconnected.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any

import anyio.to_thread
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fumehood.core.call import Id
from fumehood.core.errors import EngineError, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.value import Value
from fumehood.engine import Engine
from fumehood.http.answers import left
from fumehood.http.bodies import SMALL_BODY_BYTES, parse_query, read_raw
from fumehood.http.caller import require_principal
from fumehood.http.event_stream import HEADERS, KEEP_ALIVE, KEEP_ALIVE_S, WRITE_DEADLINE_S
from fumehood.http.peer import Face
from fumehood.mcp.server.dispatch import Client, McpServer
from fumehood.mcp.server.messages import (
    CAPABILITIES_KEY,
    HANDSHAKES,
    HEADER_MISMATCH,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    MODERN,
    NAMED_BY,
    UNSUPPORTED_VERSION,
    VERSION_KEY,
    RpcError,
    handshake_version,
    meta_of,
    read_message,
)
from fumehood.observe.log import log_fault

WATCHED_AFTER_S = 0.02
"""Seconds after which the endpoint begins to check whether the client of a request is still
connected.
"""

DEFAULT_VERSION = "2025-03-26"
"""The protocol version of a request without the header `MCP-Protocol-Version`. *Source*: the
specifications of the versions with a handshake.
"""

SESSION_ID = re.compile(rf"({'|'.join(HANDSHAKES)})\.(asks|plain)\.((?:sess_)?[0-9a-f]{{32}})")
"""Matches the id of an MCP session. It consists of the protocol version, of `asks` if the client
can ask its user (otherwise `plain`), and of a last part.

If the engine has created a session for the client alone, the last part is the id of this session.
Otherwise it is random.
"""

NEW = "new"

JSON = "application/json"

Sender = tuple[str, bool, str]
"""The client's protocol version, whether the client can ask its user, and the id of its MCP session
(or "").
"""


class McpQuery(Value):
    """The query parameters in the URL that an MCP client uses. They apply to all calls of the
    client.
    """

    agent_id: Id | None = None
    session_id: Id | None = None
    wait: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


NO_QUERY = McpQuery()


class McpEndpoint:
    """The ASGI application for `/mcp`. `engine` must already be running."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._server = McpServer(engine)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request. If the client has disconnected before the answer, send
        nothing.
        """
        scope["app"] = self
        exchange = _Exchange(scope, receive, send)
        try:
            response = await self._respond(Request(scope, receive, send), exchange)
        except RpcError as error:
            response = exchange.refuse(error, error.http_status if exchange.has_statuses else 200)
        except EngineError as refusal:
            refused = RpcError(INVALID_REQUEST, f"{refusal.code}: {refusal.message}")
            response = exchange.refuse(refused, refusal.http_status)
        except asyncio.CancelledError:
            if not exchange.absorbs_cancellation() and not self.engine.is_draining:
                raise
            response = exchange.refuse(RpcError(INTERNAL_ERROR, "The request was ended."), 200)
        except Exception as fault:
            log_fault(self.engine.log, "daemon.internal_error", fault)
            hidden = RpcError(INTERNAL_ERROR, "INTERNAL_ERROR: The engine failed internally.")
            response = exchange.refuse(hidden, 200)
        finally:
            exchange.close()
        if not exchange.is_left:
            await exchange.end(response)
            exchange.note_sent()

    async def _respond(self, request: Request, exchange: _Exchange) -> Response:
        method = request.method
        if method == "DELETE":
            await self._end_own_session(request)
            return Response(status_code=204)
        if method not in ("GET", "POST"):
            return Response(status_code=405, headers={"allow": "GET, POST, DELETE"})
        principal = require_principal(request)
        query = parse_query(McpQuery, request) if request.scope["query_string"] else NO_QUERY
        message = await _message(request) if method == "POST" else {}
        exchange.request_id = message.get("id") if "method" in message else None
        exchange.has_statuses = exchange.request_id is None or _is_modern(request, message)
        sender, session_id = _sender(request, message), query.session_id
        if session_id == NEW:
            sender, session_id = await self._with_own_session(sender, message, principal, query)
        elif session_id is not None:
            session_id = self.engine.sessions.id_of(principal, session_id)
        client = Client(principal, *sender, query.agent_id, session_id, query.wait)
        exchange.watch()
        if method == "GET":
            if client.is_modern:
                return Response(status_code=405, headers={"allow": "POST"})
            await exchange.begin()
            await self._server.follow_changes(client, exchange)
            return Response()
        if exchange.request_id is None:
            self._server.take(message, client)
            return Response(status_code=202)
        body = await self._server.answer(message, client, exchange)
        begins = message["method"] == "initialize"
        return Response(body, 200, {"mcp-session-id": client.session} if begins else None, JSON)

    async def _with_own_session(
        self, sender: Sender, message: JsonObject, principal: Principal, query: McpQuery
    ) -> tuple[Sender, str]:
        """Return `sender`, and the id of the engine's session that belongs to this client alone. If
        `message` is the request `initialize`, first create this session.

        `sender` contains the client's protocol version, whether it can ask its user, and the id of
        its MCP session. The answer to `initialize` gives the client a new id of the MCP session,
        which contains the id of the engine's session. The returned `sender` has this new id.
        `query` names the agent.

        Raises:
            RpcError: the client's protocol version has no sessions.
            ResourceNotFound: the client has no such session, or it has ended.
            EngineError: the engine cannot create a session now.
        """
        version, asks, session = sender
        if version == MODERN:
            words = "A session of the client's own needs a version with initialize."
            data = {"supported": [*reversed(HANDSHAKES)], "requested": MODERN}
            raise RpcError(UNSUPPORTED_VERSION, words, data)
        if message.get("method") == "initialize" and "id" in message:
            made = await self.engine.sessions.create(principal, agent_id=query.agent_id)
            session = f"{session.rpartition('.')[0]}.{made.id}"
        own, sessions = _own_session(session), self.engine.sessions
        if own is None or sessions.find(principal, own).state.is_over:
            raise ResourceNotFound("There is no such session. Begin another one with initialize.")
        return (version, asks, session), own

    async def _end_own_session(self, request: Request) -> None:
        """End the engine's session that was created for the client alone, if there is one."""
        # Nothing else has to end, because the endpoint stores nothing about a client.
        own = _own_session(request.headers.get("mcp-session-id", ""))
        if own is not None:
            with suppress(ResourceNotFound):
                await self.engine.sessions.end(require_principal(request), own)


class _Exchange:
    """One HTTP request while it is answered. It sends messages to the client before the response,
    then the response. It can also cancel the request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.on_cancel: Callable[[], bool] | None = None
        self.on_sent: Callable[[], None] | None = None
        self.request_id: str | int | None = None
        self.has_statuses = True
        """Whether an error response has an HTTP status of its own.

        In versions with a handshake, it has not: the error response to a request always has the
        status 200.
        """
        self.is_left = False
        """Whether the client has disconnected."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_cancelled = False
        self._has_begun = False
        self._writing = asyncio.Lock()
        self._task = asyncio.current_task()
        # The helper tasks are in no task group, which would make every call slower by a tenth.
        self._helpers: list[asyncio.Task[None] | asyncio.TimerHandle] = []

    def watch(self) -> None:
        """Cancel the request if the client disconnects.

        The task that detects this starts only after `WATCHED_AFTER_S` seconds. Most requests have
        ended by then and never need the task.
        """
        loop = asyncio.get_running_loop()
        self._helpers.append(loop.call_later(WATCHED_AFTER_S, self._start, self._watch))

    def cancel(self) -> None:
        """Cancel the call that is running. Its answer is still sent. If no call is running, cancel
        the task that answers the request.
        """
        if self.on_cancel is not None and self.on_cancel():
            return
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def absorbs_cancellation(self) -> bool:
        """Undo the cancellation of the task that answers the request, if `cancel` has caused it.

        Return True if the task can go on. Return False if the task must end, because something else
        has cancelled it.
        """
        return self._is_cancelled and self._task is not None and self._task.uncancel() == 0

    def refuse(self, error: RpcError, status: int) -> Response:
        """Return the response for a request that fails with `error`. `status` is the HTTP
        status.
        """
        return Response(error.encode(self.request_id), status, None, JSON)

    def close(self) -> None:
        """Stop the helper tasks of the request."""
        for helper in self._helpers:
            helper.cancel()

    async def send(self, message: bytes) -> None:
        """Send a message to the client as an event before the response."""
        await self.begin()
        await self._write(_event(message))

    async def begin(self) -> None:
        """Begin a stream of events as the response. Do nothing if the stream has already begun."""
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._write(KEEP_ALIVE)
            self._start(self._keep_alive)

    async def end(self, response: Response) -> None:
        """Send the response. If a stream of events has begun, send the body of the response as the
        last event.
        """
        if not self._has_begun:
            await response(self._scope, self._receive, self._send)
            return
        body = bytes(response.body)
        await self._write(_event(body) if body else b"", more=False)

    def note_sent(self) -> None:
        """Call `on_sent`, if it is set, to record that the answer was delivered. If the client has
        disconnected, do nothing.
        """
        if self.on_sent is not None and not self.is_left and not self._scope["state"]["has_left"]():
            self.on_sent()

    def _start(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._helpers.append(asyncio.create_task(function()))

    async def _watch(self) -> None:
        await left(self._receive)
        self.is_left = True
        self.cancel()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            await self._write(KEEP_ALIVE)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        try:
            async with self._writing, asyncio.timeout(WRITE_DEADLINE_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:  # the client does not read
            self.is_left = True
            self._scope["state"]["abort"]()
            self.cancel()


async def _message(request: Request) -> JsonObject:
    raw = await read_raw(request)
    if len(raw) <= SMALL_BODY_BYTES:
        return read_message(raw)
    return await anyio.to_thread.run_sync(read_message, raw)


def _is_modern(request: Request, message: JsonObject) -> bool:
    named = request.headers.get("mcp-protocol-version")
    return VERSION_KEY in meta_of(message) or named == MODERN


def _own_session(session: str) -> str | None:
    """Find the id of an engine's session in `session`, the id of an MCP session. Return None if it
    contains none.
    """
    found = SESSION_ID.fullmatch(session)
    return found[3] if found is not None and found[3].startswith("sess_") else None


def _sender(request: Request, message: JsonObject) -> Sender:
    """Return the protocol version of a request, whether its client can ask its user, and the id of
    its MCP session. `message` is the body of the request.

    Raises:
        RpcError: the headers and the body differ, or the version is not supported.
        ResourceNotFound: the id of the MCP session is invalid.
    """
    headers = request.headers
    named = headers.get("mcp-protocol-version")
    if _is_modern(request, message):
        return _modern_sender(request, message)
    if message.get("method") == "initialize":
        params = message.get("params", {})
        wanted, capabilities = params.get("protocolVersion"), params.get("capabilities")
        version = handshake_version(wanted)
        asks = _can_ask(capabilities)
        return version, asks, f"{version}.{'asks' if asks else 'plain'}.{secrets.token_hex(16)}"
    if named is not None and named not in HANDSHAKES:
        raise _unsupported(named)
    session = headers.get("mcp-session-id", "")
    if not session:
        return named or DEFAULT_VERSION, False, ""
    found = SESSION_ID.fullmatch(session)
    if found is None:
        raise ResourceNotFound("There is no such session. Begin another one with initialize.")
    return found[1], found[2] == "asks", session


def _modern_sender(request: Request, message: JsonObject) -> Sender:
    """Return the result of `_sender` for a message in protocol version 2026-07-28 or later.

    In these versions, `_meta` of each request contains the version and the capabilities of the
    client. Headers repeat the version, the method, and the name of the tool or resource. There are
    no MCP sessions.

    Raises:
        RpcError: the headers and the body differ, or the version is not supported.
    """
    headers, meta = request.headers, meta_of(message)
    version = meta.get(VERSION_KEY)
    if "method" not in message:
        if request.method == "GET":
            return MODERN, False, ""
        raise RpcError(INVALID_REQUEST, "Requests are not answered by messages in this version.")
    if "id" not in message:
        return MODERN, False, ""
    if not isinstance(version, str) or not isinstance(meta.get(CAPABILITIES_KEY), dict):
        raise RpcError(INVALID_PARAMS, f"_meta needs {VERSION_KEY} and {CAPABILITIES_KEY}.")
    method = message["method"]
    expected = {"mcp-protocol-version": version, "mcp-method": method}
    name = message.get("params", {}).get(NAMED_BY.get(method, ""))
    if isinstance(name, str):
        expected["mcp-name"] = name
    # On a Unix socket, there is no proxy that reads only the headers, so they may be missing.
    over_tcp = request.scope["state"]["face"] is Face.TCP
    for header, value in expected.items():
        given = [_header_text(text) for text in headers.getlist(header)]
        if given != [value] and (given or over_tcp):
            raise RpcError(HEADER_MISMATCH, f"The header {header} must say the same as the body.")
    if version != MODERN:
        raise _unsupported(version)
    return MODERN, _can_ask(meta[CAPABILITIES_KEY]), ""


def _unsupported(version: str) -> RpcError:
    data = {"supported": [MODERN, *reversed(HANDSHAKES)], "requested": version[:80]}
    return RpcError(UNSUPPORTED_VERSION, "This version of the protocol is not supported.", data)


def _can_ask(capabilities: Any) -> bool:
    """Return whether the client can show a form with a question to its user. `capabilities` is what
    the client has declared. If `elicitation` is declared without a kind, the client can show a
    form.
    """
    asks = capabilities.get("elicitation") if isinstance(capabilities, dict) else None
    return isinstance(asks, dict) and (not asks or "form" in asks)


def _header_text(text: str) -> str | None:
    """Return the decoded text of a header, or None if it is malformed.

    *Source*: streamable HTTP, which encodes non-ASCII text in base64 from version 2026-07-28 on.
    """
    if not (text.startswith("=?base64?") and text.endswith("?=")):
        return text
    try:
        return base64.b64decode(text[9:-2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _event(message: bytes) -> bytes:
    return b"event: message\ndata: %b\n\n" % message
