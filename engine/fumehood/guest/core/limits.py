"""Resource limits of one child: those that the child sets itself, and those that the supervisor
sets.

Guest side. Before a child gives up its rights, it lowers the limits that are the same for all
calls. The supervisor sets the memory and CPU time limits of each call from outside, with `prlimit`.
So the child needs no system call with which it could raise its limits again.
"""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass


@dataclass
class Limits:
    """The limits of one call, as the host sent them."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    output_bytes: int


# RLIMIT_NPROC 0 does not bind root; the system-call filter, which has no clone, does.
FIXED: tuple[tuple[int, int], ...] = (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
    (resource.RLIMIT_NPROC, 0),
)

CPU_BACKSTOP_S = 1
"""Number of seconds by which RLIMIT_CPU exceeds the CPU time limit that the supervisor enforces."""


def limit_self(open_files: int = 0) -> None:
    """Permanently lower those resource limits of this process that are the same for every call.
    From now on, new descriptors must have numbers below `open_files`. So if it is 0, nothing more
    can be opened. Descriptors that are already open stay open.
    """
    for which, value in (*FIXED, (resource.RLIMIT_NOFILE, open_files)):
        resource.setrlimit(which, (value, value))


def limit_child(pid: int, *, memory_bytes: int, cpu_s: float) -> None:
    """Limit the address space of the child `pid`, and the CPU time that it may use in total.

    Raises:
        OSError: the child is gone, or a limit did not take effect.
    """
    for which, soft in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, math.ceil(cpu_s) + CPU_BACKSTOP_S),
    ):
        _, hard = resource.prlimit(pid, which)
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)  # a tighter limit that the host's operator set stays
        resource.prlimit(pid, which, (soft, hard))
        if resource.prlimit(pid, which)[0] != soft:
            raise OSError("a resource limit did not take")


def address_space_bytes(pid: int | None = None) -> int:
    """Return the size of the address space of the process `pid` in bytes, as RLIMIT_AS counts it.
    None means this process.
    """
    # Not `open()`: its layers are cold in a child, and each page that it touches is copied.
    statm = os.open(f"/proc/{pid or 'self'}/statm", os.O_RDONLY)
    try:
        return int(os.read(statm, 128).split()[0]) * resource.getpagesize()
    finally:
        os.close(statm)
