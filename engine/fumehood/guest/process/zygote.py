"""The zygote loads modules once and forks children that share the modules' memory pages. A child
runs the program of one call, or evaluates the expressions of one trust domain.

Guest side, below the supervisor. Invariant: the zygote never receives a byte of any call. It
receives one constant byte with two descriptors and answers with a process id. A fork server that
parsed requests would leak remains of each request into the next child.

The supervisor is the parent of each child, because the kernel reports how a process ended only to
its parent.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from fumehood.guest.core import kernel, limits, seccomp
from fumehood.guest.core.pipes import (
    CHUNK_BYTES,
    MEMORY_REPLY,
    REPLY_FD,
    REQUEST_FD,
    SEAL_FAILED,
    receive,
    tell,
    write_all,
)
from fumehood.protocol import framing

Program = Callable[[dict[str, Any]], dict[str, Any]]
"""A function that takes a request and returns a reply: `{"result": …}` or `{"error": {kind,
message, …}}`."""

ORDERS_FD = REPLY_FD + 1
"""The descriptor on which the zygote receives orders. Each child closes it."""


def seal_zygote(orders: socket.socket) -> socket.socket:
    """Give up all rights and resources of the zygote that no child may have. `orders` is the socket
    for orders. It gets another number, so use only the returned socket afterwards.
    """
    os.dup2(orders.detach(), ORDERS_FD)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    # A child's two descriptors get the lowest free numbers: `REQUEST_FD` and `REPLY_FD`.
    os.closerange(REQUEST_FD, ORDERS_FD)
    os.closerange(ORDERS_FD + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.chdir("/")
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()
    return socket.socket(fileno=ORDERS_FD)


def run_child(
    *,
    supervisor_pid: int,
    programs: Mapping[str, Program],
    warm_up: Callable[[], None],
    filter_program: bytes,
    open_files: int = 0,
    hide_files: Callable[[], None] = lambda: None,
) -> None:
    """Give up all rights of this process, and then answer requests until the supervisor closes the
    request pipe. If the rights cannot be given up, report this and end the process.

    `supervisor_pid` is the supervisor's process id. `programs` maps names to the functions that
    answer requests, and `warm_up` touches the memory pages that they need. `filter_program` is the
    system-call filter.

    The last two parameters are only for the jail, in which files can be read. Descriptors get
    numbers below `open_files`, and `hide_files` restricts the access to files.
    """
    try:
        seal(supervisor_pid, warm_up, filter_program, open_files, hide_files)
    except BaseException as fault:  # sealed or dead: nothing may run in between
        tell({"sealed": False, "fault": f"{type(fault).__name__}: {fault}"})
        os._exit(SEAL_FAILED)
    serve(programs)


def seal(
    supervisor_pid: int,
    warm_up: Callable[[], None],
    filter_program: bytes,
    open_files: int,
    hide_files: Callable[[], None],
) -> None:
    """Give up all rights of this process, and report this to the supervisor. The parameters are
    those of `run_child`. Raises OSError if the supervisor is gone, or if the kernel refuses a step.
    """
    # The order matters, because a step may use rights that a later step gives up. The zygote has
    # already given up its capabilities, environment and directory.
    os.dup2(0, 2)
    os.closerange(ORDERS_FD, os.sysconf("SC_OPEN_MAX"))
    os.setpgid(0, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    if os.getppid() != supervisor_pid:  # it died before the line above took effect
        raise OSError("the supervisor is gone")
    kernel.volunteer_for_oom()
    warm_up()
    base_bytes = limits.address_space_bytes()
    limits.limit_self(open_files)
    hide_files()
    seccomp.install(filter_program)
    tell({"sealed": True, "base_bytes": base_bytes})


def serve(programs: Mapping[str, Program]) -> None:
    """Answer requests until the request pipe is closed, and then exit. `programs` maps names to the
    functions that answer requests.
    """
    decoder = framing.Decoder(framing.MAX_REQUEST_BYTES)
    while chunk := os.read(REQUEST_FD, CHUNK_BYTES):
        for request in decoder.feed(chunk):
            write_all(REPLY_FD, _reply(programs, request))
    os._exit(0)


def _reply(programs: Mapping[str, Program], request: dict[str, Any]) -> bytes:
    try:
        return framing.encode(programs[request["program"]](request))
    except MemoryError:
        return MEMORY_REPLY
    except Exception as fault:
        return framing.encode({"error": {"kind": "exception", "message": type(fault).__name__}})


FORK = b"F"
PID = struct.Struct("!i")


def run_zygote(orders: socket.socket, config: dict[str, Any]) -> None:
    """Load the programs that `config` names, and then fork one child for each order. Orders arrive
    on the socket `orders`. When the supervisor closes this socket, the process ends.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    supervisor_pid = os.getppid()
    prepare_child = preload(config)
    orders = seal_zygote(orders)
    # Objects made so far are never collected in a child: the collector would write to
    # their pages, and each child would soon own a copy of the whole library.
    gc.collect()
    gc.freeze()
    while True:
        try:
            order, descriptors, _ = receive(orders, 1, 2)
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


def preload(config: dict[str, Any]) -> Callable[[int], None]:
    """Load the programs of this wall, which `config` names.

    Return a function that each child must call first. Its argument is the supervisor's process id.
    It gives up the child's rights, and then answers requests.
    """
    prepare: Callable[[int], None] = importlib.import_module(config["programs"]).preload(config)
    return prepare


def order_child(orders: socket.socket, request_fd: int, reply_fd: int) -> None:
    """Order the zygote to fork a child. Called by the supervisor. The order is sent through the
    socket `orders`. `request_fd` and `reply_fd` are the child's ends of its two pipes.
    """
    socket.send_fds(orders, [FORK], [request_fd, reply_fd])


def run_probe(request: dict[str, Any]) -> dict[str, Any]:
    """Run the probe that the request names, and return its outcome. A probe is a small program that
    attacks one defence of the sandbox, such as the memory limit. Some defences kill the process, so
    that no outcome is returned.
    """
    return {"result": {"outcome": _PROBES[request["arguments"]["probe"]]()}}


def _take_memory() -> str:
    # Caught here and not in `_reply`: the refusal must come from this line.
    try:
        return f"got {len(bytearray(1 << 30))} bytes"
    except MemoryError:
        return "refused"


def _open_file() -> str:
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except PermissionError:
        return "refused"
    return "opened"


def _look_outside() -> str:
    """Try to read a file and a directory that every Linux system has, and to write to a directory
    that every user may write to. Return "refused" if every attempt is refused, otherwise "seen".
    Raises OSError if Python's own library cannot be read either.
    """
    outside: tuple[Callable[[], object], ...] = (
        lambda: os.listdir("/"),
        lambda: os.open("/proc/self/status", os.O_RDONLY),
        lambda: os.open("/dev/shm/fumehood-probe", os.O_WRONLY | os.O_CREAT),  # noqa: S108
    )
    for reach in outside:
        try:
            reach()
        except PermissionError:
            continue
        return "seen"
    with open(os.__file__, "rb") as inside:  # otherwise a wall that forbids all reading would pass
        inside.read(1)
    return "refused"


def _start_process() -> str:
    if os.fork() == 0:
        os._exit(0)
    return "started"


def _open_socket() -> str:
    import _socket

    _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    return "opened"


def _spin() -> str:
    while True:
        pass


_PROBES = {
    "memory": _take_memory,
    "files": _open_file,
    "outside": _look_outside,
    "processes": _start_process,
    "network": _open_socket,
    "spin": _spin,
}
