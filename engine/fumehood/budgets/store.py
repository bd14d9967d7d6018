"""Rows of budget counters: the amount spent, and the durable mark ahead of it.

Host side. `budgets/ledger` decides in memory; this is the part that must survive. Invariant:
`reserved` is at least the amount that any engine on this state has allowed, so counting it as spent
after a start can only be too strict.
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
"""Days that the counter of a day or session is kept after its last change."""

PRUNED_AT_ONCE = 500
"""Rows in one deletion, so that other writes wait for a bounded time."""

_OF_SESSIONS = or_(
    COUNTERS.c.subject.like("session=%"), COUNTERS.c.subject.like("%;session=%")
)  # fmt: skip


class CounterKey(NamedTuple):
    """The key of the counters of one budget."""

    budget: str
    subject: Subject
    period: str
    """A day (`2026-01-31`), or `total`."""


@dataclass(frozen=True, slots=True)
class CounterRow:
    """One counter. `settled` was spent; the rest of `reserved` may have been."""

    key: CounterKey
    unit: Unit
    settled: Decimal
    reserved: Decimal


class CounterTable:
    """The table of counters. It knows no limits."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load_now(self, day: str) -> list[CounterRow]:
        """At the start: today's counters and those that never reset, except sessions'.

        Raises:
            ReadFailed: the database cannot be read.
            ValueError: a row was not written by an engine.
        """
        current = COUNTERS.c.period.in_((day, Period.TOTAL.value)) & ~_OF_SESSIONS
        return self._database.read_now(lambda connection: _rows(connection, current))

    async def find(self, keys: Iterable[CounterKey]) -> list[CounterRow]:
        """The counters of these keys that exist. Raises as `load_now`."""
        wanted = or_(*(_is(key) for key in keys))
        return await self._database.read(lambda connection: _rows(connection, wanted))

    async def reserve(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Make spending up to `reserved` durable; a higher mark stays.

        Raises:
            WriteFailed: nothing may be spent on the strength of it.
        """
        await self._database.write(_raising(rows, at))

    def reserve_soon(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """The same for an amount already spent: does not wait, and may fail silently."""
        self._database.write_soon(_raising(rows, at))

    async def give_back(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """Lower the marks to these rows. No call may be spending from them meanwhile.

        Raises:
            WriteFailed: the marks stay.
        """
        await self._database.write(_lowering(rows, at))

    def give_back_soon(self, rows: Sequence[CounterRow], at: datetime) -> None:
        """The same without waiting. No higher mark may be pending."""
        self._database.write_soon(_lowering(rows, at))

    def forget_soon(self, key: CounterKey) -> None:
        """Delete an unused counter, without waiting."""
        self._database.write_soon(lambda connection: connection.execute(_deletion(key)))

    async def prune(self, now: datetime) -> int:
        """Delete long expired days and sessions. Returns the number of rows.

        Raises:
            ReadFailed, WriteFailed: the rest stays until the next run.
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
    """Keeps rows that were spent from since they were selected."""

    def job(connection: Connection) -> None:
        for key in keys:
            connection.execute(_deletion(key).where(outdated))

    return job


def _deletion(key: CounterKey) -> Delete:
    return delete(COUNTERS).where(_is(key))


__all__ = ["KEPT_DAYS", "CounterKey", "CounterRow", "CounterTable"]
