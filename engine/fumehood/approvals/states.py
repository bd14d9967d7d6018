"""Steps: how an approval comes from one state to the next, each as one value.

Host side, below the desk and the files it is made of, above `approvals/store`, which carries a
`Step` out. Pure: no clock and no database. Invariant: which states a change leaves, what it
asks of the row besides, and what the audit chain and the webhook are told of it stand here, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from fumehood.approvals.model import (
    Approval,
    ApprovalState,
    DecisionRecord,
    RememberedRule,
    Resolution,
)
from fumehood.approvals.store import Step
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.storage.changes import stamp

PENDING = frozenset({ApprovalState.PENDING})
WAITING = PENDING | {ApprovalState.APPROVED}
HAD_ITS_YES = frozenset({ApprovalState.APPROVED, ApprovalState.STARTED})

# What people decide.


def approved(
    word: DecisionRecord,
    *,
    version: int | None,
    start_by: datetime,
    document: Mapping[str, Any],
    remember: RememberedRule | None,
    counts: Callable[[str], bool],
) -> Step:
    """A yes, to be used until `start_by`. `document`: what an edit has replaced."""
    details = _details(word)
    if remember is not None:
        details["remembered"] = remember.id
    return Step(
        "approval.approved", word.approver, word.at, PENDING, ApprovalState.APPROVED,
        version=version, in_time=True,
        columns={"decided_at": stamp(word.at), "expires_at": stamp(start_by)},
        document=document, decision=word, remember=remember, event="approval.decided",
        details=details, counts=counts,
    )  # fmt: skip


def denied(word: DecisionRecord, *, version: int | None, answer: Envelope) -> Step:
    """A no."""
    at = stamp(word.at)
    return Step(
        "approval.denied", word.approver, word.at, PENDING, ApprovalState.DENIED,
        version=version, in_time=True,
        columns={"decided_at": at, "ended_at": at, "code": "APPROVAL_DENIED"},
        decision=word, answer=answer, event="approval.decided", details=_details(word),
    )  # fmt: skip


def taken_back(by: str, now: datetime, answer: Envelope) -> Step:
    """Its caller wants it no more."""
    return Step(
        "approval.cancelled", by, now, WAITING, ApprovalState.CANCELLED,
        columns={"ended_at": stamp(now), "code": "CANCELLED"},
        answer=answer, event="approval.ended",
    )  # fmt: skip


def resolved(resolution: Resolution, by: str, now: datetime, answer: Envelope) -> Step:
    """A human has found out what became of it."""
    to = ApprovalState.DONE if resolution.outcome == "done" else ApprovalState.FAILED
    return Step(
        "approval.resolved", by, now, frozenset({ApprovalState.INTERRUPTED}), to,
        answer=answer, event="approval.ended",
        details={"outcome": resolution.outcome, "note": resolution.note},
    )  # fmt: skip


# What becomes of a yes.


def started(approval: Approval, now: datetime) -> Step:
    """The yes is used up, for this action and no other."""
    return Step(
        "approval.started", "engine", now, frozenset({ApprovalState.APPROVED}),
        ApprovalState.STARTED, digest=approval.action_digest, in_time=True,
        columns={"started_at": stamp(now)},
    )  # fmt: skip


def ended(to: ApprovalState, envelope: Envelope, changed: Sequence[str], now: datetime) -> Step:
    """The call is over. `changed`: what was not as approved any more."""
    code = envelope.error.code if envelope.error is not None else "OK"
    return Step(
        f"approval.{to.value}", "engine", now, HAD_ITS_YES, to,
        columns={"ended_at": stamp(now), "code": code},
        document={"changed": list(changed)} if changed else {},
        answer=envelope, event="approval.ended", details={"code": code},
    )  # fmt: skip


def superseded(by: str, now: datetime) -> Step:
    """Another approval asks again, because the workspace has changed."""
    return Step(
        "approval.superseded", "engine", now, HAD_ITS_YES, ApprovalState.EXPIRED,
        columns={"ended_at": stamp(now)},
        document={"changed": ["workspace"], "superseded_by": by},
        event="approval.ended",
    )  # fmt: skip


# What time and crashes do.


def expiring(now: datetime) -> Step:
    """Its end is near, and people are told. Whoever was shown it was shown what it is."""
    return Step(
        "approval.expiring", "engine", now, PENDING,
        columns={"warned_at": stamp(now)}, event="approval.expiring", is_seen=False,
    )  # fmt: skip


def expired(now: datetime, answer: Envelope) -> Step:
    """Nobody has answered, or the yes could not be used, in time."""
    return Step(
        "approval.expired", "engine", now, WAITING, ApprovalState.EXPIRED,
        columns={"ended_at": stamp(now), "code": "APPROVAL_EXPIRED"},
        answer=answer, event="approval.ended",
    )  # fmt: skip


def interrupted(now: datetime, answer: Envelope) -> Step:
    """It was started and has no end."""
    return Step(
        "approval.interrupted", "engine", now, frozenset({ApprovalState.STARTED}),
        ApprovalState.INTERRUPTED,
        columns={"ended_at": stamp(now), "code": "OUTCOME_UNKNOWN"},
        answer=answer, event="approval.ended",
    )  # fmt: skip


def _details(word: DecisionRecord) -> JsonObject:
    details: JsonObject = {"channel": word.channel, "edited": word.edited, "reason": word.reason}
    if word.is_self_approval:
        details["self_approval"] = True
    return details
