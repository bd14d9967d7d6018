"""Limits of calls, and how the effective limits are determined.

An absent limit means the wall's default, never unlimited. The effective limit is the smallest of
the tool's definition, the call's option and the wall's ceiling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MB = 1 << 20

MAX_BODY_BYTES = 8 * MB
"""Maximum bytes of one HTTP request or MCP message, and of everything that one call sends."""

MAX_REMEMBERED = 1000
"""Maximum number of entries that `remember` keeps in one table."""

MIN_MEMORY_MB = 16
"""MB of memory that Python itself needs: the smallest memory limit of any wall."""

MIN_JAIL_MB = 32
"""MB of memory that Python and a function's imports need in the jail."""

MIN_CONTAINER_MB = 128
"""MB of the smallest container size."""

CONTAINER_MEMORY_CLASSES = (MIN_CONTAINER_MB, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Memory sizes of containers, in MB. There are only a few, so that a ready container is likely to
fit the next call.
"""

MIN_CPUS, MAX_CPUS = 0.1, 64.0
"""Smallest and largest number of processors for a container's programs."""

CONTAINER_PROCESSES = 64
"""Maximum number of processes and threads of a program in a container."""

CONTAINER_OPEN_FILES = 256
"""Maximum number of open files of one process in a container."""

CONTAINER_SIXTEENTHS = {"/workspace": 4, "/tmp": 3, "/dev/shm": 1}  # noqa: S108  # inside
"""Maps the path of each writable directory to its share of a container's memory, in sixteenths. All
directories together have half of the memory, so that a program that fills them still has memory for
itself."""

CONTAINER_FILES_OUT = 100
CONTAINER_FILES_OUT_MB = 64
"""Maximum total size in MB of the files that one program returns."""


def container_writable_mb(memory_mb: int) -> dict[str, int]:
    """Return the sizes in MB of the writable directories in a container that has `memory_mb` MB of
    memory. The keys are the paths of the directories.
    """
    return {path: memory_mb * part // 16 for path, part in CONTAINER_SIXTEENTHS.items()}


class Limit(StrEnum):
    """A limit that a wall can enforce."""

    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    OUTPUT = "output"
    PROCESSES = "processes"
    FILES = "files"
    NETWORK = "network"
    OPEN_FILES = "open_files"
    FILE_SIZE = "file_size"
    DISK = "disk"


class Grade(StrEnum):
    """How strongly a container holds its programs, beginning with the strongest grade."""

    KERNEL = "kernel"
    """The programs have an operating-system kernel of their own (gVisor)."""
    NAMESPACES = "namespaces"
    """The programs share the host's kernel, which hides the host and enforces all limits."""
    WATCHED = "watched"
    """As `NAMESPACES`, but the guest watches some limits, so programs can exceed them briefly."""
    PROCESS = "process"
    """The programs are processes of the host beside all others. Landlock and filters of system
    calls hold them, and the guest watches some limits."""

    def is_at_least(self, least: Grade) -> bool:
        """Return whether this grade is as strong as `least`, or stronger."""
        grades = list(Grade)
        return grades.index(self) <= grades.index(least)

    @property
    def why(self) -> str:
        """The reason for the grade, as a sentence."""
        return _WHY[self]


def strongest(*grades: Grade | None) -> Grade | None:
    """Return the strongest of the grades that are not None, or None if all are."""
    return min(filter(None, grades), key=list(Grade).index, default=None)


def weakest(grades: Iterable[Grade | None]) -> Grade | None:
    """Return the weakest of the grades. Return None if one is None, or if there are no grades."""
    found = list(grades)
    known = [grade for grade in found if grade is not None]
    return max(known, key=list(Grade).index) if known and len(known) == len(found) else None


_WHY = {
    Grade.KERNEL: "Programs have a kernel of their own.",
    Grade.NAMESPACES: "Programs share the host's kernel, which enforces all limits.",
    Grade.WATCHED: "The host gives no control groups, so the guest watches memory and CPU time.",
    Grade.PROCESS: "The host gives no namespaces, so programs see its processes and files' names.",
}


class Held(StrEnum):
    """How a limit of a container is held."""

    ENFORCED = "enforced"
    """Programs cannot exceed it."""
    WATCHED = "watched"
    """The guest looks every 0.1 seconds, so that programs can exceed it briefly."""


PROCESS_WALL_LIMITS = frozenset(Limit) - {Limit.OPEN_FILES, Limit.FILE_SIZE, Limit.DISK}
"""The limits that a process wall enforces. Programs cannot write files there, so the other limits
do not apply."""

_EVERY_LIMIT = frozenset(Limit)

KERNEL_WALLS = frozenset({"jail", "host"})
"""Names of walls that the engine itself provides. A part cannot add a wall with such a name."""

ESSENTIAL_WALLS = frozenset({"interpreter"})
"""Names of walls that are essential. If such a wall exists but is not ready, the engine refuses all
calls."""

_LEAST_LIMITS = {
    "interpreter": PROCESS_WALL_LIMITS,
    "jail": PROCESS_WALL_LIMITS,
    "host": frozenset({Limit.WALL_TIME, Limit.OUTPUT}),
}
"""Maps the name of a wall to the limits that it must enforce before anything runs there, no matter
who created the wall."""


def least_limits(wall: str) -> frozenset[Limit]:
    """Return the limits that the wall with this name must enforce. If a wall does not enforce all
    of them, the engine runs nothing behind it.

    The wall's own list of required limits may be shorter, but these limits are required even then.
    The container wall, and any wall that this module does not know, must enforce every limit.
    """
    return _LEAST_LIMITS.get(wall, _EVERY_LIMIT)


MIN_DISK_MB, MAX_DISK_MB = 16, 1_048_576
"""Smallest and largest size of a session's disk, in MB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The effective limits of one call. `None` means that the wall lacks such a limit."""

    wall_s: float
    cpu_s: float
    memory_mb: int | None
    output_bytes: int
    disk_mb: int | None = None
    """Size of the working directory in MB, or None if its files count as memory."""
    least_grade: Grade | None = None
    """The weakest grade of a container in which the call may run, or None for the engine's."""


@dataclass(frozen=True, slots=True)
class WallLimits:
    """One wall's defaults and ceilings, and the minimum memory of a program."""

    default_wall_s: float
    max_wall_s: float
    default_memory_mb: int | None
    max_memory_mb: int | None
    min_memory_mb: int
    output_bytes: int
    cpu_s: float | None = None
    """CPU seconds of a call; None if only wall time and cores limit them."""
    memory_classes: tuple[int, ...] = ()
    """Fixed memory sizes in MB, ascending, to which limits are rounded down; empty if any is
    allowed.
    """

    def memory_class(self, memory_mb: int) -> int:
        """Return the memory limit in MB that the wall enforces if `memory_mb` is requested: the
        largest of its memory classes that is not above `memory_mb`.

        `memory_mb` must be at least `min_memory_mb`.
        """
        return max((size for size in self.memory_classes if size <= memory_mb), default=memory_mb)


def smallest(default: float, ceiling: float, *requests: float | None) -> float:
    """Return the effective limit: the smallest of the `requests` or, if all are None, the default.
    The result is at most the ceiling.
    """
    given = [request for request in requests if request is not None]
    return min([*given, ceiling]) if given else min(default, ceiling)


def remember(known: OrderedDict[Any, Any], key: object, value: object) -> None:
    """Add an entry to the table `known`, or replace the entry with the same key.

    If the table then has more than `MAX_REMEMBERED` entries, the oldest entry is dropped.
    """
    known[key] = value
    known.move_to_end(key)
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
