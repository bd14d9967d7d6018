"""One standard stream of a program: read as it comes, counted, decoded, passed on in pieces.

Guest side, used by the supervisor. Invariant: never more than the limit of a stream is kept or
passed on, and a character is never cut where a read or a frame ends.
"""

from __future__ import annotations

import codecs
import os

CHUNK_BYTES = 1 << 16
FRAME_CHARACTERS = 32 * 1024


class Stream:
    """The supervisor's end of a program's standard output or error."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self.descriptor = descriptor
        self.received_bytes = 0
        self.is_over = False
        """The program wrote more than its limit."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def read(self, limit_bytes: int) -> bool:
        """Read the available data; False if there is none or the other end is closed."""
        try:
            chunk = os.read(self.descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            return False
        room = max(0, limit_bytes - self.received_bytes)
        self.received_bytes += len(chunk)
        self.is_over = self.received_bytes > limit_bytes
        self._text += self._decoder.decode(chunk[:room])
        return True

    def drain(self, limit_bytes: int) -> None:
        """Read the data that a dead program left in the pipe."""
        while not self.is_over and self.read(limit_bytes):
            pass

    def take(self, *, last: bool = False) -> list[str]:
        """The text since the last time, in pieces that fit a frame; half a character waits."""
        if last and not self.is_over:  # what is cut off by the limit is not wrong UTF-8
            self._text += self._decoder.decode(b"", final=True)
        text, self._text = self._text, ""
        return [
            text[start : start + FRAME_CHARACTERS]
            for start in range(0, len(text), FRAME_CHARACTERS)
        ]
