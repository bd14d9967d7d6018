"""Agents and bindings as values: what cannot be meant is refused when it is written."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fumehood.identity.model import MAX_CONFIGURED, Agent, Binding


@pytest.mark.row("R3")
def test_nothing_given_grants_nothing() -> None:
    assert Agent(id="a").principals == ()
    binding = Binding(tool="act")
    assert (binding.fixed, binding.defaults, binding.sort_order) == ({}, {}, 0)


@pytest.mark.row("R3")
def test_an_argument_is_fixed_or_has_a_default_but_not_both() -> None:
    Binding(tool="act", fixed={"a": 1}, defaults={"b": 1})
    with pytest.raises(ValidationError, match="is fixed and has a default"):
        Binding(tool="act", fixed={"a": 1, "b": 1}, defaults={"b": 2})


@pytest.mark.row("R3", "T4")
@pytest.mark.parametrize(
    ("tool", "name"), [("act", "act"), ("act@1.2.0", "act"), ("act@1.2.0-rc.1+x", "act")]
)
def test_a_tool_is_bound_with_or_without_its_version(tool: str, name: str) -> None:
    assert Binding(tool=tool).tool_name == name


@pytest.mark.parametrize(
    "tool",
    ["", "1act", "act@", "act@1@2", "a b", "act\n", "*", "act*", "a" * 65, "act@" + "1" * 101],
)
def test_a_tool_is_named_exactly(tool: str) -> None:
    with pytest.raises(ValidationError):
        Binding(tool=tool)


@pytest.mark.parametrize("field", ["fixed", "defaults"])
def test_a_binding_has_an_end(field: str) -> None:
    fits: dict[str, Any] = {str(n): n for n in range(MAX_CONFIGURED)}
    Binding(tool="act", **{field: fits})
    with pytest.raises(ValidationError):
        Binding(tool="act", **{field: {**fits, "more": 1}})


@pytest.mark.parametrize(
    "fields",
    [
        {"id": ""}, {"id": "a b"}, {"id": "-a"}, {"id": "a" * 129}, {"id": "a/b"}, {"id": 1},
        {"id": "a", "principals": ["a b"]}, {"id": "a", "principals": ["p"] * 101},
        {"id": "a", "principals": "uid:1"}, {"id": "a", "is_enabled": "yes"},
        {"id": "a", "description": "x" * 2001}, {"id": "a", "scopes": ["admin"]},
    ],
)  # fmt: skip
def test_an_agent_of_another_form_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Agent.model_validate(fields)
    assert Agent.model_validate({"id": "a", "principals": ["uid:1", "token:ci"]}).is_enabled


def test_values_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Agent(id="a").is_enabled = False  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        Binding(tool="act").tool = "other"  # type: ignore[misc]
