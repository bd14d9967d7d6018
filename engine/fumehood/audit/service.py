"""The audit chain of an engine: anchor it, and verify it or rotate its key on request.

Host side, used by the part's object and routes; it uses the chain, its keys, and the database.
Anchors are appended to a file next to the database, one line each. Anyone who can write to the
state directory can also change that file, so copies of the anchors must be kept elsewhere to detect
such changes. The functions at the end only read a state directory, with or without a running
engine.
Invariant: an anchor is written after the row that it names is on disk, so a power failure never
leaves an anchor beyond the end of the chain.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from itertools import dropwhile, takewhile
from pathlib import Path

import anyio
import anyio.to_thread
from sqlalchemy import Connection

from fumehood.answers import AuditRecord, AuditRotation, AuditVerdict
from fumehood.audit.settings import AuditSettings
from fumehood.audit.verify import Anchor, Verdict, read_anchors, verify
from fumehood.core.identity import Principal
from fumehood.engine_part import Kernel
from fumehood.storage.audit_chain import all_rows, head_of, rows_after
from fumehood.storage.audit_keys import all_keys, keep_key, make_current, new_key
from fumehood.storage.audit_rows import AuditRow
from fumehood.storage.changes import stamp
from fumehood.storage.database import reading
from fumehood.storage.directory import private
from fumehood.storage.errors import AuditKeyLost, ReadFailed, StoreError, WriteFailed
from fumehood.storage.needed_parts import need_part

NAME = "audit"
"""The part's name. An engine without this part refuses a state whose chain was ever anchored."""

ANCHORED = "audit.anchored"

ANCHORS_NAME = "audit-anchors.jsonl"
"""The file of anchors next to the database."""

TAIL_LINES = 20
"""The number of lines at the end of the file that are searched for the newest anchor. The last line
alone is not enough, because a crash may have truncated it."""


class AuditService:
    """Anchors and verifies the audit chain of one database, and rotates its key. To anchor the
    chain means to copy the newest row's `mac` to a file outside the database.

    A chain in memory is not anchored, because it ends with the engine.
    """

    def __init__(self, kernel: Kernel, settings: AuditSettings) -> None:
        self._kernel = kernel
        self._database = kernel.database
        self._chain = kernel.database.audit
        self._state = kernel.database.directory
        self._settings = settings
        self._log = kernel.log
        self._now = kernel.clock.now
        self._lock = anyio.Lock()
        self._grown = 0
        self._is_due = asyncio.Event()

    @asynccontextmanager
    async def anchored(self) -> AsyncIterator[None]:
        """Anchor the chain while the context lasts: copy the newest row's `mac` out of the
        database.

        An anchor is made when the context begins and when it ends. Between them, an anchor is made
        after each number of rows or seconds in the settings.
        """
        if self._state is None:
            yield
            return
        loop = asyncio.get_running_loop()

        def grow(rows: int) -> None:
            self._grown += rows
            if self._grown >= self._settings.anchor_rows:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._is_due.set)

        self._chain.on_growth = grow
        await self._check_last_anchor(self._state)
        await self.anchor("start")
        task = asyncio.create_task(self._anchor_when_due())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            with anyio.CancelScope(shield=True):
                await self._database.flush()
                await self.anchor("stop")

    async def anchor(self, why: str) -> Anchor | None:
        """Append a row with the reason `why` to the chain, and write an anchor (a copy of the row's
        `mac`) to the anchor file.

        Return the anchor, even if it could not be written to the file. Return None if the row could
        not be stored, or if the chain is only in memory. Failures are logged.
        """
        if self._state is None:
            return None
        async with self._lock:
            now = self._now()

            def job(connection: Connection) -> Anchor:
                self._chain.append(connection, ANCHORED, stamp(now), {"why": why})
                self._grown = 0  # an anchor's own row does not count towards the next one
                head = head_of(connection)
                assert head is not None
                anchor = Anchor(head.seq, head.key_id, head.mac, stamp(now))
                need_part(connection, NAME)
                for subscriber in self._kernel.subscribers:
                    subscriber.on_anchor(connection, shown(anchor), now)
                return anchor

            try:
                anchor = await self._database.write(job)
                self._log.info("audit.anchor", **shown(anchor))
                await anyio.to_thread.run_sync(add_anchor, self._state, anchor)
            except StoreError as fault:
                self._grown = max(self._grown, 1)  # the new rows have no anchor yet
                self._log.error("audit.anchor_failed", reason=str(fault))
                return None
            except OSError as error:
                self._log.error("audit.anchor_failed", reason=error.strerror)
        self._kernel.subscribers.committed()
        return anchor

    async def page(self, after: int, limit: int) -> tuple[AuditRecord, ...]:
        """Return the rows that follow row `after`, oldest first. Raises ReadFailed."""
        await self._database.flush()
        rows = await self._database.read(lambda connection: rows_after(connection, after, limit))
        return tuple(_record(row) for row in rows)

    async def verify(self) -> AuditVerdict:
        """Verify the whole chain, and the anchors in the file next to the database.

        Raises:
            ReadFailed: the database, a key or the anchors cannot be read.
        """
        await self._database.flush()
        try:
            return shown_verdict(await self._database.read(self._verify))
        except AuditKeyLost as fault:  # its message has a path, which only the log may contain
            self._log.error("audit.key_unreadable", reason=str(fault))
            raise ReadFailed("a key of the audit chain is not usable") from fault
        except OSError as error:
            raise ReadFailed(error.strerror or "the anchors are not readable") from error

    def _verify(self, connection: Connection) -> Verdict:
        state = self._state
        keys = all_keys(state) if state is not None else self._chain.keys
        anchors = own_anchors(state) if state is not None else []
        return verify(all_rows(connection), keys, anchors, whole=self._chain.kept is None)

    async def rotate(self, by: Principal) -> AuditRotation:
        """Continue the chain under a new key. The old key is kept for verification. `by` is the
        principal that requested the change.

        Raises:
            WriteFailed: the new key or its row could not be written. The old key stays in use.
        """
        with anyio.CancelScope(shield=True):
            async with self._lock:
                rotation = await self._rotate(by)
            await self.anchor("rotation")
        return rotation

    async def _rotate(self, by: Principal) -> AuditRotation:
        key, state, at = new_key(), self._state, stamp(self._now())
        if state is not None:
            await _on_disk(keep_key, state, key)
        self._chain.learn(key)

        def job(connection: Connection) -> tuple[int, str]:
            seq = self._chain.rotate(connection, at, key, {"by": by.id})
            (row,) = rows_after(connection, seq - 1, 1)
            return seq, row.key_id

        seq, previous = await self._database.write(job)
        if state is not None:
            try:
                await _on_disk(make_current, state, key)
            except WriteFailed as fault:  # the next start completes it
                self._log.error("audit.rotation_unfinished", reason=fault.reason)
        self._log.warning("audit.rotated", seq=seq, key_id=key.id, previous_key_id=previous)
        return AuditRotation(seq=seq, key_id=key.id, previous_key_id=previous)

    async def _check_last_anchor(self, state: Path) -> None:
        """Log an error if the chain does not match the last anchor, the copy of a row's `mac`
        outside the database.

        The engine starts nevertheless, because a mismatch also has a harmless cause: the database
        was restored from a backup that is older than the anchor.
        """
        try:
            anchor = await anyio.to_thread.run_sync(last_own_anchor, state)
            if anchor is None:
                return
            seq = anchor.seq
            found = await self._database.read(lambda connection: rows_after(connection, seq - 1, 1))
        except (OSError, StoreError) as fault:
            self._log.error("audit.anchor_unreadable", reason=str(fault))
            return
        if not found or (found[0].seq, found[0].mac) != (seq, anchor.mac):
            self._log.error(
                "audit.broken",
                reason=f"row {seq} does not match its anchor of {anchor.at}: "
                "see fumehood audit verify",
            )

    async def _anchor_when_due(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.anchor_seconds):
                    await self._is_due.wait()
            why = "rows" if self._is_due.is_set() else "time"
            self._is_due.clear()
            if self._grown:
                await self.anchor(why)


def shown_verdict(verdict: Verdict) -> AuditVerdict:
    """Convert a verdict to the form that is shown to administrators."""
    return AuditVerdict(intact=verdict.is_intact, **asdict(verdict))


def _record(row: AuditRow) -> AuditRecord:
    return AuditRecord(
        seq=row.seq,
        key_id=row.key_id,
        before=row.before.hex() if row.before is not None else None,
        mac=row.mac.hex(),
        body=row.body.decode("utf-8", "replace"),
    )


async def _on_disk(work: Callable[..., None], state: Path, *rest: object) -> None:
    try:
        await anyio.to_thread.run_sync(work, state, *rest)
    except OSError as error:
        raise WriteFailed(error.strerror or "the disk failed") from error


# -- anchors beside the database -----------------------------------------------------------


def add_anchor(state: Path, anchor: Anchor) -> None:
    """Append an anchor to the anchor file in the directory `state`. The anchor is durable when this
    function returns. Raises OSError.
    """
    with open(state / ANCHORS_NAME, "ab+", opener=private) as file:
        end = file.seek(0, os.SEEK_END)
        # A crash may have cut the last line off. The new anchor must begin a new line.
        is_torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        line = f"{json.dumps(shown(anchor))}\n".encode()
        file.write(b"\n" + line if is_torn else line)
        file.flush()
        os.fsync(file.fileno())


def load_anchors(path: Path) -> list[Anchor]:
    """Return the anchors in an anchor file, or in a log that consists of JSON lines. Raises
    OSError.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        return read_anchors(lines)


def own_anchors(state: Path) -> list[Anchor]:
    """Return the anchors in the state directory, or an empty list if the file is missing. Raises
    OSError.
    """
    try:
        return load_anchors(state / ANCHORS_NAME)
    except FileNotFoundError:
        return []


def last_own_anchor(state: Path) -> Anchor | None:
    """Return the newest anchor in the state directory, or None. Raises OSError."""
    with suppress(FileNotFoundError), (state / ANCHORS_NAME).open(errors="replace") as lines:
        return next(reversed(read_anchors(deque(lines, TAIL_LINES))), None)
    return None


def shown(anchor: Anchor) -> dict[str, int | str]:
    """Convert an anchor to JSON."""
    return {
        "seq": anchor.seq,
        "key_id": anchor.key_id,
        "mac": anchor.mac.hex(),
        "at": anchor.at,
    }


# -- a state directory, without an engine --------------------------------------------------


def verify_state(
    state: Path,
    anchors: Iterable[Anchor],
    keys: Mapping[str, bytes] | None = None,
    url: str | None = None,
) -> Verdict:
    """Verify the chain in the state directory `state`, or in the database at `url` if it is given.

    `keys` maps the id of each key to its secret. If it is None, the keys in the directory are used.

    Raises:
        StoreError: the database or the keys cannot be read.
    """
    known = keys if keys is not None else all_keys(state)
    with reading(state, url) as connection:
        return verify(all_rows(connection), known, anchors)


@contextmanager
def exported(
    state: Path,
    since: datetime | None = None,
    until: datetime | None = None,
    url: str | None = None,
) -> Iterator[Iterator[AuditRow]]:
    """Open the database, and yield an iterator over the rows from the first row at or after `since`
    up to, but not including, the first row at or after `until`.

    The rows are contiguous even if the clock jumped, so that they can be verified as a part of the
    chain.

    Raises:
        StoreError: the database cannot be read.
    """
    with reading(state, url) as connection:
        rows = all_rows(connection)
        if since is not None:
            rows = dropwhile(lambda row: _is_before(row, since), rows)
        if until is not None:
            rows = takewhile(lambda row: _is_before(row, until), rows)
        yield rows


def _is_before(row: AuditRow, moment: datetime) -> bool:
    """Whether a row is earlier than a moment. A row without a valid time is not earlier."""
    try:
        return datetime.fromisoformat(json.loads(row.body)["at"]) < moment
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
