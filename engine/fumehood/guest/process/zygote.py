"""The zygote: loads modules for programs once, and forks children that share those pages.

Guest side, between supervisor and child. Invariant: it never receives a byte of any call.
It receives one constant byte with two descriptors, and answers a process id only; a fork
server that parsed requests would pass the remains of each one to the next child.

The supervisor is the parent of each child: only a parent learns from the kernel how a
process really ended.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from fumehood.guest.core import kernel, seccomp
from fumehood.guest.core.pipes import REPLY_FD, REQUEST_FD, receive_fds
from fumehood.guest.process import filters
from fumehood.guest.process.child import run_child, seal_zygote
from fumehood.guest.process.selftest import run_probe

FORK = b"F"
PID = struct.Struct("!i")


def run_zygote(orders: socket.socket, config: dict[str, Any]) -> None:
    """Preload, then fork one child for each order until the supervisor closes the socket."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    supervisor_pid = os.getppid()
    prepare_child = _preload(config)
    orders = seal_zygote(orders)
    # Objects made so far are never collected in a child: the collector would write to
    # their pages, and each child would soon own a copy of the whole library.
    gc.collect()
    gc.freeze()
    while True:
        try:
            order, descriptors = receive_fds(orders, 2)
        except OSError:
            os._exit(0)
        if order != FORK or descriptors != [REQUEST_FD, REPLY_FD]:
            os._exit(0)
        pid = kernel.fork_for_parent()
        if pid == 0:
            prepare_child(supervisor_pid)
            os._exit(1)
        try:
            orders.sendall(PID.pack(pid))
        except OSError:  # the supervisor is gone
            os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def order_child(orders: socket.socket, request_fd: int, reply_fd: int) -> None:
    """Supervisor's side of one order."""
    socket.send_fds(orders, [FORK], [request_fd, reply_fd])


def _preload(config: dict[str, Any]) -> Callable[[int], None]:
    if config.get("wall") == "jail":
        from fumehood.guest.process import jail

        return jail.preload(config)
    from fumehood.guest.interpreter import calculator, restricted

    filter_program = filters.build_interpreter_filter()
    programs = {
        "calculator": calculator.run,
        "restricted_python": restricted.run,
        "probe": run_probe,
    }
    # Programs see the time of day in UTC, not the zone that this host is set to.
    os.environ["TZ"] = "UTC"
    time.tzset()
    calculator.preload()
    restricted.preload()
    seccomp.warm_up(filter_program)

    def prepare(supervisor_pid: int) -> None:
        run_child(
            supervisor_pid=supervisor_pid,
            programs=programs,
            # A program has this child to itself. The expressions of a domain share one, and
            # its first one warms it: pages that most children never need are not copied.
            warm_up=restricted.warm_up,
            filter_program=filter_program,
        )

    return prepare
