"""The transitions of an approval: every way in which its state can change.

Each change in `store.py` uses one row of the table `TRANSITIONS`. A change is refused if its row
does not fit the approval's state. The table in `docs/explanation/approval.md` is generated from
this table, and a model-based test covers it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.approvals.model import ApprovalState

PENDING, APPROVED, STARTED = ApprovalState.PENDING, ApprovalState.APPROVED, ApprovalState.STARTED


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table `TRANSITIONS`: a change that is possible for an approval. `leaves`
    contains the states in which the change is possible.
    """

    name: str
    leaves: frozenset[ApprovalState]
    to: ApprovalState | None
    """The approval's new state, or None if the state does not change."""
    by: str
    """Who makes the change, as text for the documentation."""
    when: str
    """When the change is made, as text for the documentation."""
    kind: str = ""
    """The name of the change in the audit chain. If this is empty, the name is `approval.` followed
    by the new state."""

    @property
    def audited(self) -> str:
        """The name of the change in the audit chain."""
        return self.kind or f"approval.{self.to}"


def _rows(*rows: Transition) -> dict[str, Transition]:
    return {row.name: row for row in rows}


TRANSITIONS = _rows(
    Transition(
        "approve", frozenset({PENDING}), APPROVED, "approvers",
        "as many of them as the policy asks for have approved the action",
    ),
    Transition(
        "deny", frozenset({PENDING}), ApprovalState.DENIED, "an approver",
        "one of them denied it, however many had approved it",
    ),
    Transition(
        "cancel", frozenset({PENDING, APPROVED}), ApprovalState.CANCELLED, "the caller",
        "before the call started",
    ),
    Transition(
        "update", frozenset({PENDING}), None, "the engine",
        "the call would have another effect now, so earlier votes do not count",
        kind="approval.previewed",
    ),
    Transition(
        "warn", frozenset({PENDING}), None, "the engine", "it expires soon",
        kind="approval.expiring",
    ),
    Transition(
        "expire", frozenset({PENDING, APPROVED}), ApprovalState.EXPIRED, "the engine",
        "it was not decided, or not started, in time",
    ),
    Transition(
        "end with its session", frozenset({PENDING}), ApprovalState.EXPIRED, "the engine",
        "the session of the call ended",
    ),
    Transition(
        "end with its engine", frozenset({PENDING, APPROVED}), ApprovalState.EXPIRED,
        "the next engine", "the call needs a program or a trial that ended with the engine",
    ),
    Transition(
        "start", frozenset({APPROVED}), STARTED, "the engine",
        "a place for the call is reserved; the approval is used up",
    ),
    Transition(
        "succeed", frozenset({STARTED}), ApprovalState.DONE, "the engine",
        "the call ran and succeeded",
    ),
    Transition(
        "fail", frozenset({APPROVED, STARTED}), ApprovalState.FAILED, "the engine",
        "the call failed, or a gate refused it before it ran",
    ),
    Transition(
        "change", frozenset({APPROVED, STARTED}), ApprovalState.EXPIRED, "the engine",
        "the action is not the approved one any more",
    ),
    Transition(
        "stop", frozenset({APPROVED, STARTED}), ApprovalState.CANCELLED, "the caller",
        "it cancelled the call while the engine prepared it",
    ),
    Transition(
        "interrupt", frozenset({STARTED}), ApprovalState.INTERRUPTED, "the next engine",
        "the engine ended during the run; the call may have taken effect",
    ),
    Transition(
        "resolve as done", frozenset({ApprovalState.INTERRUPTED}), ApprovalState.DONE,
        "an approver", "who found out that the call took effect", kind="approval.resolved",
    ),
    Transition(
        "resolve as failed", frozenset({ApprovalState.INTERRUPTED}), ApprovalState.FAILED,
        "an approver", "who found out that it did not", kind="approval.resolved",
    ),
)  # fmt: skip
"""Name of a change → the row for this change. The rows are in the order of a call's life."""

ENDINGS = {
    ApprovalState.DONE: TRANSITIONS["succeed"],
    ApprovalState.FAILED: TRANSITIONS["fail"],
    ApprovalState.EXPIRED: TRANSITIONS["change"],
    ApprovalState.CANCELLED: TRANSITIONS["stop"],
}
"""State in which an approved call ends → the row for the change to this state."""
