"""Keys of a policy file, of its rules, and of their conditions, that parts add."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import RootModel

from fumehood import Config, Engine, engine_parts, tool
from fumehood.core.errors import QuotaExceeded
from fumehood.core.json_types import JsonObject
from fumehood.core.part import Part, PartError
from fumehood.core.value import Value
from fumehood.engine_part import EnginePart
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.gate import Excess, Gate, Hold
from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy import loader
from fumehood.policy.loader import condition_of, keys_of, parse_policy, rule_of
from fumehood.policy.model import Answer, CheckedPart, PartCondition, Rule, Verdict
from fumehood.policy.service import PolicyGate
from fumehood.testing import FakeWall
from support.asking import asking
from support.policies import decide, facts, faults, policy_of, rule
from support.policies import tool as a_tool

pytestmark = pytest.mark.anyio

HERE = "test_keys_of_parts"


class Quiet(Value):
    hours: int


class Night(Gate):
    """Refuses every call while it is late, unless a human lets the call pass."""

    name = "night"

    def __init__(self, key: str, *, is_late: bool = True) -> None:
        self.key = key
        self.is_late = is_late

    def excess(self, validated: ValidatedCall) -> Excess | None:
        return Excess(QuotaExceeded("Too late."), {}, {}, "It is late.") if self.is_late else None

    async def hold(self, permitted: PermittedCall, *, is_let_pass: bool) -> Hold | None:
        if self.is_late and not is_let_pass:
            raise QuotaExceeded("Too late.")
        return None


class Touches(RootModel[tuple[str, ...]], PartCondition):
    """Tables that a query names; a `?` may be any table."""

    subject: ClassVar[str] = "query"
    arguments: ClassVar[tuple[str, ...]] = ("query", "script")

    def compiled(self, *, for_every: bool) -> Callable[[JsonObject], Answer]:
        def test(arguments: JsonObject) -> Answer:
            read = arguments.get("query", arguments.get("script", "?")).split()
            if "?" in read:
                return None
            return (all if for_every else any)(table in self.root for table in read)

        return test

    def why_in_doubt(self, arguments: JsonObject) -> str:
        return "a table is not named" if arguments else "there is no query"


class Sleeping(EnginePart):
    used: ClassVar[list[tuple[dict[str, Any], set[str]]]] = []
    own: ClassVar[list[Gate]] = []

    def use_policy(self, values: Mapping[str, Any], tools: Collection[str]) -> None:
        self.used.append((dict(values), set(tools)))

    def gates(self) -> list[Gate]:
        return self.own


PART = Part(
    name="sleeping",
    policy={"naps": f"{HERE}:Naps"},
    excesses=frozenset({"at_night", "at_noon"}),
    conditions={"touches": f"{HERE}:Touches"},
    in_engine=f"{HERE}:Sleeping",
)
Naps = tuple[Quiet, ...]


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes `PART` the only part, with these gates, or with gates that are open."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    are_open = [Night(key, is_late=False) for key in sorted(PART.excesses)]

    def use(*gates: Gate) -> None:
        monkeypatch.setattr(engine_parts, "parts", lambda: (PART,))
        monkeypatch.setattr(loader, "_OF_PARTS", keys_of([PART]))
        monkeypatch.setattr(loader, "RuleOfFile", rule_of([PART]))
        monkeypatch.setattr(Sleeping, "own", list(gates) or are_open)
        monkeypatch.setattr(Sleeping, "used", [])

    return use


def made_of(document: dict[str, Any]) -> Rule:
    """A rule with the keys of the parts that a test uses."""
    return loader.RuleOfFile.model_validate(document)


@tool(sandboxed=False)
async def act() -> dict[str, bool]:
    """Act."""
    return {"acted": True}


NAPS = "[[naps]]\nhours = 2\n"
ASK = '[[rules]]\nid = "r"\ndecision = "ask"\n'


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    "text", ["[[budgets]]\nname = 'b'\ncalls = 1\n", ASK + "over_budget = true"]
)
def test_key_of_a_part_that_is_missing_is_refused(text: str, sleeping: Callable[..., None]) -> None:
    assert faults(text) == []  # the control: the part that adds it is here
    sleeping()
    assert "unknown key" in faults(text)[0]
    assert faults(NAPS + ASK + "at_night = true") == []  # the twin


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("naps = 3", "policy.toml: naps: must be a list"),
        ("[[naps]]\nhour = 2", "policy.toml: nap number 1: hours: is missing"),
        (
            "[[naps]]\nhour = 2",
            "policy.toml: nap number 1: hour: unknown key; did you mean 'hours'?",
        ),
        (
            ASK.replace("ask", "allow") + "at_night = true",
            "policy.toml: rule 'r': at_night needs 'ask' or 'deny'",
        ),
        (ASK + "at_night = false", "policy.toml: rule 'r': at_night: can only be true"),
        (ASK + 'exceeds = ["at_night"]', "policy.toml: rule 'r': exceeds: unknown key"),
        ("", "it holds no rules"),
    ],
)
def test_fault_in_a_part_s_key_is_named(
    text: str, told: str, sleeping: Callable[..., None]
) -> None:
    sleeping()
    found = faults(text)
    assert any(told in fault for fault in found), found


async def test_values_of_each_policy_reach_the_part(
    sleeping: Callable[..., None], home: Path
) -> None:
    sleeping()
    file = home / "policy.toml"
    file.write_text(NAPS)
    config = Config(home=home, policy_file=file)
    async with Engine([act], config=config, interpreter=FakeWall()) as engine:
        (values, tools), *more = Sleeping.used
        assert (values, more) == ({"naps": (Quiet(hours=2),)}, [])
        assert "act" in tools
        file.write_text(ASK)
        await engine.policy.reload(engine.owner)
        assert [values for values, _ in Sleeping.used[1:]] == [{}]
        file.write_text("[[naps]]\nhours = 'none'")
        with pytest.raises(Exception, match="number"):
            await engine.policy.reload(engine.owner)
        assert len(Sleeping.used) == 2
    Sleeping.used.clear()
    async with Engine([act], config=Config(home=home), interpreter=FakeWall()):
        assert [values for values, _ in Sleeping.used] == [{}]


@pytest.mark.row("A1", "E4")
@pytest.mark.parametrize(
    ("late", "code"),
    [
        ({"at_night"}, "REQUIRES_HUMAN_APPROVAL"),
        ({"at_noon"}, "QUOTA_EXCEEDED"),
        ({"at_night", "at_noon"}, "QUOTA_EXCEEDED"),
        (set(), "OK"),
    ],
    ids=["tested", "another", "both", "none"],
)
async def test_human_is_asked_only_about_the_excess_that_the_rule_tests(
    late: set[str], code: str, sleeping: Callable[..., None], home: Path
) -> None:
    """Nobody can let the call pass a gate of which the rule says nothing."""
    sleeping(*(Night(key, is_late=key in late) for key in ("at_night", "at_noon")))
    file = home / "policy.toml"
    file.write_text(f"{ASK}at_night = true")
    config = Config(home=home, policy_file=file)
    async with Engine([act], config=config, interpreter=FakeWall()) as engine:
        answer = await engine.call("act")
        assert code == ("OK" if answer.error is None else answer.error.code)


@pytest.mark.row("A1", "A3")
@pytest.mark.parametrize("late", ["at_night", "at_noon"])
async def test_human_lets_the_call_pass_only_the_gate_that_the_rule_tests(
    late: str, sleeping: Callable[..., None], home: Path
) -> None:
    """Also if the other gate has an excess only after the yes."""
    night, noon = Night("at_night"), Night("at_noon", is_late=False)
    sleeping(night, noon)
    file = home / "policy.toml"
    file.write_text(f"{ASK}at_night = true")
    async with asking(home, dangerous=False, policy_file=file) as desk:
        approval_id = await desk.parked("a")
        night.is_late, noon.is_late = late == "at_night", late == "at_noon"
        await desk.decide(approval_id)
        answer = await desk.ended(approval_id)
    assert desk.deeds.done == (["a"] if late == "at_night" else [])
    assert answer.success is (late == "at_night")


def test_rule_has_the_keys_of_parts_that_it_tests(sleeping: Callable[..., None]) -> None:
    sleeping()
    text = f"{ASK}at_noon = true\nat_night = true\n"
    (rule,) = parse_policy("p.toml", text.encode(), [a_tool()]).rules
    assert rule.exceeds == ("at_night", "at_noon")
    assert not rule.is_unconditional
    compiled = loader.compile_rule(rule, None, "")
    for over in ({"at_noon"}, {"at_noon", "at_night"}):
        asked = facts()._replace(exceeds=over.__contains__)
        assert compiled.matches(asked) is (len(over) == 2)


QUERY = a_tool("query", dangerous=True, properties={"query": {"type": "string"}})
HEAD = '[[rules]]\nid = "r"\ndecision = "{}"\ntools = ["query"]\n'


@pytest.mark.row("A1")
@pytest.mark.parametrize("decision", ["deny", "ask", "allow"])
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('touches = ["a"]', "touches"),
        ('when = [{ touches = ["a"] }]', "when[0].touches"),
        ('any = [{ argument = "/query", equals = 1 }, { touches = ["a"] }]', "any[1].touches"),
        ('mode = "shadow"\ntouches = ["a"]', "touches"),
    ],
)
def test_condition_of_a_part_that_is_missing_is_refused(
    text: str, place: str, decision: str, sleeping: Callable[..., None]
) -> None:
    rules = HEAD.format(decision) + text
    (told,) = faults(rules, QUERY)
    assert told.startswith(f"policy.toml: rule 'r': {place}: unknown key")
    sleeping()
    assert faults(rules, QUERY) == []  # the control


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    ("arguments", "denied", "allowed"),
    [
        ({"query": "a"}, True, True),
        ({"script": "a"}, True, True),
        ({"query": "b"}, False, False),
        ({"query": "a b"}, True, False),  # one of them is enough to deny, and all to allow
        ({"query": "?"}, True, False),
        ({}, True, False),
    ],
)
def test_condition_of_a_part_decides_a_call_and_its_doubt_only_makes_it_stricter(
    arguments: dict[str, Any], denied: bool, allowed: bool, sleeping: Callable[..., None]
) -> None:
    sleeping()
    call = facts(QUERY, arguments)
    denies = decide(call, made_of(rule("deny", touches=["a"])))
    assert (denies.verdict is Verdict.DENY) is denied
    doubt = "a table is not named" if arguments else "there is no query"
    is_in_doubt = denied and "a" not in "".join(arguments.values())
    assert denies.reason == (f"In doubt: {doubt}." if is_in_doubt else None)
    allows = made_of(rule("allow", tools=["query"], touches=["a"]))
    assert (decide(call, allows).verdict is Verdict.ALLOW) is allowed
    either = [{"argument": "/x", "equals": 1}, {"touches": ["a"]}]
    any_of = facts(QUERY, {**arguments, "x": 2})
    assert (decide(any_of, made_of(rule("deny", any=either))).verdict is Verdict.DENY) is denied


def test_condition_of_a_part_is_explained(sleeping: Callable[..., None]) -> None:
    sleeping()
    gate = PolicyGate(policy_of(made_of(rule("deny", touches=["a", "b"]))), "production")
    (explained,) = gate.explain(facts(QUERY, {"query": "?", "other": 1})).rules
    says = "query touches ['a', 'b']"
    assert explained.parts == (CheckedPart(says=says, holds=None, compared='"?"'),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('touches = "a"', "rule 'r': when[0].touches: must be a list"),
        ("touches = [1]", "rule 'r': when[0].touches[0]: entry 1 must be a string"),
        (
            'when = [{ touches = ["a"], argument = "/query" }]',
            "rule 'r': when[0]: argument is needed, or touches without it",
        ),
        ('when = [{ touches = ["a"], prefix = "b" }]', "when[0]: exactly one of these is needed"),
        (
            'when = [{ argument = "/query", not = { touches = ["a"] } }]',
            "rule 'r': when[0].not.touches: unknown key",
        ),
    ],
)
def test_fault_in_a_part_s_condition_is_named(
    text: str, told: str, sleeping: Callable[..., None]
) -> None:
    sleeping()
    found = faults(HEAD.format("deny") + text, QUERY)
    assert any(told in fault for fault in found), found


def test_part_s_condition_on_tools_without_its_arguments_is_refused(
    sleeping: Callable[..., None],
) -> None:
    sleeping()
    (told,) = faults('[[rules]]\nid = "r"\ndecision = "deny"\ntouches = ["a"]')
    assert told == (
        "policy.toml: rule 'r': when[0].touches: no tool that the rule matches takes a 'query' or "
        "'script'"
    )


@pytest.mark.row("A1")
async def test_call_is_refused_if_a_part_s_condition_fails(
    sleeping: Callable[..., None], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a rule that allows, and in shadow mode: what the condition says is unknown."""
    sleeping()
    done: list[str] = []

    @tool(sandboxed=False)
    async def query(query: str) -> None:
        """Query."""
        done.append(query)

    def fail_for_bug(read: Touches, *, for_every: bool) -> Callable[[JsonObject], Answer]:
        return lambda arguments: {"twin": False}[arguments["query"]]

    monkeypatch.setattr(Touches, "compiled", fail_for_bug)
    file = home / "policy.toml"
    for text in (
        HEAD.format("deny"), HEAD.format("ask"), HEAD.format("allow"),
        f'{HEAD.format("deny")}mode = "shadow"\n',
    ):  # fmt: skip
        file.write_text(f'{text}touches = ["a"]\n')
        config = Config(home=home, policy_file=file)
        async with Engine([query], config=config, interpreter=FakeWall()) as engine:
            refused = await engine.call("query", {"query": "bug"})
            assert refused.error is not None
            assert refused.error.code == "INTERNAL_ERROR"
            assert done == []
            twin = await engine.call("query", {"query": "twin"})
            assert (twin.error, done.pop()) == (None, "twin")


@pytest.mark.parametrize("key", ["rules", "mode"])
def test_attack_part_that_takes_a_key_of_the_policy_is_refused(key: str) -> None:
    with pytest.raises(PartError, match=f"'{key}' to the policy, which is the kernel's"):
        keys_of([Part(name="a", policy={key: "builtins:int"})])


@pytest.mark.parametrize("key", ["when", "is_enforced", "dangerous"])
def test_attack_part_that_takes_a_key_of_rules_is_refused(key: str) -> None:
    """Also as a key of conditions, because a rule may have it too."""
    places = {key: "builtins:int"}
    for part in (Part(name="a", excesses=frozenset({key})), Part(name="a", conditions=places)):
        with pytest.raises(PartError, match=f"'{key}' to rules, which is the kernel's"):
            rule_of([part])


@pytest.mark.parametrize("key", ["argument", "equals", "in", "not", "of_part"])
def test_attack_part_that_takes_a_key_of_conditions_is_refused(key: str) -> None:
    part = Part(name="a", conditions={key: "builtins:int"})
    with pytest.raises(PartError, match=f"'{key}' to conditions, which is the kernel's"):
        condition_of([part])


def test_key_of_rules_that_two_parts_have_is_refused() -> None:
    places = {"touches": "builtins:int"}
    tests = Part(name="a", excesses=frozenset({"touches"}))
    with pytest.raises(PartError, match="Two parts add the key 'touches' to rules"):
        rule_of([tests, Part(name="b", conditions=places)])
    assert rule_of([tests, Part(name="b", conditions={"reads": "builtins:int"})])  # the twin


def test_attack_part_whose_key_of_rules_no_gate_has_is_refused(
    sleeping: Callable[..., None],
) -> None:
    """A rule that denies by this key would never deny."""
    sleeping(Night("at_night"))
    with pytest.raises(PartError, match="adds the key 'at_noon' to rules, and no gate has it"):
        Engine(interpreter=FakeWall())
