"""The resources that a run used, from the kernel's counters of the container and never from the
program.

Guest side, used by the supervisor. Containers see their own cgroup read-only; versions 1 and 2 name
its files differently, and some runtimes (old gVisor) show none. A counter that cannot be read is
None, never a guess.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fumehood.guest.container.run import Measures, Run
from fumehood.guest.core import kernel

ROOT = "/sys/fs/cgroup"
UNLIMITED = 1 << 60
"""cgroup version 1 reports no limit as a huge number; anything above this counts as no limit."""


@dataclass(frozen=True, slots=True)
class _Counter:
    """One counter: the files that may hold it, its key (None for the whole file), and its unit."""

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
    """The counters of this process's cgroup; each is None if the kernel does not show it."""

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
        """CPU time of every process that was ever in the container."""
        return _read(self._cpu)

    def oom_kills(self) -> int | None:
        """How many processes the kernel killed because memory ran out."""
        return _read(self._oom_kills)

    def peak_bytes(self) -> int | None:
        """Peak memory of the container."""
        return _read(self._peak)

    def refused_processes(self) -> int | None:
        """How often a process could not start because there were too many."""
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


class Meter:
    """Reads the counters before and after a run. `own_pids` returns the guest's other processes."""

    def __init__(self, counters: Counters, own_pids: Callable[[], Iterable[int]]) -> None:
        self._counters = counters
        self._own_pids = own_pids

    def read(self) -> Measures:
        """All counters at this moment."""
        own = [os.getpid(), *self._own_pids()]
        return Measures(
            cpu_ns=self._counters.cpu_ns(),
            own_cpu_ns=sum(kernel.process_cpu_ns(pid) or 0 for pid in own),
            oom_kills=self._counters.oom_kills(),
            refused_processes=self._counters.refused_processes(),
            peak_bytes=self._counters.peak_bytes(),
        )

    def is_out_of_memory(self, run: Run) -> bool:
        """Whether the kernel has killed a process for memory since the run began."""
        before = run.before.oom_kills if run.before is not None else None
        return before is not None and (self._counters.oom_kills() or 0) > before

    def cpu_ms(self, run: Run) -> float | None:
        """CPU time of the program and its descendants: the container's, minus the guest's own."""
        before = run.before
        if before is None:
            return None
        after = self.read()
        if before.cpu_ns is None or after.cpu_ns is None:
            return run.reaped_cpu_ns / 1e6 if run.status is not None else None
        own_ns = after.own_cpu_ns - before.own_cpu_ns
        return max(0.0, (after.cpu_ns - before.cpu_ns - own_ns) / 1e6)

    def peak_bytes(self, run: Run, *, ended_by: str) -> int | None:
        """Memory of the largest process, or of the container if this run raised its peak and ran
        out of memory.
        """
        peak = self._counters.peak_bytes()
        before = run.before.peak_bytes if run.before is not None else None
        if ended_by == "memory" and peak and peak > (before or 0):
            return peak
        return run.largest_bytes or None

    def has_refused_processes(self, run: Run) -> bool:
        """Whether a process was refused since the run began."""
        before = run.before.refused_processes if run.before is not None else None
        return before is not None and (self._counters.refused_processes() or 0) > before


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
