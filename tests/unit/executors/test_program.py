"""Programs and functions in the interpreter and the jail; the claims of a guest."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest

from fumehood import ToolError, progress, tool
from fumehood.core.call import FunctionAddress
from fumehood.core.errors import MAX_MESSAGE_CHARACTERS, ArgumentsRefused, EndedBy, ExecutionError
from fumehood.executors.claims import Raised, Unreadable, read_claim, read_error, read_result
from fumehood.executors.function import without_paths
from fumehood.executors.inside import MAX_FRAMES, answer
from fumehood.executors.parts import reports_to
from fumehood.sandbox.wall import ending_of_reply


@pytest.mark.row("S4")
def test_claimed_kind_names_a_failure_but_never_undoes_one() -> None:
    def ending(kind: Any) -> EndedBy:
        reply = {"error": {"kind": kind, "message": "m", "details": {"stdout": ""}}}
        return ending_of_reply(reply, isolation="call", cpu_ms=None, output_bytes=1).ended_by

    assert ending("output") is EndedBy.OUTPUT
    assert ending("memory") is EndedBy.MEMORY
    assert ending("policy") is EndedBy.POLICY
    for kind in ("ok", "wall_time", "cancelled", "sandbox_lost", None, 3):
        assert ending(kind) is EndedBy.EXCEPTION


# -- How a function is called where it runs ------------------------------------------------


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", made)
    return made


def ask(module: ModuleType, function: Any, **arguments: Any) -> dict[str, Any]:
    function.__doc__ = "Do it."
    module.it = tool(name="it")(function)  # type: ignore[attr-defined]
    return answer("shop", "it", arguments)


def test_arguments_are_converted_to_the_declared_types(module: ModuleType) -> None:
    def count(number: int = 2) -> Any:
        return type(number).__name__

    assert ask(module, count, number="5")["result"]["data"] == "int"
    assert ask(module, count, number="five")["error"]["kind"] == "arguments"
    assert ask(module, count, number="five")["error"]["fields"] == ["number"]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_any_exception_of_a_function_is_reported_as_its_failure(
    module: ModuleType, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("\ud800" + "x " * 10_000)

    reply = ask(module, fail)["error"]
    assert (reply["kind"], reply["type"]) == ("exception", error.__name__)
    assert len(reply["message"]) == MAX_MESSAGE_CHARACTERS
    assert reply["message"].endswith("x …")


def test_traceback_shows_a_bounded_number_of_tool_frames(module: ModuleType) -> None:
    space: dict[str, Any] = {"__name__": "shop.deep"}
    exec("def fall(n):\n    return fall(n - 1) if n else 1 / 0", space)

    def fail() -> None:
        space["fall"](50)

    frames = ask(module, fail)["error"]["traceback"]
    assert frames == ["shop.deep:2 in fall"] * MAX_FRAMES


@pytest.mark.parametrize(
    ("name", "kind"), [("nothing_here", "AttributeError"), ("ToolError", "AttributeError")]
)
def test_missing_tool_function_is_a_failure(module: ModuleType, name: str, kind: str) -> None:
    module.ToolError = ToolError  # type: ignore[attr-defined]
    reply = answer("shop", name, {})
    assert reply["error"]["type"] == kind


@pytest.mark.row("S8")
def test_progress_is_reported_to_listeners_within_bounds() -> None:
    heard: list[tuple[float, str]] = []
    progress(5, "nobody listens")
    with reports_to(lambda percent, message: heard.append((percent, message))):
        progress(-5)
        progress(150, "x " * 999)
        progress(10**400)
        progress(50, "\ud800")
        for wrong in (math.nan, math.inf, True):
            with pytest.raises(ValueError, match="finite"):
                progress(wrong)
    progress(5, "nobody listens any more")
    assert heard == [(0.0, ""), (100.0, "x " * 99 + "x…"), (100.0, ""), (50.0, "?")]


# -- What a function's process says of itself is validated whole, or not believed at all ---

RESULT = {"data": [1], "tokens_used": 1, "cost": "0.5"}
REFUSAL = {
    "kind": "tool_error", "code": "NO_CITY", "message": "None.", "details": None,
    "retryable": False, "retry_after_ms": None,
}  # fmt: skip
RAISED = {"kind": "exception", "type": "E", "message": "m", "traceback": ["a:1 in b"]}


@pytest.mark.parametrize(
    "change",
    [{"tokens_used": -1}, {"tokens_used": 1.0}, {"tokens_used": True}, {"tokens_used": 10**30},
     {"cost": "-1"}, {"cost": "NaN"}, {"cost": "1e999999999"}, {"cost": "1e13"}, {"cost": ""},
     {"cost": 1}, {"cost": None}, {"cls": "x"}],
)  # fmt: skip
def test_malformed_function_result_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        read_result({**RESULT, **change})
    with pytest.raises(Unreadable):
        read_result(None)


@pytest.mark.row("E1")
def test_claimed_refusals_become_engine_errors() -> None:
    refusal = read_error(REFUSAL)
    assert isinstance(refusal, ToolError)
    assert refusal.tool_code == "NO_CITY"
    refused = read_error({"kind": "arguments", "message": "wrong", "fields": ["a"]})
    assert isinstance(refused, ArgumentsRefused)
    assert refused.fields == ("a",)
    for kind in ("unfit", "unfit_details"):
        assert isinstance(read_error({"kind": kind}), ExecutionError)


@pytest.mark.parametrize(
    "claim",
    [{}, {"kind": "policy"}, {"kind": ["tool_error"]}, {**REFUSAL, "code": "TIMEOUT"},
     {**REFUSAL, "code": "no"}, {**REFUSAL, "retryable": 1}, {**REFUSAL, "retry_after_ms": -1},
     {**REFUSAL, "details": []}, {**REFUSAL, "more": 1}, {"kind": "arguments", "message": 1, "fields": []}],
)  # fmt: skip
def test_unknown_claim_selects_no_error(claim: dict[str, Any]) -> None:
    assert read_error(claim) is None


@pytest.mark.parametrize(
    "change",
    [{"traceback": ["x"] * 21}, {"traceback": ["x" * 201]}, {"traceback": [1]}, {"type": "x" * 101},
     {"message": None}, {"kind": "memory"}, {"more": 1}],
)  # fmt: skip
def test_malformed_raised_exception_is_ignored(change: dict[str, Any]) -> None:
    assert read_claim(Raised, RAISED) is not None
    assert read_claim(Raised, {**RAISED, **change}) is None


@pytest.mark.row("E1")
def test_host_paths_are_removed_from_messages() -> None:
    address = FunctionAddress("shop", "it", "/srv/tools/here")
    text = "no /srv/tools/here/data in /srv/tools/here, but /srv/tools/herein"
    assert without_paths(text, address) == "no data in , but in"
