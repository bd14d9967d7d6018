"""What the kernel counts for the whole container: CPU time, memory, refused processes.

Guest side, used by the supervisor. Containers see their own cgroup read-only; version 1 and 2
name its files differently, and some runtimes (old gVisor) show none. What cannot be read is
None, never a guess.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = "/sys/fs/cgroup"
UNLIMITED = 1 << 60
"""Version 1 writes an absent limit as a number near the largest that it has."""


@dataclass(frozen=True, slots=True)
class _Counter:
    """One figure: in which files it may stand, under which key (none: the whole file), in what."""

    files: tuple[str, ...]
    key: str | None = None
    unit: int = 1


_CPU_NS = (_Counter(("cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage")),
           _Counter(("cpu.stat",), "usage_usec", 1000))  # fmt: skip
_OOM_KILLS = (_Counter(("memory/memory.oom_control",), "oom_kill"),
              _Counter(("memory.events",), "oom_kill"))  # fmt: skip
_PEAK_BYTES = (_Counter(("memory/memory.max_usage_in_bytes", "memory.peak")),)
_MEMORY_LIMIT = (_Counter(("memory/memory.limit_in_bytes", "memory.max")),)
_REFUSED_PROCESSES = (_Counter(("pids/pids.events", "pids.events"), "max"),)
_PROCESSES = (_Counter(("pids/pids.current", "pids.current")),)
_PROCESS_LIMIT = (_Counter(("pids/pids.max", "pids.max")),)


class Counters:
    """The counters of this process's cgroup. Each answers None where the kernel shows none."""

    def __init__(self, root: str = ROOT) -> None:
        self._root = root
        self._cpu = self._open(_CPU_NS)
        self._oom_kills = self._open(_OOM_KILLS)
        self._peak = self._open(_PEAK_BYTES)
        self._refused = self._open(_REFUSED_PROCESSES)
        self._processes = self._open(_PROCESSES)
        self.memory_limit = self._read_once(_MEMORY_LIMIT)
        self.process_limit = self._read_once(_PROCESS_LIMIT)

    def cpu_ns(self) -> int | None:
        """CPU time of every process that ever was in the container."""
        return _read(self._cpu)

    def oom_kills(self) -> int | None:
        """How many processes the kernel has killed for want of memory."""
        return _read(self._oom_kills)

    def peak_bytes(self) -> int | None:
        """The most memory that was ever in use at once."""
        return _read(self._peak)

    def refused_processes(self) -> int | None:
        """How often a process could not be started because there were too many."""
        return _read(self._refused)

    def processes(self) -> int | None:
        """How many processes and threads there are now."""
        return _read(self._processes)

    def _open(self, counters: Sequence[_Counter]) -> tuple[int, _Counter] | None:
        for counter in counters:
            for file in counter.files:
                try:
                    opened = os.open(f"{self._root}/{file}", os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    continue
                if _read((opened, counter)) is not None:
                    return opened, counter
                os.close(opened)
        return None

    def _read_once(self, counters: Sequence[_Counter]) -> int | None:
        opened = self._open(counters)
        if opened is None:
            return None
        value = _read(opened)
        os.close(opened[0])
        return None if value is None or value > UNLIMITED else value


def _read(opened: tuple[int, _Counter] | None) -> int | None:
    if opened is None:
        return None
    descriptor, counter = opened
    try:
        text = os.pread(descriptor, 4096, 0).decode("ascii")
        if counter.key is None:
            return int(text) * counter.unit
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == counter.key:
                return int(value) * counter.unit
    except (OSError, ValueError):  # `max` is no number: there is no limit
        pass
    return None
