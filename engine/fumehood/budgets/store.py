"""The database rows of counters, for budgets and rate limits.

Host side. `budgets/ledger` and `budgets/limiter` decide in memory. The rows are needed after a
restart. Invariant: a budget's mark (`reserved`) is at least the amount that the engine has allowed
calls to use. After a restart, the whole mark counts as used. So the engine can be too strict then,
but never too lenient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    delete,
    or_,
    select,
    text,
)

from fumehood.budgets.model import Subject
from fumehood.core.usage_table import Period
from fumehood.storage.changes import stamp
from fumehood.storage.database import DELETED_AT_ONCE, Database
from fumehood.storage.schema import COUNTERS, MAX_INTEGER
from fumehood.storage.writer import Job, Row

KEPT_DAYS = 30
"""Number of days for which a day's or session's counter is kept after its last change."""

FOREVER = "9999"
"""Stands for the expiry of a counter that never expires. It sorts after every stored time."""

_OF_SESSIONS = or_(
    COUNTERS.c.subject.like("session=%"), COUNTERS.c.subject.like("%;session=%")
)  # fmt: skip


class CounterKey(NamedTuple):
    """The key of one counter of a budget or rate limit."""

    name: str
    subject: Subject
    period: str
    """A day such as `2026-01-31`, or `total`. For a rate limit, `rate`."""

    unit: str


class CounterRow(NamedTuple):
    """One counter. The amount `settled` has been used. The amount between `settled` and `reserved`
    may have been used.
    """

    key: CounterKey
    settled: int
    reserved: int


class CounterTable:
    """The table of counters. It does not know the limits of the amounts that it stores."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load_now(self, *periods: str, sessions: bool = False) -> list[CounterRow]:
        """Return the counters of these periods. This call blocks, so use it only at the engine's
        start.

        Counters of sessions are included only if `sessions` is True.

        Raises:
            ReadFailed: the database cannot be read.
            ValueError, TypeError: a row is invalid.
        """
        current = COUNTERS.c.period.in_(periods)
        wanted = current if sessions else current & ~_OF_SESSIONS
        return self._database.read_now(lambda connection: _rows(connection, wanted))

    async def find(self, keys: Iterable[CounterKey]) -> list[CounterRow]:
        """Return those counters with these keys that exist. Raises the same errors as
        `load_now`.
        """
        wanted = or_(*(_is(key) for key in keys))
        return await self._database.read(lambda connection: _rows(connection, wanted))

    async def reserve(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Raise the marks in the database to the amounts `reserved`. A mark that is already higher
        stays unchanged.

        Raises:
            WriteFailed: the marks may be unchanged, so nothing beyond the old marks may be used.
        """
        await self._database.write(_writing(_RAISE, rows, at))

    def reserve_soon(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Raise the marks without waiting, because the amounts are already used.

        If this fails, the failure is ignored.
        """
        self._database.write_soon(_writing(_RAISE, rows, at))

    async def give_back(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Lower the marks to those in `rows`. Until the lower marks are stored, no call may use the
        freed amounts.

        Raises:
            WriteFailed: the marks are unchanged.
        """
        await self._database.write(_writing(_PUT, rows, at))

    def give_back_soon(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Lower the marks like `give_back`, but without waiting. There must be no pending write of
        a higher mark.
        """
        self._database.write_soon(_writing(_PUT, rows, at))

    def note(self, row: CounterRow, until: datetime) -> None:
        """Store a row that expires at `until`. A crash may lose the row. This method neither waits
        nor fails.
        """
        self._database.post(_put, _values(row, stamp(until)))

    def forget_soon(self, key: CounterKey) -> None:
        """Delete the row of an unused counter, without waiting."""
        self._database.write_soon(
            lambda connection: connection.execute(delete(COUNTERS).where(_is(key)))
        )

    async def prune(self, now: datetime) -> int:
        """Delete expired rows and return their number.

        Raises:
            WriteFailed: the remaining rows stay until the next run.
        """
        over = select(COUNTERS.c.seq).where(COUNTERS.c.until <= stamp(now)).limit(DELETED_AT_ONCE)

        def job(connection: Connection) -> int:
            return connection.execute(delete(COUNTERS).where(COUNTERS.c.seq.in_(over))).rowcount

        return await self._database.repeat(job)


def _rows(connection: Connection, wanted: ColumnElement[bool]) -> list[CounterRow]:
    return [_row(row) for row in connection.execute(select(COUNTERS).where(wanted)).mappings()]


def _row(row: RowMapping) -> CounterRow:
    figures = row["settled"], row["reserved"]
    if not all(isinstance(figure, int) and figure >= 0 for figure in figures):
        raise ValueError("no amount")
    key = CounterKey(row["name"], Subject.parse(row["subject"]), row["period"], row["unit"])
    return CounterRow(key, *figures)


def _is(key: CounterKey) -> ColumnElement[bool]:
    return and_(
        COUNTERS.c.name == key.name,
        COUNTERS.c.subject == key.subject.text,
        COUNTERS.c.period == key.period,
        COUNTERS.c.unit == key.unit,
    )


def _writing(how: Any, rows: Sequence[CounterRow], at: datetime) -> Job[None]:
    def job(connection: Connection) -> None:
        if rows:
            connection.execute(how, [_values(row, _until(row.key, at)) for row in rows])

    return job


def _put(connection: Connection, rows: list[Row]) -> None:
    connection.execute(_PUT, rows)


def _until(key: CounterKey, at: datetime) -> str:
    is_for_ever = key.period == Period.TOTAL.value and key.subject.session is None
    return FOREVER if is_for_ever else stamp(at + timedelta(days=KEPT_DAYS))


def _values(row: CounterRow, until: str) -> Row:
    return {
        "name": row.key.name,
        "subject": row.key.subject.text,
        "period": row.key.period,
        "unit": row.key.unit,
        "settled": min(row.settled, MAX_INTEGER),
        "reserved": min(row.reserved, MAX_INTEGER),
        "until": until,
    }


_ADD = """
INSERT INTO counters (name, subject, period, unit, settled, reserved, until)
VALUES (:name, :subject, :period, :unit, :settled, :reserved, :until)
ON CONFLICT (name, subject, period, unit)
DO UPDATE SET settled = excluded.settled, until = excluded.until, reserved = """
_PUT = text(f"{_ADD}excluded.reserved")
_RAISE = text(
    f"{_ADD}CASE WHEN counters.reserved > excluded.reserved THEN counters.reserved "
    "ELSE excluded.reserved END"
)
