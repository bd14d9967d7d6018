"""Edit: an approver says yes to other arguments, which are another call.

Host side. The way of a call (`resume`) makes an `Edited` of the other arguments, checked like a
new call; here it becomes what is kept of the approval from then on. Pure. Invariant: an edit
never lets fewer, or other, people agree than the call that was asked for wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fumehood.approvals.model import Approval
from fumehood.approvals.over_budget import budget_record, reason_with_budget
from fumehood.approvals.store import StoredApproval, StoredRequest
from fumehood.budgets.model import Exceeded
from fumehood.core.errors import PermissionDenied
from fumehood.core.json_types import JsonObject
from fumehood.policy.model import Decision, Verdict
from fumehood.protocol.canonical import canonical

MAX_NAMED = 20
MAX_POINTER = 100
"""Characters: arguments' names are a stranger's where a tool takes any."""


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
    exceeded: Exceeded | None
    """The budget that the yes would let it exceed."""
    hidden: tuple[str, ...]
    """Arguments that the agent's configuration fixes now."""


def edited_document(stored: StoredApproval, edited: Edited) -> dict[str, Any]:
    """What of an approval's row an edit replaces.

    Raises:
        PermissionDenied: the rules of both calls want too few of the same people.
    """
    request = stored.request
    return {
        **_asked_for_edited(stored.approval, edited),
        "arguments": edited.arguments,
        "asked_arguments": _asked_arguments(stored.approval, edited),
        "preview": edited.preview,
        "binding": edited.document,
        "action_digest": edited.digest,
        "request": {
            "arguments": edited.request_arguments,
            "options": request.options,
            "token_id": request.token_id,
            "expected": edited.expected,
            "may_exceed_budget": request.may_exceed_budget,
            "hidden": sorted({*request.hidden, *edited.hidden}),
        },
    }


def as_edited(stored: StoredApproval, edited: Edited) -> Approval:
    """The approval as an edit would make it, to be looked at; nothing of it is kept.

    Raises:
        PermissionDenied: as `edited_document`.
    """
    document = edited_document(stored, edited)
    fields = {name: document[name] for name in document.keys() & Approval.model_fields.keys()}
    for name in ("approvers", "asked_by"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return stored.approval.model_copy(update=fields)


def asked_again(before: StoredApproval, again: StoredApproval) -> StoredApproval:
    """A call that is to be asked for once more, with what stays of an edit of the first one.

    Raises:
        PermissionDenied: as `edited_document`.
    """
    was, now = before.approval, again.approval
    if was.asked_arguments is None:
        return again
    approvers, quorum = _wanted_by_both(was, now.approvers, now.quorum)
    kept = {"asked_arguments": was.asked_arguments, "approvers": approvers, "quorum": quorum}
    hidden = tuple(sorted({*before.request.hidden, *again.request.hidden}))
    asks = again.request
    request = StoredRequest(
        arguments=asks.arguments,
        options=asks.options,
        token_id=asks.token_id,
        expected=asks.expected,
        may_exceed_budget=asks.may_exceed_budget,
        hidden=hidden,
    )
    return StoredApproval(now.model_copy(update=kept), request, again.idempotency_key)


def _asked_arguments(before: Approval, edited: Edited) -> JsonObject | None:
    """As the caller asked; none where a second edit has brought just that back."""
    asked = before.arguments if before.asked_arguments is None else before.asked_arguments
    return None if canonical(asked) == canonical(edited.arguments) else asked


def edit_warning(stored: StoredApproval) -> str | None:
    """What the caller of a call that was carried out is told, where it was edited.

    It names arguments, and no value; of those that its agent's configuration fixes not even that.
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
    return f"approval: a human changed the arguments before this call was carried out{which}"


def _is_same(asked: JsonObject, done: JsonObject, name: str) -> bool:
    """Equal in type, too, as in the digest."""
    if name not in asked or name not in done:
        return False
    return canonical(asked[name]) == canonical(done[name])


def _pointer(name: str) -> str:
    """A JSON pointer (RFC 6901), bounded: a tool that takes anything takes any name."""
    escaped = name.replace("~", "~0").replace("/", "~1")
    return "/" + (escaped if len(escaped) <= MAX_POINTER else escaped[:MAX_POINTER] + "…")


def _asked_for_edited(before: Approval, edited: Edited) -> dict[str, Any]:
    """Who has to agree to an edited call: whom its own rules want, and whom those before wanted.

    Raises:
        PermissionDenied: too few are wanted by both.
    """
    decision = edited.decision
    approvers, quorum = _wanted_by_both(before, decision.approvers, decision.quorum)
    asked: dict[str, Any] = {"approvers": list(approvers), "quorum": quorum}
    if decision.verdict is Verdict.ASK:
        asked |= {"rule": decision.rule, "asked_by": list(decision.asked_by),
                  "reason": reason_with_budget(decision, edited.exceeded),
                  "budget": budget_record(edited.exceeded),
                  "policy_version": decision.policy_version}  # fmt: skip
    return asked


def _wanted_by_both(
    before: Approval, approvers: Sequence[str], quorum: int
) -> tuple[tuple[str, ...], int]:
    """Who is wanted, and how many, where these are wanted, too. Raises PermissionDenied."""
    both = [names for names in (before.approvers, approvers) if names]
    wanted = tuple(name for name in both[0] if all(name in them for them in both)) if both else ()
    quorum = max(before.quorum, quorum)
    if both and len(wanted) < quorum:
        raise PermissionDenied(
            "The rules want other approvers for the edited call than for this one. Deny this one, "
            "and let the edited call be asked for."
        )
    return wanted, quorum
