"""Helpers to block or fill a database, and rows to write to it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, select

from fumehood.storage.calls import CallRow
from fumehood.storage.database import Database
from fumehood.storage.schema import CALLS, META

from .wait import DEADLINE_S, wait_until


def put(key: str, value: str = "") -> Callable[[Connection], str]:
    """A job that adds one row; its result is the key."""

    def job(connection: Connection) -> str:
        connection.execute(insert(META), {"key": key, "value": value})
        return key

    return job


def keys(connection: Connection) -> set[str]:
    """The rows that `put` has added."""
    return set(connection.execute(select(META.c.key)).scalars())


def call_row(number: int, **fields: Any) -> CallRow:
    """A row of the call log."""
    row: dict[str, Any] = {
        "id": f"call_{number:024x}", "at": "2026-01-01T00:00:00.000Z", "principal_id": "uid:1",
        "agent_id": None, "session_id": None, "trace_id": "trace_20260101_000000000000",
        "tool": "calculator", "version": "1.0.0", "code": "OK", "ended_by": "ok",
        "total_ms": 1.5, "cpu_ms": 0.5, "cost": "0.000000", "currency": "USD",
        "input_tokens": 9, "output_tokens": 3, "tokens_used": 0, **fields,
    }  # fmt: skip
    return row  # type: ignore[return-value]


def post(database: Database, number: int, **fields: Any) -> None:
    """Post a row of the call log."""
    database.post(_insert, call_row(number, **fields))  # type: ignore[arg-type]


def _insert(connection: Connection, rows: list[dict[str, Any]]) -> None:
    connection.execute(insert(CALLS), rows)


@contextmanager
def writer_held(database: Database) -> Iterator[None]:
    """Block the writer within the context; the queued writes then run together."""
    entered, leave = threading.Event(), threading.Event()

    def wait(connection: Connection) -> None:
        entered.set()
        leave.wait(DEADLINE_S)

    future = database._writer.submit(wait, durable=False)
    wait_until(entered.is_set)
    try:
        yield
    finally:
        leave.set()
        future.result(DEADLINE_S)


def set_full(database: Database) -> None:
    """Forbid the database to grow, which SQLite reports as a full disk."""
    database.write_now(
        lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 1").scalar_one()
    )


def set_roomy(database: Database) -> None:
    """Undo `set_full`."""
    database.write_now(
        lambda connection: connection.exec_driver_sql(
            "PRAGMA max_page_count = 1000000"
        ).scalar_one()
    )


@dataclass
class Events:
    """Records the database's events."""

    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        self.seen.append((event, values))

    def named(self, event: str) -> list[dict[str, Any]]:
        return [values for name, values in self.seen if name == event]


def pages_of(path: Path, *names: str) -> list[int]:
    """The first page of each table or index; pages are numbered from 1."""
    connection = sqlite3.connect(path)
    found = dict(connection.execute("SELECT name, rootpage FROM sqlite_master").fetchall())
    connection.close()
    return [found[name] for name in names]
