"""The gate: holds back new processes of programs while the supervisor kills them.

Guest side. If the host gives no namespaces, a program that forks and ends all the time could escape
from every search, because foreign processes also vanish during one. The warden, which must allow
each new process, holds them back until the search is over. Everywhere else the gate does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fumehood.guest.container.host import end
from fumehood.guest.container.places import GATE_FD

CLOSE, OPEN = b"C", b"O"
"""The supervisor's orders to the warden. Each is answered with the same byte."""


@contextmanager
def closed() -> Iterator[None]:
    """Hold back new processes of programs during the block. The guest's own are not held back. If
    the warden is gone, the container ends.
    """
    _order(CLOSE)
    try:
        yield
    finally:
        _order(OPEN)


def _order(order: bytes) -> None:
    if GATE_FD < 0:
        return
    try:
        os.write(GATE_FD, order)
        answer = os.read(GATE_FD, 1)
    except OSError:
        answer = b""
    if answer != order:
        end()
