"""What a policy decides: strictest wins, defaults stand, and a rule more never opens a call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fumehood.policy.loader import RuleOfFile
from fumehood.policy.model import CallFacts, Decision, Rule, Verdict
from fumehood.policy.rules import names_exactly
from fumehood.policy.service import DANGEROUS_ASKS, HARMLESS_PASSES, PolicyGate
from fumehood_tools.run_shell import run_shell
from support.policies import decide, facts, policy_of, rule, tool, verdict

ALLOW, ASK, DENY = Verdict.ALLOW, Verdict.ASK, Verdict.DENY
DANGEROUS = tool("delete_all", dangerous=True, version="1.2.0")


@pytest.mark.row("A1")
def test_default_policy_asks_for_dangerous_tools_only() -> None:
    gate = PolicyGate(None, "production")
    assert gate.version == "none"
    assert (gate.decide(facts()).verdict, gate.decide(facts()).rule) == (ALLOW, HARMLESS_PASSES)
    asked = gate.decide(facts(DANGEROUS))
    assert (asked.verdict, asked.rule) == (ASK, DANGEROUS_ASKS)


@pytest.mark.row("A1")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_deny_overrides_ask_and_ask_overrides_allow(order: tuple[int, ...]) -> None:
    rules = [rule("allow", tools=["send_mail"]), rule("ask"), rule("deny", tools=["*"])]
    assert verdict(facts(), *[rules[n] for n in order]) is DENY
    assert verdict(facts(), *[rules[n] for n in order if n != 2]) is ASK
    assert verdict(facts(), rules[0]) is ALLOW


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (["delete_all"], ALLOW),
        (["delete_all@1.2.0"], ALLOW),
        (["delete_all@1.*"], ALLOW),
        (["delete_all@2.*"], ASK),
        (["delete_*"], ASK),
        (["*"], ASK),
        (["delete_all*"], ASK),
        (["*", "delete_all"], ALLOW),
        (None, ASK),
    ],
)
def test_dangerous_tool_is_allowed_only_by_its_exact_name(
    tools: list[str] | None, expected: Verdict
) -> None:
    fields = {} if tools is None else {"tools": tools}
    assert verdict(facts(DANGEROUS), rule("allow", **fields)) is expected


@pytest.mark.row("A1")
def test_tool_name_in_a_rule_is_not_a_prefix() -> None:
    """*Source*: a rule for `bash` that also caught `bash_session` (control.md, A and B)."""
    assert verdict(facts(tool("bash_session")), rule("deny", tools=["bash"])) is ALLOW
    assert verdict(facts(tool("bash")), rule("deny", tools=["bash"])) is DENY
    assert verdict(facts(tool("bash_session")), rule("deny", tools=["bash*"])) is DENY


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        ({"agents": ["clerk"]}, {"agent": "clerk2"}),
        ({"agents": ["clerk*"]}, {"agent": "aclerk"}),
        ({"agents": ["clerk", "*"]}, {"agent": None}),
        ({"principals": ["uid:1000"]}, {"principal": "uid:10001"}),
        ({"principals": ["token:ci-*"]}, {"principal": "token:ci"}),
    ],
)
def test_caller_matches_exactly_or_by_star(fields: dict[str, Any], other: dict[str, Any]) -> None:
    name = (fields.get("agents") or fields["principals"])[0].replace("*", "-x")
    same = {"agent": name} if "agents" in fields else {"principal": name}
    assert verdict(facts(**same), rule("deny", **fields)) is DENY
    assert verdict(facts(**other), rule("deny", **fields)) is ALLOW


@pytest.mark.parametrize(
    ("fields", "of", "not_of"),
    [
        ({"dangerous": True}, {"dangerous": True}, {}),
        ({"read_only": False}, {}, {"read_only": True}),
        ({"sandboxed": True}, {}, {"sandboxed": False}),
        ({"categories": ["mail"]}, {"category": "mail"}, {"category": "mailing"}),
        ({"tags": ["a", "b"]}, {"tags": ["x", "b"]}, {"tags": ["c"]}),
        ({"cost_over": "0.10"}, {"cost_per_use": "0.11"}, {"cost_per_use": "0.10"}),
        ({"cost_over": "0.10"}, {"cost_per_use": "1000000"}, {"cost_per_use": "0.0999"}),
    ],
)
def test_rule_matches_tool_properties(
    fields: dict[str, Any], of: dict[str, Any], not_of: dict[str, Any]
) -> None:
    assert verdict(facts(tool(**of)), rule("deny", **fields)) is DENY
    assert verdict(facts(tool(**not_of)), rule("deny", **fields)) is not DENY


@pytest.mark.row("A1")
def test_rule_of_another_environment_is_ignored() -> None:
    denies = rule("deny", environments=["production"])
    assert verdict(facts(), denies) is DENY
    assert verdict(facts(), denies, environment="staging") is ALLOW


@pytest.mark.row("A1")
@pytest.mark.parametrize("arguments", [{}, {"to": 5}, {"to": None}, {"to": ["a@prod.example"]}])
def test_undecidable_condition_applies_deny_and_ask_but_not_allow(arguments: Any) -> None:
    when = [{"argument": "/to", "glob": "*@prod.example"}]
    assert verdict(facts(None, arguments), rule("deny", when=when)) is DENY
    assert verdict(facts(None, arguments), rule("ask", when=when)) is ASK
    opens = rule("allow", tools=["delete_all"], when=when)
    assert verdict(facts(DANGEROUS, arguments), opens) is ASK
    assert verdict(facts(DANGEROUS, {"to": "a@prod.example"}), opens) is ALLOW


@pytest.mark.row("A1")
def test_undecidable_rule_explains_the_doubt() -> None:
    def told(decision: str, arguments: dict[str, Any], **fields: Any) -> str | None:
        made = rule(decision, reason="No deletions.", **fields)
        return decide(facts(run_shell, arguments), made).reason

    deletes = {"when": [{"argument": "/command", "glob": "*rm *"}]}
    assert told("deny", {"command": "rm x"}, **deletes) == "No deletions."
    own = "The rule's reason: No deletions."
    for arguments, doubt in (
        ({"argv": ["ls"]}, "/command is absent, this call has argv"),
        ({}, "/command is absent"),
        ({"command": 5}, "/command has the type number"),
    ):
        assert told("deny", arguments, **deletes) == f"In doubt: {doubt}. {own}"
    inside = {"when": [{"argument": "/command", "path_inside": "/a"}]}
    assert (
        told("deny", {"command": "a\0"}, **inside) == f"In doubt: /command cannot be parsed. {own}"
    )
    each = {"when": [{"argument": "/files/*", "equals": 1}]}
    assert told("deny", {"files": []}, **each) == (
        f"In doubt: /files/* has no elements, or some that cannot be compared. {own}"
    )


@pytest.mark.row("A1")
def test_any_condition_needs_one_match_and_names_undecidable_ones() -> None:
    either = [{"argument": "/to", "prefix": "a"}, {"argument": "/copies", "equals": 1}]
    deny = rule("deny", any=either)
    assert verdict(facts(None, {"to": "a", "copies": 2}), deny) is DENY
    assert verdict(facts(None, {"to": "b", "copies": 1}), deny) is DENY
    assert verdict(facts(None, {"to": "b", "copies": 2}), deny) is ALLOW
    in_doubt = decide(facts(None, {"to": "b"}), deny)
    assert (in_doubt.verdict, in_doubt.reason) == (DENY, "In doubt: /copies is absent.")
    allow = rule("allow", tools=["all"], any=either)
    assert verdict(facts(tool("all", dangerous=True), {"to": "b"}), allow) is ASK
    both = rule("deny", any=[{"runs": ["rm"]}, {"argument": "/to", "prefix": "a"}])
    assert verdict(facts(None, {"command": "rm x", "to": "b"}), both) is DENY
    assert verdict(facts(None, {"command": "ls", "to": "b"}), both) is ALLOW


def test_all_conditions_of_a_rule_must_hold() -> None:
    when = [{"argument": "/to", "prefix": "a"}, {"argument": "/copies", "missing": True}]
    assert verdict(facts(None, {"to": "ab"}), rule("deny", when=when)) is DENY
    assert verdict(facts(None, {"to": "ab", "copies": []}), rule("deny", when=when)) is ALLOW
    assert verdict(facts(None, {"to": "b"}), rule("deny", when=when)) is ALLOW


@pytest.mark.row("A1", "E4")
def test_budget_condition_is_evaluated_last() -> None:
    asked: list[str] = []

    def is_over(key: str) -> bool:
        asked.append(key)
        return True

    exceed = rule("ask", over_budget=True, when=[{"argument": "/to", "prefix": "a"}])
    spared = decide(facts(None, {"to": "b"}, exceeds=is_over), exceed)
    assert (spared.verdict, spared.may_exceed, asked) == (ALLOW, (), [])
    over = decide(facts(None, {"to": "a"}, exceeds=is_over), exceed)
    assert (over.verdict, over.may_exceed, asked) == (ASK, ("over_budget",), ["over_budget"])
    assert decide(facts(None, {"to": "a"}), exceed).verdict is ALLOW


@pytest.mark.row("A1", "A3")
def test_first_matching_ask_rule_is_named_and_requirements_are_combined() -> None:
    asked = decide(
        facts(),
        rule("ask", id="one", approvers=["alice", "bob", "carol"], reason="mail"),
        rule("ask", id="two", quorum=2),
        rule("ask", id="three", approvers=["carol", "bob"]),
    )
    assert (asked.rule, asked.reason) == ("one", "mail")
    assert (asked.approvers, asked.quorum) == (("bob", "carol"), 2)


@pytest.mark.row("A3")
def test_ask_rules_without_a_common_approver_deny() -> None:
    answer = decide(
        facts(),
        rule("ask", id="one", approvers=["alice"]),
        rule("ask", id="two", approvers=["bob"]),
    )
    assert answer.verdict is DENY
    assert answer.reason is not None
    assert "one, two" in answer.reason
    too_few = decide(
        facts(), rule("ask", id="one", approvers=["alice"]), rule("ask", id="two", quorum=2)
    )
    assert too_few.verdict is DENY


@pytest.mark.row("A1")
def test_shadow_rule_is_reported_and_counted_but_decides_nothing() -> None:
    gate = PolicyGate(
        policy_of(
            rule("deny", id="later", mode="shadow"),
            rule("deny", id="elsewhere", mode="shadow", tools=["other"]),
            rule("allow", id="opens", mode="shadow", tools=["delete_all"]),
        ),
        "production",
    )
    decision = gate.decide(facts(DANGEROUS))
    assert (decision.verdict, decision.rule) == (ASK, DANGEROUS_ASKS)
    assert decision.shadow == ("later would deny", "opens would allow")
    gate.count(decision)
    gate.count(gate.decide(facts()))
    assert [one.would_have_decided for one in gate.rules()] == [2, 0, 1]
    enforced = PolicyGate(policy_of(rule("deny", mode="shadow")).enforced(), "production")
    assert enforced.decide(facts()).verdict is DENY


def test_request_of_a_program_is_counted_unless_it_becomes_a_call_that_asks() -> None:
    gate = PolicyGate(
        policy_of(
            rule("deny", id="no"), rule("ask", id="ask", tools=["delete_all"]),
            rule("allow", id="yes", tools=["delete_all"]),
        ),
        "production",
    )  # fmt: skip
    for call in (facts(), facts(DANGEROUS)):
        gate.decide_request(call)
    assert [one.decided for one in gate.rules()] == [2, 0, 0]
    asks = PolicyGate(policy_of(rule("ask", id="ask")), "production")
    assert asks.decide_request(facts()).verdict is ASK
    assert [one.decided for one in asks.rules()] == [0]


def test_changed_tool_is_matched_again() -> None:
    """Which rules are about a tool is remembered: for this definition, not for its name."""
    gate = PolicyGate(policy_of(rule("deny", tags=["x"])), "production")
    assert gate.decide(facts(tool(tags=["x"]))).verdict is DENY
    assert gate.decide(facts(tool(tags=["y"]))).verdict is ALLOW
    assert gate.decide(facts(tool(tags=["x"]))).verdict is DENY


# What follows is drawn from so few names that rules and calls meet often.
TOOLS = [
    tool("a"), tool("ab", dangerous=True), tool("b", tags=["t"]),
    tool("b", version="2.0.0", dangerous=True, cost_per_use="5"),
]  # fmt: skip
VALUES = st.sampled_from(["x", "xy", "/workspace/a", "https://e.example/", 1, 2.5, True, None])
COMMANDS = st.sampled_from(["rm x", "ls", "git -C x push", "git status", "eval x", "$X", "ls; rm"])
ARGUMENTS = st.builds(
    lambda arguments, command: {**arguments, **command},
    st.dictionaries(st.sampled_from(["to", "copies"]), VALUES | st.lists(VALUES), max_size=2),
    st.fixed_dictionaries({}, optional={"command": COMMANDS, "argv": st.just(["rm", "x"])}),
)
RUNS = st.lists(st.sampled_from(["rm", "ls", "git push"]), min_size=1, unique=True)
PREDICATES = st.sampled_from(
    [
        {"prefix": "x"}, {"equals": "x"}, {"equals": 1}, {"in": ["x", 2.5]}, {"glob": "*y"},
        {"min": 1, "max": 2}, {"path_inside": "/workspace"}, {"host_in": ["e.example"]},
        {"missing": True}, {"not": {"prefix": "x"}}, {"not": {"missing": True}},
    ]
)  # fmt: skip
CONDITIONS = st.builds(
    lambda pointer, predicate: {"argument": pointer, **predicate},
    st.sampled_from(["/to", "/copies", "/copies/*", "/copies/0"]),
    PREDICATES,
)
SCOPES = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.lists(
            st.sampled_from(["a", "ab", "b", "a*", "*", "b@2.*", "b@1.0.0"]),
            min_size=1,
            unique=True,
        ),
        "agents": st.just(["clerk"]),
        "environments": st.sampled_from([["production"], ["staging"]]),
        "dangerous": st.booleans(),
        "tags": st.just(["t"]),
        "cost_over": st.just("1"),
        "mode": st.sampled_from(["enforce", "shadow"]),
        "when": st.lists(CONDITIONS, max_size=2),
        "any": st.lists(
            CONDITIONS | RUNS.map(lambda names: {"runs": names}), min_size=1, max_size=2
        ),
        "runs": RUNS,
    },
)


def _made(decision: str, scope: dict[str, Any], number: int, more: dict[str, Any]) -> Rule | None:
    try:
        return RuleOfFile.model_validate(
            {"id": f"r{number}", "decision": decision, **scope, **more}
        )
    except ValueError:  # such as an allow for dangerous tools without a name
        return None


ASKING = st.fixed_dictionaries(
    {},
    optional={
        "quorum": st.integers(1, 2),
        "approvers": st.sampled_from([["ann", "bob"], ["bob", "cy"], ["ann", "bob", "cy"]]),
        "over_budget": st.just(True),
        "grade_below": st.sampled_from(["kernel", "namespaces"]),
    },
)


@st.composite
def rules_of(draw: st.DrawFn, decisions: list[str], number: int = 0) -> Rule:
    decision = draw(st.sampled_from(decisions))
    more = draw(ASKING) if decision == "ask" else {}
    made = _made(decision, draw(SCOPES), number, more)
    assume(made is not None)
    assert made is not None
    return made


CALLS = st.builds(
    lambda of, arguments, agent, is_over: facts(
        of, arguments, agent=agent, exceeds=lambda key: is_over
    ),
    st.sampled_from(TOOLS),
    ARGUMENTS,
    st.sampled_from([None, "clerk"]),
    st.booleans(),
)
STRICTNESS = {ALLOW: 0, ASK: 1, DENY: 2}


def _is_as_strict(after: Decision, before: Decision) -> bool:
    if after.verdict is ASK is before.verdict:
        who = not before.approvers or (
            bool(after.approvers) and set(after.approvers) <= set(before.approvers)
        )
        return after.quorum >= before.quorum and who
    return STRICTNESS[after.verdict] >= STRICTNESS[before.verdict]


ANY = ["allow", "ask", "deny"]


@pytest.mark.row("A1")
@given(st.lists(rules_of(ANY), max_size=4), rules_of(["ask", "deny"], 9), st.integers(0, 4), CALLS)
def test_additional_deny_or_ask_rule_never_allows_a_call(
    rules: list[Rule], added: Rule, at: int, call: CallFacts
) -> None:
    before = PolicyGate(policy_of(*rules), "production").decide(call)
    more = [*rules[:at], added, *rules[at:]]
    after = PolicyGate(policy_of(*more), "production").decide(call)
    assert _is_as_strict(after, before)


@pytest.mark.row("A1")
@given(st.lists(rules_of(ANY), max_size=4), rules_of(["allow"], 9), CALLS)
def test_additional_allow_rule_never_overrides_deny_or_ask(
    rules: list[Rule], added: Rule, call: CallFacts
) -> None:
    before = PolicyGate(policy_of(*rules), "production").decide(call)
    after = PolicyGate(policy_of(*rules, added), "production").decide(call)
    assert after.verdict is before.verdict or before.rule == DANGEROUS_ASKS
    if call.tool.dangerous and after.verdict is ALLOW:
        assert any(map(names_exactly, added.tools or ())) or before.verdict is ALLOW


@pytest.mark.row("A1")
@given(st.lists(rules_of(ANY), max_size=5), st.randoms(use_true_random=False), CALLS)
def test_rule_order_does_not_change_the_decision(
    rules: list[Rule], random: Any, call: CallFacts
) -> None:
    shuffled = random.sample(rules, len(rules))
    one, other = (PolicyGate(policy_of(*r), "production").decide(call) for r in (rules, shuffled))
    assert (one.verdict, one.quorum, set(one.approvers), one.may_exceed) == (
        other.verdict, other.quorum, set(other.approvers), other.may_exceed,
    )  # fmt: skip


@given(st.lists(rules_of(ANY), max_size=4), CALLS)
def test_explanation_agrees_with_the_decision(rules: list[Rule], call: CallFacts) -> None:
    """With an id each, which the drawn ones do not have."""
    named = [one.model_copy(update={"id": f"n{n}"}) for n, one in enumerate(rules)]
    gate = PolicyGate(policy_of(*named), "production")
    told = gate.explain(call)
    said = [one.decision for one in told.rules if one.matches and one.mode == "enforce"]
    assert (told.verdict, told.rule) == (gate.decide(call).verdict, gate.decide(call).rule)
    strictest = max(said, key=STRICTNESS.__getitem__, default=None)
    if strictest is not None and not (strictest is ASK and told.verdict is DENY):
        assert told.verdict is strictest
