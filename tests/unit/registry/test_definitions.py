"""Registration: every fault of a definition is listed, and no empty promise is accepted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import Field

from fumehood.core.arguments import Arguments
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES, Language
from fumehood.core.part import Part, ToolKind
from fumehood.core.tool import CODE_OUTPUT, MAX_SCHEMA_DEPTH, SHELL_OUTPUT
from fumehood.pipeline.coerce import coerce
from fumehood.pipeline.retry import is_of_service
from fumehood.registry.arguments import all_arguments, argument_faults, argument_schema
from fumehood.registry.definitions import (
    METHODS,
    InvalidDefinition,
    parse_definition,
    rest_faults,
)
from fumehood.registry.index import RegisteredTool, Source, ToolIndex, tool_of_document
from fumehood.registry.json_schema import CompiledSchema, schema_faults, without_nils
from support.definitions import expression_document, rest_document


def _faults(document: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition(document)
    assert caught.value.details == {"faults": caught.value.faults}
    return caught.value.faults


@pytest.mark.row("T3")
@pytest.mark.parametrize("executor", sorted({*all_arguments(), "function", "http", "mcp"}))
def test_streaming_is_refused_for_executors_without_streaming(executor: str) -> None:
    kind = {"http": "REST", "mcp": "MCP"}.get(executor, "NATIVE")
    document = {"name": "a", "type": kind, "executor": executor, "description": "A.",
                "streaming": True}  # fmt: skip
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition({**document, "colour": "red"})
    said = [fault for fault in caught.value.faults if fault.startswith("streaming:")]
    is_refused = executor.startswith(("expression", "restricted", "mcp", "workspace", "process"))
    expected = f"streaming: the executor {executor!r} gives its result whole"
    assert said == ([expected] if is_refused else [])


@pytest.mark.row("B13")
@pytest.mark.parametrize("executor", sorted({*all_arguments(), "function", "http", "mcp"}))
def test_least_grade_is_refused_for_executors_outside_of_containers(executor: str) -> None:
    kind = {"http": "REST", "mcp": "MCP"}.get(executor, "NATIVE")
    document = {"name": "a", "type": kind, "executor": executor, "description": "A.",
                "least_grade": "kernel"}  # fmt: skip
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition({**document, "colour": "red"})
    said = [fault for fault in caught.value.faults if fault.startswith("least_grade:")]
    is_of_container = executor.startswith(("code:", "workspace:", "process:"))
    expected = "least_grade: only tools that run in containers can demand a grade"
    assert said == ([] if is_of_container else [expected])


CACHED: dict[str, Any] = {"cacheable": True, "read_only": True}


def _code(*properties: str, executor: str = "code:python", **fields: Any) -> dict[str, Any]:
    parameters = {"properties": {name: {"type": "string"} for name in properties}}
    return expression_document(executor=executor, parameters=parameters, **fields)


def _mcp(**fields: Any) -> dict[str, Any]:
    document = rest_document(type="MCP", **fields)
    del document["method"]
    return document


FORM = {"Content-Type": "application/x-www-form-urlencoded"}
IN_A_PATH = {
    "endpoint": "https://example.org/{city}/{days}.json",
    "parameters": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
OF_AN_OBJECT = {"properties": {"days": {"type": "object"}}, "required": ["days"]}
REFUSED: list[tuple[dict[str, Any], str | list[str]]] = [
    (expression_document(retry_count=1), "retry_count: the executor 'expression' calls no other service"),
    (expression_document(fallback="other@1.0.0"), "fallback: the executor 'expression' calls no other service"),
    (expression_document(cacheable=True), "cacheable: only for a tool that is read_only or idempotent"),
    (
        expression_document(cacheable=True, read_only=True, idempotent=False, dangerous=True),
        "cacheable: not for a dangerous tool, of which each call is decided by itself",
    ),
    (expression_document(cache_ttl=60), "cache_ttl: only for a tool that is cacheable"),
    (expression_document(cache_key_params=["expression"]), "cache_key_params: only for a tool that is cacheable"),
    (
        expression_document(**CACHED, cache_key_params=[]),
        "cache_key_params: empty, so that all calls would share one answer; leave it out",
    ),
    (
        expression_document(**CACHED, cache_key_params=["expression", "nothing"]),
        "cache_key_params: there is no parameter 'nothing'",
    ),
    (
        _code("path", executor="workspace:read", **CACHED),
        "cacheable: not for a tool that runs in a session, whose files change",
    ),
    (_code("stdin"), "parameters: the executor 'code:python' needs a parameter 'code'"),
    (
        _code("code", "stdin", "files", "cwd", "args"),
        [
            "parameters: the executor 'code:python' knows no parameter 'args'",
            "parameters: the executor 'code:python' knows no parameter 'cwd'",
        ],
    ),
    (
        _code("stdin", executor="code:shell"),
        "parameters: the executor 'code:shell' needs a parameter 'command' or 'argv'",
    ),
    (_code("code", memory_limit_mb=127), "memory_limit_mb: a container needs at least 128"),
    (
        _code("path", executor="workspace:read", memory_limit_mb=127),
        "memory_limit_mb: a container needs at least 128",
    ),
    (
        expression_document(executor="function", sandboxed=False, memory_limit_mb=64),
        "memory_limit_mb: it could not be enforced on a function in the host",
    ),
    (
        _code("zoom", "alpha", executor="expression"),
        [
            "parameters: the executor 'expression' needs a parameter 'expression'",
            "parameters: the executor 'expression' knows no parameter 'alpha'",
            "parameters: the executor 'expression' knows no parameter 'zoom'",
        ],
    ),
    (
        _code("stdin", executor="restricted_python", sandboxed=False, memory_limit_mb=8),
        [
            "memory_limit_mb: the interpreter needs at least 16",
            "sandboxed: the executor 'restricted_python' always runs in its sandbox",
            "parameters: the executor 'restricted_python' needs a parameter 'code'",
            "parameters: the executor 'restricted_python' knows no parameter 'stdin'",
        ],
    ),
    *(
        (expression_document(sandboxed=no), "sandboxed: the executor 'expression' always runs in its sandbox")
        for no in ("no", "false", 0, "0", False)
    ),
    *(
        (
            expression_document(parameters={"type": kind, "properties": {"expression": {}}}),
            "parameters: the root of the schema must be an object",
        )
        for kind in ("array", "string", ["object", "null"])
    ),
    *(
        (expression_document(type=kind, **{field: value}), f"{field}: does not fit a tool of type {kind}")
        for kind in ("NATIVE", "BUILTIN")
        for field, value in (
            ("endpoint", "https://example.org"), ("method", "GET"), ("headers", {}), ("timeout", 5),
        )
    ),
    ({**_mcp(), "method": "POST"}, "method: does not fit a tool of type MCP"),
    (
        rest_document(endpoint="https://example.org/{days}", parameters=OF_AN_OBJECT),
        ("endpoint: {days} needs a required parameter of that name, of the type string, integer, "
        "number or boolean"),
    ),
    (
        _mcp(endpoint="https://example.org/{city}"),
        ("endpoint: holds what a URL cannot (spaces, control characters, braces, a backslash, '#', "
        "letters beyond ASCII); write them as %XX, or leave them out"),
    ),
    (
        rest_document(method="POST", headers=FORM),
        "headers: 'content-type' must be a type of JSON, as the body is",
    ),
    *(
        (
            rest_document(method=method),
            "method: a REST tool needs one of DELETE, GET, HEAD, PATCH, POST, PUT",
        )
        for method in (None, "", "get", "CONNECT", "TRACE", "GET ", "GET / HTTP/1.1")
    ),
    *(
        (
            {**document, "sandboxed": False},
            (f"sandboxed: a definition of type {document['type']} cannot say false; only the "
            "operator's configuration may, and this version has no such setting"),
        )
        for document in (rest_document(), _mcp())
    ),
    *(
        (
            {**document, "memory_limit_mb": 64},
            f"memory_limit_mb: it could not be enforced on a tool of type {document['type']}",
        )
        for document in (rest_document(), _mcp())
    ),
]  # fmt: skip


@pytest.mark.row("P4", "P6", "P7", "S1", "T3")
@pytest.mark.parametrize(("document", "faults"), REFUSED)
def test_definition_that_does_not_fit_is_refused_by_name(
    document: dict[str, Any], faults: str | list[str]
) -> None:
    assert _faults(document) == ([faults] if isinstance(faults, str) else faults)


@pytest.mark.parametrize(
    "document",
    [
        rest_document(retry_count=1, fallback="weather_2"),
        expression_document(**CACHED),
        expression_document(cacheable=True, idempotent=True),
        expression_document(**CACHED, cache_ttl=60, cache_key_params=["expression"]),
        expression_document(cacheable=False, cache_ttl=None, cache_key_params=None),
        _code("code"),
        _code("code", "stdin", "files"),
        _code("code", memory_limit_mb=128),
        _code("command", executor="code:shell"),
        _code("argv", executor="code:shell"),
        _code("code", executor="restricted_python"),
        _mcp(),
        rest_document(timeout=86_400_000),
        *(
            expression_document(parameters={"properties": {"expression": {}}, **schema})
            for schema in (
                {"$schema": "https://json-schema.org/draft/2020-12/schema"},
                {"$schema": "http://json-schema.org/draft-07/schema#"},
                {"$schema": "http://json-schema.org/draft-06/schema#"},
                {"$schema": "http://json-schema.org/draft-04/schema#"},
                {"$schema": "https://json-schema.org/draft/2019-09/schema"},
                {"$schema": "http://json-schema.org/schema#"},
                {"$schema": "http://json-schema.org/draft-04/schema", "definitions": {"a": {}},
                 "properties": {"expression": {"$ref": "#/definitions/a"}}},
                {"$defs": {"a": {}}, "properties": {"expression": {"$ref": "#/$defs/a"}}},
                {"definitions": {"a": {}}, "properties": {"expression": {"$ref": "#/definitions/a"}}},
                {"properties": {"expression": {"pattern": "^(a+)+$"}}},
                {"properties": {"expression": {"$ref": "#/properties/precision"}, "precision": {}}},
            )
        ),
    ],
)  # fmt: skip
def test_fitting_definition_is_accepted(document: dict[str, Any]) -> None:
    definition = parse_definition(document)
    assert parse_definition(definition.model_dump(mode="json")) == definition


@pytest.mark.row("T1")
def test_all_definition_faults_are_listed_at_once() -> None:
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition({
            "name": "1 bad name",
            "version": "1",
            "description": "",
            "executor": "expression",
            "sandboxed": False,
            "streaming": True,
            "colour": "red",
            "parameters": {
                "properties": {
                    "a": {"type": "strin"},
                    "b": {"$ref": "https://example.org/s.json"},
                    "c": {"pattern": "("},
                    "d": {"$id": "d"},
                }
            },
        })  # fmt: skip
    assert caught.value.message.startswith("the tool '1 bad name' cannot be registered: ")
    assert list(caught.value.fields or ()) == [
        "colour",
        "description",
        "name",
        "parameters",
        "parameters.properties.a.type",
        "parameters.properties.b.$ref",
        "parameters.properties.c",
        "parameters.properties.d.$id",
        "sandboxed",
        "streaming",
        "version",
    ]


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
    ("BUILTIN", "http", True, "endpoint"),
    ("BUILTIN", "http:fetch", True, None),
    ("NATIVE", "http:fetch", True, "executor"),
    ("REST", "http:fetch", True, "executor"),
    ("MCP", "http:fetch", True, "executor"),
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


@pytest.mark.parametrize(
    "executor",
    [
        "code",
        "code:",
        "code:Python",
        "shell",
        "expression ",
        "decision",
        "net",
        "process",
        "",
        None,
    ],
)
@pytest.mark.parametrize("kind", ["NATIVE", "BUILTIN", "REST", "MCP"])
def test_executor_that_no_kind_of_tool_has_is_refused(kind: str, executor: str | None) -> None:
    document = {"name": "x", "description": "X.", "type": kind, "executor": executor}
    faults = _faults(document)
    assert any(fault.startswith("executor: ") for fault in faults)
    if executor:
        assert f"executor: {executor!r} is not enforced by this version" in faults


PLACE = {"place": "There", "why": "It is there."}


def test_executor_and_type_of_a_part_exist_only_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mcp = {"name": "x", "description": "X.", "type": "MCP"}
    document = {"name": "x", "description": "X.", "type": "BUILTIN", "executor": "mail"}
    with pytest.raises(InvalidDefinition, match="'mail' is not enforced by this version"):
        parse_definition(document)
    assert parse_definition(mcp).executor == "mcp"
    part = Part(name="mail", executors={"mail": ToolKind(executor="there:Mail", **PLACE)})
    monkeypatch.setattr("fumehood.parts.parts", lambda: (part,))
    assert parse_definition(document).executor == "mail"
    for executor in ("mcp", "function", "mail"):
        with pytest.raises(InvalidDefinition, match="type: MCP is not enforced by this version"):
            parse_definition({**mcp, "executor": executor})
    with pytest.raises(InvalidDefinition, match="only tools of type none can come from outside"):
        tool_of_document(mcp, Source.API)


def test_executor_of_a_part_for_built_in_tools_is_refused_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_builtin in (True, False):
        kind = ToolKind(executor="there:Mail", is_builtin=is_builtin, streams=is_builtin, **PLACE)
        part = Part(name="mail", executors={"mail": kind})
        monkeypatch.setattr("fumehood.parts.parts", lambda part=part: (part,))
        own = {"name": "x", "description": "X.", "executor": "mail"}
        assert parse_definition({**own, "type": "BUILTIN"}).executor == "mail"
        refused = "'mail' does not fit a tool of type NATIVE"
        with pytest.raises(InvalidDefinition, match=refused) if is_builtin else nullcontext():
            parse_definition({**own, "type": "NATIVE"})
        whole = "streaming: the executor 'mail' gives its result whole"
        with nullcontext() if is_builtin else pytest.raises(InvalidDefinition, match=whole):
            parse_definition({**own, "type": "BUILTIN", "streaming": True})


SENT = {"type": "object", "required": ["id"]}


class MailArguments(Arguments):
    source = "text"
    one_of = ("to", "address")
    exclusive = (("to", "address"),)

    text: str = Field(max_length=10)
    to: str | None = None
    address: str | None = None


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A part whose executor checks its arguments by a model."""
    monkeypatch.setitem(sys.modules, "there", sys.modules[__name__])
    kind = ToolKind(
        executor="there:Mail", arguments="there:MailArguments", output="there:SENT", **PLACE
    )
    part = Part(name="mail", executors={"mail": kind})
    monkeypatch.setattr("fumehood.parts.parts", lambda: (part,))
    all_arguments.cache_clear()
    yield
    all_arguments.cache_clear()


def _mail(*properties: str, **fields: Any) -> dict[str, Any]:
    return _code(*properties, executor="mail", **fields)


@pytest.mark.usefixtures("mail")
def test_definition_fits_the_arguments_of_a_parts_executor() -> None:
    assert parse_definition(_mail("text", "to")).executor == "mail"  # the twin
    assert _faults(_mail("cc", sandboxed=False, retry_count=1)) == [
        "sandboxed: the executor 'mail' always runs in its sandbox",
        "parameters: the executor 'mail' needs a parameter 'to' or 'address'",
        "parameters: the executor 'mail' needs a parameter 'text'",
        "parameters: the executor 'mail' knows no parameter 'cc'",
        "retry_count: the executor 'mail' calls no other service",
    ]


@pytest.mark.usefixtures("mail")
def test_memory_of_a_parts_executor_has_the_least_minimum() -> None:
    assert parse_definition(_mail("text", "to", memory_limit_mb=16))  # the twin
    assert _faults(_mail("text", "to", memory_limit_mb=15)) == [
        "memory_limit_mb: the There needs at least 16"
    ]


@pytest.mark.usefixtures("mail")
def test_only_the_schema_that_a_parts_executor_guarantees_is_not_checked() -> None:
    def registered(**fields: Any) -> RegisteredTool:
        definition = parse_definition(_mail("text", "to", **fields))
        return ToolIndex().register(definition, Source.PROGRAM)

    assert registered(output_schema=SENT).output is None
    assert registered(output_schema={**SENT, "required": []}).output is not None


@pytest.mark.usefixtures("mail")
def test_call_is_checked_by_the_arguments_of_a_parts_executor() -> None:
    tool = parse_definition(_mail("text", "to", "address"))
    given = {"text": "\ufeffa", "to": "b", "address": ""}
    assert coerce(given, tool) == ({"text": "a", "to": "b"}, ())
    assert argument_faults("mail", {"text": "a"}) == []
    assert argument_faults("mail", {"text": 11 * "a"}) == [
        ("text", "string should have at most 10 characters")
    ]
    assert argument_schema("mail")["properties"].keys() == {"text", "to", "address"}
    assert not is_of_service(tool)


@pytest.mark.row("S1", "T6")
@pytest.mark.parametrize(("kind", "executor", "sandboxed", "at_fault"), FIT)
def test_type_executor_and_sandboxed_must_be_consistent(
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


@pytest.mark.row("T7")
def test_faults_in_a_parameter_list_are_listed() -> None:
    listed = [
        {"name": "expression", "type": "string", "description": "What.", "pattern": "(?=a)"},
        {"name": "precision", "type": "float", "description": "How."},
        {"name": "a b", "type": "integer", "description": "What."},
    ]
    faults = _faults(expression_document(parameters=listed, streaming=True))
    assert [fault.split(":", 1)[0] for fault in faults] == [
        "parameters.1.type",
        "parameters.2.name",
        "parameters.properties.expression",
        "streaming",
    ]


@pytest.mark.row("P2")
@pytest.mark.parametrize("language", LANGUAGES.values(), ids=lambda language: language.name)
def test_only_the_schema_that_programs_guarantee_is_not_checked(language: Language) -> None:
    own, other = (CODE_OUTPUT, SHELL_OUTPUT) if language.has_value else (SHELL_OUTPUT, CODE_OUTPUT)

    def registered(output_schema: JsonObject) -> RegisteredTool:
        document = _code(language.source, executor=language.executor, output_schema=output_schema)
        return ToolIndex().register(parse_definition(document), Source.PROGRAM)

    assert registered(own).output is None
    assert registered(other).output is not None
    assert registered({**own, "required": []}).output is not None


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
        ({"properties": {"expression": {"$ref": "#/$defs/none"}}}, "has no target"),
        ({"properties": {"expression": {"$ref": "#anchor"}}}, "only references inside"),
        ({"$id": 5, "properties": {"expression": {}}}, "not a valid JSON Schema"),
        (
            {"$defs": 5, "properties": {"expression": {"$ref": "#/$defs/b"}}},
            "not a valid JSON Schema",
        ),
        (
            {"$defs": {"b": {"$id": 7}}, "properties": {"expression": {"$ref": "#/$defs/b"}}},
            "not a valid JSON Schema",
        ),
        (
            {"$id": "https://example.org/s", "properties": {"expression": {}}},
            "must not have an $id",
        ),
        ({"properties": {"expression": {"pattern": "(?=a)b"}}}, "RE2"),
        ({"properties": {"expression": {"pattern": "(a)\\1"}}}, "RE2"),
        ({"properties": {"expression": {"pattern": "("}}}, "RE2"),
        ({"properties": {"expression": {"patternProperties": {"[": {}}}}}, "RE2"),
        ({"properties": {"expression": {"pattern": "a{2000}"}}}, "RE2"),
        ({"properties": {"expression": {"unevaluatedProperties": False}}}, "unevaluatedProperties"),
        *(
            ({"$schema": f"http://json-schema.org/{draft}/schema#", **schema}, words)
            for draft, schema, words in (
                ("draft-03", {}, "not one of the drafts"),
                ("draft-05", {}, "not one of the drafts"),
                ("draft-04", {"properties": {"a": {"exclusiveMinimum": True}}}, "not a valid"),
                ("draft-04", {"properties": {"a": {"items": [{}]}}}, "not a valid"),
                ("draft-04", {"properties": {"a": {"required": True}}}, "not a valid"),
                ("draft-06", {"dependencies": {"a": ["b"]}}, "dependentRequired"),
                ("draft/2019-09", {"properties": {"a": {"$recursiveRef": "#"}}}, "$dynamicRef"),
                ("draft/2019-09", {"unevaluatedProperties": False}, "additionalProperties"),
            )
        ),
        ({"$schema": "http://json-schema.org.example/draft-04/schema#"}, "not one of the drafts"),
        ({"$schema": "https://example.org/schema"}, "not one of the drafts"),
    ],
)
def test_unsound_schema_is_refused_with_its_path(
    where: str, schema: dict[str, Any], words: str
) -> None:
    faults = _faults(expression_document(**{where: schema}))
    matching = [fault for fault in faults if words in fault]
    assert matching
    assert all(fault.startswith(where) for fault in matching)


@pytest.mark.row("P2", "T1")
@pytest.mark.parametrize(
    "fields",
    [
        {"cacheable": "perhaps"},
        {"cacheable": []},
        {**CACHED, "cache_ttl": 0},
        {**CACHED, "cache_key_params": "expression"},
        {**CACHED, "cache_key_params": [[]]},
        {**CACHED, "parameters": 7, "cache_key_params": ["a"]},
        {**CACHED, "parameters": {"properties": 7}, "cache_key_params": ["a"]},
        {**CACHED, "executor": 7},
        {"cacheable": "yes"},
        {"type": ["NATIVE"]},
        {"type": {}},
        {"parameters": {"$schema": 7, "properties": {"expression": {}}}},
        {"parameters": {"required": ["a"], "properties": {"expression": {"$ref": "#/required/x"}}}},
        {"parameters": {"title": "t", "properties": {"expression": {"$ref": "#/title/x"}}}},
        {"parameters": {"title": "t", "properties": {"expression": {"$ref": "#/title"}}}},
        {
            "parameters": {
                "required": ["expression"],
                "properties": {"expression": {"$ref": "#/required"}},
            }
        },
        {
            "parameters": {
                "examples": [{"type": 5}],
                "properties": {"expression": {"$ref": "#/examples/0"}},
            }
        },
    ],
)
def test_any_wrong_definition_yields_a_list_of_faults(fields: dict[str, Any]) -> None:
    assert _faults(expression_document(**fields))


@pytest.mark.row("P2")
def test_draft_7_keyword_is_enforced_or_refused() -> None:
    schema = {"type": "object", "dependencies": {"a": ["b"]}}
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"expression": schema},
    }
    assert schema_faults(parameters, "parameters") or CompiledSchema(parameters).violations(
        {"expression": {"a": 1}}
    )


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (None, {}),
        ([], {}),
        ({"type": "object", "properties": None, "required": None}, {"type": "object"}),
        ({"type": "object", "properties": [], "required": {}}, {"type": "object"}),
        (
            {"properties": {"a": {"type": "string", "enum": None, "description": None}, "b": None}},
            {"properties": {"a": {"type": "string"}, "b": {}}},
        ),
        (
            {"properties": {"a": {"items": None, "anyOf": [{"required": None}, {"type": "null"}]}}},
            {"properties": {"a": {"anyOf": [{}, {"type": "null"}]}}},
        ),
        ({"additionalProperties": [], "items": {"title": None}}, {"items": {}}),
        ({"$defs": {"x": {"required": None}}, "$schema": None}, {"$defs": {"x": {}}}),
        # Values that are compared, and names of properties, are no keywords.
        ({"const": None, "default": None}, {"const": None, "default": None}),
        ({"enum": [None, []], "required": ["a"]}, {"enum": [None, []], "required": ["a"]}),
        (
            {"properties": {"required": {}, "const": {"const": []}}, "additionalProperties": False},
            {"properties": {"required": {}, "const": {"const": []}}, "additionalProperties": False},
        ),
    ],
)
def test_nils_of_other_encoders_are_absent(schema: Any, expected: Any) -> None:
    assert without_nils(schema) == expected


def test_nils_are_left_in_a_schema_that_is_too_deep_to_be_accepted() -> None:
    schema: dict[str, Any] = {"required": None}
    for _ in range(MAX_SCHEMA_DEPTH):
        schema = {"not": schema}
    assert schema_faults(without_nils(schema), "parameters")


# -- REST and MCP tools --------------------------------------------------------------------


def _rest_faults(**fields: Any) -> list[str]:
    document = rest_document(**fields)
    return list(rest_faults({k: v for k, v in document.items() if v is not None}))


@pytest.mark.row("T5")
@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"endpoint": endpoint}
            for endpoint in (
                "https://example.org", "http://example.org:8080/a/b?q=%20x&max_tokens=5",
                "https://[::1]/", "https://127.0.0.1:1/", "https://a_b.example.org./~x;y=1",
                "https://xn--bcher-kva.example/", "https://example.org/authors?author=me",
                "https://example.org/?a=1&q={city}&n={city}", "https://example.org/?city={city}",
                "https://example.org/?api_key=${secret:KEY}",
            )
        ),
        *({"method": method} for method in METHODS),
        IN_A_PATH,
        {"method": "GET", "headers": FORM},
        {"method": "POST", "headers": {"content-type": "application/vnd.api+json"}},
        *(
            {"headers": headers}
            for headers in (
                {}, {"Accept": "application/json", "X-Author": "me"}, {"x-empty": ""},
                {"user-agent": "fumehood/1 (a; b)"}, {"x-max-tokens": "100"}, {"Idempotency-Key": "a"},
                {"authorization": "Bearer ${secret:KEY}"}, {"accept": "a", "x-api-key": "${secret:KEY}"},
            )
        ),
    ],
)  # fmt: skip
def test_sound_rest_field_is_accepted(fields: dict[str, Any]) -> None:
    assert _rest_faults(**fields) == []


ENDPOINTS = {
    "none": (None, "needs an https or http URL"),
    "relative": ("/v1/now", "must be an absolute URL"),
    "without a scheme": ("example.org/v1", "must be an absolute URL"),
    "without slashes": ("https:example.org", "must be an absolute URL"),
    "scheme in capitals": ("HTTPS://example.org", "must be an absolute URL"),
    "file": ("file:///etc/passwd", "must be an absolute URL"),
    "unix": ("unix:///run/x.sock", "must be an absolute URL"),
    "gopher": ("gopher://example.org/", "must be an absolute URL"),
    "user": ("https://me@example.org/", "user name or password"),
    "user and password": ("https://me:pw@example.org/", "user name or password"),
    "empty user": ("https://@example.org/", "user name or password"),
    "host and port in the user": ("https://example.org:443@evil.example/", "user name or password"),
    "no host": ("https:///v1", "no valid host"),
    "no host but a port": ("https://:443/v1", "no valid host"),
    "host with an empty label": ("https://a..b/", "no valid host"),
    "host with a dash before": ("https://-a.example/", "no valid host"),
    "label over 63": (f"https://{'a' * 64}.example/", "no valid host"),
    "host in percent": ("https://exa%6dple.org/", "no valid host"),
    "port over 65535": ("https://example.org:65536/", "not a URL"),
    "port of words": ("https://example.org:http/", "not a URL"),
    "port 0": ("https://example.org:0/", "no valid host or port"),
    "bracket left open": ("https://[::1/", "not a URL"),
    "address of letters": ("https://[v1.x]/", "valid host|not a URL"),
    "space": ("https://example.org/a b", "what a URL cannot"),
    "line end": ("https://example.org/\r\nx: y", "what a URL cannot"),
    "line end after": ("https://example.org/\n", "what a URL cannot"),
    "NUL": ("https://example.org/\0", "what a URL cannot"),
    "backslash": ("https://example.org\\@evil.example/", "what a URL cannot"),
    "fragment": ("https://example.org/#a", "what a URL cannot"),
    "braces": ("https://example.org/{city", "what a URL cannot"),
    "braces in the host": ("https://{city}.example.org/", "what a URL cannot"),
    "braces as the host": ("https://{city}", "what a URL cannot"),
    "part of a value in the query": ("https://example.org/?a=x{city}", "what a URL cannot"),
    "place in the query for nothing": ("https://example.org/?a={town}", "needs a parameter"),
    "place of a name in the query": ("https://example.org/?{city}=a", "what a URL cannot"),
    "place without a parameter": ("https://example.org/{town}", "needs a required parameter"),
    "place of an optional parameter": ("https://example.org/{city}", "needs a required parameter"),
    "parameter in the query": ("https://example.org/?city=x", "which is a parameter too"),
    "secret in the path": ("https://example.org/${secret:A}", "in the query only"),
    "broken escape": ("https://example.org/%zz", "what a URL cannot"),
    "letters beyond ASCII": ("https://bücher.example/", "what a URL cannot"),
    "full-width slash": ("https://example.org／evil", "what a URL cannot"),
    "empty": ("", "what a URL cannot"),
    "too long": ("https://example.org/" + "a" * 2048, "longer than"),
    "reference that is none": ("https://example.org/${SECRET}", "what a URL cannot"),
    "secret as host": ("https://${secret:HOST}/x", "cannot decide which host"),
    "secret as part of a host": ("https://a.${secret:HOST}.example/x", "cannot decide which host"),
    "key in the query": ("https://example.org/?api_key=abc123", "looks like a credential"),
    "token in the query": ("https://example.org/?a=1&access_token=abc", "looks like a credential"),
    "bearer in the query": ("https://example.org/?q=Bearer%20abc", "looks like a credential"),
}


ITEMS = {"items": "/found"}
PAGED = {**ITEMS, "cursor_parameter": "page", "counts": "pages"}
WITH_CURSOR = {"city": {"type": "string"}, "cursor": {"type": "string"}}


@pytest.mark.row("T5", "E5")
@pytest.mark.parametrize(
    ("response", "fields", "words"),
    [
        ({}, {}, "needs `items`, `fields` or both"),
        ({"items": "found"}, {}, "should match pattern"),
        ({"items": "/a~2"}, {}, "should match pattern"),
        ({"fields": {}}, {}, "at least 1"),
        ({**ITEMS, "next_link": "Link"}, {}, "Extra inputs"),
        ({"fields": {"a": "/a"}, "total_count": "/n"}, {}, "pages are of `items`"),
        ({**ITEMS, "next_cursor": "/next"}, {}, "pages need `cursor_parameter`"),
        ({**ITEMS, "cursor_parameter": "page"}, {}, "pages need `cursor_parameter` and one of"),
        ({**PAGED, "next_url": "/next"}, {}, "pages need `cursor_parameter` and one of"),
        ({**ITEMS, "first": 1}, {}, "`first` goes with `counts`"),
        (PAGED, {"parameters": {"properties": {}}}, "need an optional parameter 'cursor'"),
        (PAGED, {"parameters": {"properties": WITH_CURSOR, "required": ["cursor"]}}, "optional"),
        (ITEMS, {"method": "HEAD"}, "has no body"),
        (ITEMS, {"type": "MCP", "method": None}, "does not fit a tool of type MCP"),
    ],
)
def test_unusable_response_mapping_is_refused(
    response: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    sound = {"parameters": {"properties": WITH_CURSOR}, "response": response}
    document = rest_document(**{**sound, **fields})
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition({k: v for k, v in document.items() if v is not None})
    assert [fault for fault in caught.value.faults if words in fault], caught.value.faults
    twin = parse_definition(rest_document(**{**sound, "response": PAGED}))
    assert twin.response is not None
    assert parse_definition(twin.model_dump()) == twin


HEADERS: dict[str, tuple[dict[str, str], str]] = {
    "line end in a value": ({"x": "a\r\nhost: evil"}, "control characters"),
    "line end after a value": ({"x": "a\n"}, "control characters"),
    "NUL in a value": ({"x": "a\0"}, "control characters"),
    "letters beyond ASCII": ({"x": "ä"}, "beyond ASCII"),
    "space around a value": ({"x": " a"}, "space around it"),
    "a value too long": ({"x": "a" * 4097}, "4096"),
    "space in a name": ({"x y": "a"}, "not a header's name"),
    "colon in a name": ({"x:": "a"}, "not a header's name"),
    "line end in a name": ({"x\n": "a"}, "not a header's name"),
    "no name": ({"": "a"}, "not a header's name"),
    "host": ({"Host": "evil.example"}, "belongs to the connection"),
    "length": ({"content-length": "3"}, "belongs to the connection"),
    "chunks": ({"Transfer-Encoding": "chunked"}, "belongs to the connection"),
    "reference of another form": ({"x": "${env:HOME}"}, "an unknown form"),
    "reference left open": ({"x": "${secret:A"}, "an unknown form"),
    **{
        f"literal {name}": ({name: "abc"}, "looks like a credential")
        for name in (
            "Authorization", "proxy-authorization", "X-API-Key", "api_key", "apikey", "Cookie",
            "X-Auth-Token", "X-Access-Token", "PRIVATE-TOKEN", "Ocp-Apim-Subscription-Key",
            "x-client-secret", "X-Amz-Signature", "x-session-id", "x-password", "key",
        )
    },
    **{
        f"value {value}": ({"x-plain": value}, "looks like a credential")
        for value in ("Bearer abc", "basic abc", "sk-abcdef", "ghp_abc", "AKIAABC", "eyJhbGciOi")
    },
}  # fmt: skip


@pytest.mark.row("T5")
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("endpoint", *row) for row in ENDPOINTS.values()]
    + [("headers", *row) for row in HEADERS.values()],
    ids=[*ENDPOINTS, *HEADERS],
)
def test_endpoint_that_is_not_a_plain_url_and_invalid_or_secret_header_are_refused(
    field: str, value: Any, words: str
) -> None:
    faults = _rest_faults(**{field: value})
    assert len(faults) == 1, faults
    assert faults[0].startswith(f"{field}: ")
    assert any(word in faults[0] for word in words.split("|"))


@pytest.mark.row("T5", "E8")
def test_refusal_of_a_literal_credential_does_not_reveal_it() -> None:
    headers = {"authorization": "Bearer hunter2hunter2"}
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition(rest_document(headers=headers, endpoint="https://a.example/?key=hunter2"))
    assert "${secret:NAME}" in caught.value.message
    assert "hunter2" not in caught.value.message
    assert "hunter2" not in str(caught.value.details)
