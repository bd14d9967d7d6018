"""The service: approvers see and decide approvals, and callers find and cancel their own approvals.

Host side. The HTTP routes and the webhook use this interface. Invariants: a principal can decide on
its own call only if the operator permits self-approval, and the decision is then recorded as a
self-approval; a batch of decisions is made completely or not at all; attempts to decide without
authority are recorded in the audit chain; an approved call starts only after its approval is
durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import anyio

from fumehood.approvals import refusals
from fumehood.approvals import store as steps
from fumehood.approvals.eligibility import may_decide
from fumehood.approvals.model import (
    LONGEST_POLL_S,
    Approval,
    ApprovalPage,
    ApprovalQuery,
    ApprovalState,
    DecisionRecord,
    NewDecision,
    OneOfSeveral,
    RememberedRule,
    RememberWish,
    Resolution,
    StoredApproval,
    own_view,
)
from fumehood.approvals.remembered import remembered_rule, wished_rule
from fumehood.approvals.scheduler import ApprovalScheduler
from fumehood.approvals.store import Step
from fumehood.approvals.stored_calls import HumanAsker, StoredCalls
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    EngineError,
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    ResourceNotFound,
)
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.names import MAX_NAME_CHARACTERS
from fumehood.core.tasks import run_to_completion
from fumehood.pipeline.context import PipelineServices
from fumehood.protocol.messages import decode_envelope
from fumehood.storage.errors import WriteFailed


class ApprovalService:
    """All approvals of one engine, as approvers and callers use them."""

    def __init__(self, services: PipelineServices, asker: HumanAsker) -> None:
        self._calls = StoredCalls(services, asker)
        self.scheduler = ApprovalScheduler(self._calls)
        self.requests = asker.requests
        self._eligibility = self.requests.eligibility

    # -- looking -------------------------------------------------------------------------

    async def list(
        self, query: ApprovalQuery, *, principal: Principal | None = None
    ) -> ApprovalPage:
        """Return a page of approvals, newest first. If `principal` is given, list only the
        approvals of this principal's own calls.

        Raises:
            ResourceNotFound: the cursor is unknown.
        """
        principal_id = principal.id if principal is not None else None
        page = await self.requests.table.page(query, principal_id)
        if principal is not None:
            return page
        shown = tuple(self._eligibility.shown(one) for one in page.items)
        return page.model_copy(update={"items": shown})

    async def show(self, approval_id: str, *, principal: Principal | None = None) -> Approval:
        """Return an approval. If `principal` is given, the approval must be for this principal's
        own call.

        Raises:
            ResourceNotFound: there is no such approval, or it is not the principal's own.
        """
        stored = await self.requests.table.get(approval_id)
        if principal is None:
            return self._eligibility.shown(stored.approval)
        _require_own(stored, principal)
        return own_view(stored)

    async def opened(self, approval_id: str) -> Approval:
        """Return an approval for an approver, with a preview of the changes that the call would
        make now.

        If the preview has changed, it is stored as a new version of the approval. If no preview can
        be computed, the approval keeps the earlier preview and the time of that preview.

        Raises:
            ResourceNotFound: there is no such approval.
        """
        stored = await self.requests.table.get(approval_id)
        if stored.approval.state is ApprovalState.PENDING:
            stored = await self._previewed(stored)
        return self._eligibility.shown(stored.approval)

    async def of_call(self, call_id: str, principal: Principal) -> Approval | None:
        """Return the newest approval of the principal's own call, in the form that its caller may
        see. Return None if the principal has no such call, or if the call needed no approval.
        """
        stored = await self._own_call(call_id, principal)
        return None if stored is None else own_view(stored)

    async def answer_of(
        self, call_id: str, principal: Principal, *, is_fetched: bool = True
    ) -> Envelope | None:
        """Return the answer to the principal's own call, if the call needed approval. Return None
        if there is no answer.

        If `is_fetched` is True, the answer is marked as fetched. Otherwise, the caller of this
        method must call `fetched` once the answer has been delivered.
        """
        stored = await self._own_call(call_id, principal)
        if stored is None or stored.answer is None:
            return None
        if is_fetched:
            self.fetched(call_id)
        return decode_envelope(stored.answer.encode())

    def fetched(self, call_id: str) -> None:
        """Record that the caller of a call has received the call's answer.

        From now on, an identical call counts as a new call, not as a repeat.
        """
        self.requests.fetched(call_id)

    async def next_change(self, after: int, *, within_s: float = LONGEST_POLL_S) -> int:
        """Wait until the number of changes is no longer `after`, but at most `within_s` seconds.
        Return the number of changes, which equals `after` if nothing has changed in this time.

        The number is 0 when the engine starts, and grows with every change of any approval.
        """
        requests = self.requests
        if requests.changes == after:
            with anyio.move_on_after(within_s):
                await requests.until_beyond(after)
        return requests.changes

    async def count_pending(self) -> int:
        """Return the number of pending approvals."""
        return await self.requests.table.count(ApprovalState.PENDING)

    def remedy_without_approvers(self) -> str | None:
        """Return a clause that tells the operator how to add an approver. Return None if there
        already is an approver.
        """
        return self._eligibility.remedy_without_approvers()

    # -- deciding ------------------------------------------------------------------------

    async def decide(
        self,
        approval_id: str,
        decision: NewDecision,
        by: Principal,
        *,
        channel: str,
        peer: str | None = None,
        version: int | None = None,
    ) -> Approval:
        """Approve or deny a call, and return its approval.

        `by` is the approver. `channel` names the interface through which the decision was sent,
        such as `control`. `version` is the version of the approval that the approver saw; None
        accepts any version. `peer` is the principal id of the Unix user who sent the decision over
        the socket, or None. If this user made the call, the decision counts as a self-approval.

        Raises:
            ResourceNotFound: there is no such approval.
            PermissionDenied: this approver is not allowed to decide on the call.
            IdempotencyConflict: the call is already decided, or has changed since `version`.
            ApprovalExpired: the approval has expired.
            InvalidParams: the edit is invalid, or the approval cannot be remembered.
        """
        cut = approval_id[:MAX_NAME_CHARACTERS]  # no approval has a longer id
        one = OneOfSeveral(approval_id=cut, version=version, decision=decision)
        return (await self.decide_all([one], by, channel=channel, peer=peer))[0]

    async def decide_all(
        self,
        items: Sequence[OneOfSeveral],
        by: Principal,
        *,
        channel: str,
        peer: str | None = None,
    ) -> tuple[Approval, ...]:
        """Make several decisions in one transaction, and return the approvals. If one decision is
        refused, none takes effect.

        The parameters are those of `decide`. This method raises the same errors as `decide`, and
        also raises InvalidParams if `items` has two decisions on one approval.
        """
        if len({one.approval_id for one in items}) != len(items):
            raise InvalidParams("An approval is given twice.", fields=["items"])
        stored = [await self._get(one.approval_id) for one in items]
        is_self = [await self._require_approver(one.approval, by, peer) for one in stored]
        decided: list[tuple[str, Step]] = []
        answers: list[Envelope | None] = []
        for one, kept, own in zip(items, stored, is_self, strict=True):
            step, answer = await self._step(one, kept, by, channel, is_self_approval=own)
            decided.append((one.approval_id, step))
            answers.append(answer)
        after = await run_to_completion(self._apply(decided, answers))
        return tuple(self._eligibility.shown(one.approval) for one in after)

    async def preview_edit(
        self, approval_id: str, arguments: JsonObject, by: Principal, *, peer: str | None = None
    ) -> Approval:
        """Return the approval as it would be after this approver's edit. Nothing is stored.

        `arguments` would replace the call's arguments. `by` is the approver, and `peer` is the Unix
        user as in `decide`.

        Raises:
            ResourceNotFound, PermissionDenied, IdempotencyConflict, ApprovalExpired, InvalidParams:
                `decide` would refuse this edit with the same error.
        """
        stored = await self.requests.table.get(approval_id)
        _require_open(stored.approval)
        refused = self._refused(stored.approval, by, peer)
        if refused is not None:
            raise refused[1]
        edited = (await self.scheduler.edited(stored, arguments)).approval
        if not may_decide(edited.approvers, by.id):
            raise refusals.not_among(edited.approvers)
        return self._eligibility.shown(edited)

    async def resolve(
        self, approval_id: str, resolution: Resolution, by: Principal, *, peer: str | None = None
    ) -> Approval:
        """Record the outcome of an interrupted call, and return its approval.

        `resolution` is the outcome, and `by` is the approver who determined it. `peer` is the Unix
        user as in `decide`.

        Raises:
            ResourceNotFound: there is no such approval.
            PermissionDenied: this approver is not allowed to decide on the call.
            IdempotencyConflict: the call is not interrupted.
        """
        stored = await self.requests.table.get(approval_id)
        await self._require_approver(stored.approval, by, peer)
        now = self.requests.now()
        answer = await self._calls.resolved(stored, resolution, by.id)
        step = steps.resolved(resolution, by.id, now, answer)
        (after,) = await self.requests.change((approval_id, step))
        return after.approval

    async def note_refusal(
        self, approval_id: str | None, by: Principal, peer: str | None, why: str
    ) -> None:
        """Record an attempt to decide without authority in the log and the audit chain.

        `approval_id` is None if the attempt was a batch of decisions. `by` is the principal that
        tried to decide. `peer` is the principal id of the Unix user who sent the decision, or None.
        `why` is the reason for the refusal.
        """
        about = None if approval_id is None else approval_id[:MAX_NAME_CHARACTERS]
        values = {"approval_id": about, "by": by.id, "peer": peer, "why": why}
        self.requests.log.warning("approval.refused", **values)
        await self.requests.table.note("approval.refused", self.requests.now(), values)

    # -- cancelling ----------------------------------------------------------------------

    async def cancel(self, approval_id: str, principal: Principal) -> Approval:
        """Cancel the principal's own call if it is waiting, or stop the call if it is running.
        Return its approval.

        Raises:
            ResourceNotFound: the principal has no such approval.
            IdempotencyConflict: the call has already ended.
        """
        _require_own(await self.requests.table.get(approval_id), principal)
        return own_view(await self._calls.cancel(approval_id, principal.id))

    async def cancel_call(self, call_id: str, principal: Principal) -> Approval:
        """Cancel the principal's own call as `cancel` does, but find it by its call id. Raises the
        same errors as `cancel`.
        """
        stored = await self._own_call(call_id, principal)
        if stored is None:
            raise refusals.unknown()
        return own_view(await self._calls.cancel(stored.approval.id, principal.id))

    # -- remembered rules ----------------------------------------------------------------

    async def preview_remember(self, approval_id: str, wish: RememberWish) -> RememberedRule:
        """Return the remembered rule that an approval with this wish would create. Nothing is
        stored.

        Raises:
            ResourceNotFound: there is no such approval.
            InvalidParams: the approval cannot create such a rule.
        """
        stored = await self.requests.table.get(approval_id)
        now = self.requests.now()
        return remembered_rule(stored, wish, "rul_" + "0" * 24, "", now)

    async def remembered(self) -> Sequence[RememberedRule]:
        """Return all remembered rules, newest first, including removed ones."""
        return self.requests.remembered.all()[::-1]

    async def forget(self, rule_id: str, by: Principal) -> RememberedRule:
        """Remove a remembered rule, and return it. `by` is the principal that removes the rule.
        Raises ResourceNotFound if there is no such rule.
        """
        return await self.requests.remembered.forget(rule_id, by, self.requests.now())

    async def _previewed(self, stored: StoredApproval) -> StoredApproval:
        try:
            shown = await self.scheduler.previewed(stored)
        except EngineError:
            return stored
        before = stored.approval
        if shown is None or shown.approval.action_digest == before.action_digest:
            return shown or stored
        try:
            step = steps.previewed(before, shown, self.requests.now())
            (after,) = await self.requests.change((before.id, step))
        except IdempotencyConflict:
            return await self.requests.table.get(before.id)
        except WriteFailed:
            return stored
        return after

    # -- steps of a decision -------------------------------------------------------------

    async def _own_call(self, call_id: str, principal: Principal) -> StoredApproval | None:
        stored = await self.requests.table.of_call(call_id)
        if stored is None or stored.approval.principal_id != principal.id:
            return None
        return stored

    async def _get(self, approval_id: str) -> StoredApproval:
        """Return the approval that is to be decided. Raises ResourceNotFound, with the approval id
        in the message, if there is no such approval.
        """
        try:
            return await self.requests.table.get(approval_id)
        except ResourceNotFound:
            raise refusals.nothing_to_decide(approval_id) from None

    async def _apply(
        self, decided: Sequence[tuple[str, Step]], answers: Sequence[Envelope | None]
    ) -> Sequence[StoredApproval]:
        after = await self.requests.change(*decided)
        for stored, answer in zip(after, answers, strict=True):
            if answer is not None:
                self._calls.record(stored, answer)
            if stored.approval.state is ApprovalState.APPROVED:
                self.scheduler.start(stored.approval.id)
        if any(step.remember is not None for _, step in decided):
            await self.requests.remembered.reload()
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
        """Return the state change that a decision makes, and the call's answer. The answer is None
        if the decision does not end the call.

        `one` contains the decision, `stored` is the approval, and `by` is the approver.
        `is_self_approval` is the result of `_require_approver`.
        """
        approval, decision, now = stored.approval, one.decision, self.requests.now()
        _require_open(approval)
        digest, edited = approval.action_digest, None
        if decision.arguments is not None:
            edited = await self.scheduler.edited(stored, decision.arguments)
            digest = edited.approval.action_digest
            await self._require_approver(edited.approval, by, None)
        if decision.action_digest not in (None, digest):
            raise refusals.conflict(approval)
        record = DecisionRecord(
            at=now, approver=by.id, channel=channel, decision=decision.decision,
            action_digest=digest, reason=decision.reason, edited=decision.arguments is not None,
            is_self_approval=is_self_approval,
        )  # fmt: skip
        if decision.decision == "deny":
            denied = approval.model_copy(update={"decisions": (*approval.decisions, record)})
            answer = await self._calls.answer(stored, refusals.denial(denied))
            return steps.denied(record, version=one.version, answer=answer), answer
        start_within = timedelta(seconds=self.requests.settings.start_within_seconds)
        step = steps.approved(
            record,
            version=one.version,
            start_by=now + start_within,
            edited=edited,
            remember=wished_rule(decision.remember, stored, record, self.requests.new_id),
            counts=self._eligibility.counts,
        )
        return step, None

    async def _require_approver(self, approval: Approval, by: Principal, peer: str | None) -> bool:
        """Check that the principal `by` is allowed to decide on a call. Return True if the decision
        would be a self-approval, that is, if `by` or `peer` made the call.

        `peer` is the principal id of the Unix user who sent the decision, or None. A refusal is
        recorded in the audit chain.

        Raises:
            PermissionDenied: the principal is not allowed to decide on the call.
        """
        refused = self._refused(approval, by, peer)
        if refused is not None:
            why, refusal = refused
            await self.note_refusal(approval.id, by, peer, why)
            raise refusal
        return approval.principal_id in (by.id, peer)

    def _refused(
        self, approval: Approval, by: Principal, peer: str | None
    ) -> tuple[str, PermissionDenied] | None:
        """Return why the principal `by` is not allowed to decide on a call. The result is a pair of
        a text for the audit chain and an error for the principal. Return None if the principal is
        allowed to decide.

        `peer` is the principal id of the Unix user who sent the decision, or None. If this user
        made the call, it counts as the principal's own call.
        """
        if Scope.APPROVE not in by.scopes:
            return "no scope", refusals.no_scope()
        is_own = approval.principal_id in (by.id, peer)
        if is_own and not self._eligibility.allow_self_approval:
            return "own call", refusals.own_call()
        if not may_decide(approval.approvers, by.id):
            return "not among the approvers", refusals.not_among(approval.approvers)
        return None


def _require_open(approval: Approval) -> None:
    """Check that an approval is pending. If it has expired, raise ApprovalExpired. If it has
    another state, raise IdempotencyConflict.
    """
    if approval.state is not ApprovalState.PENDING:
        is_late = approval.state is ApprovalState.EXPIRED
        raise refusals.too_late(approval) if is_late else refusals.conflict(approval)


def _require_own(stored: StoredApproval, principal: Principal) -> None:
    """Raise ResourceNotFound if the approval is not for this principal's own call."""
    if stored.approval.principal_id != principal.id:
        raise refusals.unknown()
