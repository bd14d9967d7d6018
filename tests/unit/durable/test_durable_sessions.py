"""Durable sessions: what is saved after a call, what a crash or a failing store leaves, and what
comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
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
    StateUnavailable,
)
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.session import SessionRecord
from fumehood.durable.saver import SessionSaver
from fumehood.executors import workspace_guest
from fumehood.executors.endings import state_words
from fumehood.processes.service import SessionProcesses
from fumehood.sandbox.sessions import SessionClock, SessionKeeper
from fumehood.sandbox.settings import SessionSettings
from fumehood.sandbox.wall import RunEnding
from fumehood.snapshots.service import Snapshots
from fumehood.storage.files import SavedFiles
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall, ManualClock, SeenRun
from support.fake_files import FakeFiles
from support.session_rows import SessionRows
from support.wait import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.row("S6", "B10")]

ALICE = Principal("alice")
LIMITS = Limits(wall_s=5, cpu_s=5, memory_mb=512, output_bytes=1000)

Change = Callable[[Path], object]


class Store(SavedFiles):
    """Counts what is put, and fails or stops the engine when it is told to."""

    def __init__(self, shared: Path) -> None:
        super().__init__(shared, None, "sessions")
        self.place = shared / "sessions"
        self.put_names: list[str] = []
        self.failure: BaseException | None = None
        self.dies_after: int | None = None
        """Number of calls of `put` after which the engine is killed."""

    async def put(self, contents: Any) -> None:
        if self.failure is not None:
            raise self.failure
        if self.dies_after == 0:
            raise Killed
        if self.dies_after is not None:
            self.dies_after -= 1
        self.put_names += contents
        await super().put(contents)

    @property
    def kept(self) -> set[str]:
        return {path.name for path in self.place.iterdir()} if self.place.exists() else set()


class Killed(BaseException):
    """Stands for SIGKILL: nothing that catches errors of the engine catches it."""


class Rows(SessionRows):
    is_killed = False
    """Whether nothing is written any more."""

    async def change(self, put: Any, delete: Any) -> None:
        if self.is_killed:
            raise Killed
        await super().change(put, delete)


class Bench:
    """An engine whose programs change real directories, one for each container."""

    def __init__(
        self, home: Path, rows: Rows, wall: FakeWall | None = None, *, saves: bool = True,
        **rules: Any,
    ) -> None:  # fmt: skip
        self.home = home
        self.rows = rows
        self.clock = ManualClock()
        self.store = Store(home)
        self.change: Change = lambda workspace: None
        self.requests: list[str] = []
        self.wall = wall or FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
        self.wall.answer = self._answer
        self.events: list[str] = []
        self.keeper = SessionKeeper(
            self.wall,
            rows,
            SessionSettings.model_construct(**{"image": "python", **rules}),
            SessionClock(self.clock.now, self.clock.monotonic),
            lambda principal, agent: (),
            kept=list(rows.kept.values()),
            saver=SessionSaver(self.store) if saves else None,
            on_event=lambda event, values: self.events.append(event),
        )
        self.snapshots = Snapshots(self.keeper, self.wall, self.clock.now)

    def workspace(self, place: FakePlace | None = None) -> Path:
        path = self.home / (place or self.wall.held[-1]).name
        path.mkdir(exist_ok=True)
        return path

    def _answer(self, run: SeenRun) -> RunEnding:
        if run.program == "files":
            self.requests.append(run.arguments["do"])
            result = FakeFiles(self.workspace()).answer(run.arguments)
            return RunEnding(EndedBy.OK, "session", exit_code=0, result=result)
        self.change(self.workspace())
        four: JsonObject = {"value": 4, "has_value": True, "value_repr": "4"}
        return RunEnding(EndedBy.OK, "session", exit_code=0, result=four, state="kept")

    async def run(self, session: SessionRecord, change: Change = lambda _: None) -> RunEnding:
        self.change = change
        self.requests.clear()
        self.store.put_names.clear()
        self.clock.advance(1)
        lease = self.keeper.lease(ALICE, None, session.id, language="python", memory_mb=None)
        with anyio.fail_after(DEADLINE_S):
            async with lease as place:
                return await place.run("python", {}, LIMITS)

    async def lose_and_read(self, session: SessionRecord) -> dict[str, bytes]:
        """Lose the container, and return the files after the next call."""
        self.wall.held[-1].lose()
        ending = await self.run(session)
        assert ending.state == "restored"
        return files_in(self.workspace())


def files_in(workspace: Path) -> dict[str, bytes]:
    found = sorted(path for path in workspace.rglob("*") if path.is_file())
    return {str(path.relative_to(workspace)): path.read_bytes() for path in found}


@asynccontextmanager
async def bench(home: Path, rows: Rows | None = None, **rules: Any) -> AsyncIterator[Bench]:
    made = Bench(home, rows or Rows(), **rules)
    try:
        async with made.keeper:
            yield made
    finally:
        made.store.close()


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Files never change twice in a tick here or in memory, so each of their versions counts."""
    monkeypatch.setattr("fumehood.guest.container.files.RECENT_NS", 0)
    monkeypatch.setattr("fumehood.guest.container.files.PROC", str(tmp_path_factory.mktemp("proc")))


def write(**files: str | bytes) -> Change:
    def change(workspace: Path) -> None:
        for name, content in files.items():
            raw = content if isinstance(content, bytes) else content.encode()
            (workspace / name).write_bytes(raw)

    return change


async def test_changed_files_are_saved_before_the_answer_and_restored_with_the_moment(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        assert (session.durable, session.saved_at) == (True, session.created_at)
        assert (await made.run(session, write(a="1", b="2"))).not_saved is None
        saved_at = made.keeper.find(ALICE, session.id).saved_at
        assert saved_at == made.clock.now()
        row = made.rows.kept[session.id]
        assert row.home.copy.manifest in made.store.kept
        made.wall.held[-1].lose()
        lost = made.keeper.find(ALICE, session.id)
        assert (lost.state, lost.why) == ("stopped", "Its stream ended.")
        assert made.keeper.counts["stopped"] == 1
        ending = await made.run(session)
        assert (ending.state, ending.copied_at) == ("restored", saved_at)
        assert files_in(made.workspace()) == {"a": b"1", "b": b"2"}
        again = made.keeper.find(ALICE, session.id)
        assert (again.state, again.restored_at) == ("active", made.clock.now())
        moved = made.rows.kept[session.id].home
        assert moved.container == made.wall.held[-1].name
        assert (await made.run(session)).state == "kept"
        assert made.events == ["session.created", "session.stopped", "session.restored"]


async def test_unchanged_workspace_costs_one_listing_and_stores_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        await made.run(session, write(a="1"))
        before = made.keeper.find(ALICE, session.id).saved_at
        await made.run(session)
        assert (made.requests, made.store.put_names) == (["scan"], [])
        assert made.keeper.find(ALICE, session.id).saved_at == before
        async with await made.keeper.files(ALICE, session.id) as lease:
            await lease.run("files", {"do": "list", "path": "", "recursive": 0, "most": 9}, LIMITS)
        assert made.requests == ["scan", "list"]


def _same_size_and_time(workspace: Path) -> None:
    path = workspace / "a"
    times = path.stat()
    path.write_text("4")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _replaced(workspace: Path) -> None:
    (workspace / "new").write_text("3")
    os.utime(workspace / "new", ns=(0, (workspace / "a").stat().st_mtime_ns))
    (workspace / "new").rename(workspace / "a")


@pytest.mark.parametrize(
    ("change", "puts"),
    [
        (write(a="4"), 2),
        (_same_size_and_time, 2),
        (_replaced, 2),
        (lambda workspace: (workspace / "a").unlink(), 1),
        (lambda workspace: (workspace / "a").rename(workspace / "c"), 1),
        (lambda workspace: (workspace / "a").chmod(0o755), 1),
        (lambda workspace: (workspace / "empty" / "deep").mkdir(parents=True), 1),
        (write(twin="1"), 1),
        (write(a=""), 1),
        (write(large=os.urandom(9_000_000)), 4),
        (write(**{f"f{n}": str(n) for n in range(1500)}), 1501 - 2),
    ],
)  # fmt: skip
async def test_each_change_is_saved_and_no_content_twice(
    change: Change, puts: int, tmp_path: Path
) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True, memory_mb=512)
        await made.run(session, write(a="1", b="2"))
        ending = await made.run(session, change)
        assert (ending.not_saved, len(made.store.put_names)) == (None, puts)
        workspace = made.workspace()
        expected, can_run = files_in(workspace), os.access(workspace / "a", os.X_OK)
        assert await made.lose_and_read(session) == expected
        assert os.access(made.workspace() / "a", os.X_OK) == can_run
        assert (made.workspace() / "empty" / "deep").is_dir() == (workspace / "empty").is_dir()
        assert made.store.put_names == []  # the copy is that of the new container


async def test_pieces_that_no_copy_needs_go_and_all_of_them_with_the_session(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        for n in range(5):
            await made.run(session, write(a=str(n)))
        assert len(made.store.kept) == 2
        await made.keeper.end(ALICE, session.id)
        with anyio.fail_after(DEADLINE_S):
            while made.store.kept:
                await anyio.sleep(0.01)


@pytest.mark.parametrize(
    "failure", [StateUnavailable("Away."), OSError(28, "No space left on device")]
)
async def test_failed_copy_is_reported_and_the_earlier_one_stays(
    failure: BaseException, tmp_path: Path
) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        await made.run(session, write(a="1"))
        before = made.keeper.find(ALICE, session.id).saved_at
        made.store.failure = failure
        ending = await made.run(session, write(a="2"))
        assert (ending.ended_by, ending.not_saved is not None) == (EndedBy.OK, True)
        assert made.keeper.find(ALICE, session.id).saved_at == before
        assert "session.not_saved" in made.events
        made.store.failure = None
        assert await made.lose_and_read(session) == {"a": b"1"}
        await made.run(session, write(a="3"))
        assert await made.lose_and_read(session) == {"a": b"3"}


async def test_row_that_may_be_written_keeps_both_copies_complete(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        await made.run(session, write(a="1"))
        made.rows.failure = InternalError("the disk is full")
        assert (await made.run(session, write(a="2"))).not_saved is not None
        assert len(made.store.kept) == 4
        made.rows.failure = None
        await made.run(session, write(a="3"))
        assert len(made.store.kept) == 2


@pytest.mark.parametrize("steps", range(4))
async def test_engine_killed_at_any_step_leaves_the_last_complete_copy(
    steps: int, tmp_path: Path
) -> None:
    """Killed before the pieces, before the manifest, before the row, after the row."""
    rows = Rows()
    made = Bench(tmp_path, rows)
    sessions: list[SessionRecord] = []

    async def until_killed() -> None:
        async with made.keeper:
            sessions.append(await made.keeper.create(ALICE, durable=True))
            await made.run(sessions[0], write(a="1", b="2"))
            made.store.dies_after = steps if steps < 2 else None
            made.rows.is_killed = steps == 2
            if steps == 3:
                made.store.delete = _die  # type: ignore[method-assign]
            await made.run(sessions[0], write(a="3", c="4"))

    with pytest.raises((Killed, BaseExceptionGroup)) as death:
        await until_killed()
    assert "Killed" in repr(death.value)
    (session,) = sessions
    rows.is_killed = False
    after = Bench(tmp_path, rows, made.wall)
    async with after.keeper:
        after.wall.held[-1].lose("its host is gone")
        old = {"a": b"1", "b": b"2"}
        new = {"a": b"3", "b": b"2", "c": b"4"}
        assert await after.lose_and_read(session) == (new if steps == 3 else old)
        await after.run(session, write(a="5"))
        assert len(after.store.kept) == (4 if steps == 3 else 3)  # nothing of the killed attempt
    made.store.close()
    after.store.close()


async def _die(names: object) -> None:
    raise Killed


async def test_missing_piece_loses_the_session_by_name_but_a_missing_place_does_not(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        await made.run(session, write(a="1"))
        kept = tmp_path / "kept"
        made.store.place.rename(kept)  # as if it were not mounted
        made.wall.held[-1].lose()
        with pytest.raises(StateUnavailable):
            await made.run(session)
        made.store.place.rmdir()
        kept.rename(made.store.place)
        home = made.rows.kept[session.id].home
        (piece,) = made.store.kept - {home.copy.manifest}
        (made.store.place / piece).write_bytes(b"2")
        with pytest.raises(ResourceNotFound, match="a piece of the file a is missing or damaged"):
            await made.run(session)
        assert made.keeper.find(ALICE, session.id).state == "lost"


async def test_restoring_that_fails_is_tried_again_at_the_next_use(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        await made.run(session, write(a="1"))
        made.wall.held[-1].lose()
        images, made.wall.images = made.wall.images, {}
        with pytest.raises(SandboxUnavailable):
            await made.run(session)
        made.wall.images = images
        made.rows.failure = InternalError("the disk is full")
        with pytest.raises(InternalError):
            await made.run(session, write(a="2"))
        assert files_in(made.workspace()) == {"a": b"1"}  # nothing ran
        made.rows.failure = None
        assert (await made.run(session)).state == "restored"
        assert made.keeper.counts["active"] == 1


async def test_call_in_a_lost_container_says_which_files_come_back(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        await made.run(session, write(a="1"))
        saved_at = made.keeper.find(ALICE, session.id).saved_at
        made.wall.held[-1].may_run.clear()
        running = asyncio.ensure_future(made.run(session))
        await anyio.sleep(0.05)
        made.wall.held[-1].lose()
        ending = await running
        assert (ending.ended_by, ending.copied_at) == (EndedBy.SANDBOX_LOST, saved_at)


@pytest.mark.parametrize("lost_before", [False, True])
async def test_call_whose_container_is_lost_while_its_files_are_saved_kept_its_variables(
    tmp_path: Path, lost_before: bool
) -> None:
    """What is gone is told by the next call. The call before may have told another loss."""

    async def lose(run: SeenRun, sinks: Any) -> None:
        if run.program == "files" and run.arguments["do"] != "receive":
            made.wall.held[-1].lose("its container is gone")

    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        await made.run(session, write(a="1"))
        saved_at = made.keeper.find(ALICE, session.id).saved_at
        if lost_before:
            made.wall.held[-1].lose()

        def change(workspace: Path) -> None:
            write(a="2")(workspace)
            made.wall.meanwhile = lose

        ending = await made.run(session, change)
        assert ending.ended_by is EndedBy.OK
        assert ending.state == ("restored" if lost_before else "kept")
        assert ending.not_saved == "its container was lost meanwhile"
        (words,) = state_words(replace(ending, state="kept"))
        assert words.endswith("(its container was lost meanwhile); if the session is restored, it "
                              "gets the files of an earlier copy")  # fmt: skip
        found = made.keeper.find(ALICE, session.id)
        assert (found.state.value, found.why) == ("stopped", "Its container is gone.")
        made.wall.meanwhile = None
        after = await made.run(session)
        assert (after.state, after.copied_at) == ("restored", saved_at)
        assert (made.workspace() / "a").read_bytes() == b"1"
        assert (await made.run(session)).state == "kept"


async def test_cancelled_call_is_saved_as_well(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        has_written = asyncio.Event()

        async def never(run: SeenRun, sinks: Any) -> None:
            if run.program == "python":
                write(half="done")(made.workspace())
                has_written.set()
                await asyncio.Event().wait()

        made.wall.meanwhile = never
        running = asyncio.ensure_future(made.run(session))
        await has_written.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        made.wall.meanwhile = None
        assert await made.lose_and_read(session) == {"half": b"done"}


async def test_too_many_or_too_large_files_are_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_guest, "MAX_FILES", 100)

    def sparse(workspace: Path) -> None:
        for path in workspace.iterdir():
            path.unlink()
        with (workspace / "hole").open("wb") as file:
            file.truncate(1 << 40)

    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)
        ending = await made.run(session, write(**{f"f{n}": "" for n in range(101)}))
        assert ending.not_saved == "the workspace has more than 100 files and directories"
        ending = await made.run(session, sparse)
        assert "have holes" in (ending.not_saved or "")
        assert made.store.kept == set()


async def test_file_that_grows_while_it_is_read_is_not_saved(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True)

        async def grow(run: SeenRun, sinks: Any) -> None:
            if run.arguments.get("do", "").startswith("read"):
                with (made.workspace() / "log").open("ab") as file:
                    file.write(b"more")

        made.wall.meanwhile = grow
        for size in (10, 1_000_000):
            ending = await made.run(session, write(log=b"x" * size))
            assert ending.not_saved == "log changed while it was read"
        assert made.store.kept == set()


async def test_engine_without_the_saver_keeps_durable_sessions_and_does_not_use_them(
    tmp_path: Path,
) -> None:
    rows = Rows()
    async with bench(tmp_path, rows) as made:
        session = await made.keeper.create(ALICE, durable=True, idle_seconds=60)
        plain = await made.keeper.create(ALICE)
        made.wall.held.reverse()  # its container is the last one
        await made.run(session, write(a="1"))
    without = Bench(tmp_path, rows, made.wall, saves=False)
    async with without.keeper as keeper:
        found = keeper.find(ALICE, session.id)
        assert (found.state, found.durable) == ("active", True)
        with pytest.raises(InvalidParams, match="Durable sessions need an engine with state"):
            await keeper.create(ALICE, durable=True)
        for use in (
            without.run(session),
            keeper.resume(ALICE, session.id),
            SessionProcesses(keeper.access(ALICE, session.id)).ask({"do": "list"}),
        ):
            with pytest.raises(SandboxUnavailable, match="is missing") as refused:
                await use
            assert not refused.value.may_retry
        access = keeper.access(ALICE, session.id, is_use=False)
        assert await SessionProcesses(access).ask({"do": "list"})
        assert (await keeper.resume(ALICE, plain.id)).state == "active"  # the twin
        without.clock.advance(3600)
        keeper.tidy()
        assert keeper.find(ALICE, session.id).state in ("active", "paused")
        assert keeper.find(ALICE, plain.id).state == "ended"  # the control
        made.wall.held[-1].lose()
        assert keeper.find(ALICE, session.id).state == "stopped"
        with pytest.raises(SandboxUnavailable, match="is missing"):
            await without.run(session)
    again = Bench(tmp_path, rows, made.wall)
    async with again.keeper:
        assert (await again.run(session)).state == "restored"
        assert files_in(again.workspace()) == {"a": b"1"}
    for one in (without, again):
        one.store.close()


async def test_snapshot_that_is_restored_is_saved_and_a_fork_is_not_durable(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True, disk_mb=16)
        snapshot = await made.snapshots.take(ALICE, session.id)
        await made.run(session, write(a="1"))
        write(a="0")(made.workspace())  # what the disk's copy had
        restored = await made.snapshots.restore(ALICE, session.id, snapshot.id)
        assert restored.state == "active"
        assert await made.lose_and_read(session) == {"a": b"0"}
        (fork,) = await made.snapshots.fork(ALICE, session.id)
        assert (fork.durable, fork.saved_at) == (False, None)
        await made.keeper.end(ALICE, session.id)
        assert made.keeper.find(ALICE, session.id).durable


async def test_restored_snapshot_that_cannot_be_saved_is_reported(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(ALICE, durable=True, disk_mb=16)
        snapshot = await made.snapshots.take(ALICE, session.id)
        await made.run(session, write(a="1"))
        write(a="0")(made.workspace())  # what the disk's copy had
        made.store.failure = StateUnavailable("Away.")
        with pytest.raises(SandboxUnavailable, match="restored, but its files could not be saved"):
            await made.snapshots.restore(ALICE, session.id, snapshot.id)
        assert await made.lose_and_read(session) == {"a": b"1"}  # as the error says
        made.store.failure = None
        write(a="0")(made.workspace())
        await made.snapshots.restore(ALICE, session.id, snapshot.id)
        assert await made.lose_and_read(session) == {"a": b"0"}


async def test_saved_workspaces_have_a_quota_for_each_principal_and_in_total(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, max_saved_mb=300) as made:
        first = await made.keeper.create(ALICE, durable=True, memory_mb=512)
        with pytest.raises(QuotaExceeded, match="of 300 MB are reserved"):
            await made.keeper.create(ALICE, durable=True, memory_mb=512)
        await made.keeper.create(ALICE, memory_mb=512)
        await made.keeper.create(Principal("bob"), durable=True, memory_mb=512)
        await made.keeper.end(ALICE, first.id)
        await made.keeper.create(ALICE, durable=True, memory_mb=512)


async def test_sweep_spares_sessions_that_are_not_over_and_files_that_are_new(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    now = ManualClock().now()
    ids = [f"sess_{digit * 32}" for digit in "abcd"]
    live, over, unknown, fresh = [f"{one}.{'0' * 8}.{'1' * 64}" for one in ids]
    await store.put(dict.fromkeys((live, over, unknown, fresh), b"x"))
    (store.place / "foreign").write_text("not ours")
    for name in (live, over, unknown, "foreign"):
        os.utime(store.place / name, (0, 0))
    os.utime(store.place / fresh, (now.timestamp(), (now - timedelta(minutes=59)).timestamp()))
    assert await store.sweep([ids[0]], [ids[1]], now) == 2
    assert store.kept == {live, fresh, "foreign"}
    store.close()


# -- the next use -----------------------------------------------------------------------------


async def test_stopped_session_is_restored_by_the_next_engine(tmp_path: Path) -> None:
    """Its container was lost while the earlier engine ran, so its row says that it is stopped."""
    rows = Rows()
    made = Bench(tmp_path, rows)
    async with made.keeper:
        session = await made.keeper.create(ALICE, durable=True)
        await made.run(session, write(a="1"))
        made.wall.held[-1].lose("its container is gone")
        (lost,) = made.wall.held
    assert rows.kept[session.id].record.state == "stopped"
    write(a="?")(made.workspace(lost))  # what no engine has saved
    after = Bench(tmp_path, rows, made.wall)
    async with after.keeper:
        assert (await after.run(session)).state == "restored"
        assert after.wall.held[-1] is not lost
        assert files_in(after.workspace()) == {"a": b"1"}
    made.store.close()
    after.store.close()


@pytest.mark.parametrize("state", ["active", "paused", "stopped"])
async def test_session_whose_node_is_away_is_restored_without_waiting_for_it(
    state: str, tmp_path: Path
) -> None:
    async with bench(tmp_path) as made:
        session = await made.keeper.create(
            ALICE, durable=True, disk_mb=16 if state == "stopped" else None
        )
        await made.run(session, write(a="1"))
        if state == "paused":
            await made.keeper.pause(ALICE, session.id)
        elif state == "stopped":
            await made.keeper.stop(ALICE, session.id)
        (old,) = made.wall.held

        async def unreachable() -> None:
            raise SandboxUnavailable("The node cannot be reached.")

        old.is_away, old.until_free = True, unreachable  # type: ignore[method-assign]
        assert (await made.run(session)).state == "restored"
        assert files_in(made.workspace()) == {"a": b"1"}
        assert made.keeper.find(ALICE, session.id).state == "active"


@pytest.mark.parametrize("disk_mb", [None, 16])
async def test_engine_killed_while_files_are_restored_leaves_no_half_of_them(
    disk_mb: int | None, tmp_path: Path
) -> None:
    """Even if it wrote the row meanwhile, with the place of the new container."""
    rows = Rows()
    made = Bench(tmp_path, rows)
    left: dict[str, Any] = {}

    async def die(run: SeenRun, sinks: Any) -> None:
        if run.arguments.get("do") == "fill":
            made.keeper._history.note(made.keeper._live[session.id].kept())
            await made.keeper._history.write()
            left.update(rows.kept)

    async with made.keeper:
        session = await made.keeper.create(ALICE, durable=True, disk_mb=disk_mb)
        await made.run(session, write(a="1", b="2"))
        made.wall.held[-1].lose()
        made.wall.meanwhile = die
        await made.run(session)
        made.wall.meanwhile = None
    rows.kept = left  # as if it had been killed there
    half = made.wall.held[-1]
    assert left[session.id].home.container == half.name
    (made.workspace(half) / "b").unlink()
    after = Bench(tmp_path, rows, made.wall)
    async with after.keeper:
        assert (await after.run(session)).state == "restored"
        assert after.wall.held[-1] is not half
        assert files_in(after.workspace()) == {"a": b"1", "b": b"2"}
        assert not rows.kept[session.id].home.must_restore
    made.store.close()
    after.store.close()
