"""Stored calls: stores calls that need approval, and ends stored calls that will not run.

Host side. Uses the pipeline, `preview` and `requests`, and is used by `scheduler` and `service`.
`HumanAsker` is the `Asker` that the pipeline asks for approval. It stores a call with everything
that determines what the call will do. After the approval, `scheduler` runs the call. A call that is
denied, cancelled, expired, interrupted or resolved gets an envelope and a row in the call log like
any other call; `StoredCalls` makes both. Invariant: without a human's decision, a call passes only
by a remembered rule, and a held action with `always_asks` never passes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

import anyio
import anyio.to_thread

from fumehood.approvals import refusals
from fumehood.approvals import store as steps
from fumehood.approvals.model import (
    Approval,
    ApprovalState,
    Resolution,
    StoredApproval,
    StoredRequest,
)
from fumehood.approvals.preview import (
    action_of,
    definition_digest,
    edit_warning,
    full_reason,
    preview,
    sends_of,
)
from fumehood.approvals.requests import ApprovalRequests
from fumehood.approvals.store import Step
from fumehood.call_options import read_stored
from fumehood.call_options import stored as stored_options
from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    CallInProgress,
    EngineError,
    ExecutionError,
    IdempotencyConflict,
    RequiresHumanApproval,
    ResourceNotFound,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL
from fumehood.core.tasks import run_to_completion
from fumehood.executors.base import CallHandle
from fumehood.executors.effects import Effect
from fumehood.executors.outcome import cancelled
from fumehood.observe.trace_context import read_traceparent
from fumehood.pipeline.approve import Asked, Consent
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.claim import ClaimedCall, context_of
from fumehood.pipeline.context import CallContext, CallTrace, PipelineServices
from fumehood.pipeline.plan import Plan, place_of
from fumehood.pipeline.record import record_ending
from fumehood.pipeline.result import build_envelope
from fumehood.protocol.messages import decode_envelope

DENIED_FOR = timedelta(hours=24)
"""For this time after a denial, identical calls are also refused."""

TAKE_BACK_S = 10.0
"""Maximum number of seconds for which a cancelled caller waits until its stored call is cancelled
as well."""

RECORDED_S = 30.0
"""Maximum number of seconds for which the caller of an `external:` call waits until a human's
approval is recorded as the call's answer. Nothing runs in this time, so only a busy host needs more
than a few milliseconds."""


@dataclass(frozen=True, slots=True)
class HumanAsker:
    """Asks humans to approve calls. This is the pipeline's `Asker` in an engine whose approvers are
    humans.
    """

    requests: ApprovalRequests

    async def ask(
        self, claimed: ClaimedCall, plan: Plan, call: CallContext, services: PipelineServices
    ) -> Consent | Envelope:
        """Return the consent of a remembered rule that allows the call. If there is no such rule,
        store the call and wait for its answer.

        Raises:
            RequiresHumanApproval: the call waits for a human, or there are too few approvers.
            CallInProgress: the call was approved while its caller waited, and is still running.
            ApprovalDenied: a human denied an identical call less than `DENIED_FOR` ago.
            EngineError: the preview shows that the tool would fail with this error.
            RateLimited: too many calls are already waiting.
        """
        requests, permitted, claim = self.requests, claimed.permitted, claimed.claim
        sends = sends_of(permitted, plan, services)
        if (held := permitted.request.held) is None or not held.always_asks:
            definition = definition_digest(permitted.tool, permitted.request.context, sends)
            rule = requests.remembered.rule_for(
                permitted, definition, requests.now(), requests.eligibility.counts
            )
            if rule is not None:
                return Consent(permitted, lambda plan: requests.remembered.use(rule))
        requests.eligibility.require_enough(
            permitted.tool.definition.name, permitted.decision, permitted.principal.id
        )
        key = claim.key if claim is not None else None
        stored, effect = await self.new_approval(permitted, plan, services, key, call.repeat_key)
        if effect is not None and effect.error is not None:
            raise effect.error
        denied = await requests.table.denied_before(stored.approval, requests.now() - DENIED_FOR)
        if denied is not None:
            raise refusals.denial(denied, again=True)
        if plan.session is not None:
            services.sessions.note_use(plan.session.id)
        approval_id = await run_to_completion(self._park(stored, claimed, call))
        return await self.wait_for(approval_id, call)

    async def wait_for(self, approval_id: str, call: CallContext) -> Envelope:
        """Wait for the answer to a stored call, for as long as the option `wait_for_approval` of
        `call` allows. `call` is the call that waits: the stored call itself, or a repeat of it.

        Raises:
            RequiresHumanApproval: the stored call still waits for a human.
            CallInProgress: the stored call is still running.
        """
        wait_s = self.wait_s(call.request.options.wait_for_approval)
        handle, requests = call.handle, self.requests
        if call.request.tool.startswith(EXTERNAL) and not wait_s:
            approval = (await requests.table.get(approval_id)).approval
            wait_s = RECORDED_S if approval.state is not ApprovalState.PENDING else 0.0
        if wait_s:
            handle.begin()
            handle.report(0, f"waits for approval: {approval_id}")
            with handle.waiting_for_human():
                answer = await requests.wait(approval_id, wait_s, handle)
            if answer is not None:
                return await self._answered(answer, call)
        stored = await requests.table.get(approval_id)
        if stored.answer is not None:  # it has just been stored
            return await self._answered(decode_envelope(stored.answer.encode()), call)
        # A repeat is answered under the id of the call that it repeats.
        call.request = replace(call.request, call_id=stored.approval.call_id)
        requests.told(stored.approval.call_id)
        raise self._waits(stored.approval)

    def wait_s(self, wanted: bool | float | None) -> float:
        """Return how many seconds a call may wait for its approval.

        `wanted` is the call's option `wait_for_approval`: a number of seconds, or None or False for
        no wait. True means as long as the settings allow. The result never exceeds the maximum in
        the settings.
        """
        if wanted is None or wanted is False:
            return 0.0
        longest = self.requests.settings.max_wait_seconds
        return longest if wanted is True else min(float(wanted), longest)

    async def same_call(self, repeat_key: str, tool: str) -> str | None:
        """Return the approval id of the stored call that a new call of the tool repeats, or None.
        `repeat_key` identifies the new call's caller and action.
        """
        return await self.requests.same_call(repeat_key, tool)

    async def take_back(
        self, approval_id: str, call: CallContext, services: PipelineServices
    ) -> None:
        """Cancel a stored call after a caller that waited for it was cancelled. `call` is the
        context of the cancelled caller's call.

        Do nothing if the stored call has ended, or if it must continue
        (`ApprovalRequests.is_wanted`). Also do nothing if it is already decided and `call` did not
        request to wait (`wait_for_approval`).
        """
        with (
            anyio.move_on_after(TAKE_BACK_S, shield=True),
            suppress(IdempotencyConflict, ResourceNotFound),
        ):
            approval = (await self.requests.table.get(approval_id)).approval
            has_waited = self.wait_s(call.request.options.wait_for_approval) > 0
            if approval.state is not ApprovalState.PENDING and not has_waited:
                return
            if not self.requests.is_wanted(approval, by_program=call.request.parent_id is not None):
                await StoredCalls(services, self).cancel(approval_id, approval.principal_id)

    async def ending_of(self, call_id: str, principal_id: str) -> Envelope | EngineError | None:
        """Return the answer to the principal's stored call. If the call has not ended, return an
        error that says so.

        Return None if the principal has no stored call with this id.
        """
        stored = await self.requests.table.of_call(call_id)
        if stored is None or stored.approval.principal_id != principal_id:
            return None
        if stored.answer is None:
            return self._waits(stored.approval)
        return decode_envelope(stored.answer.encode())

    async def new_approval(
        self,
        permitted: PermittedCall,
        plan: Plan,
        services: PipelineServices,
        idempotency_key: str | None = None,
        repeat_key: str | None = None,
    ) -> tuple[StoredApproval, Effect | None]:
        """Build the approval that a call would request now. Return the approval and the call's
        effect, which is None if the tool has no preview. Nothing is stored.

        Raises:
            EngineError: the call's effect cannot be computed, or the request that the call would
                send cannot be built.
        """
        place = await place_of(plan, services.sessions)
        effect = await preview(permitted, plan, services.sessions)
        sends = sends_of(permitted, plan, services)
        action = action_of(permitted, plan, place, effect, sends)
        report, names = services.registry.secrets.report_unusable, action.document["secrets"]
        unusable = await anyio.to_thread.run_sync(report, names) if names else ()
        requests, now = self.requests, self.requests.now()
        last_end = services.sessions.last_end(plan.session.id) if plan.session is not None else None
        ends = [
            now + timedelta(seconds=requests.settings.expire_seconds),
            *([last_end] if last_end is not None else []),
        ]
        request, held, decision = permitted.request, permitted.request.held, permitted.decision
        if held is not None:  # the call cannot run after its program has stopped waiting
            ends.append(now + timedelta(seconds=self.wait_s(request.options.wait_for_approval)))
        found = services.parts.excesses(permitted.validated) if decision.may_exceed else ()
        excess = next((one for gate, one in found if gate.key in decision.may_exceed), None)
        binding = permitted.validated.binding
        tool, options = permitted.tool.definition, request.options
        approval = Approval(
            id=requests.new_id(),
            version=1,
            state=ApprovalState.PENDING,
            call_id=request.call_id,
            trace_id=request.trace_id,
            tool=tool.name,
            tool_version=tool.version,
            principal_id=permitted.principal.id,
            agent_id=options.agent_id,
            session_id=options.session_id,
            arguments=permitted.arguments,
            sends=sends,
            preview=effect.shown if effect is not None else context_of(request) or None,
            previewed_at=now if effect is not None else None,
            rule=decision.rule,
            asked_by=decision.asked_by,
            reason=full_reason(decision, excess.words if excess is not None else None, unusable),
            budget=excess.record if excess is not None else None,
            dangerous=tool.dangerous,
            approvers=decision.approvers,
            quorum=decision.quorum,
            decisions=(),
            policy_version=decision.policy_version,
            action_digest=action.digest,
            binding=action.document,
            created_at=now,
            expires_at=min(ends),
        )
        kept = StoredRequest(
            arguments=request.arguments,
            options=stored_options(options),
            token_id=permitted.principal.token_id,
            expected=effect.base if effect is not None else None,
            may_exceed=decision.may_exceed,
            hidden=tuple(sorted(binding.fixed)) if binding is not None else (),
            is_program=permitted.principal.is_program,
            parent_id=request.parent_id,
            context=request.context,
            traceparent=str(request.traceparent) if request.traceparent is not None else None,
            needs=held.needs if held is not None else None,
        )
        return StoredApproval(approval, kept, idempotency_key, repeat_key=repeat_key), effect

    async def _answered(self, answer: Envelope, call: CallContext) -> Envelope:
        """Return the stored answer for `call`. If `call` repeats the stored call, the answer is
        marked as a replay.

        Raises:
            ApprovalExpired: the answer is the approval of an `external:` call, which can be fetched
                only once and was already fetched.
        """
        first, own = answer.metadata.call_id or "", call.request.call_id
        if (
            answer.success
            and call.repeat_key is not None
            and call.request.tool.startswith(EXTERNAL)
        ):
            # The client runs this action itself, and could run it after each fetch.
            await self.requests.use_decision(first)
        else:
            call.handle.on_delivered = partial(self.requests.fetched, first)
        if first == own or call.repeat_key is None:
            return answer
        call.trace.tell("call.repeated", first_call_id=first)
        metadata = answer.metadata.model_copy(update={"idempotent_replay": True})
        return answer.model_copy(update={"metadata": metadata})

    async def _park(self, stored: StoredApproval, claimed: ClaimedCall, call: CallContext) -> str:
        """Store a call that waits for approval, and return the id of its approval.

        The call's idempotency key now belongs to the approval, and no longer to the running call.
        """
        held = claimed.permitted.request.held
        call.parked_as = approval_id = await self.requests.create(stored, held)
        if claimed.claim is not None:
            claimed.claim.handed_over()
        return approval_id

    def _waits(self, approval: Approval) -> RequiresHumanApproval | CallInProgress:
        url = self.requests.settings.url
        return refusals.waits(approval, url.replace("{id}", approval.id) if url else None)


@dataclass(frozen=True, slots=True)
class StoredCalls:
    """Continues and ends the stored calls of one engine."""

    services: PipelineServices
    asker: HumanAsker

    def request_of(
        self, stored: StoredApproval, arguments: JsonObject | None = None
    ) -> CallRequest:
        """Return the request of a stored call, with the authority that its caller has now.

        If `arguments` are given, they replace the stored arguments. The request's principal is None
        if the caller is no longer allowed to make calls. The request omits stored options that this
        engine does not know; `ApprovalScheduler.permit_again` refuses such a call.
        """
        approval, request = stored.approval, stored.request
        return CallRequest(
            tool=f"{approval.tool}@{approval.tool_version}",
            arguments=request.arguments if arguments is None else arguments,
            options=read_stored(request.options)[0],
            principal=self.asker.requests.eligibility.caller_of(stored),
            call_id=approval.call_id,
            trace_id=approval.trace_id,
            parent_id=request.parent_id,
            context=request.context,
            traceparent=read_traceparent(request.traceparent),
            held=self.asker.requests.held.get(approval.id),
        )

    def context_of(
        self,
        stored: StoredApproval,
        handle: CallHandle | None = None,
        arguments: JsonObject | None = None,
    ) -> CallContext:
        """Return a call context with which a stored call can continue. If `arguments` are given,
        they replace the stored arguments.
        """
        approval = stored.approval
        asked = Asked(
            approval.tool,
            approval.tool_version,
            approval.created_at,
            approval.decided_at,
            has_begun=approval.state in (ApprovalState.STARTED, ApprovalState.INTERRUPTED),
            edit_warning=edit_warning(stored),
        )
        clock, log = self.services.clock, self.services.log
        trace = CallTrace(approval.tool, approval.call_id, approval.trace_id, clock, log)
        handle = handle if handle is not None else CallHandle()
        return CallContext(self.request_of(stored, arguments), trace, handle, asked=asked)

    async def answer(self, stored: StoredApproval, error: EngineError) -> Envelope:
        """Return the envelope with this error, for a stored call that did not run or whose outcome
        is unknown.
        """
        return await build_envelope(self.context_of(stored), error, self.services)

    async def resolved(self, stored: StoredApproval, resolution: Resolution, by: str) -> Envelope:
        """Return the envelope of an interrupted call whose outcome a human has determined. `by` is
        the id of the human's principal.
        """
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
        """Record the end of a stored call in the call log."""
        record_ending(self.context_of(stored), envelope, self.services)

    async def end(
        self,
        stored: StoredApproval,
        error: EngineError,
        step: Callable[[datetime, Envelope], Step],
    ) -> StoredApproval:
        """End a stored call that does not run, or whose outcome is unknown. Record its end in the
        call log.

        `error` becomes the call's answer. `step` returns the approval's state change, given the
        time and the answer.

        Raises:
            ResourceNotFound, IdempotencyConflict: the approval's state has changed since it was
                read.
        """
        answer = await self.answer(stored, error)
        change = step(self.asker.requests.now(), answer)
        (after,) = await self.asker.requests.change((stored.approval.id, change))
        self.record(after, answer)
        return after

    async def cancel(self, approval_id: str, by: str) -> StoredApproval:
        """Cancel a stored call if it is waiting, or stop it if it is running. `by` is the caller's
        id.

        Raises:
            ResourceNotFound: there is no such approval.
            IdempotencyConflict: the call has already ended.
        """
        is_stopped = await self.asker.requests.runs.stop(approval_id)
        stored = await self.asker.requests.table.get(approval_id)
        if is_stopped:
            return stored
        return await self.end(stored, cancelled(), partial(steps.cancelled, by))
