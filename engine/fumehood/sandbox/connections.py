"""The connections of one program to the gateway, and those to the ports of a session, as byte
streams.

Host side, above a container's channel. Everything received is untrusted. Invariants: at most
`WINDOW_BYTES` of one connection are kept in either direction, and a guest that sends more, or opens
more than `MAX_CONNECTIONS`, breaks the protocol; after `close` every stream is broken.
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
        """`room` bytes may be sent before the program takes any, and `window` at most."""
        self._connections = connections
        self._number = number
        self._window = window
        self._received = bytearray()
        self._untold = 0
        """Bytes that were taken since the guest was told."""
        self._room = room
        self._is_finished = False
        self._is_gone = False
        self.on_gone: Callable[[], object] = lambda: None
        """Called when the program, or its run, has ended it."""
        self._change = anyio.Event()

    async def receive(self, max_bytes: int = PIECE_BYTES) -> bytes:
        """Return the next bytes. Raises as anyio's streams do."""
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
        """Send bytes, as far as the program reads them. Raises as anyio's streams do."""
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
        """Do nothing: a program is told the end of a stream by its closing."""

    async def aclose(self) -> None:
        """Close it, once the program has read what was sent."""
        self.on_gone = lambda: None
        if not self._is_gone:
            self._tell(CLOSED)
        self.lose()
        self._connections.forget(self._number)

    def on_frame(self, frame: ConnectionFrame) -> None:
        """Take a frame of the guest. Raises FrameError."""
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
        """Break it."""
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
    """All connections of one run. `on_open` receives each new one, and must not block."""

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
        """Take a frame of the guest. Raises FrameError."""
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
        """Drop what still comes for a connection that is gone."""
        self._open.pop(number, None)

    def close(self) -> None:
        """Break all connections."""
        self._is_closed = True
        self.send = lambda frame: None
        for connection in list(self._open.values()):
            connection.lose()
        self._open.clear()


CONNECT_S = 10.0
"""Seconds to connect to a port. What listens there may not accept for a while."""


class PortConnection(Connection):
    """One connection to a port of a session."""

    async def send_eof(self) -> None:
        """Let the program read the end of what was sent. It can still answer."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if not self._is_gone:
            self._tell(FINISHED)


class PortConnections(Connections):
    """All connections to the ports of one session's container. The host opens and numbers them."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__(PORTS_RUN, send, lambda connection: None)
        self._opening: dict[int, asyncio.Future[PortConnection] | None] = {}
        """Those that the guest has not answered; None if nobody waits for it any more."""

    async def connect(self, port: int) -> PortConnection:
        """Connect to a port on the loopback of the container.

        Raises:
            InvalidParams: it is the gateway's port, or not one at all.
            NetworkError: nothing listens there.
            SandboxUnavailable: there are too many connections, or the guest does not answer.
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
        """Take a frame of the guest. Raises FrameError."""
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
        """Close all connections."""
        for number in [*self._opening, *self._open]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        self.send(ConnectionFrame(CLOSED, PORTS_RUN, number).encode())
        opened = self._open.pop(number, None)
        if opened is not None:
            opened.lose()
        elif number in self._opening:
            waiting, self._opening[number] = self._opening[number], None  # it is answered later
            if waiting is not None and not waiting.done():
                waiting.set_exception(_ended())

    def close(self) -> None:
        """Break all connections."""
        super().close()
        for waiting in self._opening.values():
            if waiting is not None and not waiting.done():
                waiting.set_exception(_ended())
        self._opening.clear()


def _ended() -> SandboxUnavailable:
    return SandboxUnavailable("The session's container has ended.", retry_after_ms=1000)
