"""Rows of sessions: active sessions, and ended sessions until a day after their end.

Host side. `sandbox/sessions` keeps the active sessions in memory; the rows are for the next start.
The rows are written with `Database.write`, so that a row is durable before its session is reported.
The cost is small: starting a container takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import PurePath
from typing import Any

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.engine import RowMapping

from fumehood.core.session import (
    KeptSession,
    ProjectHome,
    SavedCopy,
    SessionHome,
    SessionRecord,
    SessionStatus,
    Snapshot,
)
from fumehood.storage.changes import stamp
from fumehood.storage.database import Database
from fumehood.storage.errors import understood
from fumehood.storage.schema import SESSIONS

_SAME_NAME = (
    "id", "name", "why", "image", "agent_id", "memory_mb", "disk_mb", "cpus", "calls",
    "preset",
)  # fmt: skip


class SessionTable:
    """The table of sessions. `on_over` is called after the end of a session has been stored."""

    def __init__(self, database: Database, on_over: Callable[[], None] = lambda: None) -> None:
        self._database = database
        self._on_over = on_over

    def all_now(self) -> list[KeptSession]:
        """Return every row. This method blocks its thread, so it is only for the engine's start.

        Raises:
            ReadFailed: the database cannot be read.
            DamagedState: a row is not a session.
        """
        with understood("sessions"):
            return self._database.read_now(_all)

    async def ids(self) -> tuple[set[str], set[str]]:
        """Return the ids of the sessions that have not ended, and the ids of the sessions that have
        ended.

        Raises:
            ReadFailed: the database cannot be read.
        """
        found = select(SESSIONS.c.id, SESSIONS.c.state)
        rows = await self._database.read(lambda connection: list(connection.execute(found)))
        over = {session_id for session_id, state in rows if SessionStatus(state).is_over}
        return {session_id for session_id, _ in rows} - over, over

    async def change(self, put: list[KeptSession], delete: list[str]) -> None:
        """Write and delete rows in one transaction. The changes are durable when this method
        returns.

        Raises:
            WriteFailed: none of the changes is guaranteed to be stored.
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
        "home": asdict(kept.home) if kept.home is not None else None,
    }


def _kept(row: RowMapping) -> KeptSession:
    finished_at, home = row["finished_at"], _home(row["home"])
    copy = home.copy if home is not None else None
    project = home.project if home is not None else None
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
        project=PurePath(project.directory).name if project is not None else None,
    )
    when = datetime.fromisoformat(finished_at) if finished_at is not None else None
    return KeptSession(row["principal_id"], record, when, home)


def _home(stored: dict[str, Any] | None) -> SessionHome | None:
    if stored is None:
        return None
    copy, project = stored.get("copy"), stored.get("project")
    earlier = {"must_restore": stored.pop("in_trial")} if "in_trial" in stored else {}
    return SessionHome(
        **{
            **stored,
            **earlier,  # the name that earlier versions used
            "copy": SavedCopy(**copy) if copy is not None else None,
            "project": ProjectHome(**project) if project is not None else None,
        }
    )
