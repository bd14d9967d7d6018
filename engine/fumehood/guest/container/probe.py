"""Small attacks on a container's own wall, run once before it takes any call.

Guest side, in a child of the ordinary kind: first it tries calls that must be refused, and reports
which were not; then it computes for ever, so that the supervisor sees its own kill work. No request
from outside can name this program: the supervisor refuses one that asks for a probe.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from typing import Any

from fumehood.guest.core.pipes import tell

LIMITS = {
    "Max open files": resource.RLIMIT_NOFILE,
    "Max file size": resource.RLIMIT_FSIZE,
    "Max processes": resource.RLIMIT_NPROC,
}
"""Resource → its name in `/proc/PID/limits`, which some runtimes lack."""


def run(arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Try every attack; the outcome goes out before the loop, which has no end of its own."""
    held = {name: _is_refused(attack) for name, attack in ATTACKS.items()}
    limits = {name: resource.getrlimit(which)[1] for name, which in LIMITS.items()}
    tell({"probe": held, "limits": limits})
    while True:
        pass


def _is_refused(attack: Callable[[], object]) -> bool:
    try:
        attack()
    except OSError:
        return True
    return False


def _open_for_writing(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))


ATTACKS: dict[str, Callable[[], object]] = {
    "write_to_root": lambda: _open_for_writing("/opt/fumehood-probe"),
    "become_root": lambda: os.setresuid(0, 0, 0),
    "read_supervisor_memory": lambda: os.open("/proc/1/mem", os.O_RDONLY),
    "speak_for_supervisor": lambda: _open_for_writing("/proc/1/fd/1"),
    "stop_supervisor": lambda: os.kill(1, 19),
    "packet_socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "virtual_machine_socket": lambda: socket.socket(40, socket.SOCK_STREAM),
}
