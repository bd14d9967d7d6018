"""The sums of the call log: exact, of one's own calls only, by whatever is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import ValidationError

from fumehood.core.usage_table import GROUPS, UsageQuery, UsageRow, UsageTable
from fumehood.storage import usage as module
from fumehood.storage.calls import CallLog
from fumehood.storage.database import Database
from fumehood.storage.schema import MAX_INTEGER
from fumehood.storage.usage import usage_table
from support.state import call_row, post

pytestmark = [pytest.mark.anyio, pytest.mark.row("E4")]


async def table(database: Database, principal: str | None = "uid:1", **query: Any) -> UsageTable:
    return await usage_table(database, UsageQuery(**query), principal)


def sums(row: UsageRow) -> tuple[Any, ...]:
    return (
        tuple(row.group.values()), row.calls, row.errors, row.input_tokens, row.output_tokens,
        row.tokens_used, row.cost,
    )  # fmt: skip


async def test_ended_calls_are_summed_by_tool_at_once(database: Database) -> None:
    post(database, 1, cost="0.100000", tokens_used=5)
    post(database, 2, cost="0.200000", code="TIMEOUT")
    post(database, 3, tool="read_file", cost="0.000001")
    found = await table(database)
    assert [sums(row) for row in found.items] == [
        (("calculator",), 2, 1, 18, 6, 5, {"USD": "0.300000"}),
        (("read_file",), 1, 0, 9, 3, 0, {"USD": "0.000001"}),
    ]
    assert sums(found.total) == ((), 3, 1, 27, 9, 5, {"USD": "0.300001"})
    assert (found.by, found.has_more) == (("tool",), False)


async def test_refused_and_invalid_calls_are_errors_and_did_not_fail(database: Database) -> None:
    codes = (
        "OK",
        "PERMISSION_DENIED",
        "INVALID_PARAMS",
        "TIMEOUT",
        "CITY_NOT_FOUND",
        "NETWORK_ERROR",
    )
    for number, code in enumerate(codes):
        post(database, number, code=code)
    (row,) = (await table(database)).items
    assert (row.calls, row.errors, row.failed) == (6, 5, 3)


async def test_usage_groups_combine_in_the_requested_order(database: Database) -> None:
    post(database, 1, agent_id="a", session_id="s", at="2026-01-01T23:59:59.999Z")
    post(database, 2, agent_id="a", session_id=None, at="2026-01-02T00:00:00.000Z")
    post(database, 3, agent_id=None, session_id="s", at="2026-01-02T00:00:00.001Z")
    found = await table(database, by="day,agent")
    assert [tuple(row.group.values()) for row in found.items] == [
        ("2026-01-01", "a"), ("2026-01-02", None), ("2026-01-02", "a"),
    ]  # fmt: skip
    found = await table(database, by="session")
    assert [(row.group["session"], row.calls) for row in found.items] == [(None, 1), ("s", 2)]
    assert len((await table(database, by=",".join(GROUPS))).items) == 3


async def test_large_figures_are_summed_exactly(database: Database) -> None:
    """A tool may report whatever it likes: nobody's report fails for it."""
    log = CallLog(database, kept_days=30, kept=100)
    for number in range(3):
        log.record(call_row(number, tokens_used=10**30, cost="1000000000000.000001"))
    found = await table(database)
    assert found.total.tokens_used == 3 * MAX_INTEGER
    assert found.total.cost == {"USD": "3000000000000.000003"}


async def test_usage_groups_over_the_limit_are_left_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    for number, tool in enumerate("abcc"):
        post(database, number, tool=tool, currency="EUR" if number == 1 else "USD")
        post(database, number + 10, tool=tool)
    found = await table(database)
    assert [(row.group["tool"], row.calls) for row in found.items] == [("a", 2), ("b", 2)]
    assert found.items[1].cost.keys() == {"EUR", "USD"}
    assert found.has_more
    assert found.total.calls == 8
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    assert not (await table(database)).has_more


WRONG = [
    "",
    "tools",
    "tool,",
    "tool,tool",
    "tool;drop",
    "day ,tool",
    "tool,day,agent,session,principal,x",
]


@pytest.mark.parametrize("by", WRONG)
def test_unknown_usage_group_is_refused(by: str) -> None:
    with pytest.raises(ValidationError):
        UsageQuery(by=by)


@pytest.mark.parametrize(
    "by", [["day", "tool"], ("day", "tool"), {"day": 1, "tool": 2}.keys(), iter(["day", "tool"])]
)
def test_usage_groups_may_be_any_iterable_of_names(by: Iterable[str]) -> None:
    assert UsageQuery.model_validate({"by": by}).groups == ("day", "tool")


@pytest.mark.parametrize("by", [7, None, [], [1], ["day", None]])
def test_usage_groups_that_are_no_names_are_refused(by: object) -> None:
    with pytest.raises(ValidationError):
        UsageQuery.model_validate({"by": by})
