"""Whatever happens in whatever order: one container serves one domain, and there are never too many."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.sandbox.container.pool import Kind, Pool, PoolEntry
from fumehood.sandbox.settings import ContainerSettings
from support.fake_containers import FakeContainer, FakeMaker, Holder

MOST = 3
RULES = ContainerSettings(
    pool_min=1, pool_max=MOST, idle_seconds=50, lifetime_seconds=300, max_uses=4, queue_seconds=600
)

KINDS = [Kind("python", 128), Kind("python", 512), Kind("shell", 512)]

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abcd"), st.sampled_from(KINDS), st.booleans()),
        st.tuples(
            st.sampled_from(
                [
                    "begin",
                    "finish",
                    "leave",
                    "reset",
                    "dirty",
                    "die",
                    "cancel",
                    "memory",
                    "keep",
                ]
            ),
            st.integers(0, 10),
        ),
        st.tuples(st.just("wait"), st.integers(0, 120)),
        st.tuples(st.sampled_from(["tidy", "hold", "let go", "refuse", "fail", "mend"])),
    ),
    max_size=60,
)


class World:
    """A pool, and everything that can happen to it."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self.maker = FakeMaker()
        self.seconds = 0.0
        self.pool = Pool(self.maker, RULES, group.start_soon, monotonic=lambda: self.seconds)
        self.calls: list[tuple[asyncio.Task[PoolEntry], bool]] = []
        self.held: list[tuple[PoolEntry, bool]] = []
        self.kept: list[tuple[PoolEntry, Holder]] = []
        self.refused = 0

    async def step(self, what: str, *values: Any) -> None:
        match what:
            case "ask":
                domain, kind, fresh = values
                call = self.pool.take(TrustDomain(domain), kind, fresh=fresh)
                self.calls.append((asyncio.ensure_future(call), fresh))
            case "begin" | "finish" | "leave" | "memory" | "keep":
                self._with_held(what, values[0])
            case "reset" | "dirty" | "die":
                self._with_container(what, values[0])
            case "cancel":
                if self.calls:
                    self.calls[values[0] % len(self.calls)][0].cancel()
            case "wait":
                self.seconds += values[0]
            case "tidy":
                self.pool.tidy()
            case "hold":
                self.maker.may_remove.clear()
                self.maker.may_make.clear()
            case "let go":
                self.maker.may_remove.set()
                self.maker.may_make.set()
            case "refuse":
                self.pool.refuse_waiting(SandboxUnavailable("Docker is away"))
            case "fail":
                self.maker.failure = SandboxUnavailable("failed")
            case "mend":
                self.maker.failure = None
        await self.settle()
        self.check()

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)
        for call, fresh in list(self.calls):
            if call.done():
                self.calls.remove((call, fresh))
                if call.cancelled() or call.exception() is not None:
                    self.refused += 1
                else:
                    self.held.append((call.result(), fresh))

    def check(self) -> None:
        assert self.maker.most_alive <= MOST
        for container in self.maker.made:
            assert len(container.domains) <= 1
        in_use = [place.container for place, _ in self.held]
        assert len(in_use) == len(set(in_use))
        for place, fresh in self.held:
            container = place.container
            assert isinstance(container, FakeContainer)
            assert container.domains <= {place.domain.key}
            if fresh:
                assert place.uses == 0
        kept = {place.container.name for place, _ in self.kept}
        assert kept.isdisjoint(self.pool.names)
        for place, holder in self.kept:
            assert place.container not in in_use
            assert len(holder.heard) == place.container.is_dead

    def _with_held(self, what: str, number: int) -> None:
        if not self.held:
            return
        place, fresh = self.held[number % len(self.held)]
        container = place.container
        assert isinstance(container, FakeContainer)
        if what == "begin" and container.is_free:
            container.begins(place.domain.key)
        elif what == "keep" and fresh and container.is_free and not container.domains:
            holder = Holder()
            self.held.remove((place, fresh))
            if self.pool.let_go(place, holder):
                self.maker.held += 1
                self.kept.append((place, holder))
        elif what == "memory":
            container.ran_out_of_memory = True
        elif what in ("finish", "leave"):
            began = bool(not container.is_free or container.is_dead)
            if what == "finish" and began and not container.is_dead:
                container.ends_its_run()
            self.held.remove((place, fresh))
            self.pool.give_back(place, ran=began, fresh=fresh)

    def _with_container(self, what: str, number: int) -> None:
        living = self.maker.living
        if not living:
            return
        container = living[number % len(living)]
        if what == "reset" and container.is_resetting:
            container.is_reset()
        elif what == "dirty" and container.is_resetting:
            container.is_found_dirty()
        elif what == "die":
            container.end("its stream ended")


@given(STEPS)
def test_no_container_serves_two_domains_and_the_pool_limit_holds(
    steps: list[tuple[Any, ...]],
) -> None:
    async def play() -> None:
        async with anyio.create_task_group() as group:
            world = World(group)
            for step in steps:
                await world.step(*step)
            # Afterwards all is well, so everybody who waits is served or told.
            world.maker.failure = None
            await world.step("let go")
            await world.step("tidy")
            for _ in range(200):
                if not world.calls:
                    break
                for _ in range(len(world.held)):
                    await world.step("begin", 0)
                    await world.step("finish", 0)
                for container in list(world.maker.living):
                    if container.is_resetting:
                        container.is_reset()
                world.seconds += 2
                await world.settle()
                world.check()
            assert not world.calls
            group.cancel_scope.cancel()

    anyio.run(play)
