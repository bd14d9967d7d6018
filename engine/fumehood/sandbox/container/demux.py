"""Docker's way of putting two streams into one: records with a header of eight bytes.

Host side, pure. Docker itself makes the headers, so a wrong one means that this is no attached
stream. Invariant: nothing is kept but a piece of one header; a record's bytes are handed on as
they come, however long it says it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

HEADER = struct.Struct("!BxxxI")
"""*Source*: Docker Engine API, ContainerAttach, "Stream format"."""

STDOUT, STDERR = 1, 2
MAX_RECORD_BYTES = 16 << 20
"""Docker makes records of 32 KB. A length far over that is not one."""


class NotMultiplexed(ValueError):
    """The peer does not send Docker's records."""


class Demultiplexer:
    """Takes chunks of the stream; gives pieces of stdout and stderr."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = STDOUT
        self._left = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """The stream's number and its next bytes, in order.

        Raises:
            NotMultiplexed: a header that Docker never sends.
        """
        rest = memoryview(chunk)
        while rest:
            if self._left:
                piece, rest = rest[: self._left], rest[self._left :]
                self._left -= len(piece)
                yield self._stream, bytes(piece)
                continue
            missing = HEADER.size - len(self._header)
            self._header += rest[:missing]
            rest = rest[missing:]
            if len(self._header) == HEADER.size:
                self._begin()

    def _begin(self) -> None:
        self._stream, self._left = HEADER.unpack(self._header)
        self._header.clear()
        if self._stream not in (STDOUT, STDERR) or self._left > MAX_RECORD_BYTES:
            raise NotMultiplexed("this is not Docker's attached stream")
