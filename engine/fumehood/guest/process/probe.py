"""Small attacks on the own wall, run at every start: a published limit is a tried limit.

Guest side. The supervisor runs these in children of the ordinary kind before it says what
this wall can enforce here. No request from outside can name this program: the host builds
requests, and the supervisor refuses one that asks for a probe.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Try the attack that the request names; a reply means that it did not end the child."""
    return {"result": {"outcome": _ATTACKS[request["arguments"]["attack"]]()}}


def _take_memory() -> str:
    # Caught here and not below: the probe must know that the refusal came from this line.
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
    """A file and a directory that every Linux has, and a place that everybody may write to."""
    outside: tuple[Callable[[], object], ...] = (
        lambda: os.listdir("/"),
        lambda: os.open("/proc/self/status", os.O_RDONLY),
        lambda: os.open("/dev/shm/fumehood-probe", os.O_WRONLY | os.O_CREAT),  # noqa: S108
    )
    for attack in outside:
        try:
            attack()
        except PermissionError:
            continue
        return "seen"
    with open(os.__file__, "rb") as inside:  # or a wall without any view would pass
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


_ATTACKS = {
    "memory": _take_memory,
    "files": _open_file,
    "outside": _look_outside,
    "processes": _start_process,
    "network": _open_socket,
    "spin": _spin,
}
