"""The call log of all principals, read only.

Host side, for approvers and administrators. Invariant: a query examines at most `SCANNED` rows.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Float, Select, case, cast, func, select, text

from fumehood.core.call_log import (
    CallPage,
    CallRecord,
    CallSeries,
    CallStep,
    ToolFigures,
    ToolFiguresList,
)
from fumehood.core.errors import InvalidParams, ResourceNotFound
from fumehood.core.json_types import JsonObject
from fumehood.overview.queries import AllCallsQuery, SeriesQuery
from fumehood.storage.calls import (
    APPROVAL_WAIT,
    Recorded,
    all_found,
    as_kept,
    failed,
    filters_of,
    find_row,
    matching,
    newest_first,
    newest_seq,
    place_of,
    read_record,
    record_of,
)
from fumehood.storage.database import Database
from fumehood.storage.schema import CALLS, RECORDS

SCANNED = 200_000
"""Maximum number of rows that one query of all calls examines. The next page of a list continues
after these rows."""

SUMMED = 50_000
"""Maximum number of newest rows from which statistics are computed. The limit is needed because the
query sorts the rows."""

MAX_TOOLS = 500

MAX_GIVEN = 20_000
"""Maximum number of recorded calls on which rules are tried."""

MAX_BELOW = 500
"""Maximum number of calls that are listed below a call, because its program made them."""


class CallGroup(NamedTuple):
    """The number of calls of one tool version by one principal for one agent."""

    tool: str
    version: str | None
    principal_id: str
    agent_id: str | None
    calls: int


class FoundCall(NamedTuple):
    """A stored call of any principal.

    The fields are the call's row in the call log, the duration of each stage in milliseconds, the
    number of the call's row in the audit log, and the stored arguments and answer.
    """

    call: CallRecord
    stages_ms: dict[str, float]
    audit_seq: int | None
    record: Recorded | None


class AllCalls:
    """The call log of all principals, read only."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, query: AllCallsQuery) -> CallPage:
        """Return one page of the calls of all principals, newest first. Every call that has ended
        by now is taken into account.

        If the filters match few calls, a page can have fewer than `limit` calls although more pages
        follow.

        Raises:
            ResourceNotFound: the cursor names a call that is not stored.
            ReadFailed: the database cannot be read.
        """
        await all_found(self._database, query)
        return await self._database.read(lambda connection: _page_of_all(connection, query))

    async def get(self, call_id: str) -> FoundCall:
        """Return one call with everything that is stored about it.

        Calls recorded by early versions have no stages and no audit row.

        Raises:
            ResourceNotFound: the call is not stored.
            ReadFailed: the database cannot be read.
        """
        found = await find_row(self._database, call_id)
        if found is None:
            raise ResourceNotFound("There is no such call in the log. Do not retry.")
        row, record = found
        return FoundCall(record_of(row), row["stages"] or {}, row["audit_seq"], record)

    async def below(self, call_id: str) -> tuple[CallRecord, ...]:
        """Return the calls made by a call's program and, level by level, by the programs of those
        calls: at most `MAX_BELOW`, newest first within a level. Raises ReadFailed.
        """
        await self._database.flush()
        return await self._database.read(lambda connection: _below(connection, call_id))

    async def figures(self, since: datetime) -> ToolFiguresList:
        """Return call counts and durations by tool since a moment. Raises ReadFailed."""
        await self._database.flush()
        return await self._database.read(lambda connection: _figures(connection, since))

    async def series(self, query: SeriesQuery, since: datetime) -> CallSeries:
        """Return call counts and durations by hour or day since a moment. Raises ReadFailed."""
        await self._database.flush()
        return await self._database.read(lambda connection: _series(connection, query, since))

    async def given(
        self, since: datetime, tools: Collection[str]
    ) -> list[tuple[CallGroup, JsonObject]]:
        """Return the newest calls of the tools `tools` since the time `since`, at most `MAX_GIVEN`.
        A call is included only if its arguments were recorded and `groups` counts it.

        Each item has two values: a group with the count 1, and the call's arguments. The group
        names the call's tool, principal and agent. Raises ReadFailed.
        """
        await self._database.flush()
        return await self._database.read(lambda connection: _given(connection, since, tools))

    async def groups(self, since: datetime) -> tuple[list[CallGroup], bool]:
        """Count the calls since the time `since`, by tool version, principal and agent.

        Return the groups, largest first, and a bool. The bool is True if there are too many calls,
        and the oldest are not counted. Raises ReadFailed.
        """
        await self._database.flush()
        return await self._database.read(lambda connection: _groups(connection, since))


def _page_of_all(connection: Connection, query: AllCallsQuery) -> CallPage:
    newest = newest_seq(connection)
    if query.cursor is not None:
        newest = place_of(connection, query.cursor) - 1
    oldest = newest - SCANNED + 1
    items, has_more = matching(connection, query, [CALLS.c.seq.between(oldest, newest)])
    cursor = items[-1].call_id if has_more else None
    if cursor is None and _first(connection, CALLS.c.seq < oldest) is not None:
        cursor = _first(connection, CALLS.c.seq >= oldest)
    return CallPage(items=items, has_more=cursor is not None, next_cursor=cursor, total_count=None)


def _below(connection: Connection, call_id: str) -> tuple[CallRecord, ...]:
    found: list[CallRecord] = []
    parents = [call_id]
    while parents and len(found) < MAX_BELOW:
        wanted = [CALLS.c.parent_id.in_(parents)]
        level, _ = newest_first(connection, wanted, MAX_BELOW - len(found))
        found += level
        parents = [call.call_id for call in level]
    return tuple(found)


def _first(connection: Connection, wanted: ColumnElement[bool]) -> str | None:
    """Return the id of the oldest matching call, or None."""
    first = select(CALLS.c.id).where(wanted).order_by(CALLS.c.seq).limit(1)
    return connection.execute(first).scalars().first()


def _recent(
    connection: Connection, since: datetime, most: int
) -> tuple[list[ColumnElement[bool]], bool]:
    """Return SQL conditions that select the calls since the time `since`, but only among the newest
    `most` rows of the call log.

    Also return a bool. It is True if older rows contain calls since `since`, which are left out.
    """
    bound = newest_seq(connection) - most
    at = as_kept(since)
    # Rows are in the order of `at`: if the newest row that is left out is too old, all are.
    older = select(CALLS.c.at).where(CALLS.c.seq <= bound).order_by(CALLS.c.seq.desc()).limit(1)
    newest = connection.execute(older).scalar()
    return [CALLS.c.seq > bound, CALLS.c.at >= at], newest is not None and newest >= at


def _figures(connection: Connection, since: datetime) -> ToolFiguresList:
    wanted, is_cut = _recent(connection, since, SUMMED)
    summed = _summed(CALLS.c.tool, wanted).order_by(text("calls DESC"), text("step"))
    rows = connection.execute(summed.limit(MAX_TOOLS + 1)).all()
    items = tuple(
        ToolFigures(
            tool=row.step, calls=row.calls, succeeded=row.succeeded, failed=row.failed,
            last_at=row.last_at, mean_ms=round(row.mean_ms, 3), p50_ms=row.p50_ms,
            p95_ms=row.p95_ms,
        )
        for row in rows[:MAX_TOOLS]
    )  # fmt: skip
    return ToolFiguresList(items=items, is_partial=is_cut or len(rows) > MAX_TOOLS)


def _series(connection: Connection, query: SeriesQuery, since: datetime) -> CallSeries:
    wanted, is_cut = _recent(connection, since, SUMMED)
    step = func.substr(CALLS.c.at, 1, 13 if query.by == "hour" else 10)
    summed = _summed(step, [*wanted, *filters_of(query)])
    rows = connection.execute(summed.order_by(text("step"))).all()
    return CallSeries(
        items=tuple(
            CallStep(
                at=row.step, calls=row.calls, failed=row.failed, p50_ms=row.p50_ms,
                p95_ms=row.p95_ms, cost=row.cost,
            )
            for row in rows
        ),
        is_partial=is_cut,
    )  # fmt: skip


def _summed(step: ColumnElement[str], wanted: list[ColumnElement[bool]]) -> Select[Any]:
    """Select the statistics of the matching calls, grouped by `step`."""
    # `part` is the share of the step's calls that took at most as long as the row's call.
    waited_ms = func.coalesce(CALLS.c.stages[APPROVAL_WAIT].as_float(), 0.0)
    own_ms = case((CALLS.c.total_ms > waited_ms, CALLS.c.total_ms - waited_ms), else_=0.0)
    part = func.cume_dist().over(partition_by=step, order_by=own_ms)
    columns = (
        step.label("step"), CALLS.c.code, CALLS.c.at, own_ms.label("own_ms"), part.label("part"),
        cast(CALLS.c.cost, Float).label("cost"),
    )  # fmt: skip
    in_order = select(*columns).where(*wanted).subquery().c

    def not_faster_than(least: float) -> ColumnElement[float]:
        return func.min(case((in_order.part >= least, in_order.own_ms)))

    return select(
        in_order.step,
        func.count().label("calls"),
        func.sum(case((in_order.code == "OK", 1), else_=0)).label("succeeded"),
        func.sum(failed(in_order.code)).label("failed"),
        func.avg(in_order.own_ms).label("mean_ms"),
        not_faster_than(0.5).label("p50_ms"),
        not_faster_than(0.95).label("p95_ms"),
        func.max(in_order.at).label("last_at"),
        func.sum(in_order.cost).label("cost"),
    ).group_by(in_order.step)


_WAS_JUDGED = CALLS.c.code != InvalidParams.code
"""SQL condition: the call's arguments were valid, so that policy rules were applied to the call."""


def _given(
    connection: Connection, since: datetime, tools: Collection[str]
) -> list[tuple[CallGroup, JsonObject]]:
    keys = CALLS.c.tool, CALLS.c.version, CALLS.c.principal_id, CALLS.c.agent_id
    both = CALLS.join(RECORDS, RECORDS.c.seq == CALLS.c.seq)
    found = select(*keys, RECORDS.c.document).select_from(both)
    wanted, _ = _recent(connection, since, SCANNED)
    found = found.where(*wanted, CALLS.c.tool.in_(tools), _WAS_JUDGED)
    rows = connection.execute(found.order_by(CALLS.c.seq.desc()).limit(MAX_GIVEN))
    return [(CallGroup(*row[:4], 1), read_record(row[4]).arguments) for row in rows]


def _groups(connection: Connection, since: datetime) -> tuple[list[CallGroup], bool]:
    wanted, is_cut = _recent(connection, since, SCANNED)
    keys = CALLS.c.tool, CALLS.c.version, CALLS.c.principal_id, CALLS.c.agent_id
    count = func.count()
    counted = (
        select(*keys, count).where(*wanted, _WAS_JUDGED).group_by(*keys).order_by(count.desc())
    )
    return [CallGroup(*row) for row in connection.execute(counted)], is_cut
