"""How a run ended: one name, made from the claim of a child and the report of the kernel.

Guest side, pure functions of the supervisor. Invariant: a claim may name a failure, never
undo one, and the supervisor's own reason to kill stands above both.
"""

from __future__ import annotations

import os
import signal
from typing import Any

CLAIMABLE = ("memory", "output", "policy")
"""The failures that a child may claim; see ADR 0010."""


def judge(reply: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The ending of a run that answered. A claim may name a failure, never undo one."""
    error = reply.get("error")
    if error is None and isinstance(reply.get("result"), dict):
        return "ok", {"result": reply["result"]}
    kind = error.get("kind") if isinstance(error, dict) else None
    if kind in CLAIMABLE:
        return kind, {"error": error}
    return "exception", {"error": error if isinstance(error, dict) else {}}


def ending_of(exit_code: int | None, signal_number: int | None) -> str:
    """The ending by the kernel's report, if the supervisor did not kill."""
    if signal_number == signal.SIGSYS:
        return "policy"
    if signal_number == signal.SIGXCPU:
        return "cpu_time"
    if signal_number == signal.SIGKILL or exit_code == 0:
        return "sandbox_lost"  # killed from outside, or left without an answer
    return "exit" if signal_number is None else "signal"


def decode_status(status: int) -> tuple[int | None, int | None]:
    """Exit code or signal in a status of `wait`; one of them is None."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None
