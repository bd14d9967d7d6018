"""A child's two pipes, one for its request and one for its replies, and writing to any pipe.

Guest side, in the children and supervisors of all walls.
"""

from __future__ import annotations

import array
import math
import os
import select
import socket
from typing import Any

from fumehood.protocol import framing

REQUEST_FD = 3
"""The only descriptor that a child of a process wall may read from."""

REPLY_FD = 4
"""The only one that it may write to."""

CHUNK_BYTES = 1 << 16

SEAL_FAILED = 70
"""A child's exit code if it could not give everything up; it has read no request then."""

MEMORY_REPLY = framing.encode(
    {"error": {"kind": "memory", "message": "the program needed more memory than its limit"}}
)
"""Encoded ahead: a process without memory cannot build its own excuse."""


def tell(message: dict[str, Any]) -> None:
    """Write one frame into the reply's pipe. Raises OSError."""
    write_all(REPLY_FD, framing.encode(message))


def receive_fds(end: socket.socket, most: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """One byte and up to `most` descriptors. Raises OSError.

    Not `socket.recv_fds`, which ignores `flags`.
    """
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(most * descriptors.itemsize)
    order, ancillary, _, _ = end.recvmsg(1, room, flags)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return order, list(descriptors)


def write_all(descriptor: int, data: bytes, patience_s: float | None = None) -> None:
    """Write all of it; where that must not block, wait for room, at most this long each time.

    Raises:
        OSError: the other end is closed, or does not read (TimeoutError).
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            if not select.select([], [descriptor], [], patience_s)[1]:
                raise TimeoutError from None


MAX_REPORTS = 1000
"""Reports of one run; later ones are read and dropped."""

MAX_REPORT_CHARACTERS = 200
MAX_REPORT_BYTES = 512 * 1024
"""All reports of one run together, as the child sends them; more is too much output."""


def read_report(claim: Any) -> dict[str, Any] | None:
    """The report in a child's claim, or None if it is invalid."""
    if not isinstance(claim, dict):
        return None
    percent, message = claim.get("percent"), claim.get("message")
    if isinstance(percent, bool) or not isinstance(percent, int | float):
        return None
    # Of floats only: asked of a whole number that no double holds, `isfinite` raises.
    if not isinstance(message, str) or (isinstance(percent, float) and not math.isfinite(percent)):
        return None
    return {
        "percent": float(min(max(percent, 0.0), 100.0)),
        "message": message[:MAX_REPORT_CHARACTERS],
    }
