"""Conditions that exclude each other are refused, rules that were perhaps not meant are noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.core.tool import ToolDefinition
from fumehood.policy.checks import no_value_satisfies, note_rules
from fumehood.policy.loader import check_policy, parse_policy
from fumehood.policy.model import Predicate
from fumehood.policy.predicates import compile_predicate
from support.policies import faults, tool

pytestmark = pytest.mark.row("A1")


def rule(decision: str, *conditions: str, tools: str = '["t"]', name: str = "r") -> str:
    when = "".join(f"[[rules.when]]\n{condition}\n" for condition in conditions)
    listed = f"tools = {tools}\n" if tools else ""
    return f'[[rules]]\nid = "{name}"\ndecision = "{decision}"\n{listed}{when}'


def taking(name: str = "t", *, required: tuple[str, ...] = (), **properties: Any) -> ToolDefinition:
    made = tool(name, properties=properties)
    return made.model_copy(update={"parameters": {**made.parameters, "required": [*required]}})


ROUNDED = {"type": "integer", "minimum": 0, "maximum": 15}
NAME = {"type": "string"}
X = 'argument = "/x"\n'
EACH = 'argument = "/x/*"\n'
EXCLUDING: list[tuple[str, str]] = [
    # two conditions of a rule that exclude each other, the twin that can match
    (rule("deny", X + "equals = 1", X + "in = [2, 3]"), rule("deny", X + "equals = 1", X + "in = [2, 1.0]")),
    (rule("ask", X + "max = 2", X + "min = 3"), rule("ask", X + "max = 2", X + "min = 2")),
    (rule("allow", X + "min = 3", X + "max = 2"), rule("allow", X + "min = 3", X + "not = { max = 2 }")),
    (rule("allow", EACH + "max = 2", EACH + "min = 3"), rule("deny", EACH + "max = 2", EACH + "min = 3")),
]  # fmt: skip


@pytest.mark.parametrize(("dead", "alive"), EXCLUDING)
def test_two_conditions_that_exclude_each_other_are_refused_with_their_place(
    dead: str, alive: str
) -> None:
    of = taking(x={})
    (told,) = faults(dead, of)
    assert told.startswith("policy.toml: rule 'r': when[1]: no value can satisfy")
    assert faults(alive, of) == []


NOT_LOOKED_FOR: list[tuple[str, dict[str, Any]]] = [
    # rules that no call satisfies, which are loaded all the same
    (rule("allow", X + 'path_inside = "/a"', X + 'not = { path_inside = "/a" }'), NAME),
    (rule("allow", X + 'prefix = "ab"', X + 'prefix = "b"'), NAME),
    (rule("allow", X + 'equals = "ab"', X + 'glob = "*c"'), NAME),
    (rule("allow", X + "missing = true", X + 'equals = "ab"'), NAME),
    (rule("allow", X + "min = 40"), ROUNDED),
    (rule("allow", X + "min = 1"), NAME),
    (rule("deny", X + "min = 40"), {**ROUNDED, "default": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "schema"), NOT_LOOKED_FOR)
def test_conditions_are_not_held_against_schemas_and_each_other_beyond_that(
    text: str, schema: dict[str, Any]
) -> None:
    assert faults(text, taking(x=schema)) == []


SCALARS = st.sampled_from(
    [None, True, False, 0, 1, 1.0, 2, 5, -1, 2.5, "", "a", "ab", "a/b", "/a", "1"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("yz0"), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
PREDICATES = st.recursive(
    st.one_of(
        st.builds(lambda v: {"equals": v}, SCALARS),
        st.builds(lambda v: {"in": v}, st.lists(SCALARS, min_size=1, max_size=2)),
        st.builds(lambda v: {"min": v}, st.integers(-2, 3)),
        st.builds(lambda v: {"max": v}, st.integers(-2, 3)),
        st.builds(lambda v: {"prefix": v}, st.sampled_from(["a", "ab", "b"])),
        st.builds(lambda v: {"glob": v}, st.sampled_from(["a*", "*b", "*"])),
        st.builds(lambda v: {"path_inside": v}, st.sampled_from(["/a", "/a/b", "a"])),
        st.just({"host_in": ["a"]}),
        st.just({"missing": True}),
    ),
    lambda inner: st.builds(lambda p: p if "not" in p else {"not": p}, inner),
    max_leaves=1,
)


@settings(max_examples=400, deadline=None)
@given(PREDICATES, PREDICATES, st.lists(VALUES, min_size=1, max_size=10))
def test_two_conditions_that_one_value_satisfies_never_exclude_each_other(
    one: dict[str, Any], other: dict[str, Any], values: list[Any]
) -> None:
    first, second = Predicate.model_validate(one), Predicate.model_validate(other)
    if no_value_satisfies(first, second):
        for value in values:
            assert not (compile_predicate(first)(value) and compile_predicate(second)(value))


PATHS = {"type": "array", "items": NAME}
FILES = (taking("delete_files", paths=PATHS), taking("write_file", path=NAME))
NOTICES: list[tuple[str, tuple[ToolDefinition, ...], str]] = [
    # a rule that surely says something else than was meant, its tools, what is told
    (
        rule("deny", 'argument = "/paths/*"\nglob = "*.key"', tools='["delete_files", "write_file"]'),
        FILES, "policy.toml: rule 'r': when[0]: write_file takes no argument '/paths/*', so the cond",
    ),
    (rule("ask", 'argument = "/path"\nprefix = "a"', tools=""), FILES, "delete_files takes no argument '/path'"),
]  # fmt: skip


DANGEROUS = (
    taking("delete_files", paths=PATHS).model_copy(update={"dangerous": True}),
    taking("delete_mails", paths=PATHS).model_copy(update={"dangerous": True}),
    taking("delete_hints", path=NAME),
)
BY_PATTERN = [
    (
        '["delete_f*"]',
        ["delete_files (it allows nothing); to allow it, put its exact name into tools"],
    ),
    ('["delete_*"]', ["does not allow delete_files, delete_mails; to allow it"]),
    ('["delete_*", "delete_files"]', ["does not allow delete_mails; to allow it"]),
    ('["delete_f*@1.*"]', ["delete_files (it allows nothing)"]),
    # said as it is meant: by name, by a pattern of harmless tools, without a word on tools
    ('["delete_files", "delete_mails@1.*"]', []),
    ('["delete_h*"]', []),
    ("", []),
]


def noted_of(text: str) -> list[str]:
    noted: list[str] = []
    policy = parse_policy("p.toml", text.encode(), DANGEROUS)
    note_rules(policy.rules, DANGEROUS, lambda _n, _p, words: noted.append(words))
    return noted


@pytest.mark.row("A1")
@pytest.mark.parametrize(("tools", "told"), BY_PATTERN)
def test_dangerous_tool_that_a_pattern_does_not_allow_is_noted(tools: str, told: list[str]) -> None:
    noted = noted_of(rule("allow", tools=tools))
    assert [words in said for said, words in zip(noted, told, strict=True)] == [True] * len(told)


@pytest.mark.row("A1")
def test_pattern_that_says_harmless_or_denies_is_not_noted() -> None:
    for text in (
        rule("deny", tools='["delete_*"]'),
        rule("allow", tools='["delete_*"]\ndangerous = false'),
    ):
        assert noted_of(text) == []


@pytest.mark.parametrize(("text", "tools", "told"), NOTICES)
def test_what_was_perhaps_not_meant_is_noted_and_loaded(
    tmp_path: Path, text: str, tools: tuple[ToolDefinition, ...], told: str
) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "policy.toml"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    policy, (notice,) = check_policy(file, tools)
    assert told in notice
    assert len(policy.rules) == 1


@pytest.mark.parametrize(
    "text",
    [
        rule("deny", 'argument = "/paths/*"\nglob = "*.key"', tools='["delete_files"]'),
        rule("allow", 'argument = "/paths/*"\nglob = "*"', tools='["delete_files", "write_file"]'),
        rule("deny", 'argument = "/path"\nmissing = true', tools='["delete_files", "write_file"]'),
    ],
)
def test_rule_that_says_what_it_means_is_not_noted(text: str) -> None:
    noted: list[str] = []
    policy = parse_policy("p.toml", text.encode(), FILES)
    note_rules(policy.rules, FILES, lambda _n, _p, words: noted.append(words))
    assert noted == []


def test_tools_of_one_notice_are_counted_beyond_three() -> None:
    tools = [taking(f"t{number}", x=NAME) for number in range(5)] + [taking("has", path=NAME)]
    text = rule("deny", 'argument = "/path"\nprefix = "a"', tools="")
    noted: list[str] = []
    policy = parse_policy("p.toml", text.encode(), tools)
    note_rules(policy.rules, tools, lambda _n, _p, words: noted.append(words))
    assert len(noted) == 1
    assert noted[0].startswith("t0, t1, t2 and 2 more tools: each takes no argument")
