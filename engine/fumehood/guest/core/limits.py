"""Resource limits of one child: those that it sets itself, and those set from outside.

Guest side. A child lowers the limits of all calls before it is sealed; the supervisor moves
memory and CPU time for each call with `prlimit`, from outside, so the child needs no
system call that could move them back.
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
"""Seconds by which RLIMIT_CPU exceeds the limit that the supervisor measures."""


def limit_self(open_files: int = 0) -> None:
    """Permanently lower the limits that are the same for every call. New descriptors get numbers
    below `open_files`; open descriptors stay open.
    """
    for which, value in (*FIXED, (resource.RLIMIT_NOFILE, open_files)):
        resource.setrlimit(which, (value, value))


class CallLimits:
    """The limits of one child that change from call to call, set from outside.

    `base_bytes` is the child's address space before any request (interpreter and libraries); the
    memory limit of a program is added to it. A limit that is already in force is not set again,
    because a resident child gets hundreds of calls a second, mostly with the same limits.
    """

    def __init__(self, pid: int, base_bytes: int) -> None:
        self._pid = pid
        self._base_bytes = base_bytes
        self._standing: dict[int, int] = {}

    def set(self, *, memory_bytes: int, cpu_s: float, used_s: float) -> None:
        """Set one call's limits. `used_s` is the CPU time that the child has used already,
        because the kernel counts a process's whole life.

        Raises:
            OSError: the child is gone, or a limit did not take.
        """
        self._set(resource.RLIMIT_AS, self._base_bytes + memory_bytes)
        self._set(resource.RLIMIT_CPU, math.ceil(used_s + cpu_s) + CPU_BACKSTOP_S)

    def _set(self, which: int, soft: int) -> None:
        if self._standing.get(which) == soft:
            return
        _, hard = resource.prlimit(self._pid, which)
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)  # a tighter limit that the host's operator set stays
        resource.prlimit(self._pid, which, (soft, hard))
        if resource.prlimit(self._pid, which)[0] != soft:
            raise OSError("a resource limit did not take")
        self._standing[which] = soft


def address_space_bytes(pid: int | None = None) -> int:
    """A process's address space as RLIMIT_AS counts it; by default this process's."""
    # Not `open()`: its layers are cold in a child, and each page that it touches is copied.
    statm = os.open(f"/proc/{pid or 'self'}/statm", os.O_RDONLY)
    try:
        return int(os.read(statm, 128).split()[0]) * resource.getpagesize()
    finally:
        os.close(statm)
