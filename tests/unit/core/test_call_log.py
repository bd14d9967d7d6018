"""What may be asked of the call log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from fumehood.core.call_log import CallQuery


def test_nothing_asked_is_the_first_page_of_everything() -> None:
    query = CallQuery()
    assert query.limit == 10
    assert set(query.model_dump(exclude={"limit"}).values()) == {None}


@pytest.mark.parametrize(
    "text",
    ["2026-01-31T09:30:00Z", "2026-01-31T10:30:00+01:00", "2026-01-31T09:30:00.000000+00:00"],
)
def test_time_is_read_with_its_zone(text: str) -> None:
    assert CallQuery.model_validate({"since": text}).since == datetime(
        2026, 1, 31, 9, 30, tzinfo=UTC
    )


@pytest.mark.parametrize(
    "query",
    [
        {"since": "2026-01-31T09:30:00"}, {"since": "2026-01-31"}, {"since": "1769851800"},
        {"since": 5}, {"since": "1h"}, {"since": ""}, {"until": "0001-01-01T00:00:00+23:59"},
        {"limit": 0}, {"limit": 101}, {"limit": "many"}, {"limit": ""}, {"limit": -1},
        {"code": "ok"}, {"code": "A" * 70}, {"code": "OK' OR 1=1"}, {"agent": ""},
        {"agent": "a\nb"}, {"tool": ""}, {"tool": "x" * 121}, {"cursor": ""},
        {"cursor": "x" * 200}, {"principal": "uid:0"}, {"principal_id": "uid:0"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_query_is_refused(query: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CallQuery.model_validate(query)


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "1"}, {"limit": 100}, {"code": "OK"}, {"code": "CITY_NOT_FOUND"},
        {"agent": "a.b-c"}, {"tool": "calculator@1.0.0"}, {"cursor": "call_0123"},
    ],
    ids=str,
)  # fmt: skip
def test_twin_query_is_taken(query: dict[str, Any]) -> None:
    assert CallQuery.model_validate(query)
