"""Recordings: every event to every reader, from any event on; bounded on the disk, never in the way."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import anyio
import anyio.lowlevel
import pytest

from fumehood.storage import blobs, kept_recordings
from fumehood.storage import recordings as recordings_module
from fumehood.storage.errors import StoreError
from fumehood.storage.kept_recordings import Record, RecordedCall
from fumehood.storage.recordings import (
    NO_STORE,
    TOO_MUCH,
    TOO_SLOW,
    EventRecording,
    RecordingReader,
    RecordingStore,
)

pytestmark = [pytest.mark.anyio, pytest.mark.row("S8", "D2")]

OWNER = "uid:1"
MB = 1 << 20


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = datetime.now(UTC)

    def now(self) -> datetime:
        return self.time

    def later(self, **by: float) -> datetime:
        self.time += timedelta(**by)
        return self.time


@asynccontextmanager
async def opened(
    state: Path | None, *, max_bytes: int = 100 * MB, kept_s: float = 0, clock: Hands | None = None
) -> AsyncIterator[RecordingStore]:
    now = (clock or Hands()).now
    store = RecordingStore(state, max_bytes=max_bytes, kept_s=kept_s, now=now)
    await store.open()
    try:
        yield store
    finally:
        store.close()


def made(
    store: RecordingStore, *, max_bytes: int = 50 * MB, name: str = "call_1", owner: str = OWNER
) -> EventRecording:
    call = RecordedCall(name, owner, "run_python", "trace_1")
    return store.new(call, max_bytes, lambda why: {"message": why})


async def read_all(reader: RecordingReader) -> list[Record]:
    found = []
    with anyio.fail_after(20):
        while records := await reader.read():
            found += records
    reader.close()
    return found


async def gone(store: RecordingStore) -> None:
    """Wait until nothing is recorded any more."""
    with anyio.fail_after(20):
        while os.listdir(store.directory) or store.room.taken:
            await anyio.lowlevel.checkpoint()


def say(recording: EventRecording, text: str) -> None:
    recording.record("tool_output", {"text": text}, len(text))


async def test_every_reader_gets_every_event_with_its_place(home: Path) -> None:
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
        raw = path.read_bytes()  # one reader has not begun yet
        found.append(await read_all(readers[2]))
        await gone(store)
    assert found[0] == found[1] == found[2]
    *outputs, last = found[0]
    texts = [json.loads(record.data)["text"] for record in outputs]
    assert texts == [f"{number} ä \r\n\x1b\u2028" for number in range(500)]
    assert (last.kind, last.data) == ("tool_result", b'{"success":true}')
    for number, record in enumerate(found[0]):
        sequence, place = map(int, record.id.split(":"))
        place -= crc32(b"call_1")
        line = raw[place : raw.index(b"\n", place)]
        assert sequence == number
        assert json.loads(line) == [record.kind, number, json.loads(record.data)]


async def test_line_longer_than_a_step_comes_whole(home: Path) -> None:
    async with opened(home) as store:
        recording = made(store)
        reader = recording.reader()
        say(recording, "a" * (3 * kept_recordings.READ_BYTES))
        recording.finish("tool_result", b'"%b"' % (b"b" * 2 * kept_recordings.READ_BYTES))
        first, last = await read_all(reader)
    assert len(json.loads(first.data)["text"]) == 3 * kept_recordings.READ_BYTES
    assert len(last.data) == 2 * kept_recordings.READ_BYTES + 2


async def test_half_a_character_spoils_nothing(home: Path) -> None:
    async with opened(home) as store:
        recording = made(store)
        reader = recording.reader()
        say(recording, "a\ud800b")
        recording.finish("tool_result", b"{}")
        first, _ = await read_all(reader)
    assert json.loads(first.data) == {"text": "a?b"}


async def test_recording_without_a_reader_goes_with_its_call(home: Path) -> None:
    async with opened(home) as store:
        recording = made(store)
        say(recording, "x")
        with anyio.fail_after(20):
            while os.listdir(store.directory) != ["call_1"]:
                await anyio.lowlevel.checkpoint()
        recording.finish("tool_result", b"{}")
        await gone(store)


async def test_what_a_crash_left_is_removed_at_the_start(home: Path) -> None:
    (home / "spool").mkdir(mode=0o700)
    (home / "spool" / "call_old").write_text("left over")
    async with opened(home):
        assert list((home / "spool").iterdir()) == []


async def test_without_state_the_directory_goes_with_the_store() -> None:
    async with opened(None) as store:
        recording = made(store)
        reader = recording.reader()
        say(recording, "x")
        assert len(await reader.read()) == 1
        directory = store.directory
        assert (directory / "call_1").stat().st_mode & 0o777 == 0o600
        recording.finish("tool_result", b"{}")
        await read_all(reader)
    assert not directory.exists()


def over_its_bound(recording: EventRecording, store: RecordingStore, monkeypatch: Any) -> str:
    return TOO_MUCH


def no_room(recording: EventRecording, store: RecordingStore, monkeypatch: Any) -> str:
    store.room.max_bytes = 3000
    return "your share of the engine's storage is used up"


def full_disk(recording: EventRecording, store: RecordingStore, monkeypatch: Any) -> str:
    monkeypatch.setattr(blobs, "MIN_FREE_BYTES", 1 << 60)
    return "the engine's disk is full"


def failing_disk(recording: EventRecording, store: RecordingStore, monkeypatch: Any) -> str:
    real = os.pwrite

    def some(file: int, data: Any, place: int) -> int:
        if place > 0:
            raise OSError(28, "No space left on device")
        return real(file, data[:100], place)  # and the rest fails

    monkeypatch.setattr(os, "pwrite", some)
    return "the engine's disk is full or failing"


def slow_disk(recording: EventRecording, store: RecordingStore, monkeypatch: Any) -> str:
    monkeypatch.setattr(recordings_module, "MAX_PENDING_BYTES", 100)
    return TOO_SLOW


@pytest.mark.parametrize("trouble", [over_its_bound, no_room, full_disk, failing_disk, slow_disk])
async def test_recording_that_cannot_go_on_says_so_once_and_the_answer_still_comes(
    home: Path, monkeypatch: pytest.MonkeyPatch, trouble: Callable[..., str]
) -> None:
    async with opened(home) as store:
        recording = made(store, max_bytes=4000)
        reader = recording.reader()
        why = trouble(recording, store, monkeypatch)
        for number in range(20):
            say(recording, f"{number:02}" + "x" * 500)
        say(recording, "too late")
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
        await gone(store)


async def test_store_that_cannot_be_opened_hurts_no_call(home: Path) -> None:
    (home / "spool").write_text("in the way")
    store = RecordingStore(home, max_bytes=MB, kept_s=60, now=Hands().now)
    with pytest.raises(StoreError):
        await store.open()
    recording = made(store)
    reader = recording.reader()
    say(recording, "x")
    recording.finish("tool_error", b"{}")
    notice, last = await read_all(reader)
    assert json.loads(notice.data) == {"message": NO_STORE}
    assert last.kind == "tool_error"


async def test_closed_store_ends_its_readers(home: Path) -> None:
    async with opened(home) as store:
        recording = made(store)
        reader = recording.reader()
        say(recording, "x")
        assert len(await reader.read()) == 1
    say(recording, "y")
    recording.finish("tool_error", b"{}")
    found = await read_all(reader)
    assert [record.kind for record in found] == ["tool_notice", "tool_error"]
