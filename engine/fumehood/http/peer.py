"""The peer of a connection: its identity, attested by the kernel, and limits for its user.

Host side, a subclass of uvicorn's protocol, which offers no peer credentials. It also answers
requests that the HTTP parser refuses, and users with too many connections. A half-closed connection
stays open for its response, because a client may stop sending and still wait. A client that has
closed both directions is detected, so that its stream can end. Invariant: connections of one user
leave room for those of all others, and for the same user's on the control socket.
"""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.abc
import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fumehood.core.errors import EngineError, InvalidParams, RateLimited
from fumehood.core.identity import OVERFLOW_UID, Peer
from fumehood.http.ports import PIECE_BYTES, Caller, PortRequest, is_for_port, pass_bytes

if TYPE_CHECKING:
    from fumehood.engine import Engine

_UCRED = struct.Struct("3i")  # *Source*: struct ucred of unix(7): pid, uid, gid

MAX_HEADER_BYTES = 64 * 1024

LOOK_S = 10.0
"""Seconds for the first request of a connection over TCP, and between looks whether it is idle."""

LEFT_LOOK_S = 0.5
"""Seconds between looks whether the caller of a port has left."""

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

    engine: Engine

    def port_request(self, request: Request, upgrade: bytes | None) -> PortRequest:
        """Return what a request to a port asks for. Raises EngineError."""
        ...


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer process of a connection, as attested by the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(credentials))


def _has_left(connection: socket.socket) -> bool:
    """Whether the peer has closed both directions of the connection.

    Over TCP also True if the peer has only stopped sending, which looks the same there.

    *Source*: unix_poll of Linux: POLLHUP if both directions are shut.
    """
    gone = select.POLLHUP if connection.family == socket.AF_UNIX else select.POLLRDHUP
    poll = select.poll()
    poll.register(connection.fileno(), gone)
    return any(events & (gone | select.POLLHUP) for _, events in poll.poll(0))


class Face(StrEnum):
    """The socket on which a request arrived."""

    ENGINE = "engine"
    CONTROL = "control"
    TCP = "tcp"
    """A loopback address, whose peers are not attested."""


NOBODY = Peer(pid=0, uid=OVERFLOW_UID, gid=0)
"""Stands for the peer of a connection over TCP, who is unknown."""


@dataclass(eq=False, slots=True)
class Share:
    """One user's connections by `Face`, and the memory that the user's bodies occupy."""

    most_connections: int
    connections: Counter[str] = field(default_factory=Counter)
    held_bytes: int = 0

    def connect(self, face: str) -> bool:
        """Count a new connection; return False if that would be too many."""
        if self.connections[face] >= self.most_connections:
            return False
        self.connections[face] += 1
        return True

    def leave(self, face: str) -> None:
        """Stop counting a connection, which has ended."""
        self.connections[face] -= 1


class Shares:
    """The shares of connected users."""

    def __init__(self, most_connections: int) -> None:
        self._most_connections = most_connections
        self._by_who: dict[int | str, Share] = {}

    def of(self, who: int | str) -> Share:
        """Return the share of a user, or of an address on the network; shares without connections
        are dropped.
        """
        share = self._by_who.get(who)
        if share is None:
            unused = [one for one, held in self._by_who.items() if not held.connections.total()]
            for one in unused:
                del self._by_who[one]
            share = self._by_who[who] = Share(self._most_connections)
        return share


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
            self._transport.write(self._take() + data)
        elif data:
            self._waiting = data
            self._flush = self._loop.call_soon(self._send_waiting)

    def close(self) -> None:
        """Send held data, then close."""
        if self._flush is not None:
            self._send_waiting()
        self._transport.close()

    def _send_waiting(self) -> None:
        self._transport.write(self._take())

    def _take(self) -> bytes:
        assert self._flush is not None
        self._flush.cancel()
        self._flush = None
        waiting, self._waiting = self._waiting, b""
        return waiting


class PeerProtocol(H11Protocol):
    """HTTP/1.1 that adds the peer and the `Face` to each request, in `scope["state"]`."""

    refusal_body: RefusalBody
    port_request: Callable[[Request, bytes | None], PortRequest]
    pass_bytes: Callable[[PortRequest, Caller, bytes], Awaitable[None]]
    control_path: str
    shares: Shares
    _half_closed = False
    _look: asyncio.TimerHandle | None = None
    _idle_looks = 0
    _share: Share | None = None
    _face: Face

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Determine the peer, and refuse the connection if its user has too many."""
        assert isinstance(transport, asyncio.Transport)
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX:
            peer = peer_of(connection)
            is_control = transport.get_extra_info("sockname") == type(self).control_path
            self._face = face = Face.CONTROL if is_control else Face.ENGINE
        else:
            peer, self._face = NOBODY, (face := Face.TCP)
            self._look_later()
        who = transport.get_extra_info("peername")[0] if face is Face.TCP else peer.uid
        share = type(self).shares.of(who)
        self.app_state = {
            **self.app_state,
            "peer": peer,
            "face": face,
            "share": share,
            "abort": transport.abort,
            "take_body": self._take_body,
            "has_left": lambda: transport.is_closing() or _has_left(connection),
        }
        super().connection_made(_Joining(transport))  # type: ignore[arg-type]  # has all methods that are used
        if share.connect(face):
            self._share = share
        else:
            self.logger.warning("A user has too many connections; further ones are refused.")
            self._refuse(
                RateLimited(
                    f"This user already has {share.most_connections} connections. Close some.",
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
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)
        if self._share is not None:
            self._share.leave(self._face)
            self._share = None

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
            if self._share is not None:
                self._share.leave(self._face)
                self._share = None
            if self._look is not None:
                self._look.cancel()

    def eof_received(self) -> Any:
        """Return True while a response is pending, which keeps the connection open."""
        self._half_closed = True
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            if _has_left(self.transport.get_extra_info("socket")):
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


class CallerStream(Caller):
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

    async def until_left(self) -> None:
        """Wait until the caller has closed both directions. Over TCP one is enough."""
        connection = self._transport.get_extra_info("socket")
        while not (self._transport.is_closing() or _has_left(connection)):  # noqa: ASYNC110 - nothing tells it
            await anyio.sleep(LEFT_LOOK_S)

    async def send_eof(self) -> None:
        """Do nothing: the end of the connection tells it."""

    async def aclose(self) -> None:
        """Close the connection."""
        self._writer.close()


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
