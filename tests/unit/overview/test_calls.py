"""The call log of all principals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection

from fumehood.core.errors import ResourceNotFound
from fumehood.overview import calls as all_calls
from fumehood.overview.calls import AllCalls
from fumehood.overview.queries import AllCallsQuery, SeriesQuery
from fumehood.storage.calls import CallLog, Record
from fumehood.storage.database import Database
from support.state import call_row

pytestmark = pytest.mark.anyio

NOON = datetime(2026, 1, 8, 12, tzinfo=UTC)
SINCE = datetime(2025, 12, 31, tzinfo=UTC)


@pytest.fixture
def log(database: Database) -> CallLog:
    return CallLog(database, kept_days=30, kept=100)


async def listed_of_all(database: Database, **query: Any) -> tuple[list[int], bool]:
    page = await AllCalls(database).page(AllCallsQuery(**query))
    return [int(one.call_id.removeprefix("call_"), 16) for one in page.items], page.has_more


async def test_each_filter_returns_only_matching_calls(log: CallLog, database: Database) -> None:
    fields: list[dict[str, Any]] = [
        {"agent_id": "a"}, {"tool": "t"}, {"code": "TIMEOUT"}, {"session_id": "s"},
        {"trace_id": "trace_x"}, {"parent_id": "call_p"}, {"principal_id": "uid:9"},
    ]  # fmt: skip
    plain = {"agent_id": None, "session_id": None, "parent_id": None}
    for number, one in enumerate(fields):
        log.record(call_row(number, **{**plain, **one}))
    queries = [
        {"agent": "a"}, {"tool": "t"}, {"code": "TIMEOUT"}, {"session": "s"},
        {"trace": "trace_x"}, {"parent": "call_p"}, {"principal": "uid:9"},
    ]  # fmt: skip
    assert await listed_of_all(database) == ([6, 5, 4, 3, 2, 1, 0], False)
    assert [await listed_of_all(database, **query) for query in queries] == [
        ([number], False) for number in range(7)
    ]


async def test_rare_call_is_found_across_bounded_scans(
    log: CallLog, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query scans a bounded part of the log, however long it is."""
    monkeypatch.setattr(all_calls, "SCANNED", 10)
    for number in range(35):
        log.record(call_row(number, code="TIMEOUT" if number == 3 else "OK"))
    query = AllCallsQuery(code="TIMEOUT")
    asked = 0
    while True:
        page = await AllCalls(database).page(query)
        asked += 1
        if page.items or not page.has_more:
            break
        query = query.model_copy(update={"cursor": page.next_cursor})
    assert [one.call_id for one in page.items] == [f"call_{3:024x}"]
    assert asked == 4
    assert not page.has_more


async def test_attack_rare_tool_does_not_make_a_trial_of_rules_read_the_whole_log(
    log: CallLog, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls are counted and tried, however long the log is."""
    monkeypatch.setattr(all_calls, "SCANNED", 10)
    for number in range(35):
        record = Record.of({"of": number}, b"{}", ())
        log.record(call_row(number, tool="rare" if number in (3, 30) else "usual", record=record))
    groups, is_partial = await AllCalls(database).groups(SINCE)
    assert {group.tool: group.calls for group in groups} == {"usual": 9, "rare": 1}
    assert is_partial
    given = await AllCalls(database).given(SINCE, ["rare"])
    assert [arguments for _, arguments in given] == [{"of": 30}]


@pytest.mark.sqlite  # it counts the steps of SQLite's program
async def test_question_whether_calls_are_left_out_does_not_read_the_whole_log(
    log: CallLog, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_calls, "SCANNED", 10)

    async def steps(calls: range) -> int:
        for number in calls:
            log.record(call_row(number, at="2020-01-01T00:00:00.000Z"))
        await database.flush()
        return await database.read(counted)

    def counted(connection: Connection) -> int:
        found = []
        driver = connection.connection.driver_connection
        driver.set_progress_handler(lambda: found.append(1) and None, 1)
        try:
            assert all_calls._groups(connection, SINCE) == ([], False)
        finally:
            driver.set_progress_handler(None, 0)
        return len(found)

    short = await steps(range(20))
    assert await steps(range(20, 500)) == short


async def test_unknown_cursor_and_call_are_not_found(database: Database) -> None:
    with pytest.raises(ResourceNotFound):
        await AllCalls(database).page(AllCallsQuery(cursor="call_0"))
    with pytest.raises(ResourceNotFound):
        await AllCalls(database).get("call_0")


async def test_figures_count_codes_and_percentiles_per_tool(
    log: CallLog, database: Database
) -> None:
    codes = {0: "TIMEOUT", 1: "PERMISSION_DENIED", 2: "APPROVAL_DENIED", 3: "INVALID_PARAMS"}
    codes |= {4: "EXECUTION_ERROR", 5: "OF_THE_TOOL"}
    for number in range(100):
        code = codes.get(number, "OK")
        log.record(call_row(number, total_ms=float(number + 1), code=code))
    log.record(call_row(200, tool="other", total_ms=7.0))
    log.record(call_row(201, tool="old", at="2020-01-01T00:00:00.000Z"))
    found = await AllCalls(database).figures(SINCE)
    (one, other) = found.items
    assert (one.tool, one.calls, one.succeeded, one.failed) == ("calculator", 100, 94, 3)
    assert (one.mean_ms, one.p50_ms, one.p95_ms) == (50.5, 50.0, 95.0)
    assert (other.tool, other.p50_ms, other.p95_ms) == ("other", 7.0, 7.0)
    assert not found.is_partial


async def test_figures_exclude_the_approval_wait(log: CallLog, database: Database) -> None:
    """The twin: any other stage counts."""
    for number, stage in enumerate(["approval wait", "execute"]):
        row = call_row(number, tool=f"t{number}", total_ms=40_260.0)
        row["stages"] = {stage: 40_000.0, "validate": 1.0}
        log.record(row)
    waited, ran = (await AllCalls(database).figures(SINCE)).items
    assert (waited.mean_ms, waited.p50_ms, waited.p95_ms) == (260.0, 260.0, 260.0)
    assert (ran.mean_ms, ran.p50_ms, ran.p95_ms) == (40_260.0, 40_260.0, 40_260.0)


async def test_figures_over_their_bounds_are_marked_partial(
    log: CallLog, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        log.record(call_row(number, tool=f"t{number}"))
    monkeypatch.setattr(all_calls, "MAX_TOOLS", 5)
    found = await AllCalls(database).figures(SINCE)
    assert len(found.items) == 5
    assert found.is_partial
    monkeypatch.setattr(all_calls, "MAX_TOOLS", 50)
    monkeypatch.setattr(all_calls, "SUMMED", 10)
    found = await AllCalls(database).figures(SINCE)
    assert len(found.items) == 10
    assert found.is_partial
    assert not (await AllCalls(database).figures(SINCE + timedelta(days=30))).is_partial


async def test_calls_that_just_ended_are_listed_below_their_parent_and_tried_on_rules(
    database: Database, log: CallLog
) -> None:
    def add(number: int, arguments: dict[str, Any], **row: Any) -> None:
        record = Record.of(arguments, b"{}", ())
        log.record(call_row(number, record=record, **row))

    add(1, {}, parent_id=None)
    add(2, {"code": "2"}, parent_id=f"call_{1:024x}")
    below = await AllCalls(database).below(f"call_{1:024x}")
    assert [one.call_id for one in below] == [f"call_{2:024x}"]
    add(3, {"code": "3"})
    given = await AllCalls(database).given(NOON - timedelta(days=30), ["calculator"])
    assert [arguments for _, arguments in given] == [{"code": "3"}, {"code": "2"}, {}]


@pytest.mark.parametrize(("by", "steps"), [("hour", ["T10", "T11"]), ("day", [""])])
async def test_calls_are_summed_by_hour_or_day(
    log: CallLog, database: Database, by: str, steps: list[str]
) -> None:
    day = "2026-03-01"
    for number, (hour, ms) in enumerate([(10, 1.0), (10, 2.0), (10, 30.0), (11, 5.0)]):
        log.record(
            call_row(
                number, at=f"{day}T{hour}:30:00.000Z", total_ms=ms, cost="0.250000",
                code="TIMEOUT" if ms == 30 else "OK", agent_id="a" if hour == 10 else None,
            )
        )  # fmt: skip
    log.record(call_row(9, at="2026-02-01T00:00:00.000Z"))
    since = datetime(2026, 3, 1, tzinfo=UTC)
    found = await AllCalls(database).series(SeriesQuery.model_validate({"by": by}), since)
    assert [one.at for one in found.items] == [f"{day}{step}" for step in steps]
    first = found.items[0]
    whole = 3 if by == "hour" else 4
    assert (first.calls, first.failed, first.cost) == (whole, 1, 0.25 * whole)
    assert (first.p50_ms, first.p95_ms) == (2.0, 30.0)
    of_agent = await AllCalls(database).series(SeriesQuery(agent="a"), since)
    assert [one.at for one in of_agent.items] == [f"{day}T10"]
