"""Connections over the channel: programs connect to the gateway, and the host connects to ports.

Guest side, used by the supervisor and by a server's front. For programs the relay is an HTTP proxy
on loopback, but it does not parse their bytes; the host does. Invariants: bytes are relayed to the
gateway only during a run with network, and connections at other times are closed at once; at most
`WINDOW_BYTES` of one connection are in transit in each direction, so no program fills this process
or the channel; after a run, none of its connections is left. The host's connections reach only
loopback, and end with the channel.

If an operator's program with network runs in a container, the front is the container's first
process, instead of a supervisor. The front relays between the program and the host: the program's
standard input and output are the relay's first connection, so they share the channel with the
program's connections to the gateway. The front runs as the program's user, and has no right that
the program lacks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from fumehood.guest.container.host import Host
from fumehood.guest.core import children
from fumehood.guest.core.pipes import CHUNK_BYTES
from fumehood.protocol import framing
from fumehood.protocol.framing import (
    CLOSED,
    DATA,
    FINISHED,
    GATEWAY_PORT,
    MAX_CONNECTIONS,
    MAX_PORT_CONNECTIONS,
    OPEN,
    OPENED,
    PIECE_BYTES,
    PORTS_RUN,
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
    """Whether the program has closed its sending side."""
    is_ending: bool = False
    """Whether the program is to receive the end of the stream once `unsent` is empty."""
    is_closing: bool = False
    """Whether the connection is to be closed once `unsent` is empty."""
    events: int = 0


class _Streams:
    """The connections of one run id. Bytes are relayed only while the run id is set."""

    def __init__(self, host: Host, selector: selectors.BaseSelector) -> None:
        self._host = host
        self._selector = selector
        self._run_id: int | None = None
        self._open: dict[int, _Connection] = {}

    def end(self) -> None:
        """Close all connections."""
        for connection in list(self._open.values()):
            self._drop(connection)

    def on_frame(self, frame: ConnectionFrame) -> None:
        """Process a frame from the host. Frames for closed connections are dropped."""
        connection = self._open.get(frame.number)
        if frame.run_id != self._run_id or connection is None:
            return
        if frame.kind == DATA:
            connection.unsent += frame.data
            self._write(connection)
        elif frame.kind == TAKEN:
            connection.unread -= frame.taken_bytes
            self._watch(connection)
        elif frame.kind == FINISHED:
            connection.is_ending = True
            self._write(connection)
        elif frame.kind == CLOSED:
            connection.is_closing = True
            self._write(connection)

    def _add(self, number: int, end: socket.socket) -> None:
        end.setblocking(False)
        connection = self._open[number] = _Connection(number, end, bytearray())
        self._tell(OPENED, number)
        self._watch(connection)

    def _on_event(self, connection: _Connection) -> None:
        """Read and write as much as possible without blocking. Called for both kinds of events."""
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
            self._tell(CLOSED, connection.number)
            self._drop(connection)
            return
        if data:
            connection.unread += len(data)
            self._tell(DATA, connection.number, data)
        else:
            connection.is_finished = True
            self._tell(FINISHED, connection.number)
        self._watch(connection)

    def _write(self, connection: _Connection) -> None:
        unsent = connection.unsent
        try:
            count = connection.socket.send(unsent) if unsent else 0
        except BlockingIOError:
            count = 0
        except OSError:  # the program has closed it
            self._tell(CLOSED, connection.number)
            self._drop(connection)
            return
        if count and self._run_id is not None:
            self._host.send_bytes(taken(self._run_id, connection.number, count))
        if unsent:
            del unsent[:count]
        if connection.is_ending and not unsent:
            connection.is_ending = False
            with contextlib.suppress(OSError):  # the program has closed it
                connection.socket.shutdown(socket.SHUT_WR)
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

    def _tell(self, kind: int, number: int, data: bytes = b"") -> None:
        if self._run_id is not None:
            frame = ConnectionFrame(kind, self._run_id, number, data)
            self._host.send_bytes(frame.encode())

    def _drop(self, connection: _Connection) -> None:
        del self._open[connection.number]
        if connection.events:
            self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.close()


class Relay(_Streams):
    """Accepts the connections of programs, and relays them to the gateway."""

    def __init__(self, host: Host, selector: selectors.BaseSelector) -> None:
        super().__init__(host, selector)
        self._numbers = 0
        self._trust = ""
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(("127.0.0.1", GATEWAY_PORT))  # before any program can
        self._listener.listen(BACKLOG)
        selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    def begin(self, run_id: int, trust: str) -> None:
        """Relay the connections of this run from now on. `trust` contains the certificates that
        clients must trust, in PEM. Raises OSError if they cannot be stored."""
        if trust != self._trust:
            with open(f"{TRUST_FILE}.new", "w") as file:
                file.write(trust)
            os.replace(f"{TRUST_FILE}.new", TRUST_FILE)
            self._trust = trust
        self.turn_away()
        self._run_id = run_id

    def end(self) -> None:
        """Close all connections, and relay nothing until `begin`."""
        self._run_id = None
        super().end()

    def turn_away(self) -> None:
        """Close the connections that were not accepted yet. They belong to an earlier program."""
        for _ in range(2 * BACKLOG):  # no more of them can wait
            accepted = self._accepted()
            if accepted is None:
                return
            accepted.close()

    def open(self, end: socket.socket) -> None:
        """Relay the bytes of a socket, as if it were a connection of the program."""
        self._numbers += 1
        self._add(self._numbers, end)

    def _on_connection(self) -> None:
        accepted = self._accepted()
        if accepted is None:
            return
        if self._run_id is None or len(self._open) >= MAX_CONNECTIONS:
            accepted.close()
            return
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else 2 pieces take 40 ms
        self.open(accepted)

    def _accepted(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except OSError:
            return None


LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class Ports(_Streams):
    """Connects to ports on loopback at the host's request."""

    def __init__(self, host: Host, selector: selectors.BaseSelector) -> None:
        super().__init__(host, selector)
        self._run_id = PORTS_RUN
        self._opening: dict[int, socket.socket] = {}

    def end(self) -> None:
        """Close all connections."""
        for number in list(self._opening):
            self._give_up(number)
        super().end()

    def on_frame(self, frame: ConnectionFrame) -> None:
        """Process a frame from the host. Each `OPEN` gets one answer."""
        if frame.kind == OPEN:
            port = int.from_bytes(frame.data, "big")
            are_many = len(self._open) + len(self._opening) >= MAX_PORT_CONNECTIONS
            is_refused = port in (0, GATEWAY_PORT) or are_many or self._host.keep is None
            self._connect(frame.number, port, [] if is_refused else list(LOOPBACK))
        elif frame.kind == CLOSED and frame.number in self._opening:
            self._give_up(frame.number)
            self._tell(CLOSED, frame.number)
        else:
            super().on_frame(frame)

    def _connect(
        self, number: int, port: int, places: list[tuple[socket.AddressFamily, str]]
    ) -> None:
        """Connect to the first of `places` that accepts the connection, without blocking."""
        while places:
            family, address = places.pop(0)
            try:
                end = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue
            end.setblocking(False)
            code = end.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                self._opening[number] = end
                self._selector.register(
                    end,
                    selectors.EVENT_WRITE,
                    lambda: self._on_connected(number, port, places),
                )
                return
            if code == 0:
                self._begin(number, end)
                return
            end.close()
        self._tell(CLOSED, number)

    def _on_connected(
        self, number: int, port: int, places: list[tuple[socket.AddressFamily, str]]
    ) -> None:
        end = self._opening.pop(number)
        self._selector.unregister(end)
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            self._begin(number, end)
            return
        end.close()
        self._connect(number, port, places)

    def _begin(self, number: int, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._add(number, end)

    def _give_up(self, number: int) -> None:
        end = self._opening.pop(number)
        self._selector.unregister(end)
        end.close()


# -- the front of an operator's program ------------------------------------------------------

LAST_WORDS_S = 1.0
"""Maximum number of seconds after the program's end in which its last output is relayed."""

NOT_STARTED = 127
"""Exit code if the program cannot be started, as in shells."""


def front(config: dict[str, Any]) -> NoReturn:
    """Run the configured program until it ends or the host is gone, and then exit."""
    import subprocess  # not at the top: the supervisor starts faster without it

    trust = _first_frame()["trust"]
    selector = selectors.DefaultSelector()
    host = Host()
    relay = Relay(host, selector)
    relay.begin(framing.FRONT_RUN, trust)
    own, its = socket.socketpair()
    relay.open(own)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # it only wakes the loop
    try:
        program = subprocess.Popen(  # noqa: S603 - the operator's own
            config["command"], stdin=its.fileno(), stdout=its.fileno()
        )
    except OSError as error:
        sys.stderr.write(f"It cannot be started: {error.strerror}\n")
        os._exit(NOT_STARTED)
    its.close()

    def on_host() -> None:
        for request in host.read():
            if isinstance(request, framing.ConnectionFrame):
                relay.on_frame(request)

    selector.register(0, selectors.EVENT_READ, on_host)
    selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 1 << 10))
    # This also reaps orphans of the program, because this is the container's first process.
    while not any(ended.pid == program.pid for ended in children.reap()):
        _serve(selector, None)
    ends_at = time.monotonic() + LAST_WORDS_S
    while (left_s := ends_at - time.monotonic()) > 0 and _serve(selector, min(left_s, 0.05)):
        pass
    os._exit(0)


def _first_frame() -> dict[str, Any]:
    """Return the host's first message. The host sends no other message before the program's streams
    are open.
    """
    decoder = framing.Decoder(framing.MAX_REQUEST_BYTES)
    while chunk := os.read(0, CHUNK_BYTES):
        for message in decoder.feed(chunk):
            return message
    os._exit(0)  # the host is gone


def _serve(selector: selectors.BaseSelector, timeout_s: float | None) -> bool:
    """Wait for events and handle them. Return False if there was none within `timeout_s`."""
    events = selector.select(timeout_s)
    for key, _ in events:
        key.data()
    return bool(events)
