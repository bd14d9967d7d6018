"""Fake containers for the pool, created, used and ended under the test's control."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fumehood.core.errors import EngineError
from fumehood.sandbox.container.pool import Kind


@dataclass(eq=False)
class FakeContainer:
    """One fake container. `runs` and `resets` change its state as the channel would."""

    name: str
    kind: Kind
    listener: Any = None
    image_id: str = "sha256:1"
    is_dead: bool = False
    is_free: bool = True
    is_resetting: bool = False
    is_dirty: bool = False
    ran_out_of_memory: bool = False
    complaint: str = ""
    examined: asyncio.Event = field(default_factory=asyncio.Event)
    domains: set[str] = field(default_factory=set)
    """The trust domains whose calls it has run."""

    def __post_init__(self) -> None:
        self.examined.set()

    def begins(self, domain: str) -> None:
        assert self.is_free
        assert not self.is_dead
        self.domains.add(domain)
        self.is_free = False

    def ends_its_run(self) -> None:
        self.is_resetting = True

    def is_reset(self) -> None:
        self.is_resetting, self.is_free = False, True
        self.listener.on_clean()

    def is_found_dirty(self) -> None:
        self.is_dirty = True
        self.end("it is not clean")

    async def until_examined(self) -> None:
        await self.examined.wait()

    def end(self, why: str) -> None:
        if not self.is_dead:
            self.is_dead, self.is_free, self.is_resetting = True, False, False
            self.listener.on_end(why)


class FakeMaker:
    """Creates containers immediately or when allowed, and records every operation."""

    def __init__(self) -> None:
        self.made: list[FakeContainer] = []
        self.removed: list[str] = []
        self.failure: EngineError | None = None
        self.may_make = asyncio.Event()
        self.may_make.set()
        self.may_remove = asyncio.Event()
        self.may_remove.set()
        self.alive = 0
        self.held = 0
        """Number of `alive` containers that are held outside the pool."""
        self.most_alive = 0
        """Peak number of the pool's containers."""

    async def make(self, kind: Kind) -> FakeContainer:
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive - self.held)
        try:
            await self.may_make.wait()
            if self.failure is not None:
                raise self.failure
        except BaseException:
            self.alive -= 1
            raise
        container = FakeContainer(f"c{len(self.made) + 1}", kind)
        self.made.append(container)
        return container

    async def remove(self, name: str) -> None:
        await self.may_remove.wait()
        self.removed.append(name)
        self.alive -= 1

    @property
    def living(self) -> list[FakeContainer]:
        return [container for container in self.made if not container.is_dead]


class Holder:
    """A session, as far as the pool can tell."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_clean(self) -> None:
        self.heard.append("clean")

    def on_end(self, why: str) -> None:
        self.heard.append(why)
