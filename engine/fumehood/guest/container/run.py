"""One call's run in a container, and the name of its ending.

Guest side; values and pure functions of the supervisor. Invariant: a claim may name a failure,
never undo one; the supervisor's own reason to kill stands first, the kernel's counters second,
the exit status third.
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
"""Refusals that no counter of the kernel shows; the program reports an uncaught one."""


@dataclass
class Measures:
    """Counters before a run, or None if this host shows none."""

    cpu_ns: int | None
    own_cpu_ns: int
    oom_kills: int | None
    refused_processes: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Answer:
    """The answer to a call that the program of a run made, as a frame for its child."""

    id: int
    frame: bytes


@dataclass(frozen=True)
class Pause:
    """The program of a run waits for a human, or does so no more."""

    id: int
    is_paused: bool


@dataclass
class Run:
    """One call on its way. `killed_for` is the supervisor's own reason, and it wins."""

    id: int
    program: str
    limits: Limits
    request: bytes
    keep: bool = False
    """Files, and a Python program's variables, are there for the next run."""
    live: bool = False
    """It is followed: its output is sent at once."""
    thin: bool = False
    """It seems to need nothing that the image preloads."""
    has_tools: bool = False
    """Its program may call other tools."""
    calls: int = 0
    """Calls that were passed on."""
    left_s: float | None = None
    """Seconds left while the clock is paused."""
    was_paused: bool = False
    quiet: bool = False
    """Nobody wants its files, only its figures."""
    child: Child | None = None
    before: Measures | None = None
    deadline: float = 0.0
    killed_for: str | None = None
    killed_at: float = 0.0
    since_ns: int = 0
    """When it began, by the clock by which files are stamped."""
    stayed: bool = False
    """It said that it is done, and lives on with its variables."""
    is_over: bool = False
    """It is being concluded."""
    lost_variables: bool = False
    """There were some before it, and they are gone."""
    reports: int = 0
    claim: dict[str, Any] | None = None
    sent_bytes: int = 0
    has_begun: bool = False
    """Whether its child took any of the request, which it does when it is sealed."""
    received_bytes: int = 0
    status: int | None = None
    child_cpu_ns: int = 0
    """CPU time of the child before its program began."""
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
    """How a run ended, and the part of its claim that is passed on."""
    claimed = _claimed_kind(run.claim)
    if run.killed_for is not None:
        return run.killed_for, None
    if out_of_memory:
        return "memory", None
    if signal_number is not None:
        return _ending_of_signal(run, signal_number, cpu_ms), None
    if exit_code == 0:
        result = run.claim.get("result") if run.claim is not None else None
        return "ok", {"result": result} if isinstance(result, dict) else None
    if claimed == "exception" or (claimed == "invalid" and exit_code == REQUEST_FAILED):
        return "exception", _told(run.claim)
    if claimed == "memory":
        return "memory", _told(run.claim)
    if exit_code == SEAL_FAILED and not run.has_begun and run.claim is not None:
        return "sandbox_lost", None
    return "exit", None


def stays(run: Run) -> bool:
    """Whether a session's program claims that it is done and lives on."""
    claim = run.claim
    return run.keep and claim is not None and claim.get("stays") is True


def claimed_exit(run: Run) -> int:
    """The exit code that a living process claims; an invalid one is a failure."""
    code = run.claim.get("exit_code") if run.claim is not None else None
    return code if isinstance(code, int) and not isinstance(code, bool) and 0 <= code < 256 else 1


def claimed_limits(claim: dict[str, Any] | None) -> set[str]:
    """Limits that an uncaught exception names."""
    error = claim.get("error") if claim is not None else None
    number = error.get("errno") if isinstance(error, dict) else None
    name = _CLAIMED_LIMITS.get(number) if isinstance(number, int) else None
    return set() if name is None else {name}


def _ending_of_signal(run: Run, number: int, cpu_ms: float | None) -> str:
    if number == signal.SIGSYS:
        return "policy"
    # A process may send it to itself.
    is_spent = cpu_ms is None or cpu_ms >= run.limits.cpu_s * 1e3
    return "cpu_time" if number == signal.SIGXCPU and is_spent else "signal"


def _told(claim: dict[str, Any] | None) -> dict[str, Any]:
    """The part of a failure that is passed to the host, which reads exactly these three."""
    error = claim["error"] if claim is not None else {}
    return {"error": {key: error.get(key) for key in ("kind", "message", "exception")}}


def _claimed_kind(claim: dict[str, Any] | None) -> Any:
    error = claim.get("error") if claim is not None else None
    return error.get("kind") if isinstance(error, dict) else None
