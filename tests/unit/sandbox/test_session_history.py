"""What is said of sessions that are over: bounded for each, and written until it is kept."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from fumehood.core.session import KeptSession, SessionRecord, SessionStatus
from fumehood.sandbox.session import MAX_OF_PRINCIPAL, SessionHistory
from support.session_rows import SessionRows

pytestmark = [pytest.mark.anyio, pytest.mark.row("S6")]

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def over(number: int, principal_id: str = "alice") -> KeptSession:
    record = SessionRecord(
        id=f"sess_{number}",
        state=SessionStatus.ENDED,
        why="Its owner ended it.",
        image="python",
        languages=("python",),
        agent_id=None,
        memory_mb=512,
        created_at=NOW,
        last_used_at=NOW,
        expires_at=NOW,
        calls=0,
        is_busy=False,
    )
    return KeptSession(principal_id, record, NOW + timedelta(seconds=number))


async def test_session_history_of_one_principal_does_not_displace_others() -> None:
    rows = SessionRows()
    history = SessionHistory(rows)
    history.add(over(-1, "bob"))
    for number in range(MAX_OF_PRINCIPAL + 5):
        history.add(over(number))
        await history.write()
    assert len(history.of("alice")) == MAX_OF_PRINCIPAL
    assert history.of("alice")[0].record.id == f"sess_{MAX_OF_PRINCIPAL + 4}"
    assert history.find("alice", "sess_4") is None
    assert history.find("bob", "sess_-1") is not None
    assert len(rows.kept) == MAX_OF_PRINCIPAL + 1


async def test_history_row_changed_during_its_write_is_written_again() -> None:
    history: SessionHistory
    written: list[int] = []

    class Slow:
        async def change(self, put: list[KeptSession], delete: list[str]) -> None:
            if not written:
                history.note(over(1))
            written.append(len(put))

    history = SessionHistory(Slow())
    history.add(over(1))
    await history.write()
    await history.write()
    await history.write()
    assert written == [1, 1]
