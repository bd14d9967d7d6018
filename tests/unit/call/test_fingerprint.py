"""Fingerprints: the same call has the same one, and nothing else has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fumehood.call.fingerprint import (
    DECIDING_OPTIONS,
    SHOWING_OPTIONS,
    canonical,
    fingerprint,
    key_made_of,
)
from fumehood.model.call import CallOptions
from fumehood.model.errors import InvalidParams
from support.definitions import function_definition
from support.keyed import KEYED, permitted, principal

pytestmark = pytest.mark.row("P3")

INTEGERS = st.integers(-(10**30), 10**30) | st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, -(2**53)])
KEYS = st.text(max_size=4) | st.sampled_from(["$integer", "$object"])
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["20000000000000", "-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def _read(value: Any) -> Any:
    """What a canonical form says, with every number as a float or an exact large integer."""
    if isinstance(value, list):
        return [_read(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"$integer"}:
            return ("integer", int(value["$integer"], 16))
        inner = value["$object"] if value.keys() == {"$object"} else value
        return {name: _read(item) for name, item in inner.items()}
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
        (2**53, {"$integer": "20000000000000"}),
        ({"$integer": "1"}, {"$object": {"$integer": "1"}}),
        ({"$object": {}}, {"$object": {"$object": {}}}),
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


def test_integers_of_any_length_have_a_form() -> None:
    assert canonical(10**4299) != canonical(10**4299 + 1)


def test_every_option_is_known_to_decide_or_not() -> None:
    elsewhere = {"agent_id", "session_id", "idempotency_key", "dry_run"}
    groups = [set(DECIDING_OPTIONS), set(SHOWING_OPTIONS), elsewhere]
    assert set().union(*groups) == CallOptions.model_fields.keys()
    assert sum(map(len, groups)) == len(CallOptions.model_fields)


CHANGES: dict[str, dict[str, Any]] = {
    "arguments": {"arguments": {"text": "other"}},
    "more arguments": {"arguments": {"text": "a", "more": 1}},
    "effective arguments": {"effective": {"text": "a", "filled in": 1}},
    "tool": {"tool": function_definition(name="other")},
    "version": {"tool": function_definition(version="2.0.0")},
    "principal": {"by": principal("uid:2")},
    "agent": {"agent_id": "a"},
    "session": {"session_id": "s"},
    "timeout": {"timeout_seconds": 3},
    "memory": {"memory_limit_mb": 64},
    "isolation": {"isolation": "container_per_call"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_everything_that_decides_what_happens_is_in_it(change: str) -> None:
    changed = permitted(**{"arguments": {"text": "a"}, **CHANGES[change]})
    assert fingerprint(changed) != fingerprint(permitted({"text": "a"}))


SHOWN: dict[str, Any] = {
    "enable_cache": False, "enable_streaming": False, "enable_retry": False, "debug": True,
    "max_length": 5, "return_summary": False, "wait_for_approval": True, "trace_id": "t",
    "cancel_on_disconnect": True,
}  # fmt: skip


@pytest.mark.parametrize("option", sorted(SHOWING_OPTIONS))
def test_nothing_that_only_shows_is_in_it(option: str) -> None:
    shown = permitted({"text": "a"}, **{option: SHOWN[option]})
    assert fingerprint(shown) == fingerprint(permitted({"text": "a"}))


@pytest.mark.parametrize("option", [{}, {"idempotency_key": "k"}])
def test_tools_own_key_is_left_out_of_it(option: dict[str, str]) -> None:
    bare = fingerprint(permitted({"text": "a"}, tool=KEYED))
    given_key = permitted({"text": "a", "idempotency_key": "k"}, tool=KEYED, **option)
    assert fingerprint(given_key) == bare
    assert fingerprint(permitted({"text": "b", "idempotency_key": "k"}, tool=KEYED)) != bare


def test_argument_of_that_name_counts_where_it_is_no_parameter_of_the_tool() -> None:
    free = function_definition({"text": {"type": "string"}})
    one, other = (permitted({"idempotency_key": key}, tool=free) for key in "ab")
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("change", CHANGES)
def test_made_key_is_of_the_action_and_of_who_asks_for_it(change: str) -> None:
    changed = permitted(**{"arguments": {"text": "a"}, **CHANGES[change]})
    is_same = key_made_of(changed) == key_made_of(permitted({"text": "a"}))
    # Another limit is no other action: the repeat is a conflict, and runs nothing.
    assert is_same is (change in ("timeout", "memory", "isolation"))


def test_made_key_is_no_fingerprint_and_fits_where_keys_go() -> None:
    call = permitted({"text": "a"})
    made = key_made_of(call)
    assert made.startswith("auto:")
    assert len(made) == 69
    assert fingerprint(call) not in made


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {"\udfff": 1}, object()])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(InvalidParams, match="canonical form") as caught:
        fingerprint(permitted({"text": value}))
    assert caught.value.fields == ("options.idempotency_key",)
