"""Approved calls under failure: a full disk, and a cancellation race."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from fumehood.approvals.model import Approval, ApprovalState, NewDecision
from fumehood.budgets.in_engine import Spending
from fumehood.engine import Engine
from support.crash_approvals import ALICE, CHANNEL, User, engine_in, in_state, marks, prepare
from support.wait import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2", "A4")]


@dataclass
class Disk:
    """Fail or block chosen commits, through the database's test hook."""

    is_full: bool = False
    spares: int = 0
    """Commits that still succeed after the disk is full."""
    refused: int = 0
    number: int = 0
    stops_at: int = 0
    """Number of the commit that blocks until `may_go` is set."""
    may_go: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)

    def hook(self, moment: str, number: int) -> None:
        if moment != "before":
            return
        self.number = number
        if number == self.stops_at:
            self.stopped.set()
            assert self.may_go.wait(DEADLINE_S)
        if self.is_full and self.spares > 0:
            self.spares -= 1
        elif self.is_full:
            self.refused += 1
            raise sqlite3.OperationalError("database or disk is full")


@dataclass
class World:
    """An engine, its disk and one user."""

    home: Path
    engine: Engine
    disk: Disk
    user: User

    @property
    def acted(self) -> int:
        return sum(marks(self.home).values())

    async def approve(self, approval_id: str) -> None:
        decision = NewDecision(decision="approve")
        await self.engine.approvals.decide(approval_id, decision, ALICE, channel=CHANNEL)

    async def show(self, approval_id: str) -> Approval:
        return await self.engine.approvals.show(approval_id)

    async def state(self, approval_id: str) -> ApprovalState:
        return (await self.show(approval_id)).state

    def held(self) -> list[int | str]:
        return [
            one.held
            for one in self.engine.part(Spending).budgets.standings()
            if one.budget == "calls"
        ]


async def until(condition: Callable[[], object] | Callable[[], Awaitable[object]]) -> None:
    """Wait until the condition holds, at most 20 seconds."""
    with anyio.fail_after(DEADLINE_S):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await anyio.sleep(0.005)


@asynccontextmanager
async def world_in(home: Path) -> AsyncIterator[World]:
    disk = Disk()
    async with engine_in(home, disk.hook) as (engine, _, clock):
        yield World(home, engine, disk, User(engine, clock, lambda line: None))


@pytest.fixture
async def world(home: Path) -> AsyncIterator[World]:
    await anyio.to_thread.run_sync(prepare, home)
    async with world_in(home) as made:
        yield made


# ── a disk that is full ──────────────────────────────────────────────────────────────────────


@pytest.mark.row("D6")
@pytest.mark.parametrize("what", ["reserve budget", "consume approval"])
async def test_full_disk_while_consuming_an_approval_runs_nothing_and_keeps_the_approval(
    world: World, what: str
) -> None:
    if what == "consume approval":  # then its budget's mark is far enough already
        await world.user.ask("before", "note")
    before = world.acted
    approval_id = await world.user.ask("a")
    world.disk.spares, world.disk.is_full = 1, True  # the decision
    await world.approve(approval_id)
    await until(lambda: world.disk.refused and not world.engine.approvals.requests.runs.running)
    assert await world.state(approval_id) is ApprovalState.APPROVED
    assert world.acted == before
    assert world.held() == [0]
    world.disk.is_full = False
    world.engine.approvals.requests.new_call.set()
    await world.user.end("a", approval_id)
    assert await world.state(approval_id) is ApprovalState.DONE
    assert world.acted == before + 1
    assert world.held() == [0]


@pytest.mark.row("D6")
async def test_full_disk_at_call_end_stores_the_answer_once_space_is_free(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fumehood.approvals.requests.RETRY_S", 0.02)
    await world.user.ask("before", "note")
    approval_id = await world.user.ask("a", key="k")
    # The decision, the budgets' marks, and the start.
    world.disk.spares, world.disk.is_full = 3, True
    await world.approve(approval_id)
    await until(lambda: world.disk.refused >= 2)
    assert await world.state(approval_id) is ApprovalState.STARTED
    world.disk.is_full = False
    await world.user.end("a", approval_id)
    assert await world.state(approval_id) is ApprovalState.DONE
    assert world.acted == 2
    again = await world.engine.call("act", {"label": "a"}, idempotency_key="k")
    assert (again.success, again.metadata.idempotent_replay) == (True, True)
    assert world.acted == 2


@pytest.mark.row("D6")
async def test_full_disk_at_call_request_is_internal_error_and_leaves_nothing_pending(
    world: World,
) -> None:
    world.disk.is_full = True
    envelope = await world.engine.call("act", {"label": "a"})
    assert envelope.error.code == "INTERNAL_ERROR"
    world.disk.is_full = False
    assert await in_state(world.user, ApprovalState.PENDING) == []


# ── a caller who takes the call back ─────────────────────────────────────────────────────────


async def test_call_cancelled_while_its_approval_is_consumed_never_runs(home: Path) -> None:
    await anyio.to_thread.run_sync(prepare, home)
    async with world_in(home) as world:
        await world.user.ask("before", "note")
        approval_id = await world.user.ask("a", key="k")
        world.disk.stops_at = world.disk.number + 2
        await world.approve(approval_id)
        await until(world.disk.stopped.is_set)
        run = world.engine.approvals.requests.runs.running[approval_id]
        cancelling = asyncio.create_task(
            world.engine.approvals.cancel(approval_id, world.engine.owner)
        )
        await until(lambda: run.handle.is_cancelled)
        world.disk.may_go.set()
        with anyio.fail_after(DEADLINE_S):
            assert (await cancelling).state is ApprovalState.CANCELLED
        world.engine.approvals.requests.new_call.set()
        answer = await world.engine.call("act", {"label": "a"}, idempotency_key="k")
        assert answer.error.code == "CANCELLED"
        assert world.held() == [0]
    async with world_in(home) as world:
        assert await world.state(approval_id) is ApprovalState.CANCELLED
        assert world.acted == 1
