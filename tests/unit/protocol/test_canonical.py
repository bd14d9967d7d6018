"""Canonical texts: one for one value, and another for every other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fumehood.protocol.canonical import canonical

pytestmark = pytest.mark.row("P3", "A2")

INTEGERS = st.integers(-(10**30), 10**30) | st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, -(2**53)])
KEYS = st.text(max_size=4) | st.sampled_from(["$integer", "$$integer", "$"])
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["9007199254740992", "-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def _read(value: Any) -> Any:
    """What a canonical form says, with every number as a float or an exact large integer."""
    if isinstance(value, list):
        return [_read(item) for item in value]
    if isinstance(value, dict):
        if "$integer" in value:
            assert value.keys() == {"$integer"}
            return ("integer", int(value["$integer"]))
        return {name.removeprefix("$"): _read(item) for name, item in value.items()}
    return _number(value)


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


@given(VALUES)
def test_canonical_form_can_be_read_back(value: Any) -> None:
    assert _read(json.loads(canonical(value))) == _meant(value)


@given(VALUES, VALUES)
def test_values_that_differ_have_different_forms(one: Any, other: Any) -> None:
    assume(_meant(one) != _meant(other))
    assert canonical(one) != canonical(other)


@given(st.dictionaries(KEYS, VALUES, max_size=6), st.randoms())
def test_order_of_names_does_not_matter(value: dict[str, Any], chance: Any) -> None:
    names = list(value)
    chance.shuffle(names)
    assert canonical({name: value[name] for name in names}) == canonical(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2**53, 2**53 + 1),  # one and the same double
        (2**53, {"$integer": str(2**53)}),
        ({"$integer": "1"}, {"$$integer": "1"}),
        (1, "1"),
        (True, 1),
        (None, "null"),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({}, []),
        ("é", "e\u0301"),
    ],
)
def test_values_that_are_easily_confused_have_different_forms(one: Any, other: Any) -> None:
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (0, -0.0), (1e2, 100), ("/", "\u002f")])
def test_what_json_takes_for_equal_is_equal(one: Any, other: Any) -> None:
    assert canonical(one) == canonical(other)


def test_integers_of_every_length_that_json_may_bring_have_a_form() -> None:
    assert canonical(10**4299) != canonical(10**4299 + 1)
