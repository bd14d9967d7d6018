"""Rows of approvals: what waits for a human, what was decided, and what became of the call.

Host side, used by the other files of this package. Everything here is durable before anybody is
told of it. One `Step` is one transaction: the state, an approver's
word, the rule that it leaves behind, the call's answer, the idempotency key that waits for it,
the audit row and the webhook's message stand or fall together. Invariant: a state is only left
for one that `Step.leaves` allows, and `version` grows with each change of what people are shown,
so that of two who decide at once one is told.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

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

from fumehood.approvals import remembered_store as remembered
from fumehood.approvals.model import (
    OPEN_STATES,
    Approval,
    ApprovalPage,
    ApprovalQuery,
    ApprovalState,
    DecisionRecord,
    RememberedRule,
    yes_votes,
)
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json
from fumehood.storage import idempotency
from fumehood.storage.changes import stamp
from fumehood.storage.database import Database
from fumehood.storage.idempotency import pack_answer
from fumehood.storage.schema import APPROVALS, DECISIONS
from fumehood.webhook import deliveries

MAX_PAGE_BYTES = 8 * 1024 * 1024
"""Of rows on one page: a call of its own may have arguments of as much."""

FORGOTTEN_AT_ONCE = 500
"""Rows of one deletion: other writes wait for at most so many."""

STAYING = OPEN_STATES | {ApprovalState.INTERRUPTED}


class Chain(Protocol):
    """The audit chain."""

    def append(self, connection: Connection, kind: str, at: str, fields: JsonObject) -> int:
        """Add a row in the caller's transaction."""
        ...


class UnknownApproval(Exception):
    """There is no such approval, or not for who asks."""


class Stale(Exception):
    """Somebody else was first. `approval` is how it is now."""

    def __init__(self, approval: Approval) -> None:
        super().__init__(approval.state)
        self.approval = approval


class TooLate(Stale):
    """Its time is over."""


@dataclass(frozen=True, slots=True)
class PendingOf:
    """What of one principal waits for a human."""

    count: int = 0
    size_bytes: int = 0
    """On the disk, about."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """What the engine needs to carry the call out later, as it was asked for."""

    arguments: JsonObject
    """As the caller gave them: without the agent's defaults and fixed ones."""
    options: JsonObject
    token_id: str | None
    expected: str | None = None
    """What the workspace must be like, where the call's effect was shown."""
    may_exceed_budget: bool = False
    hidden: tuple[str, ...] = ()
    """Arguments that the agent's configuration fixes: their caller is not shown them."""


@dataclass(frozen=True, slots=True)
class StoredApproval:
    """An approval with what only the engine sees."""

    approval: Approval
    request: StoredRequest
    idempotency_key: str | None = None
    answer: str | None = None
    """The call's envelope, as JSON."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change of one approval. What is absent stays as it is."""

    kind: str
    """What the audit chain calls it."""
    by: str
    at: datetime
    leaves: frozenset[ApprovalState]
    to: ApprovalState | None = None
    version: int | None = None
    """Whoever changes it has seen this version."""
    digest: str | None = None
    """It must still be this action."""
    in_time: bool = False
    """It must not have expired."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    document: Mapping[str, Any] = field(default_factory=dict)
    decision: DecisionRecord | None = None
    remember: RememberedRule | None = None
    answer: Envelope | None = None
    event: str | None = None
    """What the webhook is told."""
    details: JsonObject = field(default_factory=dict)
    """For the audit chain."""
    counts: Callable[[str], bool] | None = None
    """Whose earlier yes counts; None: everybody's. Who decides now has just shown who he is."""
    is_seen: bool = True
    """Whether it changes what people are shown; else it is the same version still."""


class ApprovalTable:
    """The rows of one database. `tells` says whether there is a webhook that is owed messages."""

    def __init__(
        self, database: Database, chain: Chain, *, tells: bool, kept_days: int = 90
    ) -> None:
        self._database = database
        self._chain = chain
        self._tells = tells
        self._kept = timedelta(days=kept_days)
        self.overdue = asyncio.Event()
        """Never set: what is over may wait for the next hour."""

    async def create(self, stored: StoredApproval) -> None:
        """Keep a new one, and hand the idempotency key of its call over to it.

        Raises:
            WriteFailed: nothing of it is promised.
        """
        await self._database.write(lambda connection: self._create(connection, stored))

    async def get(self, approval_id: str) -> StoredApproval:
        """Raises UnknownApproval, ReadFailed."""
        return await self._database.read(lambda connection: _get(connection, approval_id))

    async def of_call(self, call_id: str) -> StoredApproval | None:
        """The newest one of a call."""
        newest = (
            select(APPROVALS.c.id).where(APPROVALS.c.call_id == call_id)
            .order_by(APPROVALS.c.seq.desc()).limit(1)
        )  # fmt: skip

        def find(connection: Connection) -> StoredApproval | None:
            found = connection.execute(newest).scalar_one_or_none()
            return None if found is None else _get(connection, found)

        return await self._database.read(find)

    async def page(self, query: ApprovalQuery, principal_id: str | None) -> ApprovalPage:
        """The newest first. Raises UnknownApproval where the cursor is nobody's."""
        return await self._database.read(lambda connection: _page(connection, query, principal_id))

    async def change(self, steps: Sequence[tuple[str, Step]]) -> list[StoredApproval]:
        """Carry several steps out in one transaction: all of them, or none.

        Raises:
            UnknownApproval, Stale, TooLate: of the first that cannot be.
            WriteFailed: nothing of it is promised.
        """

        def job(connection: Connection) -> list[StoredApproval]:
            return [self._advance(connection, one, step) for one, step in steps]

        return await self._database.write(job)

    async def supersede(self, approval_id: str, step: Step, new: StoredApproval) -> None:
        """End one and ask again, in one transaction."""

        def job(connection: Connection) -> None:
            self._advance(connection, approval_id, step)
            self._create(connection, new, passes_key_on=True)

        await self._database.write(job)

    async def denied_before(
        self, digest: str, principal_id: str, session_id: str | None, since: datetime
    ) -> Approval | None:
        """The newest no to the same action, for the same caller and session."""
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
        """Enter something into the audit chain that changes no approval."""
        await self._database.write(lambda c: self._chain.append(c, kind, stamp(at), fields))

    async def prune(self, now: datetime) -> int:
        """Delete what has been over for long enough; returns how many went.

        Raises:
            WriteFailed: the rest stays until the next time.
        """
        before, gone = stamp(now - self._kept), 0
        while True:
            count = await self._database.write(lambda connection: _forget(connection, before))
            gone += count
            if count < FORGOTTEN_AT_ONCE:
                return gone

    async def in_state(self, state: ApprovalState) -> list[str]:
        """The ids of all in one state, oldest first."""
        ids = select(APPROVALS.c.id).where(APPROVALS.c.state == state.value)
        ordered = ids.order_by(APPROVALS.c.seq)
        return await self._database.read(lambda c: list(c.execute(ordered).scalars()))

    async def due(self, now: datetime, warn_before: datetime) -> tuple[list[str], list[str]]:
        """What has expired, and whose end is near and was not told yet; at most 500 each."""
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
        """When the next one that waits expires, and the next that nobody was warned of."""
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
        """What waits, by principal."""
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
        if self._tells:
            deliveries.owe(connection, approval.id, "approval.created", approval.created_at)

    def _advance(self, connection: Connection, approval_id: str, step: Step) -> StoredApproval:
        before = _get(connection, approval_id)
        approval = before.approval
        _require(approval, step)
        to = _after_word(connection, approval, step)
        at = stamp(step.at)
        moved = to is not None and to is not approval.state
        values: dict[str, Any] = {"version": approval.version + step.is_seen, **step.columns}
        if to is None and step.to is not None:
            values.pop("decided_at", None)  # one yes of several
            values.pop("expires_at", None)
        elif to is not None:
            values["state"] = to.value
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
            remembered.add(connection, step.remember)
        after = _get(connection, approval_id)
        fields = {**_audited(after.approval, by=step.by), **step.details}
        self._chain.append(connection, step.kind, at, fields)
        if step.event is not None and self._tells:
            deliveries.owe(connection, approval_id, step.event, step.at)
        return after


def _forget(connection: Connection, before: str) -> int:
    """Some of those that ended before a time. What nobody has resolved yet stays."""
    over = [state.value for state in ApprovalState if state not in STAYING]
    old = (
        select(APPROVALS.c.id)
        .where(APPROVALS.c.state.in_(over), APPROVALS.c.ended_at <= before)
        .limit(FORGOTTEN_AT_ONCE)
    )
    ids = list(connection.execute(old).scalars())
    connection.execute(delete(DECISIONS).where(DECISIONS.c.approval_id.in_(ids)))
    connection.execute(delete(APPROVALS).where(APPROVALS.c.id.in_(ids)))
    return len(ids)


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


def _after_word(connection: Connection, approval: Approval, step: Step) -> ApprovalState | None:
    """Keep the word that was said, if one was; the state that follows, None where none does yet.

    Raises:
        Stale: it was said before, and changes nothing.
    """
    word = step.decision
    if word is None:
        return step.to
    is_repeated = _is_repeated(approval, word)
    if not is_repeated:
        connection.execute(insert(DECISIONS), _decision_row(approval.id, word))
    voted = step.document.get("action_digest", approval.action_digest)
    quorum = step.document.get("quorum", approval.quorum)
    voices = _votes((*approval.decisions, word), voted, step)
    if step.to is not ApprovalState.APPROVED or voices >= quorum:
        return step.to
    if is_repeated:  # one voice is one voice
        raise Stale(approval)
    return None


def _is_repeated(approval: Approval, word: DecisionRecord) -> bool:
    """Whether it is what this approver said last. Then it decides something only where its voice
    did not count when the last one was heard, and does now."""
    said = [one for one in approval.decisions if one.approver == word.approver]
    return bool(said) and (said[-1].action_digest, said[-1].decision) == (
        word.action_digest,
        word.decision,
    )


def _votes(decisions: Sequence[DecisionRecord], digest: str, step: Step) -> int:
    """How many different approvers said yes to this action, as far as they still may."""
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
    words: dict[str, list[DecisionRecord]] = {}
    decided = select(DECISIONS).where(DECISIONS.c.approval_id.in_([row["id"] for row in shown]))
    for one in connection.execute(decided.order_by(DECISIONS.c.seq)).mappings():
        words.setdefault(one["approval_id"], []).append(_decision(one))
    items = tuple(
        _listed(_stored(row, words.get(row["id"], [])), is_own=principal_id is not None)
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
    """The newest rows that make one page, and whether there are more. One is always shown."""
    size = func.length(cast(APPROVALS.c.document, LargeBinary))
    newest = select(APPROVALS.c.seq, size).where(*wanted).order_by(APPROVALS.c.seq.desc())
    rows = connection.execute(newest.limit(limit + 1)).all()
    sizes = itertools.accumulate(row[1] for row in rows[:limit])
    fit = [row[0] for row, so_far in zip(rows, sizes, strict=False) if so_far <= MAX_PAGE_BYTES]
    fit = fit or [row[0] for row in rows[:1]]
    return fit, len(rows) > len(fit)


def _listed(stored: StoredApproval, *, is_own: bool) -> Approval:
    """Without its binding; for its caller also without what its agent fixes."""
    hidden = stored.request.hidden if is_own else ()
    return without_arguments(stored.approval, hidden).model_copy(update={"binding": None})


def without_arguments(approval: Approval, hidden: Sequence[str]) -> Approval:
    """Without what its caller may not see of it, also as it was asked for."""
    if not hidden:
        return approval
    asked = approval.asked_arguments
    return approval.model_copy(
        update={
            "arguments": _without(approval.arguments, hidden),
            "asked_arguments": None if asked is None else _without(asked, hidden),
        }
    )


def _without(arguments: JsonObject, hidden: Sequence[str]) -> JsonObject:
    return {name: value for name, value in arguments.items() if name not in hidden}


_IN_DOCUMENT = (
    "trace_id", "tool_version", "arguments", "asked_arguments", "preview", "rule", "asked_by",
    "reason", "budget", "dangerous", "approvers", "quorum", "policy_version", "binding", "changed",
    "superseded_by",
)  # fmt: skip
_TIMES = ("created_at", "expires_at", "decided_at", "started_at", "ended_at")
_COLUMNS = (
    "id", "version", "call_id", "principal_id", "agent_id", "session_id", "tool", "action_digest",
    "code",
)  # fmt: skip


def size_of(stored: StoredApproval) -> int:
    """How many bytes it takes on the disk, about."""
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
        "warned_at": None,
        "document": _document(stored),
        "answer": stored.answer,
    }


def _document(stored: StoredApproval) -> dict[str, Any]:
    approval, request = stored.approval, stored.request
    shown = approval.model_dump(mode="json", include=set(_IN_DOCUMENT))
    return {
        **shown,
        "request": {
            "arguments": request.arguments,
            "options": request.options,
            "token_id": request.token_id,
            "expected": request.expected,
            "may_exceed_budget": request.may_exceed_budget,
            "hidden": list(request.hidden),
        },
    }


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
    return StoredApproval(approval, kept, row["idempotency_key"], row["answer"])


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
    """What the chain keeps of an approval: no argument values, but the hash of everything."""
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
