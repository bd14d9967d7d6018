"""Measures the resources that a run used, by the counters of the operating system and never by a
program's claims.

Guest side, used by the supervisor. Containers see their own cgroup read-only. Versions 1 and 2 of
cgroups name the files differently, and some runtimes (old gVisor) have no such files. If a counter
cannot be read, its value is None, never a guess.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from fumehood.guest.container import processes
from fumehood.guest.container.places import COUNTERS
from fumehood.guest.container.run import Measures, Run
from fumehood.guest.core import kernel

UNLIMITED = 1 << 60
"""Values above this constant count as no limit, because cgroup version 1 reports a huge number if
there is no limit.
"""


_Source = tuple[str, str | None, int]
"""Where a counter may be found: the path of a file, the counter's key in this file (None if the
file contains only the counter), and the factor that converts it to the unit used here.
"""


Counter = Literal[
    "cpu_ns", "oom_kills", "peak_bytes", "refused_processes", "processes", "memory_limit",
    "process_limit",
]  # fmt: skip
"""The names of the counters. In this order, they count: CPU time of all processes that were ever in
the container; number of processes killed because memory ran out; peak memory; number of refused
process starts; current number of processes and threads; memory limit; limit of processes and
threads.
"""

_SOURCES: Mapping[Counter, tuple[_Source, ...]] = MappingProxyType(
    {
        "cpu_ns": (
            ("cpuacct/cpuacct.usage", None, 1),
            ("cpu,cpuacct/cpuacct.usage", None, 1),
            ("cpu.stat", "usage_usec", 1000),
        ),
        "oom_kills": (
            ("memory/memory.oom_control", "oom_kill", 1),
            ("memory.events", "oom_kill", 1),
        ),
        "peak_bytes": (("memory/memory.max_usage_in_bytes", None, 1), ("memory.peak", None, 1)),
        "refused_processes": (("pids/pids.events", "max", 1), ("pids.events", "max", 1)),
        "processes": (("pids/pids.current", None, 1), ("pids.current", None, 1)),
        "memory_limit": (("memory/memory.limit_in_bytes", None, 1), ("memory.max", None, 1)),
        "process_limit": (("pids/pids.max", None, 1), ("pids.max", None, 1)),
    }
)


class Counters:
    """The counters and limits of this process's cgroup. The value of a counter is None if the
    operating system does not show it.
    """

    def __init__(self, root: str = COUNTERS) -> None:
        self._root = root
        self._opened = {name: self._open(sources) for name, sources in _SOURCES.items()}
        self.memory_limit = self._limit("memory_limit")
        self.process_limit = self._limit("process_limit")

    def read(self, name: Counter) -> int | None:
        """Return the current value of the counter `name`, or None if the operating system does not
        show it.
        """
        return _read(self._opened[name])

    def _open(self, sources: Sequence[_Source]) -> tuple[int, _Source] | None:
        for source in sources:
            try:
                opened = os.open(f"{self._root}/{source[0]}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            if _read((opened, source)) is not None:
                return opened, source
            os.close(opened)
        return None

    def _limit(self, name: Counter) -> int | None:
        value = self.read(name)
        return None if value is None or value > UNLIMITED else value


class Meter:
    """Measures the resources that runs use. `counters` are the counters of the container.

    `own_pids` returns the ids of the guest's processes other than this process. `run_pids` returns
    the ids of a run's processes.
    """

    def __init__(
        self,
        counters: Counters,
        own_pids: Callable[[], Iterable[int]],
        run_pids: Callable[[Run], Iterable[int]],
    ) -> None:
        self._counters = counters
        self._own_pids = own_pids
        self._run_pids = run_pids

    def read(self) -> Measures:
        """Return the current values of the counters."""
        own = [os.getpid(), *self._own_pids()]
        return Measures(
            cpu_ns=self._counters.read("cpu_ns"),
            own_cpu_ns=sum(kernel.process_cpu_ns(pid) or 0 for pid in own),
            oom_kills=self._counters.read("oom_kills"),
            refused_processes=self._counters.read("refused_processes"),
            peak_bytes=self._counters.read("peak_bytes"),
        )

    def is_out_of_memory(self, run: Run) -> bool:
        """Return whether the operating system has killed a process because memory ran out since the
        run began.
        """
        before = run.before.oom_kills if run.before is not None else None
        return before is not None and (self._counters.read("oom_kills") or 0) > before

    def cpu_ms(self, run: Run) -> float | None:
        """Return the CPU time in milliseconds that the program and its descendants have used.
        Return None if it is unknown.

        This is the CPU time of the container minus that of the guest. If registered processes ran
        during the run, their CPU time is included. In this case, if the CPU times of the run's own
        processes have a lower sum, return this sum.
        """
        used_ms = self._container_cpu_ms(run)
        if used_ms is None or not run.is_beside:
            return used_ms
        # A program can hide some of its CPU time here, because the operating system never reports
        # the CPU time of children whose parent ignores SIGCHLD. For the same reason, the CPU time
        # of registered processes cannot be measured and subtracted.
        return min(used_ms, self._own_cpu_ms(run))

    def left_cpu_s(self, run: Run) -> float:
        """Return a lower bound for the CPU time in seconds that the run may still use."""
        used_ms = self._container_cpu_ms(run) or 0.0
        if run.is_beside and used_ms >= run.limits.cpu_s * 1e3:
            used_ms = self.cpu_ms(run) or 0.0  # slower, because it lists all processes
        return run.limits.cpu_s - used_ms / 1e3

    def _own_cpu_ms(self, run: Run) -> float:
        used_ns = run.reaped_cpu_ns
        for pid in self._run_pids(run):
            used_ns += (kernel.process_cpu_ns(pid) or 0) + processes.waited_cpu_ns(pid)
            if run.child is not None and run.child.pid == pid:
                used_ns -= run.child_cpu_ns + run.waited_cpu_ns
        return max(0, used_ns) / 1e6

    def _container_cpu_ms(self, run: Run) -> float | None:
        before = run.before
        if before is None:
            return None
        after = self.read()
        if before.cpu_ns is None or after.cpu_ns is None:
            return self._own_cpu_ms(run)
        own_ns = after.own_cpu_ns - before.own_cpu_ns
        return max(0.0, (after.cpu_ns - before.cpu_ns - own_ns) / 1e6)

    def peak_bytes(self, run: Run, *, ended_by: str) -> int | None:
        """Return the peak memory of the run's largest process in bytes, or None if it is unknown.

        If `ended_by` is "memory", and the container's peak memory has risen during the run, return
        the container's peak memory instead.
        """
        peak = self._counters.read("peak_bytes")
        before = run.before.peak_bytes if run.before is not None else None
        if ended_by == "memory" and peak and peak > (before or 0):
            return peak
        return max(run.largest_bytes, run.watched_bytes) or None

    def has_refused_processes(self, run: Run) -> bool:
        """Return whether the operating system has refused to start a process since the run
        began.
        """
        before = run.before.refused_processes if run.before is not None else None
        return before is not None and (self._counters.read("refused_processes") or 0) > before


def _read(opened: tuple[int, _Source] | None) -> int | None:
    if opened is None:
        return None
    descriptor, (_, wanted, unit) = opened
    try:
        text = os.pread(descriptor, 4096, 0).decode("ascii")
        if wanted is None:
            return int(text) * unit
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == wanted:
                return int(value) * unit
    except (OSError, ValueError):  # for example `max`, if there is no limit
        pass
    return None
