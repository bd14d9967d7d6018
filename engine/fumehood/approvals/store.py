"""Approvals in the database, and every state change of an approval as one value, a `Step`.

Host side, used by the other files of this package. One `Step` is one transaction. Everything that
the step changes is written together or not at all: the state, an approver's decision, the
remembered rule, the call's answer, the call's idempotency key, the audit row and the subscribers'
rows. Invariants: only this file defines the conditions of each change, its entries for the audit
chain and its event; `version` grows with each visible change, so that of two simultaneous decisions
one is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.engine import RowMapping

from fumehood.approvals import refusals
from fumehood.approvals.model import (
    OPEN_STATES,
    PROGRAM,
    SESSION,
    TRIAL,
    Approval,
    ApprovalPage,
    ApprovalQuery,
    ApprovalState,
    DecisionRecord,
    RememberedRule,
    Resolution,
    StoredApproval,
    StoredRequest,
    own_view,
    yes_votes,
)
from fumehood.approvals.remembered import add_rule
from fumehood.approvals.transitions import ENDINGS, TRANSITIONS, Transition
from fumehood.core.call import Need
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MAX_BODY_BYTES
from fumehood.core.names import EXTERNAL, NET_TOOL
from fumehood.observe.subscriber import Subscribers, no_subscribers
from fumehood.protocol import strict_json
from fumehood.storage import idempotency
from fumehood.storage.backend import RawBytes
from fumehood.storage.changes import stamp
from fumehood.storage.database import DELETED_AT_ONCE, Database
from fumehood.storage.idempotency import pack_answer
from fumehood.storage.schema import APPROVALS, DECISIONS

WAITING = frozenset({ApprovalState.PENDING, ApprovalState.APPROVED})
STAYING = OPEN_STATES | {ApprovalState.INTERRUPTED}


@dataclass(frozen=True, slots=True)
class Step:
    """One change of one approval. `by` is the id of the principal that makes the change, or
    `engine`.

    `columns` contains the new values of database columns. Other columns stay unchanged.
    """

    transition: Transition
    by: str
    at: datetime
    version: int | None = None
    """If given, the approval must still have this version. Otherwise, the change is refused."""
    digest: str | None = None
    """If given, the approval's action must still have this digest. Otherwise, the change is
    refused."""
    in_time: bool = False
    """Whether the change is refused if the approval has expired."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    becomes: StoredApproval | None = None
    """The approval with edited arguments or a new preview. None if the arguments and the preview
    stay the same."""
    changed: tuple[str, ...] = ()
    """Names of the fields of the action that differ from the approved action, or what the call
    needed and has ended (`Approval.changed`)."""
    decision: DecisionRecord | None = None
    remember: RememberedRule | None = None
    answer: Envelope | None = None
    event: str | None = None
    """The event for subscribers, such as `approval.created`, or None for no event."""
    details: JsonObject = field(default_factory=dict)
    """Further fields for the audit chain."""
    counts: Callable[[str], bool] = lambda approver: True
    """Returns whether an earlier approval by the principal with this id counts. The approval of the
    principal who decides now always counts."""
    is_seen: bool = True
    """Whether the change is visible to users. If so, the change increments the approval's
    version."""


# Decisions of people.


def approved(
    decision: DecisionRecord,
    *,
    version: int | None,
    start_by: datetime,
    edited: StoredApproval | None,
    remember: RememberedRule | None,
    counts: Callable[[str], bool],
) -> Step:
    """Return the step for a decision to approve a call.

    `start_by` is the time before which the approved call must start. `edited` is the approval with
    edited arguments, or None. `remember` is the remembered rule to create, or None. If `version` is
    given and the approval has another version, the step is refused. `counts` returns whether
    earlier approvals by the principal with this id still count.
    """
    details = _details(decision)
    if remember is not None:
        details["remembered"] = remember.id
    return Step(
        TRANSITIONS["approve"], decision.approver, decision.at,
        version=version, in_time=True,
        columns={"decided_at": stamp(decision.at), "expires_at": stamp(start_by)},
        becomes=edited, decision=decision, remember=remember, event="approval.decided",
        details=details, counts=counts,
    )  # fmt: skip


def denied(decision: DecisionRecord, *, version: int | None, answer: Envelope) -> Step:
    """Return the step for a decision to deny a call. `answer` is the call's answer. The step is
    refused if the approval no longer has `version`; None accepts any version.
    """
    at = stamp(decision.at)
    return Step(
        TRANSITIONS["deny"], decision.approver, decision.at,
        version=version, in_time=True,
        columns={"decided_at": at, "ended_at": at, "code": "APPROVAL_DENIED"},
        decision=decision, answer=answer, event="approval.decided", details=_details(decision),
    )  # fmt: skip


def cancelled(by: str, now: datetime, answer: Envelope) -> Step:
    """Return the step for a call that its caller cancels before it starts. `by` is the caller's id,
    and `answer` is the call's answer.
    """
    return Step(
        TRANSITIONS["cancel"], by, now,
        columns={"ended_at": stamp(now), "code": "CANCELLED"},
        answer=answer, event="approval.ended",
    )  # fmt: skip


def resolved(resolution: Resolution, by: str, now: datetime, answer: Envelope) -> Step:
    """Return the step for an interrupted call whose outcome a human has determined. `by` is the
    human's principal id, and `answer` is the call's answer.
    """
    return Step(
        TRANSITIONS[f"resolve as {resolution.outcome}"], by, now,
        answer=answer, event="approval.ended",
        details={"outcome": resolution.outcome, "note": resolution.note},
    )  # fmt: skip


# Approved calls.


def started(approval: Approval, now: datetime) -> Step:
    """Return the step for the start of an approved call. The step is refused if the call's action
    is no longer that of `approval`.
    """
    return Step(
        TRANSITIONS["start"], "engine", now, digest=approval.action_digest, in_time=True,
        columns={"started_at": stamp(now)},
    )  # fmt: skip


def ended(to: ApprovalState, envelope: Envelope, changed: Sequence[str], now: datetime) -> Step:
    """Return the step for a call that has ended. `to` is the new state.

    `changed` names the fields of the action that differed from the approved action.
    """
    code = envelope.error.code if envelope.error is not None else "OK"
    return Step(
        ENDINGS[to], "engine", now,
        columns={"ended_at": stamp(now), "code": code},
        changed=tuple(changed), answer=envelope, event="approval.ended", details={"code": code},
    )  # fmt: skip


# Time and crashes.


def expiring(now: datetime) -> Step:
    """Return the step that records a warning that an approval expires soon. This step creates no
    new version of the approval.
    """
    return Step(
        TRANSITIONS["warn"], "engine", now,
        columns={"warned_at": stamp(now)}, event="approval.expiring", is_seen=False,
    )  # fmt: skip


def previewed(before: Approval, becomes: StoredApproval, now: datetime) -> Step:
    """Return the step that stores a new preview of a waiting call, whose effect has changed.

    `before` is the approval with the earlier preview, and `becomes` is the approval with the new
    one. The call then has another action. Decisions on the earlier action do not count for it.
    """
    return Step(TRANSITIONS["update"], "engine", now, digest=before.action_digest, becomes=becomes)


def expired(now: datetime, answer: Envelope) -> Step:
    """Return the step for a call that was not decided in time, or approved but not started in
    time.
    """
    return Step(
        TRANSITIONS["expire"], "engine", now,
        columns={"ended_at": stamp(now), "code": "APPROVAL_EXPIRED"},
        answer=answer, event="approval.ended",
    )  # fmt: skip


def outlived(what: str, now: datetime, answer: Envelope) -> Step:
    """Return the step for a call whose session, program or trial ended before the call started.

    `what` says which of them ended: `session`, `program` or `trial`.
    """
    row = TRANSITIONS[f"end with its {'session' if what == SESSION else 'engine'}"]
    return replace(
        expired(now, answer), transition=row, changed=(what,), details={"changed": [what]}
    )


def interrupted(now: datetime, answer: Envelope) -> Step:
    """Return the step for a call that was running when its engine ended."""
    return Step(
        TRANSITIONS["interrupt"], "engine", now,
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


# Rows.


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting call, with the columns that the scheduler needs.

    The values are not parsed, so that a damaged row does not stop the scheduler.
    """

    id: str
    state: str
    expires_at: str
    warned_at: str | None
    session_id: str | None
    tool: str

    @property
    def own_session(self) -> str | None:
        """The id of the engine's session that the call needs, or None if the call needs no session
        of the engine.

        A call of an `external:` tool, which the client runs itself, never needs a session of the
        engine. The client chooses the session id of such a call.
        """
        return None if self.tool.startswith(EXTERNAL) else self.session_id


class ApprovalTable:
    """The approvals in one database. Approvals are kept for `kept_days` days after their end.

    Each change of an approval is reported to `subscribers` within the transaction that makes the
    change.
    """

    def __init__(
        self,
        database: Database,
        *,
        subscribers: Subscribers | None = None,
        kept_days: int = 90,
    ) -> None:
        self._database = database
        self._chain = database.audit
        self._subscribers = subscribers or no_subscribers()
        self._kept = timedelta(days=kept_days)

    async def create(self, stored: StoredApproval, since: datetime) -> str:
        """Store a new approval, and return its id. The call's idempotency key now belongs to the
        approval, and no longer to the running call.

        If the call repeats a stored call, store nothing, and return the approval id of the stored
        call. `since` has the same meaning as in `of_repeat`.

        Raises:
            WriteFailed: nothing was stored.
        """

        def job(connection: Connection) -> str:
            if stored.repeat_key is not None:
                same = _of_repeat(connection, stored.repeat_key, since)
                if same is not None:
                    return same[0]
                _forget_repeats(connection, APPROVALS.c.repeat_key == stored.repeat_key)
            self._create(connection, stored)
            return stored.approval.id

        return await self._database.write(job)

    async def of_repeat(self, repeat_key: str, since: datetime) -> tuple[str, str] | None:
        """Return the approval id and the call id of the stored call that has this repeat key, or
        None if there is no such call.

        A stored call counts only if it has not ended, or if it ended after `since` and nobody has
        fetched its answer.
        """
        return await self._database.read(lambda c: _of_repeat(c, repeat_key, since))

    async def fetched(self, call_id: str, *, is_decision: bool = False) -> bool:
        """Record that the caller of a call has received the answer. From now on, an identical call
        counts as a new call.

        `is_decision` matters only for an approved `external:` call, whose answer is an approval
        that can be used once. If it is True, the approval is used up. If it is False, the caller
        only looks at the approval, and nothing is recorded.

        Return False if nothing was recorded. This is also the case if the call has no answer, if
        the answer was already fetched, or if the call is interrupted.

        Raises:
            WriteFailed: the answer was not marked as fetched.
        """
        over = APPROVALS.c.answer.is_not(None) & APPROVALS.c.repeat_key.is_not(None)
        over &= APPROVALS.c.state != ApprovalState.INTERRUPTED.value
        if not is_decision:
            is_yes = APPROVALS.c.state == ApprovalState.DONE.value
            over &= ~(is_yes & APPROVALS.c.tool.startswith(EXTERNAL))
        of_call = over & (APPROVALS.c.call_id == call_id)
        return await self._database.write(lambda c: _forget_repeats(c, of_call) > 0)

    async def get(self, approval_id: str) -> StoredApproval:
        """Return an approval. Raises ResourceNotFound if there is no such approval, or ReadFailed
        if the database cannot be read.
        """
        return await self._database.read(lambda connection: _get(connection, approval_id))

    async def settled(self, approval_id: str) -> StoredApproval:
        """Return an approval after all earlier writes have ended. The result includes every change
        that the database has stored, even if the write of the change seemed to fail.

        Raises:
            ResourceNotFound: there is no such approval.
            WriteFailed: the database cannot be used now.
        """
        return await self._database.write(lambda connection: _get(connection, approval_id))

    async def of_call(self, call_id: str) -> StoredApproval | None:
        """Return the newest approval of a call, or None."""
        return await self._newest(APPROVALS.c.call_id == call_id)

    async def page(self, query: ApprovalQuery, principal_id: str | None) -> ApprovalPage:
        """Return a page of approvals, newest first. If `principal_id` is given, list only the
        approvals of this principal's calls. Raises ResourceNotFound if the cursor is unknown.
        """
        return await self._database.read(lambda connection: _page(connection, query, principal_id))

    async def change(self, steps: Sequence[tuple[str, Step]]) -> list[StoredApproval]:
        """Apply steps to approvals in one transaction, and return the changed approvals. `steps`
        contains pairs of an approval id and a step.

        Raises:
            ResourceNotFound, IdempotencyConflict, ApprovalExpired: a step cannot be applied;
                nothing was changed.
            WriteFailed: nothing was changed.
        """

        def job(connection: Connection) -> list[StoredApproval]:
            return [self._advance(connection, one, step) for one, step in steps]

        return await self._database.write(job)

    async def denied_before(self, approval: Approval, since: datetime) -> Approval | None:
        """Return the newest denied approval with the same action, caller and session as `approval`,
        or None. Denials before `since` are ignored.
        """
        found = await self._newest(
            APPROVALS.c.action_digest == approval.action_digest,
            APPROVALS.c.state == ApprovalState.DENIED.value,
            APPROVALS.c.principal_id == approval.principal_id,
            APPROVALS.c.session_id.is_not_distinct_from(approval.session_id),
            APPROVALS.c.decided_at > stamp(since),
        )
        return None if found is None else found.approval

    async def note(self, kind: str, at: datetime, values: JsonObject) -> None:
        """Append a row with this kind, time and further fields to the audit chain. No approval is
        changed.
        """
        await self._database.write(lambda c: self._chain.append(c, kind, stamp(at), values))

    async def prune(self, now: datetime) -> int:
        """Delete approvals that ended more than `kept_days` ago. Return the number of deleted
        approvals.

        Raises:
            WriteFailed: the database failed; some of these approvals remain.
        """
        before = stamp(now - self._kept)

        def job(connection: Connection) -> int:
            for one in self._subscribers:
                one.forget(connection, before)
            return _forget(connection, before)

        return await self._database.repeat(job)

    async def in_state(self, state: ApprovalState) -> list[str]:
        """Return the ids of all approvals in this state, oldest first."""
        ids = select(APPROVALS.c.id).where(APPROVALS.c.state == state.value)
        ordered = ids.order_by(APPROVALS.c.seq)
        return await self._database.read(lambda c: list(c.execute(ordered).scalars()))

    async def maybe_lost(self) -> list[str]:
        """Return the ids of the waiting approvals whose calls may have been lost with an earlier
        engine. These are the approvals of programs' network requests, and of all calls in sessions.
        """
        # A call in a session is lost only if its approval decides on a trial, but no column shows
        # this.
        needs = (APPROVALS.c.tool == NET_TOOL) | APPROVALS.c.session_id.is_not(None)
        waits = APPROVALS.c.state.in_([state.value for state in WAITING])
        ids = select(APPROVALS.c.id).where(waits, needs).order_by(APPROVALS.c.seq)
        return await self._database.read(lambda c: list(c.execute(ids).scalars()))

    async def waiting(self, by: datetime) -> tuple[list[Waiting], bool]:
        """Return the waiting calls that may need attention, oldest first, and whether any call is
        waiting.

        A call may need attention if it expires by the time `by`, if it needs a session of the
        engine, or if it is approved.
        """
        waits = APPROVALS.c.state.in_([state.value for state in WAITING])
        rows = (
            select(*(APPROVALS.c[one.name] for one in fields(Waiting)))
            .where(
                waits,
                (APPROVALS.c.expires_at <= stamp(by))
                | (APPROVALS.c.state == ApprovalState.APPROVED.value)
                | (APPROVALS.c.session_id.is_not(None) & ~APPROVALS.c.tool.startswith(EXTERNAL)),
            )
            .order_by(APPROVALS.c.seq)
        )

        def find(connection: Connection) -> tuple[list[Waiting], bool]:
            found = [Waiting(*row) for row in connection.execute(rows)]
            any_waits = select(APPROVALS.c.id).where(waits).limit(1)
            return found, bool(found) or connection.execute(any_waits).first() is not None

        return await self._database.read(find)

    async def count(self, state: ApprovalState) -> int:
        """Return the number of approvals in this state."""
        counted = select(func.count()).where(APPROVALS.c.state == state.value)
        return await self._database.read(lambda c: c.execute(counted).scalar_one())

    async def pending(self) -> list[tuple[str, str, int]]:
        """Return the approval id, the principal id and the approximate size in bytes of each
        pending approval.
        """
        size = func.length(RawBytes(APPROVALS.c.document))
        rows = select(APPROVALS.c.id, APPROVALS.c.principal_id, size)
        pending = rows.where(APPROVALS.c.state == ApprovalState.PENDING.value)
        return await self._database.read(lambda c: [tuple(row) for row in c.execute(pending)])

    async def _newest(self, *which: ColumnElement[bool]) -> StoredApproval | None:
        ids = select(APPROVALS.c.id).where(*which).order_by(APPROVALS.c.seq.desc()).limit(1)

        def find(connection: Connection) -> StoredApproval | None:
            found = connection.execute(ids).scalar_one_or_none()
            return None if found is None else _get(connection, found)

        return await self._database.read(find)

    def _create(self, connection: Connection, stored: StoredApproval) -> None:
        approval = stored.approval
        connection.execute(insert(APPROVALS), _row(stored))
        if stored.idempotency_key is not None:
            key = stored.idempotency_key
            idempotency.hand_over(connection, approval.principal_id, key, approval.id)
        at = stamp(approval.created_at)
        self._chain.append(connection, "approval.created", at, _audited(approval, by="engine"))
        self._owe(connection, approval.id, "approval.created", approval.created_at)

    def _advance(self, connection: Connection, approval_id: str, step: Step) -> StoredApproval:
        before = _get(connection, approval_id)
        approval = before.approval
        _require(approval, step)
        to = _after_decision(connection, approval, step)
        at = stamp(step.at)
        moved = to is not None and to is not approval.state
        values: dict[str, Any] = {"version": approval.version + step.is_seen, **step.columns}
        if to is None and step.transition.to is not None:
            values.pop("decided_at", None)  # the quorum is not complete
            values.pop("expires_at", None)
        elif to is not None:
            values["state"] = to.value
            if _undecided(to, approval.tool):  # a repeat requests a new approval
                values["repeat_key"] = None
        if step.answer is not None:
            answer = values["answer"] = pack_answer(step.answer)
            if before.idempotency_key is not None:
                key, who = before.idempotency_key, approval.principal_id
                if approval.state is ApprovalState.INTERRUPTED:  # another answer was stored before
                    idempotency.correct(connection, who, key, approval.id, answer, step.at)
                else:
                    idempotency.complete(connection, who, key, answer, step.at)
        becomes = step.becomes or before
        changed = {"changed": list(step.changed)} if step.changed else {}
        values["action_digest"] = becomes.approval.action_digest
        values["document"] = {**_document(becomes), **changed}
        connection.execute(update(APPROVALS).where(APPROVALS.c.id == approval_id).values(**values))
        if step.remember is not None and moved:
            add_rule(connection, step.remember)
        after = _get(connection, approval_id)
        audited = {**_audited(after.approval, by=step.by), **step.details}
        self._chain.append(connection, step.transition.audited, at, audited)
        if step.event is not None:
            self._owe(connection, approval_id, step.event, step.at)
        return after

    def _owe(self, connection: Connection, approval_id: str, event: str, at: datetime) -> None:
        for one in self._subscribers:
            one.on_approval(connection, approval_id, event, at)


def _forget(connection: Connection, before: str) -> int:
    """Delete a batch of the approvals that ended before the time `before`. Return the number of
    deleted approvals.

    Interrupted calls stay until a human resolves them.
    """
    over = [state.value for state in ApprovalState if state not in STAYING]
    old = (
        select(APPROVALS.c.id)
        .where(APPROVALS.c.state.in_(over), APPROVALS.c.ended_at <= before)
        .limit(DELETED_AT_ONCE)
    )
    ids = list(connection.execute(old).scalars())
    connection.execute(delete(DECISIONS).where(DECISIONS.c.approval_id.in_(ids)))
    connection.execute(delete(APPROVALS).where(APPROVALS.c.id.in_(ids)))
    return len(ids)


def _of_repeat(connection: Connection, repeat_key: str, since: datetime) -> tuple[str, str] | None:
    lasts = APPROVALS.c.ended_at.is_(None) | (APPROVALS.c.ended_at > stamp(since))
    ids = select(APPROVALS.c.id, APPROVALS.c.call_id)
    row = connection.execute(ids.where(APPROVALS.c.repeat_key == repeat_key, lasts)).one_or_none()
    return None if row is None else (row[0], row[1])


def _undecided(to: ApprovalState, tool: str) -> bool:
    """Return whether the state `to` ends a call of `tool` without a decision that its caller can
    use. A repeat of such a call requests a new approval.
    """
    if to is ApprovalState.INTERRUPTED:
        # The answer to an `external:` call is the decision, which its caller cannot have received.
        return tool.startswith(EXTERNAL)
    return to in (ApprovalState.EXPIRED, ApprovalState.CANCELLED)


def _forget_repeats(connection: Connection, which: ColumnElement[bool]) -> int:
    """Clear the repeat keys of the approvals that match this condition, so that identical calls
    count as new calls. Return the number of changed rows.
    """
    return connection.execute(update(APPROVALS).where(which).values(repeat_key=None)).rowcount


def _require(approval: Approval, step: Step) -> None:
    if step.version is not None and step.version != approval.version:
        raise refusals.conflict(approval)
    if approval.state not in step.transition.leaves:
        too_late = step.in_time and approval.state is ApprovalState.EXPIRED
        raise refusals.too_late(approval) if too_late else refusals.conflict(approval)
    if step.digest is not None and step.digest != approval.action_digest:
        raise refusals.conflict(approval)
    if step.in_time and approval.expires_at <= step.at:
        raise refusals.too_late(approval)


def _after_decision(connection: Connection, approval: Approval, step: Step) -> ApprovalState | None:
    """Store the decision of a step, if it has one. Return the approval's next state, or None if the
    state stays the same.

    Raises:
        IdempotencyConflict: the approver has already made this decision, and repeating it would
            change nothing.
    """
    decision = step.decision
    if decision is None:
        return step.transition.to
    is_repeated = _is_repeated(approval, decision)
    if not is_repeated:
        connection.execute(insert(DECISIONS), _decision_row(approval.id, decision))
    voted = step.becomes.approval if step.becomes is not None else approval
    votes = _votes((*approval.decisions, decision), voted.action_digest, step)
    to = step.transition.to
    if to is not ApprovalState.APPROVED or votes >= voted.quorum:
        return to
    if is_repeated:  # one approver has one vote
        raise refusals.conflict(approval)
    return None


def _is_repeated(approval: Approval, decision: DecisionRecord) -> bool:
    """Return whether a decision is identical to the previous decision of the same approver.

    Such a decision can still have an effect: it can complete the quorum if the previous decision
    did not count.
    """
    made = [one for one in approval.decisions if one.approver == decision.approver]
    return bool(made) and (made[-1].action_digest, made[-1].decision) == (
        decision.action_digest,
        decision.decision,
    )


def _votes(decisions: Sequence[DecisionRecord], digest: str, step: Step) -> int:
    """Return the number of approvers whose newest decision approves the action with this digest.

    The approver who makes `step` always counts. Any other approver counts only if `step.counts`
    returns True for the approver's id.
    """
    return sum(one == step.by or step.counts(one) for one in yes_votes(decisions, digest))


def _get(connection: Connection, approval_id: str) -> StoredApproval:
    row = (
        connection.execute(select(APPROVALS).where(APPROVALS.c.id == approval_id))
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise refusals.unknown()
    decisions = connection.execute(
        select(DECISIONS).where(DECISIONS.c.approval_id == approval_id).order_by(DECISIONS.c.seq)
    ).mappings()
    return _stored(row, [_decision(one) for one in decisions])


def _page(connection: Connection, query: ApprovalQuery, principal_id: str | None) -> ApprovalPage:
    filters = {
        "principal_id": principal_id,
        "state": query.state.value if query.state is not None else None,
        "tool": query.tool,
        "agent_id": query.agent,
        "call_id": query.call_id,
    }
    wanted = [APPROVALS.c[name] == value for name, value in filters.items() if value is not None]
    if query.cursor is not None:
        own = [APPROVALS.c.id == query.cursor]
        if principal_id is not None:
            own.append(APPROVALS.c.principal_id == principal_id)
        seq = connection.execute(select(APPROVALS.c.seq).where(*own)).scalar_one_or_none()
        if seq is None:
            raise refusals.unknown()
        wanted.append(APPROVALS.c.seq < seq)
    seqs, has_more = _that_fit(connection, wanted, query.limit)
    listed = select(APPROVALS).where(APPROVALS.c.seq.in_(seqs)).order_by(APPROVALS.c.seq.desc())
    shown = connection.execute(listed).mappings().all()
    decisions: dict[str, list[DecisionRecord]] = {}
    decided = select(DECISIONS).where(DECISIONS.c.approval_id.in_([row["id"] for row in shown]))
    for one in connection.execute(decided.order_by(DECISIONS.c.seq)).mappings():
        decisions.setdefault(one["approval_id"], []).append(_decision(one))
    found = [_stored(row, decisions.get(row["id"], [])) for row in shown]
    items = tuple(
        own_view(one)
        if principal_id is not None
        else one.approval.model_copy(update={"binding": None})
        for one in found
    )
    return ApprovalPage(
        items=items,
        has_more=has_more,
        next_cursor=items[-1].id if has_more else None,
        total_count=None if has_more or query.cursor is not None else len(items),
    )


def _that_fit(
    connection: Connection, wanted: Sequence[ColumnElement[bool]], limit: int
) -> tuple[list[int], bool]:
    """Return the `seq` of the newest rows that fit on one page, and whether there are more rows.

    `wanted` are the SQL conditions for the rows. At least one row is returned if there is any, even
    if it is larger than a page.
    """
    size = func.length(RawBytes(APPROVALS.c.document))
    newest = select(APPROVALS.c.seq, size).where(*wanted).order_by(APPROVALS.c.seq.desc())
    rows = connection.execute(newest.limit(limit + 1)).all()
    sizes = itertools.accumulate(row[1] for row in rows[:limit])
    fit = [row[0] for row, so_far in zip(rows, sizes, strict=False) if so_far <= MAX_BODY_BYTES]
    fit = fit or [row[0] for row in rows[:1]]
    return fit, len(rows) > len(fit)


_IN_DOCUMENT = (
    "trace_id", "tool_version", "arguments", "asked_arguments", "sends", "preview", "previewed_at",
    "rule", "asked_by", "reason", "budget", "dangerous", "approvers", "quorum", "policy_version",
    "binding", "changed",
)  # fmt: skip
_TIMES = ("created_at", "expires_at", "decided_at", "started_at", "ended_at")
_COLUMNS = (
    "id", "version", "call_id", "principal_id", "agent_id", "session_id", "tool", "action_digest",
    "code",
)  # fmt: skip


def size_of(stored: StoredApproval) -> int:
    """Return the approximate size of an approval on disk in bytes."""
    return len(strict_json.dumps(_document(stored)))


def _row(stored: StoredApproval) -> dict[str, Any]:
    approval = stored.approval
    return {
        **{name: getattr(approval, name) for name in _COLUMNS},
        **{
            name: stamp(moment) if (moment := getattr(approval, name)) is not None else None
            for name in _TIMES
        },
        "state": approval.state.value,
        "idempotency_key": stored.idempotency_key,
        "repeat_key": stored.repeat_key,
        "warned_at": None,
        "document": _document(stored),
        "answer": stored.answer,
    }


def _document(stored: StoredApproval) -> dict[str, Any]:
    shown = stored.approval.model_dump(mode="json", include=set(_IN_DOCUMENT))
    return {**shown, "request": stored.request.document}


def _stored(row: RowMapping, decisions: list[DecisionRecord]) -> StoredApproval:
    document = row["document"]
    request = dict(document["request"])
    values: dict[str, Any] = {name: row[name] for name in (*_COLUMNS, *_TIMES)}
    values.update({name: document[name] for name in _IN_DOCUMENT if name in document})
    approval = Approval(
        **values,
        state=ApprovalState(row["state"]),
        decisions=tuple(decisions),
        has_answer=row["answer"] is not None,
    )
    needs = request["needs"] if "needs" in request else _needed_before(row["tool"], request)
    before = ("over_budget",) if request.pop("may_exceed_budget", False) else ()
    may_exceed = tuple(request.get("may_exceed", before))  # before: of an earlier version
    hidden = tuple(request["hidden"])
    kept = StoredRequest(**{**request, "hidden": hidden, "needs": needs, "may_exceed": may_exceed})
    keys = {name: row[name] for name in ("idempotency_key", "answer", "repeat_key")}
    return StoredApproval(approval, kept, **keys)


def _needed_before(tool: str, request: JsonObject) -> Need | None:
    """Return what the held action of a call needs (a program or a trial), or None if the call has
    no held action. A held action runs after approval instead of the tool.

    Used for calls that an earlier version of the engine stored without the field `needs`.
    """
    if tool == NET_TOOL:
        return PROGRAM
    return TRIAL if request.get("parent_id") and request["options"].get("preview") else None


def _decision_row(approval_id: str, decision: DecisionRecord) -> dict[str, Any]:
    return {
        **decision.model_dump(exclude={"at"}),
        "approval_id": approval_id,
        "at": stamp(decision.at),
    }


def _decision(row: RowMapping) -> DecisionRecord:
    return DecisionRecord(**{name: row[name] for name in DecisionRecord.model_fields})


def _audited(approval: Approval, *, by: str) -> JsonObject:
    """Return the fields of an approval for the audit chain. They contain the digest of the action
    instead of the arguments.
    """
    return {
        "by": by,
        "approval_id": approval.id,
        "version": approval.version,
        "state": approval.state.value,
        "call_id": approval.call_id,
        "tool": f"{approval.tool}@{approval.tool_version}",
        "principal_id": approval.principal_id,
        "agent_id": approval.agent_id,
        "session_id": approval.session_id,
        "action_digest": approval.action_digest,
        "rule": approval.rule,
        "policy_version": approval.policy_version,
    }
