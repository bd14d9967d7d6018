"""The zygote: loads what programs need once, and forks children that share those pages.

Guest side, between supervisor and child. Invariant: it never receives a byte of any call.
All it is told is one constant byte with two descriptors, and all it answers is a process
id; a fork server that parsed requests would hand each one's remains to the next child.

The supervisor is the parent of each child: only a parent learns from the kernel how a
process really ended.
"""

from __future__ import annotations

import array
import gc
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from fumehood.guest import kernel, seccomp
from fumehood.guest.child import REPLY_FD, REQUEST_FD, run_child, seal_zygote

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
        order, descriptors = _receive(orders)
        if order != FORK or descriptors != [REQUEST_FD, REPLY_FD]:
            os._exit(0)
        pid = kernel.fork_for_parent()
        if pid == 0:
            prepare_child(supervisor_pid)
            os._exit(1)
        try:
            orders.sendall(PID.pack(pid))
        except OSError:  # without a supervisor there is nobody to tell
            os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def order_child(orders: socket.socket, request_fd: int, reply_fd: int) -> None:
    """Supervisor's side of one order."""
    rights = array.array("i", [request_fd, reply_fd])
    orders.sendmsg([FORK], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def _preload(config: dict[str, Any]) -> Callable[[int], None]:
    if config.get("wall") == "jail":
        from fumehood.guest import jail

        return jail.preload(config)
    from fumehood.guest import probe
    from fumehood.guest.interpreter import calculator, restricted

    filter_program = seccomp.build_interpreter_filter()
    programs = {
        "calculator": calculator.run,
        "restricted_python": restricted.run,
        "probe": probe.run,
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


def _receive(orders: socket.socket) -> tuple[bytes, list[int]]:
    try:
        order, ancillary, _, _ = orders.recvmsg(1, socket.CMSG_SPACE(2 * array.array("i").itemsize))
    except OSError:
        return b"", []
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return order, list(descriptors)
