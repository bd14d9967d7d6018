"""The two pipes of a child, one for its request and one for its replies, and the progress reports
in replies.

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
"""Exit code of a child that could not give up all its rights. Such a child has read no request."""

MEMORY_REPLY = framing.encode(
    {"error": {"kind": "memory", "message": "the program needed more memory than its limit"}}
)
"""The reply of a program that ran out of memory. It is encoded in advance, because a process
without free memory cannot build a reply.
"""


def tell(message: dict[str, Any]) -> None:
    """Write `message` as one frame to the reply pipe, through which this process answers requests.
    Raises OSError if writing fails.
    """
    write_all(REPLY_FD, framing.encode(message))


Sender = tuple[int, int, int]
"""Process id, user id and group id of a message's sender. The operating system adds them to the
message (SO_PASSCRED).
"""

_CREDENTIALS = struct.Struct("3i")


def receive(
    end: socket.socket, most_bytes: int, most_fds: int, flags: int = 0
) -> tuple[bytes, list[int], Sender | None]:
    """Receive one message from the socket `end`. `most_bytes` and `most_fds` are the maximum
    numbers of bytes and descriptors, and `flags` are those of `recvmsg`.

    Return the message's bytes, its descriptors and its sender. If the socket lacks the option
    SO_PASSCRED, the sender is None. Raises OSError if receiving fails.
    """
    descriptors, sender = array.array("i"), None
    room = socket.CMSG_SPACE(most_fds * descriptors.itemsize)
    room += socket.CMSG_SPACE(_CREDENTIALS.size)
    # `socket.recv_fds` ignores `flags`.
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
    """Write all of `data` to a descriptor. If the descriptor is non-blocking, wait whenever it is
    not writable. `patience_s` is the maximum number of seconds of each wait, and None means no
    maximum.

    Raises:
        TimeoutError: a wait has lasted `patience_s` seconds.
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
puts the message into another message.
"""

MAX_CLAIM_BYTES = 512 * 1024
"""Maximum size in bytes of what a program reports. In a container, it is the maximum size of each
frame from a program; the largest frame is the final claim. In the jail, it is the maximum total
size of the progress reports of one run. A program that exceeds it has produced too much output.
"""


def read_report(claim: Any) -> dict[str, Any] | None:
    """Return the progress report in `claim`, which a child has sent, with `percent` and a short
    `message`. Return None if `claim` is not a valid report.
    """
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
