"""Policies of tests, and calls for them to decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fumehood.core.tool import ToolDefinition
from fumehood.policy.loader import RuleOfFile, parse_policy
from fumehood.policy.model import CallFacts, Decision, Policy, Rule, Verdict
from fumehood.policy.service import PolicyGate

MAIL = {"to": {"type": "string"}, "copies": {"type": "array", "items": {"type": "string"}}}


def tool(name: str = "send_mail", **fields: Any) -> ToolDefinition:
    """A tool, harmless by default."""
    parameters = {"type": "object", "properties": fields.pop("properties", MAIL)}
    document = {"name": name, "description": "Act.", "parameters": parameters, **fields}
    return ToolDefinition.model_validate(document)


def facts(
    of: ToolDefinition | None = None,
    arguments: dict[str, Any] | None = None,
    *,
    principal: str = "uid:1000",
    agent: str | None = None,
    exceeds: Callable[[str], bool] = lambda key: False,
) -> CallFacts:
    """A call."""
    return CallFacts(of or tool(), arguments or {}, principal, agent, None, exceeds)


def policy_of(*rules: Rule | dict[str, Any]) -> Policy:
    """A policy without a file."""
    made = tuple(
        rule if isinstance(rule, Rule) else RuleOfFile.model_validate(rule) for rule in rules
    )
    return Policy(version="test", file="test.toml", rules=made, lines=(None,) * len(made))


def rule(decision: str, **fields: Any) -> dict[str, Any]:
    """A rule as parsed from TOML."""
    return {"id": fields.pop("id", f"a-{decision}"), "decision": decision, **fields}


def decide(
    call: CallFacts, *rules: Rule | dict[str, Any], environment: str = "production"
) -> Decision:
    """The decision of these rules on a call."""
    return PolicyGate(policy_of(*rules), environment).decide(call)


def verdict(call: CallFacts, *rules: dict[str, Any], environment: str = "production") -> Verdict:
    """The verdict of these rules on a call."""
    return decide(call, *rules, environment=environment).verdict


def faults(text: str, *tools: ToolDefinition, name: str = "policy.toml") -> list[str]:
    """The faults of a policy text, each with file and line."""
    from fumehood.policy.model import PolicyError

    try:
        parse_policy(name, text.encode(), tools or (tool(),))
    except PolicyError as refused:
        return list(refused.shown)
    return []
