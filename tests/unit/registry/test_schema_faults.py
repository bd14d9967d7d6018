"""Faults of schemas: the fast path accepts only schemas that the full check accepts."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.registry import schema_faults as full
from fumehood.registry.schema_faults import _CHECKS, is_surely_sound

SCALARS = st.none() | st.booleans() | st.integers(-2, 3) | st.floats(0, 2) | st.sampled_from(
    ["string", "integer", "a", "(", "#", "#/x", "https://example.org", ""]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*_CHECKS, "$ref", "$id", "a", "if"]), inner, max_size=4)
    ),
    max_leaves=8,
)


def _check_in_full(schema: Any) -> list[str]:
    with patch.object(full, "is_surely_sound", return_value=False):
        return full.schema_faults(schema, "parameters")


@given(schema=st.dictionaries(st.sampled_from([*_CHECKS, "$ref", "$id", "if"]), VALUES, max_size=4))
def test_what_is_surely_sound_has_no_faults(schema: dict[str, Any]) -> None:
    if is_surely_sound(schema):
        assert _check_in_full(schema) == []


PLAIN = {
    "type": "object",
    "required": ["a"],
    "additionalProperties": False,
    "properties": {
        "a": {"type": "string", "minLength": 1, "pattern": "^x", "description": "A."},
        "b": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 5},
        "c": {"type": ["integer", "null"]},
        "$ref": {"enum": ["x", 1, None], "default": "x"},
    },
}


def test_plain_schema_is_surely_sound_so_the_property_is_not_empty() -> None:
    assert is_surely_sound(PLAIN)
    assert _check_in_full(PLAIN) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"}, {"$id": "a"}, {"default": {"$ref": "https://example.org"}},
        {"enum": [{"$id": "x"}]}, {"const": []}, {"pattern": "(?=a)"}, {"minLength": True},
        {"minLength": -1}, {"required": ["a", "a"]}, {"type": []}, {"type": ["string", "string"]},
        {"type": ["string", "strin"]}, {"type": [["string"]]}, {"properties": []},
        {"properties": {"a": True}}, {"items": {"type": "strin"}}, {"colour": "red"}, [], None,
    ],
)  # fmt: skip
def test_everything_else_is_left_to_the_full_check(schema: Any) -> None:
    assert not is_surely_sound(schema)
