"""Parameters as a list: the schema they stand for, and every fault of the list."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fumehood import InvalidDefinition, ToolDefinition, ToolParameter, parse_definition, tool
from fumehood.core.tool import parameter_list_schema


def _parameter(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "type": "integer", "description": "A number.", **fields}


@pytest.mark.row("T7")
@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"min": 1, "max": 5}, {"type": "integer", "minimum": 1, "maximum": 5}),
        ({"type": "number", "min": 0.5}, {"type": "number", "minimum": 0.5}),
        ({"type": "string", "min": 1, "max": 9, "pattern": "^a"},
         {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^a"}),
        ({"type": "array", "max": 3}, {"type": "array", "maxItems": 3}),
        ({"type": "boolean", "default": False}, {"type": "boolean", "default": False}),
        ({"type": "object"}, {"type": "object"}),
        ({"enum": [1, 2], "default": 2}, {"type": "integer", "enum": [1, 2], "default": 2}),
    ],
)  # fmt: skip
def test_listed_parameter_becomes_an_equivalent_schema(
    fields: dict[str, Any], schema: dict[str, Any]
) -> None:
    made, faults = parameter_list_schema([_parameter(**fields)])
    assert faults == []
    assert made["properties"] == {"x": {"description": "A number.", **schema}}


@pytest.mark.row("T7")
@pytest.mark.parametrize(
    ("fields", "required"),
    [({}, True), ({"required": True}, True), ({"required": False}, False), ({"default": 3}, False),
     ({"default": 3, "required": False}, False)],
)  # fmt: skip
def test_listed_parameter_without_a_default_is_required_by_default(
    fields: dict[str, Any], required: bool
) -> None:
    made, _ = parameter_list_schema([_parameter(**fields)])
    assert made.get("required", []) == (["x"] if required else [])


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": None}, "parameters.0.name"),
    "a name with a space": ({"name": "a b"}, "parameters.0.name"),
    "a name with a line end": ({"name": "a\n"}, "parameters.0.name"),
    "an unknown type": ({"type": "float"}, "parameters.0.type"),
    "a type in capitals": ({"type": "STRING"}, "parameters.0.type"),
    "no description": ({"description": ""}, "parameters.0.description"),
    "an unknown field": ({"minimum": 3}, "parameters.0.minimum"),
    "an empty enum": ({"enum": []}, "parameters.0.enum"),
    "a bound that is no number": ({"min": "1"}, "parameters.0.min"),
    "an infinite bound": ({"max": float("inf")}, "parameters.0.max"),
    "bounds of a boolean": ({"type": "boolean", "min": 0}, "do not fit the type boolean"),
    "bounds of an object": ({"type": "object", "max": 1}, "do not fit the type object"),
    "a pattern for numbers": ({"pattern": "^1"}, "a pattern does not fit the type integer"),
    "a default nobody needs": ({"default": 1, "required": True}, "has no use for a default"),
}  # fmt: skip


@pytest.mark.row("T7")
@pytest.mark.parametrize("fault", FAULTS)
def test_parameter_fault_is_named_with_its_path(fault: str) -> None:
    fields, words = FAULTS[fault]
    document = {key: value for key, value in _parameter(**fields).items() if key != "name" or value}
    _, faults = parameter_list_schema([document])
    assert len(faults) == 1
    assert faults[0].startswith("parameters.0")
    assert words in faults[0]


@pytest.mark.row("T7")
def test_duplicate_parameter_name_is_a_fault() -> None:
    _, faults = parameter_list_schema([_parameter(), _parameter(type="string")])
    assert faults == ["parameters.1: 'x' is in the list already"]


@pytest.mark.parametrize("item", ["x", 5, None, ["x"]])
def test_malformed_parameter_list_element_is_a_fault(item: Any) -> None:
    assert parameter_list_schema([item])[1][0].startswith("parameters.0: ")


@pytest.mark.row("T7")
def test_python_values_and_documents_make_equal_definitions() -> None:
    values = [ToolParameter(name="x", type="integer", description="A number.", min=1)]
    base = {"name": "sums", "description": "Add.", "type": "REST", "method": "GET",
            "endpoint": "https://example.org/"}  # fmt: skip
    from_values = parse_definition({**base, "parameters": values})
    assert from_values == parse_definition({**base, "parameters": [_parameter(min=1)]})
    assert from_values == ToolDefinition.model_validate({**base, "parameters": values})
    assert from_values.parameters["properties"]["x"]["minimum"] == 1


@pytest.mark.row("T7")
def test_function_may_declare_its_parameters_as_a_list() -> None:
    listed = [ToolParameter(name="x", type="integer", description="A number.", max=3)]

    @tool(sandboxed=False, parameters=listed)
    async def double(x: int) -> int:
        """Double a number."""
        return 2 * x

    assert double.definition.parameters["properties"]["x"]["maximum"] == 3


def test_parameter_faults_are_raised_by_the_definition_model() -> None:
    document = {"name": "x", "description": "X.", "parameters": [_parameter(pattern="^1")]}
    with pytest.raises(ValidationError, match="a pattern does not fit"):
        ToolDefinition.model_validate(document)
    with pytest.raises(InvalidDefinition, match="a pattern does not fit"):
        parse_definition(document)
