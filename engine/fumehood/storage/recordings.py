"""Recordings: the events of calls, one file for each call, kept for a while after its end.

Host side, in a `file_room`. Written by `pipeline/stream`, read by the public interfaces. A file's
first line describes its call; each other line is one event, `["kind",SEQUENCE,data]`. Readers read
the file, so that a slow reader uses none of the daemon's memory. Invariants: readers get complete
events, from the beginning or after any event; apart from the last event, a file never exceeds its
call's limit; its first line names the one principal that owns it; a file with readers is not
removed. Recording never fails a call: events that do not fit are omitted, one event reports that,
and the last event is always delivered. A crash can leave an incomplete last line, which the next
start removes.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import anyio.to_thread
from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError, to_json

from fumehood.core.events import LAST_KINDS
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json
from fumehood.storage.errors import StoreError
from fumehood.storage.file_room import DISK_FAILED, TOO_SLOW, FileRoom, NoRoom

DIRECTORY_NAME = "spool"
MAX_PENDING_BYTES = 16 << 20
"""Bytes of one call's events that may wait to be written."""

MAX_HELD_BYTES = 32 * 1024
"""Bytes of one call's newest lines that stay in memory, so that waiting readers need no disk
access.
"""

MAX_KEPT = 10_000
"""Recordings of ended calls that are kept. Needed because a size limit allows many small files."""

READ_BYTES = 128 * 1024
"""Bytes that a reader reads at once. A longer line is read completely."""

NO_STORE = "the engine records nothing now"
TOO_MUCH = "the call had more events than are recorded for one"

RESYNC = "resync"
"""Kind of the event that tells a client that a reader starts again from the first event."""

MALFORMED = "malformed"
UNKNOWN = "unknown_event"
REASONS = {
    MALFORMED: "This is not the id of an event.",
    UNKNOWN: "This call has no such event: the id is another call's, or its end was lost.",
}
CURSOR = re.compile(r"(0|[1-9][0-9]{0,14}):(0|[1-9][0-9]{0,14})")
HEAD_BYTES = 80
"""Upper bound for the beginning of a line, `["kind",SEQUENCE,`."""

Data = JsonObject | bytes
"""An event's fields, or those fields as one line of JSON."""


class RecordedCall(NamedTuple):
    """The call of a recording: the first line of its file."""

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
    """One call's recording. `record` and `finish` may be called from any thread."""

    __slots__ = (
        "_fault", "_file", "_is_draining", "_is_finished", "_lock", "_max_bytes", "_newest",
        "_notice", "_pending", "_pending_bytes", "_sequence", "_store", "_waiting", "call",
        "ended_at", "holders", "is_over", "size", "start", "tail", "taken",
    )  # fmt: skip

    def __init__(
        self,
        store: RecordingStore,
        call: RecordedCall,
        max_bytes: int = 0,
        notice: Callable[[str], JsonObject] | None = None,
        *,
        size: int = 0,
        sequence: int = 0,
    ) -> None:
        """Begin a recording, or continue a file of an earlier engine.

        `notice` makes the data of the event that explains why the recording stopped. `size` is the
        file's size in bytes and `sequence` the number of its next event.
        """
        self.call = call
        self.size = self.taken = size
        """`size`: bytes of complete lines in the file. `taken`: bytes reserved for it in the room.
        """
        self.is_over = False
        """Whether the last event is recorded."""
        self.ended_at = 0.0
        """When the call ended, in Unix seconds; 0 before."""
        self.tail: list[Record] = []
        """Records that did not fit into the file, delivered after it."""
        self.holders = 1
        """Number of readers, plus one for the writer."""
        self._store = store
        self.start = len(call.line())
        """Byte offset of the first event in the file."""
        self._max_bytes = max_bytes
        self._notice = notice
        self._lock = threading.RLock()  # reentrant, because a closed store drains in the same call
        self._pending: list[tuple[str, Data]] = []
        self._pending_bytes = 0
        self._is_draining = self._is_finished = False
        self._fault = None if store.room.is_open else NO_STORE
        self._sequence = sequence
        self._newest = (0, b"")
        self._file = -1
        self._waiting: list[asyncio.Event] = []

    def record(self, kind: str, data: JsonObject, size: int) -> None:
        """Record one event of about `size` bytes. Never waits and never raises."""
        with self._lock:
            if self._fault is not None or self._is_finished:
                return
            if self._pending_bytes + size > MAX_PENDING_BYTES:
                self._fault = TOO_SLOW
                return
            self._pending_bytes += size
            self._add(kind, data)

    def finish(self, kind: str, data: bytes) -> None:
        """Record the last event, at which readers stop."""
        with self._lock:
            if not self._is_finished:
                self._is_finished = True
                self.ended_at = self._store.now().timestamp()
                self._add(kind, data)

    def reader(self, after: str | None = None) -> RecordingReader:
        """Return a reader from the beginning, or after an event. The caller closes it.

        Must not be called once the writer and the last reader have left.
        """
        self.holders += 1
        return RecordingReader(self, after)

    # -- in the thread ---------------------------------------------------------------------

    def _add(self, kind: str, data: Data) -> None:
        """Add an event to the pending ones. The caller must hold the lock."""
        self._pending.append((kind, data))
        if not self._is_draining:
            self._is_draining = True
            self._store.drain_soon(self)

    def drain(self) -> Callable[[], None]:
        """Write the pending events. Return a function to be called in the event loop afterwards.

        Events that arrive meanwhile are written after the other recordings, so that a call that
        prints endlessly delays neither its own readers nor others.
        """
        with self._lock:
            batch, self._pending = self._pending, []
            self._pending_bytes = 0
        self._write(batch)
        with self._lock:
            if self._pending:
                self._store.drain_soon(self)
                return self.wake
            self._is_draining = False
            if not self._is_finished:
                return self.wake
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._notice = None  # it refers to the call, which can now be freed
        self.is_over = True
        return self.leave

    def _write(self, batch: Sequence[tuple[str, Data]]) -> None:
        lines: list[bytes] = []
        fits = max(self.size, self.start)
        for kind, data in batch:
            if self._fault is not None:
                break
            line = line_of(kind, self._sequence + len(lines), _encoded(data))
            # The last event may exceed the limit: the answer's parts have limits of their own.
            if fits + len(line) > self._max_bytes and kind not in LAST_KINDS:
                self._fault = TOO_MUCH
                break
            lines.append(line)
            fits += len(line)
        left = batch[len(lines) :] if self._append(lines) else batch
        if self._fault is not None and self._notice is not None:
            notice, self._notice = self._notice, None
            self._tell("tool_notice", notice(self._fault))
        if left and left[-1][0] in LAST_KINDS:
            self._tell(*left[-1])

    def _tell(self, kind: str, data: Data) -> None:
        """Record one more event after the recording has stopped, in memory if necessary."""
        line = _encoded(data)
        if self.tail or not self._append([line_of(kind, self._sequence, line)]):
            place = event_id(self.call.call_id, self._sequence, self.size)
            self.tail.append(Record(kind, place, line))
            self._sequence += 1

    def _append(self, lines: list[bytes]) -> bool:
        if not lines:
            return True
        data, room = b"".join(lines), self._store.room
        if not self.size:
            data = self.call.line() + data
        try:
            if not room.is_open:
                raise NoRoom(NO_STORE)
            room.take(self.call.principal_id, len(data))
            self.taken += len(data)
            if self._file < 0:
                self._file = self._store.file(self.call.call_id, is_new=not self.size)
            write_all(self._file, data, self.size)
        except NoRoom as reason:
            self._fault = str(reason)
        except OSError:
            self._fault = DISK_FAILED
            with suppress(OSError):  # remove an incomplete line
                os.ftruncate(self._file, self.size)
        else:
            self._newest = (self.size, data if len(data) <= MAX_HELD_BYTES else b"")
            self.size += len(data)
            self._sequence += len(lines)
            return True
        return False

    # -- for readers, in the event loop -----------------------------------------------------

    async def more(self) -> None:
        """Wait for new records."""
        event = asyncio.Event()
        self._waiting.append(event)
        try:
            await event.wait()
        finally:
            self._waiting.remove(event)

    def newest(self, place: int) -> bytes:
        """Return the lines from a position on if they are still in memory, else empty bytes."""
        begin, lines = self._newest
        return lines[place - begin :] if place >= begin else b""

    def read(self, place: int) -> bytes:
        """Read complete lines from a position before `size`. Runs in a thread. Raises OSError."""
        with self._to_read() as file:
            chunk = os.pread(file, min(self.size - place, READ_BYTES), place)
            while (end := chunk.rfind(b"\n")) < 0 and len(chunk) < self.size - place:
                more = os.pread(file, READ_BYTES, place + len(chunk))
                if not more:  # the file was truncated
                    raise OSError("a recording has become shorter")
                chunk += more
        return chunk[: end + 1]

    def has_event_at(self, sequence: int, place: int) -> bool:
        """Whether the event with this number begins at `place`. Runs in a thread."""
        with self._to_read() as file:
            head = os.pread(file, HEAD_BYTES, place - 1)
        # Events have no line breaks inside, so a line break shows that a line begins here.
        return re.match(rb'\n\["[a-z_]+",%d,' % sequence, head) is not None

    @contextmanager
    def _to_read(self) -> Iterator[int]:
        """Open the file for one read only: there may be more readers than file descriptors."""
        file = self._store.file(self.call.call_id)
        try:
            yield file
        finally:
            os.close(file)

    def leave(self) -> None:
        """Count one holder less: a reader, or the writer.

        The last one has the recording put away.
        """
        self.wake()
        self.holders -= 1
        if not self.holders:
            self._newest = (0, b"")
            self._store.put_away(self)

    def wake(self) -> None:
        """Wake waiting readers, which then check for new records."""
        for event in self._waiting:
            event.set()


class RecordingReader:
    """Follows one recording to its end, from its beginning or after the event `after`."""

    def __init__(self, source: Recording, after: str | None = None) -> None:
        self._source = source
        self._after = after
        self._place = source.start
        self._told = 0
        self._skips = False
        self._is_closed = False

    async def read(self) -> list[Record]:
        """Wait for the next events and return them; an empty list after the last event.

        If `after` is not an event of this call, a `resync` event comes first, then all events.

        Raises:
            OSError: the recording cannot be read any more.
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
                records = records_in(source.call.call_id, chunk, self._place)[int(self._skips) :]
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
                return records

    async def _seek(self, after: str) -> str | None:
        """Move to the position after an event, or return the reason why that is impossible."""
        source, found = self._source, CURSOR.fullmatch(after)
        if found is None:
            return MALFORMED
        for number, record in enumerate(source.tail):
            if record.id == after:
                self._place, self._told = source.size, number + 1
                return None
        sequence, place = int(found[1]), int(found[2]) - crc32(source.call.call_id.encode())
        if not source.start <= place < source.size:
            return UNKNOWN
        if not await anyio.to_thread.run_sync(source.has_event_at, sequence, place):
            return UNKNOWN
        self._place, self._skips = place, True
        return None

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._source.leave()


class RecordingStore:
    """The recordings of one engine. Call `open` before the first and `close` after the last.

    `kept_s` is how many seconds a recording is kept after its call ends; 0 removes it at the end.
    """

    def __init__(
        self, state: Path | None, *, max_bytes: int, kept_s: float, now: Callable[[], datetime]
    ) -> None:
        self._all: dict[str, Recording] = {}
        """Recordings of running calls, recordings with readers, and kept recordings, by call id."""
        self.room = FileRoom(state, DIRECTORY_NAME, max_bytes, self._forget, max_files=MAX_KEPT)
        self.now = now
        self._kept_s = kept_s
        self._lost: list[tuple[RecordedCall, int, int]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undrained: list[Recording] = []
        self._lock = threading.Lock()

    async def open(self) -> None:
        """Prepare the directory, and find the recordings of the previous engine.

        Raises:
            StoreError: the directory is not private, or cannot be used.
        """
        try:
            if self.room.prepare():
                await anyio.to_thread.run_sync(self._find)
        except OSError as error:
            raise StoreError(f"Calls cannot be recorded: {error.strerror}.") from None
        self.room.open()

    async def end_lost(
        self, last_event: Callable[[RecordedCall], Awaitable[tuple[str, bytes]]]
    ) -> int:
        """Record a last event for each call that was still running when the previous engine ended.

        Returns the number of these calls. Their events cannot be read before this.
        """
        self._loop = asyncio.get_running_loop()
        lost, self._lost = self._lost, []
        for call, size, sequence in lost:
            last = await last_event(call)
            found = Recording(self, call, size=size, sequence=sequence)
            self._all[call.call_id] = found
            found.finish(*last)
        return len(lost)

    def close(self) -> None:
        """Finish pending writes and remove a temporary directory."""
        self.room.close()

    def new(
        self, call: RecordedCall, max_bytes: int, notice: Callable[[str], JsonObject]
    ) -> Recording:
        """Return a new recording. Its file is created with its first event."""
        self._loop = asyncio.get_running_loop()
        recording = self._all[call.call_id] = Recording(self, call, max_bytes, notice)
        return recording

    def find(
        self, call_id: str, principal_id: str, after: str | None = None
    ) -> RecordingReader | None:
        """Return a reader of this principal's recording, or None if there is no such recording."""
        found = self._all.get(call_id)
        if found is None or found.call.principal_id != principal_id:
            return None
        if found.is_over and found.ended_at <= self._oldest(self.now()):
            return None
        if not found.holders and not self.room.hold(principal_id, call_id):
            return None  # it was just evicted
        return found.reader(after)

    async def prune(self, now: datetime) -> int:
        """Delete expired recordings; return their number."""
        oldest = self._oldest(now)
        old = [
            one
            for one in list(self._all.values())
            if not one.holders
            and one.ended_at <= oldest
            and self.room.hold(one.call.principal_id, one.call.call_id)
        ]
        for one in old:
            self._drop(one)
        return len(old)

    def put_away(self, recording: Recording) -> None:
        """Keep or delete a recording without holders. Called in the event loop."""
        if self._kept_s > 0 and recording.size and not recording.tail:
            call = recording.call
            self.room.keep(call.principal_id, call.call_id, recording.taken)
        else:
            self._drop(recording)

    def drain_soon(self, recording: Recording) -> None:
        """Schedule writing a recording, together with all others that have pending events.

        All of them share one job of the thread and one wake-up of the event loop. Otherwise thread
        and loop would wait for each other at every event of many simultaneous calls.
        """
        with self._lock:
            self._undrained.append(recording)
            if len(self._undrained) > 1:
                return
        if self.room.submit(self._drain) is None:
            self._drain()  # a closed room writes nothing, so this does not block

    async def drained(self) -> None:
        """Wait until everything that was recorded before is written."""
        for _ in range(2):  # events that arrive during a write need a second job
            await self.room.drained()

    def file(self, name: str, *, is_new: bool = False) -> int:
        """Open a recording's file. Runs in a thread. Raises OSError."""
        if is_new:
            return self.room.create(name)
        return os.open(self.room.directory / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _drain(self) -> None:
        with self._lock:
            recordings, self._undrained = self._undrained, []
        due = [recording.drain() for recording in recordings]
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, so no reader waits
                self._loop.call_soon_threadsafe(lambda: [work() for work in due])

    def _drop(self, recording: Recording) -> None:
        call, taken = recording.call, recording.taken
        self._forget(call.call_id)
        remove = partial(self.room.discard, call.principal_id, call.call_id, taken)
        if taken and self.room.submit(remove) is None:
            remove()  # the engine is stopping, and the thread takes no more work

    def _forget(self, call_id: str) -> None:
        self._all.pop(call_id, None)

    def _oldest(self, now: datetime) -> float:
        return (now - timedelta(seconds=self._kept_s)).timestamp()

    def _find(self) -> None:
        """Take over the previous engine's files, oldest first. Runs before the thread exists."""
        paths = [(path.lstat().st_mtime, path) for path in self.room.directory.iterdir()]
        for ended_at, path in sorted(paths):
            try:
                if self._kept_s <= 0:
                    raise NoRoom
                self._take_over(path.name, ended_at)
            except (NoRoom, OSError, ValueError):
                self.room.unlink(path.name)

    def _take_over(self, name: str, ended_at: float) -> None:
        """Keep a file of the previous engine, without an incomplete last line.

        Raises:
            NoRoom: the room has no space for it.
            OSError, ValueError: the file is not a recording.
        """
        file = self.file(name)
        try:
            with mmap.mmap(file, 0) as content:
                start, size = content.find(b"\n") + 1, content.rfind(b"\n") + 1
                call = _CALL.validate_json(content[:start], strict=True)
                if call.call_id != name or call.line() != content[:start]:
                    raise ValueError("another call")
                sequence, kind = 0, b""
                if size > start:
                    place = content.rfind(b"\n", 0, size - 1) + 1
                    kind, number, _ = content[place : place + HEAD_BYTES].split(b",", 2)
                    sequence = int(number) + 1
            os.ftruncate(file, size)
        finally:
            os.close(file)
        self.room.take(call.principal_id, size)
        if kind[2:-1].decode() not in LAST_KINDS:
            self._lost.append((call, size, sequence))
            return
        kept = self._all[name] = Recording(self, call, size=size)
        kept.is_over, kept.ended_at, kept.holders = True, ended_at, 0
        self.room.keep(call.principal_id, name, size)


_CALL: TypeAdapter[RecordedCall] = TypeAdapter(RecordedCall)


def line_of(kind: str, sequence: int, data: bytes) -> bytes:
    """Format one event as a line of the file."""
    return b'["%b",%d,%b]\n' % (kind.encode(), sequence, data)


def event_id(call_id: str, sequence: int, place: int) -> str:
    """Return the id `SEQUENCE:OFFSET`.

    Each call shifts its offsets, so that ids of two calls differ.
    """
    return f"{sequence}:{place + crc32(call_id.encode())}"


def records_in(call_id: str, chunk: bytes, place: int) -> list[Record]:
    """Parse complete lines, the first of which begins at `place`.

    Raises:
        OSError: the bytes are not lines of a recording.
    """
    records = []
    for line in chunk.splitlines(keepends=True):
        try:
            kind, sequence, data = line.split(b",", 2)
            found = Record(kind[2:-1].decode(), event_id(call_id, int(sequence), place), data[:-2])
        except ValueError:
            raise OSError("a recording is damaged") from None
        records.append(found)
        place += len(line)
    return records


def write_all(file: int, data: bytes, place: int) -> None:
    """Write all bytes at a position of a file. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, place)
        view, place = view[done:], place + done


def _resync(reason: str, given: str) -> Record:
    """Return the `resync` event. Its empty id makes a client forget its last event id."""
    data = {"reason": reason, "message": REASONS[reason], "from": 0, "given": given[:40]}
    return Record(RESYNC, "", _encoded(data))


def _encoded(data: Data) -> bytes:
    """Encode as one line of UTF-8 JSON, without escapes for non-ASCII text, which would double its
    size."""
    if isinstance(data, bytes):
        return data
    try:
        return to_json(data)  # five times as fast as the standard library
    except PydanticSerializationError:  # a lone surrogate from an embedding program
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
