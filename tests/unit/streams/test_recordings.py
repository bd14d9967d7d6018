"""Recordings: complete for every reader, resumable, bounded on disk and never blocking a call."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fumehood.core.fair_share import FairShare
from fumehood.storage import file_room
from fumehood.storage.errors import StoreError
from fumehood.storage.file_room import CLOSED, TOO_SLOW, RoomFile
from fumehood.streams import recordings as recordings_module
from fumehood.streams.recordings import (
    READ_BYTES,
    Record,
    RecordedCall,
    Recording,
    RecordingReader,
    RecordingStore,
    line_of,
)
from fumehood.testing import ManualClock

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite, pytest.mark.row("S8", "D2")]

OWNER = "uid:1"
MB = 1 << 20


@asynccontextmanager
async def opened(
    state: Path | None,
    *,
    max_bytes: int = 100 * MB,
    kept_s: float = 0,
    clock: ManualClock | None = None,
) -> AsyncIterator[RecordingStore]:
    now = (clock or ManualClock()).now
    store = RecordingStore(state, max_bytes=max_bytes, kept_s=kept_s, now=now)
    await store.open()
    try:
        yield store
    finally:
        store.room.close()


def made(store: RecordingStore, *, name: str = "call_1", owner: str = OWNER) -> Recording:
    call = RecordedCall(name, owner, "run_python", "trace_1")
    return store.new(call, lambda why: {"message": why})


async def read_all(reader: RecordingReader) -> list[Record]:
    found = []
    with anyio.fail_after(120):
        while records := await reader.read():
            found += records
    reader.close()
    return found


async def gone(store: RecordingStore) -> None:
    """Wait until no recording is left."""
    with anyio.fail_after(120):
        while os.listdir(store.room.directory) or store.room.share.total:
            await anyio.lowlevel.checkpoint()


def say(recording: Recording, text: str) -> None:
    recording.record("tool_output", {"text": text})


async def test_every_reader_gets_all_events_with_their_positions(home: Path) -> None:
    async with opened(home) as store:
        recording = made(store)
        readers = [recording.reader() for _ in range(3)]
        found: list[list[Record]] = []

        async def follow(reader: RecordingReader) -> None:
            found.append(await read_all(reader))

        async with anyio.create_task_group() as group:
            group.start_soon(follow, readers[0])
            for number in range(500):
                say(recording, f"{number} ä \r\n\x1b\u2028")
                if number % 100 == 0:
                    await anyio.lowlevel.checkpoint()
            path = home / "spool" / "call_1"
            group.start_soon(follow, readers[1])
            recording.finish("tool_result", b'{"success":true}')
        _, *lines = path.read_bytes().splitlines()  # one reader has not begun yet
        found.append(await read_all(readers[2]))
        await gone(store)
    assert found[0] == found[1] == found[2]
    *outputs, last = found[0]
    texts = [json.loads(record.data)["text"] for record in outputs]
    assert texts == [f"{number} ä \r\n\x1b\u2028" for number in range(500)]
    assert (last.kind, last.data) == ("tool_result", b'{"success":true}')
    for number, record in enumerate(found[0]):
        assert int(record.id.split(":")[0]) == number
        assert json.loads(lines[number]) == [record.kind, number, json.loads(record.data)]


async def test_endless_output_does_not_delay_another_recording(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    append = RoomFile.append

    def append_and_print(file: RoomFile, data: bytes) -> bool:
        """Record the turn; the endless call prints again before its event is written."""
        turns.append("endless" if file is endless.file else "other")
        if turns[-1] == "endless" and len(turns) < 50:
            say(endless, "again")
        return append(file, data)

    async with opened(home) as store:
        endless, other = made(store, name="endless"), made(store, name="other")
        monkeypatch.setattr(RoomFile, "append", append_and_print)
        blocked = threading.Event()
        store.room.submit(lambda: blocked.wait(20))
        say(endless, "first")
        say(other, "one line")
        blocked.set()
        with anyio.fail_after(120):
            while len(turns) < 50:
                await anyio.sleep(0.001)
        for recording in (endless, other):
            recording.finish("tool_result", b"{}")
    assert turns.index("other") == 1


async def test_long_line_is_reassembled_and_its_lone_surrogate_replaced(home: Path) -> None:
    async with opened(home) as store:
        recording = made(store)
        reader = recording.reader()
        say(recording, "\ud800" + "a" * (3 * READ_BYTES))
        recording.finish("tool_result", b'"%b"' % (b"b" * 2 * READ_BYTES))
        first, last = await read_all(reader)
    assert json.loads(first.data) == {"text": "?" + "a" * (3 * READ_BYTES)}
    assert len(last.data) == 2 * READ_BYTES + 2


async def test_stateless_store_removes_its_directory() -> None:
    async with opened(None) as store:
        recording = made(store)
        reader = recording.reader()
        say(recording, "x")
        assert len(await reader.read()) == 1
        directory = store.room.directory
        assert (directory / "call_1").stat().st_mode & 0o777 == 0o600
        recording.finish("tool_result", b"{}")
        await read_all(reader)
    assert not directory.exists()


def no_room(store: RecordingStore, monkeypatch: Any) -> str:
    store.room.share.most_of_one = 1500
    return "your share of the engine's storage is used up"


def full_disk(store: RecordingStore, monkeypatch: Any) -> str:
    monkeypatch.setattr(file_room, "MIN_FREE_BYTES", 1 << 60)
    return "the engine's disk is full"


def failing_disk(store: RecordingStore, monkeypatch: Any) -> str:
    monkeypatch.setattr(store.room, "open_file", lambda name, flags: io.FileIO("/dev/full", "w"))
    return "the engine's disk is full or failing"


def slow_disk(store: RecordingStore, monkeypatch: Any) -> str:
    monkeypatch.setattr(store.room, "_waiting", FairShare(2000, 1000))
    return TOO_SLOW


@pytest.mark.parametrize("trouble", [no_room, full_disk, failing_disk, slow_disk])
async def test_failed_recording_gives_one_notice_and_the_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch, trouble: Callable[..., str]
) -> None:
    async with opened(home, kept_s=60) as store:
        recording = made(store)
        reader = recording.reader()
        why = trouble(store, monkeypatch)
        for number in range(20):
            say(recording, f"{number:02}" + "x" * 500)
        recording.finish("tool_result", b'{"the":"answer"}')
        *events, notice, last = await read_all(reader)
        assert json.loads(notice.data) == {"message": why}
        assert (last.kind, last.data) == ("tool_result", b'{"the":"answer"}')
        # What was told before is a beginning without a gap, and numbers go on after it.
        texts = [json.loads(event.data)["text"][:2] for event in events]
        assert texts == [f"{number:02}" for number in range(len(texts))]
        assert len(texts) < 20
        assert [int(r.id.split(":")[0]) for r in (*events, notice, last)] == list(
            range(len(texts) + 2)
        )
        if trouble is slow_disk:  # everything that was accepted is on the disk
            assert await found(store, "call_1") == [*events, notice, last]
        else:
            await gone(store)


async def test_unopenable_store_gives_a_notice_and_the_answer(home: Path) -> None:
    (home / "spool").write_text("in the way")
    store = RecordingStore(home, max_bytes=MB, kept_s=60, now=ManualClock().now)
    with pytest.raises(StoreError):
        await store.open()
    recording = made(store)
    reader = recording.reader()
    say(recording, "x")
    recording.finish("tool_error", b"{}")
    notice, last = await read_all(reader)
    assert json.loads(notice.data) == {"message": CLOSED}
    assert last.kind == "tool_error"


# -- recordings of ended calls ---------------------------------------------------------------


async def finished(
    store: RecordingStore, name: str, *, owner: str = OWNER, size: int = 10
) -> list[Record]:
    """Record a call with one event and its answer, and wait until it is stored."""
    recording = made(store, name=name, owner=owner)
    reader = recording.reader()
    say(recording, "x" * size)
    recording.finish("tool_result", b'{"success":true}')
    records = await read_all(reader)
    with anyio.fail_after(120):
        while store._all[name].holders:
            await anyio.lowlevel.checkpoint()
    return records


async def found(store: RecordingStore, name: str, owner: str = OWNER) -> list[Record] | None:
    """The stored events of a call, or None."""
    reader = store.find(name, owner)
    return None if reader is None else await read_all(reader)


async def settled(store: RecordingStore, names: set[str]) -> None:
    """Wait until exactly these files exist."""
    with anyio.fail_after(120):
        while set(os.listdir(store.room.directory)) != names:
            await anyio.lowlevel.checkpoint()


async def test_recording_of_ended_call_is_readable_until_it_expires(home: Path) -> None:
    clock = ManualClock()
    async with opened(home, kept_s=60, clock=clock) as store:
        records = await finished(store, "call_1")
        assert await found(store, "call_1") == records
        assert await found(store, "call_1", "uid:2") is None
        clock.advance(59)
        assert await store.prune(clock.now()) == 0
        assert await found(store, "call_1") == records
        held = store.find("call_1", OWNER)
        clock.advance(2)
        assert await found(store, "call_1") is None
        assert await store.prune(clock.now()) == 0  # somebody reads it still
        assert await read_all(held) == records
        assert await store.prune(clock.now()) == 1
        await gone(store)


async def test_recording_being_read_is_not_evicted(home: Path) -> None:
    async with opened(home, kept_s=60, max_bytes=60_000) as store:
        records = await finished(store, "call_0", size=9000)
        reader = store.find("call_0", OWNER)
        for number in range(1, 6):
            await finished(store, f"call_{number}", size=9000)
        assert await found(store, "call_1") is None
        assert await read_all(reader) == records


async def test_recordings_over_maximum_count_of_largest_owner_are_evicted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings_module, "MAX_KEPT", 4)
    async with opened(home, kept_s=60) as store:
        await finished(store, "other", owner="uid:2")
        for number in range(5):
            await finished(store, f"call_{number}")
        await settled(store, {"other", "call_2", "call_3", "call_4"})
        assert await found(store, "call_1") is None
        assert await found(store, "other", "uid:2") is not None


async def test_in_memory_events_are_resumable_while_a_reader_is_open(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(home, kept_s=60) as store:
        recording = made(store)
        first = recording.reader()
        say(recording, "x")
        assert len(await first.read()) == 1
        full_disk(store, monkeypatch)
        recording.finish("tool_result", b"{}")
        with anyio.fail_after(120):
            while not recording.is_over:
                await anyio.lowlevel.checkpoint()
        everything = store.find("call_1", OWNER)
        records = await read_all(everything)
        for number, record in enumerate(records):
            again = store.find("call_1", OWNER, record.id)
            assert await read_all(again) == records[number + 1 :]
        assert [record.kind for record in records] == ["tool_output", "tool_notice", "tool_result"]
        first.close()


# -- the engine before -----------------------------------------------------------------------


async def outcome_unknown(call: RecordedCall) -> tuple[str, bytes]:
    return "tool_error", json.dumps({"lost": call.call_id}).encode()


def crashed(home: Path, name: str = "call_1", *, texts: int = 3) -> tuple[Path, list[bytes]]:
    """The file and events of a call that was running when its engine crashed."""
    spool = home / "spool"
    spool.mkdir(mode=0o700, exist_ok=True)
    call = RecordedCall(name, OWNER, "run_python", "trace_1")
    events = [json.dumps({"text": f"{number} ä"}).encode() for number in range(texts)]
    lines = [line_of("tool_output", n, data) for n, data in enumerate(events)]
    path = spool / name
    path.write_bytes(call.line() + b"".join(lines))
    path.chmod(0o600)
    return path, events


async def test_file_truncated_at_any_byte_yields_only_whole_events(home: Path) -> None:
    """A write interrupted by a kill leaves any prefix of itself."""
    path, events = crashed(home)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        async with opened(home, kept_s=60) as store:
            count = await store.end_lost(outcome_unknown)
            records = await found(store, "call_1")
        if end < start:
            assert (count, records, path.exists()) == (0, None, False)
            continue
        complete = whole[start:end].count(b"\n")
        assert [record.data for record in records[:-1]] == events[:complete]
        assert records[-1].kind == "tool_error"


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target.parent.parent / "elsewhere")
    path.symlink_to(target.parent.parent / "elsewhere")


def other_name(path: Path) -> None:
    path.rename(path.with_name("call_2"))


def no_call(path: Path) -> None:
    path.write_bytes(path.read_bytes().partition(b"\n")[2])


def garbage_line(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0\0\0\0\n")


@pytest.mark.parametrize(
    "damage",
    [link, other_name, no_call, garbage_line],
)
async def test_invalid_recording_file_is_removed_unread(
    home: Path, damage: Callable[[Path], None]
) -> None:
    path, _ = crashed(home)
    crashed(home, "call_good")
    damage(path)
    async with opened(home, kept_s=60) as store:
        assert os.listdir(store.room.directory) == ["call_good"]
        assert await store.end_lost(outcome_unknown) == 1
        assert await found(store, "call_1") is None
        assert await found(store, "call_good") is not None  # twin
    if damage is link:
        assert (home / "elsewhere").exists()


async def test_restart_with_smaller_bound_keeps_the_newest_recordings(home: Path) -> None:
    for number in range(6):
        path, _ = crashed(home, f"call_{number}", texts=100)
        with path.open("ab") as file:
            file.write(line_of("tool_result", 100, b"{}"))
        os.utime(path, (1000 + number, 1000 + number))
    size = path.stat().st_size
    async with opened(home, kept_s=60, max_bytes=2 * int(2.5 * size)) as store:
        assert set(os.listdir(store.room.directory)) == {"call_4", "call_5"}
        assert store.room.share.total == 2 * size


async def test_lost_recording_without_room_for_its_ending_is_removed(home: Path) -> None:
    path, _ = crashed(home)
    async with opened(home, kept_s=60, max_bytes=2 * path.stat().st_size) as store:
        assert await store.end_lost(outcome_unknown) == 1
        await gone(store)
        assert await found(store, "call_1") is None
