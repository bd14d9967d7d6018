"""The monitor: looks at Docker beside the calls, and opens and closes the pool.

Host side, between the wall and Docker. A task looks now and then, less and less often while Docker
is away. Invariants: a call is refused only after a look that began when the call was there already,
or that did not end in time; all calls that wait share that look. A missing image never takes the
wall down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.limits import Limit
from fumehood.sandbox.container.docker_api import Docker, DockerError, DockerTimeout
from fumehood.sandbox.container.factory import ContainerFactory, OnEvent
from fumehood.sandbox.container.host_check import Unfit, why_unfit
from fumehood.sandbox.container.image_catalog import ImageCatalog
from fumehood.sandbox.container.pool import Pool
from fumehood.sandbox.container.reaper import Reaper

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


class DockerMonitor:
    """Whether containers can be made, by the last look at Docker."""

    def __init__(
        self,
        docker: Docker,
        reaper: Reaper,
        catalog: ImageCatalog,
        factory: ContainerFactory,
        pool: Pool,
        required: frozenset[Limit],
        *,
        runtime: str | None,
        start_soon: Callable[..., object],
        on_event: OnEvent,
    ) -> None:
        self._docker = docker
        self._reaper = reaper
        self._catalog = catalog
        self._factory = factory
        self._pool = pool
        self._required = required
        self._runtime = runtime
        self._start_soon = start_soon
        self._on_event = on_event
        self._looks = SharedLook(self._look, start_soon)
        self._wanted = anyio.Event()
        """A call has asked for a container."""
        self._looked = anyio.Event()
        self._failed_looks = 0
        """In a row: Docker was away, or no image was there."""
        self._alarm = anyio.Event()
        """A container could not be started, or a look has failed after one that did not."""
        self.is_looking = False
        """Whether Docker is looked at: from the start, or since the first call."""
        self.down: Unfit | None = None
        self.is_up = False
        self._told: Unfit | None = None
        """The reason in the log, which is not repeated."""
        self._told_missing: tuple[str, ...] = ()
        """The images that were missing at that time."""
        self._has_been_up = False

    def begin(self) -> None:
        """Start looking, if that has not begun."""
        if not self.is_looking:
            self.is_looking = True
            self._start_soon(self._keep_looking)

    def on_failed_start(self) -> None:
        """A container could not be started: look soon."""
        self._alarm.set()

    async def look_again(self) -> None:
        """Wait, bounded, for a look that begins after this moment.

        Raises:
            SandboxUnavailable: Docker did not answer in time.
        """
        with anyio.move_on_after(LOOK_PATIENCE_S) as waiting:
            await self._looks.another()
        if waiting.cancelled_caught:
            raise unavailable(Unfit(DockerTimeout.message, DockerTimeout.remedy, heals=True))

    async def until_found(self, image: str) -> None:
        """Wait, bounded, until Docker was asked for an image, if it is not known to be there.

        Raises:
            SandboxUnavailable: Docker did not answer in time.
        """
        came = time.monotonic()
        if image not in self._catalog.found:
            self._catalog.want(image)
        await self._until_looked()
        if self.is_up and image in self._catalog.found:
            return
        if self._looks.last_began < came:
            self._catalog.want(image)  # a look that began before may have looked for it
            await self.look_again()

    async def _until_looked(self) -> None:
        """Wait, bounded, for the first look."""
        self._wanted.set()
        self.begin()
        if not self._looked.is_set():
            with anyio.move_on_after(FIRST_LOOK_PATIENCE_S):
                await self._looked.wait()

    async def _keep_looking(self) -> None:
        """Look regularly, and soon after a failure. Calls have looks of their own."""
        factory, pause_s = self._factory, 0.0
        with anyio.move_on_after(FIRST_LOOK_DELAY_S):
            await self._wanted.wait()
        while True:
            with anyio.move_on_after(pause_s):
                await self._alarm.wait()
            if self._alarm.is_set():
                self._alarm = anyio.Event()
                if factory.is_failing and factory.failure is not None:
                    self._go_down(factory.failure)
                pause_s = _pause(factory.failed_starts)
            else:
                await self._looks.another()
                pause_s = LOOK_AGAIN_S
            if self._failed_looks:
                pause_s = min(_pause(self._failed_looks), LONGEST_PAUSE_WHILE_AWAY_S)

    async def _look(self) -> None:
        unfit = await self._why_unfit()
        is_good = unfit is None and self._catalog.has_any
        self._failed_looks = 0 if is_good else self._failed_looks + 1
        if self._failed_looks == 1:
            self._alarm.set()  # the task's pause is for a wall where all is well
        if unfit is not None:
            self._go_down(unfit)
        else:
            self._go_up()
        self._looked.set()

    async def _why_unfit(self) -> Unfit | None:
        """Look at Docker, its host and the images, and remove lost containers. None if containers
        can be made.
        """
        try:
            info = await self._docker.info()
            self._factory.host_cpus = int(info.get("NCPU") or 0)
            unfit = why_unfit(
                info, runtime=self._runtime, has_swap=_may_swap(self._docker.is_local)
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
        self._told = self.down = unfit
        self.is_up = False
        self._pool.close(unavailable(unfit))

    def _go_up(self) -> None:
        self.down, self.is_up = None, True
        if not self._factory.failed_starts:  # else the next container has to show it first
            self.tell_available()
        self._pool.retire(lambda container: container.image_id not in self._catalog.ids)
        self._pool.tidy()
        # While a limit is missing no call is admitted, so none would have a container made.
        seen = self._factory.seen
        is_lacking = seen is not None and not self._required <= seen
        self._pool.open(self._catalog.missing, least_warm=1 if is_lacking else 0)

    def tell_available(self) -> None:
        """Log that containers are available, and the missing images, if either is news."""
        missing = self._catalog.lacking
        has_changed = missing != self._told_missing
        is_news = self._told is not None or not self._has_been_up or has_changed
        if is_news and self._catalog.has_any:
            images = {name: found.id for name, found in self._catalog.found.items()}
            self._on_event("container.available", {"images": images})
        if set(missing) - set(self._told_missing):
            faults = list(self._catalog.faults)
            self._on_event("container.images_missing", {"missing": faults})
        self._told, self._has_been_up, self._told_missing = None, True, missing


def unavailable(unfit: Unfit) -> SandboxUnavailable:
    """The error for calls that need a container."""
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
