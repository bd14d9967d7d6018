"""Resume: an approved call runs, from the request that its approval keeps.

Host side, above the pipeline; `scheduler.py` calls it. The stored request passes every gate again
under present conditions: a disabled tool, a revoked identity or a new deny rule ends it. A new rule
that asks does not, because a human has approved. The action must be the approved one; otherwise
the call ends with `APPROVAL_EXPIRED` and the names of the differences. Invariant: the approval is
used up at the moment when the call starts, with its place already held, and only once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from fumehood.approvals.edit import Edited, asked_again
from fumehood.approvals.model import ApprovalState, StoredApproval
from fumehood.approvals.preview import Action, action_of, changed_fields, preview
from fumehood.approvals.stored_calls import StoredCalls
from fumehood.core.call import CallRequest
from fumehood.core.errors import (
    ApprovalExpired,
    Cancelled,
    CircuitOpen,
    EngineError,
    InvalidParams,
    PermissionDenied,
    RateLimited,
    SandboxUnavailable,
    ShuttingDown,
    WorkspaceChanged,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL
from fumehood.executors.effects import Effect
from fumehood.executors.handle import CallHandle
from fumehood.executors.outcome import Outcome, cancelled
from fumehood.pipeline.approve import approved_by_human, hidden_of, stored_approval
from fumehood.pipeline.authorize import PermittedCall, authorize
from fumehood.pipeline.build_envelope import build_envelope
from fumehood.pipeline.claim import claimed
from fumehood.pipeline.context import CallContext
from fumehood.pipeline.plan import make_plan, plan_now, until_place_is_known
from fumehood.pipeline.record import record_ending
from fumehood.pipeline.resolve import resolve
from fumehood.pipeline.run import cancelled_ending, hidden_fault, permit, run_approved
from fumehood.pipeline.services import PipelineServices
from fumehood.pipeline.validate import validate
from fumehood.storage.errors import ReadFailed, WriteFailed


class NotAsApproved(ApprovalExpired):
    """The call would now do something other than what was approved."""

    def __init__(self, changed: tuple[str, ...]) -> None:
        super().__init__(
            f"The call is no longer what was approved: {', '.join(changed)} changed since. "
            "Nothing was done. Ask again if it is still needed.",
            details={"changed": list(changed)},
        )
        self.changed = changed


@dataclass(frozen=True, slots=True)
class CallResumption:
    """Runs approved calls, and checks edited ones, with the gates of one engine."""

    calls: StoredCalls

    @property
    def services(self) -> PipelineServices:
        """The services of the pipeline."""
        return self.calls.services

    async def run(self, stored: StoredApproval, handle: CallHandle) -> None:
        """Run an approved call, and store its answer.

        Raises:
            ReadFailed, WriteFailed, ShuttingDown, SandboxUnavailable, CircuitOpen, RateLimited:
                nothing was done, and the approval is still valid.
            Stale: the approval was ended otherwise meanwhile, and nothing was done.
        """
        handle.attach()
        call = self.calls.context_of(stored, handle)
        try:
            ending, changed = await self._ending(stored, call)
            handle.close()
            if isinstance(ending, WorkspaceChanged):
                again = await self._asked_again(stored)
                if again is not None:
                    call.release()
                    await self.services.approvals.ask_again(stored, again)
                    return
            await self._end(stored, ending, call, changed)
        finally:
            if not call.has_begun:  # a call that began may have used all of its budget
                call.release()

    async def edited(self, stored: StoredApproval, arguments: JsonObject) -> Edited:
        """Check other arguments like those of a new call.

        Raises:
            InvalidParams: they do not fit the tool, or change the agent's fixed arguments.
            PermissionDenied: a rule forbids the edited call.
        """
        approval = stored.approval
        if approval.tool.startswith(EXTERNAL):
            raise InvalidParams(
                "The caller runs this tool itself, with its own arguments, so they cannot be "
                "edited. Deny the call, and say in the reason what should change.",
                fields=["arguments"],
            )
        given = _without_fixed(stored, arguments)
        permitted = self._permitted(self.calls.request_of(stored, given))
        effect, action = await self._previewed(permitted)
        if action.document["tool"] != f"{approval.tool}@{approval.tool_version}":
            raise InvalidParams("The tool has another version now.", fields=["arguments"])
        return Edited(
            request_arguments=given,
            arguments=permitted.arguments,
            preview=effect.shown if effect is not None else None,
            previewed_at=self.services.approvals.now() if effect is not None else None,
            expected=effect.base if effect is not None else None,
            digest=action.digest,
            document=action.document,
            decision=permitted.decision,
            exceeded=self.services.exceeded_if_approved(permitted),
            hidden=hidden_of(permitted),
        )

    async def previewed(self, stored: StoredApproval) -> tuple[Effect, Action] | None:
        """The effect that a waiting call would have now, and its action.

        None if its tool has no preview, if its session is busy, or if more than its files has
        changed: its start then reports that.

        Raises:
            EngineError: there is no preview now.
        """
        before = stored.approval.binding or {}
        if before.get("workspace") is None:
            return None
        permitted = self._permitted(self.calls.request_of(stored))
        plan = make_plan(permitted, self.services.walls, self.services.sessions)
        if plan.session is None or plan.session.is_busy:
            return None
        effect, action = await self._previewed(permitted)
        others = [one for one in changed_fields(before, action.document) if one != "workspace"]
        return None if effect is None or others else (effect, action)

    async def _ending(
        self, stored: StoredApproval, call: CallContext
    ) -> tuple[Outcome | EngineError, tuple[str, ...]]:
        """How the call ended, and the parts of its action that differed from the approved one."""
        services = self.services
        try:
            call.request = self._request_again(stored)
            permitted = permit(call, services)
            plan = await plan_now(permitted, services.walls, services.sessions)
            await until_place_is_known(plan)
            self._require_as_approved(permitted, stored)
            mine = claimed(permitted, None)  # the approval has its key
            approved = approved_by_human(mine, stored, lambda: self._require_unchanged(stored))
            outcome = await run_approved(call.trace.passed("approve", approved), call, services)
            return outcome, ()
        except EngineError as refusal:
            if _passes(refusal) and not call.has_begun and not call.handle.is_cancelled:
                raise  # nothing was done: the approval stays valid, and is tried again
            return refusal, _changed_by(refusal)
        except Exception as fault:
            return hidden_fault(call, fault), ()
        except asyncio.CancelledError:
            if not call.handle.close():
                raise  # the engine stops; a call that began will be found interrupted
            if not call.has_begun:
                return cancelled(), ()
            return cancelled_ending(call), ()

    async def _end(
        self,
        stored: StoredApproval,
        ending: Outcome | EngineError,
        call: CallContext,
        changed: tuple[str, ...],
    ) -> None:
        services = self.services
        envelope = await call.settle(await build_envelope(call, ending, services))
        if isinstance(ending, ApprovalExpired):
            to = ApprovalState.EXPIRED
        elif isinstance(ending, Cancelled) and not call.has_begun:
            to = ApprovalState.CANCELLED
        else:
            to = ApprovalState.DONE if envelope.success else ApprovalState.FAILED
        await services.approvals.end(stored, to, envelope, changed=changed)
        record_ending(call, envelope, services)

    async def _asked_again(self, stored: StoredApproval) -> StoredApproval | None:
        """A new approval for the same call, with its present effect; None if it is refused."""
        services = self.services
        try:
            permitted = self._permitted(self.calls.request_of(stored))
            effect, action = await self._previewed(permitted)
            if effect is not None and effect.error is not None:
                return None
            approvals, key = services.approvals, stored.idempotency_key
            again = stored_approval(
                permitted, action, effect, key, approvals.new_id(), approvals.now(),
                approvals.expiry(), services.exceeded_if_approved(permitted), stored.repeat_key,
            )  # fmt: skip
            return asked_again(stored, again)
        except EngineError:
            return None

    async def _previewed(self, permitted: PermittedCall) -> tuple[Effect | None, Action]:
        """The effect that the call would have now, and its action."""
        services = self.services
        plan = await plan_now(permitted, services.walls, services.sessions)
        await until_place_is_known(plan)
        effect = await preview(permitted, plan, services.sessions)
        return effect, action_of(permitted, plan, effect)

    def _permitted(self, request: CallRequest) -> PermittedCall:
        """The call after the first three gates."""
        services = self.services
        found = resolve(request, services.registry, services.agents, services.clock.now)
        validated = validate(found)
        return authorize(validated, services.policy, partial(services.is_over_budget, validated))

    def _require_unchanged(self, stored: StoredApproval) -> None:
        """Check again once the call has its place, for which it may have waited long.

        Its budget is reserved by now, so rules must not find it exceeded by the call itself.

        Raises:
            NotAsApproved: the action is another one.
            EngineError: a gate refuses the call now.
        """
        services = self.services
        request = self._request_again(stored)
        found = resolve(request, services.registry, services.agents, services.clock.now)
        validated = validate(found)
        permitted = authorize(validated, services.policy, lambda: False)
        self._require_as_approved(permitted, stored)

    def _require_as_approved(self, permitted: PermittedCall, stored: StoredApproval) -> None:
        """Raises NotAsApproved."""
        approval, action = stored.approval, self._action(permitted, stored)
        if action.digest != approval.action_digest:
            raise NotAsApproved(changed_fields(approval.binding or {}, action.document))

    def _request_again(self, stored: StoredApproval) -> CallRequest:
        """Raises PermissionDenied: the caller has no authority any more."""
        request = self.calls.request_of(stored)
        if request.principal is None:
            raise PermissionDenied(
                "The caller of this call is no longer allowed to make it. Do not retry."
            )
        return request

    def _action(self, permitted: PermittedCall, stored: StoredApproval) -> Action:
        """The present action. The executor compares the workspace when it changes it."""
        plan = make_plan(permitted, self.services.walls, self.services.sessions)
        workspace = (stored.approval.binding or {}).get("workspace")
        effect = None if workspace is None else Effect({}, workspace["base"], workspace["effect"])
        return action_of(permitted, plan, effect)


def _passes(refusal: EngineError) -> bool:
    """Whether the call can start later, so that its approval stays valid."""
    if isinstance(refusal, SandboxUnavailable):
        return refusal.may_retry
    return isinstance(refusal, ReadFailed | WriteFailed | ShuttingDown | CircuitOpen | RateLimited)


def _changed_by(refusal: EngineError) -> tuple[str, ...]:
    """The parts of the action that differed, if that is the reason of the refusal."""
    if isinstance(refusal, WorkspaceChanged):
        return ("workspace",)
    return refusal.changed if isinstance(refusal, NotAsApproved) else ()


def _without_fixed(stored: StoredApproval, arguments: JsonObject) -> JsonObject:
    """The arguments that a caller could give. The agent's fixed ones must be unchanged."""
    hidden = stored.request.hidden
    shown = stored.approval.arguments
    touched = [n for n in hidden if n in arguments and arguments[n] != shown.get(n)]
    if touched:
        raise InvalidParams(
            f"{touched[0]} is fixed by the agent's configuration and cannot be edited here.",
            fields=[f"arguments.{name}" for name in touched],
        )
    return {name: value for name, value in arguments.items() if name not in hidden}
