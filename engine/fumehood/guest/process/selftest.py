"""The self-test: each defence is attacked once at the start, and only what held is published.

Guest side, beside the supervisor. The attacks themselves are in `probe`; they run in
children of the ordinary kind, as runs with negative ids.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fumehood.guest.core import kernel
from fumehood.guest.process.run import Limits, Run

PROBE_MEMORY_BYTES = 16 << 20
PROBE_WALL_S = 0.05
PROBE_DEADLINE_S = 5.0


class Announcer(Protocol):
    """What the self-test needs of the supervisor."""

    def submit(self, run: Run) -> None: ...

    def announce(self, enforces: dict[str, bool]) -> None: ...


def _was_refused(ending: dict[str, Any]) -> bool:
    return bool(ending["claim"] == {"result": {"outcome": "refused"}})


def _was_killed(ending: dict[str, Any]) -> bool:
    return bool(ending["signal"] == signal.SIGSYS)


Row = tuple[str, str, Callable[[dict[str, Any]], bool]]
"""An attack of `probe`, the limit that it tries, and whether that one held."""

INTERPRETER: tuple[Row, ...] = (
    ("memory", "memory", _was_refused),
    ("files", "files", _was_refused),
    ("processes", "processes", _was_killed),
    ("network", "network", _was_killed),
    ("spin", "wall_time", lambda e: bool(e["ended_by"] == "wall_time")),
)
JAIL: tuple[Row, ...] = tuple(
    ("outside", limit, holds) if attack == "files" else (attack, limit, holds)
    for attack, limit, holds in INTERPRETER
)
"""The jail reads some files, so there the attack is on those that it must not see."""


class SelfTest:
    """Tries each defence once at the start; `ready` says which of them held."""

    def __init__(self, supervisor: Announcer, rows: Sequence[Row]) -> None:
        self._supervisor = supervisor
        self._rows = rows
        self._held: dict[str, bool] = {}

    def start(self) -> None:
        """Queue every attack as a run of its own; their ids are negative."""
        for number, (attack, _, _) in enumerate(self._rows):
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
        _, limit, holds = self._rows[-1 - run.id]
        self._held[limit] = holds(ending)
        if len(self._held) == len(self._rows):
            # CPU time and output are kept by the same two means as wall time: the
            # supervisor's own counter, and its kill, which the spin probe has shown.
            kept = self._held["wall_time"]
            counted = kernel.process_cpu_ns(os.getpid()) is not None
            self._supervisor.announce({**self._held, "cpu_time": kept and counted, "output": kept})
