"""The container wall: programs in hardened Docker containers, warm ones where it can be.

Host side. Above it the pipeline and the executors; below it the pool, the reaper and Docker. A task
looks at Docker beside the calls, less and less often while Docker is away. An engine without Docker
starts as fast as one with it, and only tools that need a container are refused. Invariants: a call
is refused only after a look that began when the call was there already, or that did not end in
time; all calls that wait share that look. A missing image refuses the calls that need it, and never
takes the wall down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

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
from fumehood.sandbox.container.docker_api import Docker, DockerError, DockerTimeout
from fumehood.sandbox.container.factory import ContainerFactory, OnEvent
from fumehood.sandbox.container.host_check import Unfit, why_unfit
from fumehood.sandbox.container.image_catalog import FindImage, ImageCatalog
from fumehood.sandbox.container.pool import MAX_COMPLAINT_CHARACTERS, Pool
from fumehood.sandbox.container.pool_state import Kind, PoolEntry
from fumehood.sandbox.container.reaper import Reaper
from fumehood.sandbox.container.settings import ContainerSettings, EngineIdentity
from fumehood.sandbox.container.spec import GUEST_COMMAND
from fumehood.sandbox.wall import HasImages

LOOK_AGAIN_S = 30.0
"""How often Docker is looked at, and the pool tidied, while all is well."""

FIRST_LOOK_DELAY_S = 1.0
"""Of an eager wall, unless a call wants it sooner: the engine's own start comes first, and what
speaks to Docker takes a tenth of a second to load."""

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0, 15.0)
"""Before the next look, by how many looks or container starts in a row have failed."""

LONGEST_PAUSE_WHILE_AWAY_S = 5.0
"""The same, at most, while Docker is away or no image is there: an engine that nobody calls becomes
ready within this time. A look that finds nobody costs a millisecond."""

LOOK_PATIENCE_S = 2.0
"""How long a call waits for Docker to be looked at again."""

LEAST_BETWEEN_LOOKS_S = 1.0
"""From the beginning of one look to that of the next, however many calls ask for one."""

FIRST_LOOK_PATIENCE_S = 10.0
"""How long a call waits for the first look, where it comes before its end."""

RETRY_AFTER_MS = 1000

MAIN_LANGUAGE = "python"


class SharedLook:
    """A look that all who wait for it share: one at a time, and at most one a second."""

    def __init__(
        self, look: Callable[[], Awaitable[None]], start_soon: Callable[..., object]
    ) -> None:
        self._look = look
        self._start_soon = start_soon
        self._turn = anyio.Lock()
        self._coming: anyio.Event | None = None
        """The end of the next look, which has not begun."""
        self._earliest = -math.inf
        self.last_began = -math.inf
        """When the last look began that has ended, by the monotonic clock."""

    async def another(self) -> None:
        """Wait for the end of a look that begins after this moment."""
        if self._coming is None:
            self._coming = anyio.Event()
            self._start_soon(self._run, self._coming)
        await self._coming.wait()

    async def _run(self, ended: anyio.Event) -> None:
        try:
            async with self._turn:
                await anyio.sleep(max(0.0, self._earliest - time.monotonic()))
                self._coming = None
                began = time.monotonic()
                self._earliest = began + LEAST_BETWEEN_LOOKS_S
                await self._look()
                self.last_began = began
        finally:
            ended.set()


class ContainerWall(HasImages):
    """Places in containers. An asynchronous context manager.

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
        self._settings = settings
        self._docker = docker
        self._catalog = ImageCatalog(docker, find_image, settings.images.model_dump())
        self._held: dict[str, HeldContainer] = {}
        """Of sessions, by name; those included that are being removed."""
        self._identity = identity
        self._held_s = held_s
        self._command = command
        self._start_deadline_s = start_deadline_s
        self._eager = eager
        self._on_event = on_event
        self._stack = AsyncExitStack()
        self._group: anyio.abc.TaskGroup | None = None
        self._looking = False
        self._wanted = anyio.Event()
        """A call has asked for a container."""
        self._looked = anyio.Event()
        self._looks: SharedLook | None = None
        self._failed_looks = 0
        """In a row: Docker was away, or no image was there."""
        self._failed = anyio.Event()
        """A container could not be started, or a look has failed after one that did not."""
        self._down: Unfit | None = None
        self._is_up = False
        self._told: Unfit | None = None
        """What the log says of it, which is not told twice."""
        self._told_missing: tuple[str, ...] = ()
        self._has_been_up = False
        self._reaper = Reaper(
            docker,
            identity.engine_id,
            identity.owner_id,
            self._names_in_use,
            on_event=on_event,
        )
        self._factory: ContainerFactory | None = None
        self._pool: Pool | None = None

    async def __aenter__(self) -> ContainerWall:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(self._group.cancel_scope.cancel)
        self._factory = ContainerFactory(
            self._docker,
            self._settings,
            self._identity,
            self._reaper,
            self._catalog,
            self.required,
            held_s=self._held_s,
            command=self._command,
            start_deadline_s=self._start_deadline_s,
            start_soon=self._group.start_soon,
            on_event=self._on_event,
            on_start=self._tell_available,
            on_failure=lambda: self._failed.set(),
        )
        self._looks = SharedLook(self._look, self._group.start_soon)
        self._pool = Pool(
            self._factory,
            self._settings,
            self._group.start_soon,
            warm_image=self._settings.images.python,
            on_event=self._on_event,
        )
        if self._eager:
            self._begin_to_look()
        return self

    async def __aexit__(self, *exc: object) -> None:
        pool, self._looks = self._pool, None
        if pool is not None:
            stopping = SandboxUnavailable("The engine is stopping.", retry_after_ms=RETRY_AFTER_MS)
            pool.close(stopping, destroy="the engine stops")
            for held in list(self._held.values()):
                held.end("the engine stops")
        try:
            await self._stack.aclose()
        finally:
            if self._factory is not None and self._factory.has_made:
                await self._reaper.stop()

    # -- the wall -------------------------------------------------------------------

    @property
    def enforced(self) -> frozenset[Limit]:
        """What the last container was seen to enforce; until there was one, what it must."""
        seen = self._factory.seen if self._factory is not None else None
        if seen is not None and not self.required <= seen:
            return seen
        return frozenset() if self._down is not None else self.required

    @property
    def heals(self) -> bool:
        """Whether what is missing may come back without anybody's help."""
        return self._down is None or self._down.heals

    @property
    def seen(self) -> frozenset[Limit]:
        """The same without an advance: nothing before a container was there."""
        seen = self._factory.seen if self._factory is not None else None
        return self.enforced & (seen or frozenset())

    @property
    def is_in_use(self) -> bool:
        """Whether Docker is looked at: from the start, or since the first call."""
        return self._looking

    @property
    def is_ready(self) -> bool:
        """Whether a call would get a container, as far as it is known."""
        return self._is_up and self._catalog.has_any and not self.required - self.enforced

    @property
    def faults(self) -> tuple[str, ...]:
        """Why there is no container to be had. For the operator."""
        return () if self._down is None else (self._down.fault,)

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each image that is not there, with what to do."""
        return self._catalog.faults

    @property
    def remedy(self) -> str:
        """Why not, and what to do."""
        return "" if self._down is None else f"{self._down.fault} {self._down.remedy}".rstrip()

    @property
    def counts(self) -> JsonObject:
        """How many containers there are, by what they do."""
        return {**self._pool.counts(), "held": len(self._held)} if self._pool is not None else {}

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
        if self._looks is None:
            raise SandboxUnavailable("The engine is stopping.", retry_after_ms=RETRY_AFTER_MS)
        with anyio.move_on_after(LOOK_PATIENCE_S) as waiting:
            await self._looks.another()
        if waiting.cancelled_caught:
            raise _unavailable(Unfit(DockerTimeout.message, DockerTimeout.remedy, heals=True))

    async def until_known(self, image: str) -> None:
        """Wait, bounded, for the first look, and look again for an image that was not found.

        Raises:
            ImageMissing: it is not there.
            SandboxUnavailable: Docker does not say.
        """
        await self._until_found(image)
        if self._down is not None:
            raise _unavailable(self._down)
        self._require_found(image)
        if image not in self._catalog.found:
            raise SandboxUnavailable(
                f"Docker did not say what the image {image!r} is. Repeat the call.",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def facts_of(self, image: str | None) -> JsonObject:
        """The image's digest, as far as it is known now, and the runtime."""
        found = self._catalog.found.get(image) if image is not None else None
        return {
            "image_digest": found.id if found is not None else None,
            "runtime": self._settings.runtime or "default",
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
        return ContainerLease(
            lambda: self._entry(domain, language or MAIN_LANGUAGE, chosen, fresh=fresh),
            self._give_back,
            fresh=fresh,
            memory_mb=chosen,
        )

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
        assert self._pool is not None
        assert self._group is not None
        languages = self._catalog.found[image].languages if image in self._catalog.found else ()
        held = HeldContainer(
            entry.container, languages, self._forget, self._group.start_soon, on_lost
        )
        if not self._pool.let_go(entry, held):
            raise SandboxUnavailable(
                "The container was lost as it was taken. Repeat the call.",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._held[held.name] = held
        return held

    # -- inside -----------------------------------------------------------------

    def _names_in_use(self) -> list[str]:
        if self._factory is None or self._pool is None:
            return []
        return [*self._factory.unsettled, *self._pool.names, *self._held]

    def _begin_to_look(self) -> None:
        if not self._looking and self._group is not None and self._looks is not None:
            self._looking = True
            self._group.start_soon(self._keep_looking, self._looks)

    async def _keep_looking(self, looks: SharedLook) -> None:
        """Look now and then, and soon after trouble. Calls have their looks besides."""
        assert self._factory is not None
        factory, pause_s = self._factory, 0.0
        with anyio.move_on_after(FIRST_LOOK_DELAY_S):
            await self._wanted.wait()
        while True:
            with anyio.move_on_after(pause_s):
                await self._failed.wait()
            if self._failed.is_set():
                self._failed = anyio.Event()
                if factory.is_failing and factory.failure is not None:
                    self._go_down(factory.failure)
                pause_s = _pause(factory.failed_starts)
            else:
                await looks.another()
                pause_s = LOOK_AGAIN_S
            if self._failed_looks:
                pause_s = min(_pause(self._failed_looks), LONGEST_PAUSE_WHILE_AWAY_S)

    async def _look(self) -> None:
        unfit = await self._why_unfit()
        is_good = unfit is None and self._catalog.has_any
        self._failed_looks = 0 if is_good else self._failed_looks + 1
        if self._failed_looks == 1:
            self._failed.set()  # the task's pause is for a wall where all is well
        if unfit is not None:
            self._go_down(unfit)
        else:
            self._go_up()
        self._looked.set()

    async def _why_unfit(self) -> Unfit | None:
        """Look at Docker, its host and the images, and remove what should not be there; None
        where containers can be made.
        """
        try:
            info = await self._docker.info()
            if self._factory is not None:
                self._factory.host_cpus = int(info.get("NCPU") or 0)
            unfit = why_unfit(
                info, runtime=self._settings.runtime, has_swap=_may_swap(self._docker.is_local)
            )
            if unfit is not None:
                return unfit
            await self._reaper.sweep()
            await self._catalog.look()
        except DockerError as error:
            return Unfit(error.message, error.remedy, error.heals)
        except Exception as error:  # a bug must not end the task that would find out it is over
            self._on_event("container.look_failed", {"why": repr(error)[:500]})
            return Unfit("Docker could not be looked at.", "The engine's log says why.", heals=True)
        return None

    def _go_down(self, unfit: Unfit) -> None:
        if self._told != unfit:
            self._on_event("container.unavailable", {"why": unfit.fault, "cure": unfit.remedy})
        self._told = self._down = unfit
        self._is_up = False
        if self._pool is not None:
            self._pool.close(_unavailable(unfit))

    def _go_up(self) -> None:
        self._down, self._is_up = None, True
        if self._factory is None or self._pool is None:
            return
        if not self._factory.failed_starts:  # else the next container has to show it first
            self._tell_available()
        self._pool.retire(lambda container: container.image_id not in self._catalog.ids)
        self._pool.tidy()
        # While a limit is missing no call is admitted, so none would have a container made.
        is_lacking = bool(self.required - self.enforced)
        self._pool.open(self._catalog.missing, least_warm=1 if is_lacking else 0)

    def _tell_available(self) -> None:
        has_changed = self.missing != self._told_missing
        is_news = self._told is not None or not self._has_been_up or has_changed
        if is_news and self._catalog.has_any:
            images = {name: found.id for name, found in self._catalog.found.items()}
            self._on_event("container.available", {"images": images})
        if has_changed and self.missing:
            self._on_event("container.images_missing", {"missing": list(self.missing)})
        self._told, self._has_been_up, self._told_missing = None, True, self.missing

    async def _entry(
        self, domain: TrustDomain, language: str, memory_mb: int, *, fresh: bool
    ) -> PoolEntry:
        """Raises SandboxUnavailable."""
        name = self._catalog.name_for(language)
        return await self._take(domain, Kind(name, memory_mb), fresh=fresh, must_run=language)

    def _give_back(self, entry: PoolEntry, *, ran: bool, fresh: bool) -> None:
        if self._pool is not None:
            self._pool.give_back(entry, ran=ran, fresh=fresh)

    async def _until_found(self, image: str) -> None:
        """Wait, bounded, until Docker was asked for an image, if it is not known to be there.

        Raises:
            SandboxUnavailable: Docker did not answer in time.
        """
        came = time.monotonic()
        if image not in self._catalog.found:
            self._catalog.want(image)
        await self._until_looked()
        if self._is_up and image in self._catalog.found:
            return
        if self._looks is not None and self._looks.last_began < came:
            self._catalog.want(image)  # a look that began before may have looked for it
            await self.look_again()

    def _require_found(self, image: str, language: str | None = None) -> None:
        """Raises ImageMissing where the image is known not to be there."""
        if image in self._catalog.missing:
            raise self._catalog.missing[image].needed_for(language)

    async def _until_looked(self) -> None:
        """Wait, bounded, for the first look."""
        self._wanted.set()
        self._begin_to_look()
        if not self._looked.is_set():
            with anyio.move_on_after(FIRST_LOOK_PATIENCE_S):
                await self._looked.wait()

    async def _take(
        self, domain: TrustDomain, kind: Kind, *, fresh: bool, must_run: str | None = None
    ) -> PoolEntry:
        """Raises SandboxUnavailable."""
        if self._pool is None:
            raise SandboxUnavailable("The container wall is not entered.", retryable=False)
        await self._until_found(kind.image)
        if self._is_up:
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


def _unavailable(unfit: Unfit) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"Containers are unavailable; nothing ran. {unfit.fault} {unfit.remedy}".rstrip(),
        retryable=unfit.heals,
        retry_after_ms=RETRY_AFTER_MS if unfit.heals else None,
    )


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
