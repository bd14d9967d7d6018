"""Rows of sessions: what is read is what was written, and they outlive the engine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fumehood.core.session import KeptSession, SessionRecord, SessionStatus
from fumehood.storage.database import Database, open_database
from fumehood.storage.sessions import SessionTable

pytestmark = [pytest.mark.anyio, pytest.mark.row("S6", "D6")]

NOW = datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)
RECORD = SessionRecord(
    id="sess_1",
    state=SessionStatus.ACTIVE,
    why=None,
    image="python-data",
    languages=("python", "shell"),
    agent_id="writer",
    memory_mb=512,
    created_at=NOW,
    last_used_at=NOW + timedelta(seconds=1),
    expires_at=NOW + timedelta(seconds=2),
    calls=3,
    is_busy=False,
)
ACTIVE = KeptSession("alice", RECORD)
OVER = KeptSession(
    "bob",
    RECORD.model_copy(
        update={"id": "sess_2", "state": SessionStatus.LOST, "why": "Gone.", "agent_id": None}
    ),
    NOW + timedelta(seconds=3),
)


async def test_rows_are_there_after_the_database_was_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    database = open_database(path)
    await SessionTable(database).change([ACTIVE, OVER], [])
    database.close()
    again = open_database(path)
    assert sorted(SessionTable(again).all_now(), key=lambda one: one.record.id) == [ACTIVE, OVER]
    again.close()


async def test_row_is_changed_and_another_deleted_in_one_step() -> None:
    database: Database = open_database(None)
    table = SessionTable(database)
    await table.change([ACTIVE, OVER], [])
    ended = KeptSession("alice", RECORD.model_copy(update={"state": SessionStatus.ENDED}), NOW)
    await table.change([ended], ["sess_2", "sess_unknown"])
    assert table.all_now() == [ended]
    database.close()
