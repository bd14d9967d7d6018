"""The table of a session's transitions, walked at random: sessions follow it and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fumehood.core.errors import EndedBy, InvalidParams, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.session import SavedCopy, SessionRecord, SessionStatus
from fumehood.sandbox.session import CopyLost, CopySource, Session
from fumehood.sandbox.session_states import (
    TRANSITIONS,
    ImpossibleChange,
    Keeps,
    next_state,
    seen_change,
)
from fumehood.sandbox.sessions import SessionClock, SessionKeeper
from fumehood.sandbox.settings import SessionSettings
from fumehood.sandbox.wall import RunEnding
from fumehood.snapshots.service import Snapshots
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall, ManualClock, SeenRun
from support.session_changes import LOG_IMPOSSIBLE_CHANGE
from support.session_rows import SessionRows
from support.wait import DEADLINE_S, settle

pytestmark = [pytest.mark.row("S6")]

ALICE = Principal("alice")
LIMITS = Limits(wall_s=5, cpu_s=5, memory_mb=512, output_bytes=1000)
PAUSE_S, IDLE_S = 60.0, 600.0
RULES: Mapping[str, Any] = {
    "image": "python", "max": 9, "max_per_principal": 9, "pause_seconds": PAUSE_S,
    "idle_seconds": IDLE_S, "lifetime_seconds": 1e9, "disk_lifetime_seconds": 1e9,
}  # fmt: skip

ACTIVE, PAUSED, STOPPED = SessionStatus.ACTIVE, SessionStatus.PAUSED, SessionStatus.STOPPED
ENDED, LOST = SessionStatus.ENDED, SessionStatus.LOST
DISK, COPY = frozenset({Keeps.DISK}), frozenset({Keeps.COPY})


# -- the table ------------------------------------------------------------------------------


def test_no_row_leaves_the_end_of_a_session_and_each_state_is_reached() -> None:
    left = {state for row in TRANSITIONS.values() for state in row.leaves}
    assert left == {state for state in SessionStatus if not state.is_over}
    assert {row.to for row in TRANSITIONS.values()} == set(SessionStatus)


def test_session_is_stopped_only_if_something_keeps_its_files() -> None:
    (stop,) = [row for row in TRANSITIONS.values() if row.to is STOPPED and row.leaves]
    assert stop.needs == {Keeps.DISK, Keeps.COPY}
    with pytest.raises(ImpossibleChange):
        next_state("stop", ACTIVE)


def test_stopped_session_has_no_way_back_but_with_its_files() -> None:
    ways = {row.name: row.needs for row in TRANSITIONS.values() if STOPPED in row.leaves}
    back = {name: needs for name, needs in ways.items() if TRANSITIONS[name].to is ACTIVE}
    assert back == {"start": DISK, "restore": COPY}
    assert seen_change(STOPPED, ACTIVE, DISK) == "start"
    with pytest.raises(ImpossibleChange, match=r"from stopped \(with a saved copy\) to active"):
        seen_change(STOPPED, ACTIVE, COPY)


# -- each row -------------------------------------------------------------------------------


class Saver:
    """Keeps one number for each session: the content of its workspace."""

    def __init__(self, workspaces: dict[str, int]) -> None:
        self.workspaces = workspaces
        self.copies: dict[str, int] = {}
        self.damaged: set[str] = set()

    def may_change(self, program: str, arguments: JsonObject) -> bool:
        return program != "files"

    async def save(self, source: CopySource, copy: SavedCopy, now: Any, store: Any) -> None:
        self.copies[source.session_id] = self.workspaces.get(source.session_id, 0)
        await store(SavedCopy(now().isoformat(), "manifest", 1))

    async def restore(self, target: CopySource, copy: SavedCopy) -> None:
        if target.session_id in self.damaged:
            raise CopyLost("a piece is missing")
        self.workspaces[target.session_id] = self.copies.get(target.session_id, 0)

    async def drop(self, session_id: str) -> None:
        self.copies.pop(session_id, None)


class World:
    """One engine after the other, with sessions whose programs count in their workspace."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True, answer=self._count)
        self.rows = SessionRows()
        self.workspaces: dict[str, int] = {}
        self.saver = Saver(self.workspaces)
        self.events: list[tuple[str, JsonObject]] = []

    def engine(self) -> SessionKeeper:
        """The next engine, on the rows of the one before."""
        self.keeper = SessionKeeper(
            self.wall,
            self.rows,
            SessionSettings.model_construct(**RULES),
            SessionClock(self.clock.now, self.clock.monotonic),
            lambda principal, agent: (),
            kept=list(self.rows.kept.values()),
            saver=self.saver,  # type: ignore[arg-type]
            on_event=lambda event, values: self.events.append((event, values)),
        )
        return self.keeper

    def _count(self, run: SeenRun) -> RunEnding:
        session_id = run.domain.session_id or ""
        if run.program == "python":
            self.workspaces[session_id] = self.workspaces.get(session_id, 0) + 1
        result: JsonObject = {"value": self.workspaces.get(session_id, 0)}
        return RunEnding(EndedBy.OK, "session", result=result)

    async def create(self, keeps: frozenset[Keeps] = frozenset()) -> SessionRecord:
        disk_mb = 64 if Keeps.DISK in keeps else None
        return await self.keeper.create(ALICE, disk_mb=disk_mb, durable=Keeps.COPY in keeps)

    async def call(self, session_id: str) -> int:
        lease = self.keeper.lease(ALICE, None, session_id, language="python", memory_mb=None)
        with anyio.fail_after(DEADLINE_S):
            async with lease as place:
                ending = await place.run("python", {}, LIMITS)
        return int((ending.result or {})["value"])

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.keeper.tidy()
        await settle()

    def place(self, session_id: str) -> FakePlace:
        return [one for one in self.wall.held if one.domain.session_id == session_id][-1]

    def lose(self, session_id: str, *, disk: bool = False) -> None:
        """Lose the container and, if the session has none or `disk`, the files with it."""
        if self.state(session_id) is STOPPED:
            return
        if self.keeper.find(ALICE, session_id).disk_mb is not None and not disk:
            self.place(session_id).lose_container()
        else:
            self.workspaces.pop(session_id, None)
            self.place(session_id).lose("it is gone")

    def thaw(self, session_id: str) -> None:
        """Let the engine find that a container is not frozen."""
        self.place(session_id).is_paused = False
        self.keeper.tidy()

    def state(self, session_id: str) -> SessionStatus:
        return self.keeper.find(ALICE, session_id).state

    def states(self) -> dict[str, SessionStatus]:
        return {one.id: one.state for one in self.keeper.list(ALICE)}

    def idle_s(self, session_id: str) -> float:
        used = self.keeper.find(ALICE, session_id).last_used_at
        return (self.clock.now() - used).total_seconds()


Step = Callable[[World, str], Awaitable[object]]


async def pause(world: World, session_id: str) -> None:
    await world.keeper.pause(ALICE, session_id)


async def stop(world: World, session_id: str) -> None:
    await world.keeper.stop(ALICE, session_id)


async def end(world: World, session_id: str) -> None:
    await world.keeper.end(ALICE, session_id)


async def call(world: World, session_id: str) -> None:
    await world.call(session_id)


async def lose(world: World, session_id: str) -> None:
    world.lose(session_id)


NOTHING: frozenset[Keeps] = frozenset()
WALKS: dict[str, tuple[frozenset[Keeps], Sequence[Step]]] = {
    "pause": (NOTHING, [pause]),
    "thaw": (NOTHING, [pause, call]),
    "stop": (DISK, [stop]),
    "start": (DISK, [stop, call]),
    "restore": (COPY, [lose, call]),
    "end": (NOTHING, [end]),
    "lose": (NOTHING, [lose]),
}
"""Name of a row → a session, and steps of which the last makes this change and no other."""


@pytest.mark.anyio
@pytest.mark.parametrize("name", WALKS)
async def test_step_is_the_row_of_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps, steps = WALKS[name]
    changes: list[str] = []
    change = Session.change

    def spy(session: Session, name: str) -> None:
        changes.append(name)
        change(session, name)

    monkeypatch.setattr(Session, "change", spy)
    world = World()
    async with world.engine():
        session = await world.create(keeps)
        assert session.state is TRANSITIONS["create"].to
        for step in steps:
            changes.clear()
            await step(world, session.id)
        assert changes == [name]
        assert world.state(session.id) is TRANSITIONS[name].to


@pytest.mark.anyio
async def test_fork_begins_stopped() -> None:
    world = World()
    async with world.engine():
        session = await world.create(DISK)
        forks = Snapshots(world.keeper, world.wall, world.clock.now)
        (made,) = await forks.fork(ALICE, session.id)
        assert made.state is TRANSITIONS["fork"].to


def test_each_row_has_a_walk() -> None:
    assert WALKS.keys() | {"create", "fork"} == TRANSITIONS.keys()


# -- what the table lacks -------------------------------------------------------------------


@pytest.mark.anyio
async def test_impossible_change_of_a_container_is_refused_and_logged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container that says it is frozen after its session was stopped."""
    monkeypatch.setattr(SessionKeeper, "_refuse", LOG_IMPOSSIBLE_CHANGE)
    world = World()
    async with world.engine():
        session = await world.create(DISK)
        assert await world.call(session.id) == 1
        await world.keeper.stop(ALICE, session.id)
        before = world.rows.kept[session.id]
        place = world.place(session.id)
        place.is_stopped, place.is_paused = False, True
        for _ in range(3):
            world.keeper.tidy()
        assert world.state(session.id) is STOPPED
        assert world.rows.kept[session.id] == before
        refused = [values for event, values in world.events if event == "session.change_refused"]
        assert [values["why"] for values in refused] == [
            "No transition of the container from stopped (with a disk) to paused."
        ]
        assert await world.call(session.id) == 2  # its files are there
        assert world.state(session.id) is ACTIVE


@pytest.mark.anyio
async def test_impossible_change_is_an_error_in_tests() -> None:
    world = World()
    async with world.engine():
        session = await world.create(DISK)
        await world.keeper.stop(ALICE, session.id)
        place = world.place(session.id)
        place.is_stopped, place.is_paused = False, True
        with pytest.raises(ImpossibleChange):
            world.keeper.tidy()
        place.is_stopped, place.is_paused = True, False


@pytest.mark.anyio
async def test_ended_session_cannot_end_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionKeeper, "_refuse", LOG_IMPOSSIBLE_CHANGE)
    world = World()
    async with world.engine() as keeper:
        session = await world.create()
        kept = keeper._live[session.id]
        ended = await keeper.end(ALICE, session.id)
        keeper._finish(kept, "lose", "it is gone")
        assert keeper.find(ALICE, session.id) == ended
        assert world.events[-1][0] == "session.change_refused"


# -- a walk ---------------------------------------------------------------------------------


class Walk(RuleBasedStateMachine):
    """What can happen to sessions, and the state and content that each of them then has."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.portal = self.stack.enter_context(start_blocking_portal())
        self.world = World()
        self.states: dict[str, SessionStatus] = {}
        self.keeps: dict[str, frozenset[Keeps]] = {}
        self.contents: dict[str, int] = {}
        self.thawed: set[str] = set()
        """Sessions whose containers were thawed by themselves. They are not paused until used."""
        self._start()

    def teardown(self) -> None:
        self.stack.close()

    def _start(self) -> None:
        self.running = self.stack.enter_context(ExitStack())
        self.running.enter_context(self.portal.wrap_async_context_manager(self.world.engine()))

    def _run(self, step: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        result = self.portal.call(step, *arguments)
        self.portal.call(settle)
        return result

    def _change(self, session_id: str, name: str) -> None:
        """Change the expected state, unless the session has the new one already."""
        if self.states[session_id] is not TRANSITIONS[name].to or name == "restore":
            self.states[session_id] = next_state(
                name, self.states[session_id], self.keeps[session_id]
            )

    sessions = st.integers(0, 99)

    def _one(self, number: int) -> str:
        return list(self.states)[number % len(self.states)]

    has_sessions = precondition(lambda self: bool(self.states))

    @precondition(lambda self: len(self.states) < 4)
    @rule(disk=st.booleans(), durable=st.booleans())
    def create(self, disk: bool, durable: bool) -> None:
        keeps = frozenset({*(DISK if disk else ()), *(COPY if durable else ())})
        session = self._run(self.world.create, keeps)
        self.states[session.id], self.keeps[session.id] = TRANSITIONS["create"].to, keeps
        self.contents[session.id] = 0

    @has_sessions
    @rule(number=sessions)
    def call(self, number: int) -> None:
        session_id = self._one(number)
        state, keeps = self.states[session_id], self.keeps[session_id]
        try:
            found = self._run(self.world.call, session_id)
        except ResourceNotFound:
            if session_id in self.world.saver.damaged and not state.is_over:
                self._change(session_id, "lose")
            assert self.states[session_id].is_over
            return
        if state is STOPPED:
            self._change(session_id, "start" if self._has_disk(session_id) else "restore")
        elif state is PAUSED:
            self._change(session_id, "thaw")
        assert not state.is_over
        self.contents[session_id] += 1
        assert found == self.contents[session_id], keeps
        self.thawed.discard(session_id)

    def _has_disk(self, session_id: str) -> bool:
        is_kept = not self.world.place(session_id).ended.is_set()
        return is_kept and Keeps.DISK in self.keeps[session_id]

    @has_sessions
    @rule(number=sessions, step=st.sampled_from(["pause", "stop", "end"]))
    def ask(self, number: int, step: str) -> None:
        """The owner pauses, stops or ends a session."""
        session_id = self._one(number)
        state, keeps = self.states[session_id], self.keeps[session_id]
        ask = {"pause": pause, "stop": stop, "end": end}[step]
        try:
            self._run(ask, self.world, session_id)
        except InvalidParams:
            assert step == "stop"
            assert Keeps.DISK not in keeps
            self.thawed.discard(session_id)
        except ResourceNotFound:
            assert state.is_over
        else:
            if not (state.is_over or (step == "pause" and state is STOPPED)):
                self._change(session_id, step)

    @has_sessions
    @rule(number=sessions, disk=st.booleans())
    def lose(self, number: int, disk: bool) -> None:
        """A container, or a container and its disk, is gone."""
        session_id = self._one(number)
        if self.states[session_id] in (STOPPED, ENDED, LOST):
            return
        self.portal.call(partial(self.world.lose, session_id, disk=disk))
        self.portal.call(settle)
        keeps = self.keeps[session_id] - (DISK if disk else frozenset())
        self._change(session_id, "stop" if keeps else "lose")

    @has_sessions
    @rule(number=sessions)
    def thaw(self, number: int) -> None:
        """A container is found not to be frozen any more."""
        session_id = self._one(number)
        if self.states[session_id] is PAUSED:
            self.portal.call(self.world.thaw, session_id)
            self._change(session_id, "thaw")
            self.thawed.add(session_id)

    @has_sessions
    @rule(number=sessions)
    def damage(self, number: int) -> None:
        """A saved copy is incomplete from now on."""
        self.world.saver.damaged.add(self._one(number))

    @has_sessions
    @rule()
    def wait_to_pause(self) -> None:
        self._run(self.world.pass_time, PAUSE_S)
        self._idle()

    @has_sessions
    @rule()
    def wait_for_the_idle_time(self) -> None:
        self._run(self.world.pass_time, IDLE_S)
        self._idle()

    def _idle(self) -> None:
        """The sessions that have been idle long enough are paused, stopped or ended."""
        for session_id, state in self.states.items():
            if state.is_over:
                continue
            idle_s = self.portal.call(self.world.idle_s, session_id)
            if idle_s >= IDLE_S and Keeps.DISK in self.keeps[session_id]:
                self._change(session_id, "stop")
            elif idle_s >= IDLE_S:
                self._change(session_id, "end")
            elif idle_s >= PAUSE_S and state is ACTIVE and session_id not in self.thawed:
                self._change(session_id, "pause")

    @has_sessions
    @rule(killed=st.booleans(), keeps_sessions=st.sampled_from([True, True, True, False]))
    def next_engine(self, killed: bool, keeps_sessions: bool) -> None:
        left = dict(self.world.rows.kept)
        self.running.close()
        if killed:
            self.world.rows.kept = dict(left)
        self.world.wall.keeps_sessions = keeps_sessions
        self._start()
        self.portal.call(settle)
        self.world.wall.keeps_sessions = True
        self.thawed.clear()
        for session_id, state in self.states.items():
            row = left[session_id].record.state
            if not keeps_sessions and not state.is_over:
                self._change(session_id, "lose")
            elif killed and row is STOPPED and not state.is_over:
                self._change(session_id, "stop")  # its new container is removed
            elif killed and row is PAUSED and state is ACTIVE:
                self.thawed.add(session_id)
        self._idle()  # an engine looks for idle sessions as it starts

    @invariant()
    def sessions_have_the_expected_states(self) -> None:
        assert self.portal.call(self.world.states) == self.states

    @invariant()
    def counts_are_those_of_the_states(self) -> None:
        counts = self.portal.call(lambda: self.world.keeper.counts)
        for state in (ACTIVE, PAUSED, STOPPED):
            assert counts[state.value] == list(self.states.values()).count(state)
        assert counts["creating"] == 0


TestWalk = Walk.TestCase
TestWalk.settings = settings(stateful_step_count=30)
