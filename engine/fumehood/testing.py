"""Fakes and helpers for tests of programs that embed the engine. Not for production.

May import anything of the engine; nothing of the engine imports it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from fumehood.model.errors import EndedBy
from fumehood.model.identity import TrustDomain
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import MB, PROCESS_WALL_LIMITS, Limit, Limits, WallLimits
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


CONTAINER_LIMITS = WallLimits(
    default_wall_s=30,
    max_wall_s=600,
    default_memory_mb=512,
    max_memory_mb=2048,
    min_memory_mb=128,
    output_bytes=MB,
    memory_classes=(128, 256, 512, 1024, 2048),
)
"""What a container wall offers where nothing is configured."""

FILE_CHUNK_BYTES = 64 * 1024


def always_four(run: SeenRun) -> RunEnding:
    """The default answer of a `FakeWall`."""
    if run.program == "python":
        four: JsonObject = {"value": 4, "has_value": True, "value_repr": "4"}
        return RunEnding(EndedBy.OK, "call", exit_code=0, result=four)
    if run.program == "restricted_python":
        return RunEnding(EndedBy.OK, "call", result={"value": 4, "value_repr": "4", "stdout": ""})
    return RunEnding(EndedBy.OK, "call", result={"value": 4, "text": "4"})


@dataclass
class FakeWall:
    """A wall that runs nothing: it notes what it was asked for and answers as it is told.

    `files` are what each run leaves in its workspace, for who asks for them. `meanwhile` is
    awaited before a run ends, and may tell its sinks of output and progress.
    """

    answer: Callable[[SeenRun], RunEnding] = always_four
    limits: WallLimits = INTERPRETER_LIMITS
    required: frozenset[Limit] = PROCESS_WALL_LIMITS
    enforced: frozenset[Limit] = PROCESS_WALL_LIMITS
    cure: str = "This is a fake."
    heals: bool = True
    runs: list[SeenRun] = field(default_factory=list)
    files: Callable[[SeenRun], Iterable[tuple[str, bytes]]] = lambda run: ()
    meanwhile: Callable[[SeenRun, RunSinks], Awaitable[None]] | None = None

    @asynccontextmanager
    async def lease(
        self, domain: TrustDomain, *, fresh: bool, memory_mb: int | None = None
    ) -> AsyncIterator[_FakeLease]:
        """A place at once."""
        yield _FakeLease(self, domain, fresh, memory_mb)


@dataclass
class _FakeLease:
    wall: FakeWall
    domain: TrustDomain
    fresh: bool
    memory_mb: int | None = None
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
        if self.wall.meanwhile is not None:
            await self.wall.meanwhile(run, sinks)
        if sinks.files is not None:
            for path, content in self.wall.files(run):
                sinks.files.start(path, len(content))
                for start in range(0, len(content), FILE_CHUNK_BYTES):
                    sinks.files.write(content[start : start + FILE_CHUNK_BYTES])
        return self.wall.answer(run)
