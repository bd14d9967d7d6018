"""What rules may look at of a call that was validated. Asked by `authorize` and by explanations."""

from __future__ import annotations

from collections.abc import Callable

from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy.decision import CallFacts


def facts_of(
    validated: ValidatedCall, principal_id: str, is_over_budget: Callable[[], bool]
) -> CallFacts:
    """The call as the policy sees it."""
    options = validated.resolved.request.options
    return CallFacts(
        validated.resolved.tool.definition,
        validated.arguments,
        principal_id,
        options.agent_id,
        options.session_id,
        is_over_budget,
    )
