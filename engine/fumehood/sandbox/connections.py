"""Connections in both directions within one stream of a container's channel, as byte streams.

Host side. Everything received is untrusted. Invariants: at most `WINDOW_BYTES` of one connection
are buffered in either direction. A guest breaks the protocol if it sends more than that, or opens
too many connections. After `Connections.close`, all connections are broken.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.abc
import anyio.lowlevel

from fumehood.protocol.connections import (
    CLOSED,
    DATA,
    FINISHED,
    MAX_CONNECTIONS,
    OPENED,
    PIECE_BYTES,
    TAKEN,
    WINDOW_BYTES,
    Segment,
    taken,
)
from fumehood.protocol.framing import FrameError
from fumehood.sandbox.streams import StreamPort


class Connection(anyio.abc.ByteStream):
    """One connection between the host and a program in the container, as a byte stream."""

    def __init__(
        self,
        connections: Connections,
        number: int,
        room: int = WINDOW_BYTES,
        window: int = WINDOW_BYTES,
    ) -> None:
        """Create the host's end of a connection.

        `number` identifies the connection within `connections`. `room` is the number of bytes that
        the host may send before the guest reports that the program has read some. `window` is the
        maximum number of bytes that are sent but not yet reported as read.
        """
        self._connections = connections
        self._number = number
        self._window = window
        self._received = bytearray()
        self._untold = 0
        """Number of bytes that were read from this stream, but not yet reported to the guest as
        read.
        """
        self._room = room
        self._is_finished = False
        self._is_gone = False
        self.on_gone: Callable[[], object] = lambda: None
        """Called when the program has closed the connection, or when the program's run has
        ended.
        """
        self._change = anyio.Event()

    async def receive(self, max_bytes: int = PIECE_BYTES) -> bytes:
        """Wait for the next bytes from the program, and return at most `max_bytes` of them.

        Raises:
            EndOfStream: the program sends no more bytes.
            BrokenResourceError: the connection is closed or broken.
        """
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
            self._connections.send(taken(self._number, self._untold))
            self._untold = 0
        return data

    async def send(self, item: bytes) -> None:
        """Send all bytes of `item` to the program. Wait while the program does not read.

        Raises:
            BrokenResourceError: the connection is closed or broken.
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
        """Do nothing. The program reads the end of the stream only after `aclose`."""

    async def aclose(self) -> None:
        """Close the connection. The program can still read the bytes that were sent before."""
        self.on_gone = lambda: None
        if not self._is_gone:
            self._tell(CLOSED)
        self.lose()
        self._connections.forget(self._number)

    def on_segment(self, segment: Segment) -> None:
        """Process a segment of this connection from the guest. Raises FrameError if the segment
        breaks the protocol.
        """
        if segment.step == DATA and not self._is_finished:
            self._received += segment.data
            if len(self._received) + self._untold > WINDOW_BYTES:
                raise FrameError("more bytes of a connection than it may send")
        elif segment.step == TAKEN:
            self._room += segment.taken_bytes
            if self._room > self._window:
                raise FrameError("more bytes of a connection were taken than were sent")
        elif segment.step == FINISHED:
            self._is_finished = True
        elif segment.step == CLOSED:
            self.lose()
            self._connections.forget(self._number)
        else:
            raise FrameError("a connection's segment in the wrong place")
        self._wake()

    def lose(self) -> None:
        """Break the connection, and discard bytes that were received but not read. Then call
        `on_gone`, the function that the connection's user has set for this case. If the connection
        is already broken, do nothing.
        """
        if not self._is_gone:
            self._is_gone = True
            self._received.clear()
            self._wake()
            self.on_gone()

    def _wake(self) -> None:
        self._change.set()
        self._change = anyio.Event()

    def _tell(self, step: int, data: bytes = b"") -> None:
        self._connections.send(Segment(step, self._number, data))


class Connections:
    """All connections of one stream. `on_open` is called with each new connection that the guest
    opens, and must not block.
    """

    def __init__(self, port: StreamPort, on_open: Callable[[Connection], None]) -> None:
        self._port = port
        self._on_open = on_open
        self._open: dict[int, Connection] = {}
        self._last = 0
        self._is_closed = False

    def send(self, segment: Segment) -> None:
        """Send a segment to the guest. Do nothing after `close`."""
        if not self._is_closed:
            self._port.send(segment.encode())

    def on_frame(self, body: bytes) -> None:
        """Parse a segment from the guest and pass it to its connection. Raises FrameError if the
        segment breaks the protocol.
        """
        segment = Segment.parse(body)
        if not self._is_closed:
            self._on_segment(segment)

    def _on_segment(self, segment: Segment) -> None:
        if segment.step == OPENED:
            if segment.number <= self._last or len(self._open) >= 2 * MAX_CONNECTIONS:
                raise FrameError("a connection that cannot be new")
            self._last = segment.number
            opened = self._open[segment.number] = Connection(self, segment.number)
            self._on_open(opened)
        elif segment.number in self._open:
            self._open[segment.number].on_segment(segment)
        elif not 0 < segment.number <= self._last:
            raise FrameError("a connection that was never opened")

    def forget(self, number: int) -> None:
        """Remove a closed connection. Later segments with its number are ignored."""
        self._open.pop(number, None)

    def close(self) -> None:
        """Break all connections. Segments that arrive later are ignored."""
        self._is_closed = True
        for connection in list(self._open.values()):
            connection.lose()
        self._open.clear()
