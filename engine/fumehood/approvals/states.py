"""States: every change of an approval's state, each as one value, a `Step`.

Host side, pure: no clock and no database; `store.py` applies a step in one transaction. Invariant:
the states that a change may leave, its other conditions, and its entries for the audit chain and
the channels are defined here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from fumehood.approvals.model import (
    SESSION,
    Approval,
    ApprovalState,
    DecisionRecord,
    RememberedRule,
    Resolution,
)
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.storage.changes import stamp


@dataclass(frozen=True, slots=True)
class Step:
    """One change of one approval. Absent fields stay unchanged."""

    kind: str
    """Its name in the audit chain."""
    by: str
    at: datetime
    leaves: frozenset[ApprovalState]
    to: ApprovalState | None = None
    version: int | None = None
    """The approval must still have this version."""
    digest: str | None = None
    """The approval must still be for this action."""
    in_time: bool = False
    """The approval must not have expired."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    document: Mapping[str, Any] = field(default_factory=dict)
    decision: DecisionRecord | None = None
    remember: RememberedRule | None = None
    answer: Envelope | None = None
    event: str | None = None
    """The event that channels report."""
    details: JsonObject = field(default_factory=dict)
    """For the audit chain."""
    counts: Callable[[str], bool] | None = None
    """Tells whose earlier approvals count; None: all. The present approver is authenticated."""
    is_seen: bool = True
    """Whether people can see the change, so that it makes a new version."""


PENDING = frozenset({ApprovalState.PENDING})
WAITING = PENDING | {ApprovalState.APPROVED}
AFTER_APPROVAL = frozenset({ApprovalState.APPROVED, ApprovalState.STARTED})

# Decisions of people.


def approved(
    decision: DecisionRecord,
    *,
    version: int | None,
    start_by: datetime,
    document: Mapping[str, Any],
    remember: RememberedRule | None,
    counts: Callable[[str], bool],
) -> Step:
    """An approval, valid until `start_by`. `document`: the fields that an edit replaces."""
    details = _details(decision)
    if remember is not None:
        details["remembered"] = remember.id
    return Step(
        "approval.approved", decision.approver, decision.at, PENDING, ApprovalState.APPROVED,
        version=version, in_time=True,
        columns={"decided_at": stamp(decision.at), "expires_at": stamp(start_by)},
        document=document, decision=decision, remember=remember, event="approval.decided",
        details=details, counts=counts,
    )  # fmt: skip


def denied(decision: DecisionRecord, *, version: int | None, answer: Envelope) -> Step:
    """A denial."""
    at = stamp(decision.at)
    return Step(
        "approval.denied", decision.approver, decision.at, PENDING, ApprovalState.DENIED,
        version=version, in_time=True,
        columns={"decided_at": at, "ended_at": at, "code": "APPROVAL_DENIED"},
        decision=decision, answer=answer, event="approval.decided", details=_details(decision),
    )  # fmt: skip


def cancelled(by: str, now: datetime, answer: Envelope) -> Step:
    """The caller cancelled the call before it started."""
    return Step(
        "approval.cancelled", by, now, WAITING, ApprovalState.CANCELLED,
        columns={"ended_at": stamp(now), "code": "CANCELLED"},
        answer=answer, event="approval.ended",
    )  # fmt: skip


def resolved(resolution: Resolution, by: str, now: datetime, answer: Envelope) -> Step:
    """A human found out how an interrupted call ended."""
    to = ApprovalState.DONE if resolution.outcome == "done" else ApprovalState.FAILED
    return Step(
        "approval.resolved", by, now, frozenset({ApprovalState.INTERRUPTED}), to,
        answer=answer, event="approval.ended",
        details={"outcome": resolution.outcome, "note": resolution.note},
    )  # fmt: skip


# Approved calls.


def started(approval: Approval, now: datetime) -> Step:
    """The call starts: the approval is used up, for this action and no other."""
    return Step(
        "approval.started", "engine", now, frozenset({ApprovalState.APPROVED}),
        ApprovalState.STARTED, digest=approval.action_digest, in_time=True,
        columns={"started_at": stamp(now)},
    )  # fmt: skip


def ended(to: ApprovalState, envelope: Envelope, changed: Sequence[str], now: datetime) -> Step:
    """The call is over. `changed`: the parts of its action that differed from the approved ones."""
    code = envelope.error.code if envelope.error is not None else "OK"
    return Step(
        f"approval.{to.value}", "engine", now, AFTER_APPROVAL, to,
        columns={"ended_at": stamp(now), "code": code},
        document={"changed": list(changed)} if changed else {},
        answer=envelope, event="approval.ended", details={"code": code},
    )  # fmt: skip


def superseded(by: str, now: datetime) -> Step:
    """Another approval asks again, because the workspace changed."""
    return Step(
        "approval.superseded", "engine", now, AFTER_APPROVAL, ApprovalState.EXPIRED,
        columns={"ended_at": stamp(now)},
        document={"changed": ["workspace"], "superseded_by": by},
        event="approval.ended",
    )  # fmt: skip


# Time and crashes.


def expiring(now: datetime) -> Step:
    """The approval expires soon, and channels warn of it. It is no change that people see."""
    return Step(
        "approval.expiring", "engine", now, PENDING,
        columns={"warned_at": stamp(now)}, event="approval.expiring", is_seen=False,
    )  # fmt: skip


def previewed(before: Approval, document: Mapping[str, Any], now: datetime) -> Step:
    """The call would change other files by now. Earlier decisions do not count for that."""
    return Step(
        "approval.previewed", "engine", now, PENDING, digest=before.action_digest, document=document
    )


def expired(now: datetime, answer: Envelope) -> Step:
    """The call was not decided, or not started after its approval, in time."""
    return Step(
        "approval.expired", "engine", now, WAITING, ApprovalState.EXPIRED,
        columns={"ended_at": stamp(now), "code": "APPROVAL_EXPIRED"},
        answer=answer, event="approval.ended",
    )  # fmt: skip


def outlived(now: datetime, answer: Envelope) -> Step:
    """The call's session ended before anybody decided."""
    return replace(
        expired(now, answer), leaves=PENDING, document={"changed": [SESSION]},
        details={"changed": [SESSION]},
    )  # fmt: skip


def interrupted(now: datetime, answer: Envelope) -> Step:
    """The engine ended while the call ran."""
    return Step(
        "approval.interrupted", "engine", now, frozenset({ApprovalState.STARTED}),
        ApprovalState.INTERRUPTED,
        columns={"ended_at": stamp(now), "code": "OUTCOME_UNKNOWN"},
        answer=answer, event="approval.ended",
    )  # fmt: skip


def _details(decision: DecisionRecord) -> JsonObject:
    details: JsonObject = {
        "channel": decision.channel,
        "edited": decision.edited,
        "reason": decision.reason,
    }
    if decision.is_self_approval:
        details["self_approval"] = True
    return details
