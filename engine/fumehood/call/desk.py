"""The desk: where calls wait for humans, and where humans say yes or no.

Host side, held by the engine; what waits is in `store/approvals`, so nothing is lost with the
process. The desk lets approvals expire, wakes those who wait, and has a call carried out after
its yes (`carry_out`, which is `resume`). Invariants: nobody approves its own call; a state is
changed in the database before anybody acts on it; after a restart what was pending still is,
what was approved and not started starts, and what was started and has no end is interrupted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

import anyio

from fumehood.call.carry_through import carry_through
from fumehood.call.remembering import Remembering, may_decide, remembered_rule
from fumehood.executors.live import Live
from fumehood.executors.outcome import cancelled
from fumehood.model.approval import (
    OPEN_STATES,
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
)
from fumehood.model.decision import Decision, Verdict
from fumehood.model.envelope import Envelope
from fumehood.model.errors import (
    ApprovalExpired,
    EngineError,
    IdempotencyConflict,
    InvalidParams,
    OutcomeUnknown,
    PermissionDenied,
    RateLimited,
    RequiresHumanApproval,
    ResourceNotFound,
    SandboxUnavailable,
    ShuttingDown,
)
from fumehood.model.identity import Principal, Scope
from fumehood.model.json_types import JsonObject
from fumehood.store.approvals import (
    ApprovalTable,
    PendingOf,
    Stale,
    Step,
    StoredApproval,
    TooLate,
    UnknownApproval,
    size_of,
)
from fumehood.store.errors import ReadFailed, WriteFailed
from fumehood.wire.messages import decode_envelope

DENIED_FOR = timedelta(hours=24)
"""How long a no answers the same call again."""

LOOK_S = 5.0
"""How often the desk looks for what has expired, besides when it knows of an end."""

MAX_ID_CHARACTERS = 100
WAITING = frozenset({ApprovalState.PENDING, ApprovalState.APPROVED})
WATCH_S = 25.0
"""The longest that somebody who watches is kept waiting."""


@dataclass(frozen=True, slots=True)
class DeskRules:
    """What the operator chose."""

    expire_s: float = 3600
    start_within_s: float = 300
    warn_s: float = 300
    max_wait_s: float = 600
    max_pending: int = 10_000
    max_pending_of_one: int = 1000
    max_pending_bytes_of_one: int = 64 << 20
    """Of the records of one caller's calls that wait."""
    allow_self_approval: bool = False
    url: str | None = None


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


class CallWay(Protocol):
    """What the desk needs of the way of a call (`resume`)."""

    async def carry_out(self, stored: StoredApproval, live: Live) -> None:
        """Carry an approved call out and keep its answer. Never raises but when cancelled."""
        ...

    async def edited(self, stored: StoredApproval, arguments: JsonObject) -> Edited:
        """Check other arguments like those of a new call. Raises EngineError."""
        ...

    async def answer(self, stored: StoredApproval, error: EngineError) -> Envelope:
        """The envelope of a call that ends here."""
        ...

    async def resolved(self, stored: StoredApproval, resolution: Resolution, by: str) -> Envelope:
        """The envelope of a call of which a human has found out what became of it."""
        ...

    def record(self, stored: StoredApproval, envelope: Envelope) -> None:
        """Enter the end of a call into the call log."""
        ...


@dataclass(slots=True)
class _Run:
    """A call that is being carried out after its yes."""

    live: Live
    over: anyio.Event = field(default_factory=anyio.Event)


class ApprovalDesk:
    """All approvals of one engine. To be entered once the way of a call is there (`way`)."""

    def __init__(
        self,
        table: ApprovalTable,
        remembering: Remembering,
        rules: DeskRules,
        *,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        can_ask: Callable[[], bool],
        still_approves: Callable[[str], bool],
        on_event: Callable[[str, JsonObject], None],
    ) -> None:
        self.way: CallWay
        self.new_id = new_id
        self.remembering = remembering
        self._table = table
        self._rules = rules
        self._now = now
        self._latest = now()
        self._can_ask = can_ask
        self._still_approves = still_approves
        self._on_event = on_event
        self._pending: dict[str, PendingOf] = {}
        self._runs: dict[str, _Run] = {}
        self._followers: dict[str, list[Live]] = {}
        self._changes = 0
        self._changed = anyio.Event()
        self._look = anyio.Event()
        self._stack = AsyncExitStack()
        self._tasks: anyio.abc.TaskGroup | None = None
        self.is_draining: Callable[[], bool] = lambda: False

    async def __aenter__(self) -> ApprovalDesk:
        self._pending = await self._table.pending()
        for approval_id in await self._table.in_state(ApprovalState.STARTED):
            await self._interrupt_started(approval_id)
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(self._tasks.cancel_scope.cancel)
        self._tasks.start_soon(self._keep_time)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def drained(self) -> None:
        """Wait until no call runs any more that had its yes. None begins while the engine stops."""
        while self._runs:
            await next(iter(self._runs.values())).over.wait()

    # What a call on its way asks for.

    def now(self) -> datetime:
        """The time. A clock that is set back gives nothing its life again."""
        self._latest = max(self._latest, self._now())
        return self._latest

    def expiry(self) -> datetime:
        """When an approval that is made now expires."""
        return self.now() + timedelta(seconds=self._rules.expire_s)

    def url_of(self, approval_id: str) -> str | None:
        """Where people see it."""
        return self._rules.url.replace("{id}", approval_id) if self._rules.url else None

    def wait_s(self, wish: bool | float | None) -> float:
        """How long a call may wait for its answer."""
        if wish is None or wish is False:
            return 0.0
        return self._rules.max_wait_s if wish is True else min(float(wish), self._rules.max_wait_s)

    def remembered_for(self, permitted: Any, definition: str) -> str | None:
        """The remembered rule that lets a call through, by its id."""
        return self.remembering.rule_for(permitted, definition, self.now(), self._still_approves)

    def require_somebody_to_ask(self, tool: str) -> None:
        """Raises RequiresHumanApproval where there is nobody."""
        if not self._can_ask():
            raise RequiresHumanApproval(
                f"{tool} needs a human's yes, and this engine has nobody to ask: its operator has "
                "to make an approver (`fumehood approvers init` before the first start, or "
                "`approvers add`). Do not retry; tell the user what you wanted to do."
            )

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
        who, size = stored.approval.principal_id, size_of(stored)
        if self._is_full(who, size):  # as far as was counted: what is over was not taken off
            self._pending = await self._table.pending()
        own = self._pending.get(who, PendingOf())
        if self._is_full(who, size):
            raise RateLimited(
                f"{own.count} calls of yours wait for a human already, and one more could not be "
                "kept. Let some of them be decided first, or cancel them.",
                retry_after_ms=60_000,
            )
        self._pending[who] = PendingOf(own.count + 1, own.size_bytes + size)
        await self._table.create(stored)
        self._tell(stored.approval)

    def _is_full(self, who: str, size: int) -> bool:
        rules, own = self._rules, self._pending.get(who, PendingOf())
        return (
            sum(one.count for one in self._pending.values()) >= rules.max_pending
            or own.count >= rules.max_pending_of_one
            or own.size_bytes + size > rules.max_pending_bytes_of_one
        )

    async def wait(self, approval_id: str, seconds: float, live: Live | None) -> Envelope | None:
        """The call's answer, once there is one; None where it did not come in time."""
        followed = approval_id
        try:
            with anyio.move_on_after(seconds):
                while True:
                    changes = self._changes
                    if live is not None:
                        self._follow(followed, live)
                    stored = await self._table.get(followed)
                    if stored.approval.superseded_by is not None:
                        followed = stored.approval.superseded_by
                        continue
                    if stored.answer is not None:
                        return decode_envelope(stored.answer.encode())
                    await self._until_changed(changes)
        finally:
            for waiting in self._followers.values():
                if live in waiting:
                    waiting.remove(live)
        return None

    async def kept_answer(self, approval_id: str) -> Envelope:
        """The answer of a call that has one."""
        stored = await self._get(approval_id)
        return decode_envelope((stored.answer or "").encode())

    async def give_up(self, approval_id: str, by: str) -> None:
        """Take a call back whose caller has cancelled it, as far as it is not over."""
        with suppress(IdempotencyConflict, ResourceNotFound):
            await self._cancel((await self.newest(approval_id)).id, by)

    async def newest(self, approval_id: str) -> Approval:
        """The approval, or the one that asks again in its place."""
        approval = (await self._get(approval_id)).approval
        while approval.superseded_by is not None:
            approval = (await self._get(approval.superseded_by)).approval
        return approval

    # What a call that was approved asks for.

    async def begin(self, stored: StoredApproval) -> None:
        """Use the yes up: from now on the call counts as started, and is never started again.

        Raises:
            ApprovalExpired: it is too late, or was decided otherwise meanwhile.
            WriteFailed: nothing was used up, and nothing may run.
        """
        approval = stored.approval
        now = self.now()
        step = Step(
            "approval.started", "engine", now, frozenset({ApprovalState.APPROVED}),
            ApprovalState.STARTED, digest=approval.action_digest, in_time=True,
            columns={"started_at": _stamp(now)},
        )  # fmt: skip
        try:
            await self._change(approval.id, step)
        except (Stale, UnknownApproval):
            raise ApprovalExpired(
                "The yes for this call could not be used any more. Ask again if it is still needed."
            ) from None

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
        code = envelope.error.code if envelope.error is not None else "OK"
        now = self.now()
        step = Step(
            f"approval.{to.value}", "engine", now,
            frozenset({ApprovalState.APPROVED, ApprovalState.STARTED}), to,
            columns={"ended_at": _stamp(now), "code": code},
            document={"changed": list(changed)} if changed else {},
            answer=envelope, event="approval.ended", details={"code": code},
        )  # fmt: skip
        await self._until_kept(lambda: self._change(stored.approval.id, step))

    async def ask_again(self, stored: StoredApproval, new: StoredApproval) -> None:
        """End one and make another for the same call, because the workspace has changed."""
        now = self.now()
        step = Step(
            "approval.superseded", "engine", now,
            frozenset({ApprovalState.APPROVED, ApprovalState.STARTED}), ApprovalState.EXPIRED,
            columns={"ended_at": _stamp(now)},
            document={"changed": ["workspace"], "superseded_by": new.approval.id},
            event="approval.ended",
        )  # fmt: skip
        await self._until_kept(lambda: self._table.supersede(stored.approval.id, step, new))
        who = new.approval.principal_id
        own = self._pending.get(who, PendingOf())
        self._pending[who] = PendingOf(own.count + 1, own.size_bytes + size_of(new))
        for live in self._followers.get(stored.approval.id, []):
            self._follow(new.approval.id, live)
        self._tell(new.approval)

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
            raise _unknown() from None
        if principal is None:
            return page
        return page.model_copy(update={"items": tuple(_own_view(one, ()) for one in page.items)})

    async def show(self, approval_id: str, *, principal: Principal | None = None) -> Approval:
        """One of them. Raises ResourceNotFound."""
        stored = await self._get(approval_id)
        if principal is None:
            return stored.approval
        if stored.approval.principal_id != principal.id:
            raise _unknown()
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
        if len({one.approval_id for one in items}) != len(items):
            raise InvalidParams("An approval is decided twice.", fields=["items"])
        stored = [await self._get(one.approval_id) for one in items]
        is_self = [await self._require_approver(one.approval, by, peer) for one in stored]
        steps: list[tuple[str, Step]] = []
        answers: list[Envelope | None] = []
        for one, kept, own in zip(items, stored, is_self, strict=True):
            step, answer = await self._step(one, kept, by, channel, is_self_approval=own)
            steps.append((one.approval_id, step))
            answers.append(answer)
        try:
            after = await carry_through(self._write(steps, answers))
        except UnknownApproval:
            raise _unknown() from None
        except TooLate as late:
            raise _too_late(late.approval) from None
        except Stale as stale:
            raise _conflict(stale.approval) from None
        return tuple(kept.approval for kept in after)

    async def preview_remember(self, approval_id: str, wish: RememberWish) -> RememberedRule:
        """The rule that a yes with this wish would leave behind. Nothing is saved."""
        stored = await self._get(approval_id)
        return remembered_rule(stored.approval, wish, "rul_" + "0" * 24, "", self.now())

    async def resolve(
        self, approval_id: str, resolution: Resolution, by: Principal, *, peer: str | None = None
    ) -> Approval:
        """Say what became of an interrupted call; only a human can know, and not its caller."""
        stored = await self._get(approval_id)
        await self._require_approver(stored.approval, by, peer)
        to = ApprovalState.DONE if resolution.outcome == "done" else ApprovalState.FAILED
        now = self.now()
        step = Step(
            "approval.resolved", by.id, now, frozenset({ApprovalState.INTERRUPTED}), to,
            answer=await self.way.resolved(stored, resolution, by.id), event="approval.ended",
            details={"outcome": resolution.outcome, "note": resolution.note},
        )  # fmt: skip
        return (await self._decided(approval_id, step)).approval

    async def cancel_call(self, call_id: str, principal: Principal) -> Approval:
        """Take a call back by its id, as `cancel` does."""
        stored = await self._table.of_call(call_id)
        if stored is None or stored.approval.principal_id != principal.id:
            raise _unknown()
        return await self._cancel(stored.approval.id, principal.id)

    async def cancel(self, approval_id: str, principal: Principal) -> Approval:
        """Take a call back that waits, or end it where it runs already; by its own caller.

        Raises:
            ResourceNotFound: no such approval of this caller.
            IdempotencyConflict: it is over.
        """
        stored = await self._get(approval_id)
        if stored.approval.principal_id != principal.id:
            raise _unknown()
        return await self._cancel(approval_id, principal.id)

    async def remembered(self) -> Sequence[RememberedRule]:
        """Every remembered rule, those that were taken back included."""
        return self.remembering.all()

    async def forget(self, rule_id: str, by: Principal) -> RememberedRule:
        """Take a remembered rule back. Raises ResourceNotFound."""
        return await self.remembering.forget(rule_id, by, self.now())

    async def next_change(self, after: int, *, within_s: float = WATCH_S) -> int:
        """A number that grows with every change; waits, bounded, until it is beyond `after`."""
        if self._changes <= after:
            with anyio.move_on_after(within_s):
                await self._until_changed(after)
        return self._changes

    # Inside.

    async def _write(
        self, steps: Sequence[tuple[str, Step]], answers: Sequence[Envelope | None]
    ) -> Sequence[StoredApproval]:
        after = await self._table.change(steps)
        for kept, answer in zip(after, answers, strict=True):
            self._after(kept)
            if answer is not None:
                self.way.record(kept, answer)
        if any(step.remember is not None for _, step in steps):
            await self.remembering.reload()
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
        approval, decision, now = stored.approval, one.decision, self.now()
        if approval.state is not ApprovalState.PENDING:
            raise (
                _too_late(approval)
                if approval.state is ApprovalState.EXPIRED
                else _conflict(approval)
            )
        digest = approval.action_digest
        document: dict[str, Any] = {}
        edited = None
        if decision.arguments is not None:
            edited = await self.way.edited(stored, decision.arguments)
            digest = edited.digest
            document = _edited_document(stored, edited)
            await self._require_named(approval, document["approvers"], by, None)
        word = DecisionRecord(
            at=now, approver=by.id, channel=channel, decision=decision.decision,
            action_digest=digest, reason=decision.reason, edited=edited is not None,
            is_self_approval=is_self_approval,
        )  # fmt: skip
        details = {"channel": channel, "edited": edited is not None, "reason": decision.reason}
        if is_self_approval:
            details["self_approval"] = True
        if decision.decision == "deny":
            return await self._denial(one, stored, word, details)
        rule = None
        if decision.remember is not None:
            if approval.quorum > 1 or edited is not None:
                raise InvalidParams(
                    "What several have to agree to, or what was edited, is not remembered.",
                    fields=["remember"],
                )
            rule = remembered_rule(
                approval, decision.remember, self.new_id().replace("apr_", "rul_"), by.id, now
            )
            details["remembered"] = rule.id
        start_by = now + timedelta(seconds=self._rules.start_within_s)
        step = Step(
            "approval.approved", by.id, now, frozenset({ApprovalState.PENDING}),
            ApprovalState.APPROVED, version=one.version, in_time=True,
            columns={"decided_at": _stamp(now), "expires_at": _stamp(start_by)},
            document=document, decision=word, remember=rule, event="approval.decided",
            details=details, counts=self._still_approves,
        )  # fmt: skip
        return step, None

    async def _denial(
        self, one: OneOfSeveral, stored: StoredApproval, word: DecisionRecord, details: JsonObject
    ) -> tuple[Step, Envelope]:
        from fumehood.call.approve import denial  # it parks calls here

        now = word.at
        said = stored.approval.model_copy(update={"decisions": (*stored.approval.decisions, word)})
        answer = await self.way.answer(stored, denial(said))
        step = Step(
            "approval.denied", word.approver, now, frozenset({ApprovalState.PENDING}),
            ApprovalState.DENIED, version=one.version, in_time=True,
            columns={"decided_at": _stamp(now), "ended_at": _stamp(now), "code": "APPROVAL_DENIED"},
            decision=word, answer=answer, event="approval.decided",
            details=details,
        )  # fmt: skip
        return step, answer

    async def _require_approver(self, approval: Approval, by: Principal, peer: str | None) -> bool:
        """Whether it would be its caller's own yes. Raises PermissionDenied."""
        if Scope.APPROVE not in by.scopes:
            await self.note_refusal(approval.id, by, peer, "no scope")
            raise PermissionDenied("This identity may not approve. Do not retry.")
        is_own = approval.principal_id in (by.id, peer)
        if is_own and not self._rules.allow_self_approval:
            await self.note_refusal(approval.id, by, peer, "own call")
            raise PermissionDenied(
                "Nobody approves a call of their own. Another approver has to decide. Do not retry."
            )
        await self._require_named(approval, approval.approvers, by, peer)
        return is_own

    async def _require_named(
        self, approval: Approval, approvers: Sequence[str], by: Principal, peer: str | None
    ) -> None:
        if not may_decide(approvers, by.id):
            await self.note_refusal(approval.id, by, peer, "not among the approvers")
            raise PermissionDenied(
                f"Only {', '.join(approvers)} may decide this one. Do not retry."
            )

    async def note_refusal(
        self, approval_id: str | None, by: Principal, peer: str | None, why: str
    ) -> None:
        """Keep that somebody who may not, wanted to decide; None: on several at once."""
        about = None if approval_id is None else approval_id[:MAX_ID_CHARACTERS]
        values = {"approval_id": about, "by": by.id, "peer": peer, "why": why}
        self._on_event("approval.refused", values)
        await self._table.note("approval.refused", self.now(), values)

    async def _cancel(self, approval_id: str, by: str) -> Approval:
        run = self._runs.get(approval_id)
        if run is not None and run.live.cancel():
            with anyio.move_on_after(15):
                await run.over.wait()
            return (await self._get(approval_id)).approval
        stored = await self._get(approval_id)
        step, answer = await self._taken_back(stored, by)
        after = await self._decided(approval_id, step)
        self.way.record(after, answer)
        return after.approval

    async def _taken_back(self, stored: StoredApproval, by: str) -> tuple[Step, Envelope]:
        answer = await self.way.answer(stored, cancelled())
        now = self.now()
        step = Step(
            "approval.cancelled", by, now, WAITING, ApprovalState.CANCELLED,
            columns={"ended_at": _stamp(now), "code": "CANCELLED"},
            answer=answer, event="approval.ended",
        )  # fmt: skip
        return step, answer

    async def _decided(self, approval_id: str, step: Step) -> StoredApproval:
        try:
            return await self._change(approval_id, step)
        except UnknownApproval:
            raise _unknown() from None
        except Stale as stale:
            raise _conflict(stale.approval) from None

    async def _change(self, approval_id: str, step: Step) -> StoredApproval:
        return (await carry_through(self._write([(approval_id, step)], [None])))[0]

    async def _until_kept(self, write: Callable[[], Awaitable[object]]) -> None:
        """Write how something ended that cannot be done again: also once there is room again."""
        while True:
            try:
                await write()
            except WriteFailed as fault:
                if self.is_draining():
                    raise
                self._on_event("approval.end_not_kept", {"reason": str(fault)})
                await anyio.sleep(LOOK_S)
            else:
                return

    def _after(self, stored: StoredApproval) -> None:
        """Act on what is in the database now."""
        self._tell(stored.approval)
        if stored.approval.state is ApprovalState.APPROVED:
            self._start(stored.approval.id)

    def _tell(self, approval: Approval) -> None:
        self._on_event(
            "approval.changed",
            {"approval_id": approval.id, "state": approval.state.value, "tool": approval.tool},
        )
        self._changes += 1
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        self._look.set()

    async def _until_changed(self, after: int) -> None:
        while self._changes <= after:
            await self._changed.wait()

    def _follow(self, approval_id: str, live: Live) -> None:
        followers = self._followers.setdefault(approval_id, [])
        if live not in followers:
            followers.append(live)

    def _start(self, approval_id: str) -> None:
        """Have it carried out, unless it is already, or the engine is about to stop."""
        if self._tasks is None or approval_id in self._runs or self.is_draining():
            return
        followers = self._followers.setdefault(approval_id, [])
        self._runs[approval_id] = run = _Run(_live_for(followers))
        self._tasks.start_soon(self._carry_out, approval_id, run)

    async def _carry_out(self, approval_id: str, run: _Run) -> None:
        try:
            stored = await self._get(approval_id)
            if stored.approval.state is ApprovalState.APPROVED:
                await self.way.carry_out(stored, run.live)
        except (ReadFailed, WriteFailed, ShuttingDown, SandboxUnavailable, Stale) as fault:
            # It is as the database says; what still has its yes is looked for again.
            self._on_event("approval.not_carried_out", {"reason": str(fault)})
        except Exception as fault:  # others wait, too
            self._note_fault(approval_id, fault)
            await self._interrupt_started(approval_id)
        finally:
            del self._runs[approval_id]
            if not self._followers.get(approval_id):
                self._followers.pop(approval_id, None)
            run.over.set()

    async def _keep_time(self) -> None:
        """Start what has its yes, let expire what is over, warn of what is about to be."""
        while True:
            self._look = anyio.Event()
            try:
                await self._look_round()
                end = await self._table.next_end()
            except (ReadFailed, WriteFailed) as fault:
                self._on_event("approval.not_looked_after", {"reason": str(fault)})
                end = None
                await anyio.sleep(LOOK_S)
            with anyio.move_on_after(self._pause(end)):
                await self._look.wait()

    def _pause(self, end: str | None) -> float:
        if end is None:
            return 60.0
        left_s = (datetime.fromisoformat(end) - self.now()).total_seconds()
        # What is over and still here is being carried out, or the disk takes nothing.
        return min(max(left_s, 0.02), LOOK_S) if left_s > 0 else 1.0

    async def _look_round(self) -> None:
        now = self.now()
        warn_before = now + timedelta(seconds=self._rules.warn_s)
        over, near = await self._table.due(now, warn_before)
        for approval_id in over:
            try:
                await self._expire(approval_id)
            except (ReadFailed, WriteFailed):
                raise
            except Exception as fault:  # the others are to expire all the same
                self._note_fault(approval_id, fault)
                await anyio.sleep(LOOK_S)
        for approval_id in near:
            step = Step(
                "approval.expiring", "engine", now, frozenset({ApprovalState.PENDING}),
                columns={"warned_at": _stamp(now)}, event="approval.expiring",
            )  # fmt: skip
            await self._try(approval_id, step)
        for approval_id in await self._table.in_state(ApprovalState.APPROVED):
            self._start(approval_id)

    async def _expire(self, approval_id: str) -> None:
        if approval_id in self._runs:
            return
        stored = await self._get(approval_id)
        was = (
            "Nobody answered in time"
            if stored.approval.decided_at is None
            else ("The yes came, but the call could not be started in time")
        )
        error = ApprovalExpired(
            f"{was}: the approval of this call of {stored.approval.tool} has expired, which is "
            "no denial. Ask again only if it is still needed.",
            extra={"approval_id": approval_id},
        )
        answer = await self.way.answer(stored, error)
        now = self.now()
        step = Step(
            "approval.expired", "engine", now, WAITING, ApprovalState.EXPIRED,
            columns={"ended_at": _stamp(now), "code": "APPROVAL_EXPIRED"},
            answer=answer, event="approval.ended",
        )  # fmt: skip
        after = await self._try(approval_id, step)
        if after is not None:
            self.way.record(after, answer)

    def _note_fault(self, approval_id: str, fault: Exception) -> None:
        """A bug, or a row that cannot be understood: said in the log, and it stays as it is."""
        values: JsonObject = {"approval_id": approval_id, "reason": repr(fault)[:500]}
        self._on_event("approval.fault", values)

    async def _interrupt_started(self, approval_id: str) -> None:
        """End it as interrupted where it has begun, as far as it can be understood."""
        try:
            if (await self._table.get(approval_id)).approval.state is ApprovalState.STARTED:
                await self._interrupt(approval_id)
        except (ReadFailed, WriteFailed) as fault:
            self._on_event("approval.not_looked_after", {"reason": str(fault)})
        except Exception as fault:
            self._note_fault(approval_id, fault)

    async def _interrupt(self, approval_id: str) -> None:
        """The engine ended while it ran: whether it has acted nobody knows."""
        stored = await self._table.get(approval_id)
        error = OutcomeUnknown(
            f"The engine ended while this call of {stored.approval.tool} ran. It may have acted. "
            "Do not repeat it; a human has to find out and resolve it.",
            extra={"approval_id": approval_id},
        )
        answer = await self.way.answer(stored, error)
        now = self.now()
        step = Step(
            "approval.interrupted", "engine", now, frozenset({ApprovalState.STARTED}),
            ApprovalState.INTERRUPTED,
            columns={"ended_at": _stamp(now), "code": "OUTCOME_UNKNOWN"},
            answer=answer, event="approval.ended",
        )  # fmt: skip
        after = await self._change(approval_id, step)
        self.way.record(after, answer)

    async def _try(self, approval_id: str, step: Step) -> StoredApproval | None:
        """A change that somebody else may have made needless."""
        try:
            return await self._change(approval_id, step)
        except Stale:
            return None

    async def _get(self, approval_id: str) -> StoredApproval:
        try:
            return await self._table.get(approval_id)
        except UnknownApproval:
            raise _unknown() from None


def _live_for(followers: Sequence[Live]) -> Live:
    """One that hands on to whoever follows the call."""

    def output(stream: str, text: str) -> None:
        for live in followers:
            if live.output is not None:
                live.output(stream, text)

    def progress(percent: float, message: str) -> None:
        for live in followers:
            live.report(percent, message)

    return Live(output=output if followers else None, progress=progress)


def _edited_document(stored: StoredApproval, edited: Edited) -> dict[str, Any]:
    request = stored.request
    return {
        **_asked_for_edited(stored.approval, edited.decision),
        "arguments": edited.arguments,
        "preview": edited.preview,
        "binding": edited.document,
        "action_digest": edited.digest,
        "request": {
            "arguments": edited.request_arguments,
            "options": request.options,
            "token_id": request.token_id,
            "expected": edited.expected,
            "may_exceed_budget": request.may_exceed_budget,
            "hidden": list(request.hidden),
        },
    }


def _asked_for_edited(before: Approval, decision: Decision) -> dict[str, Any]:
    """Who has to agree to an edited call: whom its own rules want, and whom those before wanted.

    Raises:
        PermissionDenied: too few are wanted by both.
    """
    both = [names for names in (before.approvers, decision.approvers) if names]
    approvers = [name for name in both[0] if all(name in them for them in both)] if both else []
    quorum = max(before.quorum, decision.quorum)
    if both and len(approvers) < quorum:
        raise PermissionDenied(
            "The rules want other approvers for the edited call than for this one. Deny this one, "
            "and let the edited call be asked for."
        )
    asked: dict[str, Any] = {"approvers": approvers, "quorum": quorum}
    if decision.verdict is Verdict.ASK:
        asked |= {"rule": decision.rule, "asked_by": list(decision.asked_by),
                  "reason": decision.reason, "policy_version": decision.policy_version}  # fmt: skip
    return asked


def _own_view(approval: Approval, hidden: Sequence[str]) -> Approval:
    """What a caller sees of its own: not how it is bound, nor who may decide."""
    shown = {k: v for k, v in approval.arguments.items() if k not in hidden}
    return approval.model_copy(
        update={"binding": None, "arguments": shown, "approvers": (), "decisions": ()}
    )


def _unknown() -> ResourceNotFound:
    return ResourceNotFound("There is no such approval. Do not retry.")


def _too_late(approval: Approval) -> ApprovalExpired:
    return ApprovalExpired(
        f"It is too late: this approval expired at {approval.expires_at:%Y-%m-%d %H:%M:%S} UTC.",
        details={"state": approval.state.value, "version": approval.version},
    )


def _conflict(approval: Approval) -> IdempotencyConflict:
    is_open = approval.state in OPEN_STATES
    words = "It has changed since you looked" if is_open else f"It is {approval.state} already"
    return IdempotencyConflict(
        f"{words}. Look at it again.",
        details={"state": approval.state.value, "version": approval.version},
    )


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds")
