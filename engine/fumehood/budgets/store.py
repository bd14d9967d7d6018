"""Rows of budgets' counters: what was spent, and up to where spending is durable ahead.

Host side. What may be spent is decided in `budgets/ledger`, in memory; here is what must survive.
Invariant: `reserved` is at least what any engine on this state has let be spent, so that a
start which takes it for spent can only be too strict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Delete,
    and_,
    delete,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.engine import RowMapping

from fumehood.budgets.model import Subject, Unit
from fumehood.budgets.settings import Period
from fumehood.storage.changes import stamp
from fumehood.storage.database import Database
from fumehood.storage.schema import COUNTERS
from fumehood.storage.writer import Job

KEPT_DAYS = 30
"""How long after its last change the counter of a day or of a session is kept."""

PRUNED_AT_ONCE = 500
"""Rows of one deletion: other writes wait for at most so many."""

_OF_SESSIONS = or_(
    COUNTERS.c.subject.like("session=%"), COUNTERS.c.subject.like("%;session=%")
)  # fmt: skip


class CounterKey(NamedTuple):
    """What the counters of one budget's units are found by."""

    budget: str
    subject: Subject
    period: str
    """A day (`2026-01-31`), or `total`."""


@dataclass(frozen=True, slots=True)
class CounterRow:
    """One counter. `settled` was spent; what `reserved` has beyond it may have been."""

    key: CounterKey
    unit: Unit
    settled: Decimal
    reserved: Decimal


class CounterTable:
    """The table. Nothing here knows a limit."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load_now(self, day: str) -> list[CounterRow]:
        """The counters of a day and those that never reset, but sessions', for the start.

        Raises:
            ReadFailed: the database cannot be read.
            ValueError: a row holds what no engine wrote there.
        """
        current = COUNTERS.c.period.in_((day, Period.TOTAL.value)) & ~_OF_SESSIONS
        return self._database.read_now(lambda connection: _rows(connection, current))

    async def find(self, keys: Iterable[CounterKey]) -> list[CounterRow]:
        """The counters of these keys, as far as there are any. Raises as `load_now` does."""
        wanted = or_(*(_is(key) for key in keys))
        return await self._database.read(lambda connection: _rows(connection, wanted))

    async def reserve(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Make spending up to `reserved` durable; a mark that is higher already stays.

        Raises:
            WriteFailed: nothing may be spent on the strength of it.
        """
        await self._database.write(_raising(rows, at))

    def reserve_soon(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """The same for what has been spent already, without waiting and without a promise."""
        self._database.write_soon(_raising(rows, at))

    async def give_back(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Lower the marks to what these rows say. Nobody may be spending from them meanwhile.

        Raises:
            WriteFailed: the marks stay as high as they are.
        """
        await self._database.write(_lowering(rows, at))

    def give_back_soon(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """The same without waiting. No higher mark may be on its way."""
        self._database.write_soon(_lowering(rows, at))

    def forget_soon(self, key: CounterKey) -> None:
        """Delete a counter that nothing was spent from, without waiting."""
        self._database.write_soon(lambda connection: connection.execute(_deletion(key)))

    async def prune(self, now: datetime) -> int:
        """Delete what is over for long: past days and sessions. Returns how many rows went.

        Raises:
            ReadFailed, WriteFailed: the rest stays until the next time.
        """
        oldest = now - timedelta(days=KEPT_DAYS)
        is_past = (COUNTERS.c.period != Period.TOTAL.value) & (
            COUNTERS.c.period < oldest.date().isoformat()
        )
        outdated = (COUNTERS.c.updated_at < stamp(oldest)) & or_(is_past, _OF_SESSIONS)
        gone = 0
        while True:
            batch = await self._database.read(
                lambda connection: _rows(connection, outdated, PRUNED_AT_ONCE)
            )
            if not batch:
                return gone
            await self._database.write(_deleting({row.key for row in batch}, outdated))
            gone += len(batch)


def _rows(
    connection: Connection, wanted: ColumnElement[bool], limit: int | None = None
) -> list[CounterRow]:
    chosen = select(COUNTERS).where(wanted).limit(limit)
    return [_row(row) for row in connection.execute(chosen).mappings()]


def _row(row: RowMapping) -> CounterRow:
    return CounterRow(
        CounterKey(row["budget"], Subject.parse(row["subject"]), row["period"]),
        Unit(row["unit"]),
        _amount(row["settled"]),
        _amount(row["reserved"]),
    )


def _amount(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise ValueError("no amount") from None
    if not amount.is_finite() or amount < 0:
        raise ValueError("no amount")
    return amount


def _is(key: CounterKey, unit: Unit | None = None) -> ColumnElement[bool]:
    counter = and_(
        COUNTERS.c.budget == key.budget,
        COUNTERS.c.subject == key.subject.text,
        COUNTERS.c.period == key.period,
    )
    return counter if unit is None else counter & (COUNTERS.c.unit == unit.value)


def _raising(rows: Sequence[CounterRow], at: datetime) -> Job[None]:
    def job(connection: Connection) -> None:
        for row in rows:
            there = select(COUNTERS.c.reserved).where(_is(row.key, row.unit))
            before = connection.execute(there).scalar_one_or_none()
            if before is None:
                connection.execute(insert(COUNTERS), _values(row, at))
            else:
                reserved = max(row.reserved, _amount(before))
                _change(connection, row, reserved, at)

    return job


def _lowering(rows: Sequence[CounterRow], at: datetime) -> Job[None]:
    def job(connection: Connection) -> None:
        for row in rows:
            _change(connection, row, row.reserved, at)

    return job


def _change(connection: Connection, row: CounterRow, reserved: Decimal, at: datetime) -> None:
    figures = {"settled": f"{row.settled:f}", "reserved": f"{reserved:f}", "updated_at": stamp(at)}
    connection.execute(update(COUNTERS).where(_is(row.key, row.unit)), figures)


def _values(row: CounterRow, at: datetime) -> dict[str, str]:
    return {
        "budget": row.key.budget,
        "subject": row.key.subject.text,
        "period": row.key.period,
        "unit": row.unit.value,
        "settled": f"{row.settled:f}",
        "reserved": f"{row.reserved:f}",
        "updated_at": stamp(at),
    }


def _deleting(keys: Iterable[CounterKey], outdated: ColumnElement[bool]) -> Job[None]:
    """What has been spent from since it was looked for, stays."""

    def job(connection: Connection) -> None:
        for key in keys:
            connection.execute(_deletion(key).where(outdated))

    return job


def _deletion(key: CounterKey) -> Delete:
    return delete(COUNTERS).where(_is(key))


__all__ = ["KEPT_DAYS", "CounterKey", "CounterRow", "CounterTable"]
