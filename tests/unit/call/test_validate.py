"""Validate: every offending path is named, and options without machinery are refused."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.call.resolve import ResolvedCall
from fumehood.call.validate import ValidatedCall, validate
from fumehood.model.errors import InvalidParams
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
    refusal = _refusal({"a": 1}, options={"session_id": "s", "max_length": 5})
    assert refusal.fields == ("options.max_length", "options.session_id")
    assert "Leave them out" in refusal.message


@pytest.mark.row("P11")
def test_options_at_their_defaults_ask_for_nothing() -> None:
    options = {"session_id": None, "wait_for_approval": False, "isolation": "call"}
    assert _validate({"a": 1}, options=options).arguments == {"a": 1}
