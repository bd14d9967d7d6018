"""Leases on containers: for one run out of the pool, or for the lifetime of a session.

Host side, between the executors, `sandbox/sessions` and the wall. Invariants: a container of the
pool is returned after its run. A session's container is never returned, because the session's files
and processes stay in it; it counts as in use for the reaper until it is removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from fumehood.core.errors import InternalError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.sandbox.container.channel import (
    DIRTY,
    NOT_CLEAN_IN_TIME,
    NOT_ENDED_IN_TIME,
    STREAM_ENDED,
)
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.pool_entry import PoolEntry
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

MAX_CLAIM_CHARACTERS = 200


class GiveBack(Protocol):
    """Returns a container to the pool."""

    def __call__(self, place: PoolEntry, *, ran: bool, fresh: bool) -> None: ...


class ContainerLease:
    """A lease on one container, for one run."""

    __slots__ = ("_fresh", "_give_back", "_memory_mb", "_place", "_ran", "_take", "queue_ms")

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
        self._place: PoolEntry | None = None
        self._ran = False
        self.queue_ms = 0.0

    async def __aenter__(self) -> ContainerLease:
        asked = time.monotonic()
        self._place = await self._take()
        self.queue_ms = (time.monotonic() - asked) * 1e3
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._place is not None:
            self._give_back(self._place, ran=self._ran, fresh=self._fresh)
            self._place = None

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program in the container, in a process of its own."""
        if self._place is None or self._ran:
            raise InternalError("A lease on a container is for one run.")
        if limits.memory_mb != self._memory_mb:
            raise InternalError("A run has the memory limit of its container.")
        self._ran = True
        container = self._place.container
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
