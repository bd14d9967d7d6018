"""One container from its start to its end, the runs in it, and leases on it.

Host side. Above it the pool, the executors and the sessions, below it Docker and the channel.
Invariants: a container serves only after its guest has tried its own limits and every required one
held, and after Docker has confirmed that it applies everything that was requested. A container of
the pool is returned after its run. A session's container is never returned, because the session's
files and processes stay in it; it counts as in use for the reaper until it is removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import anyio

from fumehood.core.errors import EndedBy, InternalError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit, Limits
from fumehood.sandbox.container.channel import (
    DIRTY,
    NOT_CLEAN_IN_TIME,
    NOT_ENDED_IN_TIME,
    STREAM_ENDED,
    Channel,
    ChannelListener,
    Clocks,
    Lost,
)
from fumehood.sandbox.container.docker_api import Created, DockerError
from fumehood.sandbox.container.pool_state import PoolEntry
from fumehood.sandbox.container.spec import GUEST_COMMAND, ContainerSpec, create_body
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

START_DEADLINE_S = 20.0
"""For the guest to be ready, on a host that starts several at once."""

LOSS_DEADLINE_S = 5.0
"""For finding out the reason of a container's end."""

OOM_EXIT_CODE = 137
LOOKS = 4
LOOK_PAUSE_S = 0.05
"""Docker learns of the end and of its reason separately, in either order."""

MAX_FAULT_CHARACTERS = 300
MAX_CLAIM_CHARACTERS = 200


class ContainerDocker(Protocol):
    """The requests to Docker that a container needs."""

    async def create(self, body: JsonObject, name: str) -> Created: ...
    async def attach(self, container_id: str) -> Any: ...
    async def start(self, container_id: str) -> None: ...
    async def state(self, container_id: str) -> JsonObject: ...
    async def wait(self, container_id: str, deadline_s: float) -> None: ...


class ContainerFailed(Exception):
    """The container was made and does not work. The text is for the operator."""


class LimitsNotEnforced(ContainerFailed):
    """It works, but lacks a required limit: another one would lack it too."""

    def __init__(self, faults: tuple[str, ...], enforced: frozenset[Limit]) -> None:
        super().__init__("; ".join(faults)[: 4 * MAX_FAULT_CHARACTERS])
        self.faults = faults
        self.enforced = enforced


class Container:
    """A running container. Made by `start`; its starter removes it, also after a failed start."""

    def __init__(self, docker: ContainerDocker, spec: ContainerSpec, channel: Channel) -> None:
        self._docker = docker
        self._channel = channel
        self._id = ""
        self._examined = asyncio.Event()
        self._examined.set()
        self.spec = spec
        self.ran_out_of_memory = False
        """Whether anything in a run did. Docker's own mark of it stays for the container's life."""

    @classmethod
    async def start(
        cls,
        docker: ContainerDocker,
        spec: ContainerSpec,
        listener: ChannelListener,
        *,
        required: frozenset[Limit],
        command: tuple[str, ...] = GUEST_COMMAND,
        clocks: Clocks | None = None,
        ready_s: float = START_DEADLINE_S,
    ) -> Container:
        """Make a container, attach to its streams, start it, and wait until it is ready.

        Raises:
            DockerError: Docker failed.
            ContainerFailed: the guest failed.
            LimitsNotEnforced: Docker or the kernel does not enforce a limit.
        """
        channel = Channel(listener, clocks)
        container = cls(docker, spec, channel)
        try:
            await container._start(command, required, ready_s)
        except BaseException:
            channel.end("it did not start")
            raise
        return container

    async def _start(
        self, command: tuple[str, ...], required: frozenset[Limit], ready_s: float
    ) -> None:
        created = await self._docker.create(create_body(self.spec, command), self.spec.name)
        self._id = created.id
        if created.warnings:  # Docker goes on without limits that the kernel lacks
            raise LimitsNotEnforced(created.warnings, frozenset())
        stream = await self._docker.attach(created.id)
        try:
            stream.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: self._channel, sock=stream)
        except BaseException:
            stream.close()
            raise
        await self._docker.start(created.id)
        with anyio.move_on_after(ready_s):
            await self._channel.ready.wait()
        if self._channel.dead.is_set():
            raise ContainerFailed(self._in_words(f"the guest did not start: {self._channel.why}"))
        if not self._channel.ready.is_set():
            raise ContainerFailed(self._in_words("the guest was not ready in time"))
        missing = required - self._channel.enforced
        if missing or self._channel.faults:
            said = [fault[:MAX_FAULT_CHARACTERS] for fault in self._channel.faults]
            said += [f"{limit.value} is not enforced" for limit in sorted(missing)]
            raise LimitsNotEnforced(tuple(said), self._channel.enforced)

    @property
    def name(self) -> str:
        """Its name in Docker."""
        return self.spec.name

    @property
    def image_id(self) -> str:
        """The digest of its image."""
        return self.spec.image_id

    @property
    def enforced(self) -> frozenset[Limit]:
        """The limits that the guest saw to hold in this container."""
        return self._channel.enforced

    @property
    def is_dead(self) -> bool:
        """It has ended."""
        return self._channel.dead.is_set()

    @property
    def is_free(self) -> bool:
        """It is clean, and nothing runs in it."""
        return self._channel.is_free

    @property
    def is_resetting(self) -> bool:
        """Its last run has ended, and it is being cleaned."""
        return self._channel.is_resetting

    @property
    def is_dirty(self) -> bool:
        """It could not be cleaned."""
        return self._channel.is_dirty

    @property
    def complaint(self) -> str:
        """The guest's stderr. Untrusted."""
        return self._channel.complaint.decode("utf-8", "backslashreplace")

    def _in_words(self, fault: str) -> str:
        said = self.complaint[-MAX_FAULT_CHARACTERS:].strip()
        return f"{fault}; it said: {said!r}" if said else fault

    def end(self, why: str) -> None:
        """Close its channel. Its guest ends itself; the pool removes it."""
        self._channel.end(why)

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks,
        isolation: str,
        *,
        keep: bool = False,
    ) -> RunEnding:
        """One run, to its end. Cancelling it ends the program inside before it raises.

        `keep` leaves its files, and a Python program's variables, for the next run.
        """
        if self.is_dead:  # since it was leased
            return RunEnding(EndedBy.SANDBOX_LOST, isolation)
        self._examined.clear()
        try:
            ending = await self._channel.run(
                program, arguments, limits, sinks, isolation, keep=keep
            )
        except Lost as lost:
            by_memory = (
                self._channel.why == STREAM_ENDED
                and not self.ran_out_of_memory  # Docker's mark would be of that run
                and await self._was_killed_for_memory()
            )
            ending = lost.run.cut_off(EndedBy.MEMORY if by_memory else EndedBy.SANDBOX_LOST)
        finally:
            self._examined.set()
        self.ran_out_of_memory = self.ran_out_of_memory or (
            ending.ended_by is EndedBy.MEMORY or Limit.MEMORY.value in ending.limits_hit
        )
        return ending

    async def until_examined(self) -> None:
        """Wait until the reason of its end is known. It must not be removed before."""
        await self._examined.wait()

    async def _was_killed_for_memory(self) -> bool:
        """Ask Docker how the guest itself ended. An unknown reason does not count as memory.

        Neither the exit code (others may kill) nor Docker's mark is enough alone: the mark is
        also set if a child was killed. The container is not used again then.
        """
        with anyio.move_on_after(LOSS_DEADLINE_S):
            try:
                await self._docker.wait(self._id, LOSS_DEADLINE_S)
                for _ in range(LOOKS):
                    state = await self._docker.state(self._id)
                    if state.get("ExitCode") != OOM_EXIT_CODE:
                        return False
                    if state.get("OOMKilled") is True:
                        return True
                    await anyio.sleep(LOOK_PAUSE_S)
            except DockerError:
                return False
        return False


# -- leases ---------------------------------------------------------------------------------


class GiveBack(Protocol):
    """Returns a container to the pool."""

    def __call__(self, entry: PoolEntry, *, ran: bool, fresh: bool) -> None: ...


class ContainerLease:
    """A lease on one container, for one run."""

    __slots__ = ("_entry", "_fresh", "_give_back", "_memory_mb", "_ran", "_take", "queue_ms")

    def __init__(
        self,
        take: Callable[[], Awaitable[PoolEntry]],
        give_back: GiveBack,
        *,
        fresh: bool,
        memory_mb: int,
    ) -> None:
        self._take = take
        self._give_back = give_back
        self._fresh = fresh
        self._memory_mb = memory_mb
        self._entry: PoolEntry | None = None
        self._ran = False
        self.queue_ms = 0.0

    async def __aenter__(self) -> ContainerLease:
        asked = time.monotonic()
        self._entry = await self._take()
        self.queue_ms = (time.monotonic() - asked) * 1e3
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._entry is not None:
            self._give_back(self._entry, ran=self._ran, fresh=self._fresh)
            self._entry = None

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program in the container, in a process of its own."""
        if self._entry is None or self._ran:
            raise InternalError("A lease on a container is for one run.")
        if limits.memory_mb != self._memory_mb:
            raise InternalError("A run has the memory limit of its container.")
        self._ran = True
        container = self._entry.container
        assert isinstance(container, Container)
        isolation = "container_per_call" if self._fresh else "call"
        return await container.run(program, arguments, limits, sinks, isolation)


class HeldContainer:
    """A session's container. Gets its events from the moment it leaves the pool."""

    def __init__(
        self,
        container: Container,
        languages: tuple[str, ...],
        remove: Callable[[HeldContainer], Awaitable[None]],
        start_soon: Callable[..., object],
        on_lost: Callable[[], None],
    ) -> None:
        self.container = container
        self.languages = languages
        self.lost: str | None = None
        self.why = ""
        """The channel's own reason, for the operator."""
        self._remove = remove
        self._start_soon = start_soon
        self._on_lost = on_lost
        self._has_changed = asyncio.Event()
        self._gone = asyncio.Event()

    @property
    def name(self) -> str:
        """Its name in Docker."""
        return self.container.name

    async def until_free(self) -> None:
        """Wait for the cleanup after the last run. The channel has a deadline for that."""
        while self.lost is None and not self.container.is_free:
            self._has_changed.clear()
            await self._has_changed.wait()

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """One run. Its files and variables stay for the next one."""
        return await self.container.run(program, arguments, limits, sinks, "session", keep=True)

    def end(self, why: str) -> None:
        """End it with everything that runs in it."""
        self.container.end(why)  # calls `on_end`, unless it had ended before
        self.on_end(why)

    async def until_gone(self) -> None:
        """Wait until Docker has removed it."""
        await self._gone.wait()

    # -- events of the container ---------------------------------------------------------

    def on_clean(self) -> None:
        """The container is clean after a run."""
        self._has_changed.set()

    def on_end(self, why: str) -> None:
        """The container has ended: by itself, by its channel, or by `end`."""
        if self.lost is not None:
            return
        self.lost, self.why = _in_words(why), why
        self._has_changed.set()
        self._start_soon(self._see_off)
        self._on_lost()

    async def _see_off(self) -> None:
        try:
            await self.container.until_examined()
            await self._remove(self)
        finally:
            self._gone.set()


def _in_words(why: str) -> str:
    """The reason for the session's owner. A guest's own words are marked as such, and bounded."""
    if why.startswith(DIRTY):
        claim = "".join(c for c in why.removeprefix(DIRTY) if c.isprintable())
        return (
            "its container could not be cleared up after a run "
            f"({claim[:MAX_CLAIM_CHARACTERS].strip() or 'no reason was given'})"
        )
    words = {
        STREAM_ENDED: "its container is gone",
        NOT_CLEAN_IN_TIME: "its container was not cleared up in time after a run",
        NOT_ENDED_IN_TIME: "its container did not end a run in time",
    }
    return words.get(why, "its container failed")
