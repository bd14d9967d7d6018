"""Whatever happens in whatever order: no more sessions than there may be, each with one place."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.errors import EngineError
from fumehood.core.identity import Principal
from fumehood.core.limits import Limits
from fumehood.core.session import SessionStatus
from fumehood.sandbox.sessions import SessionClock, SessionKeeper
from fumehood.sandbox.settings import SessionSettings
from fumehood.testing import CONTAINER_LIMITS, FakeWall, ManualClock
from support.session_rows import SessionRows

MOST, MOST_OF_ONE = 3, 2
RULES = SessionSettings(
    image="python",
    max=MOST,
    max_per_principal=MOST_OF_ONE,
    idle_seconds=50,
    lifetime_seconds=200,
    waiting=2,
)
TURNS = 15
"""Of the event loop, between two steps."""

LIMITS = Limits(5, 5, 512, 1000)
PRINCIPALS = {name: Principal(name) for name in "ab"}

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.sampled_from("ab")),
        st.tuples(st.just("call"), st.sampled_from("aaab"), st.integers(0, 1)),
        st.tuples(
            st.sampled_from(["end", "lose", "pause", "go on", "cancel"]),
            st.sampled_from("ab"),
            st.integers(0, 5),
        ),
        st.tuples(st.just("wait"), st.integers(0, 120)),
        st.tuples(st.sampled_from(["tidy", "keep removed", "let removed"])),
    ),
    max_size=40,
)


class World:
    """A keeper, and everything that can happen to it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.wall = FakeWall(limits=CONTAINER_LIMITS)
        self.rows = SessionRows()
        clock = SessionClock(self.clock.now, self.clock.monotonic)
        self.keeper = SessionKeeper(self.wall, self.rows, RULES, clock, lambda who, agent: ())
        self.ids: dict[str, list[str]] = {"a": [], "b": []}
        self.tasks: list[asyncio.Task[Any]] = []
        self.inside: dict[str, int] = {}
        self.is_removing = True

    async def step(self, what: str, *values: Any) -> None:
        match what:
            case "create":
                self._start(self._create(values[0]))
            case "call":
                if self.ids[values[0]]:
                    self._start(self._call(values[0], self._id(*values)))
            case "end":
                if self.ids[values[0]]:
                    who = PRINCIPALS[values[0]]
                    self._start(self.keeper.end(who, self._id(*values)))
            case "lose" | "pause" | "go on":
                self._with_place(what, values[1])
            case "cancel":
                if self.tasks:
                    self.tasks[values[1] % len(self.tasks)].cancel()
            case "wait":
                self.clock.advance(values[0])
            case "tidy":
                self.keeper.tidy()
            case "keep removed" | "let removed":
                self.is_removing = what == "let removed"
        await self.settle()
        self.check()

    async def settle(self) -> None:
        for place in self.wall.held:
            if self.is_removing:
                place.may_go.set()
            elif place.lost is None:
                place.may_go.clear()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), EngineError), task.exception()

    def check(self) -> None:
        assert all(count <= 1 for count in self.inside.values())
        there = [
            place for place in self.wall.held if place.lost is None or not place.may_go.is_set()
        ]
        assert len(there) <= MOST
        active: list[str] = []
        for name, who in PRINCIPALS.items():
            mine = self.keeper.list(who)
            live = [one.id for one in mine if one.state is SessionStatus.ACTIVE]
            assert len(live) <= MOST_OF_ONE
            assert {one.id for one in mine} >= set(live)
            assert {one.id for one in mine} <= set(self.ids[name])
            active += live
        domains = {place.domain.session_id for place in self.wall.held if place.lost is None}
        assert domains == set(active)
        for session_id in active:
            assert self.rows.kept[session_id].record.id == session_id

    def _start(self, work: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def _create(self, name: str) -> None:
        record = await self.keeper.create(PRINCIPALS[name])
        self.ids[name].append(record.id)

    async def _call(self, name: str, session_id: str) -> None:
        who = PRINCIPALS[name]
        lease = self.keeper.lease(who, None, session_id, language="python", memory_mb=None)
        async with lease as place:
            self.inside[session_id] = self.inside.get(session_id, 0) + 1
            try:
                for _ in range(2 * TURNS):  # so that the next step comes in the middle
                    await asyncio.sleep(0)
                await place.run("python", {}, LIMITS)
            finally:
                self.inside[session_id] -= 1

    def _id(self, name: str, number: int) -> str:
        return self.ids[name][number % len(self.ids[name])]

    def _with_place(self, what: str, number: int) -> None:
        living = [place for place in self.wall.held if place.lost is None]
        if not living:
            return
        place = living[number % len(living)]
        match what:
            case "lose":
                place.lose()
            case "pause":
                place.may_run.clear()
            case "go on":
                place.may_run.set()


@given(STEPS)
def test_held_containers_match_active_sessions_and_calls_are_serial(
    steps: list[tuple[Any, ...]],
) -> None:
    async def play() -> None:
        world = World()
        async with world.keeper:
            for step in steps:
                await world.step(*step)
            # Afterwards all is well, so everybody who waits is served or told.
            for place in world.wall.held:
                place.may_run.set()
            await world.step("let removed")
            for _ in range(20):
                await world.settle()
            assert not world.tasks
        assert all(place.lost is not None for place in world.wall.held)
        assert all(one.record.state is not SessionStatus.ACTIVE for one in world.rows.kept.values())

    anyio.run(play)
