"""Approve: a dangerous call waits for a human's yes.

Fifth stage. Takes a `ClaimedCall`, returns an `ApprovedCall`. This version cannot ask
anybody, so what needs a yes is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.call.claim import ClaimedCall
from fumehood.gates.approval import approval_need
from fumehood.model.errors import RequiresHumanApproval


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that needs no yes."""

    claimed: ClaimedCall
    rule: str


def approve(claimed: ClaimedCall) -> ApprovedCall:
    """Pass on what needs nobody's yes.

    Raises:
        RequiresHumanApproval: the tool is dangerous.
    """
    tool = claimed.permitted.tool.definition
    need = approval_need(tool)
    if need.required:
        raise RequiresHumanApproval(
            f"{tool.name} is marked dangerous and needs a human's yes, which this version "
            "of the engine cannot collect. Do not retry; tell the user what you wanted to do."
        )
    return ApprovedCall(claimed, need.rule)
