"""Fakes and helpers for tests of programs that embed the engine. Not for production.

This module may import any module of the engine; no module of the engine imports it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import anyio.abc

from fumehood.core.errors import EndedBy, NetworkError, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MIN_MEMORY_MB, Grade, Limit, Limits, WallLimits
from fumehood.core.session import SessionHome, SessionRecord
from fumehood.sandbox.settings import ContainerSettings
from fumehood.sandbox.wall import (
    FIRST_EPOCH,
    NO_SINKS,
    HostSize,
    RunEnding,
    RunSinks,
    WallStatus,
    require_grade,
)

if TYPE_CHECKING:
    from fumehood.devtools.golden import Cassette as Cassette
    from fumehood.devtools.golden import UnexpectedCall as UnexpectedCall


def __getattr__(name: str) -> Any:
    """Import the name from the part `devtools` when it is first used, so that this module works
    without the part.
    """
    if name in ("Cassette", "UnexpectedCall"):
        return getattr(import_module("fumehood.devtools.golden"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class ManualClock:
    """A clock that moves only when `advance` is called."""

    moment: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    seconds: float = 0.0

    def now(self) -> datetime:
        return self.moment

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Move the time of day and the monotonic time forward."""
        self.moment += timedelta(seconds=seconds)
        self.seconds += seconds


@dataclass(frozen=True)
class SeenRun:
    """One run of a `FakeWall`, as the wall received it."""

    domain: TrustDomain
    fresh: bool
    program: str
    arguments: JsonObject
    limits: Limits
    image: str | None = None
    held_in: str | None = None
    """The image of the session's container, or None if the run did not belong to a session."""


SMALL_LIMITS = WallLimits(
    default_wall_s=5,
    max_wall_s=30,
    default_memory_mb=64,
    max_memory_mb=256,
    min_memory_mb=MIN_MEMORY_MB,
    output_bytes=64 * 1024,
)
"""The default limits of a `FakeWall`, for small programs."""

CONTAINER_LIMITS = ContainerSettings().limits
"""The default limits of a container wall."""

FAKE_IMAGES = {
    "python": ("python", "shell"),
    "python-data": ("python", "shell"),
    "shell": ("shell",),
    "node": ("python", "shell", "javascript"),
}

FILE_CHUNK_BYTES = 64 * 1024
"""Maximum size in bytes of one piece of a file that a fake run leaves."""


def always_four(run: SeenRun) -> RunEnding:
    """Return an ending in which the program succeeds with the value 4. This is the default answer
    of a `FakeWall`.
    """
    if run.program == "python":
        four: JsonObject = {"value": 4, "has_value": True, "value_repr": "4"}
        return RunEnding(EndedBy.OK, "call", exit_code=0, result=four)
    if run.program == "restricted_python":
        return RunEnding(EndedBy.OK, "call", result={"value": 4, "value_repr": "4", "stdout": ""})
    return RunEnding(EndedBy.OK, "call", result={"value": 4, "text": "4"})


@dataclass
class FakeWall:
    """A wall that runs nothing. It adds each run to `runs`, and returns `answer(run)` as the run's
    ending.

    `files` returns the files that a run leaves in its workspace. `meanwhile` is awaited before a
    run ends, and may send output and progress to the run's sinks.
    """

    answer: Callable[[SeenRun], RunEnding] = always_four
    limits: WallLimits = SMALL_LIMITS
    grade: Grade | None = Grade.NAMESPACES
    required: frozenset[Limit] = frozenset(Limit)
    enforced: frozenset[Limit] = frozenset(Limit)
    remedy: str = "This is a fake."
    heals: bool = True
    runs: list[SeenRun] = field(default_factory=list)
    files: Callable[[SeenRun], Iterable[tuple[str, bytes]]] = lambda run: ()
    images: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(FAKE_IMAGES))
    """Maps the name of an image to its languages. Sessions can only have these images."""
    held: list[FakePlace] = field(default_factory=list)
    keeps_sessions: bool = False
    host_memory_mb: int = 64 * 1024
    meanwhile: Callable[[SeenRun, RunSinks], Awaitable[None]] | None = None

    @property
    def status(self) -> WallStatus:
        """The status of the wall. The wall is ready if it enforces all required limits."""
        return WallStatus(
            self.required,
            self.enforced,
            self.enforced,
            is_ready=self.required <= self.enforced,
            grade=self.grade,
            remedy=self.remedy,
            heals=self.heals,
        )

    @asynccontextmanager
    async def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        image: str | None = None,
    ) -> AsyncIterator[_FakeLease]:
        """Yield a fake lease at once. A real wall may wait before it yields a lease."""
        yield _FakeLease(self, domain, fresh, memory_mb, image)

    async def hold(
        self,
        domain: TrustDomain,
        *,
        image: str,
        memory_mb: int,
        cpus: float | None = None,
        disk_mb: int | None = None,
        additions: Sequence[str] = (),
        lock: str = "",
        on_lost: Callable[[], None],
    ) -> FakePlace:
        """Return a fake container for a session, without waiting. `additions`, `lock` and `cpus`
        are ignored. A test can end the newest container with `held[-1].lose(…)`.

        Raises:
            SandboxUnavailable: there is no such image.
        """
        if image not in self.images:
            raise SandboxUnavailable(f"There is no image {image!r}.", retryable=False)
        place = FakePlace(self, domain, image, memory_mb, self.images[image], on_lost)
        place.grade = self.grade
        place.has_disk = disk_mb is not None
        self.held.append(place)
        return place

    @property
    def host(self) -> HostSize:
        """The size of a large host. Tests can change `host_memory_mb`."""
        return HostSize(self.host_memory_mb, 8)

    async def until_host_is_known(self) -> None:
        """Do nothing, because the size of the fake host is always known."""

    def spare_copies(self, copies: Callable[[], Iterable[str]]) -> None:
        """Store the function `copies`, so that tests can call it. The function returns the names of
        the disk copies that must be kept.
        """
        self.copies = copies

    def sweep_soon(self) -> None:
        """Do nothing. Fake disks take no space, so none must be removed."""

    @asynccontextmanager
    async def fork(self, copy: str, session_id: str, home: SessionHome) -> AsyncIterator[str]:
        """Create a stopped fake container for the new session, with `copy` as its disk, and yield
        the container's name.
        """
        domain = TrustDomain("", None, session_id)
        place = FakePlace(self, domain, "python", 512, ("python",), lambda: None)
        place.is_stopped, place.has_disk, place.disk = True, True, copy
        self.held.append(place)
        yield place.name

    def expect(self, record: SessionRecord, home: SessionHome) -> None:
        """Do nothing. Fake containers are never removed, so none must be protected from removal."""

    def resume(
        self, record: SessionRecord, home: SessionHome, on_lost: Callable[[], None]
    ) -> FakePlace:
        """Return the fake container of a session that an earlier engine held. `home` names the
        container.

        If the session is stopped, the container counts as stopped, even if it was lost. If the
        container is lost from now on, `on_lost` is called.
        """
        (place,) = (place for place in self.held if place.name == home.container)
        place.epoch, place.on_lost = home.epoch, on_lost
        if record.state == "stopped":
            place.lost, place.is_stopped = None, True
        return place

    async def play(self, run: SeenRun, sinks: RunSinks) -> RunEnding:
        """Record a run, await `meanwhile`, send the run's files to the sink, and return the
        answer.
        """
        self.runs.append(run)
        if self.meanwhile is not None:
            await self.meanwhile(run, sinks)
        if sinks.files is not None:
            for path, content in self.files(run):
                sinks.files.start(path, len(content))
                for start in range(0, len(content), FILE_CHUNK_BYTES):
                    sinks.files.write(content[start : start + FILE_CHUNK_BYTES])
        return self.answer(run)


@dataclass
class _FakeLease:
    wall: FakeWall
    domain: TrustDomain
    fresh: bool
    memory_mb: int | None = None
    image: str | None = None
    queue_ms: float = 0.0

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        require_grade(self.wall.grade, limits.least_grade)
        run = SeenRun(self.domain, self.fresh, program, arguments, limits, self.image)
        return await self.wall.play(run, sinks)


@dataclass(eq=False)
class FakePlace:
    """The fake container of a session. While `may_run` is not set, every run waits, so that a test
    can delay runs.
    """

    wall: FakeWall
    domain: TrustDomain
    image: str
    memory_mb: int
    languages: tuple[str, ...]
    on_lost: Callable[[], None]
    lock: str = ""
    node: str = ""
    has_disk: bool = False
    disk: str = ""
    """The copy from which the disk was made."""
    name: str = field(default_factory=lambda: f"fake-{secrets.token_hex(4)}")
    epoch: int = FIRST_EPOCH
    lost: str | None = None
    is_paused: bool = False
    is_stopped: bool = False
    is_away: bool = False
    grade: Grade | None = Grade.NAMESPACES
    running: int = 0
    on_processes: Callable[[JsonObject], JsonObject] = lambda request: {"processes": []}
    """Answers requests about registered processes; it may raise their errors."""
    may_run: asyncio.Event = field(default_factory=asyncio.Event)
    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_run.set()
        self.may_go.set()

    async def processes(self, request: JsonObject) -> JsonObject:
        """Return the answer of `on_processes` to a request about registered processes.

        Raises:
            SandboxUnavailable: the container is paused, stopped or lost.
        """
        if self.is_paused or self.is_stopped or self.lost is not None:
            raise SandboxUnavailable("The fake container does not run.")
        return self.on_processes(request)

    async def connect(self, port: int) -> anyio.abc.ByteStream:
        """Raise NetworkError, because nothing listens in a fake container."""
        raise NetworkError("Nothing listens on this port.")

    async def pause(self) -> None:
        """Pause this container until `until_free` is called, unless the container is stopped or
        lost.
        """
        self.is_paused = self.lost is None and not self.is_stopped

    async def stop(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Stop this container. Calling `until_free` later starts it again. If the container is
        already stopped or `unless()` returns True, do nothing.
        """
        if not self.is_stopped and not unless():
            self.is_stopped, self.is_paused = True, False
            self.on_lost()

    @asynccontextmanager
    async def copy_disk(self, copy: str) -> AsyncIterator[int]:
        """Yield the size of a copy of the disk, but do not make a copy."""
        yield 1000

    async def restore(self, copy: str) -> None:
        """Stop this container, and use `copy` as its disk."""
        await self.stop()
        self.disk = copy

    async def until_free(self) -> None:
        """Resume the container if it is paused, or start it if it is stopped. Never waits.

        Raises AssertionError if a stopped container has no disk.
        """
        if self.is_stopped:
            assert self.has_disk, "A container without a disk cannot be started again."
            if self.ended.is_set():
                self.end("its disk is gone")
                return
        self.is_paused = self.is_stopped = False

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS
    ) -> RunEnding:
        """Wait until `may_run` is set, and return the wall's answer. If the container is lost,
        return the ending `SANDBOX_LOST`.
        """
        require_grade(self.grade, limits.least_grade)
        ways_out = [asyncio.ensure_future(e.wait()) for e in (self.may_run, self.ended)]
        try:
            await asyncio.wait(ways_out, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways_out:
                way.cancel()
        if self.lost is not None:
            return RunEnding(EndedBy.SANDBOX_LOST, "session")
        return await self.wall.play(
            SeenRun(self.domain, False, program, arguments, limits, held_in=self.image), sinks
        )

    def lose_container(self) -> None:
        """End the container but keep its disk, so that the session is stopped."""
        self.is_stopped = True
        self.on_lost()

    def lose(self, why: str = "its stream ended") -> None:
        """End the container as if it had failed unexpectedly."""
        self.end(why)

    def end(self, why: str) -> None:
        """End the container and notify the session. Do nothing if the container has already
        ended.
        """
        if self.lost is None:
            self.lost = why
            self.ended.set()
            self.on_lost()

    async def until_gone(self) -> None:
        """Wait until `may_go` is set. It is set from the beginning, so this method waits only if a
        test has cleared it.
        """
        await self.may_go.wait()
