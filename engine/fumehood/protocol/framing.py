"""Frames: how host, supervisor and child cut a byte stream into messages.

A frame consists of a length, in four big-endian bytes, and a body of that many bytes. The body is
strict JSON, whose value is an object. This module is used on both sides of every wall, and needs
only the standard library.

Invariant: a reader never buffers more bytes than the largest allowed frame has; a length over this
limit is refused before a byte of the body is kept.
"""

from __future__ import annotations

import struct
from typing import Any

from fumehood.protocol import strict_json

HEADER = struct.Struct("!I")

MAX_REQUEST_BYTES = 1 << 20
"""Maximum size of a frame to a guest, in bytes. A guest that receives a larger frame ends
itself.
"""

MAX_CALLS = 1000
"""Maximum number of tool calls of one program."""

MAX_OPEN_CALLS = 8
"""Maximum number of concurrent tool calls of one program."""

MAX_REPORTS = 1000
"""Maximum number of progress reports of one call. Later reports are dropped."""

MAX_REPORT_CHARACTERS = 200
"""Maximum length of a short text that a guest reports, such as the message of a progress report."""


MAX_PROCESSES = 16
"""Maximum number of registered processes that run in a session. The records of as many ended
processes are kept.
"""

MAX_TIME_NS = (1 << 63) - 1
"""Largest time of a file that is reported, in nanoseconds before or after 1970. Programs may set
any time, so it must be limited.
"""

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size in bytes of the first line and the headers of an HTTP message together."""

MAX_DIRECTORY_DEPTH = 64
"""Maximum number of levels of nested directories in a workspace or a project."""

MAX_INPUT_BYTES = 64 * 1024
"""Maximum number of bytes that one request may write to a registered process's standard input."""

OUTPUT_PIECE_BYTES = 64 * 1024
"""Maximum number of bytes of a registered process's output in one answer."""

GATEWAY_PORT = 3128
"""The port on a container's loopback interface at which programs reach the gateway as an HTTP
proxy.
"""

TRUST_DIRECTORY = "/run/fumehood"
"""The directory of a container that programs can read, but only the container's supervisor can
write.
"""

TRUST_FILE = f"{TRUST_DIRECTORY}/trust.pem"
"""The file with the certificates that HTTP clients in the container should trust."""

MAX_PORT_CONNECTIONS = 64
"""Maximum number of concurrent connections to the ports of one session."""


OF_WORDS = "".join(map(chr, range(0x21, 0x7F)))
"""The characters that `whole_words` regards as parts of a word. These are all characters that a
secret key may contain.
"""

MAX_KEY_CHARACTERS = 4096
"""Length in characters of the longest secret key that `whole_words` removes completely. It is
enough for a private RSA key of 4096 bits in one line, as in a `repr`.
"""


def whole_words(text: str, most: int) -> str:
    """Return a text cut to at most `most` characters. A text that was cut ends with "…".

    The cut is at the end of a word. If the last word is longer than `MAX_KEY_CHARACTERS`, only this
    number of characters is removed from its end.
    """
    if len(text) <= most:
        return text
    # No part of a secret key may remain. The host redacts keys only later, and could not recognize
    # half a key.
    kept = text[: most - 1]
    return f"{before_word(kept) if text[most - 1] in OF_WORDS else kept}…"


def before_word(text: str) -> str:
    """Return `text`, which was cut off, without its last word, which may be incomplete. If this
    word is longer than `MAX_KEY_CHARACTERS`, remove only its last `MAX_KEY_CHARACTERS` characters.
    """
    return max(text.rstrip(OF_WORDS), text[:-MAX_KEY_CHARACTERS], key=len)


class FrameError(ValueError):
    """The other end sent an invalid frame, so the channel cannot be used any further."""


class FrameTooLarge(FrameError):
    """A frame announces a body that is longer than the reader's limit."""


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame."""
    body = strict_json.dumps(message)
    return HEADER.pack(len(body)) + body


class Decoder:
    """Splits a byte stream, which arrives in chunks, into messages.

    `max_bytes` is the maximum size of each frame's body; the attribute may be changed between
    frames. `last_size` is the length of the newest complete body in bytes.
    """

    def __init__(self, max_bytes: int, max_depth: int = strict_json.MAX_DEPTH) -> None:
        self.max_bytes = max_bytes
        self._max_depth = max_depth
        self.last_size = 0
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """Add the next chunk of the stream. Return the messages that are now complete, oldest
        first.

        Raises:
            FrameTooLarge: the length of a frame exceeds `max_bytes`.
            FrameError: a body is not a strict JSON object.
        """
        return [parse_body(body, self._max_depth) for body in self.bodies(chunk)]

    def bodies(self, chunk: bytes) -> list[bytes]:
        """Add the next chunk of the stream. Return the bodies of frames that are now complete,
        unparsed, oldest first. This method is for callers that parse bodies in another way than
        `feed`.

        Raises:
            FrameTooLarge: the length of a frame exceeds `max_bytes`.
        """
        self._buffer += chunk
        bodies: list[bytes] = []
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            if length > self.max_bytes:
                raise FrameTooLarge(f"a frame of {length} bytes, {self.max_bytes} are allowed")
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[HEADER.size : end]))
            self.last_size = length
            del self._buffer[:end]
        return bodies


def parse_body(body: bytes, max_depth: int = strict_json.MAX_DEPTH) -> dict[str, Any]:
    """Parse the body of a frame, and return the message in it. `max_depth` is the maximum number of
    levels of nesting.

    Raises:
        FrameError: the body is not a strict JSON object.
    """
    try:
        message = strict_json.loads(body, max_depth=max_depth)
    except strict_json.StrictJsonError as error:
        raise FrameError(f"a frame is {error}") from None
    if not isinstance(message, dict):
        raise FrameError("a frame holds no object")
    return message
