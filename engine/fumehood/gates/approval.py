"""Whether a human has to say yes first.

Host side, asked by `call/approve` and by a dry run. This version can collect no yes, so a
dangerous tool is refused; it never runs unasked.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.model.tool import ToolDefinition


@dataclass(frozen=True, slots=True)
class ApprovalNeed:
    """Whether a call waits for a human, and the rule that says so."""

    required: bool
    rule: str


def approval_need(tool: ToolDefinition) -> ApprovalNeed:
    """The rule for this tool. Arguments do not matter yet: there is no policy to refine it."""
    if tool.dangerous:
        return ApprovalNeed(required=True, rule="default: dangerous tools wait for a human")
    return ApprovalNeed(required=False, rule="default: harmless tools are allowed")
