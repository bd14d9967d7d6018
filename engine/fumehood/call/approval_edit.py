"""Edit: an approver says yes to other arguments, which are another call.

Host side. The way of a call (`resume`) makes an `Edited` of the other arguments, checked like a
new call; here it becomes what is kept of the approval from then on. Pure. Invariant: an edit
never lets fewer, or other, people agree than the call that was asked for wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fumehood.model.approval import Approval
from fumehood.model.decision import Decision, Verdict
from fumehood.model.errors import PermissionDenied
from fumehood.model.json_types import JsonObject
from fumehood.store.approvals import StoredApproval


@dataclass(frozen=True, slots=True)
class Edited:
    """What an edited call is: another action, checked like a new call."""

    request_arguments: JsonObject
    arguments: JsonObject
    preview: JsonObject | None
    expected: str | None
    digest: str
    document: JsonObject
    decision: Decision
    """What the policy says of it, which is no denial."""


def edited_document(stored: StoredApproval, edited: Edited) -> dict[str, Any]:
    """What of an approval's row an edit replaces.

    Raises:
        PermissionDenied: the rules of both calls want too few of the same people.
    """
    request = stored.request
    return {
        **_asked_for_edited(stored.approval, edited.decision),
        "arguments": edited.arguments,
        "preview": edited.preview,
        "binding": edited.document,
        "action_digest": edited.digest,
        "request": {
            "arguments": edited.request_arguments,
            "options": request.options,
            "token_id": request.token_id,
            "expected": edited.expected,
            "may_exceed_budget": request.may_exceed_budget,
            "hidden": list(request.hidden),
        },
    }


def _asked_for_edited(before: Approval, decision: Decision) -> dict[str, Any]:
    """Who has to agree to an edited call: whom its own rules want, and whom those before wanted.

    Raises:
        PermissionDenied: too few are wanted by both.
    """
    both = [names for names in (before.approvers, decision.approvers) if names]
    approvers = [name for name in both[0] if all(name in them for them in both)] if both else []
    quorum = max(before.quorum, decision.quorum)
    if both and len(approvers) < quorum:
        raise PermissionDenied(
            "The rules want other approvers for the edited call than for this one. Deny this one, "
            "and let the edited call be asked for."
        )
    asked: dict[str, Any] = {"approvers": approvers, "quorum": quorum}
    if decision.verdict is Verdict.ASK:
        asked |= {"rule": decision.rule, "asked_by": list(decision.asked_by),
                  "reason": decision.reason, "policy_version": decision.policy_version}  # fmt: skip
    return asked
