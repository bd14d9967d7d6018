"""Resume: a call goes on after its human's yes, from what was kept of it.

Host side, called by the desk. The stored request passes every gate again, as things are now: a
tool that was switched off, an identity that was taken back or a new deny rule ends it. A new
rule that would ask does not: it was asked. What is about to happen must be what the yes was
for; anything else is `APPROVAL_EXPIRED` with what has changed. The yes is used up in the moment
in which the call starts, with its place held already, and never twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from fumehood.approvals.action import Action, action_of, changed_fields
from fumehood.approvals.edit import Edited, asked_again
from fumehood.approvals.model import ApprovalState, Resolution
from fumehood.approvals.preview import preview
from fumehood.approvals.store import StoredApproval
from fumehood.core.call import CallOptions, CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    ApprovalExpired,
    Cancelled,
    EngineError,
    ExecutionError,
    InvalidParams,
    PermissionDenied,
    SandboxUnavailable,
    ShuttingDown,
    WorkspaceChanged,
)
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.executors.effects import Effect
from fumehood.executors.handle import CallHandle
from fumehood.executors.outcome import Outcome, cancelled
from fumehood.pipeline.approve import approved_by_human, hidden_of, stored_approval
from fumehood.pipeline.authorize import PermittedCall, authorize
from fumehood.pipeline.build_envelope import build_envelope
from fumehood.pipeline.claim import claimed
from fumehood.pipeline.context import CallContext, CallTrace
from fumehood.pipeline.plan import make_plan, plan_now, until_place_is_known
from fumehood.pipeline.record import record_ending
from fumehood.pipeline.resolve import resolve
from fumehood.pipeline.run import cancelled_ending, hidden_fault, permit, run_approved
from fumehood.pipeline.services import PipelineServices
from fumehood.pipeline.validate import validate
from fumehood.storage.errors import ReadFailed, WriteFailed

PrincipalAgain = Callable[[StoredApproval], Principal | None]
"""Who asked, with the authority that this caller has now; None where it has none any more."""


class NotAsApproved(ApprovalExpired):
    """What would happen now is something else than what the yes was for."""

    def __init__(self, changed: tuple[str, ...]) -> None:
        super().__init__(
            f"What would happen now is not what was approved: {', '.join(changed)} changed since. "
            "Nothing was done. Ask again if it is still needed.",
            details={"changed": list(changed)},
        )
        self.changed = changed


@dataclass(frozen=True, slots=True)
class CallResumption:
    """The way of calls that waited for a human."""

    rooms: PipelineServices
    principal_again: PrincipalAgain

    async def carry_out(self, stored: StoredApproval, live: CallHandle) -> None:
        """Carry an approved call out, and keep its answer.

        Raises:
            ReadFailed, WriteFailed, ShuttingDown, SandboxUnavailable: nothing was done, and the yes
                is still good.
            Stale: somebody else has ended it meanwhile, and nothing was done.
        """
        live.attach()
        call = self._context(stored, live)
        try:
            ending, changed = await self._ending(stored, call)
            live.close()
            if isinstance(ending, WorkspaceChanged):
                again = await self._ask_again(stored)
                if again is not None:
                    call.release()
                    await self.rooms.desk.ask_again(stored, again)
                    return
            await self._end(stored, ending, call, changed)
        finally:
            if not call.has_begun:  # what has, and was cut short, may have taken all of it
                call.release()

    async def _ending(
        self, stored: StoredApproval, call: CallContext
    ) -> tuple[Outcome | EngineError, tuple[str, ...]]:
        """What became of the call, and what was not as approved any more."""
        try:
            call.request = self._request_again(stored)
            permitted = permit(call, self.rooms)
            plan = await plan_now(permitted, self.rooms.walls, self.rooms.sessions)
            await until_place_is_known(plan)
            self._require_as_approved(permitted, stored)
            mine = claimed(permitted, None)  # its key is the approval's
            approved = approved_by_human(mine, stored, lambda: self._require_unchanged(stored))
            outcome = await run_approved(call.trace.passed("approve", approved), call, self.rooms)
            return outcome, ()
        except EngineError as refusal:
            if _passes(refusal) and not call.has_begun and not call.handle.is_cancelled:
                raise  # nothing was done: the yes is still good, and is tried again
            return refusal, _changed_by(refusal)
        except Exception as fault:
            return hidden_fault(call, fault), ()
        except asyncio.CancelledError:
            if not call.handle.close():
                raise  # the engine stops; what has begun will be found to be interrupted
            if not call.has_begun:
                return cancelled(), ()
            return cancelled_ending(call), ()

    async def edited(self, stored: StoredApproval, arguments: JsonObject) -> Edited:
        """Other arguments, checked like those of a new call.

        Raises:
            InvalidParams: they do not fit the tool, or change what is fixed for the agent.
            PermissionDenied: a rule forbids the edited call.
        """
        rooms, approval = self.rooms, stored.approval
        given = _without_fixed(stored, arguments)
        request = self._request(stored, given)
        permitted = self._pass(request)
        plan = await plan_now(permitted, rooms.walls, rooms.sessions)
        await until_place_is_known(plan)
        effect = await preview(permitted, plan, rooms.sessions)
        action = action_of(permitted, plan, effect)
        if action.document["tool"] != f"{approval.tool}@{approval.tool_version}":
            raise InvalidParams("The tool has another version now.", fields=["arguments"])
        return Edited(
            request_arguments=given,
            arguments=permitted.arguments,
            preview=effect.shown if effect is not None else None,
            expected=effect.base if effect is not None else None,
            digest=action.digest,
            document=action.document,
            decision=permitted.decision,
            exceeded=rooms.exceeded_if_approved(permitted),
            hidden=hidden_of(permitted),
        )

    async def answer(self, stored: StoredApproval, error: EngineError) -> Envelope:
        """The envelope of a call that ends without having run, or of which nobody knows."""
        return await build_envelope(self._context(stored), error, self.rooms)

    async def resolved(self, stored: StoredApproval, resolution: Resolution, by: str) -> Envelope:
        """The envelope of a call of which a human has found out what became of it."""
        note = f" {resolution.note}" if resolution.note else ""
        failed = await self.answer(
            stored,
            ExecutionError(
                "This call was interrupted, and a human has found that it did not take effect."
                f"{note}",
                extra={"approval_id": stored.approval.id},
            ),
        )
        if resolution.outcome == "failed":
            return failed
        said = {"outcome": resolution.outcome, "note": resolution.note, "by": by}
        return failed.model_copy(
            update={"success": True, "status": "success", "error": None,
                    "data": {"resolution": said}}
        )  # fmt: skip

    def record(self, stored: StoredApproval, envelope: Envelope) -> None:
        """Enter its end into the call log."""
        record_ending(self._context(stored), envelope, self.rooms.calls)

    async def _end(
        self,
        stored: StoredApproval,
        ending: Outcome | EngineError,
        call: CallContext,
        changed: tuple[str, ...],
    ) -> None:
        envelope = await call.settle(await build_envelope(call, ending, self.rooms))
        if isinstance(ending, ApprovalExpired):
            to = ApprovalState.EXPIRED
        elif isinstance(ending, Cancelled) and not call.has_begun:
            to = ApprovalState.CANCELLED
        else:
            to = ApprovalState.DONE if envelope.success else ApprovalState.FAILED
        await self.rooms.desk.end(stored, to, envelope, changed=changed)
        record_ending(call, envelope, self.rooms.calls)

    async def _ask_again(self, stored: StoredApproval) -> StoredApproval | None:
        """The same call as a new approval, with what it would change now."""
        rooms = self.rooms
        try:
            permitted = self._pass(self._request(stored))
            plan = await plan_now(permitted, rooms.walls, rooms.sessions)
            await until_place_is_known(plan)
            effect = await preview(permitted, plan, rooms.sessions)
            action = action_of(permitted, plan, effect)
            desk, key = rooms.desk, stored.idempotency_key
            again = stored_approval(
                permitted, action, effect, key, desk.new_id(), desk.now(), desk.expiry(),
                rooms.exceeded_if_approved(permitted),
            )  # fmt: skip
            return asked_again(stored, again)
        except EngineError:
            return None

    def _require_unchanged(self, stored: StoredApproval) -> None:
        """Look again, once the call has its place: that may have taken long.

        Its budget is reserved by now, so that rules do not find it exceeded by the call itself.

        Raises:
            NotAsApproved: it would be something else.
            EngineError: a gate would not let it through any more.
        """
        rooms = self.rooms
        today = rooms.clock.now().date()
        request = self._request_again(stored)
        validated = validate(resolve(request, rooms.registry, rooms.agents, today))
        permitted = authorize(validated, rooms.policy, lambda: False)
        self._require_as_approved(permitted, stored)

    def _require_as_approved(self, permitted: PermittedCall, stored: StoredApproval) -> None:
        """Raises NotAsApproved."""
        approval, action = stored.approval, self._action(permitted, stored)
        if action.digest != approval.action_digest:
            raise NotAsApproved(changed_fields(approval.binding or {}, action.document))

    def _request_again(self, stored: StoredApproval) -> CallRequest:
        """Raises PermissionDenied: who asked counts no more."""
        request = self._request(stored)
        if request.principal is None:
            raise PermissionDenied(
                "Whoever asked for this call may not make it any more. Do not retry."
            )
        return request

    def _pass(self, request: CallRequest) -> PermittedCall:
        rooms = self.rooms
        today = rooms.clock.now().date()
        validated = validate(resolve(request, rooms.registry, rooms.agents, today))
        return authorize(validated, rooms.policy, rooms.over_budget(validated))

    def _action(self, permitted: PermittedCall, stored: StoredApproval) -> Action:
        """What would happen now. The workspace is compared by whoever changes it."""
        plan = make_plan(permitted, self.rooms.walls, self.rooms.sessions)
        workspace = (stored.approval.binding or {}).get("workspace")
        effect = None if workspace is None else Effect({}, workspace["base"], workspace["effect"])
        return action_of(permitted, plan, effect)

    def _request(self, stored: StoredApproval, arguments: JsonObject | None = None) -> CallRequest:
        approval, kept = stored.approval, stored.request
        return CallRequest(
            tool=f"{approval.tool}@{approval.tool_version}",
            arguments=kept.arguments if arguments is None else arguments,
            options=CallOptions.model_validate(kept.options),
            principal=self.principal_again(stored),
            call_id=approval.call_id,
            trace_id=approval.trace_id,
        )

    def _context(self, stored: StoredApproval, live: CallHandle | None = None) -> CallContext:
        approval = stored.approval
        clock, log = self.rooms.clock, self.rooms.log
        trace = CallTrace(approval.tool, approval.call_id, approval.trace_id, clock, log)
        handle = live if live is not None else CallHandle()
        return CallContext(self._request(stored), trace, handle, approval=stored)


def _passes(refusal: EngineError) -> bool:
    """Whether it keeps a call from starting only now, and is no reason to burn its yes."""
    if isinstance(refusal, SandboxUnavailable):
        return refusal.may_retry
    return isinstance(refusal, ReadFailed | WriteFailed | ShuttingDown)


def _changed_by(refusal: EngineError) -> tuple[str, ...]:
    """What was not as approved any more, where that is what it says."""
    if isinstance(refusal, WorkspaceChanged):
        return ("workspace",)
    return refusal.changed if isinstance(refusal, NotAsApproved) else ()


def _without_fixed(stored: StoredApproval, arguments: JsonObject) -> JsonObject:
    """What a caller would have given. What is fixed for the agent stays as it is."""
    hidden = stored.request.hidden
    shown = stored.approval.arguments
    touched = [n for n in hidden if n in arguments and arguments[n] != shown.get(n)]
    if touched:
        raise InvalidParams(
            f"{touched[0]} is fixed by the agent's configuration and cannot be edited here.",
            fields=[f"arguments.{name}" for name in touched],
        )
    return {name: value for name, value in arguments.items() if name not in hidden}
