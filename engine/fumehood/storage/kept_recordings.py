"""Kept recordings: files with the events of ended calls, and what is found after a crash.

Host side, private part of `recordings`. A file begins with one line about its call, and each other
line is one event, `["kind",SEQUENCE,data]`. Invariants: an incomplete last line, which a crash can
leave, is cut off before anybody reads the file; a file belongs to one principal, by its first line;
a file that somebody reads is not removed.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from fumehood.core.events import LAST_KINDS
from fumehood.protocol import strict_json

READ_BYTES = 128 * 1024
"""For one step of a reader; a longer line is read whole."""

MAX_KEPT = 10_000
"""Recordings of ended calls; one principal may have half. Small files would fit in any number."""

CURSOR = re.compile(r"(0|[1-9][0-9]{0,14}):(0|[1-9][0-9]{0,14})")
HEAD_BYTES = 80
"""More than the beginning of a line, `["kind",SEQUENCE,`, can have."""


class RecordedCall(NamedTuple):
    """The call of a recording, as the first line of its file has it."""

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


class Cursor(NamedTuple):
    """A well-formed event id: the event's number, and its position in the file of its call."""

    sequence: int
    place: int


@dataclass(slots=True)
class KeptRecording:
    """One recording of an ended call."""

    call_id: str
    principal_id: str
    start: int
    """Position of the first event."""

    size: int
    taken: int
    """Bytes that are reserved for it."""

    ended_at: float
    """Unix time."""

    readers: int = 0


@dataclass(slots=True)
class Found:
    """A file of an earlier engine. `sequence` is the number of the next event."""

    call: RecordedCall
    kept: KeptRecording
    sequence: int
    is_over: bool


class KeptRecordings:
    """The recordings of ended calls, oldest first. For the event loop and the store's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, KeptRecording] = {}
        self._count: Counter[str] = Counter()

    def add(self, kept: KeptRecording) -> KeptRecording | None:
        """Add the newest. Returns the oldest if there are too many now; it is to be deleted."""
        with self._lock:
            self._all[kept.call_id] = kept
            self._count[kept.principal_id] += 1
            if self._count[kept.principal_id] > MAX_KEPT // 2:
                return self._pop_oldest(kept.principal_id)
            return self._pop_oldest(None) if len(self._all) > MAX_KEPT else None

    def borrow(self, call_id: str, principal_id: str, since: float) -> KeptRecording | None:
        """One that ended after `since`, to be read and given back."""
        with self._lock:
            kept = self._all.get(call_id)
            if kept is None or kept.principal_id != principal_id or kept.ended_at <= since:
                return None
            kept.readers += 1
            return kept

    def give_back(self, kept: KeptRecording) -> None:
        with self._lock:
            kept.readers -= 1

    def pop_oldest(self, principal_id: str | None) -> KeptRecording | None:
        """Remove the oldest that nobody reads, of this principal or of all."""
        with self._lock:
            return self._pop_oldest(principal_id)

    def pop_older(self, than: float) -> list[KeptRecording]:
        """Remove all that ended before, and that nobody reads."""
        with self._lock:
            old = [one for one in self._all.values() if one.ended_at <= than and not one.readers]
            return [self._pop(one) for one in old]

    def __len__(self) -> int:
        return len(self._all)

    def _pop_oldest(self, principal_id: str | None) -> KeptRecording | None:
        for kept in self._all.values():
            if not kept.readers and principal_id in (None, kept.principal_id):
                return self._pop(kept)
        return None

    def _pop(self, kept: KeptRecording) -> KeptRecording:
        del self._all[kept.call_id]
        self._count[kept.principal_id] -= 1
        if not self._count[kept.principal_id]:
            del self._count[kept.principal_id]
        return kept


# -- lines -----------------------------------------------------------------------------------


def line_of(kind: str, sequence: int, data: bytes) -> bytes:
    """One event as it stands in the file."""
    return b'["%b",%d,%b]\n' % (kind.encode(), sequence, data)


def event_id(call_id: str, sequence: int, place: int) -> str:
    """`SEQUENCE:OFFSET`. Offsets begin elsewhere for each call, so that no id is another call's."""
    return f"{sequence}:{place + crc32(call_id.encode())}"


def cursor_of(call_id: str, text: str) -> Cursor | None:
    """The position that an event's id means; None if the text is no id."""
    found = CURSOR.fullmatch(text)
    if found is None:
        return None
    return Cursor(int(found[1]), int(found[2]) - crc32(call_id.encode()))


def records_in(call_id: str, chunk: bytes, place: int) -> list[Record]:
    """The events of complete lines that begin at `place`.

    Raises:
        OSError: these are not lines of a recording.
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


def read_lines(file: int, place: int, size: int) -> bytes:
    """Complete lines from `place`, which must be before `size`, where the last line ends.

    Raises:
        OSError: the file is shorter, or cannot be read.
    """
    chunk = os.pread(file, min(size - place, READ_BYTES), place)
    while (end := chunk.rfind(b"\n")) < 0 and len(chunk) < size - place:
        more = os.pread(file, READ_BYTES, place + len(chunk))
        if not more:  # somebody has cut the file
            raise OSError("a recording has become shorter")
        chunk += more
    return chunk[: end + 1]


def is_line_at(file: int, cursor: Cursor) -> str | None:
    """The kind of the event whose line begins there; None if no line of this number does."""
    head = os.pread(file, HEAD_BYTES, cursor.place - 1)
    kind, *rest = head.split(b",", 2)
    if not kind.startswith(b'\n["') or len(rest) < 2 or rest[0] != b"%d" % cursor.sequence:
        return None  # no event contains a line break, so a line begins behind each of them
    return kind[3:-1].decode("ascii", "replace")


# -- after a crash ---------------------------------------------------------------------------


def find_recordings(directory: Path) -> list[Found]:
    """The recordings of an earlier engine, oldest first. Everything else there is removed."""
    found = []
    for path in directory.iterdir():
        one: Found | None = None
        with suppress(OSError, ValueError):
            one = _read(path)
        if one is not None:
            found.append(one)
            continue
        with suppress(OSError):  # a directory of somebody's stays, and is no recording
            path.unlink()
    return sorted(found, key=lambda one: one.kept.ended_at)


def _read(path: Path) -> Found | None:
    if not stat.S_ISREG(path.lstat().st_mode):
        return None
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        end = _line_break_before(file, status.st_size)
        first = os.pread(file, min(end, READ_BYTES), 0)
        start = first.find(b"\n") + 1
        call = _call_in(first[:start])
        if call is None or call.call_id != path.name:
            return None
        if end < status.st_size:
            os.ftruncate(file, end)
        sequence, kind = 0, ""
        if end > start:
            place = _line_break_before(file, end - 1)
            last = os.pread(file, HEAD_BYTES, place).split(b",", 2)
            sequence, kind = int(last[1]) + 1, last[0][2:-1].decode()
        kept = KeptRecording(call.call_id, call.principal_id, start, end, end, status.st_mtime)
        return Found(call, kept, sequence, kind in LAST_KINDS)
    except (IndexError, UnicodeDecodeError):
        return None
    finally:
        os.close(file)


def _call_in(line: bytes) -> RecordedCall | None:
    fields: Any = strict_json.loads(line) if line else None
    if not isinstance(fields, dict) or fields.keys() != set(RecordedCall._fields):
        return None
    if not all(isinstance(value, str) for value in fields.values()):
        return None
    return RecordedCall(**fields)


def _line_break_before(file: int, end: int) -> int:
    """The position behind the last line break before `end`; 0 if there is none."""
    while end > 0:
        begin = max(0, end - READ_BYTES)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
