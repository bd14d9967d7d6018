"""The desk: where calls wait for humans, and where humans say yes or no.

Host side, held by the engine: the one face of approvals, for calls and for people. What waits is
in `approvals/store`, so nothing is lost with the process. Below it, a purpose each:
`approval_decision` (who decides, and what it becomes), `approval_voices` (whose word counts),
`approval_runs` (what runs after its yes), `approval_keeper` (time and crashes), `approval_quota`
(how many may wait), `approval_changes` (the database, and who is told). Invariants: nobody
approves its own call; a state is changed in the database before anybody acts on it; after a
restart what was pending still is, what was approved and not started starts, and what was started
and has no end is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime, timedelta
from typing import Any

import anyio

from fumehood.approvals import refusals
from fumehood.approvals import states as steps
from fumehood.approvals.changes import ApprovalChanges
from fumehood.approvals.decision import ApprovalDecision
from fumehood.approvals.eligibility import ApprovalVoices
from fumehood.approvals.model import (
    Approval,
    ApprovalPage,
    ApprovalQuery,
    ApprovalState,
    NewDecision,
    OneOfSeveral,
    RememberedRule,
    RememberWish,
    Resolution,
)
from fumehood.approvals.quota import ApprovalQuota
from fumehood.approvals.remembered import Remembering, remembered_rule
from fumehood.approvals.resumption import CallWay
from fumehood.approvals.runs import ApprovalRuns
from fumehood.approvals.scheduler import ApprovalScheduler
from fumehood.approvals.settings import ApprovalSettings
from fumehood.approvals.store import (
    ApprovalTable,
    Stale,
    StoredApproval,
    UnknownApproval,
    without_arguments,
)
from fumehood.core.envelope import Envelope
from fumehood.core.errors import IdempotencyConflict, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.executors.handle import CallHandle
from fumehood.executors.outcome import cancelled
from fumehood.policy.model import Decision
from fumehood.protocol.messages import decode_envelope

DENIED_FOR = timedelta(hours=24)
"""How long a no answers the same call again."""

WATCH_S = 25.0
"""The longest that somebody who watches is kept waiting."""


class ApprovalService:
    """All approvals of one engine. To be entered once the way of a call is there (`way`)."""

    def __init__(
        self,
        table: ApprovalTable,
        remembering: Remembering,
        rules: ApprovalSettings,
        *,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        who_approves: Callable[[], frozenset[str]],
        cure: Callable[[], str],
        on_event: Callable[[str, JsonObject], None],
    ) -> None:
        self.way: CallWay
        self.is_draining: Callable[[], bool] = lambda: False
        self.new_id = new_id
        self.remembering = remembering
        self._table = table
        self._rules = rules
        self._now = now
        self._latest = now()
        self._voices = ApprovalVoices(
            who_approves, cure, allow_self_approval=rules.allow_self_approval
        )
        self._stack = AsyncExitStack()

        def way() -> CallWay:
            return self.way  # it is made after the desk, which it needs

        def is_draining() -> bool:
            return self.is_draining()

        self._quota = ApprovalQuota(table, rules)
        self._changes = ApprovalChanges(
            table, then=self._act_on, is_draining=is_draining, on_event=on_event
        )
        self._runs = ApprovalRuns(
            self._changes, way=way, is_draining=is_draining, now=self.now, on_event=on_event
        )
        self._keeper = ApprovalScheduler(
            table, self._changes, self._runs,
            warn_s=rules.warn_seconds, way=way, now=self.now, on_event=on_event,
        )  # fmt: skip
        self._decision = ApprovalDecision(
            table, self._changes, remembering, rules,
            way=way, now=self.now, new_id=new_id, voices=self._voices, on_event=on_event,
        )  # fmt: skip

    async def __aenter__(self) -> ApprovalService:
        await self._quota.count()
        await self._keeper.interrupt_what_had_begun()
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        self._runs.tasks = tasks
        tasks.start_soon(self._keeper.keep_time)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def drained(self) -> None:
        """Wait until no call runs any more that had its yes. None begins while the engine stops."""
        await self._runs.drained()

    def _act_on(self, approval: Approval) -> None:
        """Do what a change asks for: an end may be nearer now, and a yes is carried out."""
        self._keeper.look()
        if approval.state is ApprovalState.APPROVED:
            self._runs.start(approval.id)

    # What a call on its way asks for.

    def now(self) -> datetime:
        """The time. A clock that is set back gives nothing its life again."""
        self._latest = max(self._latest, self._now())
        return self._latest

    def expiry(self) -> datetime:
        """When an approval that is made now expires."""
        return self.now() + timedelta(seconds=self._rules.expire_seconds)

    def url_of(self, approval_id: str) -> str | None:
        """Where people see it."""
        return self._rules.url.replace("{id}", approval_id) if self._rules.url else None

    def wait_s(self, wish: bool | float | None) -> float:
        """How long a call may wait for its answer."""
        if wish is None or wish is False:
            return 0.0
        return (
            self._rules.max_wait_seconds
            if wish is True
            else min(float(wish), self._rules.max_wait_seconds)
        )

    def remembered_for(self, permitted: Any, definition: str) -> str | None:
        """The remembered rule that lets a call through, by its id."""
        return self.remembering.rule_for(permitted, definition, self.now(), self._voices.counts)

    def require_somebody_to_ask(self, tool: str, decision: Decision, principal_id: str) -> None:
        """Raises RequiresHumanApproval where there is nobody, or too few of whom a rule wants."""
        self._voices.require_enough(tool, decision, principal_id)

    def cure_of_nobody(self) -> str | None:
        """What the operator has to do where nobody could say yes; None where somebody could."""
        return self._voices.cure_of_nobody()

    async def denied_before(
        self, digest: str, principal: Principal, session_id: str | None
    ) -> Approval | None:
        """A no to the same call, for the same caller and session, in the last 24 hours."""
        since = self.now() - DENIED_FOR
        return await self._table.denied_before(digest, principal.id, session_id, since)

    async def park(self, stored: StoredApproval) -> None:
        """Keep a call that waits. When this returns it survives everything but the disk.

        To be carried through: a commit cannot be taken back half-way.

        Raises:
            RateLimited: too many wait.
            WriteFailed: it is not kept.
        """
        await self._quota.take(stored)
        await self._table.create(stored)
        self._changes.tell(stored.approval)

    async def wait(
        self, approval_id: str, seconds: float, live: CallHandle | None
    ) -> Envelope | None:
        """The call's answer, once there is one; None where it did not come in time."""
        followed = approval_id
        try:
            with anyio.move_on_after(seconds):
                while True:
                    seen = self._changes.number
                    if live is not None:
                        self._runs.follow(followed, live)
                    stored = await self._table.get(followed)
                    if stored.approval.superseded_by is not None:
                        followed = stored.approval.superseded_by
                        continue
                    if stored.answer is not None:
                        return decode_envelope(stored.answer.encode())
                    await self._changes.until_beyond(seen)
        finally:
            if live is not None:
                self._runs.unfollow(live)
        return None

    async def kept_answer(self, approval_id: str) -> Envelope:
        """The answer of a call that has one."""
        stored = await self._changes.get(approval_id)
        return decode_envelope((stored.answer or "").encode())

    async def give_up(self, approval_id: str, by: str) -> None:
        """Take a call back whose caller has cancelled it, as far as it is not over."""
        with suppress(IdempotencyConflict, ResourceNotFound):
            await self._cancel((await self.newest(approval_id)).id, by)

    async def newest(self, approval_id: str) -> Approval:
        """The approval, or the one that asks again in its place."""
        approval = (await self._changes.get(approval_id)).approval
        while approval.superseded_by is not None:
            approval = (await self._changes.get(approval.superseded_by)).approval
        return approval

    # What a call that was approved asks for.

    async def begin(self, stored: StoredApproval) -> None:
        """Use the yes up: from now on the call counts as started, and is never started again.

        Raises:
            ApprovalExpired: it is too late, or was decided otherwise meanwhile.
            WriteFailed: nothing was used up, and nothing may run.
        """
        step = steps.started(stored.approval, self.now())
        try:
            await self._changes.change(stored.approval.id, step)
        except (Stale, UnknownApproval):
            raise refusals.unusable_yes() from None

    async def end(
        self,
        stored: StoredApproval,
        to: ApprovalState,
        envelope: Envelope,
        *,
        changed: Sequence[str] = (),
    ) -> None:
        """Keep how a call ended that was approved; waits for as long as the disk takes nothing.

        Raises:
            Stale: somebody else has ended it.
            WriteFailed: the engine stops, and it will count as interrupted.
        """
        step = steps.ended(to, envelope, changed, self.now())
        await self._changes.until_kept(lambda: self._changes.change(stored.approval.id, step))

    async def ask_again(self, stored: StoredApproval, new: StoredApproval) -> None:
        """End one and make another for the same call, because the workspace has changed."""
        step = steps.superseded(new.approval.id, self.now())
        await self._changes.until_kept(lambda: self._table.supersede(stored.approval.id, step, new))
        self._quota.add(new)
        self._runs.follow_on(stored.approval.id, new.approval.id)
        self._changes.tell(new.approval)

    # What people ask for.

    async def list(
        self, query: ApprovalQuery, *, principal: Principal | None = None
    ) -> ApprovalPage:
        """The newest first; a caller's own, or for approvers (None) every one.

        Raises:
            ResourceNotFound: the cursor is of no such approval.
        """
        try:
            page = await self._table.page(query, principal.id if principal is not None else None)
        except UnknownApproval:
            raise refusals.unknown() from None
        if principal is None:
            shown = tuple(self._voices.shown(one) for one in page.items)
            return page.model_copy(update={"items": shown})
        return page.model_copy(update={"items": tuple(_own_view(one, ()) for one in page.items)})

    async def show(self, approval_id: str, *, principal: Principal | None = None) -> Approval:
        """One of them. Raises ResourceNotFound."""
        stored = await self._changes.get(approval_id)
        if principal is None:
            return self._voices.shown(stored.approval)
        if stored.approval.principal_id != principal.id:
            raise refusals.unknown()
        return _own_view(stored.approval, stored.request.hidden)

    async def of_call(self, call_id: str, principal: Principal) -> Approval | None:
        """The newest approval of a caller's own call."""
        stored = await self._table.of_call(call_id)
        if stored is None or stored.approval.principal_id != principal.id:
            return None
        return _own_view(stored.approval, stored.request.hidden)

    async def answer_of(self, call_id: str, principal: Principal) -> Envelope | None:
        """The envelope of a caller's own call that had to wait, once there is one."""
        stored = await self._table.of_call(call_id)
        if stored is None or stored.approval.principal_id != principal.id:
            return None
        return None if stored.answer is None else decode_envelope(stored.answer.encode())

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
        """Say yes or no. `version` is the one that was seen; `peer` who sits at the socket.

        Raises:
            ResourceNotFound, PermissionDenied: no such approval, or not for this approver.
            IdempotencyConflict: decided already, or it has changed since `version`.
            ApprovalExpired: too late.
            InvalidParams: what was edited cannot be, or cannot be remembered.
        """
        one = OneOfSeveral(approval_id=approval_id, version=version, decision=decision)
        return (await self.decide_all([one], by, channel=channel, peer=peer))[0]

    async def decide_all(
        self,
        items: Sequence[OneOfSeveral],
        by: Principal,
        *,
        channel: str,
        peer: str | None = None,
    ) -> tuple[Approval, ...]:
        """Several decisions in one transaction: all of them, or none."""
        return await self._decision.decide_all(items, by, channel=channel, peer=peer)

    async def preview_remember(self, approval_id: str, wish: RememberWish) -> RememberedRule:
        """The rule that a yes with this wish would leave behind. Nothing is saved."""
        stored = await self._changes.get(approval_id)
        return remembered_rule(stored.approval, wish, "rul_" + "0" * 24, "", self.now())

    async def preview_edit(
        self, approval_id: str, arguments: JsonObject, by: Principal, *, peer: str | None = None
    ) -> Approval:
        """What a yes of this approver to other arguments would make of it. Nothing is saved.

        Raises:
            ResourceNotFound, PermissionDenied, IdempotencyConflict, ApprovalExpired,
            InvalidParams: as the decision would be refused.
        """
        return await self._decision.preview_edit(approval_id, arguments, by, peer=peer)

    async def resolve(
        self, approval_id: str, resolution: Resolution, by: Principal, *, peer: str | None = None
    ) -> Approval:
        """Say what became of an interrupted call; only a human can know, and not its caller."""
        return await self._decision.resolve(approval_id, resolution, by, peer=peer)

    async def note_refusal(
        self, approval_id: str | None, by: Principal, peer: str | None, why: str
    ) -> None:
        """Keep that somebody who may not, wanted to decide; None: on several at once."""
        await self._decision.note_refusal(approval_id, by, peer, why)

    async def cancel_call(self, call_id: str, principal: Principal) -> Approval:
        """Take a call back by its id, as `cancel` does."""
        stored = await self._table.of_call(call_id)
        if stored is None or stored.approval.principal_id != principal.id:
            raise refusals.unknown()
        return await self._cancel(stored.approval.id, principal.id)

    async def cancel(self, approval_id: str, principal: Principal) -> Approval:
        """Take a call back that waits, or end it where it runs already; by its own caller.

        Raises:
            ResourceNotFound: no such approval of this caller.
            IdempotencyConflict: it is over.
        """
        stored = await self._changes.get(approval_id)
        if stored.approval.principal_id != principal.id:
            raise refusals.unknown()
        return await self._cancel(approval_id, principal.id)

    async def remembered(self) -> Sequence[RememberedRule]:
        """Every remembered rule, those that were taken back included."""
        return self.remembering.all()

    async def forget(self, rule_id: str, by: Principal) -> RememberedRule:
        """Take a remembered rule back. Raises ResourceNotFound."""
        return await self.remembering.forget(rule_id, by, self.now())

    async def next_change(self, after: int, *, within_s: float = WATCH_S) -> int:
        """A number that grows with every change; waits, bounded, until it is beyond `after`."""
        if self._changes.number <= after:
            with anyio.move_on_after(within_s):
                await self._changes.until_beyond(after)
        return self._changes.number

    async def _cancel(self, approval_id: str, by: str) -> Approval:
        if await self._runs.stop(approval_id):
            return (await self._changes.get(approval_id)).approval
        stored = await self._changes.get(approval_id)
        answer = await self.way.answer(stored, cancelled())
        step = steps.taken_back(by, self.now(), answer)
        after = await self._changes.change_for(approval_id, step)
        self.way.record(after, answer)
        return after.approval


def _own_view(approval: Approval, hidden: Sequence[str]) -> Approval:
    """What a caller sees of its own: not how it is bound, nor who may decide."""
    return without_arguments(approval, hidden).model_copy(
        update={"binding": None, "approvers": (), "decisions": ()}
    )
