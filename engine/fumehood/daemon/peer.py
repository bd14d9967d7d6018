"""Who is at the socket: the kernel's word, put into every request's scope.

Host side, a protocol class under uvicorn's, which offers no peer credentials. It also
answers what the HTTP parser refuses, and keeps a half-closed connection open for its
answer: a client may say that it sends no more and still wait.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fumehood.model.identity import Peer

_UCRED = struct.Struct("3i")  # *Source*: struct ucred of unix(7): pid, uid, gid

MAX_HEADER_BYTES = 64 * 1024

RefusalBody = Callable[[str], bytes]


def peer_of(connection: socket.socket) -> Peer:
    """The process that made the connection, as the kernel attests it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(credentials))


class Face(StrEnum):
    """Which of the engine's two sockets a request came in by."""

    ENGINE = "engine"
    CONTROL = "control"


class PeerProtocol(H11Protocol):
    """HTTP/1.1 with the peer's credentials and the socket's face in `scope["state"]`."""

    refusal_body: RefusalBody
    control_path: str
    _half_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask the kernel who this is, before a byte of what it sends is read."""
        assert isinstance(transport, asyncio.Transport)
        peer = peer_of(transport.get_extra_info("socket"))
        is_control = transport.get_extra_info("sockname") == type(self).control_path
        face = Face.CONTROL if is_control else Face.ENGINE
        self.app_state = {**self.app_state, "peer": peer, "face": face}
        super().connection_made(transport)

    def eof_received(self) -> Any:
        """Keep the way back open while an answer is owed."""
        self._half_closed = True
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
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
        """Close what the client has closed already, once it has its answer."""
        super().on_response_complete()
        if self._half_closed and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer with an envelope like everything else, then close."""
        body = type(self).refusal_body(msg)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer was already on its way
        self.transport.close()


def make_protocol(refusal_body: RefusalBody, control_path: str) -> type[PeerProtocol]:
    """The protocol class; `refusal_body` makes the envelope for what is no HTTP."""
    bound = {"refusal_body": staticmethod(refusal_body), "control_path": control_path}
    return type("BoundPeerProtocol", (PeerProtocol,), bound)
