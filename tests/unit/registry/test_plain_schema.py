"""The quick yes: never where the validator would say no."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from fumehood.registry.plain_schema import plain_acceptor

BOUND = st.integers(-3, 3) | st.floats(-3, 3)
PROPERTY = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 3), "maxLength": st.integers(0, 3)},
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": BOUND, "maximum": BOUND, "description": st.just("A number.")},
    ),
    st.just({"type": "boolean"}),
)
NAMES = st.sampled_from(["a", "b", "c"])
SCHEMA = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(NAMES, PROPERTY)},
    optional={
        "required": st.lists(NAMES, unique=True),
        "additionalProperties": st.booleans(),
    },
)
VALUE = st.one_of(
    st.text("xyé", max_size=4), st.integers(-5, 5), st.floats(-5, 5), st.booleans(), st.none(),
    st.lists(st.integers(), max_size=1),
)  # fmt: skip


@given(SCHEMA, st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), VALUE) | VALUE)
@settings(max_examples=1500, deadline=None)
def test_what_is_accepted_at_once_is_valid(schema: dict[str, Any], document: Any) -> None:
    accepts = plain_acceptor(schema)
    assert accepts is not None
    if accepts(document):
        assert Draft202012Validator(schema).is_valid(document)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "array"},
        {"type": "object", "anyOf": [{}]},
        {"type": "object", "minProperties": 1},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x"}}},
        {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}},
        {"type": "object", "properties": {"a": {"type": ["string", "null"]}}},
        {"type": "object", "properties": {"a": {"enum": [1]}}},
        {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}},
        {"type": "object", "properties": {"a": {"type": "integer", "maxLength": 2}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {}}}},
        {"type": "object", "properties": {"a": True}},
        {"type": "object", "$defs": {}},
    ],
)
def test_schema_that_says_more_is_left_to_the_validator(schema: dict[str, Any]) -> None:
    assert plain_acceptor(schema) is None


def test_usual_call_is_accepted_at_once() -> None:
    schema = {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "integer"}},
        "additionalProperties": False,
    }
    accepts = plain_acceptor(schema)
    assert accepts is not None
    assert accepts({"a": "xx", "b": 1})
    assert not accepts({"a": "xxxxxx"})
    assert not accepts({"a": "x", "c": 1})
    assert not accepts({"b": 1})
