"""Server-sent events: conversion between events and bytes, for the daemon and for clients.

This module does no I/O. *Source*: the HTML standard, "Server-sent events". Invariant: the decoded
events do not depend on how the bytes are split into chunks.
"""

from __future__ import annotations

from secrets import randbelow
from typing import NamedTuple

MEDIA_TYPE = "text/event-stream"

MIN_RETRY_MS, RETRY_SPREAD_MS = 1000, 2000
"""Minimum milliseconds before a client reconnects, and the range of a random addition, so that
clients do not all reconnect at the same time."""


class SseError(ValueError):
    """The received bytes are not server-sent events."""


class Frame(NamedTuple):
    """One server-sent event."""

    kind: str
    id: str
    data: bytes


def retry() -> bytes:
    """Return the field that sets how long a client waits before it reconnects."""
    return b"retry: %d\n\n" % (MIN_RETRY_MS + randbelow(RETRY_SPREAD_MS))


def encode(kind: str, event_id: str, data: bytes) -> bytes:
    """Encode one event. `data` must be a single line, which is always possible for JSON."""
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id.encode(), kind.encode(), data)


class Decoder:
    """Decodes a stream of server-sent events that arrives in chunks. Comments are ignored."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._looked = 0
        """Number of bytes at the start of the buffer that are known to contain no end of an
        event."""

    def feed(self, chunk: bytes) -> list[Frame]:
        """Add a chunk, and return the events that it completes.

        Raises:
            SseError: the stream is invalid.
        """
        self._buffer += chunk
        frames: list[Frame] = []
        start = 0
        while (end := self._buffer.find(b"\n\n", max(start, self._looked))) >= 0:
            frame = _frame(bytes(self._buffer[start:end]))
            if frame is not None:
                frames.append(frame)
            start = end + 2
        del self._buffer[:start]
        self._looked = max(0, len(self._buffer) - 1)
        return frames


def _frame(block: bytes) -> Frame | None:
    """Parse a block of lines that `encode` or `retry` has written. Return None if the block
    contains no event.

    Raises:
        SseError: the block has another form.
    """
    fields: dict[bytes, bytes] = {}
    for line in block.split(b"\n"):
        name, colon, value = line.partition(b":")
        if not colon or name in fields:
            raise SseError("a line that is not a field, or a repeated field")
        if name:
            fields[name] = value.removeprefix(b" ")
    if fields.keys() <= {b"retry"}:
        return None
    try:
        kind, event_id = fields[b"event"].decode("ascii"), fields[b"id"].decode("ascii")
        return Frame(kind, event_id, fields[b"data"])
    except (KeyError, UnicodeDecodeError):
        raise SseError("an event without its fields") from None
