"""The pool: whose containers are whose, who waits for how long, and what is destroyed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.container.pool import FairQueue, Kind, Pool, PoolEntry, PoolRequest
from fumehood.sandbox.settings import ContainerSettings
from fumehood.sandbox.wall import MAX_WAITING
from support.fake_containers import FakeContainer, FakeMaker, Holder
from support.wait import DEADLINE_S, settle

pytestmark = pytest.mark.anyio


def _domain(name: str) -> TrustDomain:
    """`a/1` is session 1 of the principal a."""
    principal, _, session = name.partition("/")
    return TrustDomain(principal, None, session or None)


class Bench:
    """A pool, its maker, a clock that a test moves, and what was told."""

    def __init__(self, group: anyio.abc.TaskGroup, **rules: Any) -> None:
        self.maker = FakeMaker()
        self.seconds = 0.0
        self.events: list[tuple[str, JsonObject]] = []
        chosen = ContainerSettings.model_construct(**{"pool_min": 0, "pool_max": 2, **rules})
        self.pool = Pool(
            self.maker,
            chosen,
            group.start_soon,
            on_event=lambda event, values: self.events.append((event, values)),
            monotonic=lambda: self.seconds,
        )

    async def take(
        self, domain: str = "a", memory_mb: int = 512, *, fresh: bool = False, image: str = "python"
    ) -> PoolEntry:
        with anyio.fail_after(DEADLINE_S):
            return await self.pool.take(_domain(domain), Kind(image, memory_mb), fresh=fresh)

    def waits(
        self, domain: str = "a", memory_mb: int = 512, *, fresh: bool = False, image: str = "python"
    ) -> asyncio.Task[PoolEntry]:
        return asyncio.ensure_future(self.take(domain, memory_mb, fresh=fresh, image=image))

    def run(self, place: PoolEntry, *, fresh: bool = False, clean: bool = True) -> FakeContainer:
        """One run in a place, given back and (unless not `clean`) reset."""
        container = place.container
        assert isinstance(container, FakeContainer)
        container.begins(place.domain.key)
        container.ends_its_run()
        self.pool.give_back(place, ran=True, fresh=fresh)
        if clean and not container.is_dead:
            container.is_reset()
        return container

    def why(self, container: FakeContainer) -> list[object]:
        return [
            values["why"]
            for event, values in self.events
            if event == "container.destroyed" and values["name"] == container.name
        ]


@asynccontextmanager
async def bench(**rules: Any) -> AsyncIterator[Bench]:
    async with anyio.create_task_group() as group:
        made = Bench(group, **rules)
        made.pool.tidy()
        yield made
        group.cancel_scope.cancel()


async def test_full_pool_destroys_the_least_recently_used_idle_one_to_make_room() -> None:
    async with bench() as made:
        oldest = made.run(await made.take("a"))
        made.seconds = 1
        newer = made.run(await made.take("b"))
        made.seconds = 2
        third = await made.take("c")
        assert made.why(oldest) == ["room for another"]
        assert not newer.is_dead
        assert third.domain == _domain("c")
        assert made.maker.most_alive == 2


async def test_dirty_container_is_destroyed_and_its_waiter_gets_a_new_one() -> None:
    async with bench() as made:
        container = made.run(await made.take("a"), clean=False)
        waiting = made.waits("a")
        await settle()
        container.is_found_dirty()
        assert (await waiting).container is not container
        assert made.pool.dirty == 1
        assert [event for event, _ in made.events] == ["container.dirty", "container.destroyed"]
        assert made.maker.removed == [container.name]


async def test_fresh_call_gets_an_unused_container_that_is_destroyed_afterwards() -> None:
    async with bench(pool_max=3) as made:
        used = made.run(await made.take("a"))
        place = await made.take("a", fresh=True)
        assert place.container is not used
        fresh = made.run(place, fresh=True)
        assert made.why(fresh) == ["it was for one call"]
        assert (await made.take("a")).container is used


async def test_lease_left_during_a_run_destroys_its_container() -> None:
    async with bench() as made:
        place = await made.take("a")
        assert isinstance(place.container, FakeContainer)
        place.container.begins("a")
        made.pool.give_back(place, ran=True, fresh=False)
        assert place.container.is_dead


async def test_used_up_container_is_destroyed_on_return() -> None:
    async with bench(max_uses=2, lifetime_seconds=10) as made:
        container = made.run(await made.take())
        assert made.run(await made.take()) is container
        assert made.why(container) == ["it has served enough"]
        place = await made.take()
        made.seconds = 10
        assert made.why(made.run(place)) == ["it is old"]
        place = await made.take()
        assert isinstance(place.container, FakeContainer)
        place.container.ran_out_of_memory = True
        assert made.why(made.run(place)) == ["memory ran out in it"]


async def test_idle_container_is_destroyed_but_warm_containers_stay() -> None:
    async with bench(pool_min=1, idle_seconds=10, lifetime_seconds=100) as made:
        container = made.run(await made.take("a"))
        await settle()
        made.seconds = 9
        made.pool.tidy()
        assert not container.is_dead
        made.seconds = 10
        made.pool.tidy()
        assert made.why(container) == ["it was idle"]
        assert len(made.maker.living) == 1
        made.seconds = 100
        made.pool.tidy()
        await settle()
        assert [one.name for one in made.maker.living] == ["c3"]  # old, and replaced


async def test_queue_timeout_is_refused_with_a_retry_time() -> None:
    async with bench(pool_max=1, queue_seconds=0.02) as made:
        await made.take("a")
        with pytest.raises(SandboxUnavailable) as refused:
            await made.take("a")
        assert "No container became free in 0.02 s." in refused.value.message
        assert refused.value.may_retry
        assert refused.value.retry_after_ms == 1000
        assert made.pool.counts()["waiting"] == 0


async def test_call_that_finds_too_many_waiting_is_refused() -> None:
    async with bench(pool_max=1) as made:
        await made.take("a")
        waiting = [made.waits("a") for _ in range(MAX_WAITING // 4)]
        await settle()
        with pytest.raises(SandboxUnavailable, match="Too many calls wait"):
            await made.take("a")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert made.pool.counts()["waiting"] == 0


async def test_principal_with_many_sessions_gets_no_more_turns_than_others() -> None:
    async with bench(pool_max=1) as made:
        place = await made.take("a/0")
        order: list[str] = []

        async def call(domain: str) -> None:
            mine = await made.take(domain)
            order.append(domain)
            made.seconds += 2  # every turn is over after one call
            made.run(mine)

        async with anyio.create_task_group() as calls:
            for number in range(20):
                calls.start_soon(call, f"a/{number}")
            await settle()
            for _ in range(3):
                calls.start_soon(call, "b")
            await settle()
            made.seconds = 10
            made.run(place)
        assert [number for number, name in enumerate(order) if name == "b"][-1] <= 7


async def test_one_principal_cannot_occupy_all_containers() -> None:
    async with bench(pool_max=4) as made:
        waiting = [made.waits(f"a/{number}") for number in range(8)]
        await settle()
        assert sum(task.done() for task in waiting) == 3
        assert await made.take("b")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_waiting_calls_are_refused_when_docker_fails_and_later_calls_are_served() -> None:
    async with bench(pool_max=1) as made:
        place = await made.take("a")
        waiting = [made.waits("a"), made.waits("b")]
        await settle()
        made.pool.refuse_waiting(SandboxUnavailable("Docker is not running."))
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(answer) for answer in answers] == ["Docker is not running."] * 2
        assert answers[0] is not answers[1]
        made.run(place)
        assert await made.take("a")


async def test_container_that_becomes_ready_after_the_pool_was_closed_is_destroyed() -> None:
    async with bench() as made:
        made.maker.may_make.clear()
        waiting = made.waits("a")
        await settle()
        made.pool.close(SandboxUnavailable("closed"), "the engine stops")
        made.maker.may_make.set()
        with pytest.raises(SandboxUnavailable):
            await waiting
        await settle()
        assert made.maker.living == []
        assert made.maker.alive == 0
        with pytest.raises(SandboxUnavailable, match="closed"):
            await made.take("a")


@pytest.mark.parametrize("steps", range(12))
async def test_cancelling_a_call_at_any_moment_loses_no_container(steps: int) -> None:
    async with bench(pool_max=1, pool_min=0) as made:
        made.run(await made.take("other"))  # so that there is something to destroy first
        waiting = made.waits("a")
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            made.pool.give_back(await waiting, ran=False, fresh=False)
        await settle()
        counts = made.pool.counts()
        assert (counts["busy"], counts["waiting"], counts["making"]) == (0, 0, 0)
        assert await made.take("b")


async def test_ended_container_cannot_be_handed_to_a_holder() -> None:
    async with bench() as made:
        place = await made.take("a", fresh=True)
        place.container.end("it ended")
        holder = Holder()
        assert not made.pool.let_go(place, holder)
        await settle()
        assert holder.heard == []
        assert made.maker.removed == [place.container.name]


def test_caller_finds_a_place_in_the_queue_however_many_calls_of_others_wait() -> None:
    queue: FairQueue[PoolRequest] = FairQueue()

    def join(principal_id: str, agent_id: str) -> bool:
        loop_free: Any = None  # nobody waits for what is granted
        domain = TrustDomain(principal_id, agent_id)
        return queue.join(PoolRequest(domain, Kind("python", 512), False, loop_free))

    assert sum(join("a", "0") for n in range(MAX_WAITING)) == MAX_WAITING // 4
    counts = [MAX_WAITING // 4 + sum(join("a", f"{n % 8}") for n in range(MAX_WAITING))]
    counts += [sum(join(who, f"{n % 8}") for n in range(MAX_WAITING)) for who in "bcd"]
    assert counts[0] == MAX_WAITING // 2
    assert all(counts)
    assert join("e", "0")
