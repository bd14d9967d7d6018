"""Shape: data is a JSON object within its size and promise, or an error that says why not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel

from fumehood import ToolError
from fumehood.core.errors import EndedBy, InvalidParams, RateLimited, ToolDeprecated
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.shape import ShapedOutcome, shape, shape_error
from support.definitions import function_definition, registered


@dataclass
class Pair:
    left: int
    right: int


class City(BaseModel):
    name: str


def _shape(data: Any, max_bytes: int = 1000, **fields: Any) -> ShapedOutcome:
    tool = registered(function_definition(**fields))
    return shape(Outcome(EndedBy.OK, "none", data=data), tool, max_bytes)


def _circle() -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"a": 1}, {"a": 1}),
        ({}, {}),
        (4, {"value": 4}),
        (None, {"value": None}),
        ("text", {"value": "text"}),
        ([1, 2], {"value": [1, 2]}),
        ((1, 2), {"value": [1, 2]}),
        ({1}, {"value": [1]}),
        (date(2026, 1, 2), {"value": "2026-01-02"}),
        (Decimal("1.50"), {"value": "1.50"}),
        (City(name="Bonn"), {"name": "Bonn"}),
        (Pair(1, 2), {"left": 1, "right": 2}),
        ({"city": City(name="Bonn")}, {"city": {"name": "Bonn"}}),
        ({1: "a"}, {"1": "a"}),
        ("\U0001f600", {"value": "\U0001f600"}),
        ("a\x00b", {"value": "a\x00b"}),
    ],
)
def test_whatever_python_has_becomes_a_json_object(value: Any, data: Any) -> None:
    shaped = _shape(value)
    assert shaped.outcome.error is None
    assert shaped.data == data


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        {"a": [float("nan")]},
        "\ud800",
        {"a": "\udfff"},
        {"\ud800": 1},
        object(),
        {"a": object()},
        _circle(),
        b"\xff",
        [10**5000],
        lambda: None,
    ],
)
def test_what_json_cannot_hold_is_an_execution_error(value: Any) -> None:
    shaped = _shape(value)
    assert shaped.outcome.error is not None
    assert shaped.outcome.error.code == "EXECUTION_ERROR"
    assert (shaped.outcome.ended_by, shaped.outcome.data) == (EndedBy.EXCEPTION, None)
    assert (shaped.data, shaped.text) == ({}, "")


@pytest.mark.row("S4")
def test_result_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    exact = len('{"value":"xxxx"}')
    assert _shape("xxxx", exact).outcome.error is None
    refused = _shape("xxxx", exact - 1)
    assert refused.outcome.error is not None
    assert refused.outcome.error.code == "OUTPUT_LIMIT_EXCEEDED"
    assert refused.outcome.ended_by is EndedBy.OUTPUT


@pytest.mark.row("T1")
def test_broken_promise_is_an_execution_error_that_names_the_path() -> None:
    promise = {"required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert _shape({"a": 1}, output_schema=promise).outcome.error is None
    for wrong in ({"a": "SECRET"}, {}, "SECRET"):
        error = _shape(wrong, output_schema=promise).outcome.error
        assert error is not None
        assert error.code == "EXECUTION_ERROR"
        assert "(a)" in error.message
        assert "SECRET" not in error.message


def test_size_is_measured_unless_the_wall_measured_it() -> None:
    tool = registered(function_definition())
    assert _shape({"a": 1}).outcome.output_bytes == len('{"a":1}')
    told = Outcome(EndedBy.OK, "none", data={"a": 1}, output_bytes=99)
    assert shape(told, tool, 1000).outcome.output_bytes == 99


def test_failed_run_has_no_data() -> None:
    error = InvalidParams("no")
    failed = Outcome(EndedBy.EXCEPTION, "none", data={"a": 1}, error=error)
    shaped = shape(failed, registered(function_definition()), 1000)
    assert (shaped.data, shaped.text, shaped.outcome) == ({}, "", failed)


@pytest.mark.row("E1")
def test_error_shows_its_code_and_only_what_applies() -> None:
    error = RateLimited("Slow down.", retry_after_ms=5, fields=["a"], details={"b": 1})
    assert shape_error(error).model_dump() == {
        "code": "RATE_LIMITED",
        "message": "Slow down.",
        "retryable": True,
        "human_review": False,
        "fields": ("a",),
        "retry_after_ms": 5,
        "details": {"b": 1},
    }


@pytest.mark.row("E1", "T4")
def test_extra_keys_that_say_nothing_are_left_out() -> None:
    extra = {"replacement": "b", "sunset_date": "2026-01-01", "migration_guide": None}
    shown = shape_error(ToolDeprecated("Ended.", extra=extra)).model_dump()
    assert (shown["replacement"], shown["sunset_date"]) == ("b", "2026-01-01")
    assert "migration_guide" not in shown


@pytest.mark.row("E1")
def test_a_tools_own_code_is_shown() -> None:
    assert shape_error(ToolError("CITY_NOT_FOUND", "No.")).code == "CITY_NOT_FOUND"
