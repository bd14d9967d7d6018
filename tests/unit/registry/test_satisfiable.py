"""Every converted schema has a call that fits it, and validation accepts that call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.formats.exports import FORMATS
from fumehood.formats.schemas import restored
from fumehood.formats.table import CHAT_FORMATS
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import validate
from fumehood.registry.definitions import InvalidDefinition, parse_definition
from fumehood.registry.json_schema import without_wrong_defaults
from fumehood.rest.openapi import ImportOptions, import_openapi
from support.definitions import registered, request

pytestmark = pytest.mark.row("R4", "T5", "T8")

TEXT = {"type": "string"}


def accepted(tool: ToolDefinition, arguments: JsonObject) -> JsonObject:
    """The arguments as validation passes them on. Raises InvalidParams if it refuses them."""
    call = request(tool.name, arguments)
    return validate(ResolvedCall(call, registered(tool), ())).arguments


def smallest(schema: Any, root: JsonObject) -> Any:
    """The smallest value that fits a schema of the kinds that these tests make."""
    return _value(schema, root, whole=False)


def largest(schema: Any, root: JsonObject) -> Any:
    """As `smallest`, with every property."""
    return _value(schema, root, whole=True)


def _value(schema: Any, root: JsonObject, *, whole: bool) -> Any:
    schema = _flat(schema, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object" if schema.keys() & {"properties", "required"} else "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        names = [*properties] if whole else schema.get("required", [])
        return {n: _value(properties.get(n, {}), root, whole=whole) for n in names}
    if kind == "array":
        items = [_value(schema.get("items", {}), root, whole=whole)]
        return items * max(schema.get("minItems", 0), whole)
    return {"string": "t", "integer": 7, "number": 7.5, "boolean": True, "null": None}[kind]


def _flat(schema: Any, root: JsonObject) -> JsonObject:
    """A schema with its reference, all parts of `allOf`, and the first branch of a union."""
    if not isinstance(schema, dict):
        return {}
    flat = {k: v for k, v in schema.items() if k not in ("$ref", "allOf", "anyOf", "oneOf")}
    more = [
        *schema.get("allOf", ()),
        *(schema[key][0] for key in ("anyOf", "oneOf") if key in schema),
    ]
    if "$ref" in schema:
        more.append(root["$defs"][schema["$ref"].rpartition("/")[2]])
    for part in (_flat(each, root) for each in more):
        properties = dict(part.get("properties", {}))
        for name, said in flat.get("properties", {}).items():
            properties[name] = {"allOf": [properties[name], said]} if name in properties else said
        required = [*part.get("required", ()), *flat.get("required", ())]
        flat = {**part, **flat}
        if properties or required:
            flat |= {"properties": properties, "required": list(dict.fromkeys(required))}
    return flat


def agrees(schema: Any, known: frozenset[str] = frozenset()) -> bool:
    """Whether `required` names known properties only, at every level of a converted schema.

    `known` are those of the schemas around it for the same value.
    """
    if isinstance(schema, list):
        return all(agrees(each) for each in schema)
    if not isinstance(schema, dict):
        return True
    known |= _names(schema)
    same = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ())]
    others = [said for key, said in schema.items() if key not in ("allOf", "anyOf", "oneOf")]
    is_whole = known >= set(schema.get("required", ()))
    return is_whole and agrees(others) and all(agrees(part, known) for part in same)


def _names(schema: JsonObject) -> set[str]:
    found = set(schema.get("properties", ()))
    for key in ("allOf", "anyOf", "oneOf"):
        found.update(*map(_names, schema.get(key, ())))
    return found


# -- OpenAPI documents ------------------------------------------------------------------------

ID = {"type": "integer", "readOnly": True}
BASE = {"type": "object", "properties": {"id": ID, "name": TEXT}}
COMPONENTS = {
    "Id": ID,
    "Base": BASE,
    "Demanding": {**BASE, "required": ["id", "name"]},
    "Closed": {**BASE, "required": ["id"], "additionalProperties": False},
    "Owner": {"type": "object", "properties": {"owner": {"$ref": "#/components/schemas/Demanding"}}},
}  # fmt: skip


def ref(name: str, **beside: Any) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}", **beside}


def imported(schema: Any, version: str = "3.1.0") -> tuple[ToolDefinition, list[str]]:
    """The tool of a body, and the notes about it."""
    operation = {
        "operationId": "create", "requestBody": {"content": {"application/json": {"schema": schema}}},
    }  # fmt: skip
    found = import_openapi(
        {
            "openapi": version, "info": {"version": "1.0.0"},
            "servers": [{"url": "https://shop.example"}],
            "paths": {"/x": {"post": operation}}, "components": {"schemas": COMPONENTS},
        },
        ImportOptions(),
    )  # fmt: skip
    assert found.left_out == []
    return parse_definition(found.tools[0]), [note for _, note in found.notes]


WITHOUT_ID = {"properties": {"name": TEXT}}

READ_ONLY: dict[str, tuple[Any, JsonObject]] = {
    "beside": ({**BASE, "required": ["id"]}, WITHOUT_ID),
    "by reference": (ref("Demanding"), {**WITHOUT_ID, "required": ["name"]}),
    "required in a part": ({"allOf": [ref("Base"), {"required": ["id", "name"]}]},
                           {**WITHOUT_ID, "required": ["name"]}),
    "required beside allOf": ({"allOf": [ref("Base")], "required": ["id"]}, WITHOUT_ID),
    "declared after": ({"allOf": [{"required": ["id"]}, ref("Base")]}, WITHOUT_ID),
    "declared twice": ({"allOf": [ref("Base"), {"properties": {"id": {"type": "integer"}}}]}, WITHOUT_ID),
    "property by reference": (
        {"type": "object", "required": ["id"], "properties": {"id": ref("Id"), "name": TEXT}}, WITHOUT_ID
    ),
    "property by allOf": (
        {"type": "object", "required": ["id"],
         "properties": {"id": {"allOf": [ref("Id")], "description": "D."}, "name": TEXT}}, WITHOUT_ID,
    ),
    "closed": (ref("Closed"), {**WITHOUT_ID, "additionalProperties": False}),
}  # fmt: skip


@pytest.mark.parametrize("version", ["3.0.3", "3.1.0"])
@pytest.mark.parametrize("name", READ_ONLY)
def test_read_only_property_is_neither_offered_nor_required(name: str, version: str) -> None:
    schema, expected = READ_ONLY[name]
    tool, notes = imported(schema, version)
    found = tool.parameters
    assert notes == []
    assert found["properties"] == expected["properties"]
    assert found.get("required", []) == expected.get("required", [])
    assert accepted(tool, {"name": "a"}) == {"name": "a"}


def test_nested_read_only_property_is_not_required() -> None:
    tool, _ = imported(ref("Owner"))
    owner = tool.parameters["properties"]["owner"]
    assert owner == {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}


def test_keywords_beside_a_reference_of_3_1_add_to_it() -> None:
    beside: Any = {"required": ["name", "size"], "properties": {"size": {"type": "integer"}}}
    tool, _ = imported(ref("Base", **beside, allOf=[{"properties": {"color": TEXT}}]))
    assert tool.parameters["properties"] == {
        "name": TEXT,
        "size": {"type": "integer"},
        "color": TEXT,
    }
    assert tool.parameters["required"] == ["name", "size"]
    tool, _ = imported(ref("Base", **beside), "3.0.3")  # which ignores them
    assert tool.parameters["properties"] == {"name": TEXT}
    assert tool.parameters["required"] == []


def test_required_name_without_a_property_is_offered_with_a_note() -> None:
    tool, notes = imported({"type": "object", "properties": {"a": TEXT}, "required": ["a", "b"]})
    assert tool.parameters["properties"] == {"a": TEXT, "b": {}}
    assert notes == ["'b' is required and not described, so it may be anything"]
    assert accepted(tool, {"a": "x", "b": [1]}) == {"a": "x", "b": [1]}
    with pytest.raises(InvalidParams, match="b is required"):
        accepted(tool, {"a": "x"})


def test_closed_object_does_not_require_what_it_refuses() -> None:
    closed = {"properties": {"a": TEXT}, "required": ["a", "b"], "additionalProperties": False}
    tool, notes = imported({"type": "object", **closed})
    assert tool.parameters["required"] == ["a"]
    assert notes == ["without requiring 'b', which its properties do not name"]
    assert accepted(tool, {"a": "x"}) == {"a": "x"}


def test_one_of_with_a_lost_difference_takes_any_of_its_forms() -> None:
    """Both forms fit the same values once what tells them apart is gone."""
    forms = [{**BASE, "required": ["id"]}, {"type": "object", "properties": {"name": TEXT}}]
    known = {"oneOf": [ref("Base"), ref("Owner")], "discriminator": {"propertyName": "name"}}
    for union in ({"oneOf": forms}, known):
        tool, notes = imported({"type": "object", "properties": {"x": union}})
        assert notes == ["a value may fit several forms of a 'oneOf'"]
        assert accepted(tool, {"x": {"name": "a"}}) == {"x": {"name": "a"}}
    sound = {"oneOf": [{"type": "integer"}, TEXT]}  # the twin, in which nothing is lost
    tool, notes = imported({"type": "object", "properties": {"x": sound}})
    assert (tool.parameters["properties"]["x"], notes) == (sound, [])


def test_not_with_an_unsupported_part_refuses_nothing() -> None:
    unsupported = {"not": {"type": "string", "pattern": "^(?!a)"}}
    tool, notes = imported({"type": "object", "properties": {"x": unsupported}})
    assert tool.parameters["properties"]["x"] == {}
    assert "without a 'not': a part of it is not supported" in notes
    kept = {"not": {"type": "string", "pattern": "^a"}}
    tool, _ = imported({"type": "object", "properties": {"x": kept}})
    assert tool.parameters["properties"]["x"] == kept


def test_default_that_does_not_fit_is_left_out_with_a_note() -> None:
    wrong = {"type": "integer", "default": "10"}
    right = {"type": "integer", "default": 10}
    tool, notes = imported({"type": "object", "properties": {"a": wrong, "b": right}})
    assert tool.parameters["properties"] == {"a": {"type": "integer"}, "b": right}
    assert notes == ["without the default of 'a': it does not fit"]
    assert accepted(tool, {}) == {"b": 10}


def test_control_wrong_default_would_refuse_the_call() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "default": "x"}}}
    with pytest.raises(InvalidParams):
        accepted(_tool(parameters), {})
    assert accepted(_tool(without_wrong_defaults(parameters)), {}) == {}


names = st.sampled_from(["id", "name", "size", "kind", "more"])
LEAVES: dict[str, list[Any]] = {  # of one type each, so that parts of an allOf can be fitted together
    "id": [ID, ref("Id"), {"type": "integer"}, {"allOf": [ref("Id")]}],
    "name": [TEXT, {"type": "string", "readOnly": True}, {"type": "string", "default": 7}],
    "size": [{"type": "integer", "default": "x"}, {"type": "integer", "default": 7}],
    "kind": [{"enum": ["t", 1]}, TEXT],
}  # fmt: skip
REFERENCES = st.sampled_from([ref(name) for name in COMPONENTS if name not in ("Id", "Closed")])


@st.composite
def objects(draw: Any, children: Any) -> JsonObject:
    made: JsonObject = {"type": "object"} if draw(st.booleans()) else {}
    kinds = {name: st.sampled_from(leaves) for name, leaves in LEAVES.items()}
    chosen = st.fixed_dictionaries({}, optional={**kinds, "more": children})
    if properties := draw(chosen):
        made["properties"] = properties
    if draw(st.booleans()):
        made["required"] = draw(st.lists(names, unique=True, max_size=3))
    return made


@st.composite
def combined(draw: Any, children: Any) -> JsonObject:
    made: JsonObject = draw(objects(children))
    if draw(st.booleans()):
        parts = st.one_of(objects(children), REFERENCES)
        made["allOf"] = draw(st.lists(parts, min_size=1, max_size=2))
    if draw(st.booleans()):
        made |= draw(REFERENCES)
    return made


bodies = st.recursive(REFERENCES, combined, max_leaves=6)


def _satisfied(tool: ToolDefinition) -> None:
    for make in (smallest, largest):
        call = make(tool.parameters, tool.parameters)
        Draft202012Validator(tool.parameters).validate(call)
        assert accepted(tool, call).items() >= call.items()


@given(bodies, st.sampled_from(["3.0.3", "3.1.0"]))
def test_every_imported_tool_has_a_call_that_is_accepted(schema: Any, version: str) -> None:
    tool, _ = imported({"type": "object", "properties": {"x": schema}}, version)
    assert agrees(tool.parameters)
    _satisfied(tool)


# -- tools of MCP servers, and what models see -------------------------------------------------


def _tool(parameters: Any) -> ToolDefinition:
    return parse_definition(
        {"name": "tool", "type": "MCP", "description": "D.", "parameters": parameters}
    )


PAIR = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
ARGUMENTS = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}

OF_SERVERS: dict[str, tuple[Any, JsonObject]] = {
    "required without a property": ({"type": "object", "required": ["a"]}, {"a": 1}),
    "alternatives": ({"type": "object", **PAIR}, {"b": 1}),
    "described in alternatives": (
        {"type": "object", "anyOf": [{"properties": {"a": TEXT}, "required": ["a"]}]}, {"a": "x"}
    ),
    "reference at the root": (
        {"type": "object", "$ref": "#/$defs/Arguments", "$defs": {"Arguments": ARGUMENTS}},
        {"a": "x"},
    ),
    "conditions": (
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"],
         "if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]}},
        {"a": "x", "b": 2},
    ),
    "dependencies": (
        {"type": "object", "properties": {"a": TEXT}, "dependentRequired": {"a": ["b"]}},
        {"a": "x", "b": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dangerous", [False, True])
@pytest.mark.parametrize("name", OF_SERVERS)
def test_parameter_that_is_only_required_is_known(name: str, dangerous: bool) -> None:
    parameters, arguments = OF_SERVERS[name]
    tool = _tool(parameters).model_copy(update={"dangerous": dangerous})
    assert accepted(tool, arguments) == arguments
    unknown = {**arguments, "other": 1}  # the twin
    if dangerous:
        with pytest.raises(InvalidParams, match="other is not a parameter"):
            accepted(tool, unknown)
    else:
        assert accepted(tool, unknown) == arguments


def test_definition_that_no_call_could_fit_is_refused_with_the_reason() -> None:
    closed = {"type": "object", "required": ["a"], "additionalProperties": False}
    with pytest.raises(InvalidDefinition, match="'a' is not among the properties"):
        _tool(closed)
    _tool({**closed, "patternProperties": {"^a": {}}})
    _tool({**closed, "properties": {"a": {}}})


def parameters_in(exported: Any) -> list[Any]:
    """The schemas of parameters in an exported tool."""
    if isinstance(exported, list):
        return [found for item in exported for found in parameters_in(item)]
    if not isinstance(exported, dict):
        return []
    if exported.get("type") == "object" and "properties" in exported:
        return [exported]
    return [found for item in exported.values() for found in parameters_in(item)]


@given(bodies)
def test_what_a_model_may_send_by_an_export_is_accepted(schema: Any) -> None:
    tool, _ = imported({"type": "object", "properties": {"x": schema}})
    for name, made in FORMATS.items():
        exported, _ = made.tool(tool)
        (parameters,) = parameters_in(exported)
        assert agrees(parameters), (name, parameters)
        if name not in CHAT_FORMATS:
            continue
        sent = smallest(parameters, parameters)
        Draft202012Validator(parameters).validate(sent)
        own = restored(sent, tool.parameters, CHAT_FORMATS[name].dialect)
        assert accepted(tool, own).keys() >= own.keys()


@pytest.mark.parametrize("name", CHAT_FORMATS)
@pytest.mark.parametrize("case", ["required without a property", "reference at the root"])
def test_export_describes_every_required_parameter(name: str, case: str) -> None:
    parameters, arguments = OF_SERVERS[case]
    exported, _ = FORMATS[name].tool(_tool(parameters))
    (found,) = parameters_in(exported)
    assert list(found["properties"]) == list(arguments) == found["required"]


def test_gemini_alias_of_a_required_name_is_restored() -> None:
    tool = _tool({"type": "object", "required": ["größe"]})
    exported, _ = FORMATS["gemini"].tool(tool)
    (found,) = parameters_in(exported)
    (alias,) = found["required"]
    own = restored({alias: 5}, tool.parameters, CHAT_FORMATS["gemini"].dialect)
    assert accepted(tool, own) == {"größe": 5}
