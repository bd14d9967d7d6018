"""Rows of the call log: who called what, when, and how it ended, without arguments.

Host side. `pipeline/record` writes without waiting, the faces read. Each row is also added to the
audit chain in the same transaction. Invariants: a principal sees only its own rows, and its calls
displace no other principal's rows; the order is that of writing (`seq`), because clocks may be set
back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NotRequired, TypedDict

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select
from sqlalchemy.engine import RowMapping

from fumehood.audit.chain import AuditEntry, chain_of
from fumehood.core.call_log import CallPage, CallQuery, CallRecord
from fumehood.core.errors import ResourceNotFound
from fumehood.storage.database import DELETED_AT_ONCE, Database
from fumehood.storage.schema import CALLS
from fumehood.storage.writer import Job, Row

IN_MEMORY_KEPT = 10_000
"""Calls kept for one principal if the log is in memory only (about 5 MB)."""

MAX_INTEGER = 2**63 - 1
"""*Source*: SQLite's largest integer; a tool may report more tokens than that."""

_INSERT = insert(CALLS)

_SAME_NAME = (
    "principal_id", "agent_id", "session_id", "trace_id", "code", "ended_by", "cpu_ms", "cost",
    "currency", "input_tokens", "output_tokens", "tokens_used", "parent_id",
)  # fmt: skip


APPROVAL_WAIT = "approval wait"
"""The stage of a call in which it waited for a human."""

_NOT_AUDITED = frozenset({"id", "at", "stages"})


class CallRow(TypedDict):
    """One row, made by `pipeline/record`."""

    id: str
    at: str
    principal_id: str
    agent_id: str | None
    session_id: str | None
    trace_id: str
    tool: str
    version: str | None
    code: str
    ended_by: str | None
    total_ms: float
    cpu_ms: float | None
    cost: str
    currency: str
    input_tokens: int
    output_tokens: int
    tokens_used: int
    cache_hit: NotRequired[bool | None]
    parent_id: NotRequired[str | None]
    stages: NotRequired[dict[str, float] | None]


class CallLog:
    """The call log. `overdue` is set when it has grown so much that old rows should be deleted."""

    def __init__(self, database: Database, *, kept_days: int, kept: int) -> None:
        self._database = database
        self._kept_days = kept_days
        self._kept = kept if database.path is not None else min(kept, IN_MEMORY_KEPT)
        self._unpruned = 0
        self._patience = max(1, self._kept // 10)
        self.overdue = asyncio.Event()

    def record(self, row: CallRow) -> None:
        """Add one row without waiting. A crash within the next second may lose it."""
        if row["tokens_used"] > MAX_INTEGER:
            row["tokens_used"] = MAX_INTEGER
        self._database.post(_keep, row)  # type: ignore[arg-type]  # a typed dictionary is one
        self._unpruned += 1
        if self._unpruned == self._patience:
            self.overdue.set()

    async def page(self, principal_id: str, query: CallQuery) -> CallPage:
        """A principal's own calls, newest first, including every call that has ended by now.

        Raises:
            ResourceNotFound: the cursor is no call of this principal, or too old.
            ReadFailed: the database cannot be read.
        """
        await self._database.flush()
        return await self._database.read(lambda connection: _page(connection, principal_id, query))

    async def get(self, principal_id: str, call_id: str) -> CallRecord:
        """Read one call of a principal.

        Raises:
            ResourceNotFound: the principal has no such call, or it is no longer kept.
            ReadFailed: the database cannot be read.
        """
        await self._database.flush()
        own = (CALLS.c.id == call_id) & (CALLS.c.principal_id == principal_id)
        rows = await self._database.read(
            lambda connection: connection.execute(select(CALLS).where(own)).mappings().all()
        )
        if not rows:
            raise ResourceNotFound("There is no such call of yours in the log. Do not retry.")
        return record_of(rows[0])

    async def prune(self, now: datetime) -> int:
        """Delete rows that are too old or too many; returns their number.

        The newest row always stays, so that numbers are not used again.

        Raises:
            ReadFailed, WriteFailed: the rest stays until the next run.
        """
        if self._unpruned == 0 and self._database.path is None:
            return 0  # nothing was recorded, so there is nothing
        self._unpruned = 0
        await self._database.flush()
        oldest_kept = as_kept(now - timedelta(days=self._kept_days))
        gone: list[int] = await self._database.read(
            lambda connection: _outdated(connection, oldest_kept, self._kept)
        )
        for start in range(0, len(gone), DELETED_AT_ONCE):
            batch = gone[start : start + DELETED_AT_ONCE]
            await self._database.write(_deletion(batch))
        return len(gone)


def _keep(connection: Connection, rows: list[Row]) -> None:
    last = chain_of(connection).append_all(connection, [_audited(row) for row in rows])
    first = last - len(rows) + 1
    kept = [{"stages": None, **row, "audit_seq": first + at} for at, row in enumerate(rows)]
    connection.execute(_INSERT, kept)


def _audited(row: Row) -> AuditEntry:
    """The audit record of a call: the fields of the log that have a value."""
    told = {
        key: value for key, value in row.items() if value is not None and key not in _NOT_AUDITED
    }
    return AuditEntry("call.ended", row["at"], {"call_id": row["id"], **told})


def _page(connection: Connection, principal_id: str, query: CallQuery) -> CallPage:
    wanted = [CALLS.c.principal_id == principal_id, *filters_of(query)]
    if query.cursor is not None:
        own = (CALLS.c.id == query.cursor) & (CALLS.c.principal_id == principal_id)
        seq = connection.execute(select(CALLS.c.seq).where(own)).scalar_one_or_none()
        if seq is None:
            raise ResourceNotFound("There is no such cursor. Begin again without one.")
        wanted.append(CALLS.c.seq < seq)
    listed = select(CALLS).where(*wanted).order_by(CALLS.c.seq.desc()).limit(query.limit + 1)
    rows = connection.execute(listed).mappings().all()
    items = tuple(record_of(row) for row in rows[: query.limit])
    has_more = len(rows) > query.limit
    return CallPage(
        items=items,
        has_more=has_more,
        next_cursor=items[-1].call_id if has_more else None,
        total_count=None if has_more or query.cursor is not None else len(items),
    )


def filters_of(query: CallQuery) -> list[ColumnElement[bool]]:
    """The conditions of a query, but its cursor."""
    filters = common_filters(query.since, query.until, query.agent, query.tool)
    if query.code is not None:
        filters.append(CALLS.c.code == query.code)
    return filters


def common_filters(
    since: datetime | None, until: datetime | None, agent: str | None, tool: str | None
) -> list[ColumnElement[bool]]:
    """The conditions that all queries of the call log share. `tool` may be `name@version`."""
    filters: list[ColumnElement[bool]] = []
    if since is not None:
        filters.append(CALLS.c.at >= as_kept(since))
    if until is not None:
        filters.append(CALLS.c.at < as_kept(until))
    if agent is not None:
        filters.append(CALLS.c.agent_id == agent)
    if tool is not None:
        name, at, version = tool.partition("@")
        filters.append(CALLS.c.tool == name)
        if at:
            filters.append(CALLS.c.version == version)
    return filters


def record_of(row: RowMapping) -> CallRecord:
    """A row as its readers see it."""
    return CallRecord(
        call_id=row["id"],
        timestamp=row["at"],
        tool_name=row["tool"],
        tool_version=row["version"],
        execution_time_ms=row["total_ms"],
        cache_hit=bool(row["cache_hit"]),
        **{key: row[key] for key in _SAME_NAME},
    )


def _outdated(connection: Connection, oldest_kept: str, kept: int) -> list[int]:
    """The rows to delete, by number, oldest first."""
    newest = connection.execute(select(func.max(CALLS.c.seq))).scalar()
    if newest is None:
        return []
    gone = set(connection.execute(select(CALLS.c.seq).where(CALLS.c.at < oldest_kept)).scalars())
    counts = select(CALLS.c.principal_id, func.count()).group_by(CALLS.c.principal_id)
    for principal_id, count in connection.execute(counts).all():
        if count > kept:
            own = select(CALLS.c.seq).where(CALLS.c.principal_id == principal_id)
            gone.update(connection.execute(own.order_by(CALLS.c.seq).limit(count - kept)).scalars())
    return sorted(gone - {newest})


def _deletion(batch: Sequence[int]) -> Job[int]:
    chosen = delete(CALLS).where(CALLS.c.seq.in_(batch))
    return lambda connection: connection.execute(chosen).rowcount


def as_kept(moment: datetime) -> str:
    """A time in the format of the column `at`: UTC, milliseconds."""
    return f"{moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
