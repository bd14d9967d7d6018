"""The container wall: runs programs in hardened containers, which are warm (already started) if
possible.

Host side. The pipeline and the executors use the wall. The wall uses the supply, the pool and a
container runtime. An engine without Docker starts as fast as one with Docker, and refuses only
tools that need a container. Invariants: if an image is missing, only the calls that need it are
refused; a container of the pool is returned to the pool after its run; a session's container is
never returned to the pool, because the session's files and processes stay in it; a session's
container counts as in use until it is removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import anyio

from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import CONTAINER_MEMORY_CLASSES, Grade, Limits
from fumehood.core.session import SessionHome, SessionRecord, SessionStatus
from fumehood.core.tasks import start_soon
from fumehood.sandbox.container.additions import PLUS, Additions
from fumehood.sandbox.container.channel import (
    DIRTY,
    NOT_CLEAN_IN_TIME,
    NOT_ENDED_IN_TIME,
    STREAM_ENDED,
)
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.disks import Disks
from fumehood.sandbox.container.pool import Kind, Pool
from fumehood.sandbox.container.runtime import Runtime, RuntimeConflict, RuntimeFault
from fumehood.sandbox.container.supply import (
    AS_USUAL,
    STOP_DEADLINE_S,
    ContainerSupply,
    Making,
    details_of,
    for_callers,
    unavailable,
)
from fumehood.sandbox.ports import PORTS
from fumehood.sandbox.settings import ContainerSettings, EngineIdentity
from fumehood.sandbox.wall import (
    FIRST_EPOCH,
    NO_SINKS,
    AttachedProgram,
    HasImages,
    HostSize,
    OnEvent,
    RunEnding,
    RunSinks,
    WallStatus,
    pins_of,
    try_later,
)

if TYPE_CHECKING:
    from fumehood.sandbox.images.catalog import Image

MAIN_LANGUAGE = "python"
"""The language whose image a lease uses if it names no image."""

FIRST_LOOK_DELAY_S = 1.0
"""Seconds from the start to the wall's first look at the runtime, unless a call comes earlier. The
look is delayed because loading Docker's package takes a tenth of a second, which would delay the
engine's start.
"""

LOOK_AGAIN_S = 30.0
"""Seconds between looks at the runtime while it can be used and has a configured image. Each look
also tidies the pool.
"""

RESTART_S = 30.0
"""Maximum seconds to start a stopped session. Also the maximum seconds for which a stop waits for
the current run and cleanup.
"""

RESTART_PAUSE_S = 0.1
"""Seconds between attempts to use or remove a disk that a container still uses."""

NEW = ".new"
"""Suffix of the name of a copy of a disk that will replace the disk."""

STOPPED = "it is stopped"
DISK_GONE = "the disk is gone"

LOOK_WHILE_AWAY_S = 5.0
"""Seconds between looks at the runtime while it cannot be used or has no configured image. They are
short, so that an idle engine soon notices a change.
"""


class ContainerWall(HasImages):
    """Runs programs in containers, while its asynchronous context is entered.

    If `eager` is True, the runtime is queried soon after the context is entered, and the containers
    of sessions outlive this engine. Otherwise, it is not queried before the first call. Entering
    the context never waits for it.
    """

    def __init__(
        self,
        settings: ContainerSettings,
        runtime: Runtime,
        identity: EngineIdentity,
        *,
        making: Making = AS_USUAL,
        additions: Additions | None = None,
        disks: Disks | None = None,
        eager: bool = True,
        part_of_one: float = 0.75,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        self.limits = settings.limits
        self._runtime = runtime
        self._orphan_s = making.orphan_s
        self._expected: set[str] = set()
        """Names of the containers of an earlier engine's sessions that this engine will take
        over.
        """
        self.disks = disks or Disks(None, runtime)
        self._additions = additions or Additions(runtime)
        self._disks_in_use: set[str] = set()
        self._ending_disks: set[str] = set()
        """Names of the disks of ended sessions that are not removed yet."""
        self._copies: Callable[[], Iterable[str]] = tuple
        self.keeps_sessions = eager
        """Whether the containers of sessions continue to run when this engine ends."""
        self._is_in_use = eager
        """Whether the runtime is queried regularly. If `eager` is True, this is always so.
        Otherwise, it is so since the first call.
        """
        self._oci_runtime = settings.runtime
        self._on_event = on_event
        self._stack = AsyncExitStack()
        self._group: anyio.abc.TaskGroup | None = None
        self._is_stopping = False
        self._held: dict[str, HeldContainer] = {}
        """Name of a session's container → the container, also while it is being removed."""
        self._supply = ContainerSupply(
            runtime,
            settings,
            identity,
            making,
            self._additions,
            self._names_in_use,
            self.start_soon,
            self._looked,
            on_event,
        )
        self._pool = Pool(
            self._supply,
            settings,
            self.start_soon,
            warm_image=settings.images.python,
            part_of_one=part_of_one,
            on_event=on_event,
        )

    def stand_by(self) -> None:
        """Make this wall passive, because another wall manages the engine's containers. A passive
        wall does not query the runtime until its first use. The caller must call this method before
        it enters the wall's context.
        """
        self._is_in_use = False

    async def __aenter__(self) -> ContainerWall:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(self._group.cancel_scope.cancel)
        if self._is_in_use:
            self.start_soon(self._keep_looking)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_stopping = True
        self._pool.close(_stopping(), "the engine stops")
        left = frozenset(
            held.name for held in self._held.values() if held.lost is None and not held.is_stopped
        )
        ended = [name for name in self._held if name not in left]
        for held in list(self._held.values()):
            held.leave() if self.keeps_sessions else held.end("the engine stops")
        try:
            await self._stack.aclose()
        finally:
            if self._supply.made or ended:
                await self._supply.stop(left if self.keeps_sessions else frozenset(), ended)
            await self._sweep_ending_disks()

    # -- the wall -------------------------------------------------------------------

    @property
    def status(self) -> WallStatus:
        """The limits that the last container enforced, and the faults because of which calls get no
        container now.
        """
        supply, required = self._supply, self._supply.required
        trouble, enforced = supply.trouble, required
        if trouble is not None:
            enforced = supply.seen if supply.down is None else frozenset()
        return WallStatus(
            required,
            enforced,
            enforced & supply.seen,
            is_ready=supply.has_any and trouble is None,
            is_in_use=self._is_in_use,
            runtime=supply.runtime_id,
            grade=supply.grade,
            held=supply.held,
            faults=(trouble.message,) if trouble is not None else (),
            remedy=f"{trouble.message} {trouble.remedy}" if trouble and not enforced else "",
            heals=trouble is None or trouble.heals,
            details=details_of(trouble),
            missing_images=tuple(error.message for error in supply.missing.values()),
        )

    @property
    def counts(self) -> JsonObject:
        """The figures of the pool (`Pool.counts`) and, as `held`, the number of sessions'
        containers.
        """
        return {**self._pool.counts(), "held": len(self._held)}

    @property
    def images(self) -> Mapping[str, Image]:
        """Name → image, for all images that are known to exist."""
        return self._supply.images

    @property
    def warm(self) -> Mapping[Kind, int]:
        """Kind → number of warm containers. Nothing has run in a warm container, so it may be used
        for any trust domain.
        """
        return self._pool.warm()

    def add_lock(self, image: str, lock: str) -> None:
        """Remember `lock`, the list of exact package versions that are added to `image`."""
        # The name of an image with additions contains only the digest of the lock.
        self._additions.add(image.partition(PLUS)[0], lock)

    async def save_image(self, image: str, file: IO[bytes]) -> None:
        """Write an image and its tag to `file`, from which `load_image` on another host loads it.
        Raises SandboxUnavailable if the runtime fails.
        """
        found = await self._find(image)
        with for_callers():
            await self._runtime.save_image(found.id, file)

    async def load_image(self, file: IO[bytes]) -> None:
        """Load an image from a file that `save_image` has written. Raises SandboxUnavailable if the
        runtime fails.
        """
        with for_callers():
            await self._runtime.load_image(file)

    async def until_host_is_known(self) -> None:
        """Query the size of the runtime's host, unless the size is already known. Raises
        SandboxUnavailable if the engine is stopping.
        """
        self._begin()
        if not self.host.memory_mb:
            await self._supply.look()

    @property
    def host(self) -> HostSize:
        """The size of the runtime's host. Both values are zero if the size is not known."""
        return self._supply.host

    def image_for(self, language: str) -> str:
        """Return the name of the image for programs in a language.

        Raises:
            ImageMissing: the image does not exist.
            SandboxUnavailable: no image is configured, or the image does not support the language.
        """
        name = self._supply.name_for(language)
        self._supply.check(name, language)
        return name

    async def look_again(self) -> None:
        """Query the runtime's state and the images again, and wait a bounded time for the results.

        Raises:
            SandboxUnavailable: the engine is stopping.
        """
        self._begin()
        await self._supply.look()

    async def facts_of(self, image: str) -> JsonObject:
        """Return the facts of an image: its name, its digest, the container runtime, and what was
        added to it.

        Raises:
            ImageMissing: the image does not exist.
            SandboxUnavailable: the runtime cannot be used.
        """
        return self.facts(image, (await self._find(image)).id)

    def facts(self, image: str, digest: str) -> JsonObject:
        """Return the same facts as `facts_of`, without a query to the runtime. `digest` is the
        digest of the image `image`.
        """
        lock = self.lock_text(image)
        return {
            "image": image,
            "image_digest": digest,
            "runtime": self._oci_runtime or "default",
            **({"packages": list(pins_of(lock))} if lock else {}),
        }

    async def with_additions(self, image: str, wanted: Sequence[str], principal_id: str) -> str:
        """Return the name of the image that consists of `image` and the additions in `wanted`, for
        example packages. This image need not exist yet. `principal_id` is the principal that
        requests the additions. Raises the same errors as `Additions.name_for`.
        """
        return await self._additions.name_for(await self._find(image), wanted, principal_id)

    @asynccontextmanager
    async def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        image: str | None = None,
    ) -> AsyncIterator[ContainerLease]:
        """Lease a container for this trust domain. If `image` is None, the container has the image
        for Python programs.

        If `fresh` is True, nothing has run in the container before, and it is destroyed after the
        run.
        """
        asked = time.monotonic()
        image = image or self._supply.name_for(MAIN_LANGUAGE)
        memory_mb = memory_mb or self.limits.default_memory_mb or CONTAINER_MEMORY_CLASSES[0]
        await self._find(image)
        entry = await self._pool.take(domain, Kind(image, memory_mb), fresh=fresh)
        lease = ContainerLease(entry.container, fresh, (time.monotonic() - asked) * 1e3)
        try:
            yield lease
        finally:
            self._pool.give_back(entry, ran=lease.has_run, fresh=fresh)

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
    ) -> HeldContainer:
        """Reserve a container for a session, and return it. The container comes from the pool, and
        nothing has run in it. If `disk_mb` is given, a new container with a disk of this size is
        created instead. The other arguments have the same meaning as in `SessionWall.hold`.

        Raises:
            InvalidParams: an addition is not allowed or not available.
            SandboxUnavailable: no container was available in time, the image is missing, or no disk
                can be made.
        """
        if lock:
            image = self._additions.add(image, lock)
        elif additions:
            image = await self.with_additions(image, additions, domain.principal_id)
        found = await self._find(image)
        kind = Kind(image, memory_mb, cpus or 0.0)
        if disk_mb is not None:
            return await self._hold_with_disk(
                f"fumehood-{domain.session_id}", disk_mb, kind, found, on_lost
            )
        entry = await self._pool.take(domain, kind, fresh=True)
        held = HeldContainer(
            self, self._supply, entry.container.name, image, found.languages, on_lost
        )
        held.container, held.lock = entry.container, self.lock_text(image)
        if not self._pool.let_go(entry, held):
            raise try_later("The container was lost as it was taken. Repeat the call.")
        self._held[held.name] = held
        held.listen_to(held.container)
        self._keep(held.container, FIRST_EPOCH)
        return held

    def _keep(self, container: Container, epoch: int) -> None:
        """Inform the guest of `container` that the container now belongs to a session, and how long
        the guest may wait for another engine. `epoch` is the number of this engine among the
        engines that the session has had; the guest refuses a later engine whose number is not
        higher.
        """
        container.keep(epoch, self._orphan_s if self.keeps_sessions else 0.0)

    async def _hold_with_disk(
        self, disk: str, disk_mb: int, kind: Kind, image: Image, on_lost: Callable[[], None]
    ) -> HeldContainer:
        why = self.disks.why_none()
        if why is not None:
            raise SandboxUnavailable(f"This engine has no disks: {why}.", retryable=False)
        with self.spared(disk, for_good=True):
            await self.disks.make(disk, disk_mb)
            container = await self._supply.make(kind, (disk, disk_mb))
        held = HeldContainer(
            self, self._supply, container.name, kind.image, image.languages, on_lost
        )
        held.disk = SessionDisk(disk, disk_mb, kind, FIRST_EPOCH)
        held.lock = self.lock_text(kind.image)
        self._use(held, container)
        return held

    def image_of(self, held: HeldContainer) -> str:
        """Return the name of the image of a session. If packages were added to the image, also
        remember the list of these packages (`add_lock`).
        """
        # The memory for locks is limited, and may have dropped this one.
        if held.lock:
            self.add_lock(held.image, held.lock)
        return held.image

    def lock_text(self, image: str) -> str:
        """Return the list of exact package versions that were added to `image`. If nothing was
        added, or the list is no longer remembered, return "".
        """
        return self._additions.lock_text(image)

    def _use(self, held: HeldContainer, container: Container) -> None:
        """Give the session of `held` a new container, which was created for the disk of the
        session.
        """
        assert held.disk is not None
        self._held[container.name] = held
        self._keep(container, held.disk.epoch)
        held.use(container)

    async def restart(self, held: HeldContainer) -> None:
        """Create a container for the disk of a stopped session, and make it the container of the
        session. If the disk is gone, end the session instead.

        Raises:
            SandboxUnavailable: the image is missing, or the container or the disk cannot be used
                now.
        """
        disk = held.disk
        assert disk is not None
        await self._find(self.image_of(held))
        self.is_disk_gone(held)
        while held.lost is None:
            try:
                await self.disks.attach(disk.volume)
                break
            except RuntimeConflict:  # by a container that a killed engine was creating or removing
                with suppress(RuntimeFault):
                    await self._supply.sweep()
                await anyio.sleep(RESTART_PAUSE_S)
        if held.lost is not None:
            return
        container = await self._supply.make(disk.kind, (disk.volume, disk.mb))
        if held.lost is None:
            self._use(held, container)
        else:  # the session was ended meanwhile, and its disk is removed after this
            container.end(held.why)
            await self._supply.remove(container.name)

    @asynccontextmanager
    async def fork(self, copy: str, session_id: str, home: SessionHome) -> AsyncIterator[str]:
        """Make a disk for a new session, and yield the disk's name. `copy` is the name of a copy of
        another session's disk, and the new disk gets the same content. `session_id` is the id of
        the new session. `home` belongs to the other session, and is not used.

        If the copying or the block fails, the new disk is removed. Raises SandboxUnavailable if the
        disk could not be made.
        """
        disk = f"fumehood-{session_id}"
        with self.spared(disk, for_good=True):
            await self.disks.copy(copy, disk)
            yield disk

    @contextmanager
    def spared(self, disk: str, *, for_good: bool = False) -> Iterator[None]:
        """Protect a disk from removal during the block. If `for_good` is True and the block
        succeeds, the disk stays protected after it.
        """
        self._disks_in_use.add(disk)
        is_kept = False
        try:
            yield
            is_kept = for_good
        finally:
            if not is_kept:
                self._disks_in_use.discard(disk)
                self.sweep_soon()

    def spare_copies(self, copies: Callable[[], Iterable[str]]) -> None:
        """From now on, keep the copies of disks whose names `copies` returns, and remove other
        copies.
        """
        self._copies = copies

    def drop_disk(self, disk: str) -> None:
        """Start removing the disk of a session that could not be created. The disk is removed in
        the background.
        """
        self._disks_in_use.discard(disk)
        self.sweep_soon()

    def sweep_soon(self) -> None:
        """Start removing disks and copies that are no longer needed. They are removed in the
        background.
        """
        if self._group is not None and not self._is_stopping:
            self.start_soon(self._sweep_disks)

    def is_disk_gone(self, held: HeldContainer) -> bool:
        """Return True if the session of `held` has a disk according to its record, but this disk no
        longer exists. In this case, also end the session's container.
        """
        is_gone = held.disk is not None and not self.disks.has(held.disk.volume)
        if is_gone:
            held.end(DISK_GONE)
        return is_gone

    async def see_off_stopped(
        self, name: str, container: Container | None, held: HeldContainer
    ) -> None:
        """Remove the container `name` of a session that was stopped, and detach the session's disk.
        `container` is the channel to this container, or None if this engine is not connected to it.
        """
        removed = held.removed
        if container is not None:
            await container.until_examined()
        await self._supply.remove(name)
        self._held.pop(name, None)
        if held.disk is not None and held.lost is None:
            await self.disks.detach(held.disk.volume)
        removed.set()

    def expect(self, record: SessionRecord, home: SessionHome) -> None:
        """Protect the container and the disk of an earlier engine's session from removal until
        `resume` is called for the session. `record` and `home` are the stored data of the session.
        """
        self._expected.add(home.container)
        if record.disk_mb is not None:
            self._disks_in_use.add(f"fumehood-{record.id}")

    def resume(
        self, record: SessionRecord, home: SessionHome, on_lost: Callable[[], None]
    ) -> HeldContainer:
        """Return the container that an earlier engine created for a session. `record` and `home`
        are the stored data of the session. This engine connects to the container in the background,
        or when the container is first used, whichever is earlier. `on_lost` is called when the
        container has ended.
        """
        image = self._additions.add(record.image, home.lock)
        name, kind = home.container, Kind(image, record.memory_mb, record.cpus or 0.0)
        held = HeldContainer(
            self,
            self._supply,
            name,
            image,
            record.languages,
            on_lost,
            lambda: self._supply.take_over(name, home.epoch),
        )
        held.lock = home.lock
        held.is_paused = record.state is SessionStatus.PAUSED
        held.is_stopped = record.state is SessionStatus.STOPPED
        if record.disk_mb is not None:
            held.disk = SessionDisk(f"fumehood-{record.id}", record.disk_mb, kind, home.epoch)
        self._expected.discard(name)
        if held.is_stopped:
            held.removed = asyncio.Event()
            self.start_soon(self.see_off_stopped, name, None, held)
        else:
            self._held[name] = held
            self.start_soon(held.take_over)
        return held

    async def open_program(
        self, command: tuple[str, ...], env: Mapping[str, str], *, image: str, memory_mb: int,
        has_network: bool = False,
    ) -> AttachedProgram:  # fmt: skip
        """Start a program that the operator configured, in a separate container. This implements
        `OpensPrograms`.
        """
        self._begin()
        return await self._supply.open_program(
            command, env, image, memory_mb, has_network=has_network
        )

    # -- inside -----------------------------------------------------------------

    def start_soon(
        self, task: Callable[..., Coroutine[Any, Any, None]], *arguments: object
    ) -> None:
        """Start `task` with these arguments in the background. It is cancelled when the wall's
        context ends.
        """
        assert self._group is not None
        start_soon(self._group, task, *arguments)

    def _names_in_use(self) -> list[str]:
        return [*self._supply.unsettled, *self._pool.names, *self._held, *self._expected]

    def _begin(self) -> None:
        """Start to query the runtime regularly, unless this was already started. Raises
        SandboxUnavailable if the engine is stopping.
        """
        if self._group is None or self._is_stopping:
            raise _stopping()
        if not self._is_in_use:
            self._is_in_use = True
            self.start_soon(self._keep_looking)

    def _looked(self) -> None:
        """Apply the results of the last look. If the runtime cannot be used, refuse the waiting
        calls. Otherwise, destroy unused containers whose image is outdated.
        """
        if self._supply.down is not None:
            self._pool.refuse_waiting(unavailable(self._supply.down))
        else:
            ids = {found.id for found in self._supply.images.values()}
            self._pool.retire(lambda container: container.image_id not in ids)

    async def _keep_looking(self) -> None:
        """Look at the runtime at regular intervals. After each query, remove containers
        and disks that are no longer in use, and tidy the pool.
        """
        await anyio.sleep(FIRST_LOOK_DELAY_S)
        next_look = 0.0
        while True:
            if time.monotonic() >= next_look or not self._supply.has_any:
                next_look = time.monotonic() + LOOK_AGAIN_S
                await self._supply.look()
                if self._supply.down is None:
                    sweeps = (
                        self._find_dead,
                        self._supply.sweep,
                        self._additions.sweep,
                        self._sweep_disks,
                    )
                    for sweep in sweeps:
                        with suppress(RuntimeFault):
                            await sweep()
                    # While a limit is missing, no call is admitted, so only a warm container can
                    # show that the limit is enforced again.
                    self._pool.tidy(least_warm=1 if self._supply.lacking is not None else 0)
            await anyio.sleep(min(LOOK_AGAIN_S, LOOK_WHILE_AWAY_S))

    async def _find_dead(self) -> None:
        """Find sessions' containers that have ended although their channels did not report it, and
        mark them as ended. Raises RuntimeFault.
        """
        for held in list(self._held.values()):
            await held.look()

    async def _find(self, image: str) -> Image:
        """Find an image as `ContainerSupply.find` does, and return it. Raises the same errors, and
        SandboxUnavailable if the engine is stopping.
        """
        self._begin()
        return await self._supply.find(image)

    async def _sweep_disks(self) -> None:
        """Remove the disks of sessions that have ended, and copies that are no longer needed. If a
        container still uses a disk, the disk stays until the next sweep.
        """
        await self.disks.sweep(lambda: {*self._copies(), *self._disks_in_use})
        self._ending_disks = set(filter(self.disks.has, self._ending_disks))

    async def _sweep_ending_disks(self) -> None:
        """Remove the disks of sessions that have just ended. Wait at most `STOP_DEADLINE_S` seconds
        until they are removed.
        """
        # This takes time because a disk cannot be removed before the runtime has removed its
        # container.
        self._disks_in_use -= self._ending_disks
        with anyio.move_on_after(STOP_DEADLINE_S, shield=True):
            await self._sweep_disks()
            while self._ending_disks and self._supply.down is None:
                await anyio.sleep(RESTART_PAUSE_S)
                await self._sweep_disks()

    def see_off(self, held: HeldContainer) -> None:
        """Start removing the container of a session that has ended, and the session's disk if it
        has one. They are removed in the background.
        """
        if held.disk is not None:
            self._ending_disks.add(held.disk.volume)
        self.start_soon(self._see_off, held)

    async def _see_off(self, held: HeldContainer) -> None:
        values: JsonObject = {"name": held.name, "why": held.why, "held": True}
        try:
            if held.container is not None:
                await held.container.until_examined()
                if held.container.complaint:
                    values["guest_said"] = held.container.complaint
            self._on_event("container.destroyed", values)
            await self._supply.remove(held.name)
            self._held.pop(held.name, None)
            if held.disk is not None:
                await held.until_unchanging()
                self._disks_in_use.discard(held.disk.volume)
                await self._sweep_disks()
        finally:
            held.gone.set()


def _stopping() -> SandboxUnavailable:
    return try_later("The engine is stopping.")


# -- leases ---------------------------------------------------------------------------------


@dataclass(slots=True)
class ContainerLease:
    """The right to use a container of the pool for one run. `queue_ms` is how long the call waited
    for the container, in milliseconds.
    """

    container: Container
    fresh: bool
    queue_ms: float
    has_run: bool = False

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program in a separate process of the container, and return the ending."""
        self.has_run = True
        isolation = "container_per_call" if self.fresh else "call"
        return await self.container.run(program, arguments, limits, sinks, isolation)


@dataclass(frozen=True, slots=True)
class SessionDisk:
    """The disk of a session, and the properties of the containers that are created to use it."""

    volume: str
    mb: int
    kind: Kind
    epoch: int


class HeldContainer:
    """The container of a session. The events of the container's channel go to this object, and not
    to the pool.
    """

    is_away = False

    def __init__(
        self,
        wall: ContainerWall,
        supply: ContainerSupply,
        name: str,
        image: str,
        languages: tuple[str, ...],
        on_lost: Callable[[], None],
        take_over: Callable[[], Awaitable[Container | None]] | None = None,
    ) -> None:
        """Create the object for the container `name`. `languages` are the languages that its image
        supports. `on_lost` is called when the container has ended.

        If an earlier engine created the container, `take_over` connects to it and returns it, or
        returns None if it is gone. If this engine created the container, `take_over` is None.
        """
        self.name = name
        """The container's name in the runtime."""
        self.node = ""
        self.container: Container | None = None
        self.image = image
        """The name of the image. If something was added to the image, the name includes the digest
        of the additions.
        """
        self.languages = languages
        self.lock = ""
        self.lost: str | None = None
        self.why = ""
        """Why the container has ended, as its channel has reported, for logs. Empty while the
        container runs.
        """
        self.gone = asyncio.Event()
        """Set when the runtime has removed the container after the end of the session."""
        self._wall = wall
        self._supply = supply
        self._on_lost = on_lost
        self.disk: SessionDisk | None = None
        """The disk of the session's working directory, or None. With a disk, the container can be
        stopped, and a new container can be created for the disk.
        """
        self.is_stopped = False
        """Whether the container has ended, and only its disk is kept."""
        self.is_paused = False
        """Whether the container's processes are frozen, or perhaps frozen."""
        self._is_ending = False
        self.removed = asyncio.Event()
        """Set when the container of a stopped session is removed. The disk can then be used
        again.
        """
        self.removed.set()
        self._has_changed = asyncio.Event()
        self.on_processes: Callable[[], None] = lambda: None
        """Called when the number of running registered processes has changed."""
        self._take_over = take_over
        self._changing = anyio.Lock()
        """A lock. It is held while the container is taken over, frozen, thawed, stopped or started
        again.
        """

    @property
    def grade(self) -> Grade | None:
        """How strongly the container holds its programs. None if it does not run."""
        return self.container.grade if self.container is not None else None

    async def until_unchanging(self) -> None:
        """Wait until no operation changes the container, and until the container of a stopped
        session is removed. After that, nothing uses the disk of a stopped session.
        """
        async with self._changing:
            await self.removed.wait()

    async def pause(self) -> None:
        """Wait for the cleanup after the last run, then freeze the container. The next `until_free`
        thaws it.
        """
        async with self._changing:
            if not self.is_paused:
                await self._until_settled()
                if self.lost is None and not self.is_stopped:
                    self.is_paused = True  # from here on no run begins before `unpause`
                    if self.container is not None:
                        self.container.interrupt_streams()
                    await self._supply.pause(self.name)

    async def stop(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait for the cleanup after the last run, then end the container, but keep its disk.

        `unless` is called before and after the waiting. If it returns True, for example because a
        new call has arrived, the container is not ended.
        """
        async with self._changing:
            if unless():
                return
            with anyio.move_on_after(RESTART_S):
                await self._until_settled()
            if unless():
                return
            if self.container is not None:
                self.container.end(STOPPED)  # calls `on_end`
            self.on_end(STOPPED)

    @asynccontextmanager
    async def copy_disk(self, copy: str) -> AsyncIterator[int]:
        """Copy the disk of the session to a new disk named `copy`. The block gets the size of the
        copy in bytes.

        After the block, the copy is kept only if the function passed to
        `ContainerWall.spare_copies` returns its name. Raises SandboxUnavailable if the disk is gone
        or could not be copied.
        """
        assert self.disk is not None
        with self._wall.spared(copy):
            async with self._changing:
                await self._until_removed()
                if self._wall.is_disk_gone(self):
                    raise SandboxUnavailable(
                        "The session is lost: its disk is gone.", retryable=False
                    )
                size = await self._wall.disks.copy(self.disk.volume, copy)
            yield size

    async def restore(self, copy: str) -> None:
        """Replace the disk of the session by a copy of the disk `copy`. First make the copy, then
        stop the container, then replace the disk.

        Raises:
            SandboxUnavailable: the disk was not replaced. If the copy could not be made, the
                container was not stopped either.
        """
        assert self.disk is not None
        new = f"{self.disk.volume}{NEW}"
        with self._wall.spared(new):
            await self._wall.disks.prepare(copy, new)
            await self.stop()
            async with self._changing:
                await self._until_removed()
                if self.lost is None:
                    await self._wall.disks.replace(self.disk.volume, new)

    async def take_over(self) -> None:
        """Connect to the container that an earlier engine created. If the container is frozen, do
        nothing. If the runtime cannot be used, wait and try again.

        If the container is gone, a session with a disk becomes stopped, and any other session is
        lost.
        """
        while self.lost is None and not self.is_stopped:
            try:
                async with self._changing:
                    self.is_paused = self.is_paused and await self._supply.is_paused(self.name)
                    if not (self.is_paused or self.is_stopped):
                        await self._until_usable()
            except SandboxUnavailable:
                await anyio.sleep(LOOK_WHILE_AWAY_S)
            else:
                return

    async def look(self) -> None:
        """If the container is frozen or not yet taken over, find out from the runtime whether it
        has ended. If it has, a session with a disk becomes stopped, and any other session is lost.

        Raises:
            RuntimeFault: the runtime cannot be queried now.
        """
        # In all other cases, the container's channel reports the end.
        if self._changing.locked():  # the operation in progress will detect it
            return
        async with self._changing:
            is_watched = self.container is not None and not self.is_paused
            if is_watched or self.is_stopped or self.lost is not None:
                return
            if await self._supply.is_dead(self.name):
                if self.container is not None:
                    self.container.end(STREAM_ENDED)  # calls `on_end`
                self.on_end(STREAM_ENDED)

    async def until_free(self) -> None:
        """Make the container ready for the next run: thaw it, start it again, or take it over from
        an earlier engine. Then wait until the cleanup after the last run is done, or the container
        has ended.

        Raises:
            SandboxUnavailable: the container cannot be thawed, started or taken over now.
        """
        # The channel limits the time for the cleanup.
        while self.lost is None and (self.container is None or self.is_paused):
            async with self._changing:
                await self._until_usable()
        await self._until_settled()

    async def facts(self) -> JsonObject:
        """Return the facts of the image that the next run uses, in the form of
        `ContainerWall.facts_of`. If the container belongs to an earlier engine, first take it over.
        Raises SandboxUnavailable if that is impossible now.
        """
        # The digest of the image is known only after the takeover.
        if not self.is_stopped and self.container is None:
            await self.until_free()
        image = self._wall.image_of(self)
        if self.container is not None:
            return self._wall.facts(image, self.container.image_id)
        return await self._wall.facts_of(image)

    async def _until_removed(self) -> None:
        """If the session is stopped, wait until the runtime has removed its container. Raises
        SandboxUnavailable if that takes too long.
        """
        # Until then, the container uses the disk.
        with anyio.move_on_after(RESTART_S):
            await self.removed.wait()
            return
        raise try_later("The session's container could not be removed in time. Try again.")

    async def _until_usable(self) -> None:
        if self.is_stopped and self.lost is None:
            with anyio.move_on_after(RESTART_S):
                await self.removed.wait()
                await self._wall.restart(self)
                return
            raise try_later("The session could not be started in time. Repeat the call.")
        if self.is_paused and self.lost is None:
            await self._supply.unpause(self.name)
            self.is_paused = False
        if self.container is None and self.lost is None and self._take_over is not None:
            self.use(await self._take_over())

    async def _until_settled(self) -> None:
        while self.lost is None and self.container is not None and not self.container.is_free:
            self._has_changed.clear()
            await self._has_changed.wait()

    def use(self, container: Container | None) -> None:
        """From now on, use `container` for the session. It was taken over from an earlier engine,
        or created for the session's disk.

        If `container` is None, the session's container is gone; the session is then stopped or
        lost. If the session has ended in the meantime, end the container.
        """
        self.is_stopped, self.container = False, container
        if container is not None:
            self.name = container.name
        if container is None or container.is_dead:
            self.on_end(STREAM_ENDED)
        elif self.lost is not None:
            container.end(self.why)
        else:
            self.listen_to(container)

    def listen_to(self, container: Container) -> None:
        """From now on, receive the events of `container`."""
        container.listener = self
        container.on_processes = lambda: self.on_processes()
        self.on_processes()

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """Run a program, and return its ending. The next run gets the files and variables that this
        run leaves.
        """
        if self.container is None:
            return RunEnding(EndedBy.SANDBOX_LOST, "session")
        return await self.container.run(program, arguments, limits, sinks, "session", keep=True)

    @property
    def running(self) -> int:
        """The number of running background processes that programs have registered with the guest,
        as last reported by the guest.
        """
        return (self.container.processes.running or 0) if self.container is not None else 0

    async def processes(self, request: JsonObject) -> JsonObject:
        """Send a request about the registered background processes to the guest, and return the
        guest's answer. `request["do"]` names the action. If the session is stopped, the action
        `list` returns an empty list without a request to the guest.

        Raises:
            InvalidParams: the request is too long, or cannot be carried out.
            ResourceNotFound: there is no such process.
            SandboxUnavailable: the session is paused, lost or not yet taken over, or it is stopped
                and the action is not `list`. Or the guest ends, does not answer in time, or has too
                many unanswered requests.
        """
        if self.is_stopped and self.lost is None and request.get("do") == "list":
            return {"processes": []}
        return await self._reachable().processes.ask(request)

    async def connect(self, port: int) -> anyio.abc.ByteStream:
        """Connect to a port on the container's loopback interface, and return the connection."""
        return await self._reachable().opened(PORTS).connect(port)

    def _reachable(self) -> Container:
        """Return the container if it can be used now. Raises SandboxUnavailable if it is paused,
        stopped or lost.
        """
        if self.container is None or self.lost is not None or self.is_paused:
            state = "paused" if self.is_paused else "stopped" if self.is_stopped else "not running"
            raise try_later(f"The session is {state}. Resume it, and repeat the request.")
        return self.container

    def leave(self) -> None:
        """Leave the container running for the next engine, and ignore its events from now on."""
        self.lost = self.why = "the engine stops"
        self._has_changed.set()
        if self.container is not None:
            self.container.end(self.lost)

    def end(self, why: str) -> None:
        """End the container and everything that runs in it. `why` is a clause with the reason. Then
        remove the container and its disk.
        """
        self._is_ending = True
        if self.container is not None:
            self.container.end(why)  # calls `on_end`, unless the container had already ended
        self.on_end(why)

    async def until_gone(self) -> None:
        """Wait until the runtime has removed the container."""
        await self.gone.wait()

    # -- events of the container ---------------------------------------------------------

    def on_clean(self) -> None:
        """Let `until_free` continue, because the container is clean after a run."""
        self._has_changed.set()

    def on_end(self, why: str) -> None:
        """Update the session after its container has ended. If the session has a disk that is to be
        kept, the session is now stopped. Otherwise, the session is lost. `why` is the reason for
        the end, from the container's channel or from a method of this object.
        """
        if self.lost is not None:
            return
        if self.disk is not None and not self._is_ending:
            self._on_stop()
            return
        self.lost, self.why, self.is_stopped = _in_words(why), why, False
        self._has_changed.set()
        self._wall.see_off(self)
        self._on_lost()

    def _on_stop(self) -> None:
        """Mark the session as stopped, because its container has ended but its disk is kept. Start
        removing the container.
        """
        if self.is_stopped:
            return
        self.is_stopped, self.is_paused = True, False
        container, self.container, self._take_over = self.container, None, None
        self.removed = asyncio.Event()
        self._has_changed.set()
        self._wall.start_soon(self._wall.see_off_stopped, self.name, container, self)
        self._on_lost()


def _in_words(why: str) -> str:
    """Return a clause that tells the owner of a session why its container has ended. `why` is the
    reason that the channel reported. Text that the guest has sent is put in parentheses.
    """
    if why.startswith(DIRTY):
        claim = "".join(c for c in why.removeprefix(DIRTY) if c.isprintable())
        return (
            "its container could not be cleared up after a run "
            f"({claim.strip() or 'no reason was given'})"
        )
    words = {
        STREAM_ENDED: "its container is gone",
        DISK_GONE: "its disk is gone",
        NOT_CLEAN_IN_TIME: "its container was not cleared up in time after a run",
        NOT_ENDED_IN_TIME: "its container did not end a run in time",
    }
    return words.get(why, "its container failed")
