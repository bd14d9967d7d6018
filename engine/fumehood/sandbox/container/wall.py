"""The container wall: programs in hardened Docker containers, warm ones if possible.

Host side. Above it the pipeline and the executors; below it the monitor, the pool, the reaper and
Docker. An engine without Docker starts as fast as one with it, and only tools that need a container
are refused. Invariant: a missing image refuses the calls that need it, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

import anyio

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import CONTAINER_MEMORY_CLASSES, Limit
from fumehood.sandbox.container.container import (
    START_DEADLINE_S,
    Container,
    ContainerLease,
    HeldContainer,
)
from fumehood.sandbox.container.docker_api import Docker
from fumehood.sandbox.container.factory import ContainerFactory, OnEvent
from fumehood.sandbox.container.image_catalog import FindImage, ImageCatalog
from fumehood.sandbox.container.monitor import DockerMonitor, unavailable
from fumehood.sandbox.container.pool import MAX_COMPLAINT_CHARACTERS, Pool
from fumehood.sandbox.container.pool_state import Kind, PoolEntry
from fumehood.sandbox.container.program import ContainerProgram
from fumehood.sandbox.container.reaper import Reaper
from fumehood.sandbox.container.settings import ContainerSettings, EngineIdentity
from fumehood.sandbox.container.spec import GUEST_COMMAND
from fumehood.sandbox.wall import HasImages

RETRY_AFTER_MS = 1000

MAIN_LANGUAGE = "python"


class ContainerWall(HasImages):
    """Programs in containers. An asynchronous context manager.

    `eager` looks at Docker as soon as it is entered; else the first call does. Either way
    entering waits for nothing. `held_s` is the longest time that a session holds a container.
    """

    required = frozenset(Limit)

    def __init__(
        self,
        settings: ContainerSettings,
        docker: Docker,
        find_image: FindImage,
        identity: EngineIdentity,
        *,
        held_s: float = 0.0,
        command: tuple[str, ...] = GUEST_COMMAND,
        start_deadline_s: float = START_DEADLINE_S,
        eager: bool = True,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        self.limits = settings.limits
        self._runtime = settings.runtime
        self._identity = identity
        self._eager = eager
        self._on_event = on_event
        self._stack = AsyncExitStack()
        self._group: anyio.abc.TaskGroup | None = None
        self._is_stopping = False
        self._held: dict[str, HeldContainer] = {}
        """Of sessions, by name, including those that are being removed."""
        self._catalog = ImageCatalog(docker, find_image, settings.images.model_dump())
        self._reaper = Reaper(
            docker,
            identity.engine_id,
            identity.owner_id,
            self._names_in_use,
            on_event=on_event,
        )
        self._factory = ContainerFactory(
            docker,
            settings,
            identity,
            self._reaper,
            self._catalog,
            self.required,
            held_s=held_s,
            command=command,
            start_deadline_s=start_deadline_s,
            start_soon=self._start_soon,
            on_event=on_event,
            on_start=lambda: self._monitor.tell_available(),
            on_failure=lambda: self._monitor.on_failed_start(),
        )
        self._pool = Pool(
            self._factory,
            settings,
            self._start_soon,
            warm_image=settings.images.python,
            on_event=on_event,
        )
        self._monitor = DockerMonitor(
            docker,
            self._reaper,
            self._catalog,
            self._factory,
            self._pool,
            self.required,
            runtime=settings.runtime,
            start_soon=self._start_soon,
            on_event=on_event,
        )

    async def __aenter__(self) -> ContainerWall:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(self._group.cancel_scope.cancel)
        if self._eager:
            self._monitor.begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_stopping = True
        self._pool.close(_stopping(), destroy="the engine stops")
        for held in list(self._held.values()):
            held.end("the engine stops")
        try:
            await self._stack.aclose()
        finally:
            if self._factory.has_made:
                await self._reaper.stop()

    # -- the wall -------------------------------------------------------------------

    @property
    def enforced(self) -> frozenset[Limit]:
        """The limits enforced in the last container; before the first, the required ones."""
        seen = self._factory.seen
        if seen is not None and not self.required <= seen:
            return seen
        return frozenset() if self._monitor.down is not None else self.required

    @property
    def heals(self) -> bool:
        """Whether containers may become available without an operator."""
        return self._monitor.down is None or self._monitor.down.heals

    @property
    def seen(self) -> frozenset[Limit]:
        """The same, but no limits before the first container."""
        return self.enforced & (self._factory.seen or frozenset())

    @property
    def is_in_use(self) -> bool:
        """Whether Docker is looked at: from the start, or since the first call."""
        return self._monitor.is_looking

    @property
    def is_ready(self) -> bool:
        """Whether a call would get a container, as far as is known."""
        return self._monitor.is_up and self._catalog.has_any and not self.required - self.enforced

    @property
    def faults(self) -> tuple[str, ...]:
        """The reason why containers are unavailable. For the operator."""
        return () if self._monitor.down is None else (self._monitor.down.fault,)

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each missing image, with its remedy."""
        return self._catalog.faults

    @property
    def remedy(self) -> str:
        """The reason why containers are unavailable, and its remedy."""
        down = self._monitor.down
        return "" if down is None else f"{down.fault} {down.remedy}".rstrip()

    @property
    def counts(self) -> JsonObject:
        """The number of containers by state."""
        return {**self._pool.counts(), "held": len(self._held)}

    def image_for(self, language: str) -> str:
        """The image that a program in a language gets.

        Raises:
            ImageMissing: it is not there.
            SandboxUnavailable: none was chosen for it, or it has no such language.
        """
        name = self._catalog.name_for(language)
        self._require_found(name, language)
        self._catalog.must_run(name, language)
        return name

    async def look_again(self) -> None:
        """Wait, bounded, for a look that begins after this moment. All who wait share it.

        Raises:
            SandboxUnavailable: Docker did not answer in time.
        """
        if self._group is None or self._is_stopping:
            raise _stopping()
        await self._monitor.look_again()

    async def until_known(self, image: str) -> None:
        """Wait, bounded, for the first look, and look again for an image that was not found.

        Raises:
            ImageMissing: it is not there.
            SandboxUnavailable: Docker does not say.
        """
        await self._until_found(image)
        if self._monitor.down is not None:
            raise unavailable(self._monitor.down)
        self._require_found(image)
        if image not in self._catalog.found:
            raise SandboxUnavailable(
                f"Docker has not described the image {image!r} yet. Repeat the call.",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def facts_of(self, image: str | None) -> JsonObject:
        """The image's digest, as far as it is known now, and the runtime."""
        found = self._catalog.found.get(image) if image is not None else None
        return {
            "image_digest": found.id if found is not None else None,
            "runtime": self._runtime or "default",
        }

    def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        language: str | None = None,
    ) -> ContainerLease:
        """A container of this domain, of the language's image; `fresh` gets one of its own,
        which is destroyed after.
        """
        chosen = memory_mb or self.limits.default_memory_mb or CONTAINER_MEMORY_CLASSES[0]
        wanted = language or MAIN_LANGUAGE

        async def take() -> PoolEntry:
            kind = Kind(self._catalog.name_for(wanted), chosen)
            return await self._take(domain, kind, fresh=fresh, must_run=wanted)

        return ContainerLease(take, self._pool.give_back, fresh=fresh, memory_mb=chosen)

    async def hold(
        self,
        domain: TrustDomain,
        *,
        image: str,
        memory_mb: int,
        on_lost: Callable[[], None],
    ) -> HeldContainer:
        """A container for a session, warm where there is one; the pool lets go of it.

        Raises:
            SandboxUnavailable: none in time, or no such image.
        """
        entry = await self._take(domain, Kind(image, memory_mb), fresh=True)
        assert isinstance(entry.container, Container)
        languages = self._catalog.found[image].languages if image in self._catalog.found else ()
        held = HeldContainer(entry.container, languages, self._forget, self._start_soon, on_lost)
        if not self._pool.let_go(entry, held):
            raise SandboxUnavailable(
                "The container was lost as it was taken. Repeat the call.",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._held[held.name] = held
        return held

    async def open_program(
        self, command: tuple[str, ...], env: Mapping[str, str], *, image: str, memory_mb: int
    ) -> ContainerProgram:
        """Start a program that the operator configured, in a container of its own.

        Raises:
            ImageMissing: the image is not there.
            SandboxUnavailable: Docker is not there, or failed.
        """
        await self.until_known(image)
        return await self._factory.open_program(command, env, image, memory_mb)

    # -- inside -----------------------------------------------------------------

    def _start_soon(
        self, task: Callable[..., Coroutine[Any, Any, None]], *arguments: object
    ) -> None:
        assert self._group is not None
        self._group.start_soon(task, *arguments)

    def _names_in_use(self) -> list[str]:
        return [*self._factory.unsettled, *self._pool.names, *self._held]

    async def _until_found(self, image: str) -> None:
        """Wait, bounded, until it is known whether an image is there. Raises SandboxUnavailable."""
        if not (self._monitor.is_up and image in self._catalog.found):
            if self._group is None or self._is_stopping:
                raise _stopping()
            await self._monitor.until_found(image)

    def _require_found(self, image: str, language: str | None = None) -> None:
        """Raises ImageMissing where the image is known not to be there."""
        if image in self._catalog.missing:
            raise self._catalog.missing[image].needed_for(language)

    async def _take(
        self, domain: TrustDomain, kind: Kind, *, fresh: bool, must_run: str | None = None
    ) -> PoolEntry:
        """Raises SandboxUnavailable."""
        if self._group is None:
            raise SandboxUnavailable("The container wall is not entered.", retryable=False)
        await self._until_found(kind.image)
        if self._monitor.is_up:
            self._require_found(kind.image, must_run)
        if must_run is not None:
            self._catalog.must_run(kind.image, must_run)
        return await self._pool.take(domain, kind, fresh=fresh)

    async def _forget(self, held: HeldContainer) -> None:
        """Have a session's container removed."""
        values: JsonObject = {"name": held.name, "why": held.why, "held": True}
        if held.container.complaint:
            values["guest_said"] = held.container.complaint[-MAX_COMPLAINT_CHARACTERS:]
        self._on_event("container.destroyed", values)
        await self._reaper.remove(held.name)
        self._held.pop(held.name, None)


def _stopping() -> SandboxUnavailable:
    return SandboxUnavailable("The engine is stopping.", retry_after_ms=RETRY_AFTER_MS)
