"""Refusals: what callers and approvers are told where an approval ends, or was not theirs.

Host side, below the desk and the files it is made of; `approve` asks here, too. Only words: each
function takes what is known of an approval and returns the error, and nothing is looked up,
decided or raised here.
"""

from __future__ import annotations

from collections.abc import Sequence

from fumehood.approvals.model import OPEN_STATES, Approval
from fumehood.core.errors import (
    ApprovalDenied,
    ApprovalExpired,
    IdempotencyConflict,
    OutcomeUnknown,
    PermissionDenied,
    RateLimited,
    RequiresHumanApproval,
    ResourceNotFound,
)

MAX_SHOWN_ID = 100

# What a caller hears.


def nobody_to_ask(tool: str, cure: str) -> RequiresHumanApproval:
    """There are no approvers; `cure` is what can make one as things stand."""
    return RequiresHumanApproval(
        f"{tool} needs a human's yes, and this engine has nobody to ask: its operator has "
        f"to make an approver ({cure}). Nothing waits. Do not retry; tell the user what you "
        "wanted to do."
    )


def too_few_to_ask(tool: str, lack: str) -> RequiresHumanApproval:
    """There are not enough of the approvers whom the rules want."""
    return RequiresHumanApproval(
        f"{tool} needs a human's yes, and nobody could complete it: {lack}. The operator has to "
        "change the rule, or to add approvers (`fumehood approvers add`). Do not retry; tell the "
        "user what you wanted to do."
    )


def too_many_wait(of_this_caller: int) -> RateLimited:
    """There is no room for one more call that waits."""
    return RateLimited(
        f"{of_this_caller} calls of yours wait for a human already, and one more could not be "
        "kept. Let some of them be decided first, or cancel them.",
        retry_after_ms=60_000,
    )


def denial(approval: Approval, *, again: bool = False) -> ApprovalDenied:
    """Somebody said no; `again`: a short time ago, to the same call."""
    word = next((one for one in reversed(approval.decisions) if one.decision == "deny"), None)
    reason = f" The reason: {word.reason}" if word is not None and word.reason else ""
    already = " already" if again else ""
    return ApprovalDenied(
        f"A human said no to this call of {approval.tool}{already}.{reason} Do not retry it, and "
        "do not try to reach the same by other means; ask the user how to go on.",
        extra={"approval_id": approval.id},
    )


def expired(approval: Approval) -> ApprovalExpired:
    """Its time is over, with a yes that nobody could use or without one."""
    was = (
        "Nobody answered in time"
        if approval.decided_at is None
        else "The yes came, but the call could not be started in time"
    )
    return ApprovalExpired(
        f"{was}: the approval of this call of {approval.tool} has expired, which is "
        "no denial. Ask again only if it is still needed.",
        extra={"approval_id": approval.id},
    )


def unusable_yes() -> ApprovalExpired:
    """The call was about to start, and its yes is not there any more."""
    return ApprovalExpired(
        "The yes for this call could not be used any more. Ask again if it is still needed."
    )


def interrupted(approval: Approval) -> OutcomeUnknown:
    """The engine ended while it ran: whether it has acted nobody knows."""
    return OutcomeUnknown(
        f"The engine ended while this call of {approval.tool} ran. It may have acted. "
        "Do not repeat it; a human has to find out and resolve it.",
        extra={"approval_id": approval.id},
    )


# What whoever decides hears, or looks, or takes back.


def unknown() -> ResourceNotFound:
    """There is none, or not for who asks."""
    return ResourceNotFound("There is no such approval. Do not retry.")


def nothing_to_decide(approval_id: str) -> ResourceNotFound:
    """There is none with this id, which is a stranger's text; nothing was decided."""
    shown = ascii(approval_id[:MAX_SHOWN_ID])
    return ResourceNotFound(
        f"There is no such approval: {shown}. Nothing was decided. Do not retry.",
        details={"approval_id": shown[1:-1]},
    )


def too_late(approval: Approval) -> ApprovalExpired:
    """A word that came after the end."""
    return ApprovalExpired(
        f"It is too late: this approval expired at {approval.expires_at:%Y-%m-%d %H:%M:%S} UTC.",
        details={"state": approval.state.value, "version": approval.version},
    )


def conflict(approval: Approval) -> IdempotencyConflict:
    """Somebody else was first. `approval` is how it is now."""
    is_open = approval.state in OPEN_STATES
    words = "It has changed since you looked" if is_open else f"It is {approval.state} already"
    return IdempotencyConflict(
        f"{words}. Look at it again.",
        details={"state": approval.state.value, "version": approval.version},
    )


def no_scope() -> PermissionDenied:
    """An identity that decides nothing."""
    return PermissionDenied("This identity may not approve. Do not retry.")


def own_call() -> PermissionDenied:
    """An approver's own call."""
    return PermissionDenied(
        "Nobody approves a call of their own. Another approver has to decide. Do not retry."
    )


def not_among(approvers: Sequence[str]) -> PermissionDenied:
    """The rules that asked want others."""
    return PermissionDenied(f"Only {', '.join(approvers)} may decide this one. Do not retry.")
