"""An audit chain with a rotation and anchors, and helpers to inspect and tamper with it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fumehood.audit.service import add_anchor, own_anchors, verify_state
from fumehood.audit.verify import Anchor, Verdict
from fumehood.storage.audit_keys import keep_key, make_current, new_key
from fumehood.storage.audit_rows import AuditRow
from fumehood.storage.changes import stamp
from fumehood.storage.database import Database, open_database

from .postgres import raw_connection

START = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = 20
ROTATED_AT = 10
ANCHORED_AT = (8, 18)


def append(database: Database, number: int) -> int:
    """Append one row as the engine does and return its number."""
    at = stamp(START + timedelta(seconds=number))
    return database.write_now(
        lambda connection: database.audit.append(connection, "test.row", at, {"number": number})
    )


def rotate(database: Database, state: Path) -> None:
    """Rotate the key in the engine's steps."""
    key = new_key()
    keep_key(state, key)
    database.audit.learn(key)
    database.write_now(lambda c: database.audit.rotate(c, stamp(START), key, {"by": "test"}))
    make_current(state, key)


def make_chain(state: Path) -> None:
    """Write `ROWS` rows with one rotation and two anchors, and close the database."""
    database = open_database(state / "state.db")
    for number in range(1, ROWS + 1):
        if number == ROTATED_AT:
            rotate(database, state)
        else:
            assert append(database, number) == number
        if number in ANCHORED_AT:
            row = rows_of(state)[-1]
            add_anchor(state, Anchor(row.seq, row.key_id, row.mac, stamp(START)))
    database.close()


def rows_of(state: Path) -> list[AuditRow]:
    """All rows of the audit table."""
    with raw_connection(state / "state.db") as connection:
        rows = connection.execute("SELECT seq, key_id, body, mac FROM audit ORDER BY seq")
        found = rows.fetchall()
    return [
        AuditRow(seq, key_id, body if isinstance(body, bytes) else body.encode(), mac)
        for seq, key_id, body, mac in found
    ]


def look(state: Path) -> Verdict:
    """Verify the chain with the state directory's own keys and anchors."""
    return verify_state(state, own_anchors(state))


def tamper(state: Path, change: Callable[[Any], object]) -> None:
    """Change the database as an attacker with write access but no key would."""
    with raw_connection(state / "state.db") as connection:
        change(connection)


def run_sql(state: Path, *statements: str) -> None:
    """Run SQL on the database file directly."""

    def change(connection: Any) -> None:
        for statement in statements:
            connection.execute(statement)

    tamper(state, change)
