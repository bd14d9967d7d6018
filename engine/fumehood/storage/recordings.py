"""Recordings: the events of running calls, one file for each call while it runs.

Host side. Written by `pipeline/stream`, read by the faces. The event loop never writes to the disk:
one thread does. Readers follow the file, so a slow reader costs the daemon no memory. Invariants:
readers get complete records; a file never exceeds its call's limit, and all files together, or
those of one principal, never exceed theirs; recording never fails a call: what does not fit is left
out, one event says so, and the last event is always delivered.

A record is one line, `["kind",SEQUENCE,data]`; its id is `SEQUENCE:OFFSET`, where OFFSET is the
position of the line in the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
from pydantic_core import PydanticSerializationError, to_json

from fumehood.core.json_types import JsonObject
from fumehood.storage.blobs import BlobRoom, NoRoom
from fumehood.storage.directory import PRIVATE_FILE, private_directory
from fumehood.storage.errors import StoreError

DIRECTORY_NAME = "spool"
READ_BYTES = 128 * 1024
"""For one step of a reader; a longer line is read whole."""

MAX_PENDING_BYTES = 16 << 20
"""For one call, waiting for the disk."""

NO_STORE = "the engine records nothing now"
TOO_SLOW = "the engine's disk is too slow"
DISK_FAILED = "the engine's disk is full or failing"
TOO_MUCH = "the call had more events than are recorded for one"

Data = JsonObject | bytes
"""An event's fields, or the same as one line of JSON."""


class Record(NamedTuple):
    """One recorded event."""

    kind: str
    id: str
    data: bytes


class _Entry(NamedTuple):
    kind: str
    data: Data
    is_last: bool = False


class EventRecording:
    """One call's recording. `record` and `finish` may be called from any thread."""

    def __init__(
        self,
        store: RecordingStore,
        name: str,
        principal_id: str,
        max_bytes: int,
        notice: Callable[[str], JsonObject],
    ) -> None:
        """`notice` makes the event that explains why the recording stopped."""
        self.size = 0
        """Bytes of complete lines in the file."""
        self.is_over = False
        """Whether the last event is recorded."""
        self.tail: list[Record] = []
        """Records that did not fit into the file, delivered after it."""
        self._store = store
        self._name = name
        self._principal_id = principal_id
        self._max_bytes = max_bytes
        self._notice = notice
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()  # a store without a thread drains at once
        self._pending: list[_Entry] = []
        self._pending_bytes = 0
        self._is_draining = self._is_finished = False
        self._fault = None if store.is_open else NO_STORE
        self._sequence = 0
        self._taken = 0
        self._file = -1
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
        """Record the last event: readers end there, and then the file is removed."""
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = True
            self._pending.append(_Entry(kind, data, is_last=True))
            self._drain_soon()

    def drop(self) -> None:
        """End the recording without an event."""
        with self._lock:
            self._is_finished = True
            self._drain_soon()

    def reader(self) -> RecordingReader:
        """A reader from the beginning, to be closed. Only before the recording is over."""
        self._holders += 1
        return RecordingReader(self)

    # -- in the thread ---------------------------------------------------------------------

    def _drain_soon(self) -> None:
        """The lock must be held."""
        if not self._is_draining:
            self._is_draining = True
            self._store.submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                batch, self._pending = self._pending, []
                self._pending_bytes = 0
                if not batch:
                    self._is_draining = False
                    is_over = self._is_finished and not self.is_over
                    break
            self._write(batch)
            self._tell(self._wake)
        if is_over:
            self.is_over = True
            self._tell(self._leave)

    def _write(self, batch: list[_Entry]) -> None:
        lines: list[bytes] = []
        fits = self.size
        is_kept = self._file >= 0 or self._fault is None
        for entry in batch if is_kept and not self.tail else ():
            line = _line(entry.kind, self._sequence + len(lines), _encoded(entry.data))
            # The answer may have any size: its parts are already limited.
            if fits + len(line) > self._max_bytes and not entry.is_last:
                self._fault = self._fault or TOO_MUCH
                break
            lines.append(line)
            fits += len(line)
        written = self._append(b"".join(lines)) if lines else True
        if written:
            self._sequence += len(lines)
        if self._fault is not None and not self.tail:
            self._tell_after("tool_notice", _encoded(self._notice(self._fault)))
        last = batch[-1]
        if last.is_last and not (written and len(lines) == len(batch)):
            self._tell_after(last.kind, _encoded(last.data))

    def _append(self, data: bytes) -> bool:
        try:
            if not self._store.is_open:
                raise NoRoom(NO_STORE)
            if self._file < 0:
                self._file = self._store.new_file(self._name)
            self._store.room.take(self._principal_id, len(data), self._store.directory)
            self._taken += len(data)
            view, place = memoryview(data), self.size
            while view:
                done = os.pwrite(self._file, view, place)
                view, place = view[done:], place + done
        except NoRoom as reason:
            self._fault = str(reason)
        except OSError:
            self._fault = DISK_FAILED
        else:
            self.size += len(data)
            return True
        return False

    def _tell_after(self, kind: str, data: bytes) -> None:
        self.tail.append(Record(kind, f"{self._sequence}:{self.size}", data))
        self._sequence += 1

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            self._loop.call_soon_threadsafe(what)

    def _remove(self) -> None:
        if self._file < 0:
            return
        with suppress(OSError):
            os.close(self._file)
        with suppress(OSError):
            (self._store.directory / self._name).unlink(missing_ok=True)
        self._file = -1
        self._store.room.give_back(self._principal_id, self._taken)

    # -- for readers, in the event loop -----------------------------------------------------

    async def _more(self) -> None:
        """Wait for new records."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    def _leave(self) -> None:
        """Called when a reader, or the writer, has left."""
        self._wake()
        self._holders -= 1
        if not self._holders:
            self._store.submit(self._remove)

    def _read(self, place: int) -> bytes:
        """In a thread: complete lines from a position before `size`."""
        most = min(self.size - place, READ_BYTES)
        chunk = os.pread(self._file, most, place)
        while (end := chunk.rfind(b"\n")) < 0 and len(chunk) < self.size - place:
            more = os.pread(self._file, READ_BYTES, place + len(chunk))
            if not more:  # somebody has cut the file
                raise OSError("a recording has become shorter")
            chunk += more
        return chunk[: end + 1]


class RecordingReader:
    """Follows one recording from its beginning to its end."""

    def __init__(self, recording: EventRecording) -> None:
        self._recording = recording
        self._place = 0
        self._told = 0
        self._is_closed = False

    async def read(self) -> list[Record]:
        """The next events, as soon as there are any; empty after the last one.

        Raises:
            OSError: the disk has lost the recording.
        """
        recording = self._recording
        while True:
            is_over = recording.is_over
            if self._place < recording.size:
                chunk = await anyio.to_thread.run_sync(recording._read, self._place)
                records = _records(chunk, self._place)
                self._place += len(chunk)
                return records
            if self._told < len(recording.tail):
                records = recording.tail[self._told :]
                self._told += len(records)
                return records
            if is_over:
                return []
            if recording.is_over or self._place < recording.size:
                continue
            await recording._more()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._recording._leave()


class RecordingStore:
    """The recordings of one engine. Call `open` before the first and `close` after the last.

    Without a `state` directory they lie in a temporary one, which is removed with the engine.
    """

    def __init__(self, state: Path | None, *, max_bytes: int) -> None:
        self.room = BlobRoom(max_bytes)
        self.directory = Path()
        self.is_open = False
        self._state = state
        self._thread: ThreadPoolExecutor | None = None
        self._own: tempfile.TemporaryDirectory[str] | None = None

    async def open(self) -> None:
        """Prepare the directory and remove the leftovers of a crash.

        Raises:
            StoreError: the directory is not private, or cannot be used.
        """
        try:
            if self._state is not None:
                self.directory = private_directory(self._state / DIRECTORY_NAME)
                await anyio.to_thread.run_sync(_clear, self.directory)
        except OSError as error:
            raise StoreError(f"Calls cannot be recorded: {error.strerror}.") from None
        self.is_open = True

    def close(self) -> None:
        """Finish pending writes and remove a temporary directory."""
        self.is_open = False
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def new(
        self, name: str, principal_id: str, max_bytes: int, notice: Callable[[str], JsonObject]
    ) -> EventRecording:
        """A new recording. Its file is created with its first event."""
        return EventRecording(self, name, principal_id, max_bytes, notice)

    def submit(self, work: Callable[[], None]) -> None:
        """Run something in the thread, which starts when it is first needed."""
        if self._thread is None:
            if not self.is_open:
                work()  # it writes to no disk then
                return
            self._thread = ThreadPoolExecutor(1, "recordings")
        self._thread.submit(work)

    def new_file(self, name: str) -> int:
        """In the thread: a recording's file."""
        if self._state is None and self._own is None:
            self._own = tempfile.TemporaryDirectory(prefix="fumehood-spool-")
            self.directory = Path(self._own.name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.directory / name, flags, PRIVATE_FILE)


def _line(kind: str, sequence: int, data: bytes) -> bytes:
    return b'["%b",%d,%b]\n' % (kind.encode(), sequence, data)


def _records(chunk: bytes, place: int) -> list[Record]:
    records = []
    for line in chunk.splitlines(keepends=True):
        kind, sequence, data = line.split(b",", 2)
        records.append(Record(kind[2:-1].decode(), f"{sequence.decode()}:{place}", data[:-2]))
        place += len(line)
    return records


def _encoded(data: Data) -> bytes:
    """JSON in UTF-8 on one line, as it is sent: escapes would double the size of non-ASCII text."""
    if isinstance(data, bytes):
        return data
    try:
        return to_json(data)  # five times as fast as the standard library's
    except PydanticSerializationError:  # half a character, of an embedding program's own
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        with suppress(OSError):  # a directory of somebody's stays, and is no recording
            path.unlink()
