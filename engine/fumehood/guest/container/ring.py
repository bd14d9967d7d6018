"""The last megabyte that a registered process printed.

Guest side. The keeper writes it and the supervisor reads it, without a message between them: it is
an anonymous file that both have open. Invariant: what was overwritten during a read is not part of
the answer.
"""

from __future__ import annotations

import codecs
import os
import struct
from typing import NamedTuple

RING_BYTES = 1 << 20

_POSITION = struct.Struct("!Q")
_WRITTEN, _ANNOUNCED = RING_BYTES, RING_BYTES + _POSITION.size
"""Places of the number of bytes that were written, and of those that are being written."""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""The bytes of a UTF-8 character after its first."""


class Piece(NamedTuple):
    """A part of the output. `skipped` bytes before it are not there any more, and `offset` is
    where the next part begins.
    """

    text: str
    offset: int
    skipped: int
    is_last: bool


class Ring:
    """The end of an output of any length."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("output", os.MFD_CLOEXEC)
        self._count = 0

    def append(self, data: bytes) -> None:
        """Add bytes, fewer than `RING_BYTES`. Used by the keeper."""
        start = self._count % RING_BYTES
        self._count += len(data)
        self._set(_ANNOUNCED)
        room = RING_BYTES - start
        os.pwrite(self.descriptor, data[:room], start)
        if len(data) > room:
            os.pwrite(self.descriptor, data[room:], 0)
        self._set(_WRITTEN)

    def read(self, after: int, most_bytes: int, *, is_over: bool) -> Piece:
        """Return the text from a byte on, or from the first that is still there. `is_over` says
        that nothing will be appended. A character is never cut in two.
        """
        kept_bytes = RING_BYTES
        while True:
            end = self._get(_WRITTEN)
            start = min(max(after, end - kept_bytes, 0), end)
            data = self._copy(start, min(end - start, most_bytes))
            lost = min(max(0, self._get(_ANNOUNCED) - RING_BYTES - start), len(data))
            if lost < len(data) or not data or kept_bytes <= most_bytes:
                break
            kept_bytes //= 4  # it is overwritten faster than read
        if start + lost > after:  # the first character may have begun before
            rest = data[lost : lost + 3]
            lost += len(rest) - len(rest.lstrip(_CONTINUATION))
        data = data[lost:]
        start += lost
        is_last = is_over and start + len(data) == end
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, final=is_last)
        offset = start + len(data) - len(decoder.getstate()[0])
        return Piece(text, offset, max(0, start - after), is_last)

    def close(self) -> None:
        """Forget it."""
        os.close(self.descriptor)

    def _copy(self, start: int, count: int) -> bytes:
        place = start % RING_BYTES
        first = os.pread(self.descriptor, min(count, RING_BYTES - place), place)
        return first + os.pread(self.descriptor, count - len(first), 0)

    def _set(self, place: int) -> None:
        os.pwrite(self.descriptor, _POSITION.pack(self._count), place)

    def _get(self, place: int) -> int:
        return int.from_bytes(os.pread(self.descriptor, _POSITION.size, place), "big")
