"""Children as their parent sees them: when they end, and what they have used.

Guest side, used by supervisors and by zygotes that have children of their own.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import NamedTuple


class Ended(NamedTuple):
    """The end of a process, as the kernel reports it."""

    pid: int
    status: int
    """As `wait` returns it."""
    cpu_ns: int
    largest_bytes: int
    """The most memory that it ever had."""


def watch() -> socket.socket:
    """A socket that can be read when a child has ended; `drain` empties it."""
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.detach())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable


def drain(wakeup: socket.socket) -> None:
    """Forget the signals so far. To be called before `reap`, or one could be missed."""
    try:
        while wakeup.recv(512):
            pass
    except BlockingIOError:
        pass


def reap() -> Iterator[Ended]:
    """Each child that has ended by now."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        cpu_ns = int((usage.ru_utime + usage.ru_stime) * 1e9)
        yield Ended(pid, status, cpu_ns, usage.ru_maxrss * 1024)
