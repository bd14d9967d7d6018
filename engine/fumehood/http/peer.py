"""The peer of a connection: its identity, attested by the kernel, and limits for its user.

Host side, a subclass of uvicorn's protocol, which offers no peer credentials. It also answers
requests that the HTTP parser refuses, and users with too many connections. A half-closed connection
stays open for its response, because a client may stop sending and still wait. A client that has
closed both directions is detected, so that its stream can end. Invariant: connections of one user
leave room for those of all others, and for the same user's on the control socket.

Ports of sessions: `ANY /v1/sessions/{id}/ports/{port}/{path}`, for the session's owner.

Host side. The server's protocol hands the whole connection over: the head of the request is sent
on, without the address's beginning and the caller's credential, and after it the bytes of both
sides pass as they are. So HTTP, event streams and WebSocket work, and nothing here reads what the
session says. With `Upgrade: tcp` only bytes pass, for any protocol. Invariant: a connection that
was handed over carries no other request of the API.
"""

from __future__ import annotations

import asyncio
import re
import resource
import select
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.abc
import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fumehood.core.errors import EngineError, InvalidParams, RateLimited, ShuttingDown
from fumehood.core.fair_share import FairShare
from fumehood.core.identity import OVERFLOW_UID, Peer
from fumehood.engine import Engine
from fumehood.http.caller import require_principal
from fumehood.sandbox.session_use import SessionProcesses

if TYPE_CHECKING:
    from fumehood.engine import Engine


ADDRESS = re.compile(rb"/v1/sessions/([^/?]+)/ports/([0-9]{1,5})(/.*)?", re.DOTALL)
ESCAPED_SLASH = re.compile(rb"%2f", re.IGNORECASE)

PIECE_BYTES = 64 * 1024

PORT_LOOK_S = 0.5
"""Seconds between looks whether the caller has left, or the engine stops."""

LEFT_S = 10.0
"""Seconds to deliver what a caller sent before it left."""

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: tcp\r\n\r\n"

_OURS = frozenset({b"authorization", b"connection", b"upgrade", b"keep-alive", b"te"})
"""Headers that are not sent on as they are."""


def has_left(connection: socket.socket) -> bool:
    """Whether the peer has closed both directions of the connection.

    Over TCP also True if the peer has only stopped sending, which looks the same there.

    *Source*: unix_poll of Linux: POLLHUP if both directions are shut.
    """
    gone = select.POLLHUP if connection.family == socket.AF_UNIX else select.POLLRDHUP
    poll = select.poll()
    poll.register(connection.fileno(), gone)
    return any(events & (gone | select.POLLHUP) for _, events in poll.poll(0))


class CallerStream(anyio.abc.ByteStream):
    """The connection of a caller, once it is handed over."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        loop = asyncio.get_running_loop()
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)
        transport.resume_reading()

    async def receive(self, max_bytes: int = PIECE_BYTES) -> bytes:
        """Return the next bytes. Raises as anyio's streams do."""
        try:
            data = await self._reader.read(max_bytes)
        except OSError:
            raise anyio.BrokenResourceError from None
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        """Send bytes, as far as the caller reads them. Raises as anyio's streams do."""
        try:
            self._writer.write(item)
            await self._writer.drain()
        except OSError:
            raise anyio.BrokenResourceError from None

    @property
    def has_left(self) -> bool:
        """Whether the caller has closed both directions. Over TCP one is enough."""
        return self._transport.is_closing() or has_left(self._transport.get_extra_info("socket"))

    async def send_eof(self) -> None:
        """Do nothing: the end of the connection tells it."""

    async def aclose(self) -> None:
        """Close the connection."""
        self._writer.close()


@dataclass(frozen=True, slots=True)
class PortRequest:
    """A request to a port of a session that the caller owns."""

    processes: SessionProcesses
    port: int
    head: bytes
    """The head for the session's server; empty with `Upgrade: tcp`."""


def is_for_port(path: bytes) -> bool:
    """Whether this is the address of a port of a session."""
    return path.startswith(b"/v1/sessions/") and ADDRESS.fullmatch(path) is not None


def port_request(engine: Engine, request: Request, upgrade: bytes | None) -> PortRequest:
    """Return what a request to a port asks for. `upgrade` is the protocol that it wants to change
    to, in lower case.

    Raises:
        Unauthorized, PermissionDenied: the caller is unknown, or may not call tools.
        ResourceNotFound: the caller has no such session.
        InvalidParams: it cannot be a port.
        ShuttingDown: the engine stops.
    """
    caller = require_principal(request)
    if engine.is_draining:
        raise ShuttingDown("The engine is stopping. Retry when it runs again.")
    found = ADDRESS.fullmatch(request.scope["raw_path"])
    assert found is not None  # by `is_for_port`
    port = int(found[2])
    if not 0 < port < 1 << 16:
        raise InvalidParams("A port is a number from 1 to 65535.", fields=["port"])
    reference = found[1].decode("ascii", "replace")
    processes = engine.sessions.processes(caller, reference)
    if upgrade == b"tcp":
        return PortRequest(processes, port, b"")
    query = request.scope["query_string"]
    path = ESCAPED_SLASH.sub(b"/", found[3] or b"/")  # generated clients escape it in a path
    target = path + (b"?" + query if query else b"")
    head = [request.method.encode(), b" ", target, b" HTTP/1.1\r\n"]
    for name, value in _sent_on(request.scope["headers"], upgrade):
        head += [name, b": ", value, b"\r\n"]
    return PortRequest(processes, port, b"".join([*head, b"\r\n"]))


def _sent_on(
    headers: Iterable[tuple[bytes, bytes]], upgrade: bytes | None
) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        if name not in _OURS:
            yield name, value
    if upgrade is None:
        yield b"connection", b"close"  # what follows an answer would not be for this address
    else:
        yield from ((b"connection", b"Upgrade"), (b"upgrade", upgrade))


async def pass_bytes(
    engine: Engine, asked: PortRequest, caller: CallerStream, first: bytes
) -> None:
    """Connect to the port, and pass bytes both ways until the port's side is done, the caller has
    left, or the engine begins to stop. `first` came after the head.

    Raises:
        EngineError: there is no connection; nothing was sent.
    """
    is_sent = anyio.Event()

    async def up() -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await port.send(asked.head + first)
            async for piece in caller:
                await port.send(piece)
            await port.send_eof()
        is_sent.set()

    async def watch() -> None:
        while not (caller.has_left or engine.is_draining):  # noqa: ASYNC110 - nothing tells it
            await anyio.sleep(PORT_LOOK_S)
        with anyio.move_on_after(0 if engine.is_draining else LEFT_S):
            await is_sent.wait()
        group.cancel_scope.cancel()

    async with asked.processes.connect(asked.port) as port, anyio.create_task_group() as group:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            if not asked.head:
                await caller.send(SWITCHED)
            group.start_soon(up)
            group.start_soon(watch)
            async for piece in port:
                await caller.send(piece)
        group.cancel_scope.cancel()


# -- the protocol ---------------------------------------------------------------------------

_UCRED = struct.Struct("3i")  # *Source*: struct ucred of unix(7): pid, uid, gid

LOOK_S = 10.0
"""Seconds for the first request of a connection over TCP, and between looks whether it is idle."""

MAX_IDLE_LOOKS = 8
"""Looks that an idle connection over TCP stays; the usual time without a request is shorter."""

MAX_CONNECTIONS = 1024
"""The most connections of one user to one socket."""

MAX_HELD_BYTES = 128 << 20
"""The most bytes of one user's unfinished bodies together: sixteen of the largest JSON bodies."""

RETRY_AFTER_MS = 1000

RefusalBody = Callable[[EngineError], bytes]


class Faces(Protocol):
    """The application of a server, as far as it decides about ports of sessions."""

    @property
    def engine(self) -> Engine:
        """The engine that is served."""

    def port_request(self, request: Request, upgrade: bytes | None) -> PortRequest:
        """Return what a request to a port asks for. Raises EngineError."""


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer process of a connection, as attested by the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(credentials))


class Face(StrEnum):
    """The socket on which a request arrived."""

    ENGINE = "engine"
    CONTROL = "control"
    TCP = "tcp"
    """A loopback address, whose peers are not attested."""


NOBODY = Peer(pid=0, uid=OVERFLOW_UID, gid=0)
"""Stands for the peer of a connection over TCP, who is unknown."""


class Shares:
    """What each user, or address on the network, holds: connections to each socket, and bytes of
    requests in progress.
    """

    def __init__(self, most_connections: int) -> None:
        self.connections = FairShare(sys.maxsize, most_connections)
        self.held_bytes = FairShare(sys.maxsize, MAX_HELD_BYTES)


def most_connections() -> int:
    """Return the most connections of one user to one socket.

    At most half of the files that this process may open, so that one user cannot use up all.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


class _Joining:
    """A transport that sends a response's head and body in one piece.

    uvicorn writes them separately, and each write would wake the client. A write is held for the
    next one, at most until the event loop's next iteration.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting = b""
        self._flush: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether the transport is closing. Defined because `__getattr__` would be slower."""
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send the data together with held data. If there is none, hold the data."""
        if self._flush is not None:
            self._send_waiting(data)
        elif data:
            self._waiting = data
            self._flush = self._loop.call_soon(self._send_waiting)

    def close(self) -> None:
        """Send held data, then close."""
        if self._flush is not None:
            self._send_waiting()
        self._transport.close()

    def _send_waiting(self, data: bytes = b"") -> None:
        assert self._flush is not None
        self._flush.cancel()
        self._flush = None
        waiting, self._waiting = self._waiting, b""
        self._transport.write(waiting + data)


class PeerProtocol(H11Protocol):
    """HTTP/1.1 that adds the peer and the `Face` to each request, in `scope["state"]`."""

    refusal_body: RefusalBody
    port_request: Callable[[Request, bytes | None], PortRequest]
    pass_bytes: Callable[[PortRequest, CallerStream, bytes], Awaitable[None]]
    control_path: str
    shares: Shares
    _half_closed = False
    _look: asyncio.TimerHandle | None = None
    _idle_looks = 0
    _counted = ""
    """What the connection is counted as, unless it was refused."""
    _face: Face

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Determine the peer, and refuse the connection if its user has too many."""
        assert isinstance(transport, asyncio.Transport)
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX:
            peer = peer_of(connection)
            is_control = transport.get_extra_info("sockname") == type(self).control_path
            self._face, who = Face.CONTROL if is_control else Face.ENGINE, str(peer.uid)
        else:
            peer, self._face = NOBODY, Face.TCP
            who = transport.get_extra_info("peername")[0]
            self._look_later()
        shares = type(self).shares
        self.app_state = {
            **self.app_state,
            "peer": peer,
            "face": self._face,
            "who": who,
            "held_bytes": shares.held_bytes,
            "abort": transport.abort,
            "take_body": self._take_body,
            "has_left": lambda: transport.is_closing() or has_left(connection),
        }
        super().connection_made(_Joining(transport))  # type: ignore[arg-type]  # has all methods that are used
        if shares.connections.take(f"{self._face} {who}") is None:
            self._counted = f"{self._face} {who}"
        else:
            self.logger.warning("A user has too many connections; further ones are refused.")
            self._refuse(
                RateLimited(
                    f"This user already has {shares.connections.most_of_one} connections. Close "
                    "some.",
                    retry_after_ms=RETRY_AFTER_MS,
                ),
                b"Too Many Requests",
            )

    def _look_later(self) -> None:
        self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_for_requests)

    def _look_for_requests(self) -> None:
        """Close a connection over TCP that holds its place without a request."""
        cycle: Any = self.cycle  # None before the first request
        is_idle = cycle is None or cycle.response_complete
        self._idle_looks = self._idle_looks + 1 if is_idle else 0
        if self._idle_looks > (0 if cycle is None else MAX_IDLE_LOOKS):
            self.transport.abort()
        else:
            self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Return the connection to its user's share."""
        super().connection_lost(exc)
        self._leave()

    def _leave(self) -> None:
        if self._look is not None:
            self._look.cancel()
        if self._counted:
            type(self).shares.connections.give_back(self._counted)
            self._counted = ""

    def _take_body(self) -> bytes | None:
        """Take the body of the current request if all of it has arrived; otherwise return None.

        Such a body has at most some hundred KB: uvicorn pauses a larger one until the application
        waits for it.
        """
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def _should_upgrade(self) -> bool:
        """Whether the connection is to be handed over, for a port of a session."""
        return self._face is not Face.CONTROL and is_for_port(self.scope["raw_path"])

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over: it serves no other request."""
        upgrade: bytes | None = self._get_upgrade()
        request = Request(dict(self.scope))
        try:
            asked = type(self).port_request(request, upgrade)
        except EngineError as refusal:
            self._refuse(refusal, HTTPStatus(refusal.http_status).phrase.encode())
            return
        self.connections.discard(self)
        self._unset_keepalive_if_required()
        task = self.loop.create_task(self._hand_over(asked))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    async def _hand_over(self, asked: PortRequest) -> None:
        first = bytes(self.conn.trailing_data[0])
        transport = self.transport._transport  # type: ignore[attr-defined]  # of `_Joining`
        caller = CallerStream(transport)
        try:
            await type(self).pass_bytes(asked, caller, first)
        except EngineError as refusal:
            self._refuse(refusal, HTTPStatus(refusal.http_status).phrase.encode())
        finally:
            transport.close()
            self._leave()

    def eof_received(self) -> Any:
        """Return True while a response is pending, which keeps the connection open."""
        self._half_closed = True
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            if has_left(self.transport.get_extra_info("socket")):
                return False
            if cycle.more_body:
                cycle.disconnected = True  # wakes the application, which gives up
                cycle.message_event.set()
                self.send_400_response("The connection ended before the body did.")
            return True
        if self.conn.trailing_data[0]:
            self.send_400_response("The connection ended before the request did.")
            return True
        return False

    def on_response_complete(self) -> None:
        """Close a half-closed connection once the last response is sent."""
        super().on_response_complete()  # begins the next request, if one came with this one
        is_open = self._half_closed and not self.transport.is_closing()
        if is_open and not self.eof_received():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer with the envelope of an error, then close the connection."""
        self._refuse(InvalidParams(msg), b"Bad Request")

    def _refuse(self, why: EngineError, reason: bytes) -> None:
        body = type(self).refusal_body(why)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (
                h11.Response(status_code=why.http_status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # a response had already begun
        self.transport.close()


def make_protocol(
    faces: Faces, refusal_body: RefusalBody, control_path: str, shares: Shares
) -> type[PeerProtocol]:
    """Make the protocol class for one server.

    `refusal_body` makes the envelopes of requests that are refused before the application.
    """
    bound = {
        "refusal_body": staticmethod(refusal_body),
        "port_request": staticmethod(faces.port_request),
        "pass_bytes": staticmethod(partial(pass_bytes, faces.engine)),
        "control_path": control_path,
        "shares": shares,
    }
    return type("BoundPeerProtocol", (PeerProtocol,), bound)
