"""The meter: what a run used, from the kernel's counters and never from the program.

Guest side, used by the supervisor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from fumehood.guest.container.counters import Counters
from fumehood.guest.container.run import Measures, Run
from fumehood.guest.core import kernel


class Meter:
    """Reads the counters before and after; `own_pids` names the guest's other processes now."""

    def __init__(self, counters: Counters, own_pids: Callable[[], Iterable[int]]) -> None:
        self._counters = counters
        self._own_pids = own_pids

    def read(self) -> Measures:
        """All of them at this moment."""
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
        """CPU time of the program and all it started: the container's, without the guest's own."""
        before = run.before
        if before is None:
            return None
        after = self.read()
        if before.cpu_ns is None or after.cpu_ns is None:
            return run.reaped_cpu_ns / 1e6 if run.status is not None else None
        own_ns = after.own_cpu_ns - before.own_cpu_ns
        return max(0.0, (after.cpu_ns - before.cpu_ns - own_ns) / 1e6)

    def peak_bytes(self, run: Run, *, ended_by: str) -> int | None:
        """The largest process's memory, or the container's where this very run raised its record
        and ran out.
        """
        peak = self._counters.peak_bytes()
        before = run.before.peak_bytes if run.before is not None else None
        if ended_by == "memory" and peak and peak > (before or 0):
            return peak
        return run.largest_bytes or None

    def has_refused_processes(self, run: Run) -> bool:
        """Whether there were too many since the run began."""
        before = run.before.refused_processes if run.before is not None else None
        return before is not None and (self._counters.refused_processes() or 0) > before
