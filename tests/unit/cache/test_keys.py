"""The keys of answers: two calls have the same one only if their results must be the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from fumehood.approvals.preview import definition_digest
from fumehood.cache.store import MAX_ARGUMENT_BYTES, CacheKeys
from fumehood.call_options import CallOptions
from fumehood.registry.index import RegisteredTool
from support.definitions import function_definition, registered

pytestmark = pytest.mark.row("P4")

LOOK = {"name": "look", "read_only": True, "cacheable": True}
TOOL = registered(function_definition(**LOOK))


def key(
    arguments: dict[str, Any],
    keys: CacheKeys | None = None,
    *,
    tool: RegisteredTool = TOOL,
    principal: str = "uid:1000",
    **options: Any,
) -> str | None:
    return (keys or CacheKeys()).key(
        tool, definition_digest, arguments, principal, CallOptions(**options)
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (1, "1", False),
        (0, False, False),
        (0.0, -0.0, True),
        (None, False, False),
        ([1, 2], [2, 1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (2**60, float(2**60), False),
        ("é", "e\u0301", False),
    ],
)
def test_arguments_are_compared_as_json_values(one: Any, other: Any, same: bool) -> None:
    keys = CacheKeys()
    assert (key({"x": one}, keys) == key({"x": other}, keys)) is same


@pytest.mark.parametrize(
    "other",
    [
        {"principal": "uid:1001"}, {"agent_id": "a"}, {"return_summary": False},
        {"max_length": 5},
        {"tool": registered(function_definition(**LOOK, version="1.0.1"))},
        {"tool": registered(function_definition(**{**LOOK, "name": "see"}))},
        {"tool": registered(function_definition(**LOOK, category="changed"))},
    ],
)  # fmt: skip
def test_cache_key_covers_everything_that_affects_the_answer(other: dict[str, Any]) -> None:
    keys = CacheKeys()
    assert key({"x": 1}, keys) != key({"x": 1}, keys, **other)


@pytest.mark.parametrize(
    "options", [{"timeout_seconds": 1}, {"trace_id": "t"}, {"enable_retry": False}]
)
def test_cache_key_ignores_options_without_effect_on_the_answer(options: dict[str, Any]) -> None:
    keys = CacheKeys()
    assert key({"x": 1}, keys) == key({"x": 1}, keys, **options)


def test_long_or_non_canonical_arguments_have_no_cache_key() -> None:
    assert key({"x": "a" * (MAX_ARGUMENT_BYTES - 8)}) is not None
    assert key({"x": "a" * MAX_ARGUMENT_BYTES}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3
    ),
    max_leaves=8,
)  # fmt: skip
