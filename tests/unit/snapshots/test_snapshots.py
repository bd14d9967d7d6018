"""Snapshots and forks: who may make them, and what a fork has of its session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from fumehood.core.errors import InternalError, InvalidParams, PermissionDenied, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.sandbox.session_use import CarryOver, KeptValues
from fumehood.sandbox.sessions import SessionClock, SessionKeeper
from fumehood.sandbox.settings import Preset, SessionSettings
from fumehood.snapshots.service import Snapshots
from fumehood.testing import CONTAINER_LIMITS, FakeWall, ManualClock
from support.session_rows import SessionRows

pytestmark = [pytest.mark.anyio, pytest.mark.row("S11")]

ALICE, BOB = Principal("alice"), Principal("bob")
SHOP = {"directory": "/home/a/shop"}


class Bench:
    def __init__(self, carries: Sequence[CarryOver] = ()) -> None:
        self.clock = ManualClock()
        self.wall = FakeWall(limits=CONTAINER_LIMITS)
        self.rows = SessionRows()
        self.bound: dict[str, list[str]] = {}
        self.keeper = SessionKeeper(
            self.wall,
            self.rows,
            SessionSettings(image="python"),
            SessionClock(self.clock.now, self.clock.monotonic),
            lambda principal, agent_id: self.bound.get(agent_id or "", ()),
            carries=carries,
            presets={"small": Preset(), "plain": Preset()},
        )
        self.snapshots = Snapshots(self.keeper, self.wall, self.clock.now)

    @property
    def alive(self) -> list[str]:
        return [one.id for one in self.keeper.list(ALICE) if not one.state.is_over]


@asynccontextmanager
async def bench(*carries: CarryOver) -> AsyncIterator[Bench]:
    made = Bench(carries)
    async with made.keeper:
        yield made


async def test_copies_that_a_session_lists_are_spared_until_it_ends() -> None:
    async with bench() as made:
        session = await made.keeper.create(ALICE, disk_mb=64)
        first = await made.snapshots.take(ALICE, session.id, "first")
        second = await made.snapshots.take(ALICE, session.id)
        assert list(made.wall.copies()) == [first.id, second.id]
        assert made.keeper.find(ALICE, session.id).snapshots == (first, second)
        with pytest.raises(InvalidParams, match="already has a snapshot 'first'"):
            await made.snapshots.take(ALICE, session.id, "first")
        assert await made.snapshots.delete(ALICE, session.id, "first") == first
        assert list(made.wall.copies()) == [second.id]
        with pytest.raises(ResourceNotFound, match="no such snapshot"):
            await made.snapshots.restore(ALICE, session.id, "first")
        await made.keeper.end(ALICE, session.id)
        assert list(made.wall.copies()) == []


async def test_snapshot_that_is_not_stored_is_not_made() -> None:
    async with bench() as made:
        session = await made.keeper.create(ALICE, disk_mb=64)
        made.rows.failure = InternalError("the disk is full")
        with pytest.raises(InternalError):
            await made.snapshots.take(ALICE, session.id)
        assert made.keeper.find(ALICE, session.id).snapshots == ()
        made.rows.failure = None
        found = await made.snapshots.take(ALICE, session.id)
        made.rows.failure = InternalError("the disk is full")
        with pytest.raises(InternalError):
            await made.snapshots.delete(ALICE, session.id, found.id)
        assert list(made.wall.copies()) == [found.id]
        made.rows.failure = None


async def test_sessions_of_others_are_unknown_and_those_without_a_disk_have_no_copies() -> None:
    async with bench() as made:
        session = await made.keeper.create(ALICE, disk_mb=64)
        found = await made.snapshots.take(ALICE, session.id)
        for asked in (
            made.snapshots.take(BOB, session.id),
            made.snapshots.delete(BOB, session.id, found.id),
            made.snapshots.restore(BOB, session.id, found.id),
            made.snapshots.fork(BOB, session.id),
            made.snapshots.fork(BOB, session.id, snapshot_id=found.id),
        ):
            with pytest.raises(ResourceNotFound, match="You have no such session"):
                await asked
        memory = await made.keeper.create(ALICE)
        for asked in (made.snapshots.take(ALICE, memory.id), made.snapshots.fork(ALICE, memory.id)):
            with pytest.raises(InvalidParams, match=r"cannot be copied\. Make one with a disk"):
                await asked
        assert {*made.alive} == {memory.id, session.id}


async def test_session_that_is_older_than_its_agents_presets_has_no_forks() -> None:
    async with bench() as made:
        session = await made.keeper.create(ALICE, agent_id="writer", disk_mb=100)
        assert len(await made.snapshots.fork(ALICE, session.id)) == 1  # control
        made.bound["writer"] = ["small"]
        with pytest.raises(PermissionDenied, match="writer is bound to presets: small"):
            await made.snapshots.fork(ALICE, session.id)
        disk = made.wall.fork  # a part that does not ask is refused as well
        with pytest.raises(PermissionDenied, match="writer is bound to presets: small"):
            await made.keeper.make_like(
                ALICE, session.id, [None], "", lambda made_id, home: disk("snap_1", made_id, home)
            )


async def test_fork_of_a_snapshot_can_be_used_though_a_trial_runs_in_the_session() -> None:
    async with bench() as made:
        session = await made.keeper.create(ALICE, disk_mb=64)
        found = await made.snapshots.take(ALICE, session.id)
        running = made.keeper.usable(ALICE, session.id)
        running.must_restore = True  # as during a trial
        (fork,) = await made.snapshots.fork(ALICE, session.id, snapshot_id=found.id)
        running.must_restore = False
        assert (await made.keeper.resume(ALICE, fork.id)).state == "active"


async def test_fork_has_of_a_part_what_the_part_carries_over() -> None:
    seen: list[tuple[str, str]] = []

    async def carry(source: KeptValues, made: KeptValues) -> None:
        seen.append((source.session_id, made.session_id))
        assert made.values == {}
        await made.keep("project", source.values["project"])

    async with bench(carry) as made:
        session = await made.keeper.create(ALICE, disk_mb=64)
        await made.keeper.keep(session.id, "project", SHOP)
        await made.keeper.keep(session.id, "lunch", {"at": 11})
        forks = await made.snapshots.fork(ALICE, session.id, name="try", count=2)
        assert [(one.name, one.project) for one in forks] == [("try-1", "shop"), ("try-2", "shop")]
        assert seen == [(session.id, one.id) for one in forks]
        home = made.rows.kept[forks[0].id].home
        assert home.of_parts == {"project": SHOP}


async def test_forks_are_not_created_if_a_part_cannot_carry_over() -> None:
    carried: list[str] = []

    async def carry(source: KeptValues, made: KeptValues) -> None:
        carried.append(made.session_id)
        if len(carried) == 2:
            raise InternalError("the disk is full")

    async with bench(carry) as made:
        session = await made.keeper.create(ALICE, disk_mb=64)
        with pytest.raises(InternalError):
            await made.snapshots.fork(ALICE, session.id, name="try", count=3)
        assert [one.id for one in made.keeper.list(ALICE)] == [session.id]
        assert {*made.rows.kept} == {session.id}
        forks = await made.snapshots.fork(ALICE, session.id, name="try", count=3)  # names are free
        assert len(forks) == 3


async def test_part_cannot_keep_a_value_of_the_kernel_with_a_fork() -> None:
    async def carry(source: KeptValues, made: KeptValues) -> None:
        await made.keep("container", {"name": "another"})

    async with bench(carry) as made:
        session = await made.keeper.create(ALICE, disk_mb=64)
        with pytest.raises(ValueError, match="the value 'container', which is the kernel's"):
            await made.snapshots.fork(ALICE, session.id)
        assert made.alive == [session.id]
