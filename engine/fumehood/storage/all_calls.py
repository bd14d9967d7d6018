"""The call log of all principals, for approvers and administrators: pages, one call, and figures.

Host side, read only; `storage/calls` writes the rows. Invariant: every question reads a bounded
number of rows, `SCANNED` at most, whatever the log holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, case, func, select

from fumehood.core.call_log import CallPage, CallRecord
from fumehood.core.errors import NO_FAULT, ResourceNotFound
from fumehood.core.overview import AllCallsQuery, ToolFigures, ToolFiguresList
from fumehood.storage.calls import APPROVAL_WAIT, as_kept, filters_of, record_of
from fumehood.storage.database import Database
from fumehood.storage.schema import CALLS

SCANNED = 200_000
"""Rows that one query examines. A list continues with the next ones."""

SUMMED = 50_000
"""The newest rows that figures are computed of: they are sorted for each tool."""

MAX_TOOLS = 500
MAX_GROUPS = 10_000


class CallGroup(NamedTuple):
    """Calls of one version of a tool, by one principal for one agent."""

    tool: str
    version: str | None
    principal_id: str
    agent_id: str | None
    calls: int


class AllCalls:
    """Reads the log of every principal."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, query: AllCallsQuery) -> CallPage:
        """Calls of all principals, newest first, including every call that has ended by now.

        With filters that fit few calls, a page may have fewer than `limit` and still go on.

        Raises:
            ResourceNotFound: the cursor is no call, or too old.
            ReadFailed: the database cannot be read.
        """
        await self._database.flush()
        return await self._database.read(lambda connection: _page(connection, query))

    async def get(self, call_id: str) -> tuple[CallRecord, dict[str, float], int | None]:
        """One call, the time of its stages, and its audit row; earlier versions kept neither.

        Raises:
            ResourceNotFound, ReadFailed.
        """
        await self._database.flush()
        wanted = select(CALLS).where(CALLS.c.id == call_id)
        rows = await self._database.read(lambda c: c.execute(wanted).mappings().all())
        if not rows:
            raise ResourceNotFound("There is no such call in the log. Do not retry.")
        return record_of(rows[0]), rows[0]["stages"] or {}, rows[0]["audit_seq"]

    async def figures(self, since: datetime) -> ToolFiguresList:
        """How the calls of each tool went since then. Raises ReadFailed."""
        await self._database.flush()
        return await self._database.read(lambda connection: _figures(connection, since))

    async def groups(self, since: datetime) -> tuple[list[CallGroup], bool]:
        """The calls since then, counted, the largest groups first; and whether some are missing."""
        await self._database.flush()
        return await self._database.read(lambda connection: _groups(connection, since))


def _page(connection: Connection, query: AllCallsQuery) -> CallPage:
    newest = _newest(connection)
    if query.cursor is not None:
        found = select(CALLS.c.seq).where(CALLS.c.id == query.cursor)
        seq = connection.execute(found).scalar_one_or_none()
        if seq is None:
            raise ResourceNotFound("There is no such cursor. Begin again without one.")
        newest = seq - 1
    oldest = newest - SCANNED + 1
    seen = CALLS.c.seq.between(oldest, newest)
    wanted = [*filters_of(query), *_more_filters(query)]
    listed = select(CALLS).where(seen, *wanted).order_by(CALLS.c.seq.desc()).limit(query.limit + 1)
    rows = connection.execute(listed).mappings().all()
    items = tuple(record_of(row) for row in rows[: query.limit])
    cursor = items[-1].call_id if len(rows) > query.limit else None
    if cursor is None and _first(connection, CALLS.c.seq < oldest) is not None:
        cursor = _first(connection, CALLS.c.seq >= oldest)
    return CallPage(items=items, has_more=cursor is not None, next_cursor=cursor, total_count=None)


def _more_filters(query: AllCallsQuery) -> Iterable[ColumnElement[bool]]:
    if query.principal is not None:
        yield CALLS.c.principal_id == query.principal
    if query.session is not None:
        yield CALLS.c.session_id == query.session
    if query.trace is not None:
        yield CALLS.c.trace_id == query.trace
    if query.parent is not None:
        yield CALLS.c.parent_id == query.parent


def _newest(connection: Connection) -> int:
    return connection.execute(select(func.max(CALLS.c.seq))).scalar() or 0


def _first(connection: Connection, wanted: ColumnElement[bool]) -> str | None:
    """The id of the oldest call of these."""
    first = select(CALLS.c.id).where(wanted).order_by(CALLS.c.seq).limit(1)
    return connection.execute(first).scalars().first()


def _recent(
    connection: Connection, since: datetime, most: int
) -> tuple[list[ColumnElement[bool]], bool]:
    """The condition for calls since a moment, and whether the bound cuts older ones of it off."""
    bound = _newest(connection) - most
    at = as_kept(since)
    older = select(CALLS.c.seq).where(CALLS.c.seq <= bound, CALLS.c.at >= at)
    last = older.order_by(CALLS.c.seq.desc()).limit(1)
    is_cut = bound > 0 and connection.execute(last).first() is not None
    return [CALLS.c.seq > bound, CALLS.c.at >= at], is_cut


def _figures(connection: Connection, since: datetime) -> ToolFiguresList:
    wanted, is_cut = _recent(connection, since, SUMMED)
    rows = connection.execute(_figures_of(wanted)).all()
    items = tuple(
        ToolFigures(
            tool=row.tool, calls=row.calls, succeeded=row.succeeded, failed=row.failed,
            last_at=row.last_at, mean_ms=round(row.mean_ms, 3), p50_ms=row.p50_ms,
            p95_ms=row.p95_ms,
        )
        for row in rows[:MAX_TOOLS]
    )  # fmt: skip
    return ToolFiguresList(items=items, is_partial=is_cut or len(rows) > MAX_TOOLS)


def _figures_of(wanted: list[ColumnElement[bool]]) -> Select[tuple[object, ...]]:
    # The part of the tool's calls that took as long, or less.
    waited_ms = func.coalesce(CALLS.c.stages[APPROVAL_WAIT].as_float(), 0.0)
    own_ms = func.max(CALLS.c.total_ms - waited_ms, 0.0)
    part = func.cume_dist().over(partition_by=CALLS.c.tool, order_by=own_ms)
    columns = (
        CALLS.c.tool, CALLS.c.code, CALLS.c.at, own_ms.label("own_ms"), part.label("part"),
    )  # fmt: skip
    in_order = select(*columns).where(*wanted).subquery().c
    count = func.count()

    def not_faster_than(least: float) -> ColumnElement[float]:
        return func.min(case((in_order.part >= least, in_order.own_ms)))

    return (
        select(
            in_order.tool,
            count.label("calls"),
            func.sum(case((in_order.code == "OK", 1), else_=0)).label("succeeded"),
            func.sum(case((in_order.code.in_(NO_FAULT), 0), else_=1)).label("failed"),
            func.avg(in_order.own_ms).label("mean_ms"),
            not_faster_than(0.5).label("p50_ms"),
            not_faster_than(0.95).label("p95_ms"),
            func.max(in_order.at).label("last_at"),
        )
        .group_by(in_order.tool)
        .order_by(count.desc(), in_order.tool)
        .limit(MAX_TOOLS + 1)
    )


def _groups(connection: Connection, since: datetime) -> tuple[list[CallGroup], bool]:
    wanted, is_cut = _recent(connection, since, SCANNED)
    keys = CALLS.c.tool, CALLS.c.version, CALLS.c.principal_id, CALLS.c.agent_id
    count = func.count()
    counted = select(*keys, count).where(*wanted).group_by(*keys).order_by(count.desc())
    rows = connection.execute(counted.limit(MAX_GROUPS + 1)).all()
    groups = [CallGroup(*row) for row in rows[:MAX_GROUPS]]
    return groups, is_cut or len(rows) > MAX_GROUPS
