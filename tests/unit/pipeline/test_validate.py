"""Parsing, coercion, validation and authorization of requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.errors import (
    ArgumentsRefused,
    EngineError,
    InvalidParams,
    ToolDisabled,
    ToolError,
)
from fumehood.core.tool import ToolDefinition, ToolType
from fumehood.identity.model import Binding
from fumehood.pipeline.coerce import coerce, refuses_unknown
from fumehood.pipeline.incoming import parse_call_body
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall, mask_fixed_arguments, validate
from fumehood_tools.run_shell import run_shell
from fumehood_tools.write_file import write_file
from support.definitions import function_definition, registered, request


def test_unknown_body_keys_are_named_in_a_short_message() -> None:
    with pytest.raises(InvalidParams) as refused:
        parse_call_body({"options": {"memory_mb": 1, "x" * 5000: 2}})
    assert refused.value.fields[0] == "options.memory_mb"
    assert len(str(refused.value)) < 1000


# -- Coercion ------------------------------------------------------------------------------

UNCHANGED = "unchanged"

# type, given, expected; UNCHANGED where validation is left to refuse it.
TABLE: list[tuple[str, Any, Any]] = [
    ("integer", "10", 10),
    ("integer", " -7 ", -7),
    ("integer", "+7", 7),
    ("integer", 3.0, 3),
    ("integer", -0.0, 0),
    ("integer", "9" * 300, int("9" * 300)),
    ("integer", "9" * 301, UNCHANGED),
    ("integer", 3.5, UNCHANGED),
    ("integer", "3.0", UNCHANGED),
    ("integer", "1e3", UNCHANGED),
    ("integer", "0x10", UNCHANGED),
    ("integer", "1_000", UNCHANGED),
    ("integer", "١٢", UNCHANGED),
    ("integer", "ten", UNCHANGED),
    ("integer", "", UNCHANGED),
    ("integer", True, UNCHANGED),
    ("integer", None, UNCHANGED),
    ("integer", ["1"], UNCHANGED),
    ("number", "1.5", 1.5),
    ("number", ".5", 0.5),
    ("number", "5.", 5.0),
    ("number", "1e3", 1000.0),
    ("number", "10", 10.0),
    ("number", "1e999", UNCHANGED),
    ("number", "nan", UNCHANGED),
    ("number", "inf", UNCHANGED),
    ("number", "1,5", UNCHANGED),
    ("number", "1_0", UNCHANGED),
    ("number", False, UNCHANGED),
    ("boolean", "yes", True),
    ("boolean", " TRUE ", True),
    ("boolean", "On", True),
    ("boolean", "1", True),
    ("boolean", "no", False),
    ("boolean", "FALSE", False),
    ("boolean", "off", False),
    ("boolean", "0", False),
    ("boolean", "maybe", UNCHANGED),
    ("boolean", 1, UNCHANGED),
    ("boolean", 0, UNCHANGED),
    ("string", 5, UNCHANGED),
    ("string", None, UNCHANGED),
    ("array", "a", UNCHANGED),
    ("object", "{}", UNCHANGED),
    ("null", "null", UNCHANGED),
]


@pytest.mark.row("P1")
@pytest.mark.parametrize(("kind", "value", "expected"), TABLE)
def test_coercion_accepts_only_the_listed_forms(kind: str, value: Any, expected: Any) -> None:
    tool = function_definition({"a": {"type": kind}})
    effective, warnings = coerce({"a": value}, tool)
    if isinstance(expected, str) and expected == UNCHANGED:
        assert effective["a"] is value
        assert warnings == ()
    else:
        assert effective["a"] == expected
        assert type(effective["a"]) is type(expected)
        assert len(warnings) == 1
        assert warnings[0].startswith("a: ")


@pytest.mark.row("P1")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["integer", "null"]},
        {"anyOf": [{"type": "integer"}]},
        {"enum": [10]},
        {"$ref": "#/$defs/n"},
        {},
        True,
    ],
)
def test_only_properties_of_one_plain_type_are_coerced(schema: Any) -> None:
    tool = function_definition({"a": schema}, schema={"$defs": {"n": {"type": "integer"}}})
    assert coerce({"a": "10"}, tool) == ({"a": "10"}, ())


@pytest.mark.row("P1")
def test_nested_values_are_not_coerced() -> None:
    tool = function_definition(
        {"a": {"type": "object", "properties": {"n": {"type": "integer"}}}, "b": {"type": "array"}}
    )
    arguments = {"a": {"n": "10"}, "b": ["10"]}
    assert coerce(arguments, tool) == (arguments, ())


BOUNDED = {"a": {"type": "integer", "minimum": 1, "maximum": 10}}


@pytest.mark.row("P1")
@pytest.mark.parametrize(
    ("value", "used"), [(0, 1), (99, 10), ("99", 10), (5, 5), (1, 1), (10, 10)]
)
def test_numbers_are_clamped_only_for_read_only_tools(value: Any, used: int) -> None:
    effective, warnings = coerce({"a": value}, function_definition(BOUNDED, read_only=True))
    assert effective == {"a": used}
    assert len(warnings) == (value == "99") + (value not in (5, used))
    assert coerce({"a": 99}, function_definition(BOUNDED)) == ({"a": 99}, ())  # control: it writes


@pytest.mark.row("P1")
def test_exclusive_bounds_do_not_clamp() -> None:
    schema = {"a": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}}
    assert coerce({"a": 7}, function_definition(schema, read_only=True)) == ({"a": 7}, ())


@pytest.mark.row("P1")
def test_unknown_parameter_is_dropped_with_a_warning() -> None:
    effective, warnings = coerce({"a": 1, "b": 2}, function_definition({"a": {}}))
    assert effective == {"a": 1}
    assert warnings == ("unknown parameter 'b' was dropped",)


@pytest.mark.row("P1")
def test_long_name_of_an_unknown_parameter_is_shortened_and_escaped() -> None:
    _, warnings = coerce({"é" * 5000: 1}, function_definition())
    assert len(warnings[0]) < 100
    assert "é" not in warnings[0]


@pytest.mark.row("P1")
@pytest.mark.parametrize(
    "schema",
    [{"additionalProperties": False}, {"additionalProperties": True}, {"patternProperties": {}}],
)
def test_schema_with_additional_or_pattern_properties_keeps_unknown_parameters(
    schema: dict[str, Any],
) -> None:
    tool = function_definition({"a": {}}, schema=schema)
    assert coerce({"b": 2}, tool) == ({"b": 2}, ())
    assert not refuses_unknown(tool)


def test_defaults_are_filled_in_without_a_warning() -> None:
    tool = function_definition({"a": {"default": 5}, "b": {"default": None}, "c": {}, "d": True})
    assert coerce({}, tool) == ({"a": 5, "b": None}, ())
    assert coerce({"a": None}, tool) == ({"a": None, "b": None}, ())


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-20, 20)
    | st.floats(-20, 20)
    | st.sampled_from(["yes", "0", "10", "-3", "2.5", "1e2", "x", "", " 7 "])
)
schemas = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number", "boolean", "string"])},
    optional={"minimum": st.integers(-5, 0), "maximum": st.integers(1, 5)},
)
properties = st.dictionaries(st.sampled_from("abc"), schemas)
arguments_of_calls = st.dictionaries(st.sampled_from("abcd"), scalars)


@pytest.mark.row("P1")
@given(properties, arguments_of_calls, st.sampled_from(["strict", "dangerous"]), st.booleans())
def test_arguments_of_strict_and_dangerous_tools_are_never_changed(
    declared: dict[str, Any], arguments: dict[str, Any], kind: str, read_only: bool
) -> None:
    tool = function_definition(declared, read_only=read_only, **{kind: True})
    assert coerce(arguments, tool) == (arguments, ())


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in before.items()
        if name not in after or type(after[name]) is not type(value) or after[name] != value
    ]


@pytest.mark.row("P1")
@given(properties, arguments_of_calls, st.booleans())
def test_coercion_warnings_match_the_changes_exactly(
    declared: dict[str, Any], arguments: dict[str, Any], read_only: bool
) -> None:
    effective, warnings = coerce(arguments, function_definition(declared, read_only=read_only))
    changed = _changes(arguments, effective)
    for name in arguments:
        told = [w for w in warnings if w.startswith(f"{name}: ") or f"parameter '{name}'" in w]
        assert bool(told) == (name in changed)


BOTH_FILES = [{"path": "a", "content": "x", "content_base64": ""}]


@pytest.mark.row("P1")
@pytest.mark.parametrize(
    ("tool", "arguments", "effective"),
    [
        (run_shell, {"command": "ls", "argv": []}, {"command": "ls"}),
        (run_shell, {"command": "", "argv": ["ls"]}, {"argv": ["ls"]}),
        (
            run_shell,
            {"command": "ls", "argv": [], "stdin": "", "stdin_base64": "", "files": []},
            {"command": "ls", "stdin": "", "files": []},
        ),
        (
            run_shell,
            {"command": "ls", "stdin": "", "stdin_base64": "AA=="},
            {"command": "ls", "stdin_base64": "AA=="},
        ),
        (
            run_shell,
            {"command": "ls", "files": BOTH_FILES},
            {"command": "ls", "files": [{"path": "a", "content": "x"}]},
        ),
        (write_file, {"path": "a", "content": ""}, {"path": "a", "content": ""}),
        (
            write_file,
            {"path": "a", "content": "", "content_base64": ""},
            {"path": "a", "content": ""},
        ),
        (
            write_file,
            {"path": "a", "content": "", "content_base64": "AA=="},
            {"path": "a", "content_base64": "AA=="},
        ),
    ],
)
def test_empty_exclusive_parameter_counts_as_omitted(
    tool: ToolDefinition, arguments: dict[str, Any], effective: dict[str, Any]
) -> None:
    for dangerous in (False, True):
        own = {"type": ToolType.NATIVE, "dangerous": dangerous}
        known = registered(tool.model_copy(update=own))
        validated = validate(ResolvedCall(request(arguments=arguments), known, ()))
        assert validated.arguments == effective


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "ls", "argv": ["ls"]},
        {"argv": []},
        {"command": ""},
        {"command": "", "argv": []},
        {"command": "ls", "stdin": "a", "stdin_base64": "AA=="},
    ],
)
def test_two_nonempty_or_two_empty_exclusive_parameters_are_refused(
    arguments: dict[str, Any],
) -> None:
    known = registered(run_shell.model_copy(update={"type": ToolType.NATIVE}))
    with pytest.raises(InvalidParams, match="The arguments are wrong: "):
        validate(ResolvedCall(request(arguments=arguments), known, ()))


# -- Validate ------------------------------------------------------------------------------

PROPERTIES = {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}, "c": {"type": "string"}}
REQUIRED = {"required": ["a"]}


def _validate(
    arguments: dict[str, Any], schema: Any = REQUIRED, options: Any = None, **fields: Any
) -> ValidatedCall:
    tool = registered(function_definition(PROPERTIES, schema=schema, **fields))
    call = request(arguments=arguments, **(options or {}))
    return validate(ResolvedCall(call, tool, ("from before",)))


def _refusal(arguments: dict[str, Any], **more: Any) -> InvalidParams:
    with pytest.raises(InvalidParams) as caught:
        _validate(arguments, **more)
    return caught.value


@pytest.mark.row("P1")
def test_validated_call_has_effective_arguments_and_all_warnings() -> None:
    validated = _validate({"a": "5", "z": 1})
    assert validated.arguments == {"a": 5}
    assert validated.warnings == (
        "from before",
        "a: a string was read as integer",
        "unknown parameter 'z' was dropped",
    )


@pytest.mark.row("P2")
def test_every_invalid_path_is_named_with_allowed_values() -> None:
    refusal = _refusal({"a": "five", "b": "z", "c": 1})
    assert sorted(refusal.fields) == ["a", "b", "c"]
    assert 'b must be one of "x", "y"' in refusal.message
    assert "five" not in refusal.message


@pytest.mark.row("P2")
def test_long_list_of_faults_is_counted_in_message_and_complete_in_fields() -> None:
    names = [f"n{i}" for i in range(12)]
    tool = registered(function_definition(schema={"required": names}))
    with pytest.raises(InvalidParams, match="and 7 more") as caught:
        validate(ResolvedCall(request(), tool, ()))
    assert list(caught.value.fields) == names


@pytest.mark.row("P1")
@pytest.mark.parametrize("fields", [{"strict": True}, {"dangerous": True}])
def test_strict_and_dangerous_tools_refuse_wrong_types_and_unknown_parameters(
    fields: dict[str, Any],
) -> None:
    assert _refusal({"a": "5"}, **fields).fields == ("a",)
    refusal = _refusal({"a": 5, "zz": 1}, **fields)
    assert refusal.fields == ("zz",)
    assert "zz is not a parameter of this tool" in refusal.message


@pytest.mark.row("P2")
def test_arguments_too_expensive_to_validate_are_refused() -> None:
    tool = registered(
        function_definition({"a": {"items": {"allOf": [{"type": "integer"}, {"minimum": 0}]}}})
    )
    with pytest.raises(InvalidParams, match="too large to check"):
        validate(ResolvedCall(request(arguments={"a": [1] * 250_000}), tool, ()))


# -- for an agent --------------------------------------------------------------------------


def _for_agent(
    arguments: dict[str, Any], *, schema: Any = REQUIRED, tool: Any = None, **binding: Any
) -> ValidatedCall:
    definition = function_definition(PROPERTIES, schema=schema, **(tool or {}))
    bound = Binding(tool="act", **binding)
    call = request(arguments=arguments, agent_id="a")
    return validate(ResolvedCall(call, registered(definition), (), bound))


@pytest.mark.row("R3")
def test_fixed_arguments_reach_the_tool_but_are_not_shown() -> None:
    validated = _for_agent({"b": "x"}, fixed={"a": 5})
    assert validated.arguments == {"a": 5, "b": "x"}
    assert validated.shown_arguments == {"b": "x"}
    assert validated.warnings == ()


@pytest.mark.row("R3", "P1")
@pytest.mark.parametrize("fields", [{"strict": True}, {"dangerous": True}])
def test_fixed_parameter_is_never_suggested_for_a_misspelt_one(
    fields: dict[str, Any],
) -> None:
    definition = function_definition({"recipient": {}, "account": {}}, **fields)
    for fixed, said in (
        ({}, " (did you mean 'account'?)."),
        ({"account": 7}, ". Its parameters: 'recipient'."),
    ):
        call = request(arguments={"acount": 1}, agent_id="a")
        bound = Binding(tool="act", fixed=fixed)
        with pytest.raises(InvalidParams) as caught:
            validate(ResolvedCall(call, registered(definition), (), bound))
        assert caught.value.message == (
            f"The arguments are wrong: acount is not a parameter of this tool{said}"
        )


@pytest.mark.row("P2")
@pytest.mark.parametrize(
    ("properties", "said"),
    [
        (
            {"working_directory": {}, "command": {}},
            "Its parameters: 'command', 'working_directory'.",
        ),
        ({f"p{n}": {} for n in range(11)}, "'p5', 'p6', 'p7' and 3 more."),
        ({}, "It has no parameters."),
    ],
)
def test_unknown_parameter_without_similar_name_lists_all_parameters(
    properties: dict[str, Any], said: str
) -> None:
    required = {"required": ["command"]} if "command" in properties else {}
    definition = function_definition(properties, strict=True, schema=required)
    call = request(arguments={"zzzzzz": 1, "xxxxxx": 1, "command": ""})
    with pytest.raises(InvalidParams) as caught:
        validate(ResolvedCall(call, registered(definition), ()))
    assert caught.value.message.endswith(said)


@pytest.mark.row("R3")
@pytest.mark.parametrize("tool", [{}, {"strict": True}, {"dangerous": True}])
@pytest.mark.parametrize("given", [5, 6, None, {"deep": [1]}])
def test_fixed_argument_cannot_be_given_even_with_its_own_value(
    tool: dict[str, Any], given: Any
) -> None:
    with pytest.raises(InvalidParams) as caught:
        _for_agent({"a": given}, fixed={"a": 5}, tool=tool)
    assert caught.value.fields == ("a",)
    assert caught.value.message == (
        "The arguments are wrong: a is not a parameter of this tool. Its parameters: 'b', 'c'."
    )


@pytest.mark.row("R3")
def test_similar_names_do_not_override_a_fixed_argument() -> None:
    validated = _for_agent({"A": 6, "a ": 7, "a.b": 8}, fixed={"a": 5})
    assert validated.arguments == {"a": 5}


@pytest.mark.row("R3")
def test_agent_defaults_apply_only_to_omitted_arguments() -> None:
    assert _for_agent({}, defaults={"a": 5, "b": "x"}).arguments == {"a": 5, "b": "x"}
    given = _for_agent({"a": 6}, defaults={"a": 5, "b": "x"})
    assert given.arguments == {"a": 6, "b": "x"}
    assert given.shown_arguments == given.arguments
    # The agent's default comes before the tool's.
    schema = {"properties": {"a": {"type": "integer", "default": 1}}}
    assert _for_agent({}, schema=schema, defaults={"a": 5}).arguments["a"] == 5
    assert _for_agent({}, schema=schema).arguments["a"] == 1


@pytest.mark.row("R3")
def test_tool_cannot_modify_configured_arguments() -> None:
    fixed, defaults = {"b": {"k": [1]}}, {"c": {"k": [1]}}
    schema = {"properties": {"b": {}, "c": {}}}
    bound = Binding(tool="act", fixed=fixed, defaults=defaults)
    tool = registered(function_definition(schema=schema))
    for _ in range(2):
        resolved = ResolvedCall(request(agent_id="a"), tool, (), bound)
        arguments = validate(resolved).arguments
        arguments["b"]["k"].append(2)
        arguments["c"]["k"].append(2)
    assert (bound.fixed, bound.defaults) == ({"b": {"k": [1]}}, {"c": {"k": [1]}})


@pytest.mark.row("R3")
@pytest.mark.parametrize(
    ("fixed", "schema", "tool"),
    [
        ({"a": "PRIVATE"}, REQUIRED, {}),
        ({"b": "PRIVATE"}, {}, {}),
        ({"c": {"PRIVATE": 1}}, {}, {}),
        ({"d": "PRIVATE"}, {"additionalProperties": False}, {}),
        ({"d": "PRIVATE"}, {}, {"strict": True}),
        ({"d": "PRIVATE"}, {}, {"dangerous": True}),
        ({"o": {"in": "PRIVATE"}}, {"properties": {"o": {"properties": {"in": {"const": 1}}}}}, {}),
    ],
)
def test_invalid_fixed_argument_is_refused_without_revealing_it(
    fixed: dict[str, Any], schema: Any, tool: dict[str, Any]
) -> None:
    arguments = {} if "a" in fixed else {"a": 5}
    with pytest.raises(ToolDisabled) as caught:
        _for_agent(arguments, fixed=fixed, schema=schema, tool=tool)
    assert "configuration" in caught.value.message
    assert caught.value.fields == ()
    for word in ("PRIVATE", "'a'", "'b'", "'d'", "parameter"):
        assert word not in caught.value.message


@pytest.mark.row("R3")
def test_callers_own_fault_is_reported_without_fixed_arguments() -> None:
    with pytest.raises(InvalidParams) as caught:
        _for_agent({"b": "z"}, fixed={"a": 5, "c": "PRIVATE"})
    assert caught.value.fields == ("b",)
    assert "PRIVATE" not in caught.value.message


@pytest.mark.row("R3")
@pytest.mark.parametrize(
    ("error", "hidden"),
    [
        (ArgumentsRefused("a: PRIVATE", fields=["a"]), True),
        (ArgumentsRefused("a.b: PRIVATE", fields=["b", "a.b"]), True),
        (ArgumentsRefused("b: wrong", fields=["b"]), False),
        (ToolError("CITY_NOT_FOUND", "no"), False),
        (None, False),
    ],
)
def test_function_error_about_a_fixed_argument_is_masked(
    error: EngineError | None, hidden: bool
) -> None:
    shown = mask_fixed_arguments(error, _for_agent({}, fixed={"a": 5}))
    if hidden:
        assert isinstance(shown, ToolDisabled)
        assert "PRIVATE" not in shown.message
        assert (
            mask_fixed_arguments(error, _for_agent({"a": 5})) is error
        )  # control: nothing is fixed
    else:
        assert shown is error


# -- Arguments that are right as they are --------------------------------------------------

PLAIN = st.one_of(
    st.sampled_from([{"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}]),
    st.just({"type": "number", "maximum": 3, "default": 2}),
    st.just({"type": "string", "maxLength": 2, "default": "x"}),
)
VALUE = st.one_of(
    st.text("1x", max_size=3), st.integers(-3, 5), st.floats(-3, 5), st.booleans(), st.none()
)


@given(
    st.dictionaries(st.sampled_from("abc"), PLAIN),
    st.dictionaries(st.sampled_from("abcd"), VALUE),
    st.booleans(),
)
def test_plainly_right_arguments_need_no_coercion(
    properties: dict[str, Any], arguments: dict[str, Any], strict: bool
) -> None:
    tool = registered(
        function_definition(parameters={"properties": properties}, strict=strict, read_only=True)
    )
    if tool.arguments.is_plainly_right(arguments):
        assert coerce(arguments, tool.definition) == (arguments, ())
        assert tool.arguments.violations(arguments) == []
        assert arguments.keys() <= properties.keys()
