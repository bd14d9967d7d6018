"""Calls that parts make for a running program, such as a call of a tool or a request for approval.

Host side. Each call passes the whole pipeline as a call of the same caller, agent and session, and
is recorded with the program's call as its parent. Invariants: each call has the authority that the
caller has at that moment; while a call waits for a human, the program's clock is paused; when the
program's call ends, all its calls have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from fumehood.call_options import CallOptions, inherited
from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import EngineError, InternalError, PermissionDenied, RateLimited
from fumehood.core.json_types import JsonObject
from fumehood.core.tasks import run_to_completion
from fumehood.executors.base import CallHandle, HeldAction
from fumehood.observe.log import log_fault
from fumehood.pipeline.context import CallContext, PipelineServices, RunCall
from fumehood.pipeline.result import MAX_RESULT_BYTES
from fumehood.protocol.framing import MAX_OPEN_CALLS
from fumehood.sandbox.streams import RunClock


class CallsOfProgram:
    """Makes calls on behalf of one program, from the program's start to its end."""

    def __init__(self, parent: CallContext, services: PipelineServices, run_call: RunCall) -> None:
        self._parent = parent
        self._services = services
        self._run_call = run_call
        self._open: dict[asyncio.Task[None], CallHandle] = {}
        self._made = 0
        self._is_over = False
        self._waiting = 0
        self._waiting_since = self._waited_s = 0.0

    def start(
        self,
        tool: str,
        arguments: JsonObject,
        answer: Callable[[Envelope | EngineError], None],
        clock: RunClock,
    ) -> None:
        """Start a call of a tool, and return immediately. `answer` later receives the call's
        answer. `clock`, which measures the program's time, is paused while the call waits for a
        human.
        """
        handle = CallHandle(waiting=lambda is_waiting: self._on_waiting(clock, is_waiting))
        task = asyncio.create_task(self._run(self._request(tool, arguments), handle, answer))
        self._open[task] = handle
        task.add_done_callback(self._open.pop)

    async def ask(
        self, tool: str, arguments: JsonObject, action: HeldAction, clock: RunClock
    ) -> EngineError | None:
        """Request approval of an action, and wait until the action has been performed or refused.

        The request is a call of `tool`. `clock`, which measures the program's time, is paused while
        the request waits for a human. Return None if the action was performed, otherwise the error.
        """
        if len(self._open) >= MAX_OPEN_CALLS:
            return RateLimited(
                f"{MAX_OPEN_CALLS} requests of the program are already waiting.",
                retry_after_ms=1000,
            )
        if self._is_over:
            return PermissionDenied("The program has ended.")
        patience_s = self._patience_s(wanted=True)
        if patience_s <= 0:
            return PermissionDenied(
                "This needs a human's approval, but the program's call does not wait for approvals."
            )
        request = self._request(tool, arguments)
        # Every action is a new call, even if an earlier action was identical.
        own: JsonObject = {"new_call": True, "wait_for_approval": patience_s}
        request = replace(
            request,
            options=request.options.model_copy(update=own),
            context={"parent": self._parent.request.call_id},
            held=action,
        )
        wait = _Wait(action, lambda is_waiting: self._on_waiting(clock, is_waiting))
        handle = CallHandle(waiting=wait.on_waiting)
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = handle
        timer = asyncio.get_running_loop().call_later(patience_s, wait.give_up, handle)
        try:
            answer = await self._run_call(request, self._services, handle)
            if action.has_begun:  # even if the call was cancelled meanwhile
                return await action.ended()
        finally:
            timer.cancel()
            del self._open[task]
            action.withdraw()
        if wait.is_given_up:
            return PermissionDenied("No human decided in time.")
        return PermissionDenied(
            answer.error.message if answer.error else "The action was not performed."
        )

    def spend(self, *, requests: int = 0, passed_bytes: int = 0) -> bool:
        """Charge requests and bytes of the program to the gates. Return False if a gate does not
        allow them.
        """
        return all(
            hold.take(requests=requests, passed_bytes=passed_bytes)
            for _, hold in self._parent.holds
        )

    def cancel(self, task: asyncio.Task[None]) -> bool:
        """Cancel the approval request that `task` waits for. Return False if there is none."""
        handle = self._open.get(task)
        return handle is not None and handle.cancel()

    async def close(self) -> None:
        """Cancel the calls that are still running, and wait until they have ended."""
        self._is_over = True
        if self._open:
            await run_to_completion(self._end_open())

    async def _end_open(self) -> None:
        for handle in self._open.values():
            handle.cancel()
        while self._open:
            await asyncio.wait(self._open)

    def _request(self, tool: str, arguments: JsonObject) -> CallRequest:
        self._made += 1
        parent = self._parent.request
        options = parent.options
        return CallRequest(
            tool=tool,
            arguments=arguments,
            options=CallOptions(
                agent_id=options.agent_id,
                session_id=options.session_id,
                enable_retry=options.enable_retry,
                max_length=MAX_RESULT_BYTES,  # keeps its cached answer separate from shortened ones
                wait_for_approval=self._patience_s(),
                **inherited(options),
            ),
            principal=self._services.present(parent.principal),
            call_id=f"{parent.call_id}_{self._made}",
            trace_id=parent.trace_id,
            parent_id=parent.call_id,
            traceparent=parent.traceparent,
        )

    def _patience_s(self, *, wanted: bool | None = None) -> float:
        """Return for how many more seconds the program's calls may wait for approvals.

        If the program's own call has no option `wait_for_approval`, `wanted` is used as the value
        of this option.
        """
        asker, options = self._services.asker, self._parent.request.options
        waited_s = self._waited_s
        if self._waiting:
            waited_s += self._services.clock.monotonic() - self._waiting_since
        chosen = options.wait_for_approval
        return max(0.0, asker.wait_s(wanted if chosen is None else chosen) - waited_s)

    def _on_waiting(self, clock: RunClock, is_waiting: bool) -> None:
        """Record that one of the program's calls starts (`is_waiting`) or stops waiting for a
        human. The program's clock is paused while at least one call waits.
        """
        now = self._services.clock.monotonic()
        self._waiting += 1 if is_waiting else -1
        if is_waiting and self._waiting == 1:
            self._waiting_since = now
            self._parent.handle.report(0, "a tool that the program has called waits for approval")
            clock.pause(is_paused=True)
        elif not self._waiting:
            self._waited_s += now - self._waiting_since
            clock.pause(is_paused=False)

    async def _run(
        self,
        request: CallRequest,
        handle: CallHandle,
        answer: Callable[[Envelope | EngineError], None],
    ) -> None:
        if self._is_over:  # `close` ran before this task started and could not cancel it
            return
        ended: Envelope | EngineError
        try:
            ended = await self._run_call(request, self._services, handle)
        except Exception as fault:
            log_fault(self._services.log, "call.child_failed", fault)
            ended = InternalError("The engine failed internally.")
        answer(ended)


class _Wait:
    """The wait for a human's approval of a program's action."""

    def __init__(self, action: HeldAction, on_waiting: Callable[[bool], None]) -> None:
        self._action = action
        self._on_waiting = on_waiting
        self._is_waiting = False
        self.is_given_up = False
        action.on_begun = lambda: self.on_waiting(False)

    def give_up(self, handle: CallHandle) -> None:
        """Stop waiting for the approval, unless the action has begun."""
        if not self._action.has_begun:
            self.is_given_up = handle.cancel()

    def on_waiting(self, is_waiting: bool) -> None:
        """Pause the program's clock while the request waits for approval. Resume the clock when the
        action begins.
        """
        is_waiting = is_waiting and not self._action.has_begun
        if is_waiting is not self._is_waiting:
            self._is_waiting = is_waiting
            self._on_waiting(is_waiting)
