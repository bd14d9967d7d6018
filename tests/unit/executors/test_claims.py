"""What a function's process says of itself is validated whole, or not believed at all."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from fumehood.core.call import FunctionAddress
from fumehood.core.errors import ArgumentsRefused, ExecutionError, ToolError
from fumehood.executors.claims import Unreadable, read_error, read_raised, read_result
from fumehood.executors.function import without_paths

RESULT = {"data": [1], "tokens_used": 1, "cost": "0.5"}
REFUSAL = {
    "kind": "tool_error", "code": "NO_CITY", "message": "None.", "details": None,
    "retryable": False, "retry_after_ms": None,
}  # fmt: skip
RAISED = {"kind": "exception", "type": "E", "message": "m", "traceback": ["a:1 in b"]}


@pytest.mark.row("E3")
def test_result_of_the_right_form_is_read() -> None:
    result = read_result(RESULT)
    assert (result.data, result.tokens_used, result.cost) == ([1], 1, Decimal("0.5"))


@pytest.mark.parametrize(
    "change",
    [{"tokens_used": -1}, {"tokens_used": 1.0}, {"tokens_used": True}, {"tokens_used": 10**30},
     {"cost": "-1"}, {"cost": "NaN"}, {"cost": "1e999999999"}, {"cost": "1e13"}, {"cost": ""},
     {"cost": 1}, {"cost": None}, {"cls": "x"}],
)  # fmt: skip
def test_result_of_any_other_form_is_not_believed(change: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        read_result({**RESULT, **change})
    with pytest.raises(Unreadable):
        read_result(None)


@pytest.mark.row("E1")
def test_refusals_become_the_engines_own_errors() -> None:
    refusal = read_error(REFUSAL)
    assert isinstance(refusal, ToolError)
    assert refusal.tool_code == "NO_CITY"
    refused = read_error({"kind": "arguments", "message": "wrong", "fields": ["a"]})
    assert isinstance(refused, ArgumentsRefused)
    assert refused.fields == ("a",)
    assert isinstance(read_error({"kind": "unfit"}), ExecutionError)


@pytest.mark.parametrize(
    "claim",
    [{}, {"kind": "policy"}, {"kind": ["tool_error"]}, {**REFUSAL, "code": "TIMEOUT"},
     {**REFUSAL, "code": "no"}, {**REFUSAL, "retryable": 1}, {**REFUSAL, "retry_after_ms": -1},
     {**REFUSAL, "details": []}, {**REFUSAL, "more": 1}, {"kind": "arguments", "message": 1, "fields": []},
     {"kind": "arguments", "message": "", "fields": ["a"] * 51}],
)  # fmt: skip
def test_anything_else_chooses_no_error(claim: dict[str, Any]) -> None:
    assert read_error(claim) is None


@pytest.mark.parametrize(
    "change",
    [{"traceback": ["x"] * 21}, {"traceback": ["x" * 201]}, {"traceback": [1]}, {"type": "x" * 101},
     {"message": None}, {"kind": "memory"}, {"more": 1}],
)  # fmt: skip
def test_exception_of_another_form_is_not_believed(change: dict[str, Any]) -> None:
    assert read_raised(RAISED) is not None
    assert read_raised({**RAISED, **change}) is None


@pytest.mark.row("E1")
def test_paths_of_this_host_are_taken_out_of_words() -> None:
    address = FunctionAddress("shop", "it", "/srv/tools/here")
    text = "no /srv/tools/here/data in /srv/tools/here, but /srv/tools/herein"
    assert without_paths(text, address) == "no data in , but in"
