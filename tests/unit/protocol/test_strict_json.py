"""Strict JSON, and its canonical form."""

from __future__ import annotations

import json
from typing import Any

import pytest
import rfc8785
from hypothesis import assume, given
from hypothesis import strategies as st

from fumehood.protocol.canonical import canonical
from fumehood.protocol.strict_json import StrictJsonError, dumps, loads

DIGITS_4300 = b"1" * 4300
NESTED_64 = b"[" * 64 + b"]" * 64

REFUSALS = {
    "not_utf8": (b'"\xff"', "not UTF-8 at byte 1"),
    "raw_surrogate_bytes": (b'"\xed\xa0\x80"', "not UTF-8"),
    "utf16": ('"a"'.encode("utf-16"), "not UTF-8"),
    "repeated_key": (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
    "repeated_equal_key": (b'{"a": 1, "a": 1}', "given twice"),
    "repeated_key_deep": (b'[{"x": {"y": [{"a": 1, "b": 2, "a": 3}]}}]', "given twice"),
    "repeated_escaped_key": (b'{"a": 1, "\\u0061": 2}', "given twice"),
    "repeated_empty_key": (b'{"": 1, "": 2}', "given twice"),
    "nan": (b"NaN", "NaN is not a JSON value"),
    "nan_deep": (b'{"a": [NaN]}', "NaN is not a JSON value"),
    "infinity": (b"[Infinity]", "Infinity is not a JSON value"),
    "minus_infinity": (b"[-Infinity]", "-Infinity is not a JSON value"),
    "exponent_400": (b"1e400", "too large for a double"),
    "minus_exponent_400": (b"[-1e400]", "too large for a double"),
    "lone_high_surrogate": (b'"\\ud800"', "lone surrogate"),
    "lone_low_surrogate": (b'"\\udc00"', "lone surrogate"),
    "swapped_surrogates": (b'"\\udc00\\ud800"', "lone surrogate"),
    "lone_surrogate_in_key": (b'{"\\ud800": 1}', "lone surrogate"),
    "lone_surrogate_in_deep_key": (b'[{"a": {"\\udfff": 1}}]', "lone surrogate"),
    "lone_surrogate_in_value": (b'{"a": "\\ud800"}', "lone surrogate"),
    "lone_surrogate_in_list": (b'["a", "\\ud800"]', "lone surrogate"),
    "digits_4301": (DIGITS_4300 + b"1", "more than 4300 digits"),
    "digits_4301_negative": (b"-" + DIGITS_4300 + b"1", "more than 4300 digits"),
    "digits_4301_deep": (b'{"a": [' + DIGITS_4300 + b"1]}", "more than 4300 digits"),
    "depth_65": (b"[" * 65 + b"]" * 65, "nested deeper than 64 levels"),
    "depth_65_objects": (b'{"a":' * 65 + b"1" + b"}" * 65, "nested deeper than 64 levels"),
    "depth_65_mixed": (b'[{"a":' * 33 + b"1" + b"}]" * 33, "nested deeper than 64 levels"),
    "depth_10000": (b"[" * 10_000 + b"]" * 10_000, "nested deeper than 64 levels"),
    "depth_10000_objects": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested deeper"),
    "depth_10000_unclosed": (b"[" * 10_000, "nested deeper"),
    "trailing_garbage": (b'{"a": 1} x', "not JSON: Extra data"),
    "second_document": (b"{}{}", "not JSON: Extra data"),
    "no_break_space_after": ("{}\u00a0".encode(), "not JSON: Extra data"),
    "vertical_tab_after": (b"{}\x0b", "not JSON: Extra data"),
    "no_break_space_before": ("\u00a0{}".encode(), "not JSON"),
    "empty": (b"", "not JSON"),
    "only_spaces": (b"  \n", "not JSON"),
    "single_quotes": (b"{'a': 1}", "not JSON"),
    "trailing_comma": (b"[1,]", "not JSON"),
    "raw_newline_in_string": (b'"a\nb"', "not JSON"),
    "raw_nul_in_string": (b'"a\x00b"', "not JSON"),
    "leading_zero": (b"01", "not JSON"),
    "plus_sign": (b"+1", "not JSON"),
}

TWINS: dict[str, tuple[bytes, Any]] = {
    "utf8": ('"é"'.encode(), "é"),
    "same_key_in_two_objects": (b'[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]),
    "same_key_at_two_depths": (b'{"a": {"a": 1}}', {"a": {"a": 1}}),
    "word_nan": (b'"NaN"', "NaN"),
    "exponent_300": (b"1e300", 1e300),
    "exponent_minus_400": (b"1e-400", 0.0),
    "surrogate_pair": (b'"\\ud83d\\ude00"', "\U0001f600"),
    "surrogate_pair_in_key": (b'{"\\ud83d\\ude00": 1}', {"\U0001f600": 1}),
    "escaped_nul": (b'"a\\u0000b"', "a\x00b"),
    "digits_4300": (DIGITS_4300, int(DIGITS_4300)),
    "digits_4300_negative": (b"-" + DIGITS_4300, -int(DIGITS_4300)),
    "depth_64": (NESTED_64, json.loads(NESTED_64)),
    "65_brackets_side_by_side": (b"[" + b"[]," * 64 + b"[]]", [[]] * 65),
    "brackets_in_a_string": (b'"' + b"[" * 100 + b'"', "[" * 100),
    "spaces_around": (b" \n{} \t", {}),
    "spaces_after": (b'{"a": 1}\r\n\t ', {"a": 1}),
    "null": (b"null", None),
}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("name", REFUSALS)
def test_ambiguous_json_is_refused_with_a_reason(name: str) -> None:
    document, words = REFUSALS[name]
    with pytest.raises(StrictJsonError) as caught:
        loads(document)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", TWINS)
def test_twin_unambiguous_json_is_parsed(name: str) -> None:
    document, value = TWINS[name]
    assert loads(document) == value


def test_long_repeated_key_is_shown_shortened_and_in_ascii() -> None:
    key = "é" * 5000
    with pytest.raises(StrictJsonError) as caught:
        loads(f'{{"{key}": 1, "{key}": 2}}'.encode())
    assert len(str(caught.value)) < 400
    assert str(caught.value).isascii()


def test_smaller_json_depth_can_be_requested() -> None:
    assert loads(b"[[1]]", max_depth=2) == [[1]]
    with pytest.raises(StrictJsonError, match="deeper than 1 levels"):
        loads(b"[[1]]", max_depth=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), [float("nan")]])
def test_nan_and_infinity_are_not_encoded(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        dumps(value)


@given(JSON)
def test_any_json_value_round_trips(value: Any) -> None:
    again = loads(dumps(value))
    assert again == value
    assert dumps(again) == dumps(value)


@given(st.binary(max_size=200) | st.text('{}[]",:\\ud8cNaN01eE.- \n').map(str.encode))
def test_any_bytes_are_parsed_or_refused_with_one_error_type(data: bytes) -> None:
    try:
        value = loads(data)
    except StrictJsonError:
        return
    assert loads(dumps(value)) == value


# -- Canonical texts -----------------------------------------------------------------------

INTEGERS = st.integers(-(10**30), 10**30) | st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, -(2**53)])
KEYS = st.text(max_size=4) | st.sampled_from(["$integer", "$$integer", "$"])
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["9007199254740992", "-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def _meant(value: Any) -> Any:
    """The same of the value itself."""
    if isinstance(value, list):
        return [_meant(item) for item in value]
    if isinstance(value, dict):
        return {name: _meant(item) for name, item in value.items()}
    if isinstance(value, int) and abs(value) > 2**53 - 1:
        return ("integer", value)
    return _number(value)


def _number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return ("number", float(value)) if is_number else (type(value).__name__, value)


@pytest.mark.row("P3", "A2")
@given(VALUES)
def test_canonical_json_matches_rfc_8785(value: Any) -> None:
    """Where it has no large integers and no names with `$`, which the standard does not escape."""
    form = canonical(value)
    assume(b"$" not in form)
    assert form == rfc8785.dumps(value)


@pytest.mark.row("P3", "A2")
@given(VALUES, VALUES)
def test_different_values_have_different_canonical_forms(one: Any, other: Any) -> None:
    assume(_meant(one) != _meant(other))
    assert canonical(one) != canonical(other)


@pytest.mark.row("P3", "A2")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2**53, 2**53 + 1),  # one and the same double
        (2**53, {"$integer": str(2**53)}),
        (10**4299, 10**4299 + 1),
        ({"$integer": "1"}, {"$$integer": "1"}),
        (1, "1"),
        (True, 1),
        (None, "null"),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({}, []),
        ("é", "e\u0301"),
    ],
)
def test_confusable_values_have_different_canonical_forms(one: Any, other: Any) -> None:
    assert canonical(one) != canonical(other)
