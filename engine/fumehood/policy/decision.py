"""What a policy is asked and what it answers. Values only; who decides is in `policy/service`.

Invariant: deny > ask > allow, and where several rules say the same, the first written one is
named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition


class Verdict(StrEnum):
    """What a rule says of a call, the strictest last."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Everything that rules may look at.

    `arguments` are the effective ones: after coercion, defaults and the agent's fixed ones.
    """

    tool: ToolDefinition
    arguments: JsonObject
    principal_id: str
    agent_id: str | None
    session_id: str | None
    is_over_budget: Callable[[], bool] = _never
    """Whether a budget has too little left for it; asked only where a rule wants to know."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy says of one call."""

    verdict: Verdict
    rule: str
    """The id of the rule that decided, or a sentence beginning with `default:`."""
    reason: str | None = None
    """For the caller and the approver."""
    approvers: tuple[str, ...] = ()
    """Names of those who may say yes; none means any approver."""
    quorum: int = 1
    """How many different approvers have to say yes."""
    policy_version: str = "none"
    shadow: tuple[str, ...] = ()
    """What rules in shadow mode would have said, as warnings for the log."""
    remembered: str | None = None
    """The remembered rule that allows it and has a limited number of uses, to be counted when
    the call starts."""
    asked_by: tuple[str, ...] = ()
    """The ids of all rules that ask; none where a default does."""
    may_exceed_budget: bool = False
    """A rule looks at the budget, so that a yes lets the call exceed it."""


__all__ = ["CallFacts", "Decision", "Verdict"]
