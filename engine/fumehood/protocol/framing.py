"""Frames: how host, supervisor and child cut a byte stream into messages.

A frame is a four-byte big-endian length and that many bytes of strict JSON, whose value is an
object. This module is used on both sides of every wall, and needs only the standard library.

Invariant: a reader never buffers more unaccepted bytes than one frame may contain; a length over
that limit is refused before a byte of the body is kept.
"""

from __future__ import annotations

import struct
from typing import Any

from fumehood.protocol import strict_json

HEADER = struct.Struct("!I")

MAX_REQUEST_BYTES = 1 << 20
"""Maximum size of a frame to a guest. A guest that receives a larger frame ends itself."""

MAX_CALLS = 1000
"""Maximum number of tool calls of one program."""

MAX_OPEN_CALLS = 8
"""Maximum number of concurrent tool calls of one program."""

MAX_REPORTS = 1000
"""Maximum number of progress reports of one call. Later reports are dropped."""

MAX_REPORT_CHARACTERS = 200
"""Maximum length of a short text that a guest reports, such as the message of a progress report."""


MAX_PROCESSES = 16
"""Maximum number of running registered processes in a session. As many ended processes are kept."""

MAX_TIME_NS = (1 << 63) - 1
"""Largest file time that is reported, in nanoseconds before or after 1970. Programs may set any
time."""

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the first line and the headers of an HTTP message."""

MAX_DIRECTORY_DEPTH = 64
"""Maximum number of levels of nested directories in a workspace or a project."""

MAX_INPUT_BYTES = 64 * 1024
"""Maximum number of bytes for a registered process's standard input in one request."""

OUTPUT_PIECE_BYTES = 64 * 1024
"""Maximum number of bytes of a registered process's output in one answer."""

GATEWAY_PORT = 3128
"""The loopback port in a container where programs reach the gateway as an HTTP proxy."""

TRUST_DIRECTORY = "/run/fumehood"
"""A directory of a container that programs can read and only its supervisor can write."""

TRUST_FILE = f"{TRUST_DIRECTORY}/trust.pem"
"""The file with the certificates that HTTP clients in the container should trust."""

MAX_PORT_CONNECTIONS = 64
"""Maximum number of concurrent connections to the ports of one session."""


OF_WORDS = "".join(map(chr, range(0x21, 0x7F)))
"""The characters that `whole_words` counts as parts of a word: all characters that a secret key may
contain."""

MAX_KEY_CHARACTERS = 4096
"""Length of the longest secret key that a cut removes completely: a private RSA key of 4096 bits in
one line, as in a `repr`."""


def whole_words(text: str, most: int) -> str:
    """Return a text cut to at most `most` characters. A cut text ends with "…".

    The text is cut at the end of a word, so that an incomplete secret key never remains. The host
    redacts keys later, and could not recognize half a key. If the cut word is longer than any key,
    only the length of the longest key is removed from the word.
    """
    if len(text) <= most:
        return text
    kept = text[: most - 1]
    return f"{before_word(kept) if text[most - 1] in OF_WORDS else kept}…"


def before_word(text: str) -> str:
    """Return a cut text without its incomplete last word. If that word is longer than
    `MAX_KEY_CHARACTERS`, only its last `MAX_KEY_CHARACTERS` characters are removed.
    """
    return max(text.rstrip(OF_WORDS), text[:-MAX_KEY_CHARACTERS], key=len)


class FrameError(ValueError):
    """The peer sent an invalid frame; the channel cannot be used any further."""


class FrameTooLarge(FrameError):
    """The announced length exceeds the reader's limit."""


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
        """Add a chunk; return the messages that it completed, oldest first.

        Raises:
            FrameTooLarge: the length of a frame exceeds `max_bytes`.
            FrameError: a body is not a strict JSON object.
        """
        return [parse_body(body, self._max_depth) for body in self.bodies(chunk)]

    def bodies(self, chunk: bytes) -> list[bytes]:
        """Add a chunk; return the unparsed bodies that it completed, oldest first.

        This method is for callers that parse bodies in another way.

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
    """Parse the message in a frame's body.

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
