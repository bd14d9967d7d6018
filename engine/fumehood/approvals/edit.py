"""Edits: an approver approves a call with other arguments, which is another action.

Host side, pure. `resume` checks the new arguments like a new call and returns an `Edited`; this
file turns it into the new content of the approval's row. Invariant: an edit never lowers the
quorum, and never admits approvers whom the original call did not admit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from fumehood.approvals.model import Approval, StoredApproval
from fumehood.approvals.preview import budget_record, reason_with_budget
from fumehood.budgets.model import Exceeded
from fumehood.core.errors import PermissionDenied
from fumehood.core.json_types import JsonObject
from fumehood.policy.model import Decision, Verdict
from fumehood.protocol.canonical import canonical
from fumehood.storage.changes import stamp

MAX_NAMED = 20
MAX_POINTER = 100
"""Characters: some tools accept any argument names."""


@dataclass(frozen=True, slots=True)
class Edited:
    """An edited call: another action, checked like a new call."""

    request_arguments: JsonObject
    arguments: JsonObject
    preview: JsonObject | None
    previewed_at: datetime | None
    expected: str | None
    digest: str
    document: JsonObject
    decision: Decision
    """The policy's decision on it, which is not a denial."""
    exceeded: Exceeded | None
    """The budget that it would exceed with the approval."""
    hidden: tuple[str, ...]
    """Arguments that the agent's configuration now fixes."""


def edited_document(stored: StoredApproval, edited: Edited) -> dict[str, Any]:
    """The fields of an approval's row that an edit replaces.

    Raises:
        PermissionDenied: too few approvers are admitted by the rules of both calls.
    """
    hidden = tuple(sorted({*stored.request.hidden, *edited.hidden}))
    request = replace(
        stored.request,
        arguments=edited.request_arguments,
        expected=edited.expected,
        hidden=hidden,
    )
    return {
        **_asked_for_edited(stored.approval, edited),
        "arguments": edited.arguments,
        "asked_arguments": _asked_arguments(stored.approval, edited),
        "preview": edited.preview,
        "previewed_at": None if edited.previewed_at is None else stamp(edited.previewed_at),
        "binding": edited.document,
        "action_digest": edited.digest,
        "request": request.document,
    }


def as_edited(stored: StoredApproval, edited: Edited) -> Approval:
    """The approval as an edit would make it. Nothing is stored.

    Raises:
        PermissionDenied: as `edited_document`.
    """
    document = edited_document(stored, edited)
    fields = {name: document[name] for name in document.keys() & Approval.model_fields.keys()}
    for name in ("approvers", "asked_by"):
        if name in fields:
            fields[name] = tuple(fields[name])
    fields["previewed_at"] = edited.previewed_at
    return stored.approval.model_copy(update=fields)


def asked_again(before: StoredApproval, again: StoredApproval) -> StoredApproval:
    """The approval that asks again for a call, with an edit of the first one carried over.

    Raises:
        PermissionDenied: as `edited_document`.
    """
    was, now = before.approval, again.approval
    if was.asked_arguments is None:
        return again
    approvers, quorum = _admitted_by_both(was, now.approvers, now.quorum)
    kept = {"asked_arguments": was.asked_arguments, "approvers": approvers, "quorum": quorum}
    hidden = tuple(sorted({*before.request.hidden, *again.request.hidden}))
    request = replace(again.request, hidden=hidden)
    return replace(again, approval=now.model_copy(update=kept), request=request)


def _asked_arguments(before: Approval, edited: Edited) -> JsonObject | None:
    """The caller's arguments; None if a second edit has restored them."""
    asked = before.arguments if before.asked_arguments is None else before.asked_arguments
    return None if canonical(asked) == canonical(edited.arguments) else asked


def edit_warning(stored: StoredApproval) -> str | None:
    """The warning for the caller of an edited call; None if it was not edited.

    It names the changed arguments but not their values, and omits the agent's fixed ones.
    """
    approval = stored.approval
    asked, done = approval.asked_arguments, approval.arguments
    if asked is None:
        return None
    names = sorted((asked.keys() | done.keys()).difference(stored.request.hidden))
    changed = [name for name in names if not _is_same(asked, done, name)]
    shown = [_pointer(name) for name in changed[:MAX_NAMED]]
    shown += ["…"] if len(changed) > MAX_NAMED else []
    which = f": changed {', '.join(shown)}" if shown else ""
    return f"approval: a human changed the arguments before this call ran{which}"


def _is_same(asked: JsonObject, done: JsonObject, name: str) -> bool:
    """Whether an argument is equal, its type included, as in the digest."""
    if name not in asked or name not in done:
        return False
    return canonical(asked[name]) == canonical(done[name])


def _pointer(name: str) -> str:
    """A JSON pointer (RFC 6901) of bounded length."""
    escaped = name.replace("~", "~0").replace("/", "~1")
    return "/" + (escaped if len(escaped) <= MAX_POINTER else escaped[:MAX_POINTER] + "…")


def _asked_for_edited(before: Approval, edited: Edited) -> dict[str, Any]:
    """Who has to approve an edited call: approvers that its own rules and the earlier ones admit.

    Raises:
        PermissionDenied: too few are admitted by both.
    """
    decision = edited.decision
    approvers, quorum = _admitted_by_both(before, decision.approvers, decision.quorum)
    asked: dict[str, Any] = {"approvers": list(approvers), "quorum": quorum}
    if decision.verdict is Verdict.ASK:
        asked |= {"rule": decision.rule, "asked_by": list(decision.asked_by),
                  "reason": reason_with_budget(decision, edited.exceeded),
                  "budget": budget_record(edited.exceeded),
                  "policy_version": decision.policy_version}  # fmt: skip
    return asked


def _admitted_by_both(
    before: Approval, approvers: Sequence[str], quorum: int
) -> tuple[tuple[str, ...], int]:
    """The approvers and the quorum that both rules allow. Raises PermissionDenied."""
    both = [names for names in (before.approvers, approvers) if names]
    admitted = tuple(name for name in both[0] if all(name in them for them in both)) if both else ()
    quorum = max(before.quorum, quorum)
    if both and len(admitted) < quorum:
        raise PermissionDenied(
            "The edited call needs other approvers than this one. Deny this one, and let the "
            "caller ask for the edited call."
        )
    return admitted, quorum
