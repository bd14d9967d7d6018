"""Recordings: the events of calls. Each call has one file, which is kept for some time after the
call ends.

Host side, in a `file_room`: a private directory with a size limit, which one thread writes.
`call.py` writes recordings, and the public interfaces read them. A file's first line describes its
call; each other line is one event, `["kind",SEQUENCE,data]`. Readers read the file, so that a slow
reader does not use the daemon's memory. Invariants: readers get only complete events, from the
beginning or after any event; a file's first line names the principal that owns the file; a file
with readers is not removed.

A call never fails because of its recording. If events cannot be written, they are omitted, and one
event reports this. The last event is always delivered, from memory if necessary. A crash can leave
an incomplete last line, which the next start of the engine removes.

If there is a remote place, a recording is copied there when its call ends. The next engine lists
the recordings of earlier engines in the remote place, and downloads a recording when its owner
requests it.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import anyio.to_thread
from pydantic_core import PydanticSerializationError, to_json

from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json
from fumehood.storage.errors import FilesAway, StoreError
from fumehood.storage.file_room import START_S, FileRoom, NoRoom, RoomFile
from fumehood.storage.files import Directory, Found, RemoteFiles
from fumehood.streams.events import LAST_KINDS

DIRECTORY_NAME = "spool"
MAX_KEPT = 10_000
"""Maximum number of recordings of ended calls. A size limit alone is not enough, because it allows
a large number of small files."""

CALL_ID = re.compile("call_[0-9a-f]{24}")
ELSEWHERE = "another engine"
"""The name that stands for the unknown owner of another engine's recording. The store of files
counts the space of such recordings under this name. The real owner is known only after the
recording was downloaded."""

READ_BYTES = 64 * 1024
"""Number of bytes that a reader reads from the file at a time. If a line is longer, it is read
completely. The newest lines, if they have at most this size, stay in memory, so that waiting
readers need no disk access."""

RESYNC = "resync"
"""Kind of the event that precedes a restart: the reader then returns all events of the call,
beginning with the first one."""

NOTICE = "tool_notice"
"""Kind of the event that explains why a recording stopped."""

MALFORMED = "malformed"
UNKNOWN = "unknown_event"
REASONS = {
    MALFORMED: "This is not the id of an event.",
    UNKNOWN: "This call has no such event: the id is another call's, or its end was lost.",
}
EVENT_ID = re.compile(r"(0|[1-9][0-9]{0,14}):(0|[1-9][0-9]{0,14})")


class RecordedCall(NamedTuple):
    """The ids that identify a recorded call and its owner, and the tool that was called. The first
    line of the recording's file contains these values.
    """

    call_id: str
    principal_id: str
    tool: str
    trace_id: str

    def line(self) -> bytes:
        return strict_json.dumps(self._asdict()) + b"\n"


class Record(NamedTuple):
    """One recorded event."""

    kind: str
    id: str
    data: bytes


class Recording:
    """The recording of one call's events. Its methods must be called in the event loop, except
    `record`, which may be called in any thread.
    """

    def __init__(
        self,
        store: RecordingStore,
        call: RecordedCall,
        notice: Callable[[str], JsonObject] | None = None,
        *,
        size: int = 0,
        count: int = 0,
    ) -> None:
        """Begin a recording in `store`, or continue the file of a recording that an earlier engine
        began.

        If the recording has to stop, `notice` is called with the reason. It returns the data of the
        event that tells readers about it. If `notice` is None, there is no such event.

        `size` is the size in bytes of the file to continue, and `count` the number of its events.
        For a new recording, both are 0.
        """
        self.call = call
        self.start = len(call.line())
        """Byte offset of the first event in the file."""
        self.size = max(size, self.start)
        """Byte offset in the file up to which readers may read."""
        self.count = count
        """Number of events in the file that readers may read."""
        self.tail: list[Record] = []
        """Events that could not be written to the file. Readers get them after the events in the
        file."""
        self.is_over = False
        """Whether readers may already read the call's last event."""
        self.ended_at = 0.0
        """The time when the call ended, in Unix seconds, or 0 while the call is running."""
        self.holders = 1
        """Number of readers, plus one for the writer."""
        self.news = asyncio.Event()
        """Set when there are new events, and immediately replaced by a new `asyncio.Event`."""
        self.file = RoomFile(store.room, call.principal_id, call.call_id, size)
        self._store = store
        self._notice = notice
        self._refused: str | None = None
        """The reason why the store of files did not accept an event, or None."""
        self._written = count
        self._newest = (self.size, b"")

    def record(self, kind: str, data: JsonObject) -> None:
        """Record one event. Never waits and never raises."""
        if self.file.fault is None and self._refused is None and not self.ended_at:
            self._queue(kind, _encoded(data))

    def finish(self, kind: str, data: bytes) -> None:
        """Record the last event. Readers stop after it."""
        if not self.ended_at:
            self.ended_at = self._store.now().timestamp()
            self._queue(kind, data)

    def reader(self, after: str | None = None) -> RecordingReader:
        """Return a reader that begins with the first event or, if `after` is given, with the event
        that follows the event with the id `after`. The caller must close the reader.

        After the writer and all readers have called `leave`, this method must not be called any
        more.
        """
        self.holders += 1
        return RecordingReader(self, after)

    def _queue(self, kind: str, data: bytes) -> None:
        is_last = kind in LAST_KINDS
        size = 0 if is_last else len(data)  # the answer must not be refused
        fault = self._store.room.queue(self.call.principal_id, size, self._write, (kind, data))
        if fault is not None:
            self._refused = fault
            if is_last:  # the room is closed
                self.file.fault = fault
                self._write([(kind, data)])()

    def _write(self, events: list[tuple[str, bytes]]) -> Callable[[], None]:
        """Write events to the file. Return a function that makes the events available to readers.
        Runs in the thread of the file room.
        """
        events.sort(key=lambda event: event[0] in LAST_KINDS)  # a thread may report progress late
        is_last = events[-1][0] in LAST_KINDS
        if is_last and self._refused is not None:
            events[-1:-1] = self._told(self._refused)
        lines = b"".join(
            line_of(kind, number, data) for number, (kind, data) in enumerate(events, self._written)
        )
        begin = b"" if self.file.size else self.call.line()
        tail: list[tuple[str, bytes]] = []
        if self.file.append(begin + lines):
            self._written += len(events)
        else:
            lines = b""
            tail = self._told(self.file.fault or "")
            tail += [event for event in events if event[0] in (NOTICE, *LAST_KINDS)]
        if is_last:
            self.file.close()
            self._notice = None  # the notice refers to the call, which can now be freed
        return partial(self._publish, lines, self._written, tail, is_last)

    def _told(self, why: str) -> list[tuple[str, bytes]]:
        """Return a list with the event that tells readers that the recording stopped. `why` is the
        reason.

        If an earlier call of this method has returned the event, or the recording has no `notice`,
        return an empty list.
        """
        notice, self._notice = self._notice, None
        return [] if notice is None else [(NOTICE, _encoded(notice(why)))]

    def _publish(
        self, lines: bytes, count: int, tail: list[tuple[str, bytes]], is_last: bool
    ) -> None:
        self._newest = (self.size, lines if len(lines) <= READ_BYTES else b"")
        self.size += len(lines)
        self.count = count
        for kind, data in tail:
            place = event_id(self.call.call_id, self.count + len(self.tail))
            self.tail.append(Record(kind, place, data))
        if is_last:
            self.is_over = True
            self._store.share(self)
            self.leave()
        else:
            self.wake()

    # -- for readers -----------------------------------------------------------------------

    async def lines(self, place: int) -> bytes:
        """Return complete lines of the file from the byte offset `place`, which must be below
        `size`. Raises OSError.
        """
        begin, newest = self._newest
        if place >= begin and newest:
            return newest[place - begin :]
        return await anyio.to_thread.run_sync(self._read, place, self.size)

    def _read(self, place: int, end: int) -> bytes:
        with self._store.room.open_file(self.call.call_id, os.O_RDONLY) as file:
            file.seek(place)
            lines = file.read(min(end - place, READ_BYTES))
            if not lines.endswith(b"\n"):
                lines += file.readline()
        if not lines.endswith(b"\n"):
            raise OSError("a recording has become shorter")
        return lines

    def leave(self) -> None:
        """Record that a reader or the writer has finished with the recording.

        After the writer and all readers have called this method, the store keeps or deletes the
        recording.
        """
        self.wake()
        self.holders -= 1
        if not self.holders:
            self._newest = (self.size, b"")
            self._store.put_away(self)

    def wake(self) -> None:
        """Wake the waiting readers, so that they check for new events."""
        self.news.set()
        self.news = asyncio.Event()


class RecordingReader:
    """Reads one recording to its end. The reader begins with the first event or, if `after` is
    given, with the event that follows the event with the id `after`.
    """

    def __init__(self, source: Recording, after: str | None = None) -> None:
        self._source = source
        self._after = after
        self._place = source.start
        self._number = 0
        """Sequence number of the event that begins at the position `_place` in the file."""
        self._first = 0
        """Sequence number of the first event that the reader returns."""
        self._is_closed = False

    async def read(self) -> list[Record]:
        """Wait for the next events and return them. After the last event, return an empty list.

        If the reader was created with an id `after` that is not the id of an event of this call,
        the first call returns only an event `resync`. The next calls return all events of the call.

        Raises:
            OSError: the recording cannot be read any more.
        """
        after, self._after = self._after, None
        if after is not None:
            reason = self._skip(after)
            if reason is not None:
                return [_resync(reason, after)]
        source = self._source
        while True:
            if self._place < source.size:
                lines = await source.lines(self._place)
                self._place += len(lines)
                found = lines.splitlines()
                first = max(self._first, self._number)
                self._number += len(found)
                wanted = found[first - self._number :] if first < self._number else []
                records = records_in(source.call.call_id, wanted, first)
            elif self._number - source.count < len(source.tail):
                first = max(self._first, self._number) - source.count
                self._number = source.count + len(source.tail)
                records = source.tail[first:]
            elif source.is_over:
                return []
            else:
                await source.news.wait()
                continue
            if records:
                return records

    def _skip(self, after: str) -> str | None:
        """Make the reader begin after the event with the id `after`, and return None. If there is
        no such event, return the reason.
        """
        found, source = EVENT_ID.fullmatch(after), self._source
        if found is None:
            return MALFORMED
        number = int(found[1])
        if number >= source.count + len(source.tail):
            return UNKNOWN
        if after != event_id(source.call.call_id, number):
            return UNKNOWN
        self._first = number + 1
        return None

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._source.leave()


class RecordingStore:
    """The recordings of one engine. Call `open` before the first use and `room.close` after the
    last use.

    `kept_s` is the number of seconds for which a recording is kept after its call has ended. If it
    is 0, the recording is removed once the call has ended and no reader is left.
    """

    def __init__(
        self,
        state: Path | None,
        *,
        max_bytes: int,
        kept_s: float,
        now: Callable[[], datetime],
        remote: RemoteFiles | None = None,
    ) -> None:
        self._all: dict[str, Recording] = {}
        """Maps the id of a call to its recording. Contains recordings of running calls, recordings
        with readers, and recordings that are kept."""
        self._remote = remote.below(DIRECTORY_NAME, CALL_ID) if remote and kept_s > 0 else None
        self._elsewhere: dict[str, Found] = {}
        """Maps the id of a call to the place of its recording, for recordings of other engines in
        the remote place."""
        self._is_listed = False
        self.room = FileRoom(
            state, DIRECTORY_NAME, max_bytes, self._forget, max_files=MAX_KEPT, remote=self._remote
        )
        self.now = now
        self._kept_s = kept_s
        self._lost: list[Recording] = []

    async def open(self) -> None:
        """Prepare the directory, and find the recordings of the previous engine.

        Raises:
            StoreError: the directory is not private or cannot be used, or the remote place cannot
                be used now (`prune` will try again).
        """
        try:
            if self.room.prepare():
                await anyio.to_thread.run_sync(self._find)
        except OSError as error:
            raise StoreError(f"Calls cannot be recorded: {error.strerror}.") from None
        self.room.open()
        try:
            await self._list(START_S)
        except FilesAway as error:
            raise StoreError(f"Earlier recordings cannot be found: {error}") from None

    async def end_lost(
        self, last_event: Callable[[RecordedCall], Awaitable[tuple[str, bytes]]]
    ) -> int:
        """Record a last event for each call that was still running when the previous engine ended.
        `last_event` returns the kind and the data of this event for a call.

        Return the number of these calls. Their recordings cannot be read before this method has
        returned.
        """
        lost, self._lost = self._lost, []
        for recording in lost:
            last = await last_event(recording.call)
            self._all[recording.call.call_id] = recording
            recording.finish(*last)
        return len(lost)

    def new(self, call: RecordedCall, notice: Callable[[str], JsonObject]) -> Recording:
        """Return a new recording. Its file is created when the first event is written. If the
        recording has to stop, `notice` gets the reason and returns the data for the event that
        reports it.
        """
        recording = self._all[call.call_id] = Recording(self, call, notice)
        return recording

    async def fetch(self, call_id: str, principal_id: str) -> None:
        """Download a principal's recording if it is only in the remote place.

        Raises:
            FilesAway: the remote place cannot be used now.
        """
        place = self._elsewhere.get(call_id)
        if place is not None:
            await self.room.with_files(self._fetch, call_id, principal_id, place)

    def find(
        self, call_id: str, principal_id: str, after: str | None = None
    ) -> RecordingReader | None:
        """Return a reader of a principal's recording, or None if the principal has no such
        recording or the recording has expired. If `after` is given, the reader begins with the
        event that follows the event with the id `after`.
        """
        found = self._all.get(call_id)
        if found is None or found.call.principal_id != principal_id:
            return None
        if found.is_over and found.ended_at <= self._oldest(self.now()):
            return None
        if not found.holders and self.room.hold(found.file.principal_id, call_id) is None:
            return None  # it was just evicted
        return found.reader(after)

    async def prune(self, now: datetime) -> int:
        """Delete expired recordings. Return how many were deleted.

        Raises:
            FilesAway: the remote place cannot be used now; the remaining recordings stay there
                until the next run.
        """
        oldest = self._oldest(now)
        kept = [(name, one) for name, one in list(self._all.items()) if not one.holders]
        old = [(one.file.principal_id, name) for name, one in kept if one.ended_at <= oldest]
        others = list(self._elsewhere.items())
        old += [(ELSEWHERE, name) for name, one in others if one.changed_at <= oldest]
        for whose, name in old:
            self._forget(name)
            self.room.submit(partial(self.room.remove, whose, name))
        if self._remote is not None:
            await self.room.drained()
            await self.room.with_files(self.room.delete_gone)
            await self._list(None)
        return len(old)

    def put_away(self, recording: Recording) -> None:
        """Keep or delete a recording that has no writer and no readers any more. Called in the
        event loop.
        """
        if self._kept_s > 0 and not recording.tail:
            recording.file.keep()
        else:
            self._forget(recording.call.call_id)
            self.room.submit(recording.file.remove)

    def share(self, recording: Recording) -> None:
        """Start to copy the recording of an ended call to the remote place, if there is one. Never
        waits.
        """
        if self._remote is not None and not recording.tail:
            self.room.copy(recording.call.call_id)

    def _forget(self, call_id: str) -> None:
        self._all.pop(call_id, None)
        self._elsewhere.pop(call_id, None)

    def _oldest(self, now: datetime) -> float:
        return (now - timedelta(seconds=self._kept_s)).timestamp()

    def _find(self) -> None:
        """Register the files of the previous engine as recordings, oldest first, and remove
        unusable files. Must run before the thread of the file room is started.
        """
        found = Directory(self.room.directory).found().items()
        for ended_at, name in sorted((one.changed_at, name) for name, one in found):
            try:
                if self._kept_s <= 0:
                    raise NoRoom
                self._take_over(name, ended_at)
            except (NoRoom, OSError, TypeError, ValueError):
                self.room.unlink(name)

    async def _list(self, patience_s: float | None) -> None:
        """List the recordings of other engines in the remote place. If they are already listed, do
        nothing.

        `patience_s` is the maximum wait for the remote place in seconds, or None for no limit.
        Raises FilesAway if the remote place cannot be used now.
        """
        if self._remote is None or self._is_listed:
            return
        found = await self.room.with_files(self._remote.found, patience_s=patience_s)
        lost = {recording.call.call_id for recording in self._lost}
        for name, one in sorted(found.items(), key=lambda item: item[1].changed_at):
            if name not in self._all and name not in lost:
                self._elsewhere[name] = one
                self.room.restore(ELSEWHERE, name, one.size)
        self._is_listed = True

    def _fetch(self, call_id: str, principal_id: str, place: Found) -> None:
        """Download a recording from the remote place, and register it. Runs in a thread.

        `place` is the status of the recording's file in the remote place. If the recording is
        missing or damaged, it is removed from the list of remote recordings. If it cannot be
        downloaded for another reason, it stays in this list.

        Raises FilesAway if the remote place cannot be used now.
        """
        room = self.room
        if room.hold(ELSEWHERE, call_id) is None:
            return  # it was just evicted
        try:
            self._download(call_id, principal_id, place)
            self._take_over(call_id, place.changed_at, fetched=place.size)
            self._elsewhere.pop(call_id, None)
        except (FileNotFoundError, TypeError, ValueError):
            room.keep(ELSEWHERE, call_id, place.size)
            room.remove(ELSEWHERE, call_id)
            self._forget(call_id)
        except (NoRoom, OSError) as error:
            room.unlink(call_id)
            room.keep(ELSEWHERE, call_id, place.size)
            if isinstance(error, FilesAway):
                raise

    def _download(self, call_id: str, principal_id: str, place: Found) -> None:
        """Copy a principal's recording from the remote place to the room's directory. `place` is
        the status of the recording's file in the remote place.

        Raises:
            PermissionError: the recording belongs to another principal.
            NoRoom: the disk has no space for the recording.
            OSError, TypeError, ValueError: the file cannot be read, or is not a recording.
        """
        assert self._remote is not None
        with self._remote.open(call_id, place.size) as source:
            first = source.readline()
            if RecordedCall(**strict_json.loads(first)).principal_id != principal_id:
                raise PermissionError
            self.room.require_disk(place.size)
            with self.room.open_file(call_id, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                file.write(first)
                shutil.copyfileobj(source, file)
        os.utime(self.room.directory / call_id, (place.changed_at, place.changed_at))

    def _take_over(self, name: str, ended_at: float, *, fetched: int | None = None) -> None:
        """Register a file of an earlier engine as a recording. If the file's last line is
        incomplete, remove this line.

        `name` is the name of the file, which is the id of its call. `ended_at` is the time at which
        the call ended, in Unix seconds. If the file was just downloaded, `fetched` is its size in
        bytes. The caller must then have reserved this space under the owner name `ELSEWHERE`.

        Raises:
            NoRoom: the room has no space for the file.
            OSError, TypeError, ValueError: the file is not a recording, or was downloaded and is
                incomplete.
        """
        with self.room.open_file(name, os.O_RDWR) as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                start, size = content.find(b"\n") + 1, content.rfind(b"\n") + 1
                call = RecordedCall(**strict_json.loads(content[:start]))
                if call.call_id != name or call.line() != content[:start]:
                    raise ValueError("another call")
                last = content[content.rfind(b"\n", 0, size - 1) + 1 : size]
            kind, number, _ = strict_json.loads(last) if size > start else ("", -1, None)
            file.truncate(size)
        found = Recording(self, call, size=size, count=number + 1)
        if fetched is None:
            self.room.take(call.principal_id, size)
        elif size != fetched or kind not in LAST_KINDS:
            raise ValueError("not complete")
        else:
            found.file = RoomFile(self.room, ELSEWHERE, name, size)
        if kind in LAST_KINDS:
            found.is_over, found.ended_at, found.holders = True, ended_at, 0
            self._all[name] = found
            found.file.keep()
        else:
            self._lost.append(found)


def line_of(kind: str, sequence: int, data: bytes) -> bytes:
    """Return one event, with its kind and sequence number, as a line of the file."""
    return b'["%b",%d,%b]\n' % (kind.encode(), sequence, data)


def event_id(call_id: str, sequence: int) -> str:
    """Return the event's id `SEQUENCE:CHECK`. No other event, of this or any other call, has the
    same id.
    """
    return f"{sequence}:{crc32(f'{call_id}:{sequence}'.encode())}"


def records_in(call_id: str, lines: list[bytes], first: int) -> list[Record]:
    """Parse complete lines of the file. `first` is the sequence number of the event in the first
    line.
    """
    records = []
    for number, line in enumerate(lines, first):
        kind, _, data = line.split(b",", 2)
        records.append(Record(kind[2:-1].decode(), event_id(call_id, number), data[:-1]))
    return records


def _resync(reason: str, given: str) -> Record:
    """Return the `resync` event for a reader that requested the events after the id `given`.

    `reason` says why the call has no such event. The id of the `resync` event is empty, so that the
    client forgets the last event id that it received.
    """
    data = {"reason": reason, "message": REASONS[reason], "from": 0, "given": given[:40]}
    return Record(RESYNC, "", _encoded(data))


def _encoded(data: JsonObject) -> bytes:
    """Return an object as one line of UTF-8 JSON."""
    try:
        return to_json(data)  # five times as fast as the standard library
    except PydanticSerializationError:  # a lone surrogate from an embedding program
        # Escapes would double the size of non-ASCII text.
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
