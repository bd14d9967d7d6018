"""The database table of sessions. Ended sessions stay in the table for a day.

Host side. `sandbox/sessions` keeps the active sessions in memory. The next engine reads them from
this table. Rows are written with `Database.write`, so that a row is durable before its session is
reported. The write takes a hundredth of the time that starting a container takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, fields
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.engine import RowMapping

from fumehood.core.session import (
    KeptSession,
    SavedCopy,
    SessionHome,
    SessionRecord,
    SessionStatus,
    Snapshot,
)
from fumehood.parts import fields_of_parts
from fumehood.storage.changes import stamp
from fumehood.storage.database import Database
from fumehood.storage.errors import understood
from fumehood.storage.files import SavedFiles
from fumehood.storage.retention import retention
from fumehood.storage.schema import SESSIONS

_OF_HOME = frozenset(field.name for field in fields(SessionHome)) - {"of_parts"}

_SAME_NAME = (
    "id", "name", "why", "image", "agent_id", "memory_mb", "disk_mb", "cpus", "calls",
    "preset", "least_grade",
)  # fmt: skip


class SessionTable:
    """The table of sessions. `on_over` is called each time the end of a session is stored."""

    def __init__(self, database: Database, on_over: Callable[[], None] = lambda: None) -> None:
        self._database = database
        self._on_over = on_over

    def all_now(self) -> list[KeptSession]:
        """Return the sessions in all rows. Blocks the thread, so this is only for the engine's
        start.

        Raises:
            ReadFailed: the database cannot be read.
            DamagedState: a row is invalid.
        """
        with understood("sessions"):
            return self._database.read_now(_all)

    async def ids(self) -> tuple[set[str], set[str]]:
        """Return two sets of session ids: those of active sessions, and those of sessions that have
        ended or are lost.

        Raises:
            ReadFailed: the database cannot be read.
        """
        found = select(SESSIONS.c.id, SESSIONS.c.state)
        rows = await self._database.read(lambda connection: list(connection.execute(found)))
        over = {session_id for session_id, state in rows if SessionStatus(state).is_over}
        return {session_id for session_id, _ in rows} - over, over

    async def sweep(self, files: SavedFiles, now: datetime) -> int:
        """Delete the saved files of sessions that are over, and old files of unknown sessions
        (`SavedFiles.sweep`). Return the number of deleted files.

        Raises:
            ReadFailed: the database cannot be read.
            OSError: the files cannot be listed or deleted.
        """
        live, over = await self.ids()
        return await files.sweep(live, over, now)

    def sweeping(
        self, files: SavedFiles, now: Callable[[], datetime], on_fault: Callable[[Exception], None]
    ) -> AbstractAsyncContextManager[None]:
        """Return a context manager that calls `sweep` at once, and then regularly during its block.
        `on_fault` receives the errors of `sweep`.
        """
        return retention(partial(self.sweep, files), now, on_fault, overdue=files.overdue)

    async def change(self, put: list[KeptSession], delete: list[str]) -> None:
        """Store the sessions in `put`, and delete the rows of the session ids in `delete`, in one
        transaction. The changes are durable when this method returns.

        Raises:
            WriteFailed: the changes may or may not have been stored.
        """
        rows = [_row(one) for one in put]
        await self._database.write(lambda connection: _change(connection, rows, delete))
        if any(one.finished_at is not None for one in put):
            self._on_over()


def _all(connection: Connection) -> list[KeptSession]:
    return [_kept(row) for row in connection.execute(select(SESSIONS)).mappings()]


def _change(connection: Connection, rows: list[dict[str, Any]], gone: list[str]) -> None:
    for session_id in [*(row["id"] for row in rows), *gone]:
        connection.execute(delete(SESSIONS).where(SESSIONS.c.id == session_id))
    if rows:
        connection.execute(insert(SESSIONS), rows)


def _row(kept: KeptSession) -> dict[str, Any]:
    record, finished_at = kept.record, kept.finished_at
    return {
        **{name: getattr(record, name) for name in _SAME_NAME},
        "principal_id": kept.principal_id,
        "state": record.state.value,
        "languages": list(record.languages),
        "packages": list(record.packages),
        "network": list(record.network),
        "env": list(record.env),
        "snapshots": [one.model_dump(mode="json") for one in record.snapshots],
        "created_at": stamp(record.created_at),
        "last_used_at": stamp(record.last_used_at),
        "expires_at": stamp(record.expires_at),
        "finished_at": stamp(finished_at) if finished_at is not None else None,
        "home": _stored(kept.home) if kept.home is not None else None,
    }


def _kept(row: RowMapping) -> KeptSession:
    finished_at, home = row["finished_at"], _home(row["home"])
    copy = home.copy if home is not None else None
    restored_at = home.restored_at if home is not None else None
    record = SessionRecord(
        **{name: row[name] for name in _SAME_NAME},
        state=SessionStatus(row["state"]),
        languages=tuple(row["languages"]),
        packages=tuple(row["packages"] or ()),
        network=tuple(row["network"] or ()),
        env=tuple(row["env"] or ()),
        snapshots=tuple(map(Snapshot.model_validate, row["snapshots"] or ())),
        created_at=datetime.fromisoformat(row["created_at"]),
        last_used_at=datetime.fromisoformat(row["last_used_at"]),
        expires_at=datetime.fromisoformat(row["expires_at"]),
        is_busy=False,
        durable=copy is not None,
        saved_at=datetime.fromisoformat(copy.saved_at) if copy is not None else None,
        restored_at=datetime.fromisoformat(restored_at) if restored_at is not None else None,
        **fields_of_parts(home.of_parts if home is not None else {}),
    )
    when = datetime.fromisoformat(finished_at) if finished_at is not None else None
    return KeptSession(row["principal_id"], record, when, home)


def _stored(home: SessionHome) -> dict[str, Any]:
    """Return `home` as JSON for storage. A later engine needs it to continue the session.

    The values in `home.of_parts` become top-level fields, next to the other fields of `home`.
    """
    own = asdict(home)
    of_parts = own.pop("of_parts")
    return {**of_parts, **own}


def _home(stored: dict[str, Any] | None) -> SessionHome | None:
    if stored is None:
        return None
    copy = stored.get("copy")
    earlier = {"must_restore": stored.pop("in_trial")} if "in_trial" in stored else {}
    own = {name: value for name, value in stored.items() if name in _OF_HOME}
    of_parts = {name: value for name, value in stored.items() if name not in own}
    return SessionHome(
        **{
            **own,
            **earlier,  # earlier versions stored `must_restore` as `in_trial`
            "copy": SavedCopy(**copy) if copy is not None else None,
            # Earlier versions stored null for a missing value.
            "of_parts": {name: value for name, value in of_parts.items() if value is not None},
        }
    )
