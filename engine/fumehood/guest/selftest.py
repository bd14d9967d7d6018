"""The self-test: each defence is attacked once at the start, and only what held is published.

Guest side, beside the supervisor. The attacks themselves are in `probe`; they run in
children of the ordinary kind, as runs with negative ids.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Protocol

from fumehood.guest import kernel
from fumehood.guest.run import Limits, Run

PROBE_MEMORY_BYTES = 16 << 20
PROBE_WALL_S = 0.05
PROBE_DEADLINE_S = 5.0


class Announcer(Protocol):
    """What the self-test needs of the supervisor."""

    def submit(self, run: Run) -> None: ...

    def announce(self, enforces: dict[str, bool]) -> None: ...


class SelfTest:
    """Tries each defence once at the start; `ready` says which of them held."""

    EXPECTED: tuple[tuple[str, str, Callable[[dict[str, Any]], bool]], ...] = (
        ("memory", "memory", lambda e: e["claim"] == {"result": {"outcome": "refused"}}),
        ("files", "files", lambda e: e["claim"] == {"result": {"outcome": "refused"}}),
        ("processes", "processes", lambda e: e["signal"] == signal.SIGSYS),
        ("network", "network", lambda e: e["signal"] == signal.SIGSYS),
        ("spin", "wall_time", lambda e: e["ended_by"] == "wall_time"),
    )

    def __init__(self, supervisor: Announcer) -> None:
        self._supervisor = supervisor
        self._held: dict[str, bool] = {}

    def start(self) -> None:
        """Queue every attack as a run of its own; their ids are negative."""
        for number, (attack, _, _) in enumerate(self.EXPECTED):
            wall_s = PROBE_WALL_S if attack == "spin" else PROBE_DEADLINE_S
            self._supervisor.submit(
                Run(
                    id=-1 - number,
                    program="probe",
                    arguments={"attack": attack},
                    limits=Limits(wall_s, PROBE_DEADLINE_S, PROBE_MEMORY_BYTES, 1024),
                )
            )

    def ended(self, run: Run, ending: dict[str, Any]) -> None:
        """Note one outcome; after the last, publish."""
        _, limit, holds = self.EXPECTED[-1 - run.id]
        self._held[limit] = holds(ending)
        if len(self._held) == len(self.EXPECTED):
            # CPU time and output are kept by the same two means as wall time: the
            # supervisor's own counter, and its kill, which the spin probe has shown.
            kept = self._held["wall_time"]
            counted = kernel.process_cpu_ns(os.getpid()) is not None
            self._supervisor.announce({**self._held, "cpu_time": kept and counted, "output": kept})
