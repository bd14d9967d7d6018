"""Refusals: the errors that callers and approvers of calls receive.

Host side, pure functions. They return an error, except `require_known_options`, which raises it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fumehood.approvals.model import OPEN_STATES, PROGRAM, SESSION, Approval, ApprovalState
from fumehood.call_options import read_stored
from fumehood.core.call import Need
from fumehood.core.errors import (
    ApprovalDenied,
    ApprovalExpired,
    CallInProgress,
    IdempotencyConflict,
    InvalidParams,
    OutcomeUnknown,
    PermissionDenied,
    RateLimited,
    RequiresHumanApproval,
    ResourceNotFound,
)
from fumehood.core.json_types import JsonObject

# For callers.


def require_known_options(options: JsonObject) -> None:
    """Check the stored options of a call. Raise InvalidParams if this engine does not know one of
    them.
    """
    _, lost = read_stored(options)
    if lost:
        raise InvalidParams(
            f"The call has the option {lost[0]!r}, which this engine does not know: a part of it "
            "is missing, or another version stored the call. Nothing runs without the option. Do "
            "not retry; tell the user what you wanted to do.",
            fields=[f"options.{name}" for name in lost],
        )


def no_approvers(tool: str, remedy: str) -> RequiresHumanApproval:
    """Return the error for a call that needs approval while the engine has no approvers.

    `remedy` is a clause that tells the operator how to add an approver.
    """
    return RequiresHumanApproval(
        f"{tool} needs approval, and this engine has no approvers. The operator has to add one "
        f"({remedy}). The call was not stored. Do not retry; tell the user what you wanted to do."
    )


def too_few_approvers(tool: str, lack: str) -> RequiresHumanApproval:
    """Return the error for a call whose quorum cannot be reached.

    `lack` is a clause that explains why.
    """
    return RequiresHumanApproval(
        f"{tool} cannot be approved: {lack}. The operator has to change the rule or add approvers "
        "(`fumehood approvers add`). Do not retry; tell the user what you wanted to do."
    )


def too_many_wait(of_this_caller: int) -> RateLimited:
    """Return the error for a call that exceeds the quota of waiting calls. `of_this_caller` is the
    number of the caller's own waiting calls.
    """
    return RateLimited(
        f"{of_this_caller} of your calls already wait for approval, which is the limit. Wait until "
        "some of them are decided, or cancel them.",
        retry_after_ms=60_000,
    )


def waits(approval: Approval, url: str | None) -> RequiresHumanApproval | CallInProgress:
    """Return the error for a stored call that has not ended: RequiresHumanApproval if the call is
    pending. Otherwise CallInProgress, even if the approved call has not started yet. `url` is the
    address of the approval's page.
    """
    if approval.state is not ApprovalState.PENDING:
        return CallInProgress(
            f"This call of {approval.tool} was approved and is running. Fetch its answer with the "
            f"call id {approval.call_id}.",
            retry_after_ms=1000,
            extra={"approval_id": approval.id},
        )
    why = f" {approval.reason}" if approval.reason else ""
    return RequiresHumanApproval(
        f"{approval.tool} waits for approval.{why} It runs by itself once it is approved. "
        "Tell the user what you want to do. After the decision, get the answer with the call id "
        f"{approval.call_id}, or by exactly the same call again.",
        extra={"approval_id": approval.id, "approval_url": url},
        details={"expires_at": approval.expires_at.isoformat(), "rule": approval.rule},
    )


def denial(approval: Approval, *, again: bool = False) -> ApprovalDenied:
    """Return the error for a denied call.

    If `again` is True, the error is for a call that repeats an earlier, denied call, and `approval`
    is the approval of the earlier call.
    """
    newest = next((one for one in reversed(approval.decisions) if one.decision == "deny"), None)
    reason = f" The reason: {newest.reason}" if newest is not None and newest.reason else ""
    if reason and reason[-1].isalnum():
        reason += "."
    already, lasts = (" already", ", which holds for 24 hours") if again else ("", "")
    return ApprovalDenied(
        f"This call of {approval.tool} was{already} denied by a human{lasts}.{reason} Do not retry "
        "it, and do not try to do the same in another way; ask the user how to continue.",
        extra={"approval_id": approval.id},
    )


def expired(approval: Approval) -> ApprovalExpired:
    """Return the error for a call that was not decided in time, or that was approved but not
    started in time.
    """
    was = (
        "Nobody decided in time"
        if approval.decided_at is None
        else "The call was approved, but could not start in time"
    )
    return ApprovalExpired(
        f"{was}: the approval of this call of {approval.tool} has expired. It was not denied. "
        "Ask again only if the call is still needed.",
        extra={"approval_id": approval.id},
    )


def session_over(approval: Approval) -> ApprovalExpired:
    """Return the error for a waiting call whose session has ended."""
    return ApprovalExpired(
        f"The session of this call of {approval.tool} ended before anybody decided, so the call "
        "can no longer run. It was not denied. Make a new session, and ask again if the call is "
        "still needed.",
        extra={"approval_id": approval.id},
        details={"changed": [SESSION]},
    )


def lost_with_engine(approval: Approval, what: Need) -> ApprovalExpired:
    """Return the error for a waiting call that needs a program or a trial (`what`), which was lost
    when the engine ended.
    """
    lost, done, then = (
        ("the program that wanted to send this request", "sent", "Run the program again")
        if what == PROGRAM
        else ("the effect of this trial", "put in", "Try it again")
    )
    return ApprovalExpired(
        f"The engine was restarted, and {lost} is gone, so nothing was {done}. It was not denied. "
        f"{then} if it is still needed.",
        extra={"approval_id": approval.id},
        details={"changed": [what]},
    )


def unusable_approval() -> ApprovalExpired:
    """Return the error for a call whose approval became invalid just before the call was to
    start.
    """
    return ApprovalExpired(
        "The approval of this call is no longer valid. Ask again if the call is still needed."
    )


def not_as_approved(changed: Sequence[str]) -> ApprovalExpired:
    """Return the error for a call whose action now differs from the approved action.

    `changed` names the fields of the action that differ.
    """
    return ApprovalExpired(
        f"The call is no longer what was approved: {', '.join(changed)} changed since. "
        "Nothing was done. Ask again if it is still needed.",
        details={"changed": list(changed)},
    )


def used_decision() -> ApprovalExpired:
    """Return the error for an `external:` call (which the client runs itself, after the engine's
    decision) if an identical call has already used the approval.
    """
    return ApprovalExpired(
        "This approval was used for an equal call. Ask again if this call is needed as well."
    )


def interrupted(approval: Approval) -> OutcomeUnknown:
    """Return the error for a call that was running when the engine ended. Its outcome is
    unknown.
    """
    return OutcomeUnknown(
        f"The engine ended while this call of {approval.tool} ran. It may have acted. "
        "Do not repeat it; a human has to check and resolve it.",
        extra={"approval_id": approval.id},
    )


def cannot_be_edited(what: Need) -> InvalidParams:
    """Return the error for an attempt to edit a program's request or a trial. Both can only run
    unchanged after approval. `what` says which of the two the call is.
    """
    held = (
        "A program's request is sent as it is"
        if what == PROGRAM
        else "A trial has run, and is put in as it is shown"
    )
    return InvalidParams(
        f"{held}, or not at all. Deny it, and say in the reason what should change.",
        fields=["arguments"],
    )


# For approvers, and for callers who look at or cancel their approvals.


def unknown() -> ResourceNotFound:
    """Return the error for an approval that does not exist, or that the caller may not see."""
    return ResourceNotFound("There is no such approval. Do not retry.")


def nothing_to_decide(approval_id: str) -> ResourceNotFound:
    """Return the error for a batch of decisions that contains an unknown approval id. No decision
    of the batch takes effect.

    `approval_id` is an untrusted text of limited length.
    """
    shown = ascii(approval_id)
    return ResourceNotFound(
        f"There is no such approval: {shown}. Nothing was decided. Do not retry.",
        details={"approval_id": shown[1:-1]},
    )


def too_late(approval: Approval) -> ApprovalExpired:
    """Return the error for a decision that comes after the approval expired or after the call's
    session, program or trial ended.
    """
    at = approval.ended_at or approval.expires_at
    is_of_session = approval.outlived == SESSION
    what = "the session of this call ended" if is_of_session else "this approval expired"
    why = "" if is_of_session else approval.outlived_in_words
    return ApprovalExpired(
        f"Too late: {what} at {at:%Y-%m-%d %H:%M:%S} UTC.{why and f' {why}.'}",
        details={"state": approval.state.value, "version": approval.version},
    )


def conflict(approval: Approval) -> IdempotencyConflict:
    """Return the error for an approval that has changed since it was read.

    `approval` is the approval in its current state.
    """
    is_open = approval.state in OPEN_STATES
    words = "It has changed since you looked" if is_open else f"It is {approval.state} already"
    return IdempotencyConflict(
        f"{words}. Look at it again.",
        details={"state": approval.state.value, "version": approval.version},
    )


def no_scope() -> PermissionDenied:
    """Return the error for a principal without the scope `approve`."""
    return PermissionDenied("This identity may not approve. Do not retry.")


def own_call() -> PermissionDenied:
    """Return the error for an approver who is also the caller of the call."""
    return PermissionDenied(
        "Nobody can approve their own call. Another approver has to decide. Do not retry."
    )


def not_among(approvers: Sequence[str]) -> PermissionDenied:
    """Return the error for a principal who is not among `approvers`, the approvers that the policy
    rules name.
    """
    return PermissionDenied(f"Only {', '.join(approvers)} may decide this one. Do not retry.")
