"""What a condition asks of arguments: yes, no, or in doubt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.names import compile_glob
from fumehood.policy.model import Condition, Predicate
from fumehood.policy.rules import (
    ABSENT,
    MAX_LOOKED_AT,
    compile_condition,
    compile_predicate,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def asks(predicate: dict[str, Any], value: Any) -> bool | None:
    return compile_predicate(Predicate.model_validate(predicate))(value)


def asks_of(condition: dict[str, Any], arguments: Any, *, for_every: bool = False) -> bool | None:
    made = Condition.model_validate(condition)
    return compile_condition(made, for_every=for_every)(arguments)


TABLE: list[tuple[dict[str, Any], Any, bool | None]] = [
    ({"prefix": "ab"}, "abc", True),
    ({"prefix": "ab"}, "Abc", False),
    ({"prefix": "1"}, 12, None),
    ({"equals": "a"}, "a", True),
    ({"equals": "a"}, "a ", False),
    ({"equals": 1}, 1.0, True),
    ({"equals": 1}, True, None),
    ({"equals": True}, 1, None),
    ({"equals": False}, True, False),
    ({"equals": None}, None, True),
    ({"equals": None}, ABSENT, None),
    ({"equals": [1, {"a": True}]}, [1, {"a": True}], True),
    ({"equals": [1, {"a": True}]}, [1, {"a": 1}], False),
    ({"in": ["a", "b"]}, "b", True),
    ({"in": ["a", "b"]}, "c", False),
    ({"in": ["a", "b"]}, 1, None),
    ({"in": ["a", 1]}, 1, True),
    ({"in": ["a", 1]}, True, None),
    ({"glob": "*.pdf"}, "a/b.pdf", True),
    ({"glob": "*.pdf"}, "a.pdf.exe", False),
    ({"glob": "a?"}, "ab", False),
    ({"glob": "[a]"}, "a", False),
    ({"min": 1}, 1, True),
    ({"min": 1}, 0.99, False),
    ({"max": 10}, 10**400, False),
    ({"min": 1, "max": 2}, 2, True),
    ({"min": 0}, True, None),
    ({"min": 0}, "1", None),
    ({"min": 0}, float("nan"), None),
    ({"missing": True}, ABSENT, True),
    ({"missing": True}, None, False),
    ({"not": {"missing": True}}, ABSENT, False),
    ({"not": {"prefix": "a"}}, "b", True),
    ({"not": {"prefix": "a"}}, "a", False),
    ({"not": {"prefix": "a"}}, 1, None),
    ({"not": {"prefix": "a"}}, ABSENT, None),
    # Nothing is normalised: the same letter in two forms, and letters that look the same.
    ({"equals": "\u00e9"}, "e\u0301", False),
    ({"equals": "admin"}, "\u0430dmin", False),
    ({"prefix": "admin"}, "\uff41dmin", False),
]


@pytest.mark.row("A1")
@pytest.mark.parametrize(("predicate", "value", "expected"), TABLE)
def test_predicate_gives_the_expected_answer(
    predicate: dict[str, Any], value: Any, expected: bool | None
) -> None:
    assert asks(predicate, value) is expected


PATHS: list[tuple[str, bool | None]] = [
    ("/workspace/out/a.txt", True),
    ("/workspace/out", True),
    ("/workspace/out/", True),
    ("out/a.txt", True),
    ("./out/a", True),
    ("//workspace///out//a", True),
    ("/workspace/out/../out/a", True),
    ("/../workspace/out/a", True),
    ("/workspace/out/..", False),
    ("/workspace/out/../secret", False),
    ("/workspace/out/../../etc/passwd", False),
    ("out/../../etc/passwd", False),
    ("../workspace/out/a", True),
    ("/workspace/outside/a", False),
    ("/workspace/OUT/a", False),
    ("out\\..\\secret", False),  # one name, which holds backslashes
    ("/workspace/out/%2e%2e/secret", True),  # a name, too: nothing is decoded
    ("/workspace/out/\0/../../secret", None),
    ("", None),
    ("a/" * 3000, None),
    ("\ud800", None),
]


@pytest.mark.row("A1")
@pytest.mark.parametrize(("path", "expected"), PATHS)
def test_path_inside_resolves_dot_segments(path: str, expected: bool | None) -> None:
    assert asks({"path_inside": "/workspace/out"}, path) is expected
    assert asks({"path_inside": "out"}, path) is expected


HOSTS: list[tuple[str, bool | None]] = [
    ("https://example.org", True),
    ("https://example.org/a?b#c", True),
    ("HTTPS://EXAMPLE.ORG/", True),
    ("https://example.org.:8443/", True),
    ("https://example.org:/", True),
    ("https://a.b.example.net/", True),
    ("https://example.net/", False),
    ("https://badexample.net/", False),
    ("https://example.org.evil.example/", False),
    ("https://evil.example/?https://example.org/", False),
    ("https://evil.example#@example.org/", False),
    ("https://user@example.org/", None),
    ("https://example.org@evil.example/", None),
    ("https://example.org\\@evil.example/", None),
    ("https://evil.example\\.example.org/", None),
    ("https:\\\\example.org/", None),
    ("https:///example.org/", None),
    ("//example.org/", None),
    ("example.org", None),
    ("javascript:alert(1)//example.org", None),
    ("https://exam\tple.org/", None),
    (" https://example.org/", None),
    ("https://example.org\n", None),
    ("https://example.org/\n", None),
    ("https://ex\u00e4mple.org/", None),
    ("https://example\u3002org/", None),
    ("https://\u24d4xample.org/", None),
    ("https://example.org%2eevil.example/", None),
    ("https://example..org/", None),
    ("https://.example.org/", None),
    ("https://example.org../", None),
    ("https://example.org:99999/", None),
    ("https://example.org:80:80/", None),
    ("https://[::1/", None),
    ("https://127.1/", None),
    ("https://2130706433/", None),
    ("https://0x7f.0.0.1/", None),
    ("https://127.0.0.0x1/", None),
    ("https://0177.0.0.1/", None),
    ("https://127.0.0.1/", True),
    ("https://[::1]/", True),
    ("https://[0:0:0:0:0:0:0:1]:443/", True),
    ("https://[::2]/", False),
]


@pytest.mark.row("A1")
@pytest.mark.parametrize(("url", "expected"), HOSTS)
def test_host_predicate_matches_only_unambiguous_hosts(url: str, expected: bool | None) -> None:
    hosts = ["example.org", "*.example.net", "127.0.0.1", "[::1]"]
    assert asks({"host_in": hosts}, url) is expected
    outside = asks({"not": {"host_in": hosts}}, url)
    assert outside is (None if expected is None else not expected)


ELEMENTS: list[tuple[Any, bool | None, bool | None]] = [
    # arguments, whether any, whether every
    ({"to": ["a", "ab"]}, True, True),
    ({"to": ["a", "b"]}, True, False),
    ({"to": ["b"]}, False, False),
    ({"to": ["a", 1]}, True, None),
    ({"to": ["b", 1]}, None, False),
    ({"to": []}, None, None),
    ({"to": "a"}, None, None),
    ({}, None, None),
    ({"to": {"x": "a"}}, True, True),
    ({"to": ["a"] * MAX_LOOKED_AT}, True, True),
    ({"to": ["a"] * (MAX_LOOKED_AT + 1)}, None, None),
]


@pytest.mark.row("A1")
@pytest.mark.parametrize(("arguments", "any_of", "every"), ELEMENTS)
def test_star_pointer_tests_any_or_every_element(
    arguments: Any, any_of: bool | None, every: bool | None
) -> None:
    condition = {"argument": "/to/*", "prefix": "a"}
    assert asks_of(condition, arguments) is any_of
    assert asks_of(condition, arguments, for_every=True) is every


@pytest.mark.parametrize(
    ("pointer", "arguments", "expected"),
    [
        ("/a/b", {"a": {"b": "x"}}, True),
        ("/a~1b", {"a/b": "x"}, True),
        ("/a~01", {"a~1": "x"}, True),
        ("/", {"": "x"}, True),
        ("/a/0", {"a": ["x", "y"]}, True),
        ("/a/1", {"a": ["y", "x"]}, True),
        ("/a/01", {"a": ["y", "x"]}, None),
        ("/a/-", {"a": ["x"]}, None),
        ("/a/2", {"a": ["x"]}, None),
        ("/a/" + "9" * 5000, {"a": ["x"]}, None),
        ("/a/\u0661", {"a": ["y", "x"]}, None),  # a digit, but no index
        ("/a/b/c", {"a": "x"}, None),
        ("/a/*/b", {"a": [{"b": "x"}, {"b": "y"}]}, True),
        ("/a/*/b", {"a": [{"b": "y"}, {}]}, None),
    ],
)
def test_pointer_resolves_to_the_argument_or_absent(
    pointer: str, arguments: Any, expected: bool | None
) -> None:
    """*Source*: RFC 6901, sections 3 and 4."""
    if len(pointer) > 4096:
        condition = Condition.model_construct(argument=pointer, equals="x")
        assert compile_condition(condition, for_every=False)(arguments) is expected
        return
    assert asks_of({"argument": pointer, "equals": "x"}, arguments) is expected


@given(st.text("ab*", max_size=8), st.text("ab", max_size=12))
def test_glob_matches_like_a_backtracking_matcher(pattern: str, text: str) -> None:
    def matches(p: str, t: str) -> bool:
        if not p:
            return not t
        if p[0] == "*":
            return matches(p[1:], t) or (bool(t) and matches(p, t[1:]))
        return bool(t) and p[0] == t[0] and matches(p[1:], t[1:])

    assert compile_glob(pattern)(text) is matches(pattern, text)


PREDICATES = [predicate for predicate, _, _ in TABLE] + [
    {"path_inside": "/workspace"}, {"host_in": ["example.org"]},
]  # fmt: skip


@given(st.sampled_from(PREDICATES), JSON)
def test_predicates_never_raise_for_any_argument(predicate: dict[str, Any], value: Any) -> None:
    assert asks(predicate, value) in (True, False, None)
    for pointer in ("/a", "/a/*", "/a/0/b", "/*/*"):
        assert asks_of({"argument": pointer, **predicate}, {"a": value}) in (True, False, None)
