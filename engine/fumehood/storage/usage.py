"""Usage: the total usage of past calls, computed from the call log.

Host side. Invariants: sums are exact, because no floats are added and no sum can overflow; a
principal gets only the sums over its own calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    RowMapping,
    case,
    cast,
    func,
    literal_column,
    select,
)

from fumehood.core.usage_table import MAX_ROWS, Group, UsageQuery, UsageRow, UsageTable
from fumehood.storage.calls import FAILED, filters_of
from fumehood.storage.database import Database
from fumehood.storage.schema import CALLS

HIGH = 1 << 32
"""Large columns are summed in two halves, the quotient and the remainder of a division by this
number. Otherwise, SQLite's sums could overflow: two calls may each report 2^63 - 1 tokens."""

MILLION = 1_000_000

_GROUP_COLUMNS: dict[Group, ColumnElement[Any]] = {
    "principal": CALLS.c.principal_id,
    "agent": CALLS.c.agent_id,
    "session": CALLS.c.session_id,
    "tool": CALLS.c.tool,
    "day": func.substr(CALLS.c.at, literal_column("1"), literal_column("10")),
}

_ADDED: dict[str, ColumnElement[Any]] = {
    "calls": func.count(),
    "errors": func.sum(case((CALLS.c.code != "OK", 1), else_=0)),
    "failed": func.sum(FAILED),
}

_LARGE: dict[str, ColumnElement[Any]] = {
    "input_tokens": CALLS.c.input_tokens,
    "output_tokens": CALLS.c.output_tokens,
    "tokens_used": CALLS.c.tokens_used,
    # Amounts always have six decimal places, so without the point they count millionths.
    "cost": cast(func.replace(CALLS.c.cost, ".", ""), BigInteger),
}


async def usage_table(
    database: Database, query: UsageQuery, principal_id: str | None = None
) -> UsageTable:
    """Sum up the usage of one principal's calls that match the query, or of all matching calls if
    `principal_id` is None. Every call that has already ended is included.

    Raises:
        ReadFailed: the database cannot be read.
    """
    await database.flush()
    return await database.read(lambda connection: _table(connection, query, principal_id))


def _table(connection: Connection, query: UsageQuery, principal_id: str | None) -> UsageTable:
    wanted = filters_of(query)
    if principal_id is not None:
        wanted.append(CALLS.c.principal_id == principal_id)
    rows = _summed(connection, wanted, query.groups, MAX_ROWS + 1)
    total = _summed(connection, wanted, (), None) or [_usage_row({}, ())]
    return UsageTable(
        by=query.groups,
        items=tuple(rows[:MAX_ROWS]),
        total=total[0],
        has_more=len(rows) > MAX_ROWS,
    )


def _summed(
    connection: Connection,
    wanted: Sequence[ColumnElement[bool]],
    groups: Sequence[Group],
    limit: int | None,
) -> list[UsageRow]:
    """Sum up calls in groups. Return one row for each group, ordered by the groups' keys.

    `wanted` are the SQL conditions for the calls, and `groups` says by what they are grouped.
    `limit` is the maximum number of returned rows, or None for no limit.
    """
    keys = [_GROUP_COLUMNS[group] for group in groups]
    chosen = (
        select(
            *(key.label(f"key_{group}") for key, group in zip(keys, groups, strict=True)),
            CALLS.c.currency,
            *(added.label(name) for name, added in _ADDED.items()),
            *_halves(),
        )
        .where(*wanted)
        .group_by(*keys, CALLS.c.currency)
        .order_by(*(key.nulls_first() for key in keys), CALLS.c.currency)
    )
    # The query returns a row for each currency of a group. These rows are merged to one.
    together: dict[tuple[Any, ...], list[RowMapping]] = {}
    for row in connection.execute(chosen).mappings():
        key = tuple(row[f"key_{group}"] for group in groups)
        if key not in together and limit is not None and len(together) == limit:
            break
        together.setdefault(key, []).append(row)
    return [_usage_row(dict(zip(groups, key, strict=True)), rows) for key, rows in together.items()]


def _halves() -> Iterable[ColumnElement[Any]]:
    for name, column in _LARGE.items():
        yield func.sum(column // HIGH).label(f"{name}_high")
        yield func.sum(column % HIGH).label(f"{name}_low")


def _usage_row(group: dict[Group, str | None], rows: Sequence[RowMapping]) -> UsageRow:
    return UsageRow(
        group=group,
        calls=sum(row["calls"] for row in rows),
        errors=sum(row["errors"] for row in rows),
        failed=sum(row["failed"] for row in rows),
        input_tokens=sum(_whole(row, "input_tokens") for row in rows),
        output_tokens=sum(_whole(row, "output_tokens") for row in rows),
        tokens_used=sum(_whole(row, "tokens_used") for row in rows),
        cost={row["currency"]: _money(_whole(row, "cost")) for row in rows},
    )


def _whole(row: RowMapping, name: str) -> int:
    return int(row[f"{name}_high"]) * HIGH + int(row[f"{name}_low"])


def _money(millionths: int) -> str:
    return f"{millionths // MILLION}.{millionths % MILLION:06}"
