"""How a function is called where it runs: its reply is plain JSON, whatever it does."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest

from fumehood import ToolError, ToolResult, progress, tool
from fumehood.executors.inside import MAX_FRAMES, MAX_MESSAGE_CHARACTERS, answer
from fumehood.executors.progress import reports_to


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", made)
    return made


def ask(module: ModuleType, function: Any, **arguments: Any) -> dict[str, Any]:
    function.__doc__ = "Do it."
    module.it = tool(name="it")(function)  # type: ignore[attr-defined]
    return answer("shop", "it", arguments, max_depth=10)


@pytest.mark.row("S1")
def test_result_is_plain_data_with_what_was_spent(module: ModuleType) -> None:
    def give() -> Any:
        return ToolResult({"a": (1, 2)}, tokens_used=3)

    assert ask(module, give) == {"result": {"data": {"a": [1, 2]}, "tokens_used": 3, "cost": "0"}}


def test_arguments_have_the_types_that_the_function_declares(module: ModuleType) -> None:
    def count(number: int = 2) -> Any:
        return type(number).__name__

    assert ask(module, count, number="5")["result"]["data"] == "int"
    assert ask(module, count, number="five")["error"]["kind"] == "arguments"
    assert ask(module, count, number="five")["error"]["fields"] == ["number"]


@pytest.mark.row("E1")
def test_own_refusal_keeps_its_words(module: ModuleType) -> None:
    def refuse() -> None:
        raise ToolError("NO_CITY", "None.", retryable=True, retry_after_ms=5, details={"a": 1})

    assert ask(module, refuse)["error"] == {
        "kind": "tool_error", "code": "NO_CITY", "message": "None.", "details": {"a": 1},
        "retryable": True, "retry_after_ms": 5,
    }  # fmt: skip


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_it_raises_is_its_failure(module: ModuleType, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("x" * 10_000 + "\ud800")

    reply = ask(module, fail)["error"]
    assert (reply["kind"], reply["type"]) == ("exception", error.__name__)
    assert len(reply["message"]) == MAX_MESSAGE_CHARACTERS


def test_missing_memory_is_left_to_whoever_called(module: ModuleType) -> None:
    def grow() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        ask(module, grow)


def test_traceback_shows_the_tools_own_frames_and_no_more_than_some(module: ModuleType) -> None:
    space: dict[str, Any] = {"__name__": "shop.deep"}
    exec("def fall(n):\n    return fall(n - 1) if n else 1 / 0", space)

    def fail() -> None:
        space["fall"](50)

    frames = ask(module, fail)["error"]["traceback"]
    assert frames == ["shop.deep:2 in fall"] * MAX_FRAMES


@pytest.mark.parametrize("value", [object(), math.nan, "\ud800", {"a": math.inf}])
def test_what_json_cannot_hold_is_named(module: ModuleType, value: Any) -> None:
    assert ask(module, lambda: value)["error"]["kind"] == "unfit"

    def refuse() -> None:
        raise ToolError("NO_CITY", "None.", details={"value": value})

    assert ask(module, refuse)["error"]["kind"] == "unfit"


@pytest.mark.parametrize(
    ("name", "kind"), [("nothing_here", "AttributeError"), ("ToolError", "AttributeError")]
)
def test_name_that_holds_no_tool_is_a_failure(module: ModuleType, name: str, kind: str) -> None:
    module.ToolError = ToolError  # type: ignore[attr-defined]
    reply = answer("shop", name, {}, max_depth=10)
    assert reply["error"]["type"] == kind


def test_module_that_does_not_exist_is_a_failure() -> None:
    assert (
        answer("no_such_module_here", "x", {}, max_depth=10)["error"]["type"]
        == "ModuleNotFoundError"
    )


@pytest.mark.row("S8")
def test_progress_reaches_who_listens_within_bounds() -> None:
    heard: list[tuple[float, str]] = []
    progress(5, "nobody listens")
    with reports_to(lambda percent, message: heard.append((percent, message))):
        progress(-5)
        progress(150, "x" * 999)
        progress(10**400)
        progress(50, "\ud800")
        for wrong in (math.nan, math.inf, True):
            with pytest.raises(ValueError, match="finite"):
                progress(wrong)
    progress(5, "nobody listens any more")
    assert heard == [(0.0, ""), (100.0, "x" * 200), (100.0, ""), (50.0, "?")]
