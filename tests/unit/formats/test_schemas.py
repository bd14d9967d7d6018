"""Schemas in a provider's dialect: strict rules, what gets lost, and the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from fumehood.core.errors import InvalidParams
from fumehood.core.tool import ToolDefinition
from fumehood.formats import anthropic, gemini, openai
from fumehood.formats import schemas as module
from fumehood.formats.schemas import Dialect, Fitted, alias_of, aliased, restored
from fumehood.formats.table import CHAT_FORMATS
from fumehood.registry.definitions import parse_definition

OPENAI, ANTHROPIC, GEMINI = openai.STRICT, anthropic.STRICT, gemini.KNOWN
TEXT = {"type": "string"}


def parameters(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def tool_of(schema: dict[str, Any], **more: Any) -> ToolDefinition:
    return ToolDefinition(name="t", description="Do it.", parameters=schema, **more)


def fit(schema: dict[str, Any], dialect: Dialect) -> Fitted:
    return module.fit(tool_of(schema), dialect)


def strict_faults(node: Any, path: str = "") -> list[str]:
    """What OpenAI's strict mode refuses of a schema, written down a second time."""
    found = []
    if isinstance(node, list):
        return [f for i, child in enumerate(node) for f in strict_faults(child, f"{path}.{i}")]
    if not isinstance(node, dict):
        return []
    if node.get("type") == "object" or "object" in (node.get("type") or ()):
        if node.get("additionalProperties") is not False:
            found.append(f"{path} is open")
        if sorted(node.get("required", [])) != sorted(node.get("properties", {})):
            found.append(f"{path} does not require everything")
    if not node.keys() & {"type", "anyOf", "$ref"}:
        found.append(f"{path} has no type")
    refused = {"allOf", "oneOf", "not", "if", "const", "default", "$schema", "patternProperties"}
    found += [f"{path} has {keyword}" for keyword in node.keys() & refused]
    for name, child in {**node.get("properties", {}), **node.get("$defs", {})}.items():
        found += strict_faults(child, f"{path}.{name}")
    found += strict_faults(node.get("anyOf", []), f"{path}.anyOf")
    if "items" in node:
        found += strict_faults(node["items"], f"{path}.items")
    return found


def test_strict_export_makes_optional_parameters_required_and_nullable() -> None:
    fitted = fit(
        {**parameters(a=TEXT, b={"type": "integer", "default": 5}), "required": ["a"]}, OPENAI
    )
    assert (fitted.faults, fitted.losses) == ([], [])
    assert fitted.schema == {
        "type": "object",
        "properties": {
            "a": TEXT,
            "b": {"type": ["integer", "null"], "description": "default: 5"},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("said", "widened"),
    [
        ({"enum": ["x", 1]}, {"enum": ["x", 1, None], "type": ["integer", "string", "null"]}),
        ({"const": "x"}, {"enum": ["x", None], "type": ["string", "null"]}),
        (
            {"$ref": "#/$defs/d", "description": "D."},
            {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}], "description": "D."},
        ),
        (
            {"oneOf": [TEXT, {"type": "number"}]},
            {"anyOf": [TEXT, {"type": "number"}, {"type": "null"}]},
        ),
        ({"allOf": [TEXT], "description": "A."}, {"type": ["string", "null"], "description": "A."}),
        (
            {"type": "array", "items": TEXT, "maxItems": 3},
            {"type": ["array", "null"], "items": TEXT, "maxItems": 3},
        ),
        ({"type": ["string", "null"], "default": None}, None),
    ],
)  # fmt: skip
def test_every_schema_form_becomes_nullable(said: Any, widened: Any) -> None:
    fitted = fit({**parameters(p=said), "$defs": {"d": TEXT}}, OPENAI)
    assert (fitted.faults, fitted.losses) == ([], [])
    if widened is not None:
        assert fitted.schema["properties"]["p"] == widened
    assert Draft202012Validator(fitted.schema).is_valid({"p": None})
    assert strict_faults(fitted.schema) == []


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({"type": "object"}, "p"),
        ({"type": "object", "properties": {"a": TEXT}, "additionalProperties": True}, "p"),
        ({"type": "object", "additionalProperties": TEXT}, "p"),
        ({"type": "object", "patternProperties": {"^x": TEXT}}, "p.patternProperties"),
        ({"type": "object", "properties": {"a": TEXT}, "required": ["b"]}, "p.required"),
        ({"type": "array"}, "p"),
        ({"type": "array", "prefixItems": [TEXT], "items": TEXT}, "p.prefixItems"),
        ({"not": {"type": "null"}, "type": "string"}, "p.not"),
        ({"type": "string", "if": {}, "then": {}}, "p.if"),
        ({"allOf": [TEXT, {"minLength": 1}]}, "p.allOf"),
        ({"enum": [{"a": 1}]}, "p.enum"),
        ({"$ref": "#/properties/q"}, "p.$ref"),
        ({"anyOf": [TEXT], "minLength": 3}, "p"),
        ({"description": "Anything."}, "p"),
        (True, "p"),
        (False, "p"),
        ({"anyOf": [parameters(a=TEXT), parameters(b=TEXT)]}, "p.anyOf"),
    ],
)
def test_schema_that_cannot_be_strict_explains_where_and_why(said: Any, where: str) -> None:
    tool = tool_of(parameters(p=said, q=TEXT))
    for name in ("openai", "openai-responses"):
        made, losses = CHAT_FORMATS[name].tool(tool)
        function = made.get("function", made)
        assert function["strict"] is False
        assert function["parameters"]["properties"]["p"] == said
        assert losses[0].where == f"parameters.properties.{where}"
        assert losses[0].what.startswith("strict is false: ")
        assert all(loss.tool == "t" and loss.what and loss.change for loss in losses)


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
@pytest.mark.parametrize("name", list(CHAT_FORMATS))
def test_root_union_is_dropped_and_reported(keyword: str, name: str) -> None:
    tool = tool_of({**parameters(a=TEXT, b=TEXT), keyword: [{"required": ["a"]}]})
    made, losses = CHAT_FORMATS[name].tool(tool)
    assert f'"{keyword}"' not in json.dumps(made)
    assert f"parameters.{keyword}" in [loss.where for loss in losses]
    assert keyword in tool.parameters  # the definition itself is not changed


def test_constraint_unsupported_in_strict_mode_becomes_a_note_and_a_loss() -> None:
    fitted = fit(parameters(p={"type": "string", "minLength": 3, "pattern": "^a"}), OPENAI)
    assert fitted.faults == []
    assert fitted.schema["properties"]["p"]["description"] == "minLength: 3"
    assert fitted.schema["properties"]["p"]["pattern"] == "^a"
    assert [loss.where for loss in fitted.losses] == ["parameters.properties.p.minLength"]


def test_closing_an_object_schema_is_reported() -> None:
    fitted = fit(parameters(p=parameters(a=TEXT)), OPENAI)
    assert fitted.faults == []
    assert fitted.losses[0].where == "parameters.properties.p"
    closed = {**parameters(a=TEXT), "additionalProperties": False}
    assert fit(parameters(p=closed), OPENAI).losses == []


def test_optional_nullable_parameter_is_reported() -> None:
    schema = parameters(p={"type": ["string", "null"], "default": "x"})
    fitted = fit(schema, OPENAI)
    assert "cannot be left out" in fitted.losses[0].what
    assert restored({"p": None}, schema, OPENAI) == {"p": None}


def test_schema_nested_beyond_the_limit_is_not_strict() -> None:
    nested = json.loads('{"type":"array","items":' * 11 + json.dumps(TEXT) + "}" * 11)
    assert fit(parameters(p=nested), OPENAI).faults


def test_recursive_schema_is_strict_for_openai_and_not_for_anthropic() -> None:
    schema = {
        **parameters(tree={"$ref": "#/$defs/node"}),
        "required": ["tree"],
        "$defs": {
            "node": {
                **parameters(name=TEXT, children={"type": "array", "items": {"$ref": "#/$defs/node"}}),
                "required": ["name"], "additionalProperties": False,
            },
        },
    }  # fmt: skip
    fitted = fit(schema, OPENAI)
    assert (fitted.faults, strict_faults(fitted.schema)) == ([], [])
    sent = {"tree": {"name": "a", "children": [{"name": "b", "children": None}]}}
    Draft202012Validator(fitted.schema).validate(sent)
    back = restored(sent, schema, OPENAI)
    assert back == {"tree": {"name": "a", "children": [{"name": "b"}]}}
    assert fit(schema, ANTHROPIC).faults
    assert not fit({**schema, "$defs": {"node": TEXT}}, ANTHROPIC).faults


def test_draft_7_definitions_are_moved() -> None:
    schema = {**parameters(p={"$ref": "#/definitions/d"}), "definitions": {"d": TEXT}}
    made = fit({**schema, "required": ["p"]}, OPENAI).schema
    assert made["properties"]["p"] == {"$ref": "#/$defs/d"}
    assert made["$defs"] == {"d": TEXT}


def test_anthropic_has_no_lists_of_types_and_no_bounds() -> None:
    whole = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}
    fitted = fit(
        parameters(p=whole, q={"enum": ["a", None], "type": ["string", "null"]}), ANTHROPIC
    )
    assert fitted.faults == []
    assert fitted.schema["properties"] == {
        "p": {"anyOf": [{"type": "integer", "description": "minimum: 1"}, {"type": "null"}]},
        "q": {"enum": ["a", None]},
    }
    assert fitted.schema["required"] == []  # what is optional stays so
    (fault,) = fit(parameters(p={"type": ["integer", "null"]}), ANTHROPIC).faults
    assert (fault.where, fault.change) == ("parameters.properties.p.type", "use anyOf")


@pytest.mark.parametrize("name", ["user name", "$filter", "ä", "x" * 65, "a\n"])
@pytest.mark.parametrize("dialect", [ANTHROPIC, GEMINI])
def test_unsupported_property_name_gets_an_alias_that_is_restored(name: str, dialect: Any) -> None:
    schema = {**parameters(**{name: parameters(**{name: TEXT})}), "required": [name]}
    sent = aliased({name: {name: "x"}}, schema, dialect)
    (alias,) = sent
    assert dialect.property_name.fullmatch(alias)
    assert alias in fit(schema, dialect).schema["properties"]
    assert alias in fit(schema, dialect).schema["required"]
    assert restored(sent, schema, dialect) == {name: {name: "x"}}


@given(st.text(max_size=80), st.text(max_size=80))
def test_aliases_are_unique(one: str, other: str) -> None:
    pattern = GEMINI.property_name
    assert (alias_of(one, pattern) == alias_of(other, pattern)) == (one == other)


def test_argument_given_by_name_and_alias_is_refused() -> None:
    """One of the two would silently be the other."""
    schema = parameters(**{"user name": TEXT, "other": parameters(**{"user name": TEXT})})
    alias = alias_of("user name", GEMINI.property_name)
    for both in ({alias: "a", "user name": "b"}, {"other": {"user name": "b", alias: "a"}}):
        with pytest.raises(InvalidParams, match="given twice"):
            restored(both, schema, GEMINI)
    twin = {alias: "a", "other": {"user name": "b"}}
    assert restored(twin, schema, GEMINI) == {"user name": "a", "other": {"user name": "b"}}


def test_exponentially_expanding_schema_is_converted_in_time() -> None:
    """2**28 paths lead through it."""
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(28)} | {
        "d28": TEXT
    }
    schema = {**parameters(p={"$ref": "#/$defs/d0"}), "$defs": definitions}
    for dialect in (OPENAI, ANTHROPIC, GEMINI):
        fit(schema, dialect)
    assert restored({"p": None}, schema, OPENAI) == {}
    loop = {**parameters(p={"$ref": "#/$defs/d"}), "$defs": {"d": {"$ref": "#/$defs/d"}}}
    for dialect in (OPENAI, ANTHROPIC, GEMINI):
        fit(loop, dialect)
    assert restored({"p": None}, loop, OPENAI) == {"p": None}


def test_long_reference_chain_is_followed_up_to_a_bound() -> None:
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(500)}
    schema = {**parameters(p={"$ref": "#/$defs/d0"}), "$defs": {**chain, "d500": TEXT}}
    tool_ = parse_definition(
        {"name": "t", "type": "MCP", "description": "Do it.", "parameters": schema}
    )
    for name in CHAT_FORMATS:
        CHAT_FORMATS[name].tool(tool_)
    assert restored({"p": {"a": None}}, schema, OPENAI) == {"p": {"a": None}}
    assert restored({"p": None}, schema, OPENAI) == {"p": None}


def test_export_formats_do_not_modify_the_definition() -> None:
    schema = parameters(p={"type": "string", "minLength": 2, "default": "ab"}, q=parameters(r=TEXT))
    before = json.dumps(schema)
    for dialect in (OPENAI, ANTHROPIC, GEMINI):
        fit(schema, dialect)
    module.without_unions(tool_of(schema))
    assert json.dumps(schema) == before


# -- Arguments of any tool, there and back ----------------------------------------------------

names = st.text(st.sampled_from("abc ä$.-"), min_size=1, max_size=4)
leaves = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": ["string", "null"]},
        {"enum": ["x", 1, True]},
        {"enum": ["x", None]},
        {"const": "fixed"},
        {"type": "string", "minLength": 1, "format": "color"},
        {"$ref": "#/$defs/shared"},
    ]
)


@st.composite
def objects(draw: Any, children: Any) -> dict[str, Any]:
    properties = draw(st.dictionaries(names, children, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**made, "required": required} if required or draw(st.booleans()) else made


schemas = objects(
    st.recursive(
        leaves,
        lambda children: st.one_of(
            objects(children),
            st.builds(lambda item: {"type": "array", "items": item}, children),
            st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, objects(children)),
            st.builds(lambda one: {"anyOf": [one, {"type": "integer"}]}, objects(children)),
        ),
        max_leaves=8,
    )
)
SHARED = {
    "type": "object", "properties": {"s": {"type": "string"}, "o": {"type": "integer"}},
    "required": ["s"], "additionalProperties": False,
}  # fmt: skip


def takes_null(schema: dict[str, Any]) -> bool:
    root = {**schema, "$defs": {"shared": SHARED}}
    return Draft202012Validator(root).is_valid(None)


@st.composite
def values(draw: Any, schema: dict[str, Any]) -> tuple[Any, Any]:
    """A value of a schema, and the same with null wherever a parameter was left out."""
    if "$ref" in schema:
        return draw(values(SHARED))
    if "const" in schema:
        return schema["const"], schema["const"]
    if "enum" in schema:
        chosen = draw(st.sampled_from(schema["enum"]))
        return chosen, chosen
    if "anyOf" in schema:
        return draw(values(draw(st.sampled_from(schema["anyOf"]))))
    kind = (
        schema["type"] if isinstance(schema["type"], str) else draw(st.sampled_from(schema["type"]))
    )
    if kind == "array":
        pairs = [draw(values(schema["items"])) for _ in range(draw(st.integers(0, 3)))]
        return [one for one, _ in pairs], [other for _, other in pairs]
    if kind != "object":
        made = {"string": "t", "integer": draw(st.integers(0, 9)), "null": None}[kind]
        return made, made
    value, sent = {}, {}
    for name, said in schema["properties"].items():
        # Of an optional parameter that takes null, nothing tells "left out" from null: a loss.
        if name in schema.get("required", ()) or takes_null(said) or draw(st.booleans()):
            value[name], sent[name] = draw(values(said))
        else:
            sent[name] = None
    return value, sent


@given(st.data())
def test_strict_arguments_are_restored_to_the_original(data: Any) -> None:
    schema = {**data.draw(schemas), "$defs": {"shared": SHARED}}
    value, sent = data.draw(values(schema))
    Draft202012Validator(schema).validate(value)
    fitted = fit(schema, OPENAI)
    assert fitted.faults == []
    assert strict_faults(fitted.schema) == []
    Draft202012Validator(fitted.schema).validate(sent)
    assert restored(sent, schema, OPENAI) == value
    for dialect in (ANTHROPIC, GEMINI):
        fitted = fit(schema, dialect)
        assert all(fault.change == "use anyOf" for fault in fitted.faults)
        sent = aliased(value, schema, dialect)
        if not fitted.faults:
            Draft202012Validator(fitted.schema).validate(sent)
        assert restored(sent, schema, dialect) == value
