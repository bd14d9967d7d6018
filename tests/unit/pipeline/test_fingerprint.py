"""Fingerprints: the same call has the same one, and nothing else has."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.call import CallOptions
from fumehood.core.errors import InvalidParams
from fumehood.pipeline.fingerprint import (
    DECIDING_OPTIONS,
    SHOWING_OPTIONS,
    fingerprint,
    key_made_of,
)
from support.definitions import function_definition
from support.keyed import KEYED, permitted, principal

pytestmark = pytest.mark.row("P3")


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
