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
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fumehood.core.errors import EngineError, InvalidParams, RateLimited
from fumehood.core.fair_share import FairShare
from fumehood.core.identity import OVERFLOW_UID, Peer
from fumehood.http.ports import CallerStream, PortRequest, has_left, is_for_port, pass_bytes

if TYPE_CHECKING:
    from fumehood.engine import Engine

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

    engine: Engine

    def port_request(self, request: Request, upgrade: bytes | None) -> PortRequest:
        """Return what a request to a port asks for. Raises EngineError."""
        ...


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
