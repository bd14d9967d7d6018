"""Frames of streams. A stream connects code on the host with the corresponding code in a guest.

Used on both sides of a container's channel; needs only the standard library. Each stream has a
kind. Each kind belongs to one feature of the engine, its owner, which has code on both sides. The
channel reads only the head of a frame, and passes the body to the owner. Frames from a guest are
hostile, so the owner checks each body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from fumehood.protocol.framing import HEADER, FrameError

STREAM_START = b"\0"
"""The first byte of a stream's frame. JSON never begins with this byte."""

NO_RUN = 0
"""The run id in the frames of streams that belong to a whole container, and not to one of its
runs.
"""

FRONT_RUN = 1
"""The run id in the frames of a front's streams. A front starts a single program of the operator,
so it has only one run.
"""

_HEAD = struct.Struct("!xBI")
"""The head of a stream's frame: the length of the kind's name, and the id of the run. The name and
the body follow.
"""

MAX_HEAD_BYTES = _HEAD.size + 255

MESSAGE_PIECE_BYTES = 64 * 1024
"""Maximum number of bytes in each piece of a long message."""

_MORE, _LAST = b"\0", b"\1"


class StreamFrame(NamedTuple):
    """A frame of one stream: the stream's kind, the id of its run, and the body."""

    kind: str
    run_id: int
    body: bytes

    def encode(self) -> bytes:
        """Return the whole frame as bytes."""
        name = self.kind.encode("ascii")
        length = _HEAD.size + len(name) + len(self.body)
        return b"".join(
            (HEADER.pack(length), _HEAD.pack(len(name), self.run_id), name, self.body)
        )  # fmt: skip

    @classmethod
    def parse(cls, frame: bytes) -> StreamFrame:
        """Parse the bytes of a whole frame, which begin with `STREAM_START`, and return the frame.

        Raises:
            FrameError: the head is incomplete, or has no valid kind.
        """
        if len(frame) < _HEAD.size:
            raise FrameError("a stream's frame is too short")
        length, run_id = _HEAD.unpack_from(frame)
        end = _HEAD.size + length
        name = frame[_HEAD.size : end]
        if not length or len(name) < length or not name.isascii():
            raise FrameError("a stream's frame has no kind")
        return cls(name.decode("ascii"), run_id, frame[end:])


def pieces_of(message: bytes) -> Iterator[bytes]:
    """Cut a message of any length into pieces, and yield them. Each piece fits into the body of a
    frame. A `Joiner` puts the pieces together again.
    """
    for start in range(0, len(message) or 1, MESSAGE_PIECE_BYTES):
        end = start + MESSAGE_PIECE_BYTES
        yield (_LAST if end >= len(message) else _MORE) + message[start:end]


class Joiner:
    """Puts messages together again from the pieces that `pieces_of` has yielded. The length of a
    message is not limited, so the sender must be trusted.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> bytes | None:
        """Add the next piece. Return the complete message if this was its last piece, otherwise
        None.
        """
        self._pieces.append(piece[1:])
        if not piece.startswith(_LAST):
            return None
        message = b"".join(self._pieces)
        self._pieces.clear()
        return message
