"""The host as a place to run: no wall at all, for functions that the operator trusts.

Host side. It enforces wall time (by cancelling, or by killing a worker process) and a cap
on the result, and says so; it limits how many run at once, so that one tool cannot occupy
the engine.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from fumehood.core.errors import InternalError, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limit, Limits, WallLimits
from fumehood.sandbox.process.worker import Workers
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

HOST_LIMITS = WallLimits(
    default_wall_s=30,
    max_wall_s=600,
    default_memory_mb=None,
    max_memory_mb=None,
    min_memory_mb=0,
    output_bytes=MB,
)
MAX_RUNNING = 64
QUEUE_PATIENCE_S = 30


@dataclass(frozen=True, slots=True)
class HostLease:
    """A place in the engine's own process, or in a worker of it."""

    queue_ms: float
    workers: Workers
    principal_id: str

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Call a synchronous function in a worker. The others `executors/function` awaits."""
        if program != "function":
            raise InternalError("The host runs functions, not programs.")
        return await self.workers.run(arguments, limits, self.principal_id, sinks.progress)


class Host:
    """Places in the engine's own process."""

    limits = HOST_LIMITS
    required = frozenset({Limit.WALL_TIME, Limit.OUTPUT})
    enforced = required
    heals = True
    cure = ""

    def __init__(self) -> None:
        self._running = anyio.CapacityLimiter(MAX_RUNNING)
        self._workers = Workers()

    async def stop(self) -> None:
        """End the workers and what runs in them."""
        await self._workers.stop()

    @asynccontextmanager
    async def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        language: str | None = None,
    ) -> AsyncIterator[HostLease]:
        """Wait, at most 30 s, for one of 64 places."""
        asked = time.monotonic()
        holder = object()
        with anyio.move_on_after(QUEUE_PATIENCE_S):
            await self._running.acquire_on_behalf_of(holder)
        if holder not in self._running.statistics().borrowers:
            raise SandboxUnavailable(
                "The host is busy. Repeat the call later.", retry_after_ms=1000
            )
        try:
            yield HostLease((time.monotonic() - asked) * 1e3, self._workers, domain.principal_id)
        finally:
            self._running.release_on_behalf_of(holder)
