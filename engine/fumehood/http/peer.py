"""The peer of a connection: its identity, attested by the Linux kernel, and limits for its user.

Host side. uvicorn's protocol class does not provide peer credentials, so this module subclasses it.
The subclass also refuses requests that the HTTP parser rejects, and connections of users who have
too many. A half-closed connection stays open until its response is sent, because a client may stop
sending and still wait for the response. A client that has closed both directions is detected, so
that its stream can end. Invariant: one user's connections to a socket leave room for other users'
connections, and for the same user's connections to the control socket.

Some requests, such as those to a session's port, use their connection for something other than
HTTP. The protocol parses the head of such a request, and hands the connection over to the part that
owns the request's address. Invariant: a connection that was handed over carries no further API
request.
"""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.abc
import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fumehood.core.errors import EngineError, InvalidParams, RateLimited
from fumehood.core.fair_share import FairShare
from fumehood.core.identity import OVERFLOW_UID, Peer
from fumehood.engine import Engine

if TYPE_CHECKING:
    from fumehood.engine import Engine


PIECE_BYTES = 64 * 1024


def has_left(connection: socket.socket) -> bool:
    """Return True if the peer has closed both directions of the connection.

    Over TCP, also return True if the peer has only stopped sending, because the two cases cannot be
    distinguished.

    *Source*: unix_poll of Linux: POLLHUP if both directions are shut.
    """
    gone = select.POLLHUP if connection.family == socket.AF_UNIX else select.POLLRDHUP
    poll = select.poll()
    poll.register(connection.fileno(), gone)
    return any(events & (gone | select.POLLHUP) for _, events in poll.poll(0))


class CallerStream(anyio.abc.ByteStream):
    """A caller's connection that was handed over to a part."""

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
        """Return the next bytes. Raises EndOfStream or BrokenResourceError, as anyio requires."""
        try:
            data = await self._reader.read(max_bytes)
        except OSError:
            raise anyio.BrokenResourceError from None
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        """Send bytes. Wait if the caller reads too slowly. Raises BrokenResourceError if the
        connection fails.
        """
        try:
            self._writer.write(item)
            await self._writer.drain()
        except OSError:
            raise anyio.BrokenResourceError from None

    @property
    def has_left(self) -> bool:
        """Whether the caller has closed both directions or, over TCP, at least one of them."""
        return self._transport.is_closing() or has_left(self._transport.get_extra_info("socket"))

    async def send_eof(self) -> None:
        """Do nothing. The caller detects the end when the connection is closed."""

    async def aclose(self) -> None:
        """Close the connection."""
        self._writer.close()


class Handover(Protocol):
    """A request that a part has checked and whose connection it takes over. The connection is then
    no longer used for HTTP.
    """

    async def serve(self, caller: CallerStream, first: bytes) -> None:
        """Serve the connection until it ends.

        `first` are the bytes that the caller has already sent after the request's head.

        Raises:
            EngineError: the request is refused; nothing was sent to the caller.
        """


@dataclass(frozen=True, slots=True)
class Handovers:
    """Describes the requests on the callers' sockets whose connections a part takes over. The part
    uses such a connection for something other than HTTP.
    """

    accepts: Callable[[bytes], bool]
    """Returns True if the part takes over the connection of a request with this path. The path is
    given as it was sent. This function is called for each request."""
    check: Callable[[Engine, Request, bytes | None], Handover]
    """Checks a request and returns its handover. The last argument is the protocol in the request's
    `Upgrade` header in lower case, or None. Raises EngineError if the request is refused."""


# -- the protocol ---------------------------------------------------------------------------

_UCRED = struct.Struct("3i")  # *Source*: struct ucred of unix(7): pid, uid, gid

LOOK_S = 10.0
"""Seconds within which a TCP connection must send its first request. Afterwards, seconds between
two checks whether the connection is idle."""

MAX_IDLE_LOOKS = 8
"""Number of consecutive checks at which a TCP connection may be idle without being closed. The
server's own keep-alive limit is shorter."""

MAX_CONNECTIONS = 1024
"""The maximum number of connections of one user to one socket."""

MAX_HELD_BYTES = 128 << 20
"""The maximum total size of one user's unfinished bodies: sixteen of the largest JSON bodies."""

RETRY_AFTER_MS = 1000

RefusalBody = Callable[[EngineError], bytes]


class Faces(Protocol):
    """The two methods of the server's application that this module calls."""

    def takes_over(self, path: bytes) -> bool:
        """Return whether a part takes over the connections of requests with this path. Such
        requests are not answered over HTTP.
        """

    def hand_over(self, request: Request, upgrade: bytes | None) -> Handover:
        """Check a request whose connection a part will take over. Return the object that serves the
        connection from then on. `upgrade` is the protocol in the request's `Upgrade` header, or
        None.

        Raises EngineError if the request is refused.
        """


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer process of a connection, as attested by the Linux kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(credentials))


class Face(StrEnum):
    """The kind of the socket on which a request arrived."""

    ENGINE = "engine"
    CONTROL = "control"
    TCP = "tcp"
    """A TCP address. The Linux kernel does not attest the identity of its peers."""


NOBODY = Peer(pid=0, uid=OVERFLOW_UID, gid=0)
"""The peer of a TCP connection, which is unknown."""


class Shares:
    """Counts each user's open connections and bytes of unfinished requests. Connections are counted
    for each socket separately. A peer over TCP is counted by its network address instead of its
    user.
    """

    def __init__(self, most_connections: int) -> None:
        self.connections = FairShare(sys.maxsize, most_connections)
        self.held_bytes = FairShare(sys.maxsize, MAX_HELD_BYTES)


def most_connections() -> int:
    """Return the maximum number of connections of one user to one socket."""
    # At most half of the files that this process may open, so that one user cannot use all of them.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


class _Joining:
    """A transport that sends a response's head and body in one piece. The data of a write is held
    until the next write, but at most until the event loop's next iteration.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting = b""
        self._flush: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether the transport is closing."""
        # `__getattr__` would find the transport's method as well, but more slowly.
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send `data` together with the held data. If no data is held, hold `data`."""
        # uvicorn writes the head and the body separately, and each write would wake the client.
        if self._flush is not None:
            self._send_waiting(data)
        elif data:
            self._waiting = data
            self._flush = self._loop.call_soon(self._send_waiting)

    def close(self) -> None:
        """Send the held data, then close the transport."""
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
    """uvicorn's HTTP/1.1 protocol, which adds the peer and the `Face` to each request's
    `scope["state"]`.
    """

    refusal_body: RefusalBody
    takes_over: Callable[[bytes], bool]
    hand_over: Callable[[Request, bytes | None], Handover]
    control_path: str
    shares: Shares
    _half_closed = False
    _look: asyncio.TimerHandle | None = None
    _idle_looks = 0
    _counted = ""
    """The socket and the user (or network address) for which the connection is counted, or "" if it
    is not counted."""
    _face: Face

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Determine the peer, and refuse the connection if the peer's user already has too many."""
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
        """Close a TCP connection that has been idle for too long. Otherwise, schedule the next
        check.
        """
        cycle: Any = self.cycle  # None before the first request
        is_idle = cycle is None or cycle.response_complete
        self._idle_looks = self._idle_looks + 1 if is_idle else 0
        if self._idle_looks > (0 if cycle is None else MAX_IDLE_LOOKS):
            self.transport.abort()
        else:
            self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from its user's count."""
        super().connection_lost(exc)
        self._leave()

    def _leave(self) -> None:
        if self._look is not None:
            self._look.cancel()
        if self._counted:
            type(self).shares.connections.give_back(self._counted)
            self._counted = ""

    def _take_body(self) -> bytes | None:
        """Return the complete body of the current request, and remove it from uvicorn's buffer.
        Return None if a part of the body has not arrived yet, or if the client has disconnected.
        """
        cycle = self.cycle
        # A body of more than a few hundred KB is never complete here. uvicorn does not receive the
        # rest until the application waits for the body.
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def _should_upgrade(self) -> bool:
        """Return whether a part takes over the connection of the current request."""
        return self._face is not Face.CONTROL and type(self).takes_over(self.scope["raw_path"])

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the current request's connection over to a part. If the part refuses the request,
        send the refusal instead and close the connection. No other request is served on this
        connection.
        """
        upgrade: bytes | None = self._get_upgrade()
        request = Request(dict(self.scope))
        try:
            handover = type(self).hand_over(request, upgrade)
        except EngineError as refusal:
            self._refuse(refusal, HTTPStatus(refusal.http_status).phrase.encode())
            return
        self.connections.discard(self)
        self._unset_keepalive_if_required()
        task = self.loop.create_task(self._serve(handover))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    async def _serve(self, handover: Handover) -> None:
        first = bytes(self.conn.trailing_data[0])
        transport = self.transport._transport  # type: ignore[attr-defined]  # of `_Joining`
        caller = CallerStream(transport)
        try:
            await handover.serve(caller, first)
        except EngineError as refusal:
            self._refuse(refusal, HTTPStatus(refusal.http_status).phrase.encode())
        finally:
            transport.close()
            self._leave()

    def eof_received(self) -> Any:
        """Handle that the client will send no more data. If a request or its body is incomplete,
        refuse the request. Return True if the connection must stay open, because a response is
        still to be sent. Otherwise, return False.
        """
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
        """Close a half-closed connection after its last response."""
        super().on_response_complete()  # begins the next request, if one came with this one
        is_open = self._half_closed and not self.transport.is_closing()
        if is_open and not self.eof_received():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Send an error envelope with the message, then close the connection."""
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
    """Create the protocol class for a server whose application is `faces`.

    If a request is refused before it reaches the application, `refusal_body` returns the encoded
    envelope. `control_path` is the path of the control socket. `shares` counts the connections and
    the memory of each user.
    """
    bound = {
        "refusal_body": staticmethod(refusal_body),
        "takes_over": staticmethod(faces.takes_over),
        "hand_over": staticmethod(faces.hand_over),
        "control_path": control_path,
        "shares": shares,
    }
    return type("BoundPeerProtocol", (PeerProtocol,), bound)
