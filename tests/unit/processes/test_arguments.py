"""Requests about processes, of which only valid ones are sent to a guest."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from fumehood.core.errors import InvalidParams
from fumehood.core.tool import ToolDefinition
from fumehood.processes.arguments import checked
from fumehood.protocol.framing import MAX_INPUT_BYTES
from fumehood_tools.start_process import start_process


@pytest.mark.parametrize(
    "request_",
    [
        {"do": "start", "name": "web"},
        {"do": "start", "name": "web", "command": "a", "argv": ["b"]},
        {"do": "start", "name": "web", "argv": [""]},
        {"do": "start", "name": "Web", "command": "a"},
        {"do": "start", "name": "web\n", "command": "a"},
        {"do": "start", "name": "web", "command": "a", "working_directory": "../x"},
        {"do": "write", "name": "web", "text": "x" * (MAX_INPUT_BYTES + 1)},
        {"do": "write", "name": "web", "text": "x", "text_base64": "eA=="},
        {"do": "stop", "name": "web", "grace_s": 31},
        {"do": "read", "name": "web", "after": -1},
    ],
)
def test_invalid_request_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams):
        checked(request_)


def test_request_has_all_that_a_guest_needs_and_nothing_else() -> None:
    given = {"do": "write", "name": "web", "text": "ñ", "close": True, "op": "run", "id": 7}
    data = base64.b64encode("ñ".encode()).decode("ascii")
    assert checked(given) == {"do": "write", "name": "web", "data": data, "close": True}
    assert checked({"do": "read", "name": "web", "after": None, "wait": 1}) == {
        "do": "read", "name": "web", "after": 0,
    }  # fmt: skip
    assert checked({"do": "stop", "name": "web"}) == {"do": "stop", "name": "web", "grace_s": 5}
    assert checked({"do": "list", "name": "web"}) == {"do": "list"}


def required(tool: ToolDefinition) -> set[str]:
    shown = tool.for_models().parameters
    assert "argv" not in shown["properties"]
    return set(shown["required"])


def test_model_must_give_a_command_because_it_sees_no_arguments() -> None:
    assert required(start_process) == {"name", "command"}
    assert "command" not in start_process.parameters["required"]
