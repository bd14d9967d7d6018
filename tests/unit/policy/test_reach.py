"""Rules that no call can satisfy are refused, those that could match never, doubtful ones noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.core.tool import ToolDefinition
from fumehood.policy.contradictions import no_value_satisfies
from fumehood.policy.faults import check_rules
from fumehood.policy.loader import check_policy, parse_policy
from fumehood.policy.model import Condition, Predicate, Rule
from fumehood.policy.notices import note_rules
from fumehood.policy.predicates import compile_condition, compile_predicate
from fumehood.policy.reach import answers_of
from fumehood.policy.rules import compile_rule
from fumehood.registry.json_schema import CompiledSchema
from support.policies import facts, faults, tool

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
DEAD: list[tuple[str, ToolDefinition, str, str]] = [
    # the dead rule, its tool, what is told, the twin that can match
    (
        rule("allow", X + 'path_inside = "/a"', X + 'not = { path_inside = "/a" }'),
        taking(x=NAME), "policy.toml:8: rule 'r': when: no value can satisfy",
        rule("allow", X + 'path_inside = "/a"', X + 'not = { path_inside = "/a/b" }'),
    ),
    (
        rule("allow", X + 'path_inside = "/a/b"', X + 'not = { path_inside = "/a" }'),
        taking(x=NAME), "no value can satisfy",
        rule("allow", X + 'path_inside = "/ab"', X + 'not = { path_inside = "/a" }'),
    ),
    (
        rule("allow", X + 'prefix = "ab"', X + 'prefix = "b"'),
        taking(x=NAME), "no value can satisfy", rule("allow", X + 'prefix = "ab"', X + 'prefix = "a"'),
    ),
    (
        rule("allow", X + 'equals = "ab"', X + 'glob = "*c"'),
        taking(x=NAME), "no value can satisfy", rule("allow", X + 'equals = "ab"', X + 'glob = "*b"'),
    ),
    (
        rule("allow", X + "min = 5", X + "not = { min = 4 }"),
        taking(x={"type": "integer"}), "no value can satisfy",
        rule("allow", X + "min = 3", X + "not = { min = 4 }"),
    ),
    (
        rule("allow", X + "min = 40"), taking(x=ROUNDED),
        "policy.toml:5: rule 'r': when: it can never match: t takes integer from 0 up to 15 there",
        rule("allow", X + "min = 15"),
    ),
    (rule("allow", X + "max = -1"), taking(x=ROUNDED), "never match", rule("allow", X + "max = 0")),
    (rule("allow", X + "equals = 16"), taking(x=ROUNDED), "never match", rule("allow", X + "in = [16, 3]")),
    (
        rule("allow", X + "min = 1"), taking(x=NAME), "it can never match: t takes string there",
        rule("allow", X + 'prefix = "1"'),
    ),
    (rule("allow", X + 'glob = "*"'), taking(x=ROUNDED), "never match", rule("allow", X + "min = 0")),
    (
        rule("allow", X + 'equals = "c"'), taking(x={"enum": ["a", "b"]}),
        "t takes one of 'a', 'b' there", rule("allow", X + 'glob = "a*"'),
    ),
    (
        rule("allow", 'argument = "/x/*"\nmin = 1'), taking(x={"type": "array", "items": NAME}),
        "never match", rule("allow", 'argument = "/x/*"\nprefix = "a"'),
    ),
    # One that denies or asks matches also in doubt: where the argument cannot be left out.
    (rule("deny", X + "min = 40"), taking(x=ROUNDED, required=("x",)), "never match", rule("deny", X + "min = 4")),
    (
        rule("ask", X + "min = 40"), taking(x={**ROUNDED, "default": 3}), "never match",
        rule("ask", X + "min = 4"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dead", "of", "told", "alive"), DEAD)
def test_rule_that_no_call_can_satisfy_is_refused_with_its_line(
    dead: str, of: ToolDefinition, told: str, alive: str
) -> None:
    found = faults(dead, of)
    assert len(found) == 1, found
    assert told in found[0]
    assert found[0].startswith("policy.toml:")
    assert faults(alive, of) == []


UNION = {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string"}]}
OPEN: list[tuple[str, tuple[ToolDefinition, ...]]] = [
    # what may match after all, and so is not refused
    (rule("deny", X + "min = 40"), (taking(x=ROUNDED),)),  # where it is left out
    (rule("deny", X + "min = 1"), (taking(x=NAME, required=("x",)),)),  # always in doubt
    (rule("deny", X + 'path_inside = "/a"', X + 'not = { path_inside = "/a" }'), (taking(x=NAME),)),
    (rule("ask", 'argument = "/x/*"\nmin = 1'), (taking(x={"type": "array", "items": NAME}),)),
    (rule("allow", X + "min = 40"), (taking(x=UNION),)),
    (rule("allow", X + "min = 40"), (taking(x={}),)),
    (rule("allow", X + "min = 40"), (taking(x={"$ref": "#/$defs/n"}),)),
    (rule("allow", X + "min = 40"), (taking(x={"type": ["integer", "string"]}),)),
    (rule("allow", X + "min = 40", tools='["t", "u"]'), (taking(x=ROUNDED), taking("u", x={"type": "number"}))),
    (rule("allow", X + "min = 40", tools='["t*"]'), (taking(x=ROUNDED),)),  # another may come
    (rule("deny", X + "min = 40", tools=""), (taking(x=ROUNDED, required=("x",)),)),
    (rule("allow", 'argument = "/x/y"\nmin = 40'), (taking(x={"properties": {"y": ROUNDED}}),)),
    (rule("allow", X + "missing = true"), (taking(x=ROUNDED),)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "tools"), OPEN)
def test_rule_that_may_match_after_all_is_not_refused(
    text: str, tools: tuple[ToolDefinition, ...]
) -> None:
    assert faults(text, *tools) == []


def test_with_tools_of_which_only_the_name_is_known_nothing_is_called_dead() -> None:
    text = rule("allow", X + "min = 40", tools='["t", "u"]').encode()
    assert parse_policy("p.toml", text, [taking(x=ROUNDED), ("u", "1.0.0")]).rules


SCALARS = st.sampled_from(
    [None, True, False, 0, 1, 1.0, 2, 5, -1, 2.5, "", "a", "ab", "a/b", "/a", "1"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("yz0"), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
KINDS = st.sampled_from(["integer", "number", "string", "boolean", "null", "array", "object"])
LEAVES = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS | st.lists(KINDS, min_size=1, max_size=2, unique=True),
        "minimum": st.integers(-2, 3), "maximum": st.integers(-2, 3),
        "exclusiveMinimum": st.integers(-2, 3), "exclusiveMaximum": st.integers(-2, 3),
        "enum": st.lists(SCALARS, min_size=1, max_size=3), "const": SCALARS,
        "anyOf": st.just([{"type": "string"}, {"type": "integer"}]), "default": SCALARS,
    },
)  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.builds(lambda s: {"type": "array", "items": s}, inner)
    | st.builds(lambda s, r: {"type": "object", "properties": {"y": s}, "required": r}, inner, st.sampled_from([[], ["y"]]))
    | st.builds(lambda s: {"properties": {"y": s}, "items": s}, inner),
    max_leaves=3,
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
POINTERS = st.sampled_from(["/x", "/x", "/x/*", "/x/y", "/x/0", "/x/*/y", "/w"])
CONDITIONS = st.builds(
    lambda p, a: Condition.model_validate({"argument": a, **p}), PREDICATES, POINTERS
)
ARGUMENTS = st.dictionaries(st.just("x"), VALUES, max_size=1)


def let_pass(of: ToolDefinition, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The effective arguments, unless the tool's schema refuses them."""
    default = of.parameters["properties"]["x"].get("default")
    effective = {"x": default, **arguments} if default is not None else arguments
    return None if CompiledSchema(of.parameters).violations(effective) else effective


@settings(max_examples=400, deadline=None)
@given(SCHEMAS, st.booleans(), CONDITIONS, st.lists(ARGUMENTS, min_size=1, max_size=6))
def test_every_answer_that_a_call_gets_is_among_those_that_are_told(
    schema: dict[str, Any], is_required: bool, condition: Condition, calls: list[dict[str, Any]]
) -> None:
    of = taking(x=schema, required=("x",) if is_required else ())
    told = answers_of(condition, of)
    for arguments in calls:
        effective = let_pass(of, arguments)
        if effective is not None:
            for for_every in (True, False):
                assert compile_condition(condition, for_every=for_every)(effective) in told


def test_rule_that_could_match_is_never_called_dead() -> None:
    dead, ran = set(), 0

    @settings(max_examples=600, deadline=None, derandomize=True)  # it asserts what it found
    @given(
        SCHEMAS,
        st.booleans(),
        st.sampled_from(["allow", "ask", "deny"]),
        st.lists(CONDITIONS, min_size=1, max_size=2),
        st.lists(ARGUMENTS, min_size=1, max_size=6),
    )
    def hold(
        schema: dict[str, Any],
        is_required: bool,
        decision: str,
        conditions: list[Condition],
        calls: list[dict[str, Any]],
    ) -> None:
        nonlocal ran
        of = taking(x=schema, required=("x",) if is_required else ())
        made = Rule.model_validate(
            {"id": "r", "decision": decision, "tools": ["t"], "when": conditions}
        )
        told: list[str] = []
        check_rules([made], [("t", "1.0.0")], [of], lambda _n, _p, words: told.append(words))
        if not any("can never match" in words for words in told):
            return
        dead.add(decision)
        for arguments in calls:
            effective = let_pass(of, arguments)
            if effective is not None:
                ran += 1
                assert not compile_rule(made, None, "").matches(facts(of, effective)), told

    hold()
    assert "allow" in dead
    assert dead & {"ask", "deny"}
    assert ran > 20


@settings(max_examples=400, deadline=None)
@given(PREDICATES, PREDICATES, st.lists(VALUES, min_size=1, max_size=10))
def test_two_conditions_that_one_value_satisfies_never_exclude_each_other(
    one: dict[str, Any], other: dict[str, Any], values: list[Any]
) -> None:
    first, second = Predicate.model_validate(one), Predicate.model_validate(other)
    if no_value_satisfies(first, second) and "missing" not in str((one, other)):
        for value in values:
            assert not (compile_predicate(first)(value) and compile_predicate(second)(value))


PATHS = {"type": "array", "items": NAME}
FILES = (taking("delete_files", paths=PATHS), taking("write_file", path=NAME))
NOTICES: list[tuple[str, tuple[ToolDefinition, ...], str]] = [
    # a rule that surely says something else than was meant, its tools, what is told
    (
        rule("deny", 'argument = "/paths/*"\nglob = "*.key"', tools='["delete_files", "write_file"]'),
        FILES, "policy.toml:5: rule 'r': when: write_file takes no argument '/paths/*', so the cond",
    ),
    (rule("ask", 'argument = "/path"\nprefix = "a"', tools=""), FILES, "delete_files takes no argument '/path'"),
    (rule("deny", X + "min = 1"), (taking(x=NAME),), "t takes string as '/x', so the condition is always"),
    (rule("deny", X + "min = 40"), (taking(x=ROUNDED),), "never satisfies the condition; it holds only where"),
    (
        rule("deny", X + 'path_inside = "/a"', X + 'not = { path_inside = "/a" }'), (taking(x=NAME),),
        "policy.toml:8: rule 'r': when: no value satisfies this condition and an earlier one",
    ),
    (rule("allow", X + "min = 40", tools='["t*"]'), (taking(x=ROUNDED),), "no call of a tool that there is now"),
]  # fmt: skip


DANGEROUS = (
    taking("delete_files", paths=PATHS).model_copy(update={"dangerous": True}),
    taking("delete_mails", paths=PATHS).model_copy(update={"dangerous": True}),
    taking("delete_hints", path=NAME),
)
BY_PATTERN = [
    (
        '["delete_f*"]',
        ["delete_files (it allows nothing); to allow it, write its name out in tools"],
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
