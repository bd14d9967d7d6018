"""Which callers a new version of a definition breaks, and the version number that it needs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.tool import ToolDefinition
from fumehood.devtools.compat import Step, compare
from fumehood.registry.definitions import parse_definition
from fumehood.registry.json_schema import CompiledSchema
from support.definitions import rest_document

pytestmark = pytest.mark.row("T10")

CITY = {"type": "string", "minLength": 1, "maxLength": 100}
UNIT = {"enum": ["C", "F"], "default": "C"}


def tool(
    version: str = "1.0.0", *, properties: Any = None, required: Any = ("city",), **fields: Any
) -> ToolDefinition:
    schema = {
        "type": "object",
        "properties": {"city": CITY, "unit": UNIT} if properties is None else properties,
        "required": list(required),
    }
    return parse_definition({**rest_document(parameters=schema), "version": version, **fields})  # fmt: skip


OLD = tool()
OUTPUT = {"type": "object", "properties": {"t": {"type": "number"}}, "required": ["t"]}


@pytest.mark.parametrize(
    ("new", "path", "who"),
    [
        (tool(properties={"city": CITY}), "parameters.unit", "calls that send unit"),
        (tool(properties={"town": CITY, "unit": UNIT}, required=["town"]), "parameters.city", "calls that send city"),
        (tool(required=["city", "unit"]), "parameters.unit", "calls that leave out unit"),
        (tool(properties={"city": CITY, "unit": UNIT, "day": {}}, required=["city", "day"]), "parameters.day", "calls that leave out day"),
        (tool(properties={"city": {**CITY, "type": "integer"}, "unit": UNIT}), "parameters.city.type", "calls that send parameters.city"),
        (tool(properties={"city": {**CITY, "maxLength": 9}, "unit": UNIT}), "parameters.city.maxLength", "calls that send parameters.city"),
        (tool(properties={"city": {**CITY, "pattern": "^a"}, "unit": UNIT}), "parameters.city.pattern", "calls that send parameters.city"),
        (tool(properties={"city": CITY, "unit": {"enum": ["C"], "default": "C"}}), "parameters.unit.enum", "calls that send parameters.unit"),
        (tool(properties={"city": CITY, "unit": {**UNIT, "default": "F"}}), "parameters.unit.default", "calls that leave out parameters.unit"),
        (tool(dangerous=True), "dangerous", "every call"),
        (tool(strict=True), "strict", "every call"),
    ],
)  # fmt: skip
def test_breaking_change_names_its_callers_and_needs_a_major_version(
    new: ToolDefinition, path: str, who: str
) -> None:
    found = compare(OLD, new)
    assert [(change.path, change.breaks) for change in found.breaking] == [(path, who)]
    assert found.needed is Step.MAJOR
    assert not found.is_enough
    assert "## Steps\n1. " in found.migration_note()


def test_array_that_takes_any_items_now_needs_a_minor_version() -> None:
    days = {"type": "array", "items": {"type": "integer"}}
    found = compare(
        tool(properties={"city": CITY, "days": days}),
        tool(properties={"city": CITY, "days": {"type": "array"}}),
    )
    assert (found.breaking, found.needed) == ((), Step.MINOR)


@pytest.mark.parametrize(
    ("new", "needed"),
    [
        (tool(), Step.NONE),
        (tool(description="Other words for the same."), Step.PATCH),
        (tool(properties={"city": {**CITY, "description": "Which."}, "unit": UNIT}), Step.PATCH),
        (tool(properties={"city": CITY, "unit": UNIT, "day": {"type": "string"}}), Step.MINOR),
        (tool(properties={"city": {**CITY, "maxLength": 200}, "unit": UNIT}), Step.MINOR),
        (tool(properties={"city": CITY, "unit": {"enum": ["C", "F", "K"], "default": "C"}}), Step.MINOR),
        (tool(deprecated=True, replacement="get_climate"), Step.MINOR),
        (tool(timeout_seconds=5), Step.MINOR),
        (tool(output_schema=OUTPUT), Step.MINOR),
    ],
)  # fmt: skip
def test_compatible_change_breaks_no_caller(new: ToolDefinition, needed: Step) -> None:
    found = compare(OLD, new)
    assert found.breaking == ()
    assert found.needed is needed
    assert found.is_enough is (needed is Step.NONE)


@pytest.mark.parametrize(
    ("after", "breaks"),
    [
        ({"type": "object", "properties": {}, "required": []}, True),
        ({**OUTPUT, "properties": {"t": {"type": ["number", "null"]}}}, True),
        ({**OUTPUT, "required": []}, True),
        (None, True),
        ({**OUTPUT, "properties": {"t": {"type": "number"}, "wind": {"type": "number"}}}, False),
        ({**OUTPUT, "properties": {"t": {"type": "integer"}}}, False),
    ],
)
def test_output_schema_compatibility_is_checked_in_reverse(after: Any, breaks: bool) -> None:
    found = compare(tool(output_schema=OUTPUT), tool(output_schema=after))
    assert bool(found.breaking) is breaks


@pytest.mark.parametrize(
    ("old", "new", "made", "is_enough"),
    [
        ("1.2.3", "2.0.0", Step.MAJOR, True),
        ("1.2.3", "1.3.0", Step.MINOR, False),
        ("0.2.0", "0.3.0", Step.MINOR, True),
        ("0.2.0", "0.2.1", Step.PATCH, False),
        ("2.0.0", "1.0.0", Step.NONE, False),
    ],
)
def test_version_step_is_compared_with_the_required_step(
    old: str, new: str, made: Step, is_enough: bool
) -> None:
    found = compare(tool(old), tool(new, dangerous=True))
    assert found.made is made
    assert found.is_enough is is_enough


def test_renamed_parameter_is_recognized() -> None:
    found = compare(OLD, tool(properties={"town": CITY, "unit": UNIT}, required=["town"]))
    assert [change.todo for change in found.breaking] == ["Send town instead of city."]


BOUNDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number", ["integer", "null"], "string"])},
    optional={
        "minimum": st.integers(-3, 3), "maximum": st.integers(-3, 3),
        "enum": st.lists(st.integers(-4, 4) | st.none(), min_size=1, max_size=4, unique=True),
    },
)  # fmt: skip


@given(BOUNDS, BOUNDS, st.integers(-5, 5) | st.none() | st.just("a") | st.just(0.5))
def test_newly_invalid_value_is_always_a_breaking_change(
    before: Any, after: Any, value: Any
) -> None:
    old, new = (tool(properties={"n": each}, required=[]) for each in (before, after))
    was, is_now = (not CompiledSchema(t.parameters).violations({"n": value}) for t in (old, new))
    if was and not is_now:
        assert compare(old, new).breaking
