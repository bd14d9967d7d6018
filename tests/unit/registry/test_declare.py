"""`@tool`: types, defaults, constraints and docstring of a function become its definition."""

from __future__ import annotations

import enum
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from fumehood import InvalidDefinition, ToolType, parse_definition, tool
from fumehood.core.errors import InvalidParams
from fumehood.registry.declare import FunctionTool


class Colour(enum.Enum):
    """For a parameter with named values."""

    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """For a parameter with parts."""

    x: int
    y: int = 0


@tool(sandboxed=False)
async def look_up(
    city: str,
    days: Annotated[int, Field(ge=1, le=14, description="How many days.")] = 3,
    ratio: float = 0.5,
    exact: bool = False,
    unit: Literal["c", "f"] = "c",
    colour: Colour = Colour.RED,
    note: str | None = None,
    tags: list[str] = [],  # noqa: B006  # what authors write
    place: Point | None = None,
    anything=5,
) -> Any:
    """Look up the weather.

    Not for the past.

    Args:
        city (str): The city's name.
        days: Not this: the annotation's own words win.
        unit: Celsius or Fahrenheit.
        nobody: No such parameter.

    Returns:
        city: not a parameter.
    """
    return {
        "city": city,
        "days": days,
        "colour": colour.name,
        "unit": unit,
        "place": None if place is None else place.x,
        "tags": tags,
    }


def _properties(function: FunctionTool) -> dict[str, Any]:
    properties: dict[str, Any] = function.definition.parameters["properties"]
    return properties


@pytest.mark.row("T7")
@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("city", {"type": "string", "description": "The city's name."}),
        (
            "days",
            {
                "type": "integer",
                "minimum": 1,
                "maximum": 14,
                "default": 3,
                "description": "How many days.",
            },
        ),
        ("ratio", {"type": "number", "default": 0.5}),
        ("exact", {"type": "boolean", "default": False}),
        (
            "unit",
            {
                "type": "string",
                "enum": ["c", "f"],
                "default": "c",
                "description": "Celsius or Fahrenheit.",
            },
        ),
        ("colour", {"$ref": "#/$defs/Colour", "default": "red"}),
        ("note", {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}),
        ("tags", {"type": "array", "items": {"type": "string"}, "default": []}),
        ("place", {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}], "default": None}),
        ("anything", {"default": 5}),
    ],
)
def test_each_function_parameter_becomes_a_schema(name: str, schema: dict[str, Any]) -> None:
    assert _properties(look_up)[name] == schema


@pytest.mark.row("T7")
def test_function_gives_name_summary_and_required_parameters() -> None:
    definition = look_up.definition
    assert (definition.name, definition.type, definition.executor) == (
        "look_up", ToolType.NATIVE, "function",
    )  # fmt: skip
    assert definition.description == "Look up the weather.\n\nNot for the past."
    assert definition.parameters.keys() == {"type", "properties", "required", "$defs"}
    assert definition.parameters["required"] == ["city"]
    assert "nobody" not in definition.parameters["properties"]
    assert definition.parameters["$defs"]["Colour"]["enum"] == ["red", "blue"]
    assert definition.parameters["$defs"]["Point"]["required"] == ["x"]


@pytest.mark.row("T7")
def test_decimal_parameter_is_a_number_with_bounds() -> None:
    @tool(sandboxed=False)
    async def pay(
        amount: Annotated[Decimal, Field(gt=0, le=100)],
        fee: Annotated[Decimal, Field(ge=0, lt=1)],
    ) -> None:
        """Pay."""

    assert _properties(pay)["amount"] == {"type": "number", "exclusiveMinimum": 0, "maximum": 100}
    assert _properties(pay)["fee"] == {"type": "number", "minimum": 0, "exclusiveMaximum": 1}


@pytest.mark.row("T7")
def test_tool_and_document_of_the_same_definition_are_equal() -> None:
    @tool(
        sandboxed=False,
        version="1.2.0",
        cost_per_use="0.01",
        tags=["a"],
        read_only=True,
        timeout_seconds=2,
        sunset_date="2030-01-01",
    )
    async def find(
        query: Annotated[str, Field(max_length=10)], limit: Annotated[int, Field(ge=1)] = 5
    ) -> None:
        """Find things.

        Args:
            query: What to find.
        """

    document = {
        "name": "find",
        "version": "1.2.0",
        "type": "NATIVE",
        "description": "Find things.",
        "parameters": {
            "properties": {
                "query": {"type": "string", "maxLength": 10, "description": "What to find."},
                "limit": {"type": "integer", "minimum": 1, "default": 5},
            },
            "required": ["query"],
        },
        "cost_per_use": 0.01,
        "tags": ["a"],
        "read_only": True,
        "timeout_seconds": 2,
        "sunset_date": "2030-01-01",
        "sandboxed": False,
        "executor": "function",
    }
    assert parse_definition(document) == find.definition
    assert find.definition.sunset_date == date(2030, 1, 1)


@pytest.mark.row("T7")
def test_explicit_fields_override_those_of_the_function() -> None:
    @tool(
        sandboxed=False,
        name="renamed",
        description="Other words.",
        parameters={"properties": {"a": {"type": "string"}}},
    )
    async def original(a: str) -> None:
        """Its words."""

    assert original.definition.name == "renamed"
    assert original.definition.description == "Other words."
    assert original.definition.parameters == {
        "type": "object",
        "properties": {"a": {"type": "string"}},
    }
    assert original.__name__ == "renamed"


@pytest.mark.row("T7", "T3")
@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("async def act(*values): 'Act.'", {}, "'values' must be accepted by keyword"),
        ("async def act(value: int, /): 'Act.'", {}, "'value' must be accepted by keyword"),
        ("async def act(): ...", {}, "description"),
        ("async def act(to: 'Nobody'): 'Act.'", {}, "Nobody"),
        ("async def act(): 'Act.'", {"colour": "red"}, "colour"),
        ("def act(): 'Act.'", {"streaming": True}, "the function must yield its parts"),
    ],
)
def test_function_that_cannot_be_declared_is_refused(
    source: str, options: dict[str, Any], words: str
) -> None:
    space: dict[str, Any] = {}
    exec(source, space)
    with pytest.raises(InvalidDefinition, match=words):
        tool(sandboxed=False, **options)(space["act"])


@pytest.mark.anyio
@pytest.mark.row("T7")
async def test_invoke_converts_arguments_to_declared_types() -> None:
    answer = await look_up.invoke({"city": "Bonn", "colour": "blue", "place": {"x": 3}})
    assert answer == {
        "city": "Bonn",
        "days": 3,
        "colour": "BLUE",
        "unit": "c",
        "place": 3,
        "tags": [],
    }


@pytest.mark.anyio
@pytest.mark.row("T7")
async def test_invoke_refuses_values_that_violate_declared_types() -> None:
    @tool(sandboxed=False)
    async def on(day: date, other: int = 0) -> None:
        """Choose a day."""

    with pytest.raises(InvalidParams) as caught:
        await on.invoke({"day": "2026-02-30", "other": "x"})
    assert caught.value.fields == ("day", "other")
    assert "2026-02-30" not in caught.value.message


@pytest.mark.anyio
@pytest.mark.row("T7")
async def test_variadic_keyword_function_accepts_additional_parameters() -> None:
    @tool(sandboxed=False)
    async def open_ended(name: str, **more: Any) -> Any:
        """Take anything."""
        return {"name": name, "more": more}

    assert open_ended.definition.parameters["additionalProperties"] is True
    assert list(_properties(open_ended)) == ["name"]
    assert await open_ended.invoke({"name": "a", "b": 1}) == {"name": "a", "more": {"b": 1}}


@pytest.mark.row("T7")
@pytest.mark.parametrize(
    "name", ["schema", "json", "copy", "dict", "model_fields", "_hidden", "model_config"]
)
def test_any_parameter_name_can_be_declared(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"async def send({name}: str) -> None:\n    'Send.'", space)
    assert _properties(tool(sandboxed=False)(space["send"])) == {name: {"type": "string"}}
