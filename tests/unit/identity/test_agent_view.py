"""What an agent sees of its tool: nothing of what is fixed."""

from __future__ import annotations

import json

import pytest

from fumehood.identity.agents import seen_by_agent
from fumehood.identity.model import Binding
from support.definitions import function_definition

TOOL = function_definition(
    parameters={
        "type": "object",
        "required": ["text", "account", "lines"],
        "properties": {
            "text": {"type": "string"},
            "account": {"type": "string", "description": "Whose account."},
            "lines": {"type": "integer", "maximum": 5},
        },
    },
    input_examples=({"text": "a", "account": "x", "lines": 1},),
)


@pytest.mark.row("R3")
def test_fixed_argument_is_neither_named_nor_described() -> None:
    seen = seen_by_agent(TOOL, Binding(tool="act", fixed={"account": "secret-account"}))
    assert seen.parameters["properties"].keys() == {"text", "lines"}
    assert seen.parameters["required"] == ["text", "lines"]
    assert "account" not in json.dumps(seen.model_dump(mode="json"))


@pytest.mark.row("R3")
def test_argument_with_a_default_of_the_agents_need_not_be_given() -> None:
    seen = seen_by_agent(TOOL, Binding(tool="act", defaults={"lines": 3}))
    assert seen.parameters["properties"]["lines"] == {
        "type": "integer",
        "maximum": 5,
        "default": 3,
    }
    assert seen.parameters["required"] == ["text", "account"]


def test_definition_itself_stays_as_it_is() -> None:
    before = TOOL.model_dump_json()
    seen_by_agent(TOOL, Binding(tool="act", fixed={"text": "x"}, defaults={"lines": 1}))
    assert TOOL.model_dump_json() == before
    assert seen_by_agent(TOOL, Binding(tool="act")) is TOOL
