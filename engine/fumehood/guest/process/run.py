"""Runs and checkouts as the supervisor keeps them: the request, and its state so far.

Guest side. Values only; `supervisor` moves them along.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fumehood.guest.core.limits import Limits
from fumehood.protocol import framing


@dataclass
class Run:
    """One call on its way. `killed_for` is the supervisor's own reason, and it wins."""

    id: int
    program: str
    arguments: dict[str, Any]
    limits: Limits
    deadline: float = 0.0
    cpu_before_ns: int | None = None
    killed_for: str | None = None
    received_bytes: int = 0
    reports: int = 0
    parts: list[str] = field(default_factory=list)
    """Received, and not passed on yet."""


@dataclass
class Checkout:
    """A child that the host asked for, to talk to it directly."""

    id: int
    memory_bytes: int
    cpu_s: float
    killed_for: str | None = None


def parse_checkout(message: dict[str, Any]) -> Checkout:
    """The checkout in a host's frame. Raises KeyError, TypeError: not of this form."""
    return Checkout(
        id=message["id"],
        memory_bytes=int(message["memory_bytes"]),
        cpu_s=float(message["cpu_s"]),
    )


def parse_run(message: dict[str, Any]) -> Run:
    """The run in a host's frame.

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
