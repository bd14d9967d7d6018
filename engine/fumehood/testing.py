"""Fakes and helpers for tests of programs that embed the engine. Not for production.

May import anything of the engine; nothing of the engine imports it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from fumehood.model.errors import EndedBy
from fumehood.model.identity import TrustDomain
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import PROCESS_WALL_LIMITS, Limit, Limits, WallLimits
from fumehood.sandbox.process.interpreter import INTERPRETER_LIMITS
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks


@dataclass
class ManualClock:
    """A clock that stands still until it is moved."""

    moment: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    seconds: float = 0.0

    def now(self) -> datetime:
        return self.moment

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self.moment += timedelta(seconds=seconds)
        self.seconds += seconds


@dataclass(frozen=True)
class SeenRun:
    """One run that a `FakeWall` was asked for."""

    domain: TrustDomain
    fresh: bool
    program: str
    arguments: JsonObject
    limits: Limits


def always_four(run: SeenRun) -> RunEnding:
    """The default answer of a `FakeWall`."""
    if run.program == "restricted_python":
        return RunEnding(EndedBy.OK, "call", result={"value": 4, "value_repr": "4", "stdout": ""})
    return RunEnding(EndedBy.OK, "call", result={"value": 4, "text": "4"})


@dataclass
class FakeWall:
    """A wall that runs nothing: it notes what it was asked for and answers as it is told."""

    answer: Callable[[SeenRun], RunEnding] = always_four
    limits: WallLimits = INTERPRETER_LIMITS
    required: frozenset[Limit] = PROCESS_WALL_LIMITS
    enforced: frozenset[Limit] = PROCESS_WALL_LIMITS
    cure: str = "This is a fake."
    runs: list[SeenRun] = field(default_factory=list)

    @asynccontextmanager
    async def lease(
        self, domain: TrustDomain, *, fresh: bool, memory_mb: int | None = None
    ) -> AsyncIterator[_FakeLease]:
        """A place at once."""
        yield _FakeLease(self, domain, fresh)


@dataclass
class _FakeLease:
    wall: FakeWall
    domain: TrustDomain
    fresh: bool
    queue_ms: float = 0.0

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        run = SeenRun(self.domain, self.fresh, program, arguments, limits)
        self.wall.runs.append(run)
        return self.wall.answer(run)
