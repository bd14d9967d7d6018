"""The container wall: programs in hardened Docker containers, warm ones where it can be.

Host side. Above it `call/admit` and the executors; below it the pool, the reaper and Docker.
Everything about Docker happens beside the calls: a task looks at it, says whether the wall is
there, and tries again, more and more seldom, until it is. An engine without Docker starts as
fast as one with it, and only tools that need a container are refused.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from fumehood.model.errors import EngineError, InternalError, SandboxUnavailable
from fumehood.model.identity import TrustDomain
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import CONTAINER_MEMORY_CLASSES, MB, Limit, Limits, WallLimits
from fumehood.sandbox.container.container import (
    START_DEADLINE_S,
    Container,
    ContainerFailed,
    LimitsNotEnforced,
)
from fumehood.sandbox.container.docker_api import Docker, DockerError
from fumehood.sandbox.container.host_check import Unfit, why_unfit
from fumehood.sandbox.container.pool import Listener, Place, Pool, PoolRules
from fumehood.sandbox.container.reap import Reaper
from fumehood.sandbox.container.spec import GUEST_COMMAND, ContainerSpec
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

CONTAINER_LIMITS = WallLimits(
    default_wall_s=30,
    max_wall_s=600,
    default_memory_mb=512,
    max_memory_mb=2048,
    min_memory_mb=CONTAINER_MEMORY_CLASSES[0],
    output_bytes=MB,
    memory_classes=CONTAINER_MEMORY_CLASSES,
)

LOOK_AGAIN_S = 30.0
"""How often Docker is looked at, and the pool tidied, while all is well."""

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0, 15.0)
"""Before the next look, by how many in a row have failed."""

TOO_MANY_FAILED_STARTS = 3
FIRST_LOOK_PATIENCE_S = 10.0
"""How long a call waits for the first look, where it comes before its end."""

GUEST_GRACE_S = 60.0
RETRY_AFTER_MS = 1000

OnEvent = Callable[[str, JsonObject], None]
FindImage = Callable[[Docker, str], Awaitable[str]]
"""From an image's name to its id. Raises DockerError or SandboxUnavailable."""


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """What the operator chose."""

    limits: WallLimits = CONTAINER_LIMITS
    rules: PoolRules = field(default_factory=PoolRules)
    image: str = "python"
    runtime: str | None = None
    cpus: float = 1.0
    command: tuple[str, ...] = GUEST_COMMAND
    start_deadline_s: float = START_DEADLINE_S


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Whose containers they are. `owner_id` is the same after a restart of the engine."""

    engine_id: str
    owner_id: str


class ContainerWall:
    """Places in containers. An asynchronous context manager.

    `eager` looks at Docker as soon as it is entered; else the first call does. Either way
    entering waits for nothing.
    """

    required = frozenset(Limit)

    def __init__(
        self,
        settings: ContainerSettings,
        docker: Docker,
        find_image: FindImage,
        identity: EngineIdentity,
        *,
        eager: bool = True,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        self.limits = settings.limits
        self._settings = settings
        self._docker = docker
        self._find_image = find_image
        self._identity = identity
        self._eager = eager
        self._on_event = on_event
        self._stack = AsyncExitStack()
        self._group: anyio.abc.TaskGroup | None = None
        self._looking = False
        self._looked = anyio.Event()
        self._trouble = anyio.Event()
        self._down: Unfit | None = None
        self._is_up = False
        self._told: Unfit | None = None
        """What the log says of it, which is not told twice."""
        self._has_been_up = False
        self._image_id = ""
        self._numbers = 0
        self._unsettled: set[str] = set()
        """Containers that are being made, or could not be and are being removed."""
        self._failed_starts = 0
        self._failure: Unfit | None = None
        self._seen: frozenset[Limit] | None = None
        self._lacking: frozenset[Limit] | None = None
        """What the last container enforced that was not good enough."""
        self._reaper = Reaper(
            docker,
            identity.engine_id,
            identity.owner_id,
            self._names_in_use,
            on_event=on_event,
        )
        self._pool: Pool | None = None

    async def __aenter__(self) -> ContainerWall:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(self._group.cancel_scope.cancel)
        self._pool = Pool(self, self._settings.rules, self._group.start_soon, on_event=self._tell)
        if self._eager:
            self._begin_to_look()
        return self

    async def __aexit__(self, *exc: object) -> None:
        pool = self._pool
        if pool is not None:
            stopping = SandboxUnavailable("The engine is stopping.", retry_after_ms=RETRY_AFTER_MS)
            pool.close(stopping, destroy="the engine stops")
        try:
            await self._stack.aclose()
        finally:
            if self._numbers:
                await self._reaper.stop()

    # -- the wall -------------------------------------------------------------------

    @property
    def enforced(self) -> frozenset[Limit]:
        """What the last container was seen to enforce; until there was one, what it must."""
        if self._seen is not None and not self.required <= self._seen:
            return self._seen
        return frozenset() if self._down is not None else self.required

    @property
    def seen(self) -> frozenset[Limit]:
        """The same without an advance: nothing before a container was there."""
        return self.enforced & (self._seen or frozenset())

    @property
    def is_ready(self) -> bool:
        """Whether a call would get a container, as far as it is known."""
        return self._is_up and not self.required - self.enforced

    @property
    def faults(self) -> tuple[str, ...]:
        """Why there is no container to be had. For the operator."""
        return () if self._down is None else (self._down.fault,)

    @property
    def cure(self) -> str:
        """Why not, and what to do."""
        return "" if self._down is None else f"{self._down.fault} {self._down.cure}"

    @property
    def counts(self) -> JsonObject:
        """How many containers there are, by what they do."""
        return self._pool.counts() if self._pool is not None else {}

    def lease(self, domain: TrustDomain, *, fresh: bool, memory_mb: int | None = None) -> _Lease:
        """A container of this domain; `fresh` gets one of its own, which is destroyed after."""
        chosen = memory_mb or self.limits.default_memory_mb or CONTAINER_MEMORY_CLASSES[0]
        return _Lease(self, domain, fresh, chosen)

    # -- the pool's maker -------------------------------------------------------------

    async def make(self, memory_mb: int, listener: Listener) -> Container:
        """Make and start a container. One that fails is removed.

        Raises:
            SandboxUnavailable: it could not be made, or does not enforce what it must.
        """
        self._numbers += 1
        spec = self._spec(memory_mb, self._numbers)
        self._unsettled.add(spec.name)
        began = time.monotonic()
        try:
            container = await Container.start(
                self._docker,
                spec,
                listener,
                required=self.required,
                command=self._settings.command,
                ready_s=self._settings.start_deadline_s,
            )
        except BaseException as error:
            assert self._group is not None
            self._group.start_soon(self._remove_failed, spec.name)
            if not isinstance(error, Exception):
                raise
            raise self._failed_to_start(spec.name, error) from None
        self._unsettled.discard(spec.name)
        self._failed_starts = 0
        self._lacking = None
        self._seen = container.enforced
        self._tell_available()
        took_ms = round((time.monotonic() - began) * 1e3)
        self._tell("container.started", {"name": spec.name, "memory_mb": memory_mb, "ms": took_ms})
        return container

    async def remove(self, name: str) -> None:
        """Returns when it is gone."""
        await self._reaper.remove(name)

    # -- inside -----------------------------------------------------------------

    def _spec(self, memory_mb: int, number: int) -> ContainerSpec:
        settings = self._settings
        lifetime_s = settings.rules.lifetime_s + settings.limits.max_wall_s + GUEST_GRACE_S
        return ContainerSpec(
            name=f"fumehood-{self._identity.engine_id[:8]}-{number}",
            image_id=self._image_id,
            image_name=settings.image,
            engine_id=self._identity.engine_id,
            owner_id=self._identity.owner_id,
            memory_mb=memory_mb,
            cpus=settings.cpus,
            lifetime_s=lifetime_s,
            deadline=int(time.time() + lifetime_s),
            runtime=settings.runtime,
            engine_pid=os.getpid(),
            engine_host=platform.node(),
        )

    def _failed_to_start(self, name: str, error: Exception) -> EngineError:
        """Note a failed start; what the caller is told of it."""
        self._failed_starts += 1
        if isinstance(error, DockerError):
            self._failure = Unfit(error.public, error.cure)
        elif isinstance(error, LimitsNotEnforced):
            self._lacking = error.enforced
            self._failure = Unfit(
                "A container here does not hold what it must.", "Run `fumehood doctor` to see why."
            )
        elif isinstance(error, ContainerFailed):
            self._failure = Unfit(
                "Containers start, but their guest does not.", "The engine's log says why."
            )
        else:
            self._failure = Unfit("A container could not be made.", "The engine's log says why.")
        why = str(error) if isinstance(error, DockerError | ContainerFailed) else repr(error)
        self._on_event("container.failed", {"name": name, "why": why[:1000]})
        self._trouble.set()
        return SandboxUnavailable(
            f"No container could be started. {self._failure.fault} {self._failure.cure}",
            retry_after_ms=RETRY_AFTER_MS,
        )

    async def _remove_failed(self, name: str) -> None:
        try:
            await self._reaper.remove(name)
        finally:
            self._unsettled.discard(name)

    def _names_in_use(self) -> list[str]:
        return [*self._unsettled, *(self._pool.names if self._pool is not None else ())]

    def _begin_to_look(self) -> None:
        if not self._looking and self._group is not None:
            self._looking = True
            self._group.start_soon(self._keep_looking)

    async def _keep_looking(self) -> None:
        failed = 0
        while True:
            self._trouble = anyio.Event()
            if self._failed_starts:
                if self._failed_starts >= TOO_MANY_FAILED_STARTS and self._failure is not None:
                    self._seen = self._lacking if self._lacking is not None else self._seen
                    self._go_down(self._failure)
                await anyio.sleep(_pause(self._failed_starts))
            unfit = await self._look()
            failed = failed + 1 if unfit is not None else 0
            if unfit is not None:
                self._go_down(unfit)
            else:
                self._go_up()
            self._looked.set()
            with anyio.move_on_after(_pause(failed) if failed else LOOK_AGAIN_S):
                await self._trouble.wait()

    async def _look(self) -> Unfit | None:
        """Docker, its host, the image, and what should not be there; None where all is well."""
        try:
            info = await self._docker.info()
            unfit = why_unfit(
                info, runtime=self._settings.runtime, has_swap=_may_swap(self._docker.is_local)
            )
            if unfit is not None:
                return unfit
            await self._reaper.sweep()
            self._image_id = await self._find_image(self._docker, self._settings.image)
        except DockerError as error:
            return Unfit(error.public, error.cure)
        except SandboxUnavailable as error:
            return Unfit(error.message, "")
        except Exception as error:  # a bug must not end the task that would find out it is over
            self._on_event("container.look_failed", {"why": repr(error)[:500]})
            return Unfit("Docker could not be looked at.", "The engine's log says why.")
        return None

    def _go_down(self, unfit: Unfit) -> None:
        if self._told != unfit:
            self._on_event("container.unavailable", {"why": unfit.fault, "cure": unfit.cure})
        self._told = self._down = unfit
        self._is_up = False
        if self._pool is not None:
            words = f"There are no containers now. {unfit.fault} {unfit.cure}".rstrip()
            self._pool.close(SandboxUnavailable(words, retry_after_ms=RETRY_AFTER_MS))

    def _go_up(self) -> None:
        self._down, self._is_up = None, True
        if not self._failed_starts:  # else the next container has to show it first
            self._tell_available()
        if self._pool is not None:
            self._pool.retire(lambda container: container.image_id != self._image_id)
            self._pool.tidy()
            self._pool.open()

    def _tell_available(self) -> None:
        if self._told is not None or not self._has_been_up:
            self._on_event("container.available", {"image": self._image_id})
        self._told, self._has_been_up = None, True

    async def _place(self, domain: TrustDomain, memory_mb: int, *, fresh: bool) -> Place:
        """Raises SandboxUnavailable."""
        if self._pool is None:
            raise SandboxUnavailable("The container wall is not entered.", retryable=False)
        self._begin_to_look()
        if not self._looked.is_set():
            with anyio.move_on_after(FIRST_LOOK_PATIENCE_S):
                await self._looked.wait()
        return await self._pool.take(domain, memory_mb, fresh=fresh)

    def _tell(self, event: str, values: JsonObject) -> None:
        self._on_event(event, values)


class _Lease:
    """One container, for one run."""

    __slots__ = ("_domain", "_fresh", "_memory_mb", "_place", "_ran", "_wall", "queue_ms")

    def __init__(
        self, wall: ContainerWall, domain: TrustDomain, fresh: bool, memory_mb: int
    ) -> None:
        self._wall = wall
        self._domain = domain
        self._fresh = fresh
        self._memory_mb = memory_mb
        self._place: Place | None = None
        self._ran = False
        self.queue_ms = 0.0

    async def __aenter__(self) -> _Lease:
        asked = time.monotonic()
        self._place = await self._wall._place(self._domain, self._memory_mb, fresh=self._fresh)
        self.queue_ms = (time.monotonic() - asked) * 1e3
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._place is not None and self._wall._pool is not None:
            self._wall._pool.give_back(self._place, ran=self._ran, fresh=self._fresh)
            self._place = None

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program in the container, in a process of its own. Progress is not carried."""
        if self._place is None or self._ran:
            raise InternalError("A lease on a container is for one run.")
        if limits.memory_mb != self._memory_mb:
            raise InternalError("A run has the memory limit of its container.")
        self._ran = True
        container = self._place.container
        assert isinstance(container, Container)
        isolation = "container_per_call" if self._fresh else "call"
        return await container.run(program, arguments, limits, sinks, isolation)


def _pause(failed: int) -> float:
    return PAUSES_S[min(failed, len(PAUSES_S) - 1)]


def _may_swap(is_local: bool) -> bool:
    """Whether Docker's host has swap space. Another host is not asked: it might."""
    if not is_local:
        return True
    try:
        return len(Path("/proc/swaps").read_text(encoding="ascii").splitlines()) > 1
    except (OSError, UnicodeDecodeError):
        return True
