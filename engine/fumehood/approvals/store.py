"""Rows of approvals: waiting calls, decisions, and how the calls ended.

Host side, used by the other files of this package. One `Step` is one transaction: the state, an
approver's decision, the remembered rule, the call's answer, its idempotency key, the audit row and
the messages of the channels are written together or not at all. Invariants: a step applies only to
the states that `Step.leaves` names; `version` grows with each change that people can see, so that
of two simultaneous decisions one is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    cast,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.engine import RowMapping

from fumehood.approvals.channels.base import ApprovalChannel
from fumehood.approvals.model import (
    OPEN_STATES,
    Approval,
    ApprovalPage,
    ApprovalQuery,
    ApprovalState,
    DecisionRecord,
    StoredApproval,
    StoredRequest,
    without_arguments,
    yes_votes,
)
from fumehood.approvals.remembered import add_rule
from fumehood.approvals.states import Step
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL
from fumehood.protocol import strict_json
from fumehood.storage import idempotency
from fumehood.storage.changes import stamp
from fumehood.storage.database import DELETED_AT_ONCE, Database
from fumehood.storage.idempotency import pack_answer
from fumehood.storage.schema import APPROVALS, DECISIONS

MAX_PAGE_BYTES = 8 * 1024 * 1024
"""Of rows on one page: one call may have arguments of this size."""

STAYING = OPEN_STATES | {ApprovalState.INTERRUPTED}


class UnknownApproval(Exception):
    """There is no such approval, or it is not visible to this principal."""


class Stale(Exception):
    """The approval has changed meanwhile. `approval` is its present state."""

    def __init__(self, approval: Approval) -> None:
        super().__init__(approval.state)
        self.approval = approval


class TooLate(Stale):
    """The approval has expired."""


@dataclass(frozen=True, slots=True)
class PendingOf:
    """The pending approvals of one principal."""

    count: int = 0
    size_bytes: int = 0
    """Approximate size on disk."""


class ApprovalTable:
    """The rows of one database. Each of `channels` is owed a message about each event."""

    def __init__(
        self,
        database: Database,
        *,
        channels: Sequence[ApprovalChannel] = (),
        kept_days: int = 90,
    ) -> None:
        self._database = database
        self._chain = database.audit
        self._channels = channels
        self._kept = timedelta(days=kept_days)

    async def create(self, stored: StoredApproval, since: datetime) -> str:
        """Store a new one, which takes over the idempotency key of its call; return its id.

        If another one is for the same call (see `of_repeat`), nothing is stored; return its id.

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
        """The ids of the approval and of the call that a call with this key repeats.

        That call has not ended, or after `since`, and its answer was not fetched.
        """
        return await self._database.read(lambda c: _of_repeat(c, repeat_key, since))

    async def fetched(self, call_id: str, *, is_decision: bool = False) -> bool:
        """Note that the caller has the answer: the next such call is a new one.

        False: somebody has fetched it before. Until a human has resolved it, an interrupted call
        has no final answer. Who looks at a yes for an `external:` tool has not used it: only
        `is_decision` does.

        Raises:
            WriteFailed: the answer is not noted as fetched.
        """
        over = APPROVALS.c.answer.is_not(None) & APPROVALS.c.repeat_key.is_not(None)
        over &= APPROVALS.c.state != ApprovalState.INTERRUPTED.value
        if not is_decision:
            is_yes = APPROVALS.c.state == ApprovalState.DONE.value
            over &= ~(is_yes & APPROVALS.c.tool.startswith(EXTERNAL))
        of_call = over & (APPROVALS.c.call_id == call_id)
        return await self._database.write(lambda c: _forget_repeats(c, of_call) > 0)

    async def get(self, approval_id: str) -> StoredApproval:
        """Raises UnknownApproval, ReadFailed."""
        return await self._database.read(lambda connection: _get(connection, approval_id))

    async def of_call(self, call_id: str) -> StoredApproval | None:
        """The newest approval of a call."""
        newest = (
            select(APPROVALS.c.id).where(APPROVALS.c.call_id == call_id)
            .order_by(APPROVALS.c.seq.desc()).limit(1)
        )  # fmt: skip

        def find(connection: Connection) -> StoredApproval | None:
            found = connection.execute(newest).scalar_one_or_none()
            return None if found is None else _get(connection, found)

        return await self._database.read(find)

    async def page(self, query: ApprovalQuery, principal_id: str | None) -> ApprovalPage:
        """The newest first. Raises UnknownApproval if the cursor is unknown."""
        return await self._database.read(lambda connection: _page(connection, query, principal_id))

    async def change(self, steps: Sequence[tuple[str, Step]]) -> list[StoredApproval]:
        """Apply several steps in one transaction: all of them, or none.

        Raises:
            UnknownApproval, Stale, TooLate: of the first that cannot be applied.
            WriteFailed: nothing was changed.
        """

        def job(connection: Connection) -> list[StoredApproval]:
            return [self._advance(connection, one, step) for one, step in steps]

        return await self._database.write(job)

    async def supersede(self, approval_id: str, step: Step, new: StoredApproval) -> None:
        """End one approval and create its successor, in one transaction."""

        def job(connection: Connection) -> None:
            self._advance(connection, approval_id, step)
            self._create(connection, new, passes_key_on=True)

        await self._database.write(job)

    async def denied_before(
        self, digest: str, principal_id: str, session_id: str | None, since: datetime
    ) -> Approval | None:
        """The newest denial of the same action, for the same caller and session."""
        same = (
            select(APPROVALS.c.id)
            .where(
                APPROVALS.c.action_digest == digest,
                APPROVALS.c.state == ApprovalState.DENIED.value,
                APPROVALS.c.principal_id == principal_id,
                APPROVALS.c.session_id.is_not_distinct_from(session_id),
                APPROVALS.c.decided_at > stamp(since),
            )
            .order_by(APPROVALS.c.seq.desc())
            .limit(1)
        )

        def find(connection: Connection) -> Approval | None:
            found = connection.execute(same).scalar_one_or_none()
            return None if found is None else _get(connection, found).approval

        return await self._database.read(find)

    async def note(self, kind: str, at: datetime, fields: JsonObject) -> None:
        """Add a row to the audit chain that changes no approval."""
        await self._database.write(lambda c: self._chain.append(c, kind, stamp(at), fields))

    async def prune(self, now: datetime) -> int:
        """Delete approvals that ended long enough ago; returns their number.

        Raises:
            WriteFailed: the rest stays until the next time.
        """
        before = stamp(now - self._kept)
        return await self._database.repeat(lambda connection: _forget(connection, before))

    async def in_state(self, state: ApprovalState) -> list[str]:
        """The ids of all approvals in one state, oldest first."""
        ids = select(APPROVALS.c.id).where(APPROVALS.c.state == state.value)
        ordered = ids.order_by(APPROVALS.c.seq)
        return await self._database.read(lambda c: list(c.execute(ordered).scalars()))

    async def pending_in_sessions(self) -> list[tuple[str, str]]:
        """The pending approvals of calls in sessions, oldest first: their ids and sessions.

        An `external:` tool is in a session of its caller's.
        """
        waiting = (
            select(APPROVALS.c.id, APPROVALS.c.session_id)
            .where(
                APPROVALS.c.state == ApprovalState.PENDING.value,
                APPROVALS.c.session_id.is_not(None),
                ~APPROVALS.c.tool.startswith(EXTERNAL),
            )
            .order_by(APPROVALS.c.seq)
        )
        return await self._database.read(lambda c: [(r[0], r[1]) for r in c.execute(waiting)])

    async def count(self, state: ApprovalState) -> int:
        """The number of approvals in a state."""
        counted = select(func.count()).where(APPROVALS.c.state == state.value)
        return await self._database.read(lambda c: c.execute(counted).scalar_one())

    async def due(self, now: datetime, warn_before: datetime) -> tuple[list[str], list[str]]:
        """The ids that have expired, and those that need a warning; at most 500 each."""
        waiting = APPROVALS.c.state.in_([ApprovalState.PENDING.value, ApprovalState.APPROVED.value])
        over = select(APPROVALS.c.id).where(waiting, APPROVALS.c.expires_at <= stamp(now))
        near = select(APPROVALS.c.id).where(
            APPROVALS.c.state == ApprovalState.PENDING.value,
            APPROVALS.c.warned_at.is_(None),
            APPROVALS.c.expires_at > stamp(now),
            APPROVALS.c.expires_at <= stamp(warn_before),
        )

        def find(connection: Connection) -> tuple[list[str], list[str]]:
            return (
                list(connection.execute(over.limit(500)).scalars()),
                list(connection.execute(near.limit(500)).scalars()),
            )

        return await self._database.read(find)

    async def next_ends(self) -> tuple[datetime | None, datetime | None]:
        """When the next approval expires, and the next without a warning."""
        waiting = APPROVALS.c.state.in_([ApprovalState.PENDING.value, ApprovalState.APPROVED.value])
        first = select(func.min(APPROVALS.c.expires_at)).where(waiting)
        unwarned = select(func.min(APPROVALS.c.expires_at)).where(
            APPROVALS.c.state == ApprovalState.PENDING.value, APPROVALS.c.warned_at.is_(None)
        )

        def find(connection: Connection) -> tuple[datetime | None, datetime | None]:
            ends = [connection.execute(one).scalar_one_or_none() for one in (first, unwarned)]
            return _moment(ends[0]), _moment(ends[1])

        return await self._database.read(find)

    async def pending(self) -> dict[str, PendingOf]:
        """The pending approvals, by principal."""
        size = func.sum(func.length(cast(APPROVALS.c.document, LargeBinary)))
        counts = (
            select(APPROVALS.c.principal_id, func.count(), size)
            .where(APPROVALS.c.state == ApprovalState.PENDING.value)
            .group_by(APPROVALS.c.principal_id)
        )
        return await self._database.read(
            lambda c: {row[0]: PendingOf(row[1], row[2]) for row in c.execute(counts).all()}
        )

    def _create(
        self, connection: Connection, stored: StoredApproval, *, passes_key_on: bool = False
    ) -> None:
        approval = stored.approval
        connection.execute(insert(APPROVALS), _row(stored))
        if stored.idempotency_key is not None:
            take = idempotency.pass_on if passes_key_on else idempotency.hand_over
            take(connection, approval.principal_id, stored.idempotency_key, approval.id)
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
        if to is None and step.to is not None:
            values.pop("decided_at", None)  # the quorum is not complete
            values.pop("expires_at", None)
        elif to is not None:
            values["state"] = to.value
            if _undecided(to, approval.tool):  # a repeat asks anew
                values["repeat_key"] = None
        if step.answer is not None:
            answer = values["answer"] = pack_answer(step.answer)
            if before.idempotency_key is not None:
                key, who = before.idempotency_key, approval.principal_id
                if approval.state is ApprovalState.INTERRUPTED:  # another one was told before
                    idempotency.correct(connection, who, key, approval.id, answer, step.at)
                else:
                    idempotency.complete(connection, who, key, answer, step.at)
        document = {**_document(before), **step.document}
        values["action_digest"] = document.pop("action_digest", approval.action_digest)
        values["document"] = document
        connection.execute(update(APPROVALS).where(APPROVALS.c.id == approval_id).values(**values))
        if step.remember is not None and moved:
            add_rule(connection, step.remember)
        after = _get(connection, approval_id)
        fields = {**_audited(after.approval, by=step.by), **step.details}
        self._chain.append(connection, step.kind, at, fields)
        if step.event is not None:
            self._owe(connection, approval_id, step.event, step.at)
        return after

    def _owe(self, connection: Connection, approval_id: str, event: str, at: datetime) -> None:
        for channel in self._channels:
            channel.owe(connection, approval_id, event, at)


def _forget(connection: Connection, before: str) -> int:
    """Delete some that ended before a time. Unresolved ones stay."""
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
    """Whether nobody has decided, or, of a decision, nobody can have heard of the yes."""
    if to is ApprovalState.INTERRUPTED:
        return tool.startswith(EXTERNAL)
    return to in (ApprovalState.EXPIRED, ApprovalState.CANCELLED)


def _forget_repeats(connection: Connection, which: ColumnElement[bool]) -> int:
    """Let no call repeat these any more; returns their number."""
    return connection.execute(update(APPROVALS).where(which).values(repeat_key=None)).rowcount


def _require(approval: Approval, step: Step) -> None:
    if step.version is not None and step.version != approval.version:
        raise Stale(approval)
    if approval.state not in step.leaves:
        too_late = approval.state is ApprovalState.EXPIRED
        raise TooLate(approval) if too_late else Stale(approval)
    if step.digest is not None and step.digest != approval.action_digest:
        raise Stale(approval)
    if step.in_time and approval.expires_at <= step.at:
        raise TooLate(approval)


def _after_decision(connection: Connection, approval: Approval, step: Step) -> ApprovalState | None:
    """Store the step's decision, if it has one. Returns the next state; None: it stays.

    Raises:
        Stale: the approver has made this decision before, and it changes nothing.
    """
    decision = step.decision
    if decision is None:
        return step.to
    is_repeated = _is_repeated(approval, decision)
    if not is_repeated:
        connection.execute(insert(DECISIONS), _decision_row(approval.id, decision))
    voted = step.document.get("action_digest", approval.action_digest)
    quorum = step.document.get("quorum", approval.quorum)
    votes = _votes((*approval.decisions, decision), voted, step)
    if step.to is not ApprovalState.APPROVED or votes >= quorum:
        return step.to
    if is_repeated:  # one approver has one vote
        raise Stale(approval)
    return None


def _is_repeated(approval: Approval, decision: DecisionRecord) -> bool:
    """Whether it equals this approver's previous decision. It can still complete the quorum, if
    the approver's vote counts now and did not count when the last decision was made."""
    made = [one for one in approval.decisions if one.approver == decision.approver]
    return bool(made) and (made[-1].action_digest, made[-1].decision) == (
        decision.action_digest,
        decision.decision,
    )


def _votes(decisions: Sequence[DecisionRecord], digest: str, step: Step) -> int:
    """How many different approvers have approved this action and may still approve."""
    counts, now = step.counts, step.by
    found = yes_votes(decisions, digest)
    return sum(one == now or counts is None or counts(one) for one in found)


def _get(connection: Connection, approval_id: str) -> StoredApproval:
    row = (
        connection.execute(select(APPROVALS).where(APPROVALS.c.id == approval_id))
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise UnknownApproval
    decisions = connection.execute(
        select(DECISIONS).where(DECISIONS.c.approval_id == approval_id).order_by(DECISIONS.c.seq)
    ).mappings()
    return _stored(row, [_decision(one) for one in decisions])


def _page(connection: Connection, query: ApprovalQuery, principal_id: str | None) -> ApprovalPage:
    wanted: list[ColumnElement[bool]] = []
    if principal_id is not None:
        wanted.append(APPROVALS.c.principal_id == principal_id)
    if query.state is not None:
        wanted.append(APPROVALS.c.state == query.state.value)
    if query.tool is not None:
        wanted.append(APPROVALS.c.tool == query.tool)
    if query.agent is not None:
        wanted.append(APPROVALS.c.agent_id == query.agent)
    if query.call_id is not None:
        wanted.append(APPROVALS.c.call_id == query.call_id)
    if query.cursor is not None:
        own = [APPROVALS.c.id == query.cursor]
        if principal_id is not None:
            own.append(APPROVALS.c.principal_id == principal_id)
        seq = connection.execute(select(APPROVALS.c.seq).where(*own)).scalar_one_or_none()
        if seq is None:
            raise UnknownApproval
        wanted.append(APPROVALS.c.seq < seq)
    seqs, has_more = _that_fit(connection, wanted, query.limit)
    listed = select(APPROVALS).where(APPROVALS.c.seq.in_(seqs)).order_by(APPROVALS.c.seq.desc())
    shown = connection.execute(listed).mappings().all()
    decisions: dict[str, list[DecisionRecord]] = {}
    decided = select(DECISIONS).where(DECISIONS.c.approval_id.in_([row["id"] for row in shown]))
    for one in connection.execute(decided.order_by(DECISIONS.c.seq)).mappings():
        decisions.setdefault(one["approval_id"], []).append(_decision(one))
    items = tuple(
        _listed(_stored(row, decisions.get(row["id"], [])), is_own=principal_id is not None)
        for row in shown
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
    """The newest rows that fit on one page, and whether there are more. One always fits."""
    size = func.length(cast(APPROVALS.c.document, LargeBinary))
    newest = select(APPROVALS.c.seq, size).where(*wanted).order_by(APPROVALS.c.seq.desc())
    rows = connection.execute(newest.limit(limit + 1)).all()
    sizes = itertools.accumulate(row[1] for row in rows[:limit])
    fit = [row[0] for row, so_far in zip(rows, sizes, strict=False) if so_far <= MAX_PAGE_BYTES]
    fit = fit or [row[0] for row in rows[:1]]
    return fit, len(rows) > len(fit)


def _listed(stored: StoredApproval, *, is_own: bool) -> Approval:
    """Without its binding; for its caller also without the agent's fixed arguments."""
    hidden = stored.request.hidden if is_own else ()
    return without_arguments(stored.approval, hidden).model_copy(update={"binding": None})


_IN_DOCUMENT = (
    "trace_id", "tool_version", "arguments", "asked_arguments", "preview", "previewed_at", "rule",
    "asked_by", "reason", "budget", "dangerous", "approvers", "quorum", "policy_version", "binding",
    "changed", "superseded_by",
)  # fmt: skip
_TIMES = ("created_at", "expires_at", "decided_at", "started_at", "ended_at")
_COLUMNS = (
    "id", "version", "call_id", "principal_id", "agent_id", "session_id", "tool", "action_digest",
    "code",
)  # fmt: skip


def size_of(stored: StoredApproval) -> int:
    """Approximate size on disk in bytes."""
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
    request = document["request"]
    fields: dict[str, Any] = {name: row[name] for name in _COLUMNS}
    fields.update({name: document[name] for name in _IN_DOCUMENT if name in document})
    fields.update({name: _moment(row[name]) for name in _TIMES})
    approval = Approval(
        **fields,
        state=ApprovalState(row["state"]),
        decisions=tuple(decisions),
        has_answer=row["answer"] is not None,
    )
    kept = StoredRequest(**{**request, "hidden": tuple(request["hidden"])})
    keys = {name: row[name] for name in ("idempotency_key", "answer", "repeat_key")}
    return StoredApproval(approval, kept, **keys)


def _decision_row(approval_id: str, decision: DecisionRecord) -> dict[str, Any]:
    return {
        **decision.model_dump(exclude={"at"}),
        "approval_id": approval_id,
        "at": stamp(decision.at),
    }


def _decision(row: RowMapping) -> DecisionRecord:
    fields = {name: row[name] for name in DecisionRecord.model_fields if name != "at"}
    return DecisionRecord(**fields, at=datetime.fromisoformat(row["at"]))


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _audited(approval: Approval, *, by: str) -> JsonObject:
    """The audit chain's view of an approval: no argument values, but the hash of all."""
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
