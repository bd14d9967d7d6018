"""Budgets and rate limits have one table of counters, with integers; old counts are kept."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Decimal

from sqlalchemy import Connection

KEPT = timedelta(days=30)


def upgrade(connection: Connection) -> None:
    """Run the step."""
    run = connection.exec_driver_sql
    budgets = run(
        "SELECT budget, subject, period, unit, settled, reserved, updated_at FROM counters"
    ).all()
    limits = run('SELECT "limit", subject, free_at FROM rate_limits').all()
    run("DROP TABLE counters")
    run("DROP TABLE rate_limits")
    run(
        """CREATE TABLE counters ( seq INTEGER NOT NULL, name VARCHAR NOT NULL,
            subject VARCHAR NOT NULL, period VARCHAR NOT NULL, unit VARCHAR NOT NULL,
            settled INTEGER NOT NULL, reserved INTEGER NOT NULL, until VARCHAR NOT NULL,
            PRIMARY KEY (seq), UNIQUE (name, subject, period, unit) )"""
    )
    run("CREATE INDEX counters_by_end ON counters (until)")
    rows = [
        (name, subject, period, unit, _figure(unit, settled), _figure(unit, reserved),
         _until(subject, period, updated_at))
        for name, subject, period, unit, settled, reserved, updated_at in budgets
    ]  # fmt: skip
    rows += [
        (limit, subject, "rate", "free_at", 0, free_at, _stamp(free_at))
        for limit, subject, free_at in limits
    ]
    for row in rows:
        run(
            "INSERT INTO counters (name, subject, period, unit, settled, reserved, until) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            row,
        )


def _figure(unit: str, text: str) -> int:
    amount = Decimal(text).scaleb(6) if unit == "money" else Decimal(text)
    return min(int(amount.to_integral_value(ROUND_CEILING)), 2**63 - 1)


def _until(subject: str, period: str, updated_at: str) -> str:
    if period == "total" and "session=" not in subject:
        return "9999"
    return (datetime.fromisoformat(updated_at) + KEPT).isoformat(timespec="microseconds")


def _stamp(free_at: int) -> str:
    return datetime.fromtimestamp(free_at / 1e9, UTC).isoformat(timespec="microseconds")
