"""Connections: many bidirectional byte streams within one stream of a container's channel.

Used on both sides of the channel; needs only the standard library. Invariant: in each direction, at
most `WINDOW_BYTES` of a connection are in transit, unless the two ends have agreed on another
maximum. The sender may send more bytes after the receiver has reported that it has consumed some.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from fumehood.protocol.framing import FrameError

WINDOW_BYTES = 256 * 1024
"""Maximum number of bytes of one connection that may be in transit in one direction."""

MAX_CONNECTIONS = 256
"""Maximum number of concurrent connections that one program may open in a stream."""

PIECE_BYTES = 64 * 1024
"""Maximum number of bytes of a connection in one segment."""

ONLY = 0
"""The number of the connection in a stream that carries only one connection, which is open from the
beginning. In other streams, the connections that a program opens have higher numbers.
"""

OPENED, DATA, TAKEN, FINISHED, CLOSED, OPEN = range(1, 7)
"""Steps of a connection. They are sent as segments and mean:

- `OPENED`: the guest has opened a connection.
- `DATA`: these are the next bytes of the connection.
- `TAKEN`: the receiver has consumed the stated number of bytes, so the sender may send as many
  more.
- `FINISHED`: the sender sends no more bytes.
- `CLOSED`: the connection is closed.
- `OPEN`: the host asks the guest to connect to the port in the data. The guest replies with
  `OPENED` or `CLOSED`.
"""

_HEAD = struct.Struct("!BI")
"""The head of a segment: its step, and the number of its connection. The data follow."""

MAX_SEGMENT_BYTES = _HEAD.size + PIECE_BYTES


class Segment(NamedTuple):
    """One message about a connection, which is a byte stream. It contains a step, such as `DATA` or
    `CLOSED`, the number of the connection, and data.

    One stream of a container's channel carries many connections. A segment is the body of one of
    the stream's frames. It is binary, because encoding JSON would take most of the time of a
    transfer.
    """

    step: int
    number: int
    data: bytes = b""

    def encode(self) -> bytes:
        """Return the segment as bytes, which form the body of a stream's frame."""
        return _HEAD.pack(self.step, self.number) + self.data

    @classmethod
    def parse(cls, body: bytes) -> Segment:
        """Parse the body of a stream's frame.

        Raises:
            FrameError: the body is not a segment.
        """
        if len(body) < _HEAD.size:
            raise FrameError("a connection's segment is too short")
        step, number = _HEAD.unpack_from(body)
        if not OPENED <= step <= OPEN or len(body) > MAX_SEGMENT_BYTES:
            raise FrameError("a connection's segment has no valid step, or is too long")
        return cls(step, number, body[_HEAD.size :])

    @property
    def taken_bytes(self) -> int:
        """The number of consumed bytes that a `TAKEN` segment reports."""
        return int.from_bytes(self.data, "big")


def taken(number: int, count: int) -> Segment:
    """Return the segment that reports that the receiver has consumed `count` bytes of the
    connection with this number.
    """
    return Segment(TAKEN, number, count.to_bytes(4, "big"))
