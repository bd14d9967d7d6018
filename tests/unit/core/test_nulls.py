"""Nulls of clients that make models of schemas."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.nulls import without_nulls

pytestmark = pytest.mark.row("D3")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["needed"],
    "properties": {
        "needed": {"type": "string"},
        "word": {"type": "string"},
        "either": {"type": ["string", "null"]},
        "any_of": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "choice": {"enum": ["a", None]},
        "named": {"$ref": "#/$defs/word"},
        "maybe_named": {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]},
        "anything": {},
        "whatever": True,
    },
    "$defs": {"word": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("needed", True), ("word", False), ("either", True), ("any_of", True), ("choice", True),
        ("named", False), ("maybe_named", True), ("anything", True), ("whatever", True),
        ("unknown", True),
    ],
)  # fmt: skip
def test_null_is_dropped_for_non_nullable_optional_parameters(name: str, is_kept: bool) -> None:
    given = {name: None, "other": 1}
    expected = given if is_kept else {"other": 1}
    assert without_nulls(given, SCHEMA) == expected


def test_undescribed_values_are_kept() -> None:
    given = {"word": "a", "needed": {"word": None}}
    assert without_nulls(given, SCHEMA) == given
