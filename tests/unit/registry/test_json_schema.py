"""Schemas of arguments: what they allow, what they cost, and their own faults."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
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
    compile_pattern,
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


@pytest.mark.row("P2")
def test_additional_properties_schema_is_enforced() -> None:
    schema = {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}
    assert _violations(schema, {"a": "x", "b": 1}) == []
    assert _violations(schema, {"a": "x", "b": "y"}) == [
        Violation("b", "must be integer, not string")
    ]


@pytest.mark.row("P2")
def test_pattern_property_violation_names_its_property() -> None:
    schema = {
        "patternProperties": {"^n_": {"type": "integer"}, "_s$": {"type": "string"}},
        "additionalProperties": False,
    }
    assert _violations(schema, {"n_a": 1, "a_s": "x"}) == []
    found = _violations(schema, {"n_a": "x", "a_s": 1, "other": 1, "n_s": True})
    assert sorted(v.path for v in found) == ["a_s", "n_a", "n_s", "n_s", "other"]


@pytest.mark.parametrize(
    "keys", [["é"], ["\n"], ["a.b"], [""], ["x" * 200], ["a", "' is a required property", "b"]]
)
def test_missing_key_is_named_for_any_characters(keys: list[str]) -> None:
    assert [v.path for v in _violations({"required": keys}, {})] == keys


def test_long_unknown_key_is_shortened() -> None:
    found = _violations({"additionalProperties": False}, {"k" * 1000: 1})
    assert [v.path for v in found] == ["k" * 80]


def test_long_expected_value_in_a_message_is_shortened() -> None:
    found = _violations({"const": "x" * 1000}, 1)
    assert len(found[0].message) < 120
    found = _violations({"enum": [f"value {i}" for i in range(1000)]}, 1)
    assert len(found[0].message) < 300


@pytest.mark.row("P2")
def test_at_most_twenty_violations_of_one_kind_are_listed() -> None:
    assert len(_violations({"items": {"type": "integer"}}, ["x"] * 1000)) == MAX_ERRORS
    unknown = {f"k{i}": 1 for i in range(1000)}
    assert len(_violations({"additionalProperties": False}, unknown)) == MAX_ERRORS


@pytest.mark.row("P2")
def test_catastrophic_pattern_ends_in_time() -> None:
    hostile = "a" * 50_000 + "!"
    assert [v.message for v in _violations({"pattern": "^(a+)+$"}, hostile)] == [
        'must match the pattern "^(a+)+$"'
    ]
    assert _violations({"pattern": "^(a+)+$"}, hostile[:-1]) == []


@pytest.mark.row("P2")
def test_catastrophic_property_name_pattern_ends_in_time() -> None:
    schema = {"patternProperties": {"^(a+)+$": {"type": "integer"}}, "additionalProperties": False}
    assert len(_violations(schema, {"a" * 50_000 + "!": 1})) == 1
    assert _violations(schema, {"a" * 50_000: 1}) == []


@pytest.mark.row("P2")
def test_uniqueness_check_of_many_elements_ends_in_time() -> None:
    many: list[Any] = [{"n": i} for i in range(40_000)]
    assert _violations({"uniqueItems": True}, many) == []
    assert len(_violations({"uniqueItems": True}, [*many, {"n": 5.0}])) == 1


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


@pytest.mark.row("P2")
def test_endless_schema_recursion_is_reported_as_too_costly() -> None:
    with pytest.raises(TooCostly):
        _violations({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, 1)


@pytest.mark.row("P2")
def test_too_many_elements_are_reported_as_too_costly() -> None:
    with pytest.raises(TooCostly):
        _violations({"items": {"allOf": [{"type": "integer"}]}}, [1] * 200_001)


@pytest.mark.row("P2")
def test_many_patterns_on_many_names_are_reported_as_too_costly() -> None:
    schema = {"patternProperties": {f"^{i}$": {} for i in range(1000)}}
    with pytest.raises(TooCostly):
        _violations(schema, {f"k{i}": 1 for i in range(1000)})


def test_validation_budget_applies_per_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.registry.json_schema.MAX_STEPS", 30_000)
    schema = CompiledSchema({"items": {"allOf": [{"type": "integer"}]}})
    for _ in range(3):
        assert schema.violations([1] * 6_000) == []


@pytest.mark.row("P2")
def test_recursive_schema_of_a_finite_document_is_checked() -> None:
    tree = {"properties": {"left": {"$ref": "#"}, "n": {"type": "integer"}}}
    assert _violations(tree, {"left": {"left": {"n": 1}}}) == []
    assert [v.path for v in _violations(tree, {"left": {"left": {"n": "1"}}})] == ["left.left.n"]


def _nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` levels, the root included."""
    schema: dict[str, Any] = json.loads('{"not":' * (depth - 1) + "{}" + "}" * (depth - 1))
    return schema


@pytest.mark.row("P2")
def test_schema_that_is_too_deep_is_refused() -> None:
    assert schema_faults(_nested(MAX_SCHEMA_DEPTH), "parameters") == []
    assert schema_faults(_nested(MAX_SCHEMA_DEPTH + 1), "parameters") == [
        "parameters: over 10000 nodes or 32 levels"
    ]
    assert len(schema_faults(_nested(20_000 // 40), "parameters")) == 1


@pytest.mark.row("P2")
def test_schema_that_is_too_large_is_refused() -> None:
    assert schema_faults({"enum": list(range(MAX_SCHEMA_NODES - 2))}, "parameters") == []
    assert schema_faults({"enum": list(range(MAX_SCHEMA_NODES - 1))}, "parameters") == [
        "parameters: over 10000 nodes or 32 levels"
    ]


@pytest.mark.row("P2")
@pytest.mark.parametrize(
    "pattern", ["(?=a)", "(?!a)", "(?<=a)b", "(a)\\1", "(", "[z-a]", "a{2000}"]
)
def test_pattern_unsupported_by_re2_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="RE2"):
        compile_pattern(pattern)


@pytest.mark.parametrize("pattern", ["", "b", "^[A-Z]", "\\d{4}-\\d{2}", "(?i)X", "\\p{L}+"])
def test_pattern_matches_anywhere_in_the_text(pattern: str) -> None:
    assert compile_pattern(pattern).search("Ab1x2026-01") is not None


@given(st.text(max_size=30))
def test_any_pattern_is_compiled_or_refused(pattern: str) -> None:
    schema = {"pattern": pattern}
    faults = schema_faults(schema, "p")
    if not faults:
        assert len(_violations(schema, "a")) <= 1
    else:
        assert all(fault.startswith("p") for fault in faults)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0]) | st.text("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)


@given(values)
def test_value_satisfies_its_own_const_and_enum_schema(value: Any) -> None:
    assert _violations({"const": value}, value) == []
    assert _violations({"enum": [value]}, value) == []


@pytest.mark.row("P2")
def test_patterns_are_never_run_by_the_python_regex_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}
    assert schema_faults(schema, "parameters") == []
    assert schema_faults({"unevaluatedProperties": False}, "parameters")  # the library's own
    searched: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr("re.search", lambda *given: searched.append(given))
        _violations(schema, {"aaaa!": 1})
    assert searched == []


@pytest.mark.row("P2")
@pytest.mark.parametrize(
    ("schema", "document"),
    [({"multipleOf": 0.5}, 10**400), ({"multipleOf": 10**400}, 1.5), ({"multipleOf": 2.5}, 1e308)],
    ids=["large_document", "large_factor", "near_the_end"],
)
def test_multiple_of_handles_numbers_of_any_size(schema: dict[str, Any], document: Any) -> None:
    assert len(_violations(schema, document)) <= 1


@pytest.mark.row("P2")
def test_decimal_multiple_is_not_a_violation() -> None:
    assert _violations({"multipleOf": 0.01}, 19.99) == []


@pytest.mark.row("P2")
def test_at_most_twenty_violations_are_listed_in_total() -> None:
    names = [f"a{i}" for i in range(15)]
    schema = {
        "properties": {name: {"type": "string"} for name in names},
        "additionalProperties": False,
    }
    document = dict.fromkeys([*names, *(f"b{i}" for i in range(15))], 1)
    assert len(_violations(schema, document)) == MAX_ERRORS


@pytest.mark.row("P2")
@pytest.mark.parametrize(
    ("schema", "document", "path"),
    [
        ({"properties": {"a": False}}, {"a": 1}, "a"),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "b"),
    ],
)
def test_violating_path_is_named_for_every_keyword(
    schema: dict[str, Any], document: Any, path: str
) -> None:
    assert [violation.path for violation in _violations(schema, document)] == [path]


@pytest.mark.row("P2")
def test_names_matching_no_pattern_count_towards_the_budget() -> None:
    schema = {
        "additionalProperties": False,
        "patternProperties": {f"^z{i}$": {} for i in range(900)},
    }
    with pytest.raises(TooCostly):
        _violations(schema, {f"k{i}": 1 for i in range(300)})


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
@settings(max_examples=500, deadline=None)
def test_document_accepted_by_the_fast_path_is_valid(schema: dict[str, Any], document: Any) -> None:
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
    assert accepts is not None
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
