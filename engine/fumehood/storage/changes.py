"""Administrative changes, such as a new token: who changed what and when.

Each change is recorded twice: as a row for administrators, and in the audit chain. Both records are
written in the transaction of the change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import anyio
from sqlalchemy import Connection, insert, select

from fumehood.core.errors import StateUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.storage.audit_chain import chain_of
from fumehood.storage.errors import RETRY_AFTER_MS, StoreError
from fumehood.storage.schema import CHANGES


class OneChange:
    """A lock for changes to one kind of row. For an instance `lock`, the change runs in the block
    `async with lock():`.

    Only one change runs at a time, so the rows that a change has read stay valid until it writes. A
    cancelled change still runs to its end, so memory and database stay consistent.

    If the database becomes unreachable during a commit, the outcome of the commit is unknown. The
    lock then calls the constructor's function `reload` repeatedly until the database is reachable
    again. `reload` must read with `Database.write`, so that it sees the outcome of that commit.
    """

    def __init__(self, reload: Callable[[], Awaitable[None]]) -> None:
        self._lock = anyio.Lock()
        self._reload = reload
        self._reloading: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        async with self._lock:
            with anyio.CancelScope(shield=True):
                try:
                    yield
                except StateUnavailable:
                    if self._reloading is None or self._reloading.done():
                        self._reloading = asyncio.create_task(self._reload_when_back())
                    raise

    async def _reload_when_back(self) -> None:
        while True:
            await anyio.sleep(RETRY_AFTER_MS / 1000)
            async with self._lock:
                try:
                    await self._reload()
                except StateUnavailable:
                    continue
                except StoreError:
                    pass  # the engine is stopping
                return


def stamp(moment: datetime) -> str:
    """Format a UTC time for storage, in ISO 8601 with microseconds."""
    return moment.isoformat(timespec="microseconds")


def recorded(
    change: Callable[[Connection], object],
    *,
    at: datetime,
    by: str,
    action: str,
    subject: str,
    details: JsonObject | None = None,
) -> Callable[[Connection], None]:
    """Return a database job that runs `change` and records it, in the same transaction. It is
    recorded as a row and in the audit chain (a table in which tampering can be detected).

    `at` is the time of the change, and `by` the id of the principal that makes it. `action` is a
    name like `token.new`. `subject` identifies what is changed, and `details` are further values to
    record.
    """

    def job(connection: Connection) -> None:
        change(connection)
        told: JsonObject = {"subject": subject, "details": details or {}}
        row = {"at": stamp(at), "principal_id": by, "action": action, **told}
        connection.execute(insert(CHANGES), row)
        chain_of(connection).append(connection, f"change.{action}", stamp(at), {"by": by, **told})

    return job


def list_changes(connection: Connection, limit: int) -> list[dict[str, Any]]:
    """Return the rows of at most `limit` changes, newest first."""
    rows = connection.execute(select(CHANGES).order_by(CHANGES.c.seq.desc()).limit(limit))
    return [dict(row) for row in rows.mappings()]
