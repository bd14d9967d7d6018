"""Policy files: what is loaded, refused, and noted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fumehood.core.tool import ToolDefinition
from fumehood.policy.checks import no_value_satisfies, note_rules
from fumehood.policy.loader import PolicyFile, check_policy, load_policy, parse_policy, plain_words
from fumehood.policy.model import Condition, Policy, PolicyError, Predicate, Rule, Verdict
from fumehood.policy.predicates import compile_predicate
from support.policies import faults, tool

TOML = """\
# For the office.
[[rules]]
id = "no-prod-mail"
decision = "deny"
tools = ["send_*"]
reason = '''
Two
lines'''

[[rules]]
id = "clerk"   # second
decision = "ask"
agents = ["clerk"]
approvers = ["alice", "bob"]
quorum = 2
[[rules.when]]
argument = "/to"
glob = "*@example.org"
[[rules.when]]
argument = "/copies/*"
not = { host_in = [
  "example.org",
] }
"""
YAML = """\
# For the office.
rules:
  - id: no-prod-mail
    decision: deny
    tools: [send_*]
    reason: "Two\\nlines"

  - id: clerk
    decision: ask
    agents: [clerk]
    approvers: [alice, bob]
    quorum: 2
    when:
      - {argument: /to, glob: "*@example.org"}
      - argument: /copies/*
        not:
          host_in: [example.org]
"""


@pytest.mark.row("A1")
def test_two_formats_say_the_same_and_yaml_knows_its_lines() -> None:
    toml = parse_policy("p.toml", TOML.encode(), [tool()])
    yaml = parse_policy("p.yaml", YAML.encode(), [tool()])
    assert toml.rules == yaml.rules
    assert (toml.lines, yaml.lines) == ((None, None), (3, 8))
    assert toml.version != yaml.version
    assert len(toml.version) == 12
    assert toml.rules[1].when[1].not_ is not None


def test_names_without_definitions_do() -> None:
    assert parse_policy("p.toml", TOML.encode(), [("send_mail", "1.0.0")]).rules


HEAD = '[[rules]]\nid = "r"\ndecision = "{}"\n'
DENY, ASK, ALLOW = HEAD.format("deny"), HEAD.format("ask"), HEAD.format("allow")
FAULTS: list[tuple[str, str]] = [
    # the text, what is told
    ("", "policy.toml: it holds no rules"),
    ("rules = []", "policy.toml: it holds no rules"),
    ('rules = "x"', "policy.toml: it holds no rules"),
    ("[[rules", "policy.toml: not TOML: Expected ']]' at the end of an array declaration"),
    (DENY + 'tool = ["a"]', "policy.toml: rule 'r': tool: unknown key; did you mean 'tools'?"),
    (
        DENY + 'foo = "a"',
        "rule 'r': foo: unknown key; known are agents, any, approvers, categories,",
    ),
    (DENY + 'foo = "a"', "quorum, read_only, reason, runs, sandboxed, tags, tools, when"),
    (f'foo = "a"\n{DENY}', "policy.toml: unknown key 'foo'; known are mode, rules"),
    (DENY + 'runs = ["/bin/rm"]', "rule 'r': when[0].runs: '/bin/rm' is not the name of a program"),
    (DENY + 'runs = ["-x"]', "when[0].runs: '-x' is not the name of a program"),
    (DENY + "runs = [\"rm '*'\"]", "is not the name of a program, without a path, and plain words"),
    (DENY + "runs = []", "when[0].runs: must not be empty"),
    (
        DENY + 'runs = ["rm"]',
        "rule 'r': when[0].runs: no tool that the rule matches takes a 'command' or",
    ),
    (DENY + "any = []", "policy.toml: rule 'r': any: must not be empty"),
    (DENY + 'any = [{ argument = "/x", prefix = "a" }]', "any[0].argument: no tool that the rule"),
    (f'mod = "shadow"\n{DENY}', "policy.toml: unknown key 'mod'; did you mean 'mode'?"),
    (f'mode = "shade"\n{DENY}', "policy.toml: mode must be 'enforce' or 'shadow'"),
    (DENY + 'mode = "shade"', "policy.toml: rule 'r': mode: must be 'enforce' or 'sha"),
    ('[[rules]]\nid = "r"', "policy.toml: rule 'r': decision: is missing"),
    ('[[rules]]\ndecision = "deny"', "policy.toml: rule number 1: id: is missing"),
    (DENY.replace('"r"', '"r:x"'), "policy.toml: rule 'r:x': id: begins with a letter or digit"),
    (HEAD.format("permit"), "policy.toml: rule 'r': decision: must be 'allow', 'ask' or"),
    (DENY + "tools = []", "policy.toml: rule 'r': tools: must not be empty"),
    (DENY + 'tools = "a"', "policy.toml: rule 'r': tools: must be a list"),
    (
        DENY + 'tools = ["send_mial"]',
        "rule 'r': tools: no registered tool matches 'send_mial'; did you me",
    ),
    (
        DENY + 'tools = ["Send_mail"]',
        "tools: no registered tool matches 'Send_mail'; did you mean 'send_m",
    ),
    (
        DENY + 'tools = ["sent_*"]',
        "policy.toml: rule 'r': tools: no registered tool matches 'sent_*'",
    ),
    (
        DENY + 'tools = ["send_mail@2.*"]',
        "no registered tool matches 'send_mail@2.*'; send_mail has 1.0.0",
    ),
    (
        DENY + 'tools = ["send.mail"]',
        "tools: 'send.mail' is neither a tool's name nor name@version",
    ),
    (DENY + 'tools = ["send_mai?"]', "'*' is the only wildcard"),
    (DENY + 'tools = ["send_mail", "send_mail"]', "rule 'r': tools: 'send_mail' is given twice"),
    (DENY + 'agents = ["a b"]', "policy.toml: rule 'r': agents: 'a b' is not a valid name"),
    (DENY + 'environments = ["prod*"]', "environments: 'prod*' must be an exact name"),
    (
        DENY + 'categories = ["mial"]',
        "no registered tool has 'mial' in its categories; did you mean",
    ),
    (
        DENY + 'tags = ["x"]',
        "policy.toml: rule 'r': tags: no registered tool has 'x' in its tags",
    ),
    (
        DENY + 'tools = ["send_mail"]\ndangerous = true',
        "it can never match: none of these tools meets",
    ),
    (DENY + "dangerous = 1", "policy.toml: rule 'r': dangerous: must be true or false"),
    (DENY + "cost_over = 0.1", 'cost_over: write money as a string, such as "0.10"'),
    (DENY + 'cost_over = "-1"', "policy.toml: rule 'r': cost_over: must be 0 or more"),
    (DENY + "over_budget = false", "policy.toml: rule 'r': over_budget: can only be true"),
    (
        ALLOW + "over_budget = true",
        "policy.toml: rule 'r': over_budget needs 'ask' or 'deny'",
    ),
    (ALLOW + "dangerous = true", "it can never match: a dangerous tool is allowed only by a rule"),
    (
        DENY + "quorum = 2",
        "policy.toml: rule 'r': approvers and quorum need the decision 'ask'",
    ),
    (
        ASK + 'approvers = ["a"]\nquorum = 2',
        "its quorum is larger than the number of its approvers",
    ),
    (ASK + "quorum = 0", "policy.toml: rule 'r': quorum: must be 1 or more"),
    (ASK + 'approvers = ["*"]', "policy.toml: rule 'r': approvers: '*' must be an exact name"),
    (DENY + DENY, "policy.toml: rule 'r': id: the id r is given twice"),
    (DENY + "when = 3", "policy.toml: rule 'r': when: must be a list"),
]
WHEN = DENY + '[[rules.when]]\nargument = "/to"\n'
CONDITION_FAULTS: list[tuple[str, str]] = [
    (WHEN, "policy.toml: rule 'r': when[0]: exactly one of these is needed: prefix, equals"),
    (WHEN + 'prefix = "a"\nglob = "b"', "exactly one of these is needed"),
    (WHEN + 'foo = "a"', "when[0].foo: unknown key; known are argument, equals, glob, host_in, in, max,"),
    (WHEN + 'not = { foo = "a" }', "when[0].not.foo: unknown key; known are equals, glob, host_in, in,"),
    (WHEN + 'runs = ["rm"]', "when[0]: argument is needed, or runs without it"),
    (DENY + 'when = [{ prefix = "a" }]', "when[0]: argument is needed, or runs without it"),
    (WHEN + 'prefx = "a"', "policy.toml: rule 'r': when[0].prefx: unknown key; did you mean 'prefix'?"),
    (WHEN + "prefix = 3", "policy.toml: rule 'r': when[0].prefix: must be a string"),
    (WHEN + 'prefix = ""', "policy.toml: rule 'r': when[0].prefix: must not be empty"),
    (WHEN + "in = []", "policy.toml: rule 'r': when[0].in: must not be empty"),
    (WHEN + "min = 3\nmax = 2", "policy.toml: rule 'r': when[0]: min is over max"),
    (WHEN + "min = true", "policy.toml: rule 'r': when[0].min: a number is needed"),
    (WHEN + "min = nan", "policy.toml: NaN, infinity and numbers too large"),
    (WHEN + "missing = false", "policy.toml: rule 'r': when[0].missing: can only be true"),
    (WHEN + 'path_inside = ""', "policy.toml: rule 'r': when[0].path_inside: is not a valid path"),
    (WHEN + 'host_in = ["https://a.example"]', "is no host name; write it in ASCII"),
    (WHEN + 'host_in = ["a.*.example"]', "may have '*' only in front"),
    (WHEN + 'host_in = ["*"]', "policy.toml: rule 'r': when[0].host_in: '*' may have '*' only in front"),
    (WHEN + 'host_in = ["A.example"]', "must be written as 'a.example'"),
    (WHEN + 'host_in = ["*.127.0.0.1"]', "is an address, which has no hosts below it"),
    (WHEN + 'not = { not = { prefix = "a" } }', "a 'not' inside a 'not' is written without both"),
    (WHEN + 'not = { argument = "/a", prefix = "a" }', "when[0].not.argument: unknown key"),
    (WHEN.replace("/to", "to") + 'prefix = "a"', "policy.toml: rule 'r': when[0].argument: is not a JSON"),
    (WHEN.replace("/to", "/~2") + 'prefix = "a"', "when[0].argument: is not a JSON pointer"),
    (WHEN.replace("/to", "/tto") + 'prefix = "a"', "takes the argument '/tto'; did you mean 'to'?"),
    (WHEN.replace("/to", "/to/x") + 'prefix = "a"', "no tool that the rule matches takes the argument"),
    (WHEN.replace("/to", "/copies/x") + 'prefix = "a"', "takes the argument '/copies/x'"),
    (WHEN + 'equals = "a"\n[[rules.when]]\nargument = "/to"\nequals = "b"', "rule 'r': when[1]: no value can satisfy"),
    (WHEN + 'equals = "a"\n[[rules.when]]\nargument = "/to"\nequals = "a"', "it is written twice"),
    (WHEN + 'min = 3\n[[rules.when]]\nargument = "/to"\nmax = 2', "no value can satisfy"),
]  # fmt: skip


@pytest.mark.row("A1")
@pytest.mark.parametrize(("text", "told"), FAULTS + CONDITION_FAULTS)
def test_fault_is_told_with_file_and_key(text: str, told: str) -> None:
    found = faults(text, tool(category="mail"), tool("other", dangerous=True))
    assert any(told in fault for fault in found), found


SOUND = [
    DENY,
    DENY + 'tools = ["send_mail", "sen*"]',
    DENY + 'tools = ["send_mail@1.*", "send_mail@1.0.0"]',
    DENY + 'categories = ["mail"]',
    DENY + "dangerous = true",
    ASK + 'approvers = ["a", "b"]\nquorum = 2',
    ASK + "over_budget = true",
    DENY + 'cost_over = "0.10"',
    WHEN + "equals = [1, { a = true }]",
    WHEN.replace("/to", "/copies/*") + 'prefix = "a"',
    WHEN.replace("/to", "/copies/0") + 'prefix = "a"',
    WHEN + 'not = { missing = true }\n[[rules.when]]\nargument = "/to"\nprefix = "a"',
    'mode = "shadow"\n' + DENY,
    DENY + DENY.replace('"r"', '"s"').replace("deny", "allow") + 'mode = "shadow"',
]


@pytest.mark.parametrize("text", SOUND)
def test_sound_twin_is_loaded(text: str) -> None:
    assert faults(text, tool(category="mail")) == []


def _rule(number: int, decision: str, *more: str) -> str:
    return "\n".join((f'[[rules]]\nid = "r{number}"\ndecision = "{decision}"', *more, ""))


SHADOWED = [
    # what the second rule can never do, with its twin that can
    (("deny", 'environments = ["x"]'), ("ask", 'environments = ["x"]'), ("ask", 'environments = ["y"]')),
    (("deny", 'agents = ["a"]'), ("ask", 'agents = ["a"]'), ("ask", 'agents = ["b"]')),
    (("deny", 'tools = ["send_*"]'), ("deny", 'tools = ["send_m*"]'), ("deny", 'tools = ["s*"]')),
    (("deny", 'agents = ["a*"]'), ("deny", 'agents = ["ab", "ac"]'), ("deny", 'agents = ["ab", "b"]')),
    (("ask", "quorum = 2"), ("ask", 'agents = ["a"]'), ("ask", "quorum = 3")),
    (("ask",), ("allow", 'tools = ["send_mail"]'), ("ask", 'approvers = ["a"]')),
    (("allow", 'tools = ["*"]'), ("allow", 'tools = ["send*"]'), ("allow", 'tools = ["send_mail"]')),
    (("deny", 'cost_over = "1"'), ("deny", 'cost_over = "2"'), ("deny", 'cost_over = "0.5"')),
    (("deny", "dangerous = true"), ("ask", "dangerous = true"), ("ask", "dangerous = false")),
    (("deny", 'tools = ["send_mail"]'), ("deny", 'tools = ["send_mail@1.0.0"]'), ("deny", 'tools = ["s*"]')),
    (
        ("deny", 'when = [{argument = "/to", prefix = "a"}]'),
        ("allow", 'tools = ["send_mail"]', 'when = [{argument = "/to", prefix = "a"}]'),
        ("allow", 'tools = ["send_mail"]', 'when = [{argument = "/to", prefix = "b"}]'),
    ),
]  # fmt: skip


@pytest.mark.row("A1")
@pytest.mark.parametrize(("first", "dead", "alive"), SHADOWED)
def test_rule_that_others_leave_nothing_to_is_refused(
    first: tuple[str, ...], dead: tuple[str, ...], alive: tuple[str, ...]
) -> None:
    (told,) = faults(_rule(1, *first) + _rule(2, *dead))
    assert "rule 'r2': it can never decide: the rule r1 always decides first" in told
    assert faults(_rule(1, *first) + _rule(2, *alive)) == []


def test_stricter_rule_shadows_from_below_too() -> None:
    (told,) = faults(_rule(1, "allow", 'tools = ["send_mail"]') + _rule(2, "deny"))
    assert told.startswith("policy.toml: rule 'r1': it can never decide: the rule r2")


def test_every_fault_is_told_at_once_in_order_of_the_rules() -> None:
    found = faults(DENY + "mode = 1\n" + DENY.replace('"r"', '"s"') + "nothing = 1\nquorum = 0\n")
    assert [fault.split(":")[1:3] for fault in found] == [
        [" rule 'r'", " mode"], [" rule 's'", " quorum"], [" rule 's'", " nothing"],
    ]  # fmt: skip


def test_rules_of_right_shape_are_held_against_the_tools_although_others_have_none() -> None:
    """Each of these stayed unsaid until the last key was right."""
    when = '[[rules.when]]\nargument = "/tto"\nprefix = "a"\n'
    found = faults(
        _rule(0, "deny", "nothing = 1") + _rule(1, "deny", 'tools = ["send_mial"]')
        + _rule(1, "ask", 'tags = ["x"]') + _rule(3, "ask", 'categories = ["y"]')
        + _rule(4, "ask", 'agents = ["b"]') + when + _rule(0, "deny", "quorum = 0"),
    )  # fmt: skip
    for told in (
        "rule 'r0': nothing: unknown key", "no registered tool matches 'send_mial'",
        "the id r1 is given twice", "no registered tool has 'x' in its tags",
        "no registered tool has 'y' in its categories", "takes the argument '/tto'",
        "rule 'r0': quorum: must be 1 or more", "the id r0 is given twice",
    ):  # fmt: skip
        assert sum(told in fault for fault in found) == 1, (told, found)
    assert len(found) == 8


def test_faults_beyond_the_first_fifty_are_counted() -> None:
    found = faults("".join(_rule(number, "permit") for number in range(60)))
    assert len(found) == 51
    assert found[-1] == "policy.toml: and 10 more"


NOT_SHAPED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.just("x" * 5000) | st.just(["x"] * 1001) | st.just("0.0000000001") | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
LIBRARY_SPEECH = re.compile(
    r"Input|valid |validation|Field|Tuple|String|Decimal|should|instance|dictionary|Model|Rule\b"
)


@settings(max_examples=400)
@given(
    st.dictionaries(
        st.sampled_from([f.alias or n for n, f in Rule.model_fields.items()]), NOT_SHAPED
    ),
    st.dictionaries(
        st.sampled_from([f.alias or n for n, f in Condition.model_fields.items()]), NOT_SHAPED
    ),
)
def test_what_is_wrong_with_a_shape_is_said_in_plain_words(
    rule: dict[str, Any], condition: dict[str, Any]
) -> None:
    try:
        Rule.model_validate({"when": [condition], **rule})
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_input=False):
            if fault["type"] != "value_error":  # those are our own
                assert not LIBRARY_SPEECH.search(plain_words(fault, [])), fault


@pytest.mark.parametrize("key", ["tools", "agents", "when", "over_budget", "mode"])
def test_key_without_a_value_is_no_absent_one(key: str) -> None:
    """In YAML a list that was forgotten would otherwise mean everybody."""
    text = f"rules:\n- id: r\n  decision: allow\n  {key}:\n"
    (told,) = faults(text, name="p.yaml")
    assert told == f"p.yaml:2: rule 'r': {key} has no value; leave the key out instead"
    assert faults("rules:\n- id: r\n  decision: allow\n", name="p.yaml") == []


def test_yaml_fault_has_its_line() -> None:
    text = "rules:\n- id: r\n  decision: deny\n  when:\n  - argument: /to\n    prefx: a\n"
    assert faults(text, name="p.yml")[0].startswith("p.yml:6: rule 'r': when[0].prefx: unknown key")


def test_mode_of_the_file_is_that_of_every_rule() -> None:
    second = '[[rules]]\nid = "s"\ndecision = "ask"\nmode = "enforce"\nagents = ["a"]\n'
    policy = parse_policy(
        "p.toml", f'mode = "shadow"\n{second}{DENY}agents = ["b"]'.encode(), [tool()]
    )
    assert [rule.mode for rule in policy.rules] == ["shadow", "shadow"]


def test_too_many_rules_are_refused() -> None:
    text = "".join(f'[[rules]]\nid = "r{n}"\ndecision = "deny"\n' for n in range(5001))
    assert faults(text) == ["policy.toml: it holds 5001 rules, more than 5000"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def write(place: Path, text: str, name: str = "policy.toml", mode: int = 0o600) -> Path:
    unfinished = place / f".{name}"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.chmod(mode)
    return unfinished.rename(place / name)


@pytest.mark.row("A1")
def test_file_that_others_may_write_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = Path(os.path.realpath(tmp_path_factory.mktemp("policy")))
    place.chmod(0o700)
    assert load_policy(write(place, DENY), [tool()]).rules
    for mode in (0o620, 0o602):
        with pytest.raises(PolicyError, match="can be written by others than its owner"):
            load_policy(write(place, DENY, mode=mode), [tool()])
    (place / "link.toml").symlink_to(write(place, DENY))
    with pytest.raises(PolicyError, match="symbolic link"):
        load_policy(place / "link.toml", [tool()])
    place.chmod(0o770)
    with pytest.raises(PolicyError, match="the directory can be written by others"):
        load_policy(place / "policy.toml", [tool()])


@pytest.mark.parametrize("name", ["policy.json", "policy", "policy.toml.bak"])
def test_ending_says_the_format(place: Path, name: str) -> None:
    with pytest.raises(PolicyError, match="must end in one of"):
        load_policy(write(place, DENY, name), [tool()])


@pytest.mark.row("A1")
def test_change_counts_when_two_looks_saw_the_same(place: Path) -> None:
    file = PolicyFile(write(place, DENY), lambda: [tool()])
    first = file.load()
    assert file.poll() is None
    write(place, ASK)
    assert file.poll() is None
    changed = file.poll()
    assert isinstance(changed, Policy)
    assert (changed.rules[0].decision, changed.version != first.version) == (Verdict.ASK, True)
    assert file.poll() is None


@pytest.mark.row("A1")
def test_faulty_or_missing_file_is_told_once_a_change(place: Path) -> None:
    file = PolicyFile(write(place, DENY), lambda: [tool()])
    file.load()
    path = write(place, "[[rules]")
    assert file.poll() is None
    assert isinstance(file.poll(), PolicyError)
    assert file.poll() is None
    path.unlink()
    assert file.poll() is None
    gone = file.poll()
    assert isinstance(gone, PolicyError)
    assert "No such file" in str(gone)
    assert [file.poll(), file.poll()] == [None, None]
    write(place, ASK)
    file.poll()
    assert isinstance(file.poll(), Policy)


# -- Conditions that exclude each other are refused, rules that were perhaps not meant are --


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


@pytest.mark.row("A1")
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


@pytest.mark.row("A1")
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


@pytest.mark.row("A1")
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
@pytest.mark.row("A1")
@pytest.mark.parametrize(("tools", "told"), BY_PATTERN)
def test_dangerous_tool_that_a_pattern_does_not_allow_is_noted(tools: str, told: list[str]) -> None:
    noted = noted_of(rule("allow", tools=tools))
    assert [words in said for said, words in zip(noted, told, strict=True)] == [True] * len(told)


@pytest.mark.row("A1")
@pytest.mark.row("A1")
def test_pattern_that_says_harmless_or_denies_is_not_noted() -> None:
    for text in (
        rule("deny", tools='["delete_*"]'),
        rule("allow", tools='["delete_*"]\ndangerous = false'),
    ):
        assert noted_of(text) == []


@pytest.mark.row("A1")
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


@pytest.mark.row("A1")
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


@pytest.mark.row("A1")
def test_runs_is_a_condition_and_notes_tools_without_a_command() -> None:
    tools = [taking("sh", command=NAME), taking("ex", argv=NAME), taking("ls", path=NAME)]

    def noted(text: str) -> list[str]:
        found: list[str] = []
        policy = parse_policy("p.toml", text.encode(), tools)
        note_rules(policy.rules, tools, lambda _n, _p, words: found.append(words))
        return found

    head = '[[rules]]\nid = "r"\ndecision = "deny"\n'
    assert noted(head + 'tools = ["sh", "ex", "external:Bash"]\nruns = ["rm", "git push"]') == []
    (notice,) = noted(head + 'any = [{ runs = ["rm"] }]')
    assert notice.startswith("ls takes no 'command' or 'argv', so the condition is always in doubt")
    short, long = (
        parse_policy("p.toml", (head + text).encode(), tools).rules
        for text in ('runs = ["rm"]', '[[rules.when]]\nruns = ["rm"]')
    )
    assert short == long


@pytest.mark.row("A1")
def test_the_parser_of_commands_is_loaded_only_for_a_policy_with_runs() -> None:
    program = """
import sys
from fumehood.policy.model import Rule
from fumehood.policy.rules import compile_rule
for more in ({"when": [{"argument": "/a", "prefix": "b"}]}, {"runs": ["rm"]}):
    compile_rule(Rule.model_validate({"id": "r", "decision": "deny", **more}), None, "")
    print("tree_sitter" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.row("A1")
def test_tools_of_one_notice_are_counted_beyond_three() -> None:
    tools = [taking(f"t{number}", x=NAME) for number in range(5)] + [taking("has", path=NAME)]
    text = rule("deny", 'argument = "/path"\nprefix = "a"', tools="")
    noted: list[str] = []
    policy = parse_policy("p.toml", text.encode(), tools)
    note_rules(policy.rules, tools, lambda _n, _p, words: noted.append(words))
    assert len(noted) == 1
    assert noted[0].startswith("t0, t1, t2 and 2 more tools: each takes no argument")


@pytest.mark.row("D3")
def test_a_rule_may_name_tools_of_an_mcp_server_before_they_are_listed() -> None:
    tools = [tool(), ("clock__", "")]
    for entry in ("clock__stop", "clock__*", "clock__stop@1.0.0"):
        assert parse_policy("p.toml", (DENY + f'tools = ["{entry}"]').encode(), tools).rules
    for entry in ("clocks__stop", "clock_stop", "other__stop"):
        with pytest.raises(PolicyError, match="no registered tool matches"):
            parse_policy("p.toml", (DENY + f'tools = ["{entry}"]').encode(), tools)
    misspelt = DENY + 'tools = ["send_mail"]\n[[rules.when]]\nargument = "/tto"\nprefix = "a"\n'
    with pytest.raises(PolicyError, match="takes the argument"):  # others are checked as before
        parse_policy("p.toml", misspelt.encode(), tools)
