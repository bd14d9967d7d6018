"""The running calls of an engine: start and cancel them, and drain them at the end.

Host side. Used by `engine`; uses `run`. A call runs either in its caller's task (`run`), or in a
separate task that survives its caller (`start`). Invariants: only a call's own principal can find
or cancel it; each accepted call ends with an answer, even if its caller has left; when the engine
has stopped, no call is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, NamedTuple

import anyio

from fumehood.core.call import MAX_TOOL_CHARACTERS, CallBody, CallRequest, replaced
from fumehood.core.call_log import RUNNING, CallRecord, RunningCall
from fumehood.core.decision import ExternalCall
from fumehood.core.envelope import Envelope, UsageReport
from fumehood.core.errors import ShuttingDown
from fumehood.core.identity import Principal
from fumehood.executors.base import CallHandle
from fumehood.observe.clock import Clock, IdSource, timestamp
from fumehood.observe.trace_context import INCOMING, read_traceparent
from fumehood.pipeline.context import PipelineServices, context_of
from fumehood.pipeline.result import build_envelope
from fumehood.pipeline.run import run_call

END_PATIENCE_S = 15.0
"""Maximum seconds that `cancel` waits for the call's end. This is longer than a wall takes to end a
program."""


class LiveCall(NamedTuple):
    """A call that has not ended."""

    request: CallRequest
    handle: CallHandle
    began_at: datetime

    def record(self, now: datetime, currency: str, *, with_output: bool = False) -> CallRecord:
        """Return the call in the form of a call log entry. `now` is the current time, and
        `currency` is the currency of the entry's cost.

        With `with_output`, the entry includes the last output of the call.
        """
        request, handle = self.request, self.handle
        tool, _, version = request.tool.partition("@")
        progress, message = handle.progress or (None, "")
        heard = handle.heard if with_output else {}
        return CallRecord(
            call_id=request.call_id,
            timestamp=timestamp(self.began_at),
            principal_id=request.principal.id if request.principal is not None else "",
            agent_id=request.options.agent_id,
            session_id=request.options.session_id,
            trace_id=request.trace_id,
            tool_name=tool[:MAX_TOOL_CHARACTERS],
            tool_version=version[:MAX_TOOL_CHARACTERS] or None,
            code=RUNNING,
            ended_by=None,
            execution_time_ms=round((now - self.began_at).total_seconds() * 1e3, 3),
            cpu_ms=None,
            cost=UsageReport().cost,
            currency=currency,
            input_tokens=0,
            output_tokens=0,
            tokens_used=0,
            parent_id=request.parent_id,
            running=RunningCall(
                is_waiting=handle.is_waiting,
                progress=progress,
                message=message,
                stdout=heard.get("stdout", "") if with_output else None,
                stderr=heard.get("stderr", "") if with_output else None,
            ),
        )


class Intake:
    """Says whether an engine accepts new calls. The engine accepts calls from its start until it
    drains.

    The pipeline's services query this object. It is not part of `Calls`, because `Calls` is created
    after the services.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_draining = False

    def takes_none(self) -> bool:
        """Whether the engine refuses new calls."""
        return self.is_draining or not self.is_open


class Calls:
    """Runs the calls of one engine. After `drain`, the pipeline refuses new calls."""

    def __init__(
        self, intake: Intake, services: PipelineServices, ids: IdSource, clock: Clock
    ) -> None:
        self.running: dict[str, LiveCall] = {}
        """Call id → call that has not ended."""
        self.started: set[asyncio.Task[None]] = set()
        """The tasks of calls that `start` began."""
        self.intake = intake
        self._services = services
        self.ids = ids
        self._clock = clock
        self._idle = anyio.Event()

    def run(
        self, tool: str, body: CallBody, principal: Principal | None, live: CallHandle
    ) -> Coroutine[Any, Any, Envelope]:
        """Return a coroutine that runs a call of `tool` and returns the call's envelope.

        If `principal` is None, the caller is unknown, and the call is refused. The caller uses
        `live` to follow and cancel the call.
        """
        # This method is not a coroutine itself, because a nested coroutine would slow down every
        # call.
        return self._run(self.request(tool, body, principal), live)

    def start(
        self, request: CallRequest, live: CallHandle, answered: Callable[[Envelope], object]
    ) -> None:
        """Start a call in a separate task, which continues if the caller's task ends.

        The caller uses `live` to follow and cancel the call. When the call has ended, `answered` is
        called with its answer. If the engine stops before that, the answer is the error
        `ShuttingDown`.
        """
        live.is_delivered_later = True
        task = asyncio.create_task(self._run_apart(request, live, answered))
        self.started.add(task)
        task.add_done_callback(self.started.discard)

    def delivered(self, live: CallHandle) -> None:
        """Record that the caller has received the answer to its call."""
        if live.on_delivered is not None:
            live.on_delivered()

    def own(self, call_id: str, principal: Principal) -> CallHandle | None:
        """Return the handle of a running call of this principal, or None."""
        found = self.running.get(call_id)
        by = found.request.principal if found is not None else None
        return found.handle if found and by is not None and by.id == principal.id else None

    async def cancel(self, live: CallHandle) -> bool:
        """Cancel a call, and wait up to `END_PATIENCE_S` seconds for its end.

        Return False if the call can no longer be cancelled.
        """
        if not live.cancel():
            return False
        with anyio.move_on_after(END_PATIENCE_S):
            await live.over.wait()
        return True

    def drain(self) -> None:
        """Accept no new calls; running calls continue."""
        self.intake.is_draining = True
        if not self.running:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no call is running. Call `drain` first."""
        await self._idle.wait()

    async def end_started(self) -> None:
        """Cancel all calls that `start` began, and wait until they have ended."""
        for task in self.started:
            task.cancel()
        await asyncio.gather(*self.started, return_exceptions=True)

    def request(self, tool: str, body: CallBody, principal: Principal | None) -> CallRequest:
        """Build the request of a new call. Its trace comes from the option `trace_id` or from the
        HTTP request. If neither names a trace, a new trace id is made.

        If the option `session_id` is a session's name, it is replaced by the session's id.
        """
        options = body.options
        if options.session_id is not None and principal is not None:
            # With a name, an approval or an idempotency key could apply to a later session that has
            # the same name.
            session_id = self._services.sessions.id_of(principal, options.session_id)
            options = replaced(options, session_id=session_id)
        given, incoming = body.options.trace_id, INCOMING.get()
        own = read_traceparent(given) if given is not None else None
        parent = own or (read_traceparent(incoming) if incoming is not None else None)
        if parent is not None and (given is None or own is not None):
            given = parent.trace_id
        return CallRequest(
            tool,
            body.arguments,
            options,
            principal,
            self.ids.call_id(),
            given or self.ids.trace_id(self._clock.now()),
            traceparent=parent,
            context=body.context if isinstance(body, ExternalCall) else None,
        )

    async def _run(self, request: CallRequest, live: CallHandle) -> Envelope:
        self.running[request.call_id] = LiveCall(request, live, self._clock.now())
        try:
            envelope = await run_call(request, self._services, live)
            if not live.is_delivered_later:
                self.delivered(live)
            return envelope
        finally:
            del self.running[request.call_id]
            if self.intake.is_draining and not self.running:
                self._idle.set()

    async def _run_apart(
        self, request: CallRequest, live: CallHandle, answered: Callable[[Envelope], object]
    ) -> None:
        try:
            answered(await self._run(request, live))
        except BaseException:
            stopped = ShuttingDown("The engine stopped before the call ended.", retryable=False)
            context = context_of(request, self._services)
            answered(await build_envelope(context, stopped, self._services))
            raise
