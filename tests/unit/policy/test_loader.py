"""Policy files: what is loaded and refused."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from fumehood.policy.loader import PolicyFile, load_policy, parse_policy
from fumehood.policy.model import Policy, PolicyError
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
def test_toml_and_yaml_policies_are_equal_and_yaml_has_lines() -> None:
    toml = parse_policy("p.toml", TOML.encode(), [tool()])
    yaml = parse_policy("p.yaml", YAML.encode(), [tool()])
    assert toml.rules == yaml.rules
    assert (toml.lines, yaml.lines) == ((None, None), (3, 8))
    assert toml.version != yaml.version
    assert len(toml.version) == 12
    assert toml.rules[1].when[1].not_ is not None


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
    (f'foo = "a"\n{DENY}', "policy.toml: unknown key 'foo'; known are budgets, mode, rules"),
    (DENY + "any = []", "policy.toml: rule 'r': any: must not be empty"),
    (DENY + 'any = [{ argument = "/x", prefix = "a" }]', "any[0].argument: no tool that the rule"),
    (f'mod = "shadow"\n{DENY}', "policy.toml: unknown key 'mod'; did you mean 'mode'?"),
    (f'mode = "shade"\n{DENY}', "policy.toml: mode must be 'enforce' or 'shadow'"),
    (DENY + 'mode = "shade"', "policy.toml: rule 'r': mode: must be 'enforce' or 'sha"),
    ('[[rules]]\nid = "r"', "policy.toml: rule 'r': decision: is missing"),
    ('[[rules]]\ndecision = "deny"', "policy.toml: rule number 1: id: is missing"),
    (
        DENY.replace('"r"', '"r:x"'),
        "policy.toml: rule 'r:x': id: must begin with a letter or digit",
    ),
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
    (DENY + 'agents = ["a b"]', "policy.toml: rule 'r': agents: 'a b' is not a valid name"),
    (DENY + 'environments = ["prod*"]', "environments: 'prod*' must be an exact name"),
    (DENY + "dangerous = 1", "policy.toml: rule 'r': dangerous: must be true or false"),
    (DENY + "cost_over = 0.1", 'cost_over: write money as a string, such as "0.10"'),
    (DENY + 'cost_over = "-1"', "policy.toml: rule 'r': cost_over: must be 0 or more"),
    (DENY + 'cost_over = "0.0000000001"', "policy.toml: rule 'r': cost_over: has more than"),
    (DENY + "over_budget = false", "policy.toml: rule 'r': over_budget: can only be true"),
    (DENY + 'grade_below = "strong"', "policy.toml: rule 'r': grade_below: must be"),
    (DENY + 'grade_below = "process"', "grade_below: no grade is below process"),
    (ALLOW + 'grade_below = "kernel"', "policy.toml: rule 'r': grade_below needs 'ask' or 'deny'"),
    (
        ALLOW + "over_budget = true",
        "policy.toml: rule 'r': over_budget needs 'ask' or 'deny'",
    ),
    (
        DENY + "quorum = 2",
        "policy.toml: rule 'r': approvers, quorum and preview need the decision 'ask'",
    ),
    (ASK + "quorum = 0", "policy.toml: rule 'r': quorum: must be 1 or more"),
    (ASK + 'approvers = ["*"]', "policy.toml: rule 'r': approvers: '*' must be an exact name"),
    (DENY + DENY, "policy.toml: rule 'r': id: the id r is given twice"),
    (DENY + "when = 3", "policy.toml: rule 'r': when: must be a list"),
    ("budgets = 3", "policy.toml: budgets: must be a list"),
    ("budgets = []", "it holds no rules"),
    (
        '[[budgets]]\nname = "b"\ncals = 1',
        "budget number 1: cals: unknown key; did you mean 'calls'?",
    ),
    ('[[budgets]]\nname = "b"', "budget number 1: a budget needs one of `calls`"),
    ("[[budgets]]\ncalls = 1", "budget number 1: name: is missing"),
    ('[[budgets]]\nname = "b"\ncalls = 1\n' * 2, "budgets: two budgets have the name b"),
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
    (WHEN + "min = true", "policy.toml: rule 'r': when[0].min: a number is needed"),
    (WHEN + "min = nan", "policy.toml: Out of range float values"),
    (WHEN + "missing = false", "policy.toml: rule 'r': when[0].missing: can only be true"),
    (WHEN + 'path_inside = ""', "policy.toml: rule 'r': when[0].path_inside: is not a valid path"),
    (WHEN + 'host_in = ["https://a.example"]', "is no host name; write it in ASCII"),
    (WHEN + 'host_in = ["a.*.example"]', "may have '*' only in front"),
    (WHEN + f'host_in = ["{"a" * 300}"]', "is no host name; write it in ASCII"),
    (WHEN + 'host_in = ["*"]', "policy.toml: rule 'r': when[0].host_in: '*' may have '*' only in front"),
    (WHEN + 'host_in = ["A.example"]', "must be written as 'a.example'"),
    (WHEN + 'host_in = ["*.127.0.0.1"]', "is an address, which has no hosts below it"),
    (WHEN + 'not = { argument = "/a", prefix = "a" }', "when[0].not.argument: unknown key"),
    (WHEN.replace("/to", "to") + 'prefix = "a"', "policy.toml: rule 'r': when[0].argument: is not a JSON"),
    (WHEN.replace("/to", "/~2") + 'prefix = "a"', "when[0].argument: is not a JSON pointer"),
    (WHEN.replace("/to", "/tto") + 'prefix = "a"', "takes the argument '/tto'; did you mean 'to'?"),
    (WHEN.replace("/to", "/to/x") + 'prefix = "a"', "no tool that the rule matches takes the argument"),
    (WHEN.replace("/to", "/copies/x") + 'prefix = "a"', "takes the argument '/copies/x'"),
]  # fmt: skip


@pytest.mark.row("E4")
def test_policy_file_holds_budgets_with_rules_or_alone() -> None:
    budget = '[[budgets]]\nname = "b"\nmoney = "0.50"\nper = ["agent"]\n'
    for text, ids in ((budget, []), (budget + DENY, ["r"])):
        policy = parse_policy("policy.toml", text.encode(), [])
        assert [rule.id for rule in policy.rules] == ids
        (found,) = policy.of_parts["budgets"]
        assert (found.name, found.money, found.per) == ("b", Decimal("0.50"), ("agent",))


@pytest.mark.row("A1")
@pytest.mark.parametrize(("text", "told"), FAULTS + CONDITION_FAULTS)
def test_policy_fault_names_file_and_key(text: str, told: str) -> None:
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
    ASK + 'grade_below = "kernel"',
    WHEN + "equals = [1, { a = true }]",
    WHEN.replace("/to", "/copies/*") + 'prefix = "a"',
    WHEN.replace("/to", "/copies/0") + 'prefix = "a"',
    WHEN + 'not = { missing = true }\n[[rules.when]]\nargument = "/to"\nprefix = "a"',
    'mode = "shadow"\n' + DENY,
    DENY + DENY.replace('"r"', '"s"').replace("deny", "allow") + 'mode = "shadow"',
]


@pytest.mark.parametrize("text", SOUND)
def test_twin_sound_policy_is_loaded(text: str) -> None:
    assert faults(text, tool(category="mail")) == []


def _rule(number: int, decision: str, *more: str) -> str:
    return "\n".join((f'[[rules]]\nid = "r{number}"\ndecision = "{decision}"', *more, ""))


SHADOWED = [
    # what the second rule can never do, with its twin that can
    (("deny", 'environments = ["x"]'), ("ask", 'environments = ["x"]'), ("ask", 'environments = ["y"]')),
    (("deny", 'agents = ["a"]'), ("ask", 'agents = ["a"]'), ("ask", 'agents = ["b"]')),
    (("deny", 'tools = ["send_*", "s*"]'), ("deny", 'tools = ["s*"]'), ("deny", 'tools = ["*"]')),
    (("deny", 'agents = ["a", "b"]'), ("deny", 'agents = ["b"]'), ("deny", 'agents = ["b", "c"]')),
    (("ask", "quorum = 2"), ("ask", 'agents = ["a"]'), ("ask", "quorum = 3")),
    (("ask",), ("allow", 'tools = ["send_mail"]'), ("ask", 'approvers = ["a"]')),
    (("allow", 'tools = ["send*"]'), ("allow", 'tools = ["send*"]'), ("allow", 'tools = ["send_mail"]')),
    (("deny", 'cost_over = "1"'), ("ask", 'cost_over = "1"'), ("deny", 'cost_over = "0.5"')),
    (("deny", "dangerous = true"), ("ask", "dangerous = true"), ("ask", "dangerous = false")),
    (
        ("deny", 'grade_below = "kernel"'),
        ("ask", 'grade_below = "kernel"'),
        ("ask", 'grade_below = "namespaces"'),
    ),
    (
        ("deny", 'when = [{argument = "/to", prefix = "a"}]'),
        ("allow", 'tools = ["send_mail"]', 'when = [{argument = "/to", prefix = "a"}]'),
        ("allow", 'tools = ["send_mail"]', 'when = [{argument = "/to", prefix = "b"}]'),
    ),
]  # fmt: skip


@pytest.mark.row("A1")
@pytest.mark.parametrize(("first", "dead", "alive"), SHADOWED)
def test_fully_shadowed_rule_is_refused(
    first: tuple[str, ...], dead: tuple[str, ...], alive: tuple[str, ...]
) -> None:
    (told,) = faults(_rule(1, *first) + _rule(2, *dead))
    assert "rule 'r2': it can never decide: the rule r1 always decides first" in told
    assert faults(_rule(1, *first) + _rule(2, *alive)) == []
    # Between two verdicts the order does not matter; of two with the same one the first decides.
    told = faults(_rule(2, *dead) + _rule(1, *first))
    words = f"always decides first, as {first[0]} wins over {dead[0]} in any order"
    if dead[0] != first[0]:
        assert [one.partition(": ")[2] for one in told] == [
            f"rule 'r2': it can never decide: the rule r1 {words}"
        ]
    else:
        assert not any("rule 'r2'" in one for one in told)
    assert not any("in any order" in one for one in faults(_rule(2, *alive) + _rule(1, *first)))


@pytest.mark.row("A1")
def test_allow_above_an_ask_for_the_rest_is_refused() -> None:
    """Its author believes that the first rule decides; every `ls` would be asked."""
    shell = tool("run_shell", properties={"command": {"type": "string"}})
    reads = _rule(1, "allow", 'tools = ["run_shell"]', 'runs = ["ls", "cat", "git status"]')
    rest = _rule(2, "ask", 'tools = ["run_shell"]')
    for text in (reads + rest, rest + reads):
        (told,) = faults(text, shell)
        assert "rule 'r1': it can never decide: the rule r2 always decides first" in told
    asks = _rule(2, "ask", 'tools = ["run_shell"]', 'runs = ["curl"]')
    assert faults(reads + asks, shell) == []
    shadow = _rule(2, "ask", 'tools = ["run_shell"]', 'mode = "shadow"')
    assert faults(reads + shadow, shell) == []


def test_all_policy_faults_are_reported_in_rule_order() -> None:
    found = faults(DENY + "mode = 1\n" + DENY.replace('"r"', '"s"') + "nothing = 1\nquorum = 0\n")
    assert [fault.split(":")[1:3] for fault in found] == [
        [" rule 'r'", " mode"], [" rule 's'", " quorum"], [" rule 's'", " nothing"],
    ]  # fmt: skip


def test_well_formed_rules_are_checked_against_tools_despite_malformed_ones() -> None:
    """Each of these stayed unsaid until the last key was right."""
    when = '[[rules.when]]\nargument = "/tto"\nprefix = "a"\n'
    found = faults(
        _rule(0, "deny", "nothing = 1") + _rule(1, "deny", 'tools = ["send_mial"]')
        + _rule(1, "ask")
        + _rule(4, "ask", 'agents = ["b"]') + when + _rule(0, "deny", "quorum = 0"),
    )  # fmt: skip
    for told in (
        "rule 'r0': nothing: unknown key", "no registered tool matches 'send_mial'",
        "the id r1 is given twice", "takes the argument '/tto'",
        "rule 'r0': quorum: must be 1 or more", "the id r0 is given twice",
    ):  # fmt: skip
        assert sum(told in fault for fault in found) == 1, (told, found)
    assert len(found) == 7


@pytest.mark.parametrize("key", ["tools", "agents", "when", "over_budget", "mode"])
def test_yaml_key_without_a_value_is_a_fault(key: str) -> None:
    """In YAML a list that was forgotten would otherwise mean everybody."""
    text = f"rules:\n- id: r\n  decision: allow\n  {key}:\n"
    (told,) = faults(text, name="p.yaml")
    assert told == f"p.yaml:2: rule 'r': {key} has no value; leave the key out instead"
    assert faults("rules:\n- id: r\n  decision: allow\n", name="p.yaml") == []


def test_yaml_fault_has_its_line() -> None:
    text = "rules:\n- id: r\n  decision: deny\n  when:\n  - argument: /to\n    prefx: a\n"
    assert faults(text, name="p.yml")[0].startswith("p.yml:6: rule 'r': when[0].prefx: unknown key")


def test_file_mode_is_the_default_of_every_rule() -> None:
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
def test_policy_file_writable_by_others_is_refused(place: Path) -> None:
    """`test_trusted_files` has the other ways in which a file can be another user's."""
    assert load_policy(write(place, DENY), [tool()]).rules
    with pytest.raises(PolicyError, match="can be written by others than its owner"):
        load_policy(write(place, DENY, mode=0o620), [tool()])
    write(place, DENY).parent.chmod(0o770)
    with pytest.raises(PolicyError, match="the directory can be written by others"):
        load_policy(place / "policy.toml", [tool()])


@pytest.mark.parametrize("name", ["policy.json", "policy", "policy.toml.bak"])
def test_policy_format_follows_the_file_suffix(place: Path, name: str) -> None:
    with pytest.raises(PolicyError, match="must end in one of"):
        load_policy(write(place, DENY, name), [tool()])


@pytest.mark.row("A1")
def test_faulty_or_missing_policy_file_is_reported_once_per_change(place: Path) -> None:
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


@pytest.mark.row("D3")
def test_rule_can_name_mcp_tools_before_they_are_listed() -> None:
    tools = [tool(), ("clock__", "")]
    for entry in ("clock__stop", "clock__*", "clock__stop@1.0.0"):
        assert parse_policy("p.toml", (DENY + f'tools = ["{entry}"]').encode(), tools).rules
    for entry in ("clocks__stop", "clock_stop", "other__stop"):
        with pytest.raises(PolicyError, match="no registered tool matches"):
            parse_policy("p.toml", (DENY + f'tools = ["{entry}"]').encode(), tools)
    misspelt = DENY + 'tools = ["send_mail"]\n[[rules.when]]\nargument = "/tto"\nprefix = "a"\n'
    with pytest.raises(PolicyError, match="takes the argument"):  # others are checked as before
        parse_policy("p.toml", misspelt.encode(), tools)
