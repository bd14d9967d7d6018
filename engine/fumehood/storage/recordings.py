"""Recordings: the events of calls, one file for each call, kept for a while after its end.

Host side. Written by `pipeline/stream`, read by the faces; `kept_recordings` has the form of the
files. The event loop never writes to the disk: one thread does. Readers follow the file, so a slow
reader costs the daemon no memory. Invariants: readers get complete records, from the beginning or
from behind any event; a file never exceeds its call's limit, and all files together, or those of
one principal, never exceed theirs: the oldest of ended calls make room; recording never fails a
call: what does not fit is left out, one event says so, and the last event is always delivered.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import anyio.to_thread
from pydantic_core import PydanticSerializationError, to_json

from fumehood.core.events import LAST_KINDS
from fumehood.core.json_types import JsonObject
from fumehood.storage.blobs import BlobRoom, NoRoom, NoShare
from fumehood.storage.directory import PRIVATE_FILE, private_directory
from fumehood.storage.errors import StoreError
from fumehood.storage.kept_recordings import (
    Cursor,
    Found,
    KeptRecording,
    KeptRecordings,
    Record,
    RecordedCall,
    cursor_of,
    event_id,
    find_recordings,
    is_line_at,
    line_of,
    read_lines,
    records_in,
)

T = TypeVar("T")

DIRECTORY_NAME = "spool"
MAX_PENDING_BYTES = 16 << 20
"""For one call, waiting for the disk."""

MAX_HELD_BYTES = 32 * 1024
"""For one call: the lines written last, so that readers who wait for them need no disk."""

NO_STORE = "the engine records nothing now"
TOO_SLOW = "the engine's disk is too slow"
DISK_FAILED = "the engine's disk is full or failing"
TOO_MUCH = "the call had more events than are recorded for one"

RESYNC = "resync"
"""Kind of the event that says that a reader starts again from the first event."""

MALFORMED = "malformed"
UNKNOWN = "unknown_event"
REASONS = {
    MALFORMED: "This is not the id of an event.",
    UNKNOWN: "This call has no such event: the id is another call's, or its end was lost.",
}

Data = JsonObject | bytes
"""An event's fields, or the same as one line of JSON."""


class _Entry(NamedTuple):
    kind: str
    data: Data
    is_last: bool = False


class EventRecording:
    """One call's recording. `record` and `finish` may be called from any thread."""

    def __init__(
        self,
        store: RecordingStore,
        call: RecordedCall,
        max_bytes: int,
        notice: Callable[[str], JsonObject],
    ) -> None:
        """`notice` makes the event that explains why the recording stopped."""
        self.call_id = call.call_id
        self.principal_id = call.principal_id
        self.size = 0
        """Bytes of complete lines in the file."""
        self.is_over = False
        """Whether the last event is recorded."""
        self.tail: list[Record] = []
        """Records that did not fit into the file, delivered after it."""
        self._store = store
        self._first_line = call.line()
        self.start = len(self._first_line)
        """Position of the first event."""
        self._max_bytes = max_bytes
        self._notice = notice
        self._lock = threading.RLock()  # a store without a thread drains at once
        self._pending: list[_Entry] = []
        self._pending_bytes = 0
        self._is_draining = self._is_finished = self._is_cut = False
        self._fault = None if store.is_open else NO_STORE
        self._sequence = 0
        self._newest = (0, b"")
        self._taken = 0
        self._file = -1
        self._ended_at = 0.0
        self._holders = 1
        self._waiting: set[asyncio.Event] = set()

    def record(self, kind: str, data: JsonObject, size: int) -> None:
        """Record one event of about `size` bytes. Never waits and never raises."""
        with self._lock:
            if self._fault is not None or self._is_finished:
                return
            if self._pending_bytes + size > MAX_PENDING_BYTES:
                self._fault = TOO_SLOW
                return
            self._pending.append(_Entry(kind, data))
            self._pending_bytes += size
            self._drain_soon()

    def finish(self, kind: str, data: bytes) -> None:
        """Record the last event: readers end there."""
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = True
            self._ended_at = self._store.now().timestamp()
            self._pending.append(_Entry(kind, data, is_last=True))
            self._drain_soon()

    def reader(self, after: str | None = None) -> RecordingReader:
        """A reader from the beginning, or from behind an event, to be closed.

        Only before the last reader of an ended recording has left.
        """
        self._holders += 1
        return RecordingReader(self, after)

    # -- in the thread ---------------------------------------------------------------------

    def _drain_soon(self) -> None:
        """The lock must be held."""
        if not self._is_draining:
            self._is_draining = True
            self._store.drain_soon(self)

    def drain(self) -> Callable[[], None]:
        """Write what is pending by now. Returns what is then due in the event loop.

        What came meanwhile has its turn after the other recordings: a call that prints without end
        delays neither its own readers nor those of others.
        """
        with self._lock:
            batch, self._pending = self._pending, []
            self._pending_bytes = 0
        if batch:
            self._write(batch)
        with self._lock:
            is_over = not self._pending and self._is_finished and not self.is_over
            if self._pending:
                self._store.drain_soon(self)
            else:
                self._is_draining = False
        if is_over:
            self.is_over = True
            return self.leave
        return self.wake

    def _write(self, batch: list[_Entry]) -> None:
        lines: list[bytes] = []
        fits = max(self.size, self.start)
        for entry in () if self._is_cut else batch:
            if entry.is_last and self._fault is not None:
                break  # the notice comes before it
            line = line_of(entry.kind, self._sequence + len(lines), _encoded(entry.data))
            # The answer may have any size: its parts are already limited.
            if fits + len(line) > self._max_bytes and not entry.is_last:
                self._fault = self._fault or TOO_MUCH
                break
            lines.append(line)
            fits += len(line)
        is_written = not lines or self._append(b"".join(lines))
        if is_written:
            self._sequence += len(lines)
        if self._fault is not None and not self._is_cut:
            self._is_cut = True
            self._say("tool_notice", _encoded(self._notice(self._fault)))
        last = batch[-1]
        if last.is_last and not (is_written and len(lines) == len(batch)):
            self._say(last.kind, _encoded(last.data))

    def _say(self, kind: str, data: bytes) -> None:
        """Record one more event although the recording has stopped, in memory if need be."""
        if not self.tail and self._append(line_of(kind, self._sequence, data)):
            self._sequence += 1
            return
        place = event_id(self.call_id, self._sequence, self.size)
        self.tail.append(Record(kind, place, data))
        self._sequence += 1

    def _append(self, data: bytes) -> bool:
        try:
            if not self._store.is_writable:
                raise NoRoom(NO_STORE)
            if self._file < 0:
                self._file = self._store.new_file(self.call_id)
            if not self.size:
                data = self._first_line + data
            self._store.take(self.principal_id, len(data))
            self._taken += len(data)
            write_all(self._file, data, self.size)
        except NoRoom as reason:
            self._fault = str(reason)
        except OSError:
            self._fault = DISK_FAILED
            with suppress(OSError):  # half of it may be there
                os.ftruncate(self._file, self.size)
        else:
            self._newest = (self.size, data if len(data) <= MAX_HELD_BYTES else b"")
            self.size += len(data)
            return True
        return False

    def _close(self) -> None:
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)

    def _remove(self) -> None:
        if self._file < 0:
            return
        self._close()
        self._file = -1
        self._store.delete(self._kept())

    def _kept(self) -> KeptRecording:
        return KeptRecording(
            self.call_id, self.principal_id, self.start, self.size, self._taken, self._ended_at
        )

    # -- for readers, in the event loop -----------------------------------------------------

    async def more(self) -> None:
        """Wait for new records."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)

    def newest(self, place: int) -> bytes:
        """The lines from a position on, if they were written last; else nothing."""
        begin, lines = self._newest
        return lines[place - begin :] if place >= begin else b""

    def read(self, place: int) -> bytes:
        """In a thread: complete lines from a position before `size`."""
        return read_lines(self._file, place, self.size)

    def kind_at(self, cursor: Cursor) -> str | None:
        """In a thread: the kind of the event that is meant, if it is in the file."""
        return is_line_at(self._file, cursor)

    def leave(self) -> None:
        """Called when a reader, or the writer, has left."""
        self.wake()
        self._holders -= 1
        if not self._holders:
            is_whole = self._file >= 0 and not self.tail
            self._store.put_away(self._kept() if is_whole else None, self)

    def wake(self) -> None:
        """Let readers look for new records."""
        for event in self._waiting:
            event.set()


class _Source(Protocol):
    """What a reader reads: a running call's recording, or a kept one."""

    call_id: str
    start: int
    size: int
    is_over: bool
    tail: list[Record]

    async def more(self) -> None: ...

    def newest(self, place: int) -> bytes: ...

    def read(self, place: int) -> bytes: ...

    def kind_at(self, cursor: Cursor) -> str | None: ...

    def leave(self) -> None: ...


class _KeptSource:
    """A kept recording for one reader. Its file is open only while something is read from it."""

    is_over = True

    def __init__(self, kept: KeptRecording, store: RecordingStore) -> None:
        self.call_id, self.start, self.size = kept.call_id, kept.start, kept.size
        self.tail: list[Record] = []
        self._kept = kept
        self._store = store

    async def more(self) -> None:
        """There is no more."""

    def newest(self, place: int) -> bytes:
        """Nothing is held."""
        return b""

    def read(self, place: int) -> bytes:
        return self._opened(lambda file: read_lines(file, place, self.size))

    def kind_at(self, cursor: Cursor) -> str | None:
        return self._opened(lambda file: is_line_at(file, cursor))

    def leave(self) -> None:
        self._store.kept.give_back(self._kept)

    def _opened(self, work: Callable[[int], T]) -> T:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._store.directory / self.call_id, flags)
        try:
            return work(file)
        finally:
            os.close(file)


class RecordingReader:
    """Follows one recording to its end, from its beginning or from behind the event `after`."""

    def __init__(self, source: _Source, after: str | None = None) -> None:
        self.has_ended = False
        """Whether the last event was read, now or before this reader began."""
        self._source = source
        self._after = after
        self._place = source.start
        self._told = 0
        self._skips = False
        self._is_closed = False

    async def read(self) -> list[Record]:
        """The next events, as soon as there are any; empty after the last one.

        If `after` is no event of this call, the first of them is a `resync`, and all follow.

        Raises:
            OSError: the disk has lost the recording.
        """
        after, self._after = self._after, None
        if after is not None:
            reason = await self._seek(after)
            if reason is not None:
                return [_resync(reason, after)]
        source = self._source
        while True:
            is_over = source.is_over
            records: list[Record] = []
            if self._place < source.size:
                chunk = source.newest(self._place)
                if not chunk:
                    chunk = await anyio.to_thread.run_sync(source.read, self._place)
                records = records_in(source.call_id, chunk, self._place)[int(self._skips) :]
                self._place += len(chunk)
                self._skips = False
            elif self._told < len(source.tail):
                records = source.tail[self._told :]
                self._told += len(records)
            elif is_over:
                return []
            elif not source.is_over and self._place >= source.size:
                await source.more()
            if records:
                self.has_ended = records[-1].kind in LAST_KINDS
                return records

    async def _seek(self, after: str) -> str | None:
        """Go behind an event. Returns why that is impossible."""
        source = self._source
        cursor = cursor_of(source.call_id, after)
        if cursor is None:
            return MALFORMED
        for number, record in enumerate(source.tail):
            if record.id == after:
                self._place, self._told = source.size, number + 1
                self.has_ended = record.kind in LAST_KINDS
                return None
        if not source.start <= cursor.place < source.size:
            return UNKNOWN
        kind = await anyio.to_thread.run_sync(source.kind_at, cursor)
        if kind is None:
            return UNKNOWN
        self.has_ended = kind in LAST_KINDS
        self._place, self._skips = cursor.place, True
        return None

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._source.leave()


class RecordingStore:
    """The recordings of one engine. Call `open` before the first and `close` after the last.

    Without a `state` directory they lie in a temporary one, which is removed with the engine.
    `kept_s` is how long a recording is kept after the end of its call; with 0 it goes with it.
    """

    def __init__(
        self, state: Path | None, *, max_bytes: int, kept_s: float, now: Callable[[], datetime]
    ) -> None:
        self.room = BlobRoom(max_bytes)
        self.directory = Path()
        self.is_open = False
        self.is_writable = False
        """Still while it closes: what was recorded before is written."""
        self.now = now
        self.kept = KeptRecordings()
        self.overdue = asyncio.Event()
        self._kept_s = kept_s
        self._live: dict[str, EventRecording] = {}
        self._lost: list[Found] = []
        self._state = state
        self._thread: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undrained: list[EventRecording] = []
        self._lock = threading.Lock()
        self._own: tempfile.TemporaryDirectory[str] | None = None

    async def open(self) -> None:
        """Prepare the directory, and find the recordings of the engine before.

        Raises:
            StoreError: the directory is not private, or cannot be used.
        """
        try:
            if self._state is not None:
                self.directory = private_directory(self._state / DIRECTORY_NAME)
                await anyio.to_thread.run_sync(self._find)
        except OSError as error:
            raise StoreError(f"Calls cannot be recorded: {error.strerror}.") from None
        self.is_open = self.is_writable = True

    async def end_lost(
        self, last_event: Callable[[RecordedCall], Awaitable[tuple[str, bytes]]]
    ) -> int:
        """Give calls that the end of the engine before cut short their last event.

        Returns their number. Until then their events cannot be read.
        """
        lost, self._lost = self._lost, []
        for found in lost:
            kind, data = await last_event(found.call)
            line = line_of(kind, found.sequence, data)
            if await anyio.to_thread.run_sync(self._end, found.kept, line):
                self._keep(found.kept)
        return len(lost)

    def close(self) -> None:
        """Finish pending writes and remove a temporary directory."""
        self.is_open = False
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        self.is_writable = False
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def new(
        self, call: RecordedCall, max_bytes: int, notice: Callable[[str], JsonObject]
    ) -> EventRecording:
        """A new recording. Its file is created with its first event."""
        self._loop = asyncio.get_running_loop()
        recording = EventRecording(self, call, max_bytes, notice)
        self._live[call.call_id] = recording
        return recording

    def find(
        self, call_id: str, principal_id: str, after: str | None = None
    ) -> RecordingReader | None:
        """A reader of this principal's recording; None if there is none."""
        live = self._live.get(call_id)
        if live is not None:
            return live.reader(after) if live.principal_id == principal_id else None
        kept = self.kept.borrow(call_id, principal_id, self._oldest(self.now()))
        return None if kept is None else RecordingReader(_KeptSource(kept, self), after)

    async def prune(self, now: datetime) -> int:
        """Delete recordings that are kept no longer; returns their number."""
        self.overdue.clear()
        old = self.kept.pop_older(self._oldest(now))
        self._delete_soon(old)
        return len(old)

    def put_away(self, kept: KeptRecording | None, recording: EventRecording) -> None:
        """In the event loop, when nobody writes or reads a recording any more. None is removed."""
        self._live.pop(recording.call_id, None)
        if kept is None or self._kept_s <= 0:
            self.submit(recording._remove)
            return
        self.submit(recording._close)
        self._keep(kept)

    def take(self, principal_id: str, size: int) -> None:
        """In the thread: reserve bytes. The oldest recordings that nobody reads make room.

        Raises:
            NoRoom, OSError: as `BlobRoom.take`; there is no such recording left.
        """
        while True:
            try:
                return self.room.take(principal_id, size, self.directory)
            except NoRoom as reason:
                whose = principal_id if isinstance(reason, NoShare) else None
                oldest = self.kept.pop_oldest(whose)
                if oldest is None:
                    raise
                self.delete(oldest)

    def delete(self, kept: KeptRecording) -> None:
        """In the thread: remove the file of a recording that is in no index."""
        with suppress(OSError):
            (self.directory / kept.call_id).unlink(missing_ok=True)
        self.room.give_back(kept.principal_id, kept.taken)

    def submit(self, work: Callable[[], None]) -> None:
        """Run something in the thread, which starts when it is first needed."""
        if self._thread is None:
            if not self.is_open:
                work()  # it writes to no disk then
                return
            self._thread = ThreadPoolExecutor(1, "recordings")
        self._thread.submit(work)

    def drain_soon(self, recording: EventRecording) -> None:
        """Have a recording written, together with all others that have something to write.

        One job of the thread, and one wake-up of the event loop, for all of them: where many calls
        have an event in the same moment, the two would otherwise wait for each other at each one.
        """
        with self._lock:
            self._undrained.append(recording)
            if len(self._undrained) > 1:
                return
        self.submit(self._drain)

    def _drain(self) -> None:
        with self._lock:
            recordings, self._undrained = self._undrained, []
        due = [recording.drain() for recording in recordings]
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                self._loop.call_soon_threadsafe(lambda: [work() for work in due])

    async def drained(self) -> None:
        """Wait until everything that was recorded before is written."""
        for _ in range(2):  # what came while a recording was written has its turn in the next job
            if self._thread is not None:
                await asyncio.wrap_future(self._thread.submit(_nothing))

    def new_file(self, name: str) -> int:
        """In the thread: a recording's file."""
        if self._state is None and self._own is None:
            self._own = tempfile.TemporaryDirectory(prefix="fumehood-spool-")
            self.directory = Path(self._own.name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.directory / name, flags, PRIVATE_FILE)

    def _oldest(self, now: datetime) -> float:
        return (now - timedelta(seconds=self._kept_s)).timestamp()

    def _keep(self, kept: KeptRecording) -> None:
        too_many = self.kept.add(kept)
        if too_many is not None:
            self._delete_soon([too_many])

    def _delete_soon(self, old: Iterable[KeptRecording]) -> None:
        for kept in old:
            self.submit(lambda kept=kept: self.delete(kept))  # type: ignore[misc]

    # -- recordings of the engine before, before the thread exists ---------------------------

    def _find(self) -> None:
        """Take over the files there; the newest ones first, as far as there is room."""
        fitting = []
        for found in reversed(find_recordings(self.directory)):
            kept = found.kept
            try:
                if self._kept_s <= 0:
                    raise NoRoom
                self.room.take(kept.principal_id, kept.taken, self.directory)
            except (NoRoom, OSError):
                with suppress(OSError):
                    (self.directory / kept.call_id).unlink()
            else:
                fitting.append(found)
        for found in reversed(fitting):
            if not found.is_over:
                self._lost.append(found)
            elif (too_many := self.kept.add(found.kept)) is not None:
                self.delete(too_many)

    def _end(self, kept: KeptRecording, line: bytes) -> bool:
        """Append the last event. If that fails, the file is removed."""
        try:
            file = os.open(
                self.directory / kept.call_id, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            )
            try:
                self.take(kept.principal_id, len(line))
                kept.taken += len(line)
                write_all(file, line, kept.size)
            finally:
                os.close(file)
        except (NoRoom, OSError):
            self.delete(kept)
            return False
        kept.size += len(line)
        kept.ended_at = self.now().timestamp()
        return True


def _nothing() -> None:
    pass


def write_all(file: int, data: bytes, place: int) -> None:
    """Write everything at a position of a file. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, place)
        view, place = view[done:], place + done


def _resync(reason: str, given: str) -> Record:
    """The event before a new start. Its id is empty, so that a client forgets the one it has."""
    data = {"reason": reason, "message": REASONS[reason], "from": 0, "given": given[:40]}
    return Record(RESYNC, "", _encoded(data))


def _encoded(data: Data) -> bytes:
    """JSON in UTF-8 on one line, as it is sent: escapes would double the size of non-ASCII text."""
    if isinstance(data, bytes):
        return data
    try:
        return to_json(data)  # five times as fast as the standard library's
    except PydanticSerializationError:  # half a character, of an embedding program's own
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
