"""Sessions: whose they are, whose turn it is, how long they last, and what is said of those gone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import pytest

from fumehood.core.errors import (
    EndedBy,
    InternalError,
    InvalidParams,
    QuotaExceeded,
    ResourceNotFound,
    SandboxUnavailable,
)
from fumehood.core.identity import Principal, TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade, Limits
from fumehood.core.session import KeptSession, SessionRecord, SessionStatus
from fumehood.sandbox.session_use import (
    InNewContainer,
    InSession,
    SessionAccess,
    SessionLease,
)
from fumehood.sandbox.sessions import SessionClock, SessionKeeper
from fumehood.sandbox.settings import SessionSettings
from fumehood.sandbox.wall import FIRST_EPOCH, RunEnding, SessionContainer
from fumehood.testing import CONTAINER_LIMITS, FakeWall, ManualClock, always_four
from support.session_rows import SessionRows
from support.wait import DEADLINE_S, settle

pytestmark = [pytest.mark.anyio, pytest.mark.row("S6")]

ALICE, BOB = Principal("alice"), Principal("bob")
LIMITS = Limits(wall_s=5, cpu_s=5, memory_mb=512, output_bytes=1000)


class Bench:
    def __init__(
        self,
        rows: SessionRows | None = None,
        wall: FakeWall | None = None,
        in_session: Sequence[InSession] = (),
        in_new_container: Sequence[InNewContainer] = (),
        **rules: Any,
    ) -> None:
        self.clock = ManualClock()
        self.wall = wall or FakeWall(limits=CONTAINER_LIMITS)
        self.rows = rows or SessionRows()
        self.events: list[tuple[str, JsonObject]] = []
        self.refused_agents = {"others"}
        self.keeper = SessionKeeper(
            self.wall,
            self.rows,
            SessionSettings.model_construct(**{"image": "python", **rules}),
            SessionClock(self.clock.now, self.clock.monotonic),
            self._check,
            kept=list(self.rows.kept.values()),
            in_session=in_session,
            in_new_container=in_new_container,
            on_event=lambda event, values: self.events.append((event, values)),
        )

    def _check(self, principal: Principal, agent_id: str | None) -> tuple[str, ...]:
        if agent_id in self.refused_agents:
            raise ResourceNotFound("There is no such agent.")
        return ()

    async def run(
        self, session: SessionRecord, who: Principal = ALICE, program: str = "python"
    ) -> RunEnding:
        lease = self.keeper.lease(
            who, session.agent_id, session.id, language="python", memory_mb=None
        )
        with anyio.fail_after(DEADLINE_S):
            async with lease as place:
                return await place.run(program, {}, LIMITS)

    def runs(self, session: SessionRecord) -> asyncio.Task[RunEnding]:
        return asyncio.ensure_future(self.run(session))

    async def busy(self, calls: int = 1, **wishes: Any) -> tuple[SessionRecord, *tuple[Any, ...]]:
        """A new session and its calls: one that is held up, and others that wait for it."""
        session = await self.keeper.create(ALICE, **wishes)
        self.wall.held[0].may_run.clear()
        running = [self.runs(session) for _ in range(calls)]
        await settle()
        return session, *running

    def state(self, session: SessionRecord, who: Principal = ALICE) -> tuple[str, str | None]:
        found = self.keeper.find(who, session.id)
        return found.state.value, found.why


@asynccontextmanager
async def bench(rows: SessionRows | None = None, **rules: Any) -> AsyncIterator[Bench]:
    made = Bench(rows, **rules)
    async with made.keeper:
        yield made


async def test_session_that_cannot_be_stored_leaves_no_container() -> None:
    async with bench() as made:
        made.rows.failure = InternalError("the disk is full")
        with pytest.raises(InternalError, match="disk is full"):
            await made.keeper.create(ALICE)
        assert made.keeper.list(ALICE) == []
        assert made.wall.held[0].lost is not None
        made.rows.failure = None
        await made.keeper.create(ALICE)


async def test_session_container_belongs_to_the_session_trust_domain() -> None:
    async with bench() as made:
        record = await made.keeper.create(ALICE, agent_id="writer")
        (place,) = made.wall.held
        assert place.domain == TrustDomain("alice", "writer", record.id)
        ending = await made.run(record)
        assert ending.isolation == "session"
        assert made.wall.runs[0].domain == place.domain


async def test_session_for_an_agent_of_another_principal_is_refused() -> None:
    async with bench() as made:
        with pytest.raises(ResourceNotFound):
            await made.keeper.create(ALICE, agent_id="others")
        assert made.wall.held == []


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"memory_mb": 64}, "memory_mb"),
        ({"memory_mb": 16_385}, "memory_mb"),
        ({"disk_mb": 0}, "disk_mb"),
        ({"disk_mb": 15}, "disk_mb"),
        ({"disk_mb": 10_241}, "disk_mb"),
        ({"cpus": 0.05}, "cpus"),
        ({"cpus": 8.5}, "cpus"),
        ({"idle_seconds": 1801}, "idle_seconds"),
        ({"idle_seconds": -1}, "idle_seconds"),
        ({"idle_seconds": math.nan}, "idle_seconds"),
        ({"lifetime_seconds": 14_401}, "lifetime_seconds"),
        ({"lifetime_seconds": -1}, "lifetime_seconds"),
        ({"image": "../python"}, "image"),
        ({"image": ""}, "image"),
        ({"env": {"A-B": "1"}}, "env"),
        ({"env": {"A\n": "1"}}, "env"),
        ({"env": {"A": 1}}, "env"),
        ({"env": {"A": "nul\0"}}, "env"),
        ({"env": {f"A{n}": "" for n in range(257)}}, "env"),
        ({"env": {"A": "x" * 40_000, "B": "x" * 40_000}}, "env"),
    ],
)
async def test_session_option_over_its_configured_limit_is_refused(
    wishes: dict[str, Any], field: str
) -> None:
    async with bench() as made:
        with pytest.raises(InvalidParams) as caught:
            await made.keeper.create(ALICE, **wishes)
        assert caught.value.fields == (field,)
        assert made.wall.held == []


async def test_session_options_within_limits_are_granted_with_memory_rounded_down() -> None:
    async with bench() as made:
        record = await made.keeper.create(
            ALICE, image="node", memory_mb=300, idle_seconds=60, lifetime_seconds=600
        )
        assert (record.image, record.memory_mb) == ("node", 256)
        assert record.expires_at == made.clock.now() + timedelta(seconds=60)


async def test_session_variables_come_before_those_of_a_call_and_only_names_are_shown() -> None:
    own = {"name": "B", "value": "of the call"}
    async with bench() as made:
        record = await made.keeper.create(ALICE, env={"A": "hidden", "B": "hidden, too"})
        for program in ("python", "files"):  # a program, and one of the engine
            async with made.keeper.lease(
                ALICE, None, record.id, language="python", memory_mb=None
            ) as place:
                await place.run(program, {"env": [own]}, LIMITS)
        of_program, of_engine = (run.arguments["env"] for run in made.wall.runs)
        assert of_program == [
            {"name": "A", "value": "hidden"}, {"name": "B", "value": "hidden, too"}, own
        ]  # fmt: skip
        assert of_engine == [own]
        ended = await made.keeper.end(ALICE, record.id)
        for shown in (record, ended):
            assert shown.env == ("A", "B")
            assert "hidden" not in shown.model_dump_json()


async def test_variables_of_an_ended_session_are_not_stored() -> None:
    async with bench() as made:
        record = await made.keeper.create(ALICE, env={"A": "hidden"})
        assert (home := made.rows.kept[record.id].home) is not None
        assert home.env == {"A": "hidden"}  # control
        assert "hidden" not in repr(made.rows.kept[record.id])
        await made.keeper.end(ALICE, record.id)
        assert made.rows.kept[record.id].home is None


async def test_session_of_another_principal_is_not_found() -> None:
    async with bench() as made:
        record = await made.keeper.create(ALICE, name="build")
        said = []
        for session_id in (record.id, "build", "other", "sess_" + "0" * 32):
            for ask in (
                lambda one: made.keeper.find(BOB, one),
                lambda one: made.keeper.examine(BOB, None, one),
                lambda one: made.keeper.lease(BOB, None, one, language=None, memory_mb=None),
            ):
                with pytest.raises(ResourceNotFound) as caught:
                    ask(session_id)
                said.append((caught.value.message, caught.value.details))
            for wait in (
                made.keeper.end, made.keeper.files, made.keeper.pause, made.keeper.resume,
            ):  # fmt: skip
                with pytest.raises(ResourceNotFound) as caught:
                    await wait(BOB, session_id)
                said.append((caught.value.message, caught.value.details))
        assert len(set(map(str, said))) == 1
        assert made.keeper.list(BOB) == []
        assert made.state(record) == ("active", None)


async def test_session_is_not_found_for_another_agent() -> None:
    async with bench() as made:
        record = await made.keeper.create(ALICE, agent_id="writer")
        for agent_id in ("reader", None):
            with pytest.raises(ResourceNotFound, match="no such session"):
                made.keeper.examine(ALICE, agent_id, record.id)
        made.keeper.examine(ALICE, "writer", record.id)


async def test_call_with_another_memory_size_than_its_session_is_refused() -> None:
    async with bench() as made:
        record = await made.keeper.create(ALICE)
        made.keeper.examine(ALICE, None, record.id, memory_mb=512)
        with pytest.raises(InvalidParams, match="512 MB"):
            made.keeper.examine(ALICE, None, record.id, memory_mb=1024)


async def test_calls_of_one_session_run_first_in_first_out() -> None:
    async with bench() as made:
        record, *running = await made.busy(5)
        assert made.keeper.find(ALICE, record.id).is_busy
        order: list[int] = []
        for number, call in enumerate(running):
            call.add_done_callback(lambda _, number=number: order.append(number))
        made.wall.held[0].may_run.set()
        await asyncio.gather(*running)
        assert order == [0, 1, 2, 3, 4]
        after = made.keeper.find(ALICE, record.id)
        assert (after.calls, after.is_busy) == (5, False)


async def test_call_of_a_busy_session_is_refused_after_the_queue_time() -> None:
    async with bench(queue_seconds=0.01) as made:
        record, running = await made.busy()
        with pytest.raises(SandboxUnavailable, match="busy with other calls") as caught:
            await made.run(record)
        assert caught.value.may_retry
        assert caught.value.retry_after_ms
        made.wall.held[0].may_run.set()
        assert (await running).ended_by is EndedBy.OK


async def test_call_over_the_queue_limit_of_a_session_is_refused() -> None:
    async with bench(waiting=1) as made:
        record, running, waiting = await made.busy(2)
        with pytest.raises(SandboxUnavailable, match="Too many calls wait"):
            await made.run(record)
        made.wall.held[0].may_run.set()
        await running
        await waiting


async def test_unused_session_ends_after_its_idle_time() -> None:
    async with bench(idle_seconds=100) as made:
        record = await made.keeper.create(ALICE)
        made.clock.advance(99)
        await made.run(record)
        made.clock.advance(99)
        made.keeper.tidy()
        assert made.state(record) == ("active", None)
        made.clock.advance(1)
        made.keeper.tidy()
        assert made.state(record) == ("ended", "It was not used for 100 s.")
        assert made.wall.held[0].lost is not None


async def test_idle_session_is_paused_until_its_next_call() -> None:
    async with bench(pause_seconds=60) as made:
        record = await made.keeper.create(ALICE)
        made.clock.advance(59)
        made.keeper.tidy()
        await settle()
        assert made.state(record) == ("active", None)
        made.clock.advance(1)
        made.keeper.tidy()
        await settle()
        assert made.state(record) == ("paused", None)
        assert made.keeper.counts["paused"] == 1
        assert (await made.run(record)).ended_by is EndedBy.OK
        assert made.state(record) == ("active", None)
        assert made.keeper.counts["active"] == 1
        await made.keeper.pause(ALICE, record.id)
        made.clock.advance(1800)
        made.keeper.tidy()
        assert made.state(record) == ("ended", "It was not used for 1800 s.")


async def test_session_is_paused_after_its_calls_and_resumed_by_hand() -> None:
    async with bench() as made:
        record, running = await made.busy()
        pausing = asyncio.ensure_future(made.keeper.pause(ALICE, record.id))
        await settle()
        assert made.state(record) == ("active", None)
        made.wall.held[0].may_run.set()
        assert (await running).ended_by is EndedBy.OK
        assert (await pausing).state.value == "paused"
        assert (await made.keeper.resume(ALICE, record.id)).state.value == "active"


async def test_unused_session_that_cannot_be_stopped_does_not_end_the_keeper() -> None:
    async with bench(max=2, max_per_principal=2, pause_seconds=900) as made:
        away = await made.keeper.create(ALICE, disk_mb=64, idle_seconds=60)

        async def fail(unless: object = None) -> None:
            raise SandboxUnavailable("The node cannot be reached.")

        made.wall.held[0].stop = fail
        other = await made.keeper.create(ALICE, disk_mb=64, idle_seconds=1800)
        made.clock.advance(60)
        for _ in range(3):
            made.keeper.tidy()
            await settle()
        told = [event for event, _ in made.events]
        assert told == ["session.created", "session.created", "session.not_stopped"]
        # A new session takes the place of one that can be stopped.
        assert (await made.keeper.create(ALICE)).state.value == "active"
        assert (made.state(away)[0], made.state(other)[0]) == ("active", "stopped")
        with pytest.raises(QuotaExceeded):
            await made.keeper.create(ALICE)


async def test_session_that_cannot_be_paused_continues() -> None:
    async with bench(pause_seconds=60) as made:
        record = await made.keeper.create(ALICE)

        async def fail() -> None:
            raise SandboxUnavailable("Docker does not answer.")

        made.wall.held[0].pause = fail
        made.clock.advance(60)
        for _ in range(3):
            made.keeper.tidy()
            await settle()
        assert [event for event, _ in made.events] == ["session.created", "session.not_paused"]
        assert (await made.run(record)).ended_by is EndedBy.OK


async def test_unused_session_with_a_disk_is_stopped_until_its_next_call() -> None:
    async with bench(idle_seconds=100) as made:
        record = await made.keeper.create(ALICE, disk_mb=100)
        made.clock.advance(100)
        made.keeper.tidy()
        await settle()
        assert made.state(record) == ("stopped", "It was not used for 100 s.")
        assert made.keeper.counts["stopped"] == 1
        assert (await made.run(record)).state == "restarted"
        assert made.state(record) == ("active", None)
        assert (await made.run(record)).state is None
        assert made.rows.kept[record.id].record.disk_mb == 100


async def test_only_a_session_with_a_disk_can_be_stopped_by_hand() -> None:
    async with bench() as made:
        record = await made.keeper.create(ALICE)
        with pytest.raises(InvalidParams, match="in memory"):
            await made.keeper.stop(ALICE, record.id)
        on_disk = await made.keeper.create(ALICE, disk_mb=100)
        assert (await made.keeper.stop(ALICE, on_disk.id)).state is SessionStatus.STOPPED
        assert (await made.keeper.resume(ALICE, on_disk.id)).state is SessionStatus.ACTIVE
        made.wall.held[1].lose_container()
        assert made.state(on_disk) == ("stopped", "Its container is gone.")


async def test_session_in_use_is_not_stopped() -> None:
    async with bench(idle_seconds=100) as made:
        record, running = await made.busy(disk_mb=100)
        made.clock.advance(1000)
        made.keeper.tidy()
        await settle()
        assert made.state(record)[0] == "active"
        made.wall.held[0].may_run.set()
        assert (await running).ended_by is EndedBy.OK


async def test_stopped_session_makes_room_and_needs_room_to_start_again() -> None:
    async with bench(max=2, max_per_principal=2, queue_seconds=0.2) as made:
        first = await made.keeper.create(ALICE, disk_mb=100)
        made.clock.advance(1)
        second = await made.keeper.create(BOB, disk_mb=100)
        made.clock.advance(1)
        third = await made.keeper.create(BOB)
        assert [made.state(first)[0], made.state(second, BOB)[0]] == ["stopped", "active"]
        assert (await made.run(first)).state == "restarted"
        assert [made.state(first)[0], made.state(second, BOB)[0]] == ["active", "stopped"]
        made.wall.held[0].may_run.clear()
        busy = made.runs(first)
        await settle()
        with pytest.raises(QuotaExceeded):
            await made.run(second, BOB)
        assert made.state(second, BOB)[0] == "stopped"
        waiting = asyncio.ensure_future(made.run(second, BOB))
        await settle()
        await made.keeper.end(BOB, third.id)
        assert (await waiting).state == "restarted"
        made.wall.held[0].may_run.set()
        await busy
        assert made.keeper.counts == {
            "active": 2, "paused": 0, "stopped": 0, "busy": 0, "creating": 0, "leaving": 0
        }  # fmt: skip


async def test_sessions_are_promised_three_quarters_of_the_hosts_memory() -> None:
    async with bench(max=9, max_per_principal=9) as made:
        made.wall.host_memory_mb = 8192
        first = await made.keeper.create(ALICE, memory_mb=2048)
        await made.keeper.create(ALICE, memory_mb=2048)
        on_disk = await made.keeper.create(BOB, memory_mb=2048, disk_mb=100)
        with pytest.raises(QuotaExceeded, match="4096 of 4608 for you"):
            await made.keeper.create(ALICE, memory_mb=1024)
        assert made.state(on_disk, BOB)[0] == "active"  # it would not have helped
        await made.keeper.create(BOB, memory_mb=2048)
        assert made.state(on_disk, BOB)[0] == "stopped"
        with pytest.raises(QuotaExceeded, match="6144 of 6144 MB are reserved"):
            await made.keeper.create(BOB, memory_mb=128)
        await made.keeper.end(ALICE, first.id)
        assert (await made.keeper.resume(BOB, on_disk.id)).state.value == "active"


async def test_session_that_ends_while_it_waits_for_a_place_takes_none() -> None:
    async with bench(max=1, max_per_principal=1, queue_seconds=5) as made:
        first = await made.keeper.create(ALICE, disk_mb=100)
        made.clock.advance(1)
        second = await made.keeper.create(ALICE, disk_mb=100)
        made.wall.held[1].may_run.clear()
        busy = made.runs(second)
        await settle()
        waiting = made.runs(first)
        await settle()
        await made.keeper.end(ALICE, first.id)
        with pytest.raises((ResourceNotFound, QuotaExceeded)):
            await waiting
        made.wall.held[1].may_run.set()
        await busy
        await made.keeper.end(ALICE, second.id)
        assert made.keeper.counts["creating"] == 0
        await made.keeper.create(ALICE)


async def test_session_that_starts_again_within_one_use_takes_its_place() -> None:
    """As one whose container is only then found to be gone."""
    async with bench(max=1, max_per_principal=1) as made:
        record = await made.keeper.create(ALICE, disk_mb=100)
        place = made.wall.held[0]

        async def until_free() -> None:
            if place.name != "new":
                place.lose_container()
                place.is_stopped, place.name = False, "new"

        place.until_free = until_free  # type: ignore[method-assign]
        await made.keeper.resume(ALICE, record.id)
        home = made.rows.kept[record.id].home
        assert home.container == "new"
        await made.keeper.create(ALICE)
        assert made.state(record)[0] == "stopped"  # there is one place


async def test_number_of_disks_is_limited_in_total_and_for_one_principal() -> None:
    async with bench(max_disks=3, max=9, max_per_principal=9) as made:
        for _ in range(2):
            last = await made.keeper.create(ALICE, disk_mb=100)
        with pytest.raises(QuotaExceeded, match="with a disk"):
            await made.keeper.create(ALICE, disk_mb=100)
        await made.keeper.create(ALICE)
        await made.keeper.create(BOB, disk_mb=100)
        with pytest.raises(QuotaExceeded, match="with a disk"):
            await made.keeper.create(BOB, disk_mb=100)
        await made.keeper.end(ALICE, last.id)
        await made.keeper.create(BOB, disk_mb=100)


async def test_name_stands_for_the_id_of_its_owners_session() -> None:
    async with bench() as made:
        record = await made.keeper.create(ALICE, name="build")
        other = await made.keeper.create(BOB, name="build")
        assert made.keeper.find(ALICE, "build") == record
        assert made.keeper.find(BOB, "build") == other
        for name in ("build", "new", "Build", "sess_0", "", "a" * 64):
            with pytest.raises(InvalidParams) as caught:
                await made.keeper.create(ALICE, name=name)
            assert caught.value.fields == ("name",)
        assert (await made.keeper.end(ALICE, "build")).state is SessionStatus.ENDED
        assert made.keeper.find(ALICE, "build").id == record.id
        again = await made.keeper.create(ALICE, name="build")
        assert made.keeper.find(ALICE, "build").id == again.id
        assert made.keeper.id_of(ALICE, "build") == again.id


async def test_lost_session_keeps_its_name_and_says_when_and_why_it_was_lost() -> None:
    rows = SessionRows()
    async with bench(rows) as made:
        for _ in range(2):  # a name means the last one
            record = await made.keeper.create(ALICE, name="build")
            made.clock.advance(60)
            made.wall.held[-1].lose("its container is gone")
        lost_at = made.clock.now()
        wanted = f"its container is gone ({lost_at:%Y-%m-%d %H:%M:%S} UTC)"
        for reference in ("build", record.id):
            found = made.keeper.find(ALICE, reference)
            assert (found.id, found.name, found.state.value) == (record.id, "build", "lost")
            assert (found.why, found.expires_at) == ("Its container is gone.", lost_at)
            with pytest.raises(ResourceNotFound, match="The session is lost: ") as caught:
                made.keeper.examine(ALICE, None, reference)
            assert wanted in caught.value.message
            with pytest.raises(ResourceNotFound, match="no such session"):
                made.keeper.find(BOB, reference)
        assert made.keeper.id_of(BOB, "build") == "build"
    async with bench(rows) as again:  # also after a restart
        assert again.keeper.find(ALICE, "build").id == record.id


async def test_what_a_killed_engine_left_of_uploads_is_removed_before_a_program_runs() -> None:
    """Once, at the first use. Later only what a request has left that did not end well."""

    def requests(made: Bench) -> list[tuple[str, Any]]:
        return [(run.program, run.arguments.get("uploads")) for run in made.wall.runs]

    rows = SessionRows()
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    made = Bench(rows, wall)
    async with made.keeper:
        record = await made.keeper.create(ALICE)
        await made.run(record)
        assert requests(made) == [("python", None)]
        await made.run(record, program="files")
        wall.answer = lambda run: RunEnding(EndedBy.WALL_TIME, "session")
        await made.run(record, program="files")
        wall.answer = always_four
        wall.runs.clear()
        for _ in range(2):
            await made.run(record)
        assert requests(made) == [("files", False), ("python", None), ("python", None)]
    again = Bench(rows, wall)
    wall.runs.clear()
    async with again.keeper:
        for _ in range(2):
            await again.run(record)
        assert requests(again) == [("files", True), ("python", None), ("python", None)]


async def test_forgotten_session_gives_its_name_up() -> None:
    async with bench() as made:
        await made.keeper.create(ALICE, name="build")
        await made.keeper.end(ALICE, "build")
        made.clock.advance(86_401)
        made.keeper.tidy()
        with pytest.raises(ResourceNotFound, match="no such session"):
            made.keeper.find(ALICE, "build")


async def test_call_that_waited_for_an_ended_session_does_not_run_in_the_next_of_its_name() -> None:
    async with bench() as made:
        session, running, *_ = await made.busy(name="build")
        lease = made.keeper.lease(ALICE, None, "build", language=None, memory_mb=None)

        async def wait() -> None:
            async with lease as place:
                await place.run("python", {}, LIMITS)

        waiting = asyncio.ensure_future(wait())
        await settle()
        await made.keeper.end(ALICE, "build")
        await made.keeper.create(ALICE, name="build")
        made.wall.held[0].may_run.set()
        with pytest.raises(ResourceNotFound, match="its owner ended it"):
            await waiting
        await running
        assert all(run.domain.session_id == session.id for run in made.wall.runs)


async def test_name_is_taken_while_its_session_is_created() -> None:
    async with bench() as made:
        wishes = [made.keeper.create(ALICE, name="build") for _ in range(3)]
        made_ones = await asyncio.gather(*wishes, return_exceptions=True)
        assert sorted(type(one).__name__ for one in made_ones) == [
            "InvalidParams", "InvalidParams", "SessionRecord",
        ]  # fmt: skip


async def test_expired_session_is_refused_before_it_is_cleaned_up() -> None:
    async with bench(idle_seconds=100) as made:
        record = await made.keeper.create(ALICE)
        made.clock.advance(100)
        with pytest.raises(ResourceNotFound, match="has ended: it was not used") as caught:
            await made.run(record)
        assert caught.value.details == {"state": "ended"}
        assert made.wall.runs == []


async def test_busy_session_ends_after_its_call_once_its_lifetime_is_over() -> None:
    async with bench(idle_seconds=50, lifetime_seconds=100) as made:
        record, running, waiting = await made.busy(2)
        made.clock.advance(100)
        made.keeper.tidy()
        assert made.state(record)[0] == "active"
        with pytest.raises(ResourceNotFound, match="its lifetime is over"):
            await made.run(record)
        made.wall.held[0].may_run.set()
        assert (await running).ended_by is EndedBy.OK
        with pytest.raises(ResourceNotFound, match="its lifetime is over"):
            await waiting
        assert made.state(record) == ("ended", "Its lifetime is over.")
        assert len(made.wall.runs) == 1


async def test_idle_session_ends_by_itself() -> None:
    made = Bench(idle_seconds=0.01)
    clock = asyncio.get_running_loop().time
    made.keeper._clock = SessionClock(made.clock.now, clock)
    async with made.keeper:
        record = await made.keeper.create(ALICE)
        with anyio.fail_after(DEADLINE_S):
            await made.wall.held[0].ended.wait()
        assert made.state(record)[0] == "ended"


async def test_owner_ends_a_session_with_the_call_in_it() -> None:
    async with bench() as made:
        record, running, waiting = await made.busy(2)
        over = await made.keeper.end(ALICE, record.id)
        assert (over.state, over.why) == (SessionStatus.ENDED, "Its owner ended it.")
        assert made.rows.kept[record.id].record == over
        assert (await running).ended_by is EndedBy.CANCELLED
        with pytest.raises(ResourceNotFound, match="has ended: its owner ended it"):
            await waiting
        assert (await made.keeper.end(ALICE, record.id)) == over  # again


async def test_container_lost_while_its_session_is_stored_fails_the_creation() -> None:
    async with bench() as made:

        async def lose(put: list[KeptSession], delete: list[str]) -> None:
            made.wall.held[0].lose()

        made.rows.change = lose  # type: ignore[method-assign]
        with pytest.raises(SandboxUnavailable, match="lost while it was being created"):
            await made.keeper.create(ALICE)
        (record,) = made.keeper.list(ALICE)
        assert record.state is SessionStatus.LOST


async def test_container_lost_while_its_session_with_a_disk_is_stored_takes_no_place() -> None:
    async with bench(max=1) as made:
        change = made.rows.change

        async def lose(put: list[KeptSession], delete: list[str]) -> None:
            made.rows.change = change  # type: ignore[method-assign]
            made.wall.held[0].lose_container()

        made.rows.change = lose  # type: ignore[method-assign]
        record = await made.keeper.create(ALICE, disk_mb=100)
        assert record.state is SessionStatus.STOPPED
        assert (await made.keeper.create(ALICE)).state is SessionStatus.ACTIVE


async def test_refused_session_does_not_count_towards_the_limits() -> None:
    async with bench(max=1, max_per_principal=1) as made:
        with pytest.raises(SandboxUnavailable):
            await made.keeper.create(ALICE, image="nothing")
        await made.keeper.create(ALICE)


async def test_stopping_engine_ends_all_sessions() -> None:
    rows = SessionRows()
    async with bench(rows) as made:
        record, running = await made.busy()
    assert (await running).ended_by is EndedBy.CANCELLED
    over = rows.kept[record.id].record
    assert (over.state, over.why) == (SessionStatus.ENDED, "The engine was stopped.")
    with pytest.raises(SandboxUnavailable):
        await made.keeper.create(ALICE)


@pytest.mark.parametrize("how", ["an orderly stop", "a kill"])
async def test_next_engine_continues_the_sessions_with_a_higher_epoch(how: str) -> None:
    rows, wall = SessionRows(), FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    first = Bench(rows, wall)
    async with first.keeper:
        record = await first.keeper.create(ALICE)
        killed = dict(rows.kept)
        await first.run(record)
    if how == "a kill":
        rows.kept = killed
    again = Bench(rows, wall)
    again.clock.advance(600)
    async with again.keeper:
        home = rows.kept[record.id].home
        assert wall.held[0].epoch == home.epoch == FIRST_EPOCH + 1
        assert again.state(record) == ("active", None)
        assert (await again.run(record)).ended_by is EndedBy.OK
        calls = again.keeper.find(ALICE, record.id).calls
        assert calls == (2 if how == "an orderly stop" else 1)
        assert again.keeper.counts["active"] == 1


async def test_value_of_a_part_lasts_as_long_as_its_session() -> None:
    rows, wall = SessionRows(), FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    async with Bench(rows, wall).keeper as keeper:
        record = await keeper.create(ALICE, disk_mb=100)
        shop = {"directory": "/home/a/shop"}
        assert (await keeper.keep(record.id, "project", shop)).project == "shop"
        await keeper.keep(record.id, "lunch", {"at": 11})
        assert (await keeper.keep(record.id, "lunch", {"at": 12})).project == "shop"
        with pytest.raises(ResourceNotFound):
            await keeper.keep("sess_unknown", "lunch", {})
        for own in ("must_restore", "env", "of_parts"):
            with pytest.raises(ValueError, match="which is the kernel's"):
                await keeper.keep(record.id, own, {})
    async with Bench(rows, wall).keeper as keeper:
        kept = {"project": shop, "lunch": {"at": 12}}
        assert rows.kept[record.id].home.of_parts == kept
        assert keeper.find(ALICE, record.id).project == "shop"
        await keeper.end(ALICE, record.id)
        assert rows.kept[record.id].home is None


async def test_part_gives_its_executors_an_object_for_each_turn() -> None:
    seen: list[SessionAccess] = []

    def count(kept: SessionAccess) -> list[int] | None:
        seen.append(kept)
        return [kept.values["count"]["n"]] if "count" in kept.values else None

    async with bench(in_session=[lambda kept: None, count]) as made:
        session = await made.keeper.create(ALICE)
        async with await made.keeper.files(ALICE, session.id) as lease:
            assert isinstance(lease, SessionLease)
            assert lease.part(list) is None
            await seen[0].keep("count", {"n": 4})
        async with await made.keeper.files(ALICE, session.id) as lease:
            assert isinstance(lease, SessionLease)
            assert (lease.part(list), lease.part(dict)) == ([4], None)
    assert [one.session_id for one in seen] == [session.id] * 2


async def test_parts_prepare_each_new_container_before_a_program_runs_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int]] = []

    async def prepare(access: SessionAccess, container: SessionContainer) -> None:
        seen.append((container.name, len(made.wall.runs)))
        assert (access.session_id, container) == (session.id, made.wall.held[0])
        async with access.visit() as visited:
            assert visited is container

    async with bench(in_new_container=[prepare]) as made:
        session = await made.keeper.create(ALICE, disk_mb=100)
        await made.run(session)
        assert seen == []  # the first container is not one that follows another
        await made.keeper.stop(ALICE, session.id)
        place, before = made.wall.held[0], made.wall.held[0].until_free

        async def until_free() -> None:
            await before()
            place.name = "another"

        monkeypatch.setattr(place, "until_free", until_free)
        await made.run(session)
        assert seen == [("another", 1)]
        await made.run(session)
        assert len(seen) == 1


async def test_access_beside_calls_is_for_the_owner_of_a_session_that_goes_on() -> None:
    async with bench() as made:
        session = await made.keeper.create(ALICE)
        with pytest.raises(ResourceNotFound):
            made.keeper.access(BOB, session.id)
        looking = made.keeper.access(ALICE, session.id, is_use=False)
        await made.keeper.pause(ALICE, session.id)
        made.clock.advance(1)
        async with looking.visit() as container:
            assert container.is_paused  # a look does not thaw it
        assert made.keeper.find(ALICE, session.id).last_used_at < made.clock.now()
        using = made.keeper.access(ALICE, session.id)
        async with using.visit() as container:
            assert not container.is_paused
            assert made.keeper.find(ALICE, session.id).state == "active"
        assert made.keeper.find(ALICE, session.id).last_used_at == made.clock.now()
        await made.keeper.end(ALICE, session.id)
        with pytest.raises(ResourceNotFound):
            async with using.visit():
                pytest.fail("it has ended")


async def test_stopped_session_of_an_earlier_engine_takes_no_place() -> None:
    rows, wall = SessionRows(), FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    async with Bench(rows, wall).keeper as keeper:
        record = await keeper.create(ALICE, disk_mb=100)
        await keeper.stop(ALICE, record.id)
    again = Bench(rows, wall, max=1)
    async with again.keeper:
        assert again.state(record) == ("stopped", "Its owner stopped it.")
        await again.keeper.end(ALICE, (await again.keeper.create(ALICE)).id)
        assert (await again.run(record)).state == "restarted"


async def test_idle_time_of_a_session_continues_while_no_engine_runs() -> None:
    rows, wall = SessionRows(), FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    async with Bench(rows, wall).keeper as keeper:
        record = await keeper.create(ALICE, idle_seconds=60)
    again = Bench(rows, wall)
    again.clock.advance(61)
    async with again.keeper:
        await settle()
        assert again.state(record) == ("ended", "It was not used for 60 s.")
        assert wall.held[0].lost is not None


async def test_clock_that_was_set_back_gives_a_session_one_lifetime_at_most() -> None:
    rows, wall = SessionRows(), FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    async with Bench(rows, wall).keeper as keeper:
        record = await keeper.create(ALICE, lifetime_seconds=60)
    again = Bench(rows, wall)
    again.clock.moment -= timedelta(days=365)
    async with again.keeper:
        assert again.state(record) == ("active", None)
        again.clock.advance(61)
        with pytest.raises(ResourceNotFound, match="its lifetime is over"):
            again.keeper.examine(ALICE, None, record.id, language="python")


async def test_engine_that_keeps_no_sessions_reports_those_left_active_as_lost() -> None:
    rows = SessionRows()
    async with bench(rows) as made:
        record = await made.keeper.create(ALICE)
        left = dict(rows.kept)
    rows.kept = left  # as if it had been killed
    async with bench(rows) as again:
        assert again.state(record) == ("lost", "The engine was restarted.")
        assert again.rows.kept[record.id].record.state is SessionStatus.LOST
        with pytest.raises(ResourceNotFound, match="is lost: the engine was restarted"):
            again.keeper.examine(ALICE, None, record.id)
        with pytest.raises(ResourceNotFound, match="no such session"):
            again.keeper.find(BOB, record.id)


async def test_ended_session_is_reported_for_a_day() -> None:
    async with bench() as made:
        record = await made.keeper.create(ALICE)
        await made.keeper.end(ALICE, record.id)
        made.clock.advance(86_400)
        made.keeper.tidy()
        assert made.state(record)[0] == "ended"
        made.clock.advance(1)
        made.keeper.tidy()
        with pytest.raises(ResourceNotFound, match="no such session"):
            made.keeper.find(ALICE, record.id)
        await made.keeper.create(ALICE)  # writes what waits
        assert record.id not in made.rows.kept


async def test_failed_write_of_a_session_end_is_repeated() -> None:
    async with bench() as made:
        record = await made.keeper.create(ALICE)
        made.rows.failure = InternalError("the disk is full")
        with pytest.raises(InternalError, match="disk is full"):
            await made.keeper.end(ALICE, record.id)
        assert made.state(record)[0] == "ended"
        assert made.wall.held[0].lost is not None
        made.rows.failure = None
        await made.keeper.create(ALICE)
        assert made.rows.kept[record.id].record.state is SessionStatus.ENDED


async def test_run_in_an_ended_session_takes_no_place_from_another() -> None:
    async with bench(max=2, max_per_principal=2) as made:
        ended = await made.keeper.create(ALICE)
        unused = await made.keeper.create(ALICE, disk_mb=16)
        lease = made.keeper.lease(ALICE, None, ended.id, language="python", memory_mb=None)
        async with lease as place:
            await made.keeper.end(ALICE, ended.id)
            await made.keeper.create(ALICE)
            with pytest.raises(ResourceNotFound):
                await place.run("python", {}, LIMITS)
        assert made.state(unused)[0] == "active"


async def test_nothing_is_prepared_in_a_new_container_that_is_too_weak() -> None:
    """A part would start the session's processes there."""
    prepared: list[str] = []

    async def prepare(access: SessionAccess, container: SessionContainer) -> None:
        prepared.append(container.name)

    wall = FakeWall(limits=CONTAINER_LIMITS)
    made = Bench(wall=wall, in_new_container=[prepare])
    async with made.keeper as keeper:
        session = await keeper.create(ALICE, disk_mb=64, least_grade=Grade.NAMESPACES)
        place = wall.held[0]
        for grade, is_refused in ((Grade.WATCHED, True), (None, True), (Grade.NAMESPACES, False)):

            async def start(grade: Grade | None = grade) -> None:
                place.is_stopped, place.grade, place.name = False, grade, f"again-{grade}"

            await place.stop()
            place.until_free = start  # type: ignore[method-assign]
            if is_refused:
                with pytest.raises(SandboxUnavailable) as caught:
                    await made.run(session)
                assert caught.value.may_retry is (grade is None)
                with pytest.raises(SandboxUnavailable):
                    async with keeper.access(ALICE, session.id).visit():
                        pass
                assert (prepared, wall.runs) == ([], [])
            else:
                await made.run(session)
        assert prepared == ["again-namespaces"]
