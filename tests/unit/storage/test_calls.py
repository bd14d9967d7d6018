"""The call log of one principal, its retention, and session rows."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from fumehood.core.call_log import CallPage, CallQuery
from fumehood.core.errors import ResourceNotFound
from fumehood.core.session import (
    KeptSession,
    SavedCopy,
    SessionHome,
    SessionRecord,
    SessionStatus,
)
from fumehood.storage import calls as calls_module
from fumehood.storage import database as database_module
from fumehood.storage.calls import CallLog
from fumehood.storage.database import Database, open_database
from fumehood.storage.errors import ReadFailed
from fumehood.storage.retention import retention
from fumehood.storage.schema import SESSIONS
from fumehood.storage.sessions import SessionTable
from support.state import call_row

pytestmark = pytest.mark.anyio

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03}Z"


@pytest.fixture
def log(database: Database) -> CallLog:
    return CallLog(database, kept_days=30, kept=100)


def numbers(page: CallPage) -> list[int]:
    return [int(record.call_id.removeprefix("call_"), 16) for record in page.items]


async def listed(log: CallLog, principal: str = "uid:1", **query: Any) -> list[int]:
    return numbers(await log.page(principal, CallQuery(**query)))


@pytest.mark.row("D4", "D6")
async def test_calls_are_ordered_by_writing_if_clock_is_set_back(log: CallLog) -> None:
    for number in range(6):
        moment = NOON + timedelta(minutes=number) - timedelta(days=400 if number >= 3 else 0)
        log.record(call_row(number, at=stamp(moment)))
    assert await listed(log) == [5, 4, 3, 2, 1, 0]
    first = await log.page("uid:1", CallQuery(limit=4))
    assert numbers(first) == [5, 4, 3, 2]
    assert await listed(log, cursor=first.next_cursor) == [1, 0]
    assert await listed(log, since=NOON) == [2, 1, 0]


@pytest.mark.row("D4", "D6")
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"tool": "calculator"}, {0, 3, 6, 9}),
        ({"tool": "calculator@1.0.0"}, {0, 3, 6, 9}),
        ({"tool": "calculator@2.0.0"}, set()),
        ({"tool": "calculator*"}, set()),
        ({"agent": "a"}, {0, 2, 4, 6, 8}),
        ({"code": "TIMEOUT"}, {5}),
        ({"since": NOON + timedelta(minutes=7)}, {7, 8, 9}),
        ({"until": NOON + timedelta(minutes=2)}, {0, 1}),
        ({"since": NOON + timedelta(minutes=2), "until": NOON + timedelta(minutes=3)}, {2}),
        ({"since": (NOON + timedelta(minutes=7)).astimezone(timezone(timedelta(hours=-9)))},
         {7, 8, 9}),
        ({"tool": "calculator", "agent": "a", "since": NOON + timedelta(minutes=1)}, {6}),
        ({}, set(range(10))),
    ],
)  # fmt: skip
async def test_call_filters_return_exactly_the_matching_calls(
    log: CallLog, query: dict[str, Any], expected: set[int]
) -> None:
    for number in range(10):
        log.record(
            call_row(
                number,
                at=stamp(NOON + timedelta(minutes=number)),
                tool=("calculator", "calculator2", "run")[number % 3],
                agent_id=("a", None)[number % 2],
                code="TIMEOUT" if number == 5 else "OK",
            )
        )
    assert set(await listed(log, **query)) == expected


@pytest.mark.row("D4", "D6")
async def test_calls_of_another_principal_are_not_found(log: CallLog) -> None:
    for number in range(6):
        log.record(call_row(number, principal_id=f"uid:{number % 2}"))
    mine, theirs = await listed(log, "uid:0"), await listed(log, "uid:1")
    assert (mine, theirs) == ([4, 2, 0], [5, 3, 1])
    assert await listed(log, "uid") == []
    assert await listed(log, "uid:%") == []
    assert (await log.get("uid:1", f"call_{1:024x}")).call_id == f"call_{1:024x}"
    with pytest.raises(ResourceNotFound):
        await log.get("uid:0", f"call_{1:024x}")
    for cursor in (f"call_{1:024x}", f"call_{99:024x}"):
        with pytest.raises(ResourceNotFound):
            await log.page("uid:0", CallQuery(cursor=cursor))


@pytest.mark.row("D4", "D6")
async def test_calls_older_than_retention_are_pruned_but_the_newest(log: CallLog) -> None:
    for number in range(10):
        log.record(call_row(number, at=stamp(NOON + timedelta(days=number))))
    assert await log.prune(NOON + timedelta(days=34)) == 4
    assert await listed(log) == [9, 8, 7, 6, 5, 4]
    assert await log.prune(NOON + timedelta(days=34)) == 0
    late = NOON + timedelta(days=1000)
    log.record(call_row(10, at=stamp(NOON)))
    assert await log.prune(late) == 6
    assert await listed(log) == [10]  # the newest stays, so that the sequence continues
    log.record(call_row(11, at=stamp(late)))
    assert await listed(log) == [11, 10]


@pytest.mark.row("D4", "D6")
async def test_calls_of_a_principal_over_the_maximum_are_pruned_oldest_first(
    log: CallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "DELETED_AT_ONCE", 7)
    log.record(call_row(0, principal_id="uid:7", at=stamp(NOON)))
    for number in range(1, 131):
        log.record(call_row(number, at=stamp(NOON)))
    assert await log.prune(NOON) == 30
    assert await listed(log, limit=100) == list(range(130, 30, -1))
    assert await listed(log, "uid:7") == [0]  # of which nobody else's calls take the place


@pytest.mark.row("D4", "D6")
async def test_log_grown_by_a_tenth_is_marked_overdue(log: CallLog) -> None:
    for number in range(9):
        log.record(call_row(number))
    assert not log.overdue.is_set()
    log.record(call_row(9))
    assert log.overdue.is_set()


async def test_in_memory_log_has_a_lower_maximum(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "IN_MEMORY_KEPT", 10)
    log = CallLog(database, kept_days=30, kept=10**8)
    for number in range(15):
        log.record(call_row(number, at=stamp(NOON)))
    await database.flush()
    assert await log.prune(NOON) == 5


# -- Retention -----------------------------------------------------------------------------

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Log:
    """A log that counts its prunes and fails as scripted."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.pruned: asyncio.Queue[datetime] = asyncio.Queue()
        self.overdue = asyncio.Event()

    async def prune(self, now: datetime) -> int:
        self.pruned.put_nowait(now)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return 0


async def times(log: Log, count: int) -> list[datetime]:
    async with asyncio.timeout(20):
        return [await log.pruned.get() for _ in range(count)]


@pytest.mark.row("D6")
async def test_unexpected_prune_failure_is_reported_and_retention_continues() -> None:
    faults: list[Exception] = []
    log = Log(ReadFailed("damaged"), ValueError("a bug"), None)
    async with retention(log.prune, lambda: NOW, faults.append, overdue=log.overdue):
        for _ in range(3):
            await times(log, 1)
            log.overdue.set()
        await times(log, 1)
    assert [type(fault) for fault in faults] == [ValueError]


@pytest.mark.row("D6")
async def test_short_retention_shortens_the_prune_interval() -> None:
    log = Log()
    async with retention(log.prune, lambda: NOW, pytest.fail, kept_s=0.001):  # type: ignore[arg-type]
        assert len(await times(log, 3)) == 3


# -- Rows of sessions ----------------------------------------------------------------------

NOW_SESSIONS = datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)
RECORD = SessionRecord(
    id="sess_1",
    state=SessionStatus.ACTIVE,
    why=None,
    image="python-data",
    languages=("python", "shell"),
    agent_id="writer",
    memory_mb=512,
    created_at=NOW_SESSIONS,
    last_used_at=NOW_SESSIONS + timedelta(seconds=1),
    expires_at=NOW_SESSIONS + timedelta(seconds=2),
    calls=3,
    is_busy=False,
)
ACTIVE = KeptSession("alice", RECORD)
DURABLE = KeptSession(
    "alice",
    RECORD.model_copy(
        update={
            "id": "sess_3", "durable": True, "saved_at": NOW_SESSIONS, "restored_at": NOW_SESSIONS,
            "env": ("A",),
        }
    ),
    home=SessionHome(
        "box", 1, 60.0, 3600.0, copy=SavedCopy(NOW_SESSIONS.isoformat(), "list", 7),
        restored_at=NOW_SESSIONS.isoformat(), env={"A": "1"},
    ),
)  # fmt: skip
SHOP = {"directory": "/home/a/shop", "manifest": "list", "manifest_bytes": 7}
COPY_OF_SHOP = KeptSession(
    "alice",
    RECORD.model_copy(update={"id": "sess_4", "project": "shop"}),
    home=SessionHome("box", 1, 60.0, 3600.0, of_parts={"project": SHOP, "lunch": {"at": 12}}),
)
OVER = KeptSession(
    "bob",
    RECORD.model_copy(
        update={"id": "sess_2", "state": SessionStatus.LOST, "why": "Gone.", "agent_id": None}
    ),
    NOW_SESSIONS + timedelta(seconds=3),
)


@pytest.mark.row("S6", "D6")
async def test_session_rows_survive_reopening_and_are_changed_and_deleted_in_one_step(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    database = open_database(path)
    await SessionTable(database).change([ACTIVE, OVER, DURABLE], [])
    database.close()
    again = open_database(path)
    rows = SessionTable(again)
    assert sorted(rows.all_now(), key=lambda one: one.record.id) == [ACTIVE, OVER, DURABLE]
    assert await rows.ids() == ({RECORD.id, "sess_3"}, {"sess_2"})
    old = {"container": "box", "epoch": 1, "idle_s": 60.0, "lifetime_s": 3600.0}
    again.write_now(
        lambda connection: connection.execute(
            update(SESSIONS).where(SESSIONS.c.id == "sess_3").values(home=old)
        )
    )
    (earlier,) = [one for one in rows.all_now() if one.record.id == "sess_3"]
    assert (earlier.record.durable, earlier.home) == (False, SessionHome("box", 1, 60.0, 3600.0))
    again.write_now(
        lambda connection: connection.execute(
            update(SESSIONS).where(SESSIONS.c.id == "sess_3").values(home={**old, "in_trial": True})
        )
    )
    (earlier,) = [one for one in rows.all_now() if one.record.id == "sess_3"]
    assert earlier.home is not None
    assert earlier.home.must_restore
    await rows.change([], ["sess_3"])
    await rows.change([COPY_OF_SHOP], [])
    stored = again.read_now(
        lambda connection: connection.execute(
            select(SESSIONS.c.home).where(SESSIONS.c.id == "sess_4")
        ).scalar_one()
    )
    # Beside the kernel's fields, as in earlier versions, which stored null if there was no value.
    assert (stored["project"], stored["lunch"]) == (SHOP, {"at": 12})
    assert COPY_OF_SHOP in rows.all_now()
    again.write_now(
        lambda connection: connection.execute(
            update(SESSIONS).where(SESSIONS.c.id == "sess_4").values(home={**old, "project": None})
        )
    )
    (earlier,) = [one for one in rows.all_now() if one.record.id == "sess_4"]
    assert (earlier.record.project, earlier.home) == (
        None, SessionHome("box", 1, 60.0, 3600.0)
    )  # fmt: skip
    await rows.change([], ["sess_4"])
    ended = KeptSession(
        "alice", RECORD.model_copy(update={"state": SessionStatus.ENDED}), NOW_SESSIONS
    )
    await SessionTable(again).change([ended], ["sess_2", "sess_unknown"])
    assert SessionTable(again).all_now() == [ended]
    again.close()
