"""Claims of a program: believed whole in the agreed form, else not at all."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.executors.claims import MAX_VALUE_DEPTH, NO_VALUE, read_failure, read_value

VALUE = {"value": [1, {"a": None}], "has_value": True, "value_repr": "[1, {'a': None}]"}
EXCEPTION = {"type": "KeyError", "message": "'a'", "line": 3, "traceback": "Traceback …"}
FAILURE = {"kind": "exception", "message": "m", "exception": EXCEPTION}


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.row("S7", "E1")
@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(2**53) + 1, 2**53 - 1, 1.5, "ä\0", [], {}, VALUE["value"], _nested(MAX_VALUE_DEPTH)],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_value_that_json_holds_exactly_is_passed_on(value: Any) -> None:
    assert read_value({**VALUE, "value": value}).value == value


@pytest.mark.row("S7", "E1")
@pytest.mark.parametrize(
    "value",
    [2**53, [-(2**53)], {"a": [10**30]}, float("nan"), [float("inf")], "\ud800", {"\ud800": 1},
     _nested(MAX_VALUE_DEPTH + 1), {1}, b"x"],
    ids=lambda value: ascii(value)[:20],
)  # fmt: skip
def test_value_that_json_cannot_hold_is_null_and_its_words_stay(value: Any) -> None:
    claim = read_value({**VALUE, "value": value})
    assert (claim.value, claim.value_repr) == (None, VALUE["value_repr"])


@pytest.mark.row("S7")
@pytest.mark.parametrize(
    "result",
    [None, {}, [], "x", {"value": 1}, {**VALUE, "more": 1}, {**VALUE, "has_value": 1},
     {**VALUE, "value_repr": 4}, {"result": VALUE}, {**VALUE, "has_value": False}],
    ids=str,
)  # fmt: skip
def test_value_in_another_form_is_none(result: Any) -> None:
    assert read_value(result) == NO_VALUE


def test_failure_in_the_agreed_form_is_believed() -> None:
    claim = read_failure(FAILURE)
    assert claim is not None
    assert claim.model_dump() == {**FAILURE, "errno": None}
    for said in ({"exception": None}, {"errno": 28}, {"errno": None}):
        assert read_failure({**FAILURE, **said}) is not None
    assert read_failure({"kind": "memory", "message": "m"}) is not None


@pytest.mark.row("S7", "E1")
@pytest.mark.parametrize(
    "claimed",
    [
        None, {}, [], "x", {**FAILURE, "more": 1}, {**FAILURE, "kind": "ok"},
        {**FAILURE, "kind": "wall_time"}, {**FAILURE, "message": None}, {**FAILURE, "message": 1},
        {"kind": "exception"}, {**FAILURE, "errno": "28"}, {**FAILURE, "errno": True},
        *({**FAILURE, "exception": {**EXCEPTION, **wrong}} for wrong in (
            {"line": "3"}, {"line": -1}, {"line": 2**40}, {"line": True}, {"type": ""},
            {"type": "x" * 501}, {"traceback": None}, {"traceback": ["x"]}, {"more": 1},
            {"message": 1},
        )),
    ],
    ids=lambda claimed: str(claimed)[:60],
)  # fmt: skip
def test_failure_in_another_form_is_not_believed_at_all(claimed: Any) -> None:
    assert read_failure(claimed) is None
