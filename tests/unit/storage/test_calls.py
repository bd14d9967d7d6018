"""The call log: own rows only, newest first by number, and no more of them than is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from fumehood.core.call_log import CallPage, CallQuery
from fumehood.core.errors import ResourceNotFound
from fumehood.storage import calls as calls_module
from fumehood.storage.calls import CallLog
from fumehood.storage.database import Database, open_database
from support.state import call_row

pytestmark = [pytest.mark.anyio, pytest.mark.row("D4", "D6")]

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03}Z"


@pytest.fixture(params=["file", "memory"])
async def database(request: pytest.FixtureRequest, home: Path) -> AsyncIterator[Database]:
    opened = open_database(home / "state.db" if request.param == "file" else None)
    yield opened
    opened.close()


@pytest.fixture
def log(database: Database) -> CallLog:
    return CallLog(database, kept_days=30, kept=100)


def numbers(page: CallPage) -> list[int]:
    return [int(record.call_id.removeprefix("call_"), 16) for record in page.items]


async def listed(log: CallLog, principal: str = "uid:1", **query: Any) -> list[int]:
    return numbers(await log.page(principal, CallQuery(**query)))


async def test_newest_comes_first_and_is_there_as_soon_as_it_was_recorded(log: CallLog) -> None:
    for number in range(5):
        log.record(call_row(number))
        assert await listed(log) == list(range(number, -1, -1))


async def test_record_bears_the_envelopes_names(log: CallLog) -> None:
    log.record(call_row(1, agent_id="a", session_id="s", cpu_ms=None, ended_by=None, version=None))
    (record,) = (await log.page("uid:1", CallQuery())).items
    assert record.model_dump() == {
        "call_id": f"call_{1:024x}", "timestamp": "2026-01-01T00:00:00.000Z",
        "principal_id": "uid:1", "agent_id": "a", "session_id": "s",
        "trace_id": "trace_20260101_000000000000", "tool_name": "calculator",
        "tool_version": None, "code": "OK", "ended_by": None, "execution_time_ms": 1.5,
        "cpu_ms": None, "cost": "0.000000", "currency": "USD", "input_tokens": 9,
        "output_tokens": 3, "tokens_used": 0,
    }  # fmt: skip
    assert await log.get("uid:1", record.call_id) == record


async def test_order_is_that_of_writing_where_the_clock_is_set_back(log: CallLog) -> None:
    for number in range(6):
        moment = NOON + timedelta(minutes=number) - timedelta(days=400 if number >= 3 else 0)
        log.record(call_row(number, at=stamp(moment)))
    assert await listed(log) == [5, 4, 3, 2, 1, 0]
    first = await log.page("uid:1", CallQuery(limit=4))
    assert numbers(first) == [5, 4, 3, 2]
    assert await listed(log, cursor=first.next_cursor) == [1, 0]
    assert await listed(log, since=NOON) == [2, 1, 0]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"tool": "calculator"}, {0, 3, 6, 9}),
        ({"tool": "calculator@1.0.0"}, {0, 3, 6, 9}),
        ({"tool": "calculator@2.0.0"}, set()),
        ({"tool": "calc"}, set()),
        ({"tool": "calculator*"}, set()),
        ({"tool": "%"}, set()),
        ({"agent": "a"}, {0, 2, 4, 6, 8}),
        ({"code": "TIMEOUT"}, {5}),
        ({"since": NOON + timedelta(minutes=7)}, {7, 8, 9}),
        ({"until": NOON + timedelta(minutes=2)}, {0, 1}),
        ({"since": NOON + timedelta(minutes=2), "until": NOON + timedelta(minutes=3)}, {2}),
        ({"since": "2026-03-01T14:07:00+02:00"}, {7, 8, 9}),
        ({"since": (NOON + timedelta(minutes=7)).astimezone(timezone(timedelta(hours=-9)))},
         {7, 8, 9}),
        ({"tool": "calculator", "agent": "a", "since": NOON + timedelta(minutes=1)}, {6}),
        ({}, set(range(10))),
    ],
)  # fmt: skip
async def test_filters_hold_back_exactly_the_others(
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


async def test_pages_show_every_row_once_while_new_ones_come(log: CallLog) -> None:
    for number in range(25):
        log.record(call_row(number))
    seen: list[int] = []
    cursor = None
    while True:
        page = await log.page("uid:1", CallQuery(limit=10, cursor=cursor))
        seen += numbers(page)
        log.record(call_row(1000 + len(seen)))
        assert page.has_more is (page.next_cursor is not None)
        if page.next_cursor is None:
            break
        cursor = page.next_cursor
    assert seen == list(range(24, -1, -1))


async def test_total_is_given_where_it_is_known_and_null_elsewhere(log: CallLog) -> None:
    assert (await log.page("uid:1", CallQuery())).total_count == 0
    for number in range(10):
        log.record(call_row(number))
    exact = await log.page("uid:1", CallQuery())
    assert (exact.has_more, exact.total_count) == (False, 10)
    log.record(call_row(10))
    first = await log.page("uid:1", CallQuery())
    assert (first.has_more, first.total_count) == (True, None)
    last = await log.page("uid:1", CallQuery(cursor=first.next_cursor))
    assert (last.has_more, last.total_count) == (False, None)


async def test_another_principals_rows_are_as_if_they_were_not_there(log: CallLog) -> None:
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


async def test_more_tokens_than_sqlite_can_count_are_kept_as_the_most(log: CallLog) -> None:
    log.record(call_row(1, tokens_used=10**40))
    (record,) = (await log.page("uid:1", CallQuery())).items
    assert record.tokens_used == calls_module.MAX_INTEGER


async def test_rows_that_are_too_old_go(log: CallLog) -> None:
    for number in range(10):
        log.record(call_row(number, at=stamp(NOON + timedelta(days=number))))
    assert await log.prune(NOON + timedelta(days=34)) == 4
    assert await listed(log) == [9, 8, 7, 6, 5, 4]
    assert await log.prune(NOON + timedelta(days=34)) == 0


async def test_rows_that_are_too_many_go_oldest_first(
    log: CallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "PRUNED_AT_ONCE", 7)
    for number in range(130):
        log.record(call_row(number, at=stamp(NOON)))
    assert await log.prune(NOON) == 30
    assert await listed(log, limit=100) == list(range(129, 29, -1))


async def test_one_principals_calls_push_out_no_others(log: CallLog) -> None:
    log.record(call_row(0, principal_id="uid:7", at=stamp(NOON)))
    for number in range(1, 300):
        log.record(call_row(number, at=stamp(NOON)))
    await log.prune(NOON)
    assert await listed(log, "uid:7") == [0]
    assert len(await listed(log, limit=100)) == 100


async def test_newest_row_stays_so_that_numbers_never_begin_again(log: CallLog) -> None:
    for number in range(3):
        log.record(call_row(number, at=stamp(NOON)))
    assert await log.prune(NOON + timedelta(days=1000)) == 2
    log.record(call_row(3, at=stamp(NOON + timedelta(days=1000))))
    assert await listed(log) == [3, 2]
    assert await log.prune(NOON + timedelta(days=1000)) == 1
    assert await listed(log) == [3]


async def test_log_asks_to_be_pruned_when_it_has_grown_by_a_tenth(log: CallLog) -> None:
    for number in range(9):
        log.record(call_row(number))
    assert not log.overdue.is_set()
    log.record(call_row(9))
    assert log.overdue.is_set()
    await log.prune(NOON)
    assert not log.overdue.is_set()


async def test_log_in_memory_keeps_less(home: Path) -> None:
    database = open_database(None)
    log = CallLog(database, kept_days=30, kept=10**8)
    assert await log.prune(NOON) == 0
    assert not database._writer.is_running
    for number in range(calls_module.IN_MEMORY_KEPT + 50):
        log.record(call_row(number, at=stamp(NOON)))
    await database.flush()
    assert await log.prune(NOON) == 50
    database.close()
