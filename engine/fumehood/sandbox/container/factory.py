"""The factory: makes containers of a kind, and knows how the last ones turned out.

Host side, between the wall and `container`. Invariant: a container has a name, which counts as in
use, before Docker is asked for it; one that does not become ready is removed.
"""

from __future__ import annotations

import copy
import os
import platform
import time
from collections.abc import Callable, Mapping

from fumehood.core.errors import EngineError, SandboxUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit
from fumehood.sandbox.container.container import (
    Container,
    ContainerDocker,
    ContainerFailed,
    LimitsNotEnforced,
)
from fumehood.sandbox.container.docker_api import DockerError
from fumehood.sandbox.container.host_check import Unfit
from fumehood.sandbox.container.image_catalog import ImageCatalog, ImageFound
from fumehood.sandbox.container.pool_state import Kind, Listener
from fumehood.sandbox.container.program import ContainerProgram
from fumehood.sandbox.container.reaper import Reaper
from fumehood.sandbox.container.settings import ContainerSettings, EngineIdentity
from fumehood.sandbox.container.spec import ContainerSpec

GUEST_GRACE_S = 60.0
"""How much longer a guest lives by its own clock than the pool would ever use it."""

GUEST_CPUS = 0.5
"""The guest's share, beside what programs may use: it makes the next child while a program runs."""

TOO_MANY_FAILED_STARTS = 3
MAX_WHY_CHARACTERS = 1000
RETRY_AFTER_MS = 1000

OnEvent = Callable[[str, JsonObject], None]


class _Failed(Exception):
    """One attempt failed."""

    def __init__(self, refusal: EngineError, *, is_docker_fault: bool) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.is_docker_fault = is_docker_fault


class ContainerFactory:
    """Makes and removes the containers of one engine, from the images in the catalog."""

    def __init__(
        self,
        docker: ContainerDocker,
        settings: ContainerSettings,
        identity: EngineIdentity,
        reaper: Reaper,
        catalog: ImageCatalog,
        required: frozenset[Limit],
        *,
        held_s: float,
        command: tuple[str, ...],
        start_deadline_s: float,
        start_soon: Callable[..., object],
        on_event: OnEvent,
        on_start: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._docker = docker
        self._settings = settings
        self._first_image = settings.images.python
        self._held_s = held_s
        self._command = command
        self._start_deadline_s = start_deadline_s
        self._identity = identity
        self._reaper = reaper
        self._catalog = catalog
        self._required = required
        self._start_soon = start_soon
        self._on_event = on_event
        self._on_start = on_start
        self._on_failure = on_failure
        self._numbers = 0
        self._lacking: frozenset[Limit] | None = None
        """The limits that the last insufficient container enforced."""
        self.unsettled: set[str] = set()
        """Containers that are being made, that failed and are being removed, or that hold one of
        the operator's programs."""
        self.failed_starts = 0
        """In a row; where only the guest of an image other than the first did not start, that
        image's fault is not the wall's."""
        self.failure: Unfit | None = None
        """The reason of the last failure."""
        self.host_cpus = 0
        """Processors of Docker's host, which refuses more; 0 where that is not known."""
        self.seen: frozenset[Limit] | None = None
        """The limits enforced in the last container; in an insufficient one, if all fail."""

    @property
    def has_made(self) -> bool:
        """Whether Docker was ever asked for a container."""
        return self._numbers > 0

    @property
    def is_failing(self) -> bool:
        """Whether so many starts have failed that the next would too."""
        return self.failed_starts >= TOO_MANY_FAILED_STARTS

    async def make(self, kind: Kind, listener: Listener) -> Container:
        """Make and start a container; try again once if its guest does not become ready.

        Raises:
            SandboxUnavailable: its image is missing, it could not be made, or it lacks a
                required limit.
        """
        began = time.monotonic()
        try:
            container = await self._try(kind, listener)
        except _Failed as first:
            if first.is_docker_fault or self.is_failing:
                raise first.refusal from None
            try:
                container = await self._try(kind, listener)
            except _Failed as second:
                raise second.refusal from None
        self.failed_starts = 0
        self._lacking = None
        self.seen = container.enforced
        self._on_start()
        took_ms = round((time.monotonic() - began) * 1e3)
        started = {"name": container.name, "image": kind.image, "memory_mb": kind.memory_mb}
        self._on_event("container.started", {**started, "ms": took_ms})
        return container

    async def _try(self, kind: Kind, listener: Listener) -> Container:
        """One container. One that fails is removed. Raises _Failed."""
        image = self._image(kind.image)
        self._numbers += 1
        spec = self._spec(kind, image, self._numbers)
        self.unsettled.add(spec.name)
        try:
            container = await Container.start(
                self._docker,
                spec,
                listener,
                required=self._required,
                command=self._command,
                ready_s=self._start_deadline_s,
            )
        except BaseException as error:
            self._start_soon(self._remove_failed, spec.name)
            if not isinstance(error, Exception):
                raise
            raise self._failed(spec, error) from None
        self.unsettled.discard(spec.name)
        return container

    async def open_program(
        self, command: tuple[str, ...], env: Mapping[str, str], image: str, memory_mb: int
    ) -> ContainerProgram:
        """Start a program in a container of its own. Raises SandboxUnavailable."""
        self._numbers += 1
        spec = self._spec(Kind(image, memory_mb), self._image(image), self._numbers)
        self.unsettled.add(spec.name)

        async def remove() -> None:
            await self._reaper.remove(spec.name)
            self.unsettled.discard(spec.name)

        return await ContainerProgram.start(self._docker, spec, command, env, remove)

    async def remove(self, name: str) -> None:
        """Returns when it is gone."""
        await self._reaper.remove(name)

    def _image(self, name: str) -> ImageFound:
        """Raises SandboxUnavailable."""
        found = self._catalog.found.get(name)
        if found is not None:
            return found
        missing = self._catalog.missing.get(name)
        if missing is not None:
            raise copy.copy(missing)
        raise SandboxUnavailable(f"There is no image {name!r} any more.", retryable=False)

    def _spec(self, kind: Kind, image: ImageFound, number: int) -> ContainerSpec:
        settings = self._settings
        used_s = settings.lifetime_seconds + self._held_s  # one that was warm for long is held
        lifetime_s = used_s + settings.max_timeout_seconds + GUEST_GRACE_S
        return ContainerSpec(
            name=f"fumehood-{self._identity.engine_id[:8]}-{number}",
            image_id=image.id,
            image_name=kind.image,
            engine_id=self._identity.engine_id,
            owner_id=self._identity.owner_id,
            memory_mb=kind.memory_mb,
            guest_mb=image.guest_mb,
            cpus=min(settings.cpus + GUEST_CPUS, max(settings.cpus, self.host_cpus)),
            lifetime_s=lifetime_s,
            deadline=int(time.time() + lifetime_s),
            runtime=settings.runtime,
            engine_pid=os.getpid(),
            engine_host=platform.node(),
        )

    def _failed(self, spec: ContainerSpec, error: Exception) -> _Failed:
        """Note a failed start; the error for the caller."""
        words = _in_words(error)
        if spec.image_name == self._first_image or type(error) is not ContainerFailed:
            self.failed_starts += 1
            self.failure = words
        if isinstance(error, LimitsNotEnforced):
            self._lacking = error.enforced
        if self.is_failing and self._lacking is not None:
            self.seen = self._lacking
        why = str(error) if isinstance(error, DockerError | ContainerFailed) else repr(error)
        self._on_event(
            "container.failed",
            {"name": spec.name, "image": spec.image_name, "why": why[:MAX_WHY_CHARACTERS]},
        )
        self._on_failure()
        refusal = SandboxUnavailable(
            f"No container could be started. {words.fault} {words.remedy}",
            retry_after_ms=RETRY_AFTER_MS,
        )
        return _Failed(refusal, is_docker_fault=isinstance(error, DockerError))

    async def _remove_failed(self, name: str) -> None:
        try:
            await self._reaper.remove(name)
        finally:
            self.unsettled.discard(name)


def _in_words(error: Exception) -> Unfit:
    """For the caller: Docker's own words may contain paths of the host."""
    if isinstance(error, DockerError):
        return Unfit(error.message, error.remedy, error.heals)
    if isinstance(error, LimitsNotEnforced):
        remedy = "Run `fumehood doctor` to see why."
        return Unfit("Containers on this host lack a required limit.", remedy)
    if isinstance(error, ContainerFailed):
        return Unfit(
            "Containers start, but the guest in them does not.",
            "The engine's log says why.",
            heals=True,
        )
    return Unfit("A container could not be made.", "The engine's log says why.", heals=True)
