"""A link of a session's chain: a process that keeps the session's variables between calls.

Guest side, in the child. When a call's program has ended, its process forks a copy of itself, which
has only one thread. The process then waits for the next call. If the process is killed, its copy
takes its place, and forks another copy. All of this takes place in processes in which a program of
the session ran, so the supervisor trusts nothing that these processes send (see `chain`).
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
from fumehood.guest.core import children, kernel
from fumehood.guest.core.kernel import volunteer_for_oom
from fumehood.guest.core.pipes import REPLY_FD, REQUEST_FD, receive, tell

ORDERS_FD = 5
"""The descriptor on which the chain's first process receives its next call."""

WAKE_FD = 6
"""The descriptor on which a waiting copy is woken."""

DESCRIPTORS = 4
TAKE = b"T"
COPY = b"C"
READY = b"R"
DONE = b"D"
WAKE = b"W"

_IGNORED = (signal.SIGCHLD, signal.SIGHUP)
"""Signals that a process of the chain ignores between calls, when descendants of a program are
killed. While SIGCHLD is ignored, the operating system reaps these descendants. SIGHUP is ignored
because some kernels send it to a process group with a stopped process when another process of the
group ends.
"""

RUNNING_SCORE = b"1000"
BEHIND_SCORE = b"500"
"""The `oom_score_adj` of a waiting copy. It is lower than `RUNNING_SCORE`, so that the running
process is killed first if memory runs out.
"""


def hand_on(exit_code: int, claim: dict[str, Any]) -> None:
    """End a call and wait for the next one: send the claim of the call that has ended, and fork a
    copy of this process.

    Return when the next call has arrived. If the copy must take the place of this process (see
    `chain`), for example because this process was killed during that call, this function also
    returns in the copy, when a later call has arrived.
    """
    handlers = {number: signal.getsignal(number) for number in _IGNORED}
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for _ in children.reap():  # the kernel still counts children that ended earlier
        pass
    if not _make_copy():
        tell({**claim, "stays": True, "exit_code": exit_code})
    _await_call()
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _make_copy() -> bool:
    """Fork a copy of this process. Return False in this process, and True in the copy.

    In this process, return as soon as the copy is ready or could not be made. In the copy, return
    only after it has taken the place of this process, and has made a copy of itself.
    """
    readable, writable = os.pipe()
    numbers = random.getstate()  # Python would reseed `random` in the copy
    has_threads = len(sys._current_frames()) > 1  # also threads that `threading` does not know
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
        os.read(readable, 1)  # returns b"" if the copy has ended
    os.close(readable)
    return False


def _unlock_files() -> None:
    """Unlock the file objects in a copy. A file object is locked if another thread was writing to
    it at the fork. Output that such a thread has buffered is lost.
    """
    # Otherwise, writing or flushing such an object would block for ever. Initializing it again
    # creates a new lock. Output of the main thread is already in the file.
    for held in gc.get_objects():
        with contextlib.suppress(Exception):  # closed, detached
            if issubclass(type(held), io.BufferedWriter):
                io.BufferedWriter.__init__(held, held.raw)
            elif issubclass(type(held), io.BufferedRandom):
                held.raw.seek(min(held.tell(), held.raw.tell()))  # undoes reading ahead
                io.BufferedRandom.__init__(held, held.raw)


def _wait_behind(writable: int) -> None:
    """Report that this copy is ready, and wait until it must take the place of the first process.

    `writable` is the pipe that tells the first process that the copy is ready.
    """
    # A separate process session: the kernel sends SIGHUP to a stopped process if others of its
    # session end.
    os.setsid()
    volunteer_for_oom(BEHIND_SCORE)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # the next program must not reach this memory
    for descriptor in (ORDERS_FD, WAKE_FD):
        os.set_blocking(descriptor, True)  # a program may have changed it, for all copies
    _say(READY)
    os.write(writable, READY)
    os.close(writable)
    if os.read(WAKE_FD, 1) != WAKE:
        os._exit(0)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    volunteer_for_oom(RUNNING_SCORE)


def _await_call() -> None:
    """Wait for the next call, and replace the descriptors of the last call by those of the next
    one.

    If the supervisor orders a copy of this process meanwhile, make it.
    """
    orders = socket.socket(fileno=ORDERS_FD)
    orders.setblocking(True)
    while True:
        order, received, _ = receive(orders, 1, DESCRIPTORS)
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
    orders.detach()  # keeps the descriptor open


def _forget_the_peak() -> None:
    """Reset this process's peak memory, which still includes the earlier calls. *Source*:
    proc_pid_clear_refs(5).
    """
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as own:
            own.write(b"5")
    except OSError:
        pass  # then the reported peak is too high
