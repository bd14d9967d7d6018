"""The database rows of the counters of budgets and rate limits.

Host side. `budgets/ledger` and `budgets/limiter` decide in memory; they need the rows only after a
restart. Invariant: the mark of a budget's counter (`reserved`) is at least the amount that the
engine has let calls use. After a restart, the whole mark counts as used. So the engine can then be
too strict, but never too lenient.
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
"""Number of days for which the counter of a day or of a session is stored after its last change."""

FOREVER = "9999"
"""The stored expiry of a counter that never expires. It sorts after every time."""

_OF_SESSIONS = or_(
    COUNTERS.c.subject.like("session=%"), COUNTERS.c.subject.like("%;session=%")
)  # fmt: skip


class CounterKey(NamedTuple):
    """The key of one counter of a budget or a rate limit."""

    name: str
    subject: Subject
    period: str
    """A day such as `2026-01-31`, or `total` if the budget never resets. `rate` for a rate
    limit.
    """

    unit: str


class CounterRow(NamedTuple):
    """The stored amounts of one counter.

    For a budget, `settled` is the amount that calls have used. `reserved` is the counter's mark,
    the amount that counts as used after a restart. For a rate limit, `reserved` is the time at
    which the whole burst can be used again, in Unix nanoseconds, and `settled` is 0.
    """

    key: CounterKey
    settled: int
    reserved: int


class CounterTable:
    """The table of counters. It stores amounts, but does not know their limits."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load_now(self, *periods: str, sessions: bool = False) -> list[CounterRow]:
        """Return the counters of these periods. Include the counters of sessions only if `sessions`
        is True.

        `periods` are values of `CounterKey.period`. This call blocks, so it must be used only while
        the engine starts.

        Raises:
            ReadFailed: the database cannot be read.
            ValueError, TypeError: a row is invalid.
        """
        current = COUNTERS.c.period.in_(periods)
        wanted = current if sessions else current & ~_OF_SESSIONS
        return self._database.read_now(lambda connection: _rows(connection, wanted))

    async def find(self, keys: Iterable[CounterKey]) -> list[CounterRow]:
        """Return the stored counters with these keys. Keys that are not stored are left out. Raises
        the same errors as `load_now`.
        """
        wanted = or_(*(_is(key) for key in keys))
        return await self._database.read(lambda connection: _rows(connection, wanted))

    async def reserve(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Raise the marks in the database to the field `reserved` of each row. A mark is the amount
        that counts as spent after a restart. A mark that is already higher stays unchanged.

        `at` is the current time, from which the rows' expiry is calculated.

        Raises:
            WriteFailed: it is not certain that the marks are raised. The caller must not let calls
                use more than the old marks.
        """
        await self._database.write(_writing(_RAISE, rows, at))

    def reserve_soon(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Raise the marks like `reserve`, but do not wait for the write. A failure of the write is
        ignored.
        """
        self._database.write_soon(_writing(_RAISE, rows, at))

    async def give_back(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Lower the marks in the database to the field `reserved` of each row. A mark is the amount
        that counts as spent after a restart.

        Until this method returns, the caller must not let calls use more than these lower marks.

        Raises:
            WriteFailed: it is not certain that the marks are lowered.
        """
        await self._database.write(_writing(_PUT, rows, at))

    def give_back_soon(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Lower the marks like `give_back`, but do not wait for the write. The caller must not call
        this while a write of a higher mark is unfinished.
        """
        self._database.write_soon(_writing(_PUT, rows, at))

    def note(self, row: CounterRow, until: datetime) -> None:
        """Store a row that expires at `until`. This method neither waits nor fails. A crash may
        lose the row.
        """
        self._database.post(_put, _values(row, stamp(until)))

    def forget_soon(self, key: CounterKey) -> None:
        """Delete the row of a counter that no call has used, without waiting."""
        self._database.write_soon(
            lambda connection: connection.execute(delete(COUNTERS).where(_is(key)))
        )

    async def prune(self, now: datetime) -> int:
        """Delete expired rows, and return how many were deleted.

        Raises:
            WriteFailed: the database failed. The next run deletes the rows that are left.
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
