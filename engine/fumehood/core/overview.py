"""What approvers and administrators see of everybody's calls, sessions and tools. Values only."""

from __future__ import annotations

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from fumehood.core.call import Id
from fumehood.core.call_log import CallQuery
from fumehood.core.session import SessionRecord
from fumehood.core.status import CircuitStatus, Readiness

MAX_RULES_BYTES = 100_000


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class AllCallsQuery(CallQuery):
    """Which calls of all principals to list. Absent filters hold nothing back."""

    principal: str | None = Field(default=None, min_length=1, max_length=200)
    session: Id | None = None
    trace: Id | None = None
    parent: Id | None = None
    """Only calls that this call's program made."""


class FiguresQuery(_Value):
    """The hours until now that are looked at."""

    hours: int = Field(default=24, ge=1, le=24 * 31)


class ToolFigures(_Value):
    """How the calls of one tool went. `tool` may be a name that no tool has.

    Times are in milliseconds, without the wait for a human's approval; half and 95 of 100 were not
    slower.
    """

    tool: str
    calls: int
    succeeded: int
    failed: int
    """Calls that a program, the engine or a service failed; not refused, denied or invalid ones."""
    mean_ms: float
    p50_ms: float
    p95_ms: float
    last_at: str


class ToolFiguresList(_Value):
    """One entry for each name, the most called first.

    `is_partial` says that only the newest calls of the time were looked at, or that there were
    more names.
    """

    items: tuple[ToolFigures, ...]
    is_partial: bool


class OwnedSession(SessionRecord):
    """A session with its owner."""

    principal_id: str


class EngineSummary(_Value):
    """How the engine is. `containers` and `sessions` are counts by state."""

    version: str
    started_at: AwareDatetime
    mode: str
    environment: str
    is_draining: bool
    running_calls: int
    readiness: Readiness
    containers: dict[str, int]
    sessions: dict[str, int]
    circuits: tuple[CircuitStatus, ...]
    """Circuits of services called since the start, those that are not closed first."""


class RulesToTry(_Value):
    """Rules as in a policy file."""

    rules: str = Field(min_length=1, max_length=MAX_RULES_BYTES)
    """TOML: one or more `[[rules]]`."""

    days: int = Field(default=7, ge=1, le=31, strict=True)


class MatchedCalls(_Value):
    """Calls in the log that a rule is about."""

    tool: str
    principal_id: str
    agent_id: str | None
    calls: int


class TriedRule(_Value):
    """One rule and the past calls that it is about.

    The log has no arguments: `unknown` names the conditions that were taken to hold.
    """

    id: str
    decision: str
    calls: int
    groups: tuple[MatchedCalls, ...]
    """The largest ones."""

    unknown: tuple[str, ...]


class TriedRules(_Value):
    """Rules, and the calls of the log that they were tried against.

    `skipped` calls named a tool that the engine does not have, or not in that version.
    """

    items: tuple[TriedRule, ...]
    calls: int
    skipped: int
    is_partial: bool
