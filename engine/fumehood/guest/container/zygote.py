"""A zygote of a container: loads modules once, forks children, and reaps them.

Guest side. If an image preloads modules, there are two zygotes. The thin zygote loads only the
standard library, and the fat zygote also loads the image's modules. A program that needs only the
standard library is forked from the thin zygote, so the memory pages of the image's modules are not
copied for it. Invariant: a zygote never receives a byte of any call. It receives one constant byte
with the descriptors of a child, and answers with the child's process id. Later it reports the exit
status and resource usage of the child, as the operating system has measured them. The zygote itself
is the parent of its children, so no child needs a second fork. The parent of a program's orphans is
the supervisor, the container's first process.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import socket
import struct
from typing import Any, NamedTuple

from fumehood.guest.container import child, link
from fumehood.guest.core import children, kernel
from fumehood.guest.core.pipes import REPLY_FD, REQUEST_FD, receive

FORK = b"F"
PRELOAD = b"P"
"""The order that makes the fat zygote import the image's modules. The fat zygote is forked before
the first call arrives, so no call's bytes are in its memory.
"""

PLACES = (REQUEST_FD, REPLY_FD, link.ORDERS_FD, link.WAKE_FD, child.OUT_FD, child.ERR_FD)
"""Numbers of the descriptors that a child gets. In this order, they are its ends of: request,
reply, two sockets for a session's chain, standard output, standard error.
"""

FIRST_OWN = 64
"""Lowest number of the descriptors that the zygote uses itself."""

AGAIN_S = 0.01
"""Seconds after which the zygote tries a refused fork again."""

_NOTICE = struct.Struct("!?iiqq")
NOTICE_BYTES = _NOTICE.size


class Notice(NamedTuple):
    """A zygote's report about a child: that the child was forked, or that it has ended."""

    has_ended: bool
    pid: int
    status: int = 0
    cpu_ns: int = 0
    largest_bytes: int = 0

    def pack(self) -> bytes:
        return _NOTICE.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Notice:
        return cls(*_NOTICE.unpack(data))


def order_child(orders: socket.socket, *descriptors: int) -> None:
    """Order a zygote to fork a child. Called by the supervisor. The order is sent through the
    socket `orders`, together with the `descriptors` for the child, in the order of `PLACES`.
    """
    socket.send_fds(orders, [FORK], descriptors)


def run_zygote(orders: socket.socket, config: dict[str, Any], *, thin: bool) -> None:
    """Load the modules that the children share, and then fork one child for each order. Orders
    arrive on the socket `orders`. When the supervisor closes this socket, the process ends. If
    `thin` is True, do not load the image's modules.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not thin and orders.recv(len(PRELOAD)) != PRELOAD:
        os._exit(0)
    try:
        prepare_child = child.preload(config, thin=thin)
    except Exception as fault:
        os.write(2, f"zygote: {type(fault).__name__}: {fault}\n".encode()[:400])
        os._exit(1)
    readable, writable = (_out_of_the_way(end) for end in socket.socketpair())
    orders = _out_of_the_way(orders)
    os.closerange(PLACES[0], FIRST_OWN)
    readable.setblocking(False)
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Objects made so far are never collected in a child: the collector would write to
    # their pages, and each child would soon own a copy of the whole library.
    gc.collect()
    gc.freeze()
    has_order = False
    while True:
        # If a program has used up all processes, forking fails until the program ends.
        watched = [readable] if has_order else [orders, readable]
        ready, _, _ = select.select(watched, [], [], AGAIN_S if has_order else None)
        if readable in ready:
            children.drain(readable)
            for ended in children.reap():
                orders.sendall(Notice(True, *ended).pack())
        if orders in ready:
            _receive(orders)
            has_order = True
        if has_order and (pid := _fork()) is not None:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                prepare_child()
                os._exit(1)
            os.closerange(PLACES[0], PLACES[-1] + 1)
            has_order = False
            orders.sendall(Notice(False, pid).pack())


def _out_of_the_way(end: socket.socket) -> socket.socket:
    """Return the socket `end` under another descriptor number, which no child uses."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_OWN))


def _fork() -> int | None:
    """Fork like `os.fork`. Return None if this is impossible now, because there are too many
    processes or too little memory.
    """
    try:
        return os.fork()
    except OSError:
        return None


def _receive(orders: socket.socket) -> None:
    """Receive the supervisor's next order to fork a child, with the child's descriptors. End this
    process if the supervisor is gone, or if the order is invalid.
    """
    try:
        order, descriptors, _ = receive(orders, 1, len(PLACES), socket.MSG_CMSG_CLOEXEC)
    except OSError:
        os._exit(0)
    # Received descriptors get the lowest free numbers, which are those in `PLACES`.
    if order != FORK or tuple(descriptors) != PLACES:
        os._exit(0)
