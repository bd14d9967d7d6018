"""Stored calls: the request that an approval keeps, and the ending of a call that does not run.

Host side, above the pipeline's services and below `pipeline/run`, `scheduler` and `service`. A
call that is denied, cancelled, expired, interrupted or resolved has an envelope and a row in the
call log like any other call; they are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import anyio

from fumehood.approvals import store as steps
from fumehood.approvals.model import Resolution, StoredApproval
from fumehood.approvals.store import Step
from fumehood.core.call import CallOptions, CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    EngineError,
    ExecutionError,
    IdempotencyConflict,
    ResourceNotFound,
)
from fumehood.core.json_types import JsonObject
from fumehood.executors.base import CallHandle
from fumehood.executors.outcome import cancelled
from fumehood.observe.trace_context import read_traceparent
from fumehood.pipeline.context import CallContext, CallTrace, PipelineServices
from fumehood.pipeline.record import record_ending
from fumehood.pipeline.result import build_envelope

TAKE_BACK_S = 10.0
"""Seconds that a cancelled caller waits at most until its call is taken back."""


@dataclass(frozen=True, slots=True)
class StoredCalls:
    """The stored calls of one engine."""

    services: PipelineServices

    def request_of(
        self, stored: StoredApproval, arguments: JsonObject | None = None
    ) -> CallRequest:
        """Return the request of a stored call, with its caller's current authority.

        `arguments` replace the stored ones. The principal is None if the caller may no longer call.
        """
        approval, request = stored.approval, stored.request
        return CallRequest(
            tool=f"{approval.tool}@{approval.tool_version}",
            arguments=request.arguments if arguments is None else arguments,
            options=CallOptions.model_validate(request.options),
            principal=self.services.approvals.eligibility.caller_of(stored),
            call_id=approval.call_id,
            trace_id=approval.trace_id,
            parent_id=request.parent_id,
            context=request.context,
            traceparent=read_traceparent(request.traceparent),
            held=self.services.approvals.held.get(approval.id),
        )

    def context_of(
        self,
        stored: StoredApproval,
        handle: CallHandle | None = None,
        arguments: JsonObject | None = None,
    ) -> CallContext:
        """Return a context in which to continue the call. `arguments` replace the stored ones."""
        approval = stored.approval
        clock, log = self.services.clock, self.services.log
        trace = CallTrace(approval.tool, approval.call_id, approval.trace_id, clock, log)
        handle = handle if handle is not None else CallHandle()
        return CallContext(self.request_of(stored, arguments), trace, handle, approval=stored)

    async def answer(self, stored: StoredApproval, error: EngineError) -> Envelope:
        """Return the envelope of a call that did not run, or whose outcome is unknown."""
        return await build_envelope(self.context_of(stored), error, self.services)

    async def resolved(self, stored: StoredApproval, resolution: Resolution, by: str) -> Envelope:
        """Return the envelope of an interrupted call after a human found out how it ended."""
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
        """Enter the end of the call into the call log."""
        record_ending(self.context_of(stored), envelope, self.services)

    async def end(
        self,
        stored: StoredApproval,
        error: EngineError,
        step: Callable[[datetime, Envelope], Step],
    ) -> StoredApproval:
        """End a call that does not run, or whose outcome is unknown, and enter it into the log.

        `step` makes the approval's state change from the time and the call's answer.

        Raises:
            ResourceNotFound, IdempotencyConflict: the approval's state has changed meanwhile.
        """
        approvals = self.services.approvals
        answer = await self.answer(stored, error)
        (after,) = await approvals.change((stored.approval.id, step(approvals.now(), answer)))
        self.record(after, answer)
        return after

    async def cancel(self, approval_id: str, by: str) -> StoredApproval:
        """Cancel a call that waits, or stop it if it runs.

        Raises:
            ResourceNotFound: there is no such approval.
            IdempotencyConflict: the call is over.
        """
        approvals = self.services.approvals
        is_stopped = await approvals.runs.stop(approval_id)
        stored = await approvals.table.get(approval_id)
        if is_stopped:
            return stored
        return await self.end(stored, cancelled(), partial(steps.cancelled, by))

    async def take_back(self, approval_id: str, by: str, *, by_program: bool) -> None:
        """Cancel a call whose caller was cancelled while waiting.

        The call stays if `ApprovalRequests.is_wanted` says so, or if it has already ended.
        """
        with (
            anyio.move_on_after(TAKE_BACK_S, shield=True),
            suppress(IdempotencyConflict, ResourceNotFound),
        ):
            approvals = self.services.approvals
            approval = (await approvals.table.get(approval_id)).approval
            if not approvals.is_wanted(approval, by_program=by_program):
                await self.cancel(approval_id, by)
