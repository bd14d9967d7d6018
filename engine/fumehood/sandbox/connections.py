"""A program's connections to the gateway, and connections to a session's ports, as byte streams.

Host side, above a container's channel. Everything received is untrusted. Invariants: at most
`WINDOW_BYTES` of one connection are buffered in either direction. A guest that sends more, or opens
too many connections, breaks the protocol. After `close` every stream is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import anyio.abc
import anyio.lowlevel

from fumehood.core.errors import InvalidParams, NetworkError, SandboxUnavailable
from fumehood.core.hosts import MAX_PORT
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
    WINDOW_BYTES,
    ConnectionFrame,
    FrameError,
    taken,
)


class Connection(anyio.abc.ByteStream):
    """One connection of a program."""

    def __init__(
        self,
        connections: Connections,
        number: int,
        room: int = WINDOW_BYTES,
        window: int = WINDOW_BYTES,
    ) -> None:
        """`room` is how many bytes may be sent now, before the program has read any. `window` is
        the maximum number of sent bytes that the program has not read.
        """
        self._connections = connections
        self._number = number
        self._window = window
        self._received = bytearray()
        self._untold = 0
        """Bytes read from this stream that have not been reported to the guest."""
        self._room = room
        self._is_finished = False
        self._is_gone = False
        self.on_gone: Callable[[], object] = lambda: None
        """Called when the program has closed the connection, or its run has ended."""
        self._change = anyio.Event()

    async def receive(self, max_bytes: int = PIECE_BYTES) -> bytes:
        """Return the next bytes. Raises the same errors as anyio's streams."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        while not self._received:
            if self._is_gone:
                raise anyio.BrokenResourceError
            if self._is_finished:
                raise anyio.EndOfStream
            await self._change.wait()
        data = bytes(self._received[:max_bytes])
        del self._received[:max_bytes]
        self._untold += len(data)
        if not self._received or self._untold >= WINDOW_BYTES // 2:
            self._connections.send(taken(self._connections.run_id, self._number, self._untold))
            self._untold = 0
        return data

    async def send(self, item: bytes) -> None:
        """Send all bytes. Wait while the program does not read. Raises the same errors as anyio's
        streams.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        view = memoryview(item)
        while view:
            if self._is_gone:
                raise anyio.BrokenResourceError
            if not self._room:
                await self._change.wait()
                continue
            piece = bytes(view[: min(self._room, PIECE_BYTES)])
            view = view[len(piece) :]
            self._room -= len(piece)
            self._tell(DATA, piece)

    async def send_eof(self) -> None:
        """Do nothing: only `aclose` shows the program the end of the stream."""

    async def aclose(self) -> None:
        """Close the connection. The program can still read what was sent."""
        self.on_gone = lambda: None
        if not self._is_gone:
            self._tell(CLOSED)
        self.lose()
        self._connections.forget(self._number)

    def on_frame(self, frame: ConnectionFrame) -> None:
        """Process a frame from the guest. Raises FrameError if the frame breaks the protocol."""
        if frame.kind == DATA and not self._is_finished:
            self._received += frame.data
            if len(self._received) + self._untold > WINDOW_BYTES:
                raise FrameError("more bytes of a connection than it may send")
        elif frame.kind == TAKEN:
            self._room += frame.taken_bytes
            if self._room > self._window:
                raise FrameError("more bytes of a connection were taken than were sent")
        elif frame.kind == FINISHED:
            self._is_finished = True
        elif frame.kind == CLOSED:
            self.lose()
            self._connections.forget(self._number)
        else:
            raise FrameError("a connection's frame in the wrong place")
        self._wake()

    def lose(self) -> None:
        """Break the connection and discard received bytes."""
        if not self._is_gone:
            self._is_gone = True
            self._received.clear()
            self._wake()
            self.on_gone()

    def _wake(self) -> None:
        self._change.set()
        self._change = anyio.Event()

    def _tell(self, kind: int, data: bytes = b"") -> None:
        frame = ConnectionFrame(kind, self._connections.run_id, self._number, data)
        self._connections.send(frame.encode())


class Connections:
    """All connections of one run. `on_open` receives each new connection, and must not block."""

    def __init__(
        self, run_id: int, send: Callable[[bytes], None], on_open: Callable[[Connection], None]
    ) -> None:
        self.run_id = run_id
        self.send = send
        self._on_open = on_open
        self._open: dict[int, Connection] = {}
        self._last = 0
        self._is_closed = False

    def on_frame(self, frame: ConnectionFrame) -> None:
        """Process a frame from the guest. Raises FrameError if the frame breaks the protocol."""
        if frame.run_id != self.run_id:
            raise FrameError("a connection of another run")
        if self._is_closed:
            return
        if frame.kind == OPENED:
            if frame.number <= self._last or len(self._open) >= 2 * MAX_CONNECTIONS:
                raise FrameError("a connection that cannot be new")
            self._last = frame.number
            opened = self._open[frame.number] = Connection(self, frame.number)
            self._on_open(opened)
        elif frame.number in self._open:
            self._open[frame.number].on_frame(frame)
        elif not 0 < frame.number <= self._last:
            raise FrameError("a connection that was never opened")

    def forget(self, number: int) -> None:
        """Ignore further frames of a closed connection."""
        self._open.pop(number, None)

    def close(self) -> None:
        """Break all connections."""
        self._is_closed = True
        self.send = lambda frame: None
        for connection in list(self._open.values()):
            connection.lose()
        self._open.clear()


CONNECT_S = 10.0
"""Maximum seconds to connect to a port. A busy server may not accept the connection at once."""


class PortConnection(Connection):
    """One connection to a port of a session."""

    async def send_eof(self) -> None:
        """Let the program read the end of the stream. The program can still send."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if not self._is_gone:
            self._tell(FINISHED)


class PortConnections(Connections):
    """All connections to the ports of one session's container. The host opens and numbers them."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__(PORTS_RUN, send, lambda connection: None)
        self._opening: dict[int, asyncio.Future[PortConnection] | None] = {}
        """Number of each requested connection that the guest has not answered → the waiting caller;
        None if the caller has given up."""

    async def connect(self, port: int) -> PortConnection:
        """Connect to a port on the loopback of the container.

        Raises:
            InvalidParams: `port` is the gateway's port, or not a valid port number.
            NetworkError: nothing listens on the port, or nothing accepts in time.
            SandboxUnavailable: there are too many connections, or the container has ended.
        """
        if not 0 < port <= MAX_PORT or port == GATEWAY_PORT:
            raise InvalidParams(f"A port is from 1 to {MAX_PORT}, and not {GATEWAY_PORT}.")
        if len(self._open) + len(self._opening) >= MAX_PORT_CONNECTIONS:
            raise SandboxUnavailable(
                f"The session has {MAX_PORT_CONNECTIONS} connections already.", retry_after_ms=1000
            )
        if self._is_closed:
            raise _ended()
        self._last += 1
        number = self._last
        waiting: asyncio.Future[PortConnection] = asyncio.get_running_loop().create_future()
        self._opening[number] = waiting
        self.send(ConnectionFrame(OPEN, PORTS_RUN, number, port.to_bytes(2, "big")).encode())
        with anyio.move_on_after(CONNECT_S):
            try:
                return await waiting
            except asyncio.CancelledError:
                self._drop(number)
                raise
        raise NetworkError(f"What listens on port {port} does not accept a connection.")

    def on_frame(self, frame: ConnectionFrame) -> None:
        """Process a frame from the guest. Raises FrameError if the frame breaks the protocol."""
        if self._is_closed:
            return
        if frame.number not in self._opening:
            if frame.kind == OPENED:
                raise FrameError("a connection that nobody asked for")
            super().on_frame(frame)
            return
        waiting = self._opening.pop(frame.number)
        if frame.kind not in (OPENED, CLOSED):
            raise FrameError("a connection's frame before it was opened")
        if waiting is None or waiting.done():
            return
        if frame.kind == CLOSED:
            waiting.set_exception(NetworkError("Nothing listens on this port."))
        else:
            opened = self._open[frame.number] = PortConnection(self, frame.number)
            waiting.set_result(opened)

    def drop(self) -> None:
        """Close all connections. New connections can still be opened."""
        for number in [*self._opening, *self._open]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        self.send(ConnectionFrame(CLOSED, PORTS_RUN, number).encode())
        opened = self._open.pop(number, None)
        if opened is not None:
            opened.lose()
        elif number in self._opening:
            waiting, self._opening[number] = self._opening[number], None  # the answer comes later
            if waiting is not None and not waiting.done():
                waiting.set_exception(_ended())

    def close(self) -> None:
        """Break all connections. No connection can be opened afterwards."""
        super().close()
        for waiting in self._opening.values():
            if waiting is not None and not waiting.done():
                waiting.set_exception(_ended())
        self._opening.clear()


def _ended() -> SandboxUnavailable:
    return SandboxUnavailable("The session's container has ended.", retry_after_ms=1000)
