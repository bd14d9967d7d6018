"""Coercion: forgives form, names each change, and never touches strict or dangerous calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.pipeline.coerce import coerce, refuses_unknown
from support.definitions import function_definition

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
def test_only_these_forms_are_forgiven(kind: str, value: Any, expected: Any) -> None:
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
def test_what_is_nested_is_left_alone() -> None:
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
def test_numbers_are_clamped_for_tools_that_only_read(value: Any, used: int) -> None:
    effective, warnings = coerce({"a": value}, function_definition(BOUNDED, read_only=True))
    assert effective == {"a": used}
    assert len(warnings) == (value == "99") + (value not in (5, used))


@pytest.mark.row("P1")
@pytest.mark.parametrize("value", [0, 99])
def test_numbers_are_not_clamped_for_tools_that_write(value: int) -> None:
    assert coerce({"a": value}, function_definition(BOUNDED)) == ({"a": value}, ())


@pytest.mark.row("P1")
def test_open_bounds_do_not_clamp() -> None:
    schema = {"a": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}}
    assert coerce({"a": 7}, function_definition(schema, read_only=True)) == ({"a": 7}, ())


@pytest.mark.row("P1")
def test_clamping_says_what_was_given_and_what_was_used() -> None:
    _, warnings = coerce({"a": 99}, function_definition(BOUNDED, read_only=True))
    assert warnings == ("a: 99 is out of range, 10 was used",)


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
def test_where_the_schema_speaks_of_further_parameters_it_decides(schema: dict[str, Any]) -> None:
    tool = function_definition({"a": {}}, schema=schema)
    assert coerce({"b": 2}, tool) == ({"b": 2}, ())
    assert not refuses_unknown(tool)


@pytest.mark.row("P1")
@pytest.mark.parametrize("fields", [{"strict": True}, {"dangerous": True}])
def test_strict_and_dangerous_tools_refuse_the_unknown(fields: dict[str, Any]) -> None:
    tool = function_definition({"a": {}}, **fields)
    assert coerce({"b": 2}, tool) == ({"b": 2}, ())
    assert refuses_unknown(tool)
    assert not refuses_unknown(function_definition({"a": {}}))


def test_defaults_are_filled_in_without_a_warning() -> None:
    tool = function_definition({"a": {"default": 5}, "b": {"default": None}, "c": {}, "d": True})
    assert coerce({}, tool) == ({"a": 5, "b": None}, ())
    assert coerce({"a": None}, tool) == ({"a": None, "b": None}, ())


def test_the_given_arguments_are_not_changed() -> None:
    arguments = {"a": "10", "b": 1}
    coerce(arguments, function_definition({"a": {"type": "integer"}}))
    assert arguments == {"a": "10", "b": 1}


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
def test_strict_and_dangerous_calls_are_never_changed(
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
def test_every_change_has_a_warning_and_every_warning_a_change(
    declared: dict[str, Any], arguments: dict[str, Any], read_only: bool
) -> None:
    effective, warnings = coerce(arguments, function_definition(declared, read_only=read_only))
    changed = _changes(arguments, effective)
    for name in arguments:
        told = [w for w in warnings if w.startswith(f"{name}: ") or f"parameter '{name}'" in w]
        assert bool(told) == (name in changed)


@pytest.mark.row("P1")
@given(properties, arguments_of_calls, st.booleans())
def test_coercion_is_idempotent(
    declared: dict[str, Any], arguments: dict[str, Any], read_only: bool
) -> None:
    tool = function_definition(declared, read_only=read_only)
    once, _ = coerce(arguments, tool)
    assert coerce(once, tool) == (once, ())
