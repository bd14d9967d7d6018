"""A link of a session's chain: how one process of Python hands its variables on to the next.

Guest side, in the child. The program of one call runs here; when it is over, this process makes a
copy of itself, without its threads, which waits for the next call, and then waits itself, to make
another copy should that one be killed:

    this process ──forks── one that ends at once ──forks── the next link, the supervisor's child

so the kernel tells the supervisor, and nobody else, how a link ended. Everything here runs after a
program of the session, in its process: the supervisor believes none of it (see `chain`).
"""

from __future__ import annotations

import array
import os
import random
import socket
from typing import Any

from fumehood.guest.container.request import REPLY_FD, REQUEST_FD, tell

NEXT_FD = 5
"""On which the next link hears of its call."""

AGAIN_FD = 6
"""On which a process that has handed on hears that it must do so again."""

DESCRIPTORS = 4
TAKE = b"T"
READY = b"R"
AGAIN = b"A"

OOM_SCORE = b"500"
"""Of one that only waits: where memory runs out, the kernel takes the running one first."""


def hand_on(exit_code: int, claim: dict[str, Any]) -> None:
    """Tell what became of this call, and come back in another process, which has the next."""
    is_next = _make_next()
    if is_next:
        return
    _wait_behind()
    tell({**claim, "stays": True, "exit_code": exit_code})
    os.set_blocking(AGAIN_FD, True)
    while os.read(AGAIN_FD, 1) == AGAIN:
        _bury()
        if _make_next():
            return
    os._exit(0)


def _bury() -> None:
    """What this call's program had started was ended; until it is buried, it counts."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _make_next() -> bool:
    """Whether this is the new process. In the old one it is ready, or could not be made."""
    readable, writable = os.pipe()
    numbers = random.getstate()  # which Python itself would draw anew in a copy
    try:
        first = os.fork()
    except OSError:
        first = -1
    if first == 0:
        _become_next(readable, writable)
        random.setstate(numbers)
        return True
    os.close(writable)
    if first > 0:
        os.waitpid(first, 0)
        os.read(readable, 1)  # or its end, where the second fork failed
    os.close(readable)
    return False


def _become_next(readable: int, writable: int) -> None:
    """In the first process: make the second and end. In the second: wait for its call."""
    try:
        second = os.fork()
    except OSError:
        os._exit(1)
    if second:
        os._exit(0)
    os.close(readable)
    # Of a session of its own: who stops in one whose others end, is sent a hang-up.
    os.setsid()
    _volunteer(b"1000")
    os.set_blocking(NEXT_FD, True)  # which a program may have changed, for all of them
    orders = socket.socket(fileno=NEXT_FD)
    orders.sendall(READY)
    os.write(writable, READY)
    os.close(writable)
    _take(orders)
    orders.detach()  # the descriptor is this process's as long as it lives


def _take(orders: socket.socket) -> None:
    """Wait for a call, and put its descriptors in the places of the last one's."""
    received = array.array("i")
    order, ancillary, _, _ = orders.recvmsg(
        len(TAKE), socket.CMSG_SPACE(DESCRIPTORS * received.itemsize)
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    if order != TAKE or len(received) != DESCRIPTORS:
        os._exit(0)
    for source, target in zip(received, (REQUEST_FD, REPLY_FD, 1, 2), strict=True):
        os.dup2(source, target, inheritable=target < REQUEST_FD)
        os.close(source)


def _wait_behind() -> None:
    _volunteer(OOM_SCORE)


def _volunteer(score: bytes) -> None:
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as own:
            own.write(score)
    except OSError:
        pass  # a wish, not a wall
