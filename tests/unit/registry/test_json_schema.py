"""Schemas of arguments: what they allow, what they cost, and their own faults."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from fumehood.registry import json_schema as full
from fumehood.registry.json_schema import (
    _CHECKS,
    MAX_ERRORS,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_NODES,
    CompiledSchema,
    TooCostly,
    Violation,
    is_surely_sound,
    plain_acceptor,
    schema_faults,
)

# schema, document that breaks it, words, a document that does not
WORDS: list[tuple[dict[str, Any], Any, str, Any]] = [
    ({"type": "integer"}, "1", "must be integer, not string", 1),
    ({"type": "integer"}, 1.5, "must be integer, not number", 1.0),
    ({"type": "integer"}, True, "must be integer, not boolean", 1),
    ({"type": "number"}, None, "must be number, not null", 1.5),
    ({"type": "string"}, 1, "must be string, not integer", "1"),
    ({"type": "string"}, [], "must be string, not array", ""),
    ({"type": "boolean"}, {}, "must be boolean, not object", False),
    ({"type": ["integer", "null"]}, "a", "must be integer or null, not string", None),
    ({"enum": ["a", 1, None]}, "b", 'must be one of "a", 1, null', None),
    ({"const": {"a": 1}}, 2, 'must be {"a":1}', {"a": 1}),
    ({"minimum": 1}, 0, "must be at least 1", 1),
    ({"maximum": 1.5}, 2, "must be at most 1.5", 1.5),
    ({"exclusiveMinimum": 1}, 1, "must be greater than 1", 1.1),
    ({"exclusiveMaximum": 1}, 1, "must be less than 1", 0.9),
    ({"multipleOf": 3}, 4, "must be a multiple of 3", 6),
    ({"multipleOf": 0.01}, 19.995, "must be a multiple of 0.01", 19.99),
    ({"minLength": 2}, "a", "must have at least 2 characters", "ab"),
    ({"maxLength": 2}, "abc", "must have at most 2 characters", "éé"),
    ({"minItems": 2}, [1], "must have at least 2 elements", [1, 2]),
    ({"maxItems": 1}, [1, 2], "must have at most 1 elements", [1]),
    ({"uniqueItems": True}, [1, 2, 1], "must not hold the same element twice", [1, 2]),
    ({"pattern": "^a+$"}, "b", 'must match the pattern "^a+$"', "aa"),
    ({"anyOf": [{"type": "null"}]}, 1, "matches none of the allowed forms", None),
    ({"oneOf": [{}, {"type": "string"}]}, "a", "must match exactly one of the allowed forms", 1),
    ({"required": ["a"]}, {}, "is required", {"a": 1}),
    (
        {"additionalProperties": False},
        {"a": 1},
        "is not a parameter of this tool",
        {},
    ),
    ({"not": {"type": "null"}}, None, "breaks a rule of the tool's schema", 1),
    ({"minProperties": 1}, {}, "breaks a rule of the tool's schema", {"a": 1}),
    ({"contains": {"const": 1}}, [2], "breaks a rule of the tool's schema", [1]),
]


def _violations(schema: dict[str, Any], document: Any) -> list[Violation]:
    return CompiledSchema(schema).violations(document)


@pytest.mark.row("P2")
@pytest.mark.parametrize(("schema", "document", "words", "twin"), WORDS)
def test_each_schema_keyword_has_a_clear_message(
    schema: dict[str, Any], document: Any, words: str, twin: Any
) -> None:
    assert [violation.message for violation in _violations(schema, document)] == [words]
    assert _violations(schema, twin) == []


NESTED = {
    "type": "object",
    "required": ["a", "it's", 'say "x"'],
    "properties": {
        "a": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["x"],
                "additionalProperties": False,
                "properties": {"x": {"type": "integer"}},
            },
        }
    },
}


@pytest.mark.row("P2")
def test_every_violating_path_is_named_at_any_depth() -> None:
    found = _violations(NESTED, {"a": [{"x": 1}, {"x": "1"}, {}, {"x": 1, "y": 2, "z": 3}, 5]})
    assert sorted((violation.path, violation.message) for violation in found) == [
        ("a.1.x", "must be integer, not string"),
        ("a.2.x", "is required"),
        ("a.3.y", "is not a parameter of this tool"),
        ("a.3.z", "is not a parameter of this tool"),
        ("a.4", "must be object, not integer"),
        ("it's", "is required"),
        ('say "x"', "is required"),
    ]


PATTERNED = {
    "patternProperties": {"^n_": {"type": "integer"}, "_s$": {"type": "string"}},
    "additionalProperties": False,
}
EXTENDED = {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}
TREE = {"properties": {"left": {"$ref": "#"}, "n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "document", "paths"),
    [
        (PATTERNED, {"n_a": 1, "a_s": "x"}, []),
        (
            PATTERNED,
            {"n_a": "x", "a_s": 1, "other": 1, "n_s": True},
            ["a_s", "n_a", "n_s", "n_s", "other"],
        ),
        (EXTENDED, {"a": "x", "b": 1}, []),
        (EXTENDED, {"a": "x", "b": "y"}, ["b"]),
        (TREE, {"left": {"left": {"n": 1}}}, []),
        (TREE, {"left": {"left": {"n": "1"}}}, ["left.left.n"]),
        ({"properties": {"a": False}}, {"a": 1}, ["a"]),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, ["b"]),
        ({"additionalProperties": False}, {"k" * 1000: 1}, ["k" * 80]),
        *(
            ({"required": keys}, {}, sorted(keys))
            for keys in (
                ["é"], ["\n"], ["a.b"], [""], ["x" * 200], ["a", "' is a required property", "b"],
            )
        ),
    ],
)  # fmt: skip
def test_violation_names_its_path(schema: dict[str, Any], document: Any, paths: list[str]) -> None:
    assert sorted(violation.path for violation in _violations(schema, document)) == paths


CLOSED_TEXTS = {
    "properties": {f"a{i}": {"type": "string"} for i in range(15)},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({"items": {"type": "integer"}}, ["x"] * 1000),
        ({"additionalProperties": False}, {f"k{i}": 1 for i in range(1000)}),
        (CLOSED_TEXTS, {f"{letter}{i}": 1 for letter in "ab" for i in range(15)}),
    ],
    ids=["items", "unknown", "both"],
)
def test_at_most_twenty_violations_are_listed(schema: dict[str, Any], document: Any) -> None:
    assert len(_violations(schema, document)) == MAX_ERRORS


NAMES_OF_A = {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}
MANY: list[Any] = [{"n": i} for i in range(20_000)]


@pytest.mark.parametrize(
    ("schema", "attack", "twin"),
    [
        ({"pattern": "^(a+)+$"}, "a" * 50_000 + "!", "a" * 50_000),
        (NAMES_OF_A, {"a" * 50_000 + "!": 1}, {"a" * 50_000: 1}),
        ({"uniqueItems": True}, [*MANY, {"n": 5.0}], MANY),
    ],
    ids=["pattern", "pattern of names", "unique items"],
)
def test_catastrophic_document_is_checked_in_time(
    schema: dict[str, Any], attack: Any, twin: Any
) -> None:
    assert len(_violations(schema, attack)) == 1
    assert _violations(schema, twin) == []


@pytest.mark.row("P2")
@pytest.mark.parametrize(
    ("items", "same"),
    [
        ([1, 1.0], True),
        ([1, True], False),
        ([0, False], False),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], True),
        ([[1], [1.0]], True),
        ([["1"], [1]], False),
        ([0.0, -0.0], True),
        (["a", "b"], False),
        ([None, "null"], False),
        ([1e300, 10**300], False),
        ([2**60, float(2**60)], True),
    ],
)
def test_unique_items_compares_by_json_equality(items: list[Any], same: bool) -> None:
    assert bool(_violations({"uniqueItems": True}, items)) is same


def _doubling(depth: int) -> dict[str, Any]:
    """A schema of a few lines whose evaluation takes 2**depth steps."""
    definitions: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)
    }
    definitions[f"d{depth}"] = {"const": 1}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


@pytest.mark.row("P2")
def test_exponential_schema_is_reported_as_too_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.registry.json_schema.MAX_STEPS", 20_000)
    assert schema_faults(_doubling(28), "parameters") == []
    with pytest.raises(TooCostly):
        _violations(_doubling(28), 2)
    assert len(_violations(_doubling(4), 2)) == 1


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, 1),
        ({"items": {"allOf": [{"type": "integer"}]}}, [1] * 200_001),
        (
            {"patternProperties": {f"^{i}$": {} for i in range(1000)}},
            {f"k{i}": 1 for i in range(1000)},
        ),
        (
            {
                "additionalProperties": False,
                "patternProperties": {f"^z{i}$": {} for i in range(900)},
            },
            {f"k{i}": 1 for i in range(300)},
        ),
    ],
    ids=["endless recursion", "many elements", "many patterns", "patterns that match no name"],
)
def test_costly_validation_is_reported(schema: dict[str, Any], document: Any) -> None:
    with pytest.raises(TooCostly):
        _violations(schema, document)


def test_validation_budget_applies_per_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.registry.json_schema.MAX_STEPS", 30_000)
    schema = CompiledSchema({"items": {"allOf": [{"type": "integer"}]}})
    for _ in range(3):
        assert schema.violations([1] * 6_000) == []


def _nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` levels, the root included."""
    schema: dict[str, Any] = json.loads('{"not":' * (depth - 1) + "{}" + "}" * (depth - 1))
    return schema


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        (_nested(MAX_SCHEMA_DEPTH), True),
        (_nested(MAX_SCHEMA_DEPTH + 1), False),
        (_nested(500), False),
        ({"enum": list(range(MAX_SCHEMA_NODES - 2))}, True),
        ({"enum": list(range(MAX_SCHEMA_NODES - 1))}, False),
    ],
    ids=["deep", "too deep", "far too deep", "large", "too large"],
)
def test_schema_over_its_bounds_is_refused(schema: dict[str, Any], fits: bool) -> None:
    faults = [] if fits else ["parameters: over 10000 nodes or 32 levels"]
    assert schema_faults(schema, "parameters") == faults


@given(st.text(max_size=30))
def test_any_pattern_is_compiled_or_refused(pattern: str) -> None:
    schema = {"pattern": pattern}
    faults = schema_faults(schema, "p")
    if not faults:
        assert len(_violations(schema, "a")) <= 1
    else:
        assert all(fault.startswith("p") for fault in faults)


@pytest.mark.row("P2")
@pytest.mark.parametrize(
    ("schema", "document"),
    [({"multipleOf": 0.5}, 10**400), ({"multipleOf": 10**400}, 1.5), ({"multipleOf": 2.5}, 1e308)],
    ids=["large_document", "large_factor", "near_the_end"],
)
def test_multiple_of_handles_numbers_of_any_size(schema: dict[str, Any], document: Any) -> None:
    assert len(_violations(schema, document)) <= 1


# -- plain objects -------------------------------------------------------------------------


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
def test_document_accepted_by_the_fast_path_is_valid(schema: dict[str, Any], document: Any) -> None:
    accepts = plain_acceptor(schema)
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
def test_complex_schema_has_no_fast_path(schema: dict[str, Any]) -> None:
    assert plain_acceptor(schema) is None


def test_ordinary_arguments_take_the_fast_path() -> None:
    schema = {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "integer"}},
        "additionalProperties": False,
    }
    accepts = plain_acceptor(schema)
    assert accepts({"a": "xx", "b": 1})
    assert not accepts({"a": "xxxxxx"})
    assert not accepts({"a": "x", "c": 1})
    assert not accepts({"b": 1})


# -- Faults of schemas ---------------------------------------------------------------------

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
def test_schema_sound_by_the_quick_check_has_no_faults(schema: dict[str, Any]) -> None:
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


def test_plain_schema_passes_the_quick_check() -> None:
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
def test_unusual_schema_is_left_to_the_full_check(schema: Any) -> None:
    assert not is_surely_sound(schema)
