"""Decision: an approver's word becomes a change of the approval.

Host side, below the desk. It asks who may decide, checks what was edited and what is to be
remembered, and changes the database. Invariants: nobody approves its own call, unless the
operator wants that, and then it is written down; of several decisions at once all are made or
none; whoever may not and tries is in the audit chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from fumehood.approvals import refusals
from fumehood.approvals import states as steps
from fumehood.approvals.changes import ApprovalChanges
from fumehood.approvals.edit import as_edited, edited_document
from fumehood.approvals.eligibility import ApprovalVoices
from fumehood.approvals.model import (
    Approval,
    ApprovalState,
    DecisionRecord,
    OneOfSeveral,
    RememberedRule,
    Resolution,
)
from fumehood.approvals.remembered import Remembering, may_decide, remembered_rule
from fumehood.approvals.resumption import CallWay
from fumehood.approvals.run_to_completion import run_to_completion
from fumehood.approvals.settings import ApprovalSettings
from fumehood.approvals.store import (
    ApprovalTable,
    Stale,
    Step,
    StoredApproval,
    TooLate,
    UnknownApproval,
)
from fumehood.core.envelope import Envelope
from fumehood.core.errors import InvalidParams, PermissionDenied, ResourceNotFound
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject

MAX_ID_CHARACTERS = 100
NOT_NAMED = "not among the approvers"


class ApprovalDecision:
    """What approvers say."""

    def __init__(
        self,
        table: ApprovalTable,
        changes: ApprovalChanges,
        remembering: Remembering,
        rules: ApprovalSettings,
        *,
        way: Callable[[], CallWay],
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        voices: ApprovalVoices,
        on_event: Callable[[str, JsonObject], None],
    ) -> None:
        self._table = table
        self._changes = changes
        self._remembering = remembering
        self._rules = rules
        self._way = way
        self._now = now
        self._new_id = new_id
        self._voices = voices
        self._on_event = on_event

    async def decide_all(
        self, items: Sequence[OneOfSeveral], by: Principal, *, channel: str, peer: str | None
    ) -> tuple[Approval, ...]:
        """Several decisions in one transaction, as `ApprovalService.decide_all`."""
        if len({one.approval_id for one in items}) != len(items):
            raise InvalidParams("An approval is decided twice.", fields=["items"])
        stored = [await self._get(one.approval_id) for one in items]
        is_self = [await self._require_approver(one.approval, by, peer) for one in stored]
        decided: list[tuple[str, Step]] = []
        answers: list[Envelope | None] = []
        for one, kept, own in zip(items, stored, is_self, strict=True):
            step, answer = await self._step(one, kept, by, channel, is_self_approval=own)
            decided.append((one.approval_id, step))
            answers.append(answer)
        try:
            after = await run_to_completion(self._write(decided, answers))
        except UnknownApproval:  # forgotten in this moment
            raise refusals.unknown() from None
        except TooLate as late:
            raise refusals.too_late(late.approval) from None
        except Stale as stale:
            raise refusals.conflict(stale.approval) from None
        return tuple(self._voices.shown(kept.approval) for kept in after)

    async def preview_edit(
        self, approval_id: str, arguments: JsonObject, by: Principal, *, peer: str | None
    ) -> Approval:
        """What a yes to other arguments would make of it, as `ApprovalService.preview_edit`."""
        stored = await self._changes.get(approval_id)
        self._require_open(stored.approval)
        refused = self._refused(stored.approval, by, peer)
        if refused is not None:
            raise refused[1]
        edited = as_edited(stored, await self._way().edited(stored, arguments))
        if not may_decide(edited.approvers, by.id):
            raise refusals.not_among(edited.approvers)
        return self._voices.shown(edited)

    async def resolve(
        self, approval_id: str, resolution: Resolution, by: Principal, *, peer: str | None
    ) -> Approval:
        """What became of an interrupted call, as `ApprovalService.resolve`."""
        stored = await self._changes.get(approval_id)
        await self._require_approver(stored.approval, by, peer)
        now = self._now()
        answer = await self._way().resolved(stored, resolution, by.id)
        step = steps.resolved(resolution, by.id, now, answer)
        return (await self._changes.change_for(approval_id, step)).approval

    async def note_refusal(
        self, approval_id: str | None, by: Principal, peer: str | None, why: str
    ) -> None:
        """Keep that somebody who may not, wanted to decide; None: on several at once."""
        about = None if approval_id is None else approval_id[:MAX_ID_CHARACTERS]
        values = {"approval_id": about, "by": by.id, "peer": peer, "why": why}
        self._on_event("approval.refused", values)
        await self._table.note("approval.refused", self._now(), values)

    async def _get(self, approval_id: str) -> StoredApproval:
        """One of those to be decided. Raises ResourceNotFound, which says which is not there."""
        try:
            return await self._changes.get(approval_id)
        except ResourceNotFound:
            raise refusals.nothing_to_decide(approval_id) from None

    async def _write(
        self, decided: Sequence[tuple[str, Step]], answers: Sequence[Envelope | None]
    ) -> Sequence[StoredApproval]:
        after = await self._changes.change_all(decided)
        for kept, answer in zip(after, answers, strict=True):
            if answer is not None:
                self._way().record(kept, answer)
        if any(step.remember is not None for _, step in decided):
            await self._remembering.reload()
        return after

    async def _step(
        self,
        one: OneOfSeveral,
        stored: StoredApproval,
        by: Principal,
        channel: str,
        *,
        is_self_approval: bool,
    ) -> tuple[Step, Envelope | None]:
        """The change that a word asks for, and the call's answer where that is its end."""
        approval, decision, now = stored.approval, one.decision, self._now()
        self._require_open(approval)
        digest, document = approval.action_digest, dict[str, Any]()
        if decision.arguments is not None:
            edited = await self._way().edited(stored, decision.arguments)
            digest, document = edited.digest, edited_document(stored, edited)
            await self._require_named(approval, document["approvers"], by)
        if decision.action_digest not in (None, digest):
            raise refusals.conflict(approval)
        word = DecisionRecord(
            at=now, approver=by.id, channel=channel, decision=decision.decision,
            action_digest=digest, reason=decision.reason, edited=decision.arguments is not None,
            is_self_approval=is_self_approval,
        )  # fmt: skip
        if decision.decision == "deny":
            said = approval.model_copy(update={"decisions": (*approval.decisions, word)})
            answer = await self._way().answer(stored, refusals.denial(said))
            return steps.denied(word, version=one.version, answer=answer), answer
        step = steps.approved(
            word,
            version=one.version,
            start_by=now + timedelta(seconds=self._rules.start_within_seconds),
            document=document,
            remember=self._rule_of(one, approval, word),
            counts=self._voices.counts,
        )
        return step, None

    def _rule_of(
        self, one: OneOfSeveral, approval: Approval, word: DecisionRecord
    ) -> RememberedRule | None:
        """The rule that a yes leaves behind, where that was wished. Raises InvalidParams."""
        wish = one.decision.remember
        if wish is None:
            return None
        if approval.quorum > 1 or word.edited:
            raise InvalidParams(
                "What several have to agree to, or what was edited, is not remembered.",
                fields=["remember"],
            )
        rule_id = self._new_id().replace("apr_", "rul_")
        return remembered_rule(approval, wish, rule_id, word.approver, word.at)

    @staticmethod
    def _require_open(approval: Approval) -> None:
        """Raises ApprovalExpired, IdempotencyConflict: it is decided already."""
        if approval.state is not ApprovalState.PENDING:
            is_late = approval.state is ApprovalState.EXPIRED
            raise refusals.too_late(approval) if is_late else refusals.conflict(approval)

    async def _require_approver(self, approval: Approval, by: Principal, peer: str | None) -> bool:
        """Whether it would be its caller's own yes. Raises PermissionDenied."""
        refused = self._refused(approval, by, peer)
        if refused is not None:
            why, refusal = refused
            await self.note_refusal(approval.id, by, peer, why)
            raise refusal
        return approval.principal_id in (by.id, peer)

    def _refused(
        self, approval: Approval, by: Principal, peer: str | None
    ) -> tuple[str, PermissionDenied] | None:
        """Why this one may not decide: in a word for the record, and as the error."""
        if Scope.APPROVE not in by.scopes:
            return "no scope", refusals.no_scope()
        if approval.principal_id in (by.id, peer) and not self._rules.allow_self_approval:
            return "own call", refusals.own_call()
        if not may_decide(approval.approvers, by.id):
            return NOT_NAMED, refusals.not_among(approval.approvers)
        return None

    async def _require_named(
        self, approval: Approval, approvers: Sequence[str], by: Principal
    ) -> None:
        if not may_decide(approvers, by.id):
            await self.note_refusal(approval.id, by, None, NOT_NAMED)
            raise refusals.not_among(approvers)
