"""Connections over a stream: the host reads and writes the bytes of sockets in the container.

Guest side, used by the ends of streams and by the front of an operator's program. Invariant: at
most `WINDOW_BYTES` of one connection are in transit in each direction, so no program can fill the
memory of this process or the channel.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from dataclasses import dataclass

from fumehood.guest.container.host import Host
from fumehood.protocol.connections import (
    CLOSED,
    DATA,
    FINISHED,
    OPENED,
    PIECE_BYTES,
    TAKEN,
    WINDOW_BYTES,
    Segment,
    taken,
)
from fumehood.protocol.streams import StreamFrame


@dataclass(eq=False)
class _Connection:
    number: int
    socket: socket.socket
    unsent: bytearray
    """Bytes from the host that were not yet written to the program's socket."""
    unread: int = 0
    """Number of bytes that were sent to the host and that the host has not consumed yet."""
    is_finished: bool = False
    """Whether the program has announced that it sends no more bytes."""
    is_ending: bool = False
    """Whether the program must be told that the host sends no more bytes, once `unsent` is
    empty.
    """
    is_closing: bool = False
    """Whether the connection must be closed once `unsent` is empty."""
    events: int = 0


class Connections:
    """The connections of one stream. Bytes are relayed only while `run_id` is set to the id of a
    run.
    """

    def __init__(self, kind: str, host: Host, selector: selectors.BaseSelector) -> None:
        self._kind = kind
        self._host = host
        self._selector = selector
        self.run_id: int | None = None
        self._open: dict[int, _Connection] = {}

    @property
    def count(self) -> int:
        """The number of connections."""
        return len(self._open)

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open.values()):
            self._drop(connection)

    def on_frame(self, frame: StreamFrame) -> None:
        """Process a frame from the host. Drop the frame if it belongs to another run or to a closed
        connection.
        """
        if frame.run_id == self.run_id:
            self.on_segment(Segment.parse(frame.body))

    def on_segment(self, segment: Segment) -> None:
        """Process a segment of a connection from the host."""
        connection = self._open.get(segment.number)
        if connection is None:
            return
        if segment.step == DATA:
            connection.unsent += segment.data
            self._write(connection)
        elif segment.step == TAKEN:
            connection.unread -= segment.taken_bytes
            self._watch(connection)
        elif segment.step == FINISHED:
            connection.is_ending = True
            self._write(connection)
        elif segment.step == CLOSED:
            connection.is_closing = True
            self._write(connection)

    def add(self, number: int, end: socket.socket) -> None:
        """Relay the bytes of the socket `end`, as the connection with this number."""
        end.setblocking(False)
        connection = self._open[number] = _Connection(number, end, bytearray())
        self.tell(Segment(OPENED, number))
        self._watch(connection)

    def _on_event(self, connection: _Connection) -> None:
        """Read and write as much as possible without blocking, because the connection's socket is
        readable or writable.
        """
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
            self.tell(Segment(CLOSED, connection.number))
            self._drop(connection)
            return
        if data:
            connection.unread += len(data)
            self.tell(Segment(DATA, connection.number, data))
        else:
            connection.is_finished = True
            self.tell(Segment(FINISHED, connection.number))
        self._watch(connection)

    def _write(self, connection: _Connection) -> None:
        unsent = connection.unsent
        try:
            count = connection.socket.send(unsent) if unsent else 0
        except BlockingIOError:
            count = 0
        except OSError:  # the program has closed it
            self.tell(Segment(CLOSED, connection.number))
            self._drop(connection)
            return
        if count:
            self.tell(taken(connection.number, count))
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

    def tell(self, segment: Segment) -> None:
        """Send a segment of a connection to the host, if `run_id` is set."""
        if self.run_id is not None:
            self._host.send_frame(StreamFrame(self._kind, self.run_id, segment.encode()))

    def _drop(self, connection: _Connection) -> None:
        del self._open[connection.number]
        if connection.events:
            self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.close()
