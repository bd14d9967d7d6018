"""Registration: every fault of a definition is listed, and no empty promise is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood import CallOptions, InvalidDefinition, parse_definition
from fumehood.registry.definitions import (
    NOT_ENFORCED,
    check_definition,
    unenforced_options,
)
from fumehood.registry.json_schema import CompiledSchema
from fumehood.registry.schema_faults import schema_faults
from support.definitions import expression_document, function_definition, rest_document

# Field of a definition → a value that asks for its machinery, and one that does not.
PROMISES: dict[str, tuple[Any, Any]] = {
    "requires_auth": (True, False),
    "rate_limit": (100, None),
    "cacheable": (True, False),
    "cache_ttl": (60, None),
    "cache_key_params": (["expression"], None),
    "streaming": (True, False),
    "retry_count": (1, 0),
    "fallback": ("other", None),
    "endpoint": ("https://example.org/${secret:PATH}", "https://example.org/"),
    "headers": ({"authorization": "Bearer ${secret:KEY}"}, {"accept": "text/plain"}),
}
OPTIONS: dict[str, tuple[Any, Any]] = {
    "max_length": (10, None),
}


def _faults(document: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition(document)
    assert caught.value.details == {"faults": caught.value.faults}
    return caught.value.faults


def _document(field: str, value: Any) -> dict[str, Any]:
    make = rest_document if field in ("endpoint", "headers") else expression_document
    return make(**{field: value})


def test_the_tables_of_this_file_are_complete() -> None:
    assert PROMISES.keys() == NOT_ENFORCED["definition"].keys()
    assert OPTIONS.keys() == NOT_ENFORCED["options"].keys()


@pytest.mark.parametrize("field", PROMISES)
def test_field_without_machinery_is_refused_by_name(field: str) -> None:
    faults = _faults(_document(field, PROMISES[field][0]))
    promise = NOT_ENFORCED["definition"][field].promise
    assert faults == [f"{field}: not enforced by this version ({promise})"]


@pytest.mark.parametrize("field", PROMISES)
def test_the_same_field_at_its_default_is_accepted(field: str) -> None:
    parse_definition(_document(field, PROMISES[field][1]))


@pytest.mark.row("P11")
@pytest.mark.parametrize("option", OPTIONS)
def test_option_without_machinery_is_found_by_name(option: str) -> None:
    found = unenforced_options(CallOptions(**{option: OPTIONS[option][0]}))
    assert found == [(option, NOT_ENFORCED["options"][option].promise)]


@pytest.mark.row("P11")
@pytest.mark.parametrize("option", OPTIONS)
def test_the_same_option_asking_for_nothing_is_accepted(option: str) -> None:
    assert unenforced_options(CallOptions(**{option: OPTIONS[option][1]})) == []


@pytest.mark.row("S1", "S5")
def test_container_for_one_call_is_for_the_wall_to_refuse() -> None:
    assert unenforced_options(CallOptions(isolation="container_per_call")) == []


@pytest.mark.row("P11")
def test_all_unenforced_options_are_found_at_once() -> None:
    found = unenforced_options(CallOptions(max_length=5))
    assert [name for name, _ in found] == ["max_length"]


@pytest.mark.row("T1")
def test_every_fault_is_listed_at_once() -> None:
    faults = _faults(
        {
            "name": "1 bad name",
            "version": "1",
            "description": "",
            "executor": "expression",
            "sandboxed": False,
            "rate_limit": 5,
            "colour": "red",
            "parameters": {
                "properties": {
                    "a": {"type": "strin"},
                    "b": {"$ref": "https://example.org/s.json"},
                    "c": {"pattern": "("},
                    "d": {"$id": "d"},
                }
            },
        }
    )
    assert sorted({fault.split(":", 1)[0] for fault in faults}) == [
        "colour",
        "description",
        "name",
        "parameters",
        "parameters.properties.a.type",
        "parameters.properties.b.$ref",
        "parameters.properties.c",
        "parameters.properties.d.$id",
        "rate_limit",
        "sandboxed",
        "version",
    ]


def test_the_refusal_names_the_tool_and_the_wrong_fields() -> None:
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition(expression_document(version="x", colour=1))
    assert caught.value.message.startswith("the tool 'sums' cannot be registered: ")
    assert caught.value.fields == ("colour", "version")


# type, executor, sandboxed → the field at fault; None where they fit.
FIT = [
    ("NATIVE", "expression", True, None),
    ("BUILTIN", "expression", True, None),
    ("NATIVE", "function", False, None),
    ("NATIVE", None, False, None),
    ("BUILTIN", "function", False, None),
    ("NATIVE", "expression", False, "sandboxed"),
    ("BUILTIN", "expression", False, "sandboxed"),
    ("NATIVE", "function", True, None),
    ("NATIVE", None, True, None),
    ("BUILTIN", None, True, "executor"),
    ("NATIVE", "http", True, "executor"),
    ("NATIVE", "mcp", True, "executor"),
    ("BUILTIN", "http", True, "executor"),
    ("REST", None, True, None),
    ("REST", "http", True, None),
    ("REST", "http", False, "sandboxed"),
    ("REST", "mcp", True, "executor"),
    ("REST", "function", False, "executor"),
    ("REST", "expression", True, "executor"),
    ("MCP", None, True, None),
    ("MCP", "mcp", True, None),
    ("MCP", "mcp", False, "sandboxed"),
    ("MCP", "http", True, "executor"),
    ("NATIVE", "restricted_python", True, "parameters"),
    ("NATIVE", "code:python", True, "parameters"),
    ("NATIVE", "code:python", False, "sandboxed"),
    ("BUILTIN", "code:python", False, "sandboxed"),
    ("NATIVE", "code:cobol", True, "executor"),
    ("REST", "code:python", True, "executor"),
    ("MCP", "code:python", True, "executor"),
    ("NATIVE", "workspace", True, "executor"),
]


@pytest.mark.row("S1", "T6")
@pytest.mark.parametrize(("kind", "executor", "sandboxed", "at_fault"), FIT)
def test_type_executor_and_sandbox_must_fit(
    kind: str, executor: str | None, sandboxed: bool, at_fault: str | None
) -> None:
    make = rest_document if kind == "REST" else expression_document
    document = make(type=kind, sandboxed=sandboxed, executor=executor)
    if executor is None:
        del document["executor"]
    if at_fault is None:
        assert parse_definition(document).sandboxed is sandboxed
        return
    assert at_fault in {fault.split(":", 1)[0] for fault in _faults(document)}


def _code(properties: Any = None, **fields: Any) -> dict[str, Any]:
    named = {"code": {"type": "string"}} if properties is None else properties
    return expression_document(executor="code:python", parameters={"properties": named}, **fields)


@pytest.mark.row("S1", "T6")
def test_code_takes_its_own_arguments_and_no_others() -> None:
    assert parse_definition(_code()).executor == "code:python"
    every = {name: {} for name in ("code", "stdin", "files")}
    assert parse_definition(_code(every)).sandboxed is True
    assert _faults(_code({"stdin": {}})) == [
        "parameters: the executor 'code:python' needs a parameter 'code'"
    ]
    assert _faults(_code({**every, "env": {}, "argv": {}})) == [
        "parameters: the executor 'code:python' knows no parameter 'argv'",
        "parameters: the executor 'code:python' knows no parameter 'env'",
    ]


@pytest.mark.row("T2", "S4")
def test_code_needs_the_smallest_container_at_least() -> None:
    assert parse_definition(_code(memory_limit_mb=128)).memory_limit_mb == 128
    assert _faults(_code(memory_limit_mb=127)) == [
        "memory_limit_mb: a container needs at least 128"
    ]


@pytest.mark.row("S1", "R1")
@pytest.mark.parametrize("said", ["no", "false", 0, "0", False])
def test_what_the_model_reads_as_false_is_refused_like_false(said: Any) -> None:
    assert "sandboxed: the executor 'expression' always runs in its sandbox" in _faults(
        expression_document(sandboxed=said)
    )


@pytest.mark.row("T7")
def test_list_of_parameters_becomes_the_schema() -> None:
    listed = [{"name": "expression", "type": "string", "description": "What.", "max": 10}]
    definition = parse_definition(expression_document(parameters=listed))
    assert definition.parameters == {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "What.", "maxLength": 10}},
        "required": ["expression"],
    }
    assert parse_definition(definition.model_dump()) == definition


@pytest.mark.row("T7")
def test_faults_of_a_list_of_parameters_are_listed_with_all_others() -> None:
    listed = [
        {"name": "expression", "type": "string", "description": "What."},
        {"name": "precision", "type": "float", "description": "How."},
        {"name": "a b", "type": "integer", "description": "What."},
    ]
    faults = _faults(expression_document(parameters=listed, rate_limit=5))
    assert [fault.split(":", 1)[0] for fault in faults] == [
        "parameters.1.type",
        "parameters.2.name",
        "rate_limit",
    ]


@pytest.mark.row("T7", "P2")
def test_pattern_in_a_list_of_parameters_is_checked_like_any_other() -> None:
    listed = [{"name": "expression", "type": "string", "description": "What.", "pattern": "(?=a)"}]
    assert "RE2" in _faults(expression_document(parameters=listed))[0]


def test_memory_limit_on_a_host_function_is_refused() -> None:
    document = expression_document(executor="function", sandboxed=False, memory_limit_mb=64)
    assert _faults(document) == [
        "memory_limit_mb: it could not be enforced on a function in the host"
    ]


def test_expression_tool_needs_an_expression_and_knows_nothing_else() -> None:
    document = expression_document(parameters={"properties": {"zoom": {}, "alpha": {}}})
    assert _faults(document) == [
        "parameters: the executor 'expression' needs a parameter 'expression'",
        "parameters: the executor 'expression' knows no parameter 'alpha'",
        "parameters: the executor 'expression' knows no parameter 'zoom'",
    ]


def test_program_tool_needs_code_and_knows_nothing_else() -> None:
    document = expression_document(
        executor="restricted_python", sandboxed=False, memory_limit_mb=8,
        parameters={"properties": {"stdin": {}}},
    )  # fmt: skip
    assert _faults(document) == [
        "memory_limit_mb: the interpreter needs at least 16",
        "sandboxed: the executor 'restricted_python' always runs in its sandbox",
        "parameters: the executor 'restricted_python' needs a parameter 'code'",
        "parameters: the executor 'restricted_python' knows no parameter 'stdin'",
    ]
    document = expression_document(
        executor="restricted_python", parameters={"properties": {"code": {"type": "string"}}}
    )
    assert parse_definition(document).executor == "restricted_python"


@pytest.mark.row("P2")
@pytest.mark.parametrize("where", ["parameters", "output_schema"])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"expression": {"type": "strin"}}}, "not a valid JSON Schema"),
        ({"properties": {"expression": {"minLength": -1}}}, "not a valid JSON Schema"),
        ({"properties": {"expression": {"required": "a"}}}, "not a valid JSON Schema"),
        (
            {"properties": {"expression": {"$ref": "https://example.org/x"}}},
            "only references inside",
        ),
        ({"properties": {"expression": {"$ref": "file:///etc/passwd"}}}, "only references inside"),
        ({"properties": {"expression": {"$dynamicRef": "other#x"}}}, "only references inside"),
        ({"properties": {"expression": {"$ref": "#/$defs/none"}}}, "points at nothing"),
        ({"properties": {"expression": {"$ref": "#anchor"}}}, "only references inside"),
        ({"$id": "https://example.org/s", "properties": {"expression": {}}}, "has no $id"),
        ({"properties": {"expression": {"pattern": "(?=a)b"}}}, "RE2"),
        ({"properties": {"expression": {"pattern": "(a)\\1"}}}, "RE2"),
        ({"properties": {"expression": {"pattern": "("}}}, "RE2"),
        ({"properties": {"expression": {"patternProperties": {"[": {}}}}}, "RE2"),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "properties": {"expression": {}},
            },
            "neither draft 2020-12 nor draft 7",
        ),
    ],
)
def test_unsound_schema_is_refused_with_its_place(
    where: str, schema: dict[str, Any], words: str
) -> None:
    faults = _faults(expression_document(**{where: schema}))
    matching = [fault for fault in faults if words in fault]
    assert matching
    assert all(fault.startswith(where) for fault in matching)


@pytest.mark.row("P2")
@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
        {"$defs": {"a": {"type": "string"}}, "properties": {"expression": {"$ref": "#/$defs/a"}}},
        {"definitions": {"a": {}}, "properties": {"expression": {"$ref": "#/definitions/a"}}},
        {"properties": {"expression": {"pattern": "^(a+)+$"}}},
        {"properties": {"expression": {"$ref": "#/properties/precision"}, "precision": {}}},
    ],
)
def test_sound_schema_is_accepted(schema: dict[str, Any]) -> None:
    parameters = {"properties": {"expression": {}}, **schema}
    assert parse_definition(expression_document(parameters=parameters)).name == "sums"


@pytest.mark.parametrize("kind", ["array", "string", ["object", "null"]])
def test_root_of_the_parameters_must_be_an_object(kind: Any) -> None:
    document = expression_document(
        parameters={"type": kind, "properties": {"expression": {"type": "string"}}}
    )
    assert "parameters: the root of the schema must be an object" in _faults(document)


def test_a_definition_that_is_a_value_already_is_checked_the_same() -> None:
    good = function_definition()
    check_definition(good)
    with pytest.raises(InvalidDefinition, match="rate_limit"):
        check_definition(good.model_copy(update={"rate_limit": 5}))


def test_what_a_parsed_definition_says_is_what_the_document_said() -> None:
    document = expression_document(version="2.0.0", tags=["a"], cost_per_use="0.5")
    definition = parse_definition(document)
    assert parse_definition(definition.model_dump()) == definition
    assert parse_definition(definition.model_dump(mode="json")) == definition


@pytest.mark.row("P2", "T1")
@pytest.mark.parametrize(
    "fields",
    [
        {"type": ["NATIVE"]},
        {"type": {}},
        {"parameters": {"$schema": 7, "properties": {"expression": {}}}},
        {"parameters": {"required": ["a"], "properties": {"expression": {"$ref": "#/required/x"}}}},
        {"parameters": {"title": "t", "properties": {"expression": {"$ref": "#/title/x"}}}},
    ],
)
def test_wrong_definition_of_any_shape_ends_in_a_list_of_faults(fields: dict[str, Any]) -> None:
    assert _faults(expression_document(**fields))


@pytest.mark.row("P2")
@pytest.mark.parametrize("target", ["#/title", "#/required", "#/examples/0"])
def test_reference_to_what_is_no_schema_is_refused(target: str) -> None:
    parameters = {
        "title": "t",
        "required": ["expression"],
        "examples": [{"type": 5}],
        "properties": {"expression": {"$ref": target}},
    }
    assert _faults(expression_document(parameters=parameters))


@pytest.mark.row("P2")
def test_keyword_of_draft_7_is_enforced_or_refused() -> None:
    schema = {"type": "object", "dependencies": {"a": ["b"]}}
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"expression": schema},
    }
    assert schema_faults(parameters, "parameters") or CompiledSchema(parameters).violations(
        {"expression": {"a": 1}}
    )
