"""A lease on a container of the pool: for one run, then it is given back.

Host side, between the executors and the wall.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from fumehood.core.errors import InternalError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.pool_entry import PoolEntry
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks


class GiveBack(Protocol):
    """Takes a place back into the pool."""

    def __call__(self, place: PoolEntry, *, ran: bool, fresh: bool) -> None: ...


class ContainerLease:
    """One container, for one run."""

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
