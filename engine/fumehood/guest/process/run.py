"""Runs and checkouts in the supervisor, and the self-test that attacks each defence once at start.

Guest side. The attacks (`run_probe`) run in ordinary children, as runs with negative ids. No
outside request can name them: the host builds requests, and the supervisor refuses one for a probe.
Only defences that held are published.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fumehood.guest.core import kernel
from fumehood.guest.core.limits import Limits
from fumehood.protocol import framing


@dataclass
class Run:
    """A call being run. `killed_for` is the supervisor's own reason for a kill and overrides every
    other ending.
    """

    id: int
    program: str
    arguments: dict[str, Any]
    limits: Limits
    deadline: float = 0.0
    cpu_before_ns: int = 0
    killed_for: str | None = None
    received_bytes: int = 0
    reports: int = 0
    parts: list[str] = field(default_factory=list)
    """Received parts that were not forwarded yet."""


@dataclass
class Checkout:
    """A child checked out by the host, which talks to it directly."""

    id: int
    memory_bytes: int
    cpu_s: float
    killed_for: str | None = None


def parse_run(message: dict[str, Any]) -> Run:
    """Parse a run from a host's frame.

    Raises:
        FrameError: it asks for a probe, which no call may.
        KeyError, TypeError: the frame is not of this form.
    """
    if message["program"] == "probe":
        raise framing.FrameError("a probe is not a program for calls")
    return Run(
        id=message["id"],
        program=message["program"],
        arguments=message["arguments"],
        limits=Limits(**message["limits"]),
    )


PROBE_MEMORY_BYTES = 16 << 20
PROBE_WALL_S = 0.02
PROBE_DEADLINE_S = 5.0


def _was_refused(ending: dict[str, Any]) -> bool:
    return bool(ending["claim"] == {"result": {"outcome": "refused"}})


def _was_killed(ending: dict[str, Any]) -> bool:
    return bool(ending["signal"] == signal.SIGSYS)


Row = tuple[str, str, Callable[[dict[str, Any]], bool]]
"""An attack of `run_probe`, the limit that it tests, and a check of whether that limit held."""

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
"""The same attacks, but on files outside the view, because the jail may read some files."""


class SelfTest:
    """Attacks each defence once at start; `ready` reports which of them held."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._held: dict[str, bool] = {}

    def runs(self) -> Iterator[Run]:
        """Every attack, as a run with a negative id."""
        for number, (attack, _, _) in enumerate(self._rows):
            wall_s = PROBE_WALL_S if attack == "spin" else PROBE_DEADLINE_S
            yield Run(
                id=-1 - number,
                program="probe",
                arguments={"attack": attack},
                limits=Limits(wall_s, PROBE_DEADLINE_S, PROBE_MEMORY_BYTES, 1024),
            )

    def ended(self, run: Run, ending: dict[str, Any]) -> dict[str, bool] | None:
        """Record one outcome. Returns the enforced limits after the last."""
        _, limit, holds = self._rows[-1 - run.id]
        self._held[limit] = holds(ending)
        if len(self._held) < len(self._rows):
            return None
        # CPU time and output are kept by the same two means as wall time: the
        # supervisor's own counter, and its kill, which the spin probe has shown.
        kept = self._held["wall_time"]
        counted = kernel.process_cpu_ns(os.getpid()) is not None
        return {**self._held, "cpu_time": kept and counted, "output": kept}


def run_probe(request: dict[str, Any]) -> dict[str, Any]:
    """Run the attack that the request names. A reply means that the child survived it."""
    return {"result": {"outcome": _ATTACKS[request["arguments"]["attack"]]()}}


def _take_memory() -> str:
    # Caught here and not below: the probe must know that the refusal came from this line.
    try:
        return f"got {len(bytearray(1 << 30))} bytes"
    except MemoryError:
        return "refused"


def _open_file() -> str:
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except PermissionError:
        return "refused"
    return "opened"


def _look_outside() -> str:
    """Try to read a file and a directory that every Linux has, and to write to a world-writable
    directory.
    """
    outside: tuple[Callable[[], object], ...] = (
        lambda: os.listdir("/"),
        lambda: os.open("/proc/self/status", os.O_RDONLY),
        lambda: os.open("/dev/shm/fumehood-probe", os.O_WRONLY | os.O_CREAT),  # noqa: S108
    )
    for attack in outside:
        try:
            attack()
        except PermissionError:
            continue
        return "seen"
    with open(os.__file__, "rb") as inside:  # or a wall without any view would pass
        inside.read(1)
    return "refused"


def _start_process() -> str:
    if os.fork() == 0:
        os._exit(0)
    return "started"


def _open_socket() -> str:
    import _socket

    _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    return "opened"


def _spin() -> str:
    while True:
        pass


_ATTACKS = {
    "memory": _take_memory,
    "files": _open_file,
    "outside": _look_outside,
    "processes": _start_process,
    "network": _open_socket,
    "spin": _spin,
}
