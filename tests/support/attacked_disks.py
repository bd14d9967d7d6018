"""The container wall under attack, whose programs run in sessions with a disk."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fumehood.attack.targets import IMAGE, Standing, Target
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MIN_CONTAINER_MB, Limits
from fumehood.sandbox.container.wall import ContainerWall, HeldContainer
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

DISK_MB = 32
EMPTY = "find /workspace -mindepth 1 -delete"
QUICK = Limits(10.0, 10.0, MIN_CONTAINER_MB, 4096)


class OnDisk:
    """A wall that leases, for each trust domain, the container of one session with a disk."""

    def __init__(self, wall: ContainerWall) -> None:
        self._wall = wall
        self._held: dict[str, HeldContainer] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wall, name)

    async def end(self) -> None:
        for held in self._held.values():
            held.end("the attacks are over")
            await held.until_gone()

    @asynccontextmanager
    async def lease(
        self, domain: TrustDomain, *, fresh: bool, memory_mb: int | None = None
    ) -> AsyncIterator[_Lease]:
        held = self._held.get(domain.key)
        if held is not None and held.container is not None and held.container.ran_out_of_memory:
            held.end("its memory ran out")  # outside of sessions it would be replaced, too
        if held is None or held.lost is not None:
            session = replace(domain, session_id=f"sess_{secrets.token_hex(16)}")
            held = self._held[domain.key] = await self._wall.hold(
                session,
                image=IMAGE,
                memory_mb=MIN_CONTAINER_MB,
                disk_mb=DISK_MB,
                on_lost=lambda: None,
            )
        await held.until_free()
        await _Lease(held).run("shell", {"command": EMPTY}, QUICK)  # as its owner might
        await held.until_free()
        yield _Lease(held)


class _Lease:
    def __init__(self, held: HeldContainer) -> None:
        self._held = held

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS
    ) -> RunEnding:
        limits = replace(limits, disk_mb=DISK_MB)
        return await self._held.run(program, arguments, limits, sinks)


def on_disks(target: Target, directory: Path) -> Target:
    """The same wall, attacked from sessions with a disk below a directory."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Standing]:
        made: AbstractAsyncContextManager[Standing] = target.open()
        async with made as standing:
            wall = standing.wall
            assert isinstance(wall, ContainerWall)
            wall.disks = type(wall.disks)(directory, wall.disks._runtime)
            on_disk = OnDisk(wall)
            yield replace(standing, wall=on_disk)  # type: ignore[arg-type]
            await on_disk.end()

    return replace(target, open=opened)
