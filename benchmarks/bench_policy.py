"""What a decision of the policy costs: without rules, with a thousand, and with the worst thousand.

A thousand rules as an operator would write them: most about tools by name, some about every
tool. In the worst thousand all are about the tool that is called, all conditions are on its
arguments, none decides, so that every one is asked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.line import Line
from fumehood.core.tool import ToolDefinition
from fumehood.policy.loader import parse_policy
from fumehood.policy.model import CallFacts, Policy, Rule, Verdict
from fumehood.policy.service import PolicyGate

RULES = 1_000
TIMES = 500
MEAN_OF = 20
TARGET_MS = 0.3
ARGUMENTS = {"to": "someone@example.org", "path": "/workspace/out/report.pdf", "amount": 12}


def policy_lines() -> Iterator[Line]:
    """At the level of the gate."""
    tools = [_tool(f"tool_{number}") for number in range(RULES // 2)]
    call = CallFacts(tools[7], ARGUMENTS, "uid:1000", "clerk", None)
    bare = _median_ms(PolicyGate(None, "production"), call, Verdict.ALLOW) * 1e3
    yield Line("policy: a decision without rules", "≤ 5 µs", f"{bare:.2f} µs", bare <= 5)
    written = _median_ms(PolicyGate(_written(tools), "production"), call, Verdict.ALLOW)
    yield Line(
        f"policy: a decision with {RULES} rules", f"≤ {TARGET_MS} ms", f"{written:.4f} ms",
        written <= TARGET_MS,
    )  # fmt: skip
    worst = _median_ms(PolicyGate(_worst(), "production"), call, Verdict.ALLOW)
    yield Line(
        f"policy: with {RULES} rules that are all about the call", "–", f"{worst:.3f} ms", None
    )
    before = time.perf_counter()
    text = "\n".join(_toml(number) for number in range(RULES))
    parse_policy("policy.toml", text.encode(), tools)
    seconds = time.perf_counter() - before
    yield Line(f"policy: reading {RULES} rules", "–", f"{seconds * 1e3:.0f} ms", None)


def _tool(name: str) -> ToolDefinition:
    properties = {
        "to": {"type": "string"},
        "path": {"type": "string"},
        "amount": {"type": "integer"},
    }
    parameters = {"type": "object", "properties": properties}
    return ToolDefinition(name=name, description="Act.", parameters=parameters)


def _written(tools: list[ToolDefinition]) -> Policy:
    """Nine in ten name a tool, one in ten looks at every call."""
    documents: list[dict[str, Any]] = []
    for number in range(RULES):
        is_general = number % 10 == 0
        documents.append(
            {
                "id": f"r{number}",
                "decision": ("deny", "ask", "allow")[number % 3],
                **({} if is_general else {"tools": [tools[number % len(tools)].name]}),
                **({"agents": [f"agent-{number}"]} if is_general else {}),
                "when": [_condition(number)],
            }
        )
    return _policy(documents)


def _worst() -> Policy:
    return _policy(
        [
            {
                "id": f"r{number}",
                "decision": ("deny", "ask", "allow")[number % 3],
                "when": [_condition(number)],
            }
            for number in range(RULES)
        ]
    )


def _condition(number: int) -> dict[str, Any]:
    """One that does not hold."""
    return (
        {"argument": "/to", "glob": f"*@host-{number}.example"},
        {"argument": "/path", "path_inside": f"/workspace/secret-{number}"},
        {"argument": "/to", "in": [f"a-{number}@example.org", f"b-{number}@example.org"]},
        {"argument": "/amount", "min": 1000 + number},
        {"argument": "/to", "prefix": f"boss-{number}"},
    )[number % 5]


def _toml(number: int) -> str:
    return (
        f'[[rules]]\nid = "r{number}"\ndecision = "deny"\ntools = ["tool_{number % (RULES // 2)}"]\n'
        f'[[rules.when]]\nargument = "/to"\nprefix = "boss-{number}"\n'
    )


def _policy(documents: list[dict[str, Any]]) -> Policy:
    rules = tuple(Rule.model_validate(document) for document in documents)
    return Policy(version="bench", file="bench.toml", rules=rules, lines=(None,) * len(rules))


def _median_ms(gate: PolicyGate, call: CallFacts, expected: Verdict) -> float:
    if gate.decide(call).verdict is not expected:
        raise RuntimeError("the policy decided otherwise than it was made to")
    times = []
    for _ in range(TIMES):
        before = time.perf_counter()
        for _ in range(MEAN_OF):
            gate.decide(call)
        times.append((time.perf_counter() - before) / MEAN_OF)
    return statistics.median(times) * 1e3
