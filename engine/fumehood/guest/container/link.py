"""A link of a session's chain: a process that keeps its variables from call to call.

Guest side, in the child. When the program of a call is over, its process makes a copy of itself,
without its threads, and waits for the next call. The copy waits behind, in case that one is killed:
then it makes a copy of its own and takes the other's place. Everything here runs after a program of
the session, in its process, so the supervisor trusts none of it (see `chain`).
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import signal
import socket
import sys
from typing import Any

from fumehood.guest.container.forks import HOOKS
from fumehood.guest.core.kernel import volunteer_for_oom
from fumehood.guest.core.pipes import REPLY_FD, REQUEST_FD, receive_fds, tell

ORDERS_FD = 5
"""Tells the process that has the next call."""

WAKE_FD = 6
"""Wakes the one behind it."""

DESCRIPTORS = 4
TAKE = b"T"
COPY = b"C"
READY = b"R"
DONE = b"D"
WAKE = b"W"

_IGNORED = (signal.SIGCHLD, signal.SIGHUP)
"""While nothing runs: descendants of a program are ended meanwhile. The kernel reaps them then, and
some kernels hang up on a group in which one process is stopped when another ends.
"""

RUNNING_SCORE = b"1000"
BEHIND_SCORE = b"500"
"""`oom_score_adj` of a waiting process: the kernel ends the running one first."""


def hand_on(exit_code: int, claim: dict[str, Any]) -> None:
    """Send the claim of this call, and return with the next one: here, or in the copy."""
    handlers = {number: signal.getsignal(number) for number in _IGNORED}
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _reap()
    if not _make_copy():
        tell({**claim, "stays": True, "exit_code": exit_code})
    _await_call()
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _make_copy() -> bool:
    """False in this process, once the copy is ready or could not be made. True in the copy, once
    it was woken: it has a copy of its own then.
    """
    readable, writable = os.pipe()
    numbers = random.getstate()  # which Python itself would draw anew in a copy
    has_threads = len(sys._current_frames()) > 1  # also those that `threading` does not know
    try:
        with contextlib.nullcontext() if has_threads else HOOKS.skipped():
            pid = os.fork()
    except OSError:
        pid = -1
    if pid == 0:
        os.close(readable)
        random.setstate(numbers)
        if has_threads:
            _unlock_files()
        _wait_behind(writable)
        if not _make_copy():
            _say(DONE)
        return True
    os.close(writable)
    if pid > 0:
        os.read(readable, 1)  # or its end, where the copy has ended
    os.close(readable)
    return False


def _unlock_files() -> None:
    """In a copy: a file that a thread was writing just then stays locked, and whoever writes or
    flushes it would wait for ever. Its second start makes a new lock. What the main thread wrote is
    in the file already; what only the lost thread's buffer held is lost with it.
    """
    for held in gc.get_objects():
        with contextlib.suppress(Exception):  # closed, detached
            if issubclass(type(held), io.BufferedWriter):
                io.BufferedWriter.__init__(held, held.raw)
            elif issubclass(type(held), io.BufferedRandom):
                held.raw.seek(min(held.tell(), held.raw.tell()))  # back over what was read ahead
                io.BufferedRandom.__init__(held, held.raw)


def _wait_behind(writable: int) -> None:
    """Report the copy as ready and wait until it is needed. Runs in the copy."""
    # A session of its own: a process that is stopped while others of its session end, is hung up.
    os.setsid()
    volunteer_for_oom(BEHIND_SCORE)
    for descriptor in (ORDERS_FD, WAKE_FD):
        os.set_blocking(descriptor, True)  # which a program may have changed, for all of them
    _say(READY)
    os.write(writable, READY)
    os.close(writable)
    if os.read(WAKE_FD, 1) != WAKE:
        os._exit(0)
    volunteer_for_oom(RUNNING_SCORE)


def _await_call() -> None:
    """Wait for a call, and put its descriptors in the places of the last one's."""
    orders = socket.socket(fileno=ORDERS_FD)
    orders.setblocking(True)
    while True:
        order, received = receive_fds(orders, DESCRIPTORS)
        if order == COPY:
            if not _make_copy():
                _say(DONE)
            continue
        if order != TAKE or len(received) != DESCRIPTORS:
            os._exit(0)
        break
    orders.detach()
    for source, target in zip(received, (REQUEST_FD, REPLY_FD, 1, 2), strict=True):
        os.dup2(source, target, inheritable=target < REQUEST_FD)
        os.close(source)
    _forget_the_peak()


def _say(message: bytes) -> None:
    orders = socket.socket(fileno=ORDERS_FD)
    orders.sendall(message)
    orders.detach()  # the descriptor is this process's as long as it lives


def _reap() -> None:
    """Reap processes that ended before `SIGCHLD` was ignored; the kernel still counts them."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _forget_the_peak() -> None:
    """Reset the peak of memory, which earlier calls made. *Source*: proc_pid_clear_refs(5)."""
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as own:
            own.write(b"5")
    except OSError:
        pass  # the figure is too high then
