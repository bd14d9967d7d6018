"""Validate: every offending path is named, and options without machinery are refused."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.errors import (
    ArgumentsRefused,
    EngineError,
    InvalidParams,
    ToolDisabled,
    ToolError,
)
from fumehood.identity.model import Binding
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall, mask_fixed_arguments, validate
from support.definitions import function_definition, registered, request

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
def test_effective_arguments_and_all_warnings_go_on() -> None:
    validated = _validate({"a": "5", "z": 1})
    assert validated.arguments == {"a": 5}
    assert validated.warnings == (
        "from before",
        "a: a string was read as integer",
        "unknown parameter 'z' was dropped",
    )


@pytest.mark.row("P2")
def test_every_offending_path_is_named_and_the_words_say_what_is_allowed() -> None:
    refusal = _refusal({"a": "five", "b": "z", "c": 1})
    assert sorted(refusal.fields) == ["a", "b", "c"]
    assert 'b must be one of "x", "y"' in refusal.message
    assert "five" not in refusal.message


@pytest.mark.row("P2")
def test_a_path_with_two_faults_is_named_once() -> None:
    tool = registered(function_definition({"a": {"minLength": 3, "pattern": "^b"}}))
    with pytest.raises(InvalidParams) as caught:
        validate(ResolvedCall(request(arguments={"a": "x"}), tool, ()))
    assert caught.value.fields == ("a",)


@pytest.mark.row("P2")
def test_missing_parameter_is_refused_under_its_name() -> None:
    refusal = _refusal({})
    assert refusal.fields == ("a",)
    assert refusal.message == "The arguments are wrong: a is required."


@pytest.mark.row("P2")
def test_long_lists_of_faults_are_counted_in_words_and_kept_in_fields() -> None:
    names = [f"n{i}" for i in range(12)]
    tool = registered(function_definition(schema={"required": names}))
    with pytest.raises(InvalidParams, match="and 7 more") as caught:
        validate(ResolvedCall(request(), tool, ()))
    assert list(caught.value.fields) == names


@pytest.mark.row("P1")
@pytest.mark.parametrize("fields", [{"strict": True}, {"dangerous": True}])
def test_strict_and_dangerous_tools_refuse_the_unknown_and_the_misspelt(
    fields: dict[str, Any],
) -> None:
    assert _refusal({"a": "5"}, **fields).fields == ("a",)
    refusal = _refusal({"a": 5, "zz": 1}, **fields)
    assert refusal.fields == ("zz",)
    assert "zz is not a parameter of this tool" in refusal.message


@pytest.mark.row("P1")
def test_closed_schema_refuses_the_unknown() -> None:
    assert _refusal({"a": 5, "zz": 1}, schema={"additionalProperties": False}).fields == ("zz",)


@pytest.mark.row("P2")
def test_arguments_that_cost_too_much_to_check_are_refused() -> None:
    tool = registered(
        function_definition({"a": {"items": {"allOf": [{"type": "integer"}, {"minimum": 0}]}}})
    )
    with pytest.raises(InvalidParams, match="too large to check"):
        validate(ResolvedCall(request(arguments={"a": [1] * 250_000}), tool, ()))


@pytest.mark.row("P11")
def test_options_without_machinery_are_refused_by_name() -> None:
    refusal = _refusal({"a": 1}, options={"max_length": 5})
    assert refusal.fields == ("options.max_length",)
    assert "Leave them out" in refusal.message


@pytest.mark.row("P11")
def test_options_at_their_defaults_ask_for_nothing() -> None:
    options = {"session_id": None, "wait_for_approval": False, "isolation": "call"}
    assert _validate({"a": 1}, options=options).arguments == {"a": 1}


# -- for an agent --------------------------------------------------------------------------


def _for_agent(
    arguments: dict[str, Any], *, schema: Any = REQUIRED, tool: Any = None, **binding: Any
) -> ValidatedCall:
    definition = function_definition(PROPERTIES, schema=schema, **(tool or {}))
    bound = Binding(tool="act", **binding)
    call = request(arguments=arguments, agent_id="a")
    return validate(ResolvedCall(call, registered(definition), (), bound))


@pytest.mark.row("R3")
def test_fixed_arguments_reach_the_tool_and_are_not_shown() -> None:
    validated = _for_agent({"b": "x"}, fixed={"a": 5})
    assert validated.arguments == {"a": 5, "b": "x"}
    assert validated.shown_arguments == {"b": "x"}
    assert validated.warnings == ()


@pytest.mark.row("R3")
@pytest.mark.parametrize("tool", [{}, {"strict": True}, {"dangerous": True}])
@pytest.mark.parametrize("given", [5, 6, None, {"deep": [1]}])
def test_a_fixed_argument_cannot_be_given_not_even_as_it_is(
    tool: dict[str, Any], given: Any
) -> None:
    with pytest.raises(InvalidParams) as caught:
        _for_agent({"a": given}, fixed={"a": 5}, tool=tool)
    assert caught.value.fields == ("a",)
    assert caught.value.message == "The arguments are wrong: a is not a parameter of this tool."


@pytest.mark.row("R3")
def test_a_fixed_argument_is_given_by_its_exact_name_only() -> None:
    validated = _for_agent({"A": 6, "a ": 7, "a.b": 8}, fixed={"a": 5})
    assert validated.arguments == {"a": 5}


@pytest.mark.row("R3")
def test_defaults_stand_in_for_what_is_left_out_and_only_for_that() -> None:
    assert _for_agent({}, defaults={"a": 5, "b": "x"}).arguments == {"a": 5, "b": "x"}
    given = _for_agent({"a": 6}, defaults={"a": 5, "b": "x"})
    assert given.arguments == {"a": 6, "b": "x"}
    assert given.shown_arguments == given.arguments


@pytest.mark.row("R3")
def test_an_agents_default_goes_before_the_tools() -> None:
    schema = {"properties": {"a": {"type": "integer", "default": 1}}}
    assert _for_agent({}, schema=schema, defaults={"a": 5}).arguments["a"] == 5
    assert _for_agent({}, schema=schema).arguments["a"] == 1


@pytest.mark.row("R3")
def test_a_tool_cannot_change_what_is_configured() -> None:
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
def test_a_fixed_argument_that_no_longer_fits_says_nothing_of_itself(
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
def test_a_callers_own_fault_is_told_without_what_is_fixed() -> None:
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
def test_what_a_functions_types_refuse_of_it_is_not_told_either(
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
