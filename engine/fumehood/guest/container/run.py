"""A call's run in a container, and how its ending is named.

Guest side; values and pure functions. Invariant: a claim may name a failure but never undo one. The
supervisor's own reason for a kill has precedence, then the kernel's counters, then the exit status.
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
"""Refused operations that no kernel counter shows; the program reports them as uncaught exceptions.
"""


@dataclass
class Measures:
    """Counters before a run, each None if this host does not show it."""

    cpu_ns: int | None
    own_cpu_ns: int
    oom_kills: int | None
    refused_processes: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Answer:
    """The answer to a tool call of the program, as a frame for its child."""

    id: int
    frame: bytes


@dataclass(frozen=True)
class Keep:
    """The container is now a session's. `wait_s` is how long it waits for another engine when this
    one is gone; `epoch` is this one's.
    """

    epoch: int
    wait_s: float


@dataclass
class Run:
    """A call being run. `killed_for` is the supervisor's reason for a kill and has precedence."""

    id: int
    program: str
    limits: Limits
    request: bytearray
    keep: bool = False
    """Files, and a Python program's variables, are kept for the next run."""
    live: bool = False
    """Its output is followed, so it is sent at once."""
    thin: bool = False
    """It appears to need no module that the image preloads."""
    has_tools: bool = False
    """Its program may call other tools."""
    calls: int = 0
    """Tool calls that were forwarded."""
    left_s: float | None = None
    """Seconds left while the clock is paused."""
    was_paused: bool = False
    trial: tuple[str, str] | None = None
    """What to do with the variables of a trial (`hold`, `adopt` or `drop`), and its token."""
    trust: str | None = None
    """Certificates for its clients, if it has network; empty if the host feeds it bytes instead."""
    fed_bytes: int = 0
    """Bytes of the host at the end of `request`."""
    quiet: bool = False
    """Only its figures are wanted, not its files."""
    is_left: bool = False
    """Its host is gone, so nobody receives what it leaves."""
    child: Child | None = None
    before: Measures | None = None
    deadline: float = 0.0
    killed_for: str | None = None
    look_at: float = 0.0
    """When to look whether it is dead, once it was killed."""
    since_ns: int = 0
    """When it started, by the clock that stamps files."""
    stayed: bool = False
    """It reported that it is done, and stays alive with its variables."""
    is_over: bool = False
    """It is being concluded."""
    lost_variables: bool = False
    """There were variables before it, and they are lost."""
    reports: int = 0
    claim: dict[str, Any] | None = None
    sent_bytes: int = 0
    has_begun: bool = False
    """Whether its child read any of the request, which it does once it is sealed."""
    received_bytes: int = 0
    status: int | None = None
    child_cpu_ns: int = 0
    """CPU time of the child before its program began."""
    waited_cpu_ns: int = 0
    """CPU time of the processes that the child had reaped before."""
    is_beside: bool = False
    """Whether registered processes ran at any time during it."""
    reaped_cpu_ns: int = 0
    largest_bytes: int = 0
    limits_hit: set[str] = field(default_factory=set)


def ending_of(
    run: Run,
    exit_code: int | None,
    signal_number: int | None,
    *,
    out_of_memory: bool,
    cpu_ms: float | None = None,
) -> tuple[str, dict[str, Any] | None]:
    """How a run ended, and the part of its claim that is forwarded."""
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


def stays(run: Run) -> bool:
    """Whether a session's program claims that it is done and stays alive."""
    return run.keep and (run.claim or {}).get("stays") is True


def claimed_exit(run: Run) -> int:
    """The exit code that a living process claims; 1 if it is invalid."""
    code = (run.claim or {}).get("exit_code")
    return code if isinstance(code, int) and not isinstance(code, bool) and 0 <= code < 256 else 1


def claimed_limits(run: Run) -> set[str]:
    """Limits that an uncaught exception names."""
    number = _error_of(run).get("errno")
    name = _CLAIMED_LIMITS.get(number) if isinstance(number, int) else None
    return set() if name is None else {name}


def _ending_of_signal(run: Run, number: int, cpu_ms: float | None) -> str:
    if number == signal.SIGSYS:
        return "policy"
    # A process may send it to itself.
    is_spent = cpu_ms is None or cpu_ms >= run.limits.cpu_s * 1e3
    return "cpu_time" if number == signal.SIGXCPU and is_spent else "signal"


def _told(run: Run) -> dict[str, Any]:
    """The part of a failure that is forwarded: the host reads exactly these three fields."""
    return {"error": {key: _error_of(run).get(key) for key in ("kind", "message", "exception")}}


def _error_of(run: Run) -> dict[str, Any]:
    """The claimed failure, empty if there is none."""
    error = (run.claim or {}).get("error")
    return error if isinstance(error, dict) else {}
