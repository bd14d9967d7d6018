"""Result checkers: their input, a successful result, and their verdict on it. Values only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fumehood.core.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class CheckedResult:
    """A successful result, as its caller will get it, and the call that it answers."""

    tool: str
    arguments: JsonObject
    """Without those that the agent's configuration fixes."""
    data: JsonObject
    principal: str | None
    agent_id: str | None
    session_id: str | None
    trace_id: str


@dataclass(frozen=True, slots=True)
class ResultCheck:
    """A checker's opinion. `correction` says what to do about it, for the caller's model."""

    needs_correction: bool = False
    correction: str | None = None


ResultChecker = Callable[[CheckedResult], Awaitable[ResultCheck | None]]
"""An asynchronous function of the host. It returns None if it does not judge this result."""
