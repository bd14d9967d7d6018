"""The relay: a program's connections to the gateway, over the channel.

Guest side, used by the supervisor and by a server's front. Programs find it as an HTTP proxy on
loopback, but nothing here reads what they say: the host does. Invariants: bytes pass only during a
run with network, and a connection outside one is closed at once; of one connection at most
`WINDOW_BYTES` are on their way in each direction, so no program fills this process or the channel;
after the run no connection of it is left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from dataclasses import dataclass

from fumehood.guest.container.host import Host
from fumehood.protocol.framing import (
    CLOSED,
    DATA,
    FINISHED,
    GATEWAY_PORT,
    MAX_CONNECTIONS,
    OPENED,
    PIECE_BYTES,
    TAKEN,
    TRUST_FILE,
    WINDOW_BYTES,
    ConnectionFrame,
    taken,
)

BACKLOG = 128


@dataclass(eq=False)
class _Connection:
    number: int
    socket: socket.socket
    unsent: bytearray
    """Bytes that the program has not read yet."""
    unread: int = 0
    """Bytes that the host has not taken yet."""
    is_finished: bool = False
    """Whether the program sends no more."""
    is_closing: bool = False
    """Whether it is closed as soon as nothing is unsent."""
    events: int = 0


class Relay:
    """Accepts connections of programs, and passes their bytes on."""

    def __init__(self, host: Host, selector: selectors.BaseSelector) -> None:
        self._host = host
        self._selector = selector
        self._run_id: int | None = None
        self._numbers = 0
        self._open: dict[int, _Connection] = {}
        self._trust = ""
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(("127.0.0.1", GATEWAY_PORT))  # before any program can
        self._listener.listen(BACKLOG)
        selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    def begin(self, run_id: int, trust: str) -> None:
        """Pass bytes from now on. `trust` has the certificates in PEM. Raises OSError."""
        if trust != self._trust:
            with open(f"{TRUST_FILE}.new", "w") as file:
                file.write(trust)
            os.replace(f"{TRUST_FILE}.new", TRUST_FILE)
            self._trust = trust
        self.turn_away()
        self._run_id = run_id

    def end(self) -> None:
        """Close all connections, and pass nothing on until `begin`."""
        self._run_id = None
        for connection in list(self._open.values()):
            self._drop(connection)

    def turn_away(self) -> None:
        """Close the connections that wait: they are of an earlier program."""
        for _ in range(2 * BACKLOG):  # no more of them can wait
            accepted = self._accepted()
            if accepted is None:
                return
            accepted.close()

    def open(self, end: socket.socket) -> None:
        """Pass the bytes of a socket on, as a connection of the program."""
        end.setblocking(False)
        self._numbers += 1
        connection = self._open[self._numbers] = _Connection(self._numbers, end, bytearray())
        self._tell(OPENED, connection)
        self._watch(connection)

    def on_frame(self, frame: ConnectionFrame) -> None:
        """Take a frame of the host. Frames of connections that are gone are dropped."""
        connection = self._open.get(frame.number)
        if frame.run_id != self._run_id or connection is None:
            return
        if frame.kind == DATA:
            connection.unsent += frame.data
            self._write(connection)
        elif frame.kind == TAKEN:
            connection.unread -= frame.taken_bytes
            self._watch(connection)
        elif frame.kind == CLOSED:
            connection.is_closing = True
            self._write(connection)

    # -- inside ------------------------------------------------------------------------------

    def _on_connection(self) -> None:
        accepted = self._accepted()
        if accepted is None:
            return
        if self._run_id is None or len(self._open) >= MAX_CONNECTIONS:
            accepted.close()
            return
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else 40 ms for two pieces
        self.open(accepted)

    def _accepted(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except OSError:
            return None

    def _on_event(self, connection: _Connection) -> None:
        """Read and write what goes without waiting: the selector does not say which it was."""
        if connection.number in self._open and not connection.is_finished:
            self._read(connection)
        if connection.number in self._open:
            self._write(connection)

    def _read(self, connection: _Connection) -> None:
        if connection.unread >= WINDOW_BYTES:
            return
        try:
            data = connection.socket.recv(min(PIECE_BYTES, WINDOW_BYTES - connection.unread))
        except BlockingIOError:
            return
        except OSError:
            self._tell(CLOSED, connection)
            self._drop(connection)
            return
        if data:
            connection.unread += len(data)
            self._tell(DATA, connection, data)
        else:
            connection.is_finished = True
            self._tell(FINISHED, connection)
        self._watch(connection)

    def _write(self, connection: _Connection) -> None:
        unsent = connection.unsent
        try:
            count = connection.socket.send(unsent) if unsent else 0
        except BlockingIOError:
            count = 0
        except OSError:  # the program has closed it
            self._tell(CLOSED, connection)
            self._drop(connection)
            return
        if count and self._run_id is not None:
            self._host.send_bytes(taken(self._run_id, connection.number, count))
        if unsent:
            del unsent[:count]
        if connection.is_closing and not unsent:
            self._drop(connection)
        else:
            self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        events = 0
        if not connection.is_finished and connection.unread < WINDOW_BYTES:
            events |= selectors.EVENT_READ
        if connection.unsent:
            events |= selectors.EVENT_WRITE
        if events == connection.events:
            return
        if connection.events:
            self._selector.unregister(connection.socket)
        if events:
            self._selector.register(connection.socket, events, lambda: self._on_event(connection))
        connection.events = events

    def _tell(self, kind: int, connection: _Connection, data: bytes = b"") -> None:
        if self._run_id is not None:
            frame = ConnectionFrame(kind, self._run_id, connection.number, data)
            self._host.send_bytes(frame.encode())

    def _drop(self, connection: _Connection) -> None:
        del self._open[connection.number]
        if connection.events:
            self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.close()
