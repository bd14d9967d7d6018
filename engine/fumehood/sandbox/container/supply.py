"""The supply of containers: finds images, creates containers, and removes lost containers.

Host side, between the wall and a container runtime. A "look" is a query of the runtime's state and
images. If it is not known whether the image of a call exists, the call starts a look, and calls
that arrive meanwhile share the result. Invariants: a missing image affects only the calls that need
it, and is never replaced by another; a container's name counts as in use before the container is
requested from the runtime; a container that does not become ready is removed.

A sweep removes containers that a crash between two steps left behind: those that have this engine's
labels, but a name that is not in use. For each container, the first of these rules that applies
decides:

1. A container without labels of this software is left alone.
2. A container with the label of this engine or of its owner is removed if its name is not in use.
(An owner is a state directory. It has one engine at a time, so a container of an earlier engine is
in use only if it belongs to a session that is to be taken over.)
3. A container with the label of another owner is removed only if it is stopped and long past its
deadline.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade, Held, Limit
from fumehood.sandbox.container.additions import PLUS, Additions
from fumehood.sandbox.container.container import (
    START_DEADLINE_S,
    Container,
    ContainerFailed,
    GradeTooLow,
    LimitsNotEnforced,
)
from fumehood.sandbox.container.pool import Kind
from fumehood.sandbox.container.runtime import (
    ListedContainer,
    Receiver,
    Runtime,
    RuntimeConflict,
    RuntimeFault,
    RuntimeNotFound,
    RuntimeTimeout,
    Unfit,
)
from fumehood.sandbox.container.spec import (
    GUEST_COMMAND,
    LABEL_DEADLINE,
    LABEL_ENGINE,
    LABEL_OWNER,
    ContainerSpec,
    OperatorProgram,
    grade_of,
)
from fumehood.sandbox.settings import ContainerSettings, EngineIdentity
from fumehood.sandbox.wall import (
    REMOVE_S,
    RETRY_AFTER_MS,
    AttachedProgram,
    HostSize,
    ImageMissing,
    OnEvent,
    try_later,
)

if TYPE_CHECKING:
    from fumehood.sandbox.images.catalog import Image


LOOK_DEADLINE_S = 20.0
"""Maximum seconds for all requests of one look at the runtime."""

LEAST_BETWEEN_LOOKS_S = 1.0
"""Minimum seconds between the starts of two looks at the runtime, however many calls request a
look.
"""

REMEMBERED_S = 2.0
"""Seconds for which no look at the runtime begins after a look that reached its deadline."""

GUEST_GRACE_S = 60.0
"""Seconds for which a guest lives on after the last moment at which it could be in use."""

GUEST_CPUS = 0.5
"""Number of processors for the guest, in addition to those for programs. The guest creates the next
child while a program runs.
"""

MAX_TAKEOVERS = 8
"""Maximum number of concurrent takeovers. It ensures that each guest is ready in time."""


PAST_DEADLINE_S = 60
"""Seconds for which the stopped container of another owner is left alone after its deadline."""

RETRY_PAUSE_S = (0.1, 0.5, 2.0, 5.0, 15.0)
"""Seconds before each further attempt to remove a container. The last value repeats."""

STOP_DEADLINE_S = 8.0
"""Maximum seconds for removing all containers when the engine stops. The guests in containers that
are left end by themselves, and the next engine removes these containers.
"""


Trouble = RuntimeFault | ContainerFailed | Unfit
"""A fault because of which there are no containers. It has a message and a remedy for callers.
`heals` says whether it can end by itself.
"""


@dataclass(frozen=True, slots=True)
class Making:
    """Settings for the creation of containers. All times are in seconds.

    A session without a disk keeps a container for at most `held_s`, and a session with a disk for
    at most `held_with_disk_s`. After the engine has ended, a session's container waits at most
    `orphan_s` for the next engine.
    """

    command: tuple[str, ...] = GUEST_COMMAND
    start_deadline_s: float = START_DEADLINE_S
    held_s: float = 0.0
    held_with_disk_s: float = 0.0
    orphan_s: float = 600.0


AS_USUAL = Making()


SAID_BYTES = 2000
"""Maximum number of bytes, from the end of a program's standard error, that are kept."""


class ProgramStreams(asyncio.StreamReaderProtocol, Receiver):
    """The standard streams of a program that the operator configured. `said` is the end of what it
    has written to standard error so far.
    """

    writer: asyncio.StreamWriter

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.said = b""
        self._is_broken = False
        super().__init__(self.reader)

    # The transports of some event loops are not asyncio's, but have the same methods.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self.writer = asyncio.StreamWriter(transport, self, self.reader, loop)
        if self._is_broken:
            transport.abort()

    def errors_received(self, chunk: bytes) -> None:
        self.said = (self.said + chunk)[-SAID_BYTES:]

    def stream_broken(self, why: str) -> None:
        self._is_broken = True
        if hasattr(self, "writer"):
            self.writer.transport.abort()


class ContainerSupply:
    """Finds images, and creates and removes containers.

    `required` are the limits that every container must enforce. `in_use` returns the names of the
    containers that `sweep` must not remove. `on_look` is called after each query of the runtime's
    state and images.
    """

    required = frozenset(Limit)

    def __init__(
        self,
        runtime: Runtime,
        settings: ContainerSettings,
        identity: EngineIdentity,
        making: Making,
        additions: Additions,
        in_use: Callable[[], Iterable[str]],
        start_soon: Callable[..., object],
        on_look: Callable[[], None],
        on_event: OnEvent,
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self._by_language: dict[str, str] = settings.images.model_dump()
        self._identity = identity
        self._making = making
        self._additions = additions
        self._in_use = in_use
        self._start_soon = start_soon
        self._on_look = on_look
        self._on_event = on_event
        self._turn = anyio.Lock()
        self._takeovers = anyio.CapacityLimiter(MAX_TAKEOVERS)
        self.made = 0
        """Number of containers that were requested from the runtime so far."""
        self.host = HostSize(0, 0)
        """The size of the runtime's host. Both values are zero if the size is not known."""
        self._unfit: Trouble | None = None
        self._reported: list[str] | None = None
        """The result of a look at the runtime that was logged last: the fault, or the names of
        missing images.
        """
        self._silent_until = -math.inf
        """Time, by the monotonic clock, before which no look at the runtime begins."""
        self.looked_at = -math.inf
        """Time, by the monotonic clock, at which the last finished look at the runtime began."""
        self.images: dict[str, Image] = {}
        self.missing: dict[str, ImageMissing] = {}
        """Name of each configured image that is missing → the error. In the order of the
        configuration.
        """
        self.seen: frozenset[Limit] = frozenset()
        """The limits that the last container enforced, even if a required one was not among
        them.
        """
        self.grade: Grade | None = None
        """How strongly the last container holds its programs."""
        self.held: Mapping[Limit, Held] = {}
        """How the last container holds each limit."""
        self.lacking: LimitsNotEnforced | None = None
        """The error, if the last container did not enforce a required limit, otherwise None."""
        self.unsettled: set[str] = set()
        """Names of containers that are being created, that are being removed after a failed start,
        or that run a program of the operator.
        """

    # -- the state ------------------------------------------------------------------

    @property
    def runtime_id(self) -> str:
        """The id of the runtime, such as `docker`."""
        return self._runtime.id

    @property
    def down(self) -> Trouble | None:
        """The reason why the runtime cannot be used, or None if it can be used. The reason is a
        failure of the last request to it, or a fault that the last look found.
        """
        return self._runtime.failure or self._unfit

    @property
    def trouble(self) -> Trouble | None:
        """The reason why calls get no container, or None if they get one. Either the runtime cannot
        be used, or the last container did not enforce a required limit.
        """
        return self.down or self.lacking

    @property
    def has_any(self) -> bool:
        """Whether the runtime can be used and has at least one configured image."""
        names = self._by_language.values()
        return self.down is None and any(name in self.images for name in names)

    def name_for(self, language: str) -> str:
        """Return the name of the image that is configured for a language. The image itself may be
        missing.

        Raises:
            SandboxUnavailable: no image is configured for the language.
        """
        name = self._by_language.get(language)
        if name is None:
            raise SandboxUnavailable(
                f"This engine has no image for {language}, and uses no other wall instead.",
                retryable=False,
            )
        return name

    def check(self, name: str, language: str | None) -> None:
        """Check that the image `name` exists and supports a language, without a request to the
        runtime. If nothing is known about the image yet, it passes the check. If `language` is
        None, only the existence is checked.

        Raises:
            ImageMissing: the image was missing at the last look.
            SandboxUnavailable: the image does not support the language.
        """
        if name in self.missing:
            raise copy.copy(self.missing[name])
        found = self.images.get(name)
        if found is not None and language is not None and language not in found.languages:
            raise SandboxUnavailable(
                f"The image {name} has no {language}. Set container.images.{language} to one that "
                "has it.",
                retryable=False,
            )

    # -- looking --------------------------------------------------------------------

    async def find(self, name: str) -> Image:
        """Return the image with this name. If the image is not known yet, look at the runtime.

        The name may be that of an image with additions, such as packages for a session. If such an
        image does not exist, it is made.

        Raises:
            ImageMissing: the image does not exist.
            InvalidParams: an addition is no longer available.
            SandboxUnavailable: the runtime cannot be used, or the image cannot be made now.
        """
        below, plus, _ = name.partition(PLUS)
        if plus:  # each time: the layer may have been removed, or the image below replaced
            base = await self.find(below)
            self.images[name] = await self._additions.find(base, name)
            return self.images[name]
        if self.down is not None or name not in self.images:
            await self.look()
            if self.down is not None:
                raise unavailable(self.down)
        self.check(name, None)
        if name not in self.images:  # not a configured image, but that of a session
            try:
                async with self._turn:
                    self.images[name] = await self._runtime.find_image(name)
            except RuntimeFault as error:
                raise unavailable(error) from None
        return self.images[name]

    async def look(self) -> None:
        """Query the runtime's state, its host and the images, and store the results in this
        object.

        If another call has begun and finished a query since this call began, do nothing. If the
        last query timed out less than `REMEMBERED_S` seconds ago, do nothing either.
        """
        came = time.monotonic()
        async with self._turn:
            if self.looked_at > came or time.monotonic() < self._silent_until:
                return
            pause_s = self.looked_at + LEAST_BETWEEN_LOOKS_S - time.monotonic()
            await anyio.sleep(max(0.0, pause_s))
            began = time.monotonic()
            try:
                with anyio.fail_after(LOOK_DEADLINE_S):
                    self._unfit = await self._why_unfit()
            except (TimeoutError, RuntimeTimeout):
                self._unfit = RuntimeTimeout()
                self._unfit.message = f"{self._runtime.name} does not answer in time."
                self._silent_until = time.monotonic() + REMEMBERED_S
            except RuntimeFault as error:
                self._unfit = error
            except Exception as error:  # a bug must not end the task that looks regularly
                self._on_event("container.look_failed", {"why": repr(error)})
                self._unfit = RuntimeFault()
                self._unfit.message = f"A request to {self._runtime.name} failed."
            self.looked_at = began
            self._report()
            self._on_look()

    async def _why_unfit(self) -> Unfit | None:
        host = await self._runtime.examine_host(self._settings.runtime)
        self.host = host.size
        if host.unfit is None:
            names = dict.fromkeys(self._by_language.values())
            missing = {}
            for name in {**names, **self.images}:
                below, plus, _ = name.partition(PLUS)
                if plus:
                    base = self.images.get(below)
                    known = self._additions.lock_text(name) != ""
                    if base is None or base.id != self.images[name].base or not known:
                        del self.images[name]
                    continue
                try:
                    self.images[name] = await self._runtime.find_image(name)
                except ImageMissing as error:
                    self.images.pop(name, None)
                    if name in names:
                        missing[name] = error
            self.missing = missing
        return host.unfit

    def _report(self) -> None:
        """Log whether the runtime and the configured images are available, unless this is the same
        as what was logged last.
        """
        missing = [error.message for error in self.missing.values()]
        result = [self.down.message] if self.down is not None else missing
        if result == self._reported:
            return
        self._reported = result
        if self.down is not None:
            values: JsonObject = {"why": self.down.message, "cure": self.down.remedy}
            self._on_event("container.unavailable", values)
        elif missing:
            self._on_event("container.images_missing", {"missing": missing})
        else:
            images = {name: found.id for name, found in self.images.items()}
            self._on_event("container.available", {"images": images})

    # -- making ---------------------------------------------------------------------

    async def make(self, kind: Kind, disk: tuple[str, int] | None = None) -> Container:
        """Create and start a container of this kind, and return it. `disk` is the name of the
        volume for its working directory and the volume's size in MB. None means a working directory
        in memory.

        Raises:
            SandboxUnavailable: the image is missing, or the container could not be started or does
                not enforce a required limit.
        """
        began = time.monotonic()
        spec = self._spec(kind, disk)
        try:
            container = await self._start(spec)
        except Exception as error:
            trouble = self._failed(spec, error)
            if isinstance(trouble, GradeTooLow):
                raise unavailable(trouble) from None
            raise try_later(
                f"No container could be started. {trouble.message} {trouble.remedy}"
            ) from None
        self.seen, self.lacking = container.enforced, None
        self.grade, self.held = container.grade, container.held
        took_ms = round((time.monotonic() - began) * 1e3)
        started = {"name": container.name, "image": kind.image, "memory_mb": kind.memory_mb}
        self._on_event("container.started", {**started, "ms": took_ms})
        return container

    async def _start(self, spec: ContainerSpec) -> Container:
        self.unsettled.add(spec.name)
        try:
            container = await Container.start(
                self._runtime,
                spec,
                required=self.required,
                least=self._settings.least_grade,
                ready_s=self._making.start_deadline_s,
            )
        except BaseException:
            self._start_soon(self._remove_unsettled, spec.name)
            raise
        self.unsettled.discard(spec.name)
        return container

    async def open_program(
        self, command: tuple[str, ...], env: Mapping[str, str], image: str, memory_mb: int,
        *, has_network: bool,
    ) -> AttachedProgram:  # fmt: skip
        """Start a program that the operator configured, in a separate container, and return it. The
        arguments have the same meaning as in `OpensPrograms.open_program`.

        Raises:
            SandboxUnavailable: the image is missing, or the runtime cannot be used.
        """
        await self.find(image)
        grade, least = grade_of(self._settings.runtime), self._settings.least_grade
        if not grade.is_at_least(least):
            raise unavailable(GradeTooLow(grade, least))
        spec = replace(
            self._spec(Kind(image, memory_mb)),
            program=OperatorProgram(command, env, has_network=has_network),
        )
        self.unsettled.add(spec.name)
        remove = partial(self._remove_unsettled, spec.name)
        try:
            _, streams = await self._runtime.launch(spec)
            program = ProgramStreams()
            await streams.connect(program)
            return AttachedProgram(program.reader, program.writer, lambda: program.said, remove)
        except BaseException as error:
            with anyio.CancelScope(shield=True), anyio.move_on_after(REMOVE_S):
                await remove()
            if isinstance(error, RuntimeFault):
                raise SandboxUnavailable(f"{error.message} {error.remedy}") from None
            raise

    async def take_over(self, name: str, epoch: int) -> Container | None:
        """Connect to the container that an earlier engine created for a session, and return it.
        Return None if the container is gone or cannot be used by this engine. `name` is its name in
        the runtime. `epoch` is the number of this engine among the engines that the session has
        had; it must be higher than that of every earlier engine.

        Raises:
            SandboxUnavailable: the runtime cannot be used now.
        """
        try:
            state = await self._runtime.state(name)
            is_ours = state.labels.get(LABEL_OWNER) == self._identity.owner_id
            if not is_ours or not state.is_running:
                return None
            oci = self._settings.runtime
            if oci is not None and state.oci_runtime != oci:
                raise ContainerFailed(f"It does not run on {oci}, which is configured now.")
            if state.is_paused:
                await self._runtime.unpause(name)
            async with self._takeovers:
                container = await Container.take_over(
                    self._runtime,
                    name,
                    state.image_id,
                    grade=grade_of(oci),
                    required=self.required,
                    least=self._settings.least_grade,
                    epoch=epoch,
                )
            container.keep(epoch, self._making.orphan_s)
            return container
        except (RuntimeNotFound, RuntimeConflict, ContainerFailed) as error:
            self._on_event("container.not_taken_over", {"name": name, "why": str(error)})
            return None
        except RuntimeFault as error:
            raise unavailable(error) from None

    async def is_paused(self, name: str) -> bool:
        """Return whether a container is frozen. If it is gone, return False. Raises
        SandboxUnavailable if the runtime cannot be used.
        """
        with for_callers():
            return (await self._runtime.state(name)).is_paused
        return False

    async def is_dead(self, name: str) -> bool:
        """Return True if a container is gone, has ended, or will end as soon as it is thawed. The
        last case is only detected if its host is this machine.

        Raises:
            RuntimeFault: the runtime cannot be queried now.
        """
        try:
            state = await self._runtime.state(name)
        except RuntimeNotFound:
            return True
        if not state.is_running:
            return True
        return self._runtime.is_local and is_killed(state.pid)

    async def pause(self, name: str) -> None:
        """Freeze a container. Raises SandboxUnavailable if the runtime fails."""
        with for_callers():
            await self._runtime.pause(name)

    async def unpause(self, name: str) -> None:
        """Thaw a frozen container. Raises SandboxUnavailable if the runtime fails."""
        with for_callers():
            await self._runtime.unpause(name)

    async def _remove_unsettled(self, name: str) -> None:
        try:
            await self.remove(name)
        finally:
            self.unsettled.discard(name)  # if the removal was cancelled, a sweep may do it

    def _spec(self, kind: Kind, disk: tuple[str, int] | None = None) -> ContainerSpec:
        """Return the specification of a new container of this kind. `disk` is the name of the
        volume for its working directory and the volume's size in MB, or None for a working
        directory in memory. Raises SandboxUnavailable if the image is not known.
        """
        image, settings, identity = self.images.get(kind.image), self._settings, self._identity
        cpus = kind.cpus or settings.cpus
        if image is None:
            raise copy.copy(self.missing.get(kind.image)) or SandboxUnavailable(
                f"There is no image {kind.image!r} any more.", retryable=False
            )
        self.made += 1
        # A session may take a container that has nearly reached the pool's age limit.
        held_s = self._making.held_s if disk is None else self._making.held_with_disk_s
        used_s = settings.lifetime_seconds + held_s
        lifetime_s = used_s + settings.max_timeout_seconds + GUEST_GRACE_S
        return ContainerSpec(
            name=f"fumehood-{identity.engine_id[:8]}-{self.made}",
            image_id=image.id,
            image_name=kind.image,
            engine_id=identity.engine_id,
            owner_id=identity.owner_id,
            memory_mb=kind.memory_mb,
            guest_mb=image.guest_mb,
            disk=disk,
            cpus=min(cpus + GUEST_CPUS, max(cpus, self.host.cpus)),
            lifetime_s=lifetime_s,
            deadline=int(time.time() + lifetime_s),
            runtime=settings.runtime,
            engine_pid=os.getpid(),
            command=self._making.command,
        )

    def _failed(self, spec: ContainerSpec, error: Exception) -> Trouble:
        """Record and log that a container could not be started because of `error`. Return the fault
        for callers. Its message and remedy do not quote the runtime.
        """
        if isinstance(error, LimitsNotEnforced):
            self.seen, self.lacking = error.enforced, error
        if not isinstance(error, RuntimeFault | ContainerFailed):
            error = RuntimeFault(repr(error))
        values: JsonObject = {"name": spec.name, "image": spec.image_name, "why": str(error)}
        if isinstance(error, GradeTooLow):
            values["cure"] = error.remedy
        self._on_event("container.failed", values)
        return error

    # -- removing -------------------------------------------------------------------

    async def remove(self, name: str) -> None:
        """Remove the container with this name. Return only when the runtime has removed it, however
        many attempts that takes.
        """
        tries = 0
        while True:
            try:
                await self._runtime.remove(name)
            except RuntimeFault:
                await anyio.sleep(RETRY_PAUSE_S[min(tries, len(RETRY_PAUSE_S) - 1)])
                tries += 1
            else:
                return

    async def sweep(self) -> None:
        """Remove lost containers: those of this software that are no longer in use, for example
        after a crash of an engine. A container that cannot be removed stays until the next sweep.

        Raises:
            RuntimeFault: the containers could not be listed.
        """
        found = await self._runtime.list(LABEL_ENGINE)
        # Read after the list: a name is in use before its container appears in a list.
        in_use = frozenset(self._in_use())
        for one in (one for one in found if self._is_lost(one, in_use)):
            try:
                await self._runtime.remove(one.id)
            except RuntimeFault:
                continue
            owner = (
                "ours" if one.labels.get(LABEL_OWNER) == self._identity.owner_id else "another's"
            )
            self._on_event("container.reaped", {"name": one.name, "owner": owner})

    async def stop(self, spared: frozenset[str] = frozenset(), ended: Iterable[str] = ()) -> None:
        """Remove the containers named in `ended`, and all containers of this engine except those
        named in `spared`. All removals together take at most `STOP_DEADLINE_S` seconds.
        """
        with anyio.move_on_after(STOP_DEADLINE_S, shield=True):
            try:
                mine = await self._runtime.list(f"{LABEL_ENGINE}={self._identity.engine_id}")
            except RuntimeFault:
                return
            async with anyio.create_task_group() as group:
                for one in mine:
                    if one.name in spared:
                        continue
                    group.start_soon(self._try_to_remove, one.id)
                for name in ended:
                    group.start_soon(self._try_to_remove, name)

    async def _try_to_remove(self, container_id: str) -> None:
        with suppress(RuntimeFault):
            await self._runtime.remove(container_id)

    def _is_lost(self, one: ListedContainer, in_use: frozenset[str]) -> bool:
        engine, owner = one.labels.get(LABEL_ENGINE), one.labels.get(LABEL_OWNER)
        if not engine or not owner:
            return False
        if self._identity.engine_id == engine or self._identity.owner_id == owner:
            return one.name not in in_use
        deadline = one.labels.get(LABEL_DEADLINE, "")
        if not one.is_stopped or not deadline.isdecimal() or len(deadline) > 15:
            return False
        return int(deadline) + PAST_DEADLINE_S < time.time()


def is_killed(pid: int) -> bool:
    """Return whether a process of this machine has a pending SIGKILL. If the process does not
    exist, return False.

    A frozen process can have a pending SIGKILL: with version 1 of cgroups, it receives the signal
    only when it is thawed.
    """
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
        return bool(pending & 1 << (signal.SIGKILL - 1))
    return False


@contextmanager
def for_callers() -> Iterator[None]:
    """If a RuntimeFault is raised in the block, raise SandboxUnavailable, the error for callers,
    instead. If it is a RuntimeNotFound, ignore it.
    """
    # A container that is gone is reported by its channel.
    try:
        yield
    except RuntimeNotFound:
        pass
    except RuntimeFault as error:
        raise unavailable(error) from None


def unavailable(trouble: Trouble) -> SandboxUnavailable:
    """Return the error for a call that needs a container. `trouble` is the reason why the call gets
    no container.
    """
    return SandboxUnavailable(
        f"Containers are unavailable; nothing ran. {trouble.message} {trouble.remedy}".rstrip(),
        retryable=trouble.heals,
        retry_after_ms=RETRY_AFTER_MS if trouble.heals else None,
        details=details_of(trouble),
    )


def details_of(trouble: Trouble | None) -> JsonObject | None:
    """Return the details of a call's error if `trouble` is a grade that is too low."""
    return trouble.details if isinstance(trouble, GradeTooLow) else None
