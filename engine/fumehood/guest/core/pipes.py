"""A child's two pipes (for its request and its replies), and the progress reports in replies.

Guest side, in the children and supervisors of all walls.
"""

from __future__ import annotations

import array
import math
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fumehood.protocol import framing

REQUEST_FD = 3
"""The only descriptor that a child of a process wall may read from."""

REPLY_FD = 4
"""The only descriptor that a child of a process wall may write to."""

CHUNK_BYTES = 1 << 16

SEAL_FAILED = 70
"""Exit code of a child that could not give up all rights. It has read no request."""

MEMORY_REPLY = framing.encode(
    {"error": {"kind": "memory", "message": "the program needed more memory than its limit"}}
)
"""The reply of a program that ran out of memory. It is encoded in advance, because a process
without memory cannot build a reply."""


def tell(message: dict[str, Any]) -> None:
    """Write one frame to the reply pipe. Raises OSError."""
    write_all(REPLY_FD, framing.encode(message))


Sender = tuple[int, int, int]
"""Process, user and group id of a message's sender, which the kernel adds (SO_PASSCRED)."""

_CREDENTIALS = struct.Struct("3i")


def receive(
    end: socket.socket, most_bytes: int, most_fds: int, flags: int = 0
) -> tuple[bytes, list[int], Sender | None]:
    """Receive one message with its descriptors, and its sender if the socket has SO_PASSCRED.

    Raises OSError. `socket.recv_fds` is not used, because it ignores `flags`.
    """
    descriptors, sender = array.array("i"), None
    room = socket.CMSG_SPACE(most_fds * descriptors.itemsize)
    room += socket.CMSG_SPACE(_CREDENTIALS.size)
    data, ancillary, _, _ = end.recvmsg(most_bytes, room, flags)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            sender = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
    return data, list(descriptors), sender


@contextmanager
def held(descriptor: int) -> Iterator[int]:
    """Yield a descriptor, and close it at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes, patience_s: float | None = None) -> None:
    """Write all bytes. If the descriptor is non-blocking, wait until it is writable, for at most
    `patience_s` seconds each time.

    Raises:
        TimeoutError: the other end does not read.
        OSError: the other end is closed.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            if not select.select([], [descriptor], [], patience_s)[1]:
                raise TimeoutError from None


MAX_REPLY_DEPTH = 60
"""Maximum nesting depth of a child's message. It is below the host's limit, because the supervisor
nests the message in another message.
"""

MAX_CLAIM_BYTES = 512 * 1024
"""Size limit in bytes. In a container, it applies to each frame from a program, the largest of
which is the final claim. In the jail, it applies to the total size of one run's progress reports.
Anything above this limit counts as too much output.
"""


def read_report(claim: Any) -> dict[str, Any] | None:
    """Return the progress report in a child's claim, or None if the report is invalid."""
    if not isinstance(claim, dict):
        return None
    percent, message = claim.get("percent"), claim.get("message")
    if isinstance(percent, bool) or not isinstance(percent, int | float):
        return None
    # Only floats are tested: `isfinite` raises for an integer that is too large for a double.
    if not isinstance(message, str) or (isinstance(percent, float) and not math.isfinite(percent)):
        return None
    return {
        "percent": float(min(max(percent, 0.0), 100.0)),
        "message": framing.whole_words(message, framing.MAX_REPORT_CHARACTERS),
    }
