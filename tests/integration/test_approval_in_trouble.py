"""Approved calls under failure: a full disk, a cancellation race, an engine that shuts down."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from conftest import skip_or_fail
from fumehood import tool
from fumehood.approvals.model import Approval, ApprovalState, NewDecision
from fumehood.core.call import CallBody
from fumehood.core.errors import IdempotencyConflict
from fumehood.engine import Engine
from fumehood.executors.handle import CallHandle
from fumehood.storage.database import Database
from fumehood.testing import ManualClock
from support.crash_approvals import ALICE, CHANNEL, User, engine_in, in_state, marks, prepare
from support.state import writer_held

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2", "A4")]

TMPFS_BYTES = 4 * 1024 * 1024


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
            assert self.may_go.wait(30)
        if self.is_full and self.spares > 0:
            self.spares -= 1
        elif self.is_full:
            self.refused += 1
            raise sqlite3.OperationalError("database or disk is full")


@dataclass
class World:
    """An engine, its database, its disk and one user."""

    home: Path
    engine: Engine
    database: Database
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
        return [one.held for one in self.engine.budgets.standings() if one.budget == "calls"]


async def until(condition: Callable[[], object] | Callable[[], Awaitable[object]]) -> None:
    """Wait until the condition holds, at most 20 seconds."""
    with anyio.fail_after(20):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await anyio.sleep(0.005)


@dataclass
class Gate:
    """Blocks a tool until the test sets `may_go`."""

    entered: asyncio.Event = field(default_factory=asyncio.Event)
    may_go: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def world_in(home: Path, gate: Gate | None = None) -> AsyncIterator[World]:
    @tool(sandboxed=False, dangerous=True)
    async def wait_inside(label: str) -> dict[str, str]:
        """Act for as long as a test wants."""
        assert gate is not None
        gate.entered.set()
        await gate.may_go.wait()
        return {"label": label}

    disk = Disk()
    async with engine_in(home, disk.hook, more=[wait_inside]) as (engine, database, clock):
        yield World(home, engine, database, disk, _user(engine, clock))


def _user(engine: Engine, clock: ManualClock) -> User:
    return User(engine, clock, lambda line: None)


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
    world.disk.spares, world.disk.is_full = 2, True  # the decision, and the start
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
    assert envelope.error is not None
    assert envelope.error.code == "INTERNAL_ERROR"
    world.disk.is_full = False
    assert await in_state(world.user, ApprovalState.PENDING) == []


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    place = home / "disk"
    place.mkdir(mode=0o700)
    options = f"size={TMPFS_BYTES},mode=700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, timeout=30, check=False).returncode:
        skip_or_fail("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)


def fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert os.statvfs(filler).f_bavail == 0


@pytest.mark.needs("root")
@pytest.mark.row("D6")
async def test_full_tmpfs_while_consuming_an_approval_runs_nothing_and_keeps_the_approval(
    small_disk: Path,
) -> None:
    await anyio.to_thread.run_sync(prepare, small_disk)
    async with world_in(small_disk) as world:
        approval_id = await world.user.ask("a")
        world.disk.stops_at = world.disk.number + 2  # the decision, and what follows it
        await world.approve(approval_id)
        await until(world.disk.stopped.is_set)
        filler = small_disk / "filler"
        fill(filler)
        world.disk.may_go.set()
        await until(
            lambda: world.database.is_failing and not world.engine.approvals.requests.runs.running
        )
        assert await world.state(approval_id) is ApprovalState.APPROVED
        assert world.acted == 0
        filler.unlink()
        world.engine.approvals.requests.new_call.set()
        await world.user.end("a", approval_id)
        assert await world.state(approval_id) is ApprovalState.DONE
        assert world.acted == 1


# ── a caller who takes the call back ─────────────────────────────────────────────────────────


async def test_call_cancelled_while_its_request_is_stored_cannot_be_approved(world: World) -> None:
    live = CallHandle()
    body = CallBody(arguments={"label": "a"})
    with writer_held(world.database):
        call = asyncio.create_task(world.engine.run("act", body, world.engine.owner, live))
        await until(lambda: world.database._writer._waiting)
        assert live.cancel()
        await anyio.lowlevel.checkpoint()
    with anyio.fail_after(20):
        envelope = await call
    assert envelope.error is not None
    assert envelope.error.code == "CANCELLED"
    (approval,) = await in_state(world.user, ApprovalState.CANCELLED)
    with pytest.raises(IdempotencyConflict):
        await world.approve(approval.id)
    assert world.acted == 0


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
        with anyio.fail_after(20):
            assert (await cancelling).state is ApprovalState.CANCELLED
        world.engine.approvals.requests.new_call.set()
        answer = await world.engine.call("act", {"label": "a"}, idempotency_key="k")
        assert answer.error is not None
        assert answer.error.code == "CANCELLED"
        assert world.held() == [0]
    async with world_in(home) as world:
        assert await world.state(approval_id) is ApprovalState.CANCELLED
        assert world.acted == 1


async def test_approved_call_cancelled_while_running_fails_and_later_approvals_still_run(
    home: Path,
) -> None:
    await anyio.to_thread.run_sync(prepare, home)
    gate = Gate()
    async with world_in(home, gate) as world:
        approval_id = await world.user.ask("a", "wait_inside", key="k")
        await world.approve(approval_id)
        await until(gate.entered.is_set)
        after = await world.engine.approvals.cancel(approval_id, world.engine.owner)
        assert (after.state, after.code) == (ApprovalState.FAILED, "CANCELLED")
        assert world.held() == [0]
        again = await world.user.ask("b")
        await world.approve(again)
        await world.user.end("b", again)
        assert world.acted == 1


async def test_cancellation_racing_approval_either_runs_the_call_or_cancels_it(
    world: World,
) -> None:
    """Whoever is first: both are told the same, and the desk goes on."""
    for number in range(10):
        approval_id = await world.user.ask(f"a{number}")
        await world.approve(approval_id)
        try:
            await world.engine.approvals.cancel(approval_id, world.engine.owner)
        except IdempotencyConflict:
            await world.user.end(f"a{number}", approval_id)
        await until(lambda: not world.engine.approvals.requests.runs.running)
        has_acted = marks(world.home)[f"a{number}"] == 1
        states = {True: {ApprovalState.DONE, ApprovalState.FAILED}}
        assert await world.state(approval_id) in states.get(has_acted, {ApprovalState.CANCELLED})


# ── an engine that stops ─────────────────────────────────────────────────────────────────────


async def test_draining_engine_waits_for_running_approved_calls(home: Path) -> None:
    await anyio.to_thread.run_sync(prepare, home)
    gate = Gate()
    async with world_in(home, gate) as world:
        approval_id = await world.user.ask("a", "wait_inside")
        await world.approve(approval_id)
        await until(gate.entered.is_set)
        world.engine.drain()
        drained = asyncio.create_task(world.engine.drained())
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert not drained.done()
        gate.may_go.set()
        with anyio.fail_after(20):
            await drained
        assert await world.state(approval_id) is ApprovalState.DONE


async def test_approval_not_yet_started_when_engine_drains_runs_after_restart(
    home: Path,
) -> None:
    await anyio.to_thread.run_sync(prepare, home)
    async with world_in(home) as world:
        approval_id = await world.user.ask("a")
        world.disk.stops_at = world.disk.number + 2  # the budget's mark
        await world.approve(approval_id)
        await until(world.disk.stopped.is_set)
        world.engine.drain()
        world.disk.may_go.set()
        await until(lambda: not world.engine.approvals.requests.runs.running)
        assert await world.state(approval_id) is ApprovalState.APPROVED
        assert world.acted == 0
    async with world_in(home) as world:
        await world.user.end("a", approval_id)
        assert world.acted == 1


@pytest.mark.row("E4")
async def test_approved_call_interrupted_by_engine_stop_counts_against_its_budget(
    home: Path,
) -> None:
    await anyio.to_thread.run_sync(prepare, home)
    gate = Gate()
    async with world_in(home, gate) as world:
        approval_id = await world.user.ask("a", "wait_inside")
        await world.approve(approval_id)
        await until(gate.entered.is_set)
    async with world_in(home) as world:
        assert await world.state(approval_id) is ApprovalState.INTERRUPTED
        (spent,) = [one.spent for one in world.engine.budgets.standings() if one.budget == "calls"]
        assert int(spent) >= 1
