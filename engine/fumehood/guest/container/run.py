"""A call's run in a container, and the rules that decide how it ended.

Guest side; values and pure functions. Invariant: a program's claim may name a failure but never
undo one. The supervisor's own reason for killing the run has precedence over the operating system's
counters, and these have precedence over the exit status.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fumehood.guest.container.prefork_pool import Child
from fumehood.guest.container.processes import REQUEST_FAILED
from fumehood.guest.core.limits import Limits
from fumehood.guest.core.pipes import SEAL_FAILED

_CLAIMED_LIMITS: Mapping[int, str] = MappingProxyType(
    {errno.EMFILE: "open_files", errno.ENOSPC: "disk", errno.EFBIG: "file_size"}
)
"""Error number → limit, for refused operations that no counter of the operating system shows. A
program reports such an operation with its uncaught exception.
"""


@dataclass
class Measures:
    """The container's counters at one moment. A counter is None if the operating system does not
    show it.
    """

    cpu_ns: int | None
    own_cpu_ns: int
    oom_kills: int | None
    refused_processes: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Keep:
    """The host's order that this container belongs to a session. If the current engine disappears,
    the container waits `wait_s` seconds for another engine. `epoch` is the number of the current
    engine. Each later engine has a higher number.
    """

    epoch: int
    wait_s: float


@dataclass
class Run:
    """One run of a program for a call. If the supervisor has killed the program, `killed_for` is
    the reason, such as "memory". The host is then told this reason, whatever else was observed.
    """

    id: int
    program: str
    limits: Limits
    request: bytearray
    keep: bool = False
    """Whether the files, and the variables of a Python program, are kept for the next run."""
    live: bool = False
    """Whether a client follows the output, so that new text must be sent at once."""
    thin: bool = False
    """Whether the program appears to need none of the modules that the image preloads."""
    streams: Mapping[str, str] = field(default_factory=dict)
    """Kind of a stream of this run → the host's text for the guest's end of the stream."""
    left_s: float | None = None
    """Seconds until the deadline, if the clock is paused, otherwise None."""
    was_paused: bool = False
    trial: tuple[str, str] | None = None
    """What to do with the variables of a trial (`hold`, `adopt` or `drop`), and the trial's
    token.
    """
    quiet: bool = False
    """Whether the workspace files of this run are not sent to the host, but only the figures that
    it has drawn.
    """
    is_left: bool = False
    """Whether the host that began the run is gone. If so, nothing of the run is reported."""
    child: Child | None = None
    before: Measures | None = None
    deadline: float = 0.0
    killed_for: str | None = None
    look_at: float = 0.0
    """Time of the next check whether the run's first process is dead, after it was killed."""
    since_ns: int = 0
    """Start of the run in nanoseconds, by the clock that the operating system uses for the times of
    files.
    """
    stayed: bool = False
    """Whether the program's process reported that it has finished and stays alive with its
    variables.
    """
    is_over: bool = False
    """Whether the supervisor has begun to conclude the run."""
    lost_variables: bool = False
    """Whether the session had variables before the run, but they were lost."""
    reports: int = 0
    claim: dict[str, Any] | None = None
    sent_bytes: int = 0
    has_begun: bool = False
    """Whether the child has read a part of the request. A child does so only when it has become the
    programs' user.
    """
    received_bytes: int = 0
    status: int | None = None
    child_cpu_ns: int = 0
    """CPU time in nanoseconds that the child used before its program began."""
    waited_cpu_ns: int = 0
    """CPU time in nanoseconds of the processes that the child had reaped before its program
    began.
    """
    is_beside: bool = False
    """Whether registered processes existed at any time during the run."""
    reaped_cpu_ns: int = 0
    largest_bytes: int = 0
    watched_bytes: int = 0
    """The most memory that the programs were seen to use, if it is watched."""
    limits_hit: set[str] = field(default_factory=set)


def ending_of(
    run: Run,
    exit_code: int | None,
    signal_number: int | None,
    *,
    out_of_memory: bool,
    cpu_ms: float | None = None,
) -> tuple[str, dict[str, Any] | None]:
    """Return two values: how `run` ended, such as "ok", and the part of its claim that is forwarded
    to the host. The second value is None if nothing is forwarded.

    `exit_code` and `signal_number` come from the exit status of the run's first process.
    `out_of_memory` says whether the operating system has killed a process because memory ran out.
    `cpu_ms` is the CPU time of the run in milliseconds, or None if it is unknown.
    """
    claimed = _error_of(run).get("kind")
    if run.killed_for is not None:
        return run.killed_for, None
    if out_of_memory:
        return "memory", None
    if signal_number is not None:
        return _ending_of_signal(run, signal_number, cpu_ms), None
    if exit_code == 0:
        result = (run.claim or {}).get("result")
        return "ok", {"result": result} if isinstance(result, dict) else None
    if claimed == "exception" or (claimed == "invalid" and exit_code == REQUEST_FAILED):
        return "exception", _told(run)
    if claimed == "memory":
        return "memory", _told(run)
    if exit_code == SEAL_FAILED and not run.has_begun and run.claim is not None:
        return "sandbox_lost", None
    return "exit", None


def is_running(run: Run) -> bool:
    """Return whether a run's first process was not killed and, as far as known, has not ended."""
    return run.killed_for is None and not run.is_over and run.status is None


def stays(run: Run) -> bool:
    """Return whether a session's program claims that it has finished and that its process stays
    alive.
    """
    return run.keep and (run.claim or {}).get("stays") is True


def claimed_exit(run: Run) -> int:
    """Return the exit code that the program of `run` claims. Return 1 if it claims no valid exit
    code. Used if the program's process stays alive, because it then has no real exit code.
    """
    code = (run.claim or {}).get("exit_code")
    return code if isinstance(code, int) and not isinstance(code, bool) and 0 <= code < 256 else 1


def claimed_limits(run: Run) -> set[str]:
    """Return the names of the limits that the program of `run` claims to have reached. This is at
    most one name: the limit that belongs to the error number of the claimed exception.
    """
    number = _error_of(run).get("errno")
    name = _CLAIMED_LIMITS.get(number) if isinstance(number, int) else None
    return set() if name is None else {name}


def _ending_of_signal(run: Run, number: int, cpu_ms: float | None) -> str:
    if number == signal.SIGSYS:
        return "policy"
    # A process may send SIGXCPU to itself.
    is_spent = cpu_ms is None or cpu_ms >= run.limits.cpu_s * 1e3
    return "cpu_time" if number == signal.SIGXCPU and is_spent else "signal"


def _told(run: Run) -> dict[str, Any]:
    """Return those fields of a claimed failure that are forwarded to the host. The host reads
    exactly these fields.
    """
    return {"error": {key: _error_of(run).get(key) for key in ("kind", "message", "exception")}}


def _error_of(run: Run) -> dict[str, Any]:
    """Return the failure that the program claims, or {} if it claims none."""
    error = (run.claim or {}).get("error")
    return error if isinstance(error, dict) else {}
