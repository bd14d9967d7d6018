"""The boundary of the policy: calls that try to slip past a rule, and files that are bombs.

Each attack on a rule is a call that the rule is there to stop; its twin is the nearest call that
the rule has to let through, and the control is the same attack without the rule. Files are read
by one process with hard limits on CPU time and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fumehood.policy.model import Verdict
from support.attacks import Harm
from support.policies import facts, rule, tool, verdict

ALLOW, ASK, DENY = Verdict.ALLOW, Verdict.ASK, Verdict.DENY

ONLY_OUT = rule("deny", when=[{"argument": "/path", "not": {"path_inside": "/workspace/out"}}])
NO_SECRETS = rule("deny", when=[{"argument": "/path", "path_inside": "/workspace/secret"}])
ONLY_HOST = rule("deny", when=[{"argument": "/url", "not": {"host_in": ["example.org"]}}])
NO_HOST = rule("deny", when=[{"argument": "/url", "host_in": ["*.internal.example"]}])
SMALL = rule("deny", when=[{"argument": "/amount", "not": {"max": 100}}])
NOT_TO = rule("deny", when=[{"argument": "/to/*", "glob": "*@evil.example"}])
ONLY_TO = rule("deny", when=[{"argument": "/to/*", "not": {"glob": "*@example.org"}}])


@dataclass(frozen=True)
class RuleAttack:
    """Arguments that must not slip past a rule, and those that must pass it."""

    name: str
    harm: Harm
    stops: dict[str, Any]
    arguments: dict[str, Any]
    twin: dict[str, Any]
    source: str = ""


ATTACKS = [
    RuleAttack("dots", Harm.INTEGRITY, ONLY_OUT, {"path": "/workspace/out/../notes"},
               {"path": "/workspace/out/a/../notes"}, "CWE-22"),
    RuleAttack("relative", Harm.INTEGRITY, ONLY_OUT, {"path": "../etc/passwd"}, {"path": "out/a"}),
    RuleAttack("prefix of a name", Harm.INTEGRITY, ONLY_OUT, {"path": "/workspace/outer/a"},
               {"path": "/workspace/out/er/a"}, "CVE-2025-53110"),
    RuleAttack("NUL", Harm.INTEGRITY, ONLY_OUT, {"path": "/workspace/out/a\0/../../b"},
               {"path": "/workspace/out/a"}, "CWE-158"),
    RuleAttack("doubled slashes", Harm.INTERNAL_READ, NO_SECRETS, {"path": "//workspace//secret/a"},
               {"path": "//workspace//public/a"}),
    RuleAttack("a way round", Harm.INTERNAL_READ, NO_SECRETS,
               {"path": "public/../secret/a"}, {"path": "secret/../public/a"}),
    RuleAttack("left out", Harm.INTEGRITY, ONLY_OUT, {}, {"path": "out/a"}),
    RuleAttack("another kind", Harm.INTEGRITY, ONLY_OUT, {"path": ["/etc/passwd"]},
               {"path": "out/a"}),
    RuleAttack("user information", Harm.EXFIL, ONLY_HOST,
               {"url": "https://example.org@evil.example/"},
               {"url": "https://example.org/@evil.example/"}, "CWE-918"),
    RuleAttack("backslash", Harm.EXFIL, ONLY_HOST, {"url": "https://evil.example\\@example.org/"},
               {"url": "https://example.org/%5c@"}, "Orange Tsai, A New Era of SSRF (2017)"),
    RuleAttack("suffix", Harm.EXFIL, ONLY_HOST, {"url": "https://example.org.evil.example/"},
               {"url": "https://EXAMPLE.org.:443/"}),
    RuleAttack("fragment", Harm.EXFIL, ONLY_HOST, {"url": "https://evil.example/#example.org"},
               {"url": "https://example.org/#evil.example"}),
    RuleAttack("control character", Harm.EXFIL, ONLY_HOST,
               {"url": "https://example.org\t.evil.example/"}, {"url": "https://example.org/"}),
    RuleAttack("other letters", Harm.LATERAL, NO_HOST, {"url": "https://a.\uff49nternal.example/"},
               {"url": "https://a.public.example/"}, "IDNA maps it to internal"),
    RuleAttack("other dots", Harm.LATERAL, NO_HOST, {"url": "https://a\u3002internal.example/"},
               {"url": "https://internal.example.org/"}),
    RuleAttack("upper case and port", Harm.LATERAL, NO_HOST,
               {"url": "HTTP://DB.Internal.Example.:5432"}, {"url": "http://internal.example:80"}),
    RuleAttack("number as text", Harm.INTEGRITY, SMALL, {"amount": "1000000"}, {"amount": 100}),
    RuleAttack("boolean as number", Harm.INTEGRITY, SMALL, {"amount": True}, {"amount": 1}),
    RuleAttack("not a number", Harm.INTEGRITY, SMALL, {"amount": float("nan")}, {"amount": -1.5}),
    RuleAttack("beyond doubles", Harm.INTEGRITY, SMALL, {"amount": 10**4000}, {"amount": -(10**4000)}),
    RuleAttack("last of many", Harm.EXFIL, NOT_TO, {"to": ["a@b.example"] * 999 + ["x@evil.example"]},
               {"to": ["a@b.example"] * 1000}),
    RuleAttack("behind more than are looked at", Harm.EXFIL, NOT_TO,
               {"to": ["a@b.example"] * 1001 + ["x@evil.example"]}, {"to": ["a@b.example"]}),
    RuleAttack("one good among bad", Harm.EXFIL, ONLY_TO, {"to": ["a@example.org", "x@evil.example"]},
               {"to": ["a@example.org", "b@example.org"]}),
    RuleAttack("an object for a list", Harm.EXFIL, NOT_TO, {"to": {"0": "x@evil.example"}},
               {"to": {"0": "x@good.example"}}),
]  # fmt: skip


@pytest.mark.row("A1")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_call_does_not_slip_past_a_rule_that_denies(attack: RuleAttack) -> None:
    assert verdict(facts(None, attack.arguments), attack.stops) is DENY
    assert verdict(facts(None, attack.twin), attack.stops) is ALLOW
    assert verdict(facts(None, attack.arguments)) is ALLOW  # control: without the rule


def _turned(stops: dict[str, Any]) -> dict[str, Any]:
    """The same condition as one under which a dangerous tool is allowed."""
    (condition,) = stops["when"]
    inner = {name: value for name, value in condition.items() if name != "argument"}
    turned = inner.get("not", {"not": inner})
    when = [{"argument": condition["argument"], **turned}]
    return rule("allow", tools=["delete_all"], when=when)


@pytest.mark.row("A1")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_the_same_call_is_not_opened_by_a_rule_that_allows(attack: RuleAttack) -> None:
    dangerous = tool("delete_all", dangerous=True)
    opens = _turned(attack.stops)
    assert verdict(facts(dangerous, attack.arguments), opens) is ASK
    assert verdict(facts(dangerous, attack.twin), opens) is ALLOW
    always = rule("allow", tools=["delete_all"])
    assert verdict(facts(dangerous, attack.arguments), always) is ALLOW  # control: no condition


READ = """
import json, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
from fumehood.policy.loader import parse_policy
from fumehood.policy.model import PolicyError
told = {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        told[path.name] = len(parse_policy(path.name, path.read_bytes(), [("a", "1.0.0")]).rules)
    except PolicyError as refused:
        told[path.name] = str(refused)[:300]
print(json.dumps(told))
"""

HEAD = '[[rules]]\nid = "r"\ndecision = "deny"\n'
MB = 1 << 20
BOMBS = {
    # name of the file: its text, and what is told
    "deep.toml": (HEAD + "x = " + "[" * 20_000 + "]" * 20_000, "nested deeper than 64 levels"),
    "dotted.toml": ("a." * (MB // 2 - 10) + "b = 1", "a dotted key has more than 64 parts"),
    "alias.yaml": ("a: &a [x, x]\nrules: [*a, *a]\n", "anchors and aliases are not accepted"),
    "tag.yaml": ("rules: !!python/object/apply:os.system [id]\n", "tags are not accepted"),
    "digits.toml": (HEAD + "quorum = " + "9" * 100_000, "a number has too many digits"),
    "brackets.toml": (HEAD + "reason = '" + "[" * 900_000 + "'", "reason: has more than 1000 characters"),
    "quotes.toml": (HEAD + 'reason = """' + '\\"""' * 200_000 + '"""', "reason: has more than 1000 characters"),
    "conditions.toml": (
        HEAD + '[[rules.when]]\nargument = "/a"\nprefix = "x"\n' * 20_000,
        "has more than 50 entries",
    ),
    "names.toml": (HEAD + f"tools = {json.dumps(['a'] * 100_000)}", "tools: has more than 1000 entries"),
    "pointer.toml": (
        HEAD + '[[rules.when]]\nargument = "' + "/*" * 300_000 + '"\nprefix = "x"\n',
        "has more than 4096 characters",
    ),
    "equals.toml": (
        HEAD + '[[rules.when]]\nargument = "/a"\nequals = ' + "[" * 70 + "]" * 70,
        "nested deeper than 64 levels",
    ),
    "surrogate.yaml": ('rules: [{id: "\\ud800", decision: deny}]\n', "surrogate"),
    "escape.toml": (HEAD.replace('"r"', '"\\u001b[2J"'), r"rule '\\x1b[2J'"),
}  # fmt: skip
TWIN = HEAD + '[[rules.when]]\nargument = "/*/*"\nequals = [[[["x"]]]]\n'


@pytest.mark.row("A1")
def test_file_that_is_a_bomb_is_refused_for_its_reason_and_costs_little(tmp_path: Path) -> None:
    for name, (text, _) in BOMBS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "twin.toml").write_text(TWIN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    told = json.loads(done.stdout)
    assert told.pop("twin.toml") == 1
    assert told.keys() == BOMBS.keys()
    for name, (_, reason) in BOMBS.items():
        assert reason in told[name], (name, told[name])
        assert "\x1b" not in told[name]
