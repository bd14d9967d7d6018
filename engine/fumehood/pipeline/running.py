"""The running calls of an engine: start, follow and cancel them, and drain them at the end.

Host side. Above it `engine`; below it `run` and `stream`. Invariants: only a call's own principal
can find or cancel it; each accepted call ends with a recorded answer, even if its caller has left;
when the engine has stopped, no call is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from datetime import datetime
from typing import Any, NamedTuple

import anyio

from fumehood.core.call import MAX_TOOL_CHARACTERS, CallBody, CallRequest
from fumehood.core.call_log import RUNNING, CallRecord, RunningCall
from fumehood.core.decision import ExternalCall
from fumehood.core.envelope import Envelope, UsageReport
from fumehood.core.errors import ResourceNotFound, ShuttingDown
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.executors.handle import CallHandle
from fumehood.observe.clock import Clock, IdSource, timestamp
from fumehood.observe.tracing import INCOMING, read_traceparent
from fumehood.pipeline.run import run_call
from fumehood.pipeline.services import PipelineServices
from fumehood.pipeline.stream import StreamedCall, answer_of_unrun, lost_answer
from fumehood.redaction.redactor import Redactor
from fumehood.storage.recordings import RecordingReader, RecordingStore

END_PATIENCE_S = 15.0
"""Seconds that a cancellation waits for the call's end: more than a wall takes to end a program."""


class LiveCall(NamedTuple):
    """A call that has not ended."""

    request: CallRequest
    handle: CallHandle
    began_at: datetime

    def record(
        self, now: datetime, currency: str, redactor: Redactor, *, with_output: bool = False
    ) -> CallRecord:
        """Return what is known of it."""
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
                message=redactor.text(message)[0],
                stdout=heard.get("stdout", "") if with_output else None,
                stderr=heard.get("stderr", "") if with_output else None,
            ),
        )


class RunningCalls:
    """The running calls, by id."""

    def __init__(self) -> None:
        self._calls: dict[str, LiveCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[LiveCall]:
        return iter(list(self._calls.values()))

    def enter(self, request: CallRequest, live: CallHandle, now: datetime) -> None:
        """Add a call that starts."""
        self._calls[request.call_id] = LiveCall(request, live, now)

    def leave(self, call_id: str) -> None:
        """Remove a call that has ended."""
        del self._calls[call_id]

    def has(self, call_id: str, principal: Principal) -> bool:
        """Whether the principal has a running call with this id."""
        return self._own(call_id, principal) is not None

    async def cancel(self, call_id: str, principal: Principal) -> None:
        """Cancel a call, and wait at most `END_PATIENCE_S` until it has ended.

        Raises:
            ResourceNotFound: the principal has no such call, or it can no longer be cancelled.
        """
        live = self._own(call_id, principal)
        if live is None or not live.cancel():
            raise ResourceNotFound("No such call of yours is running. Do not retry.")
        with anyio.move_on_after(END_PATIENCE_S):
            await live.over.wait()

    def _own(self, call_id: str, principal: Principal) -> CallHandle | None:
        found = self._calls.get(call_id)
        by = found.request.principal if found is not None else None
        return found.handle if found and by is not None and by.id == principal.id else None


class Intake:
    """Whether an engine accepts calls: from its start until it drains.

    It is created before the pipeline's services, which query it.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_draining = False

    def takes_none(self) -> bool:
        """Whether new calls are refused."""
        return self.is_draining or not self.is_open


class Calls:
    """Runs calls. After `drain`, the pipeline refuses new calls."""

    def __init__(
        self,
        intake: Intake,
        services: PipelineServices,
        ids: IdSource,
        clock: Clock,
        recordings: RecordingStore,
    ) -> None:
        self.running = RunningCalls()
        self.streamed: set[asyncio.Task[None]] = set()
        self._intake = intake
        self._services = services
        self._ids = ids
        self._clock = clock
        self._recordings = recordings
        self._idle = anyio.Event()

    def run(
        self, tool: str, body: CallBody, principal: Principal | None, live: CallHandle
    ) -> Coroutine[Any, Any, Envelope]:
        """Run one call. The principal must already be authenticated.

        This returns the coroutine instead of awaiting it, because a nested one would slow down
        every call.
        """
        return self._run(self._request(tool, body, principal), live)

    def open_stream(self, tool: str, body: CallBody, principal: Principal | None) -> StreamedCall:
        """Start a call that runs independently of its caller, who may follow its events."""
        request = self._request(tool, body, principal)
        call = StreamedCall(
            request,
            self._recordings,
            timestamp=lambda: timestamp(self._clock.now()),
            redact=self._services.redactor.line,
        )
        call.live.is_delivered_later = True
        task = asyncio.create_task(self._run_streamed(request, call))
        self.streamed.add(task)
        task.add_done_callback(self.streamed.discard)
        return call

    async def follow(
        self, call_id: str, principal: Principal, after: str | None
    ) -> RecordingReader:
        """Return a reader of a recorded call's events that begins after the event `after`.

        Raises:
            ResourceNotFound: the principal has no such call, or its events are not kept.
            FilesAway: the bucket with its events cannot be used now.
        """
        await self._recordings.fetch(call_id, principal.id)
        reader = self._recordings.find(call_id, principal.id, after)
        if reader is None:
            raise ResourceNotFound(
                "The events of no such call of yours are kept. Look the call up by its call id "
                "instead."
            )
        return reader

    async def end_lost_streams(self) -> int:
        """Record an end for each recorded call that ran when the previous process ended.

        Return their number.
        """
        services = self._services
        return await self._recordings.end_lost(lambda call: lost_answer(call, services))

    def delivered(self, live: CallHandle) -> None:
        """Note that the caller has received its answer."""
        if live.answered_call is not None:
            self._services.approvals.fetched(live.answered_call)

    @property
    def redactor(self) -> Redactor:
        """What redacts the answers."""
        return self._services.redactor

    def given(self, live: LiveCall) -> JsonObject:
        """Return the arguments of a call that runs, redacted."""
        arguments: JsonObject = self._services.redactor.value(live.request.arguments)[0]
        return arguments

    def drain(self) -> None:
        """Accept no new calls; running calls continue."""
        self._intake.is_draining = True
        if not self.running:
            self._idle.set()

    async def drained(self) -> None:
        """Wait, after `drain`, until no call runs."""
        await self._idle.wait()

    async def end_streamed(self) -> None:
        """Cancel all calls that `open_stream` started, and wait until they have ended."""
        for task in self.streamed:
            task.cancel()
        await asyncio.gather(*self.streamed, return_exceptions=True)

    def _request(self, tool: str, body: CallBody, principal: Principal | None) -> CallRequest:
        """Build a new call. Its trace is that of the option `trace_id`, or of the HTTP request."""
        given, incoming = body.options.trace_id, INCOMING.get()
        own = read_traceparent(given) if given is not None else None
        parent = own or (read_traceparent(incoming) if incoming is not None else None)
        if parent is not None and (given is None or own is not None):
            given = parent.trace_id
        return CallRequest(
            tool,
            body.arguments,
            body.options,
            principal,
            self._ids.call_id(),
            given or self._ids.trace_id(self._clock.now()),
            traceparent=parent,
            context=body.context if isinstance(body, ExternalCall) else None,
        )

    async def _run(self, request: CallRequest, live: CallHandle) -> Envelope:
        self.running.enter(request, live, self._clock.now())
        try:
            envelope = await run_call(request, self._services, live)
            if not live.is_delivered_later:
                self.delivered(live)
            return envelope
        finally:
            self.running.leave(request.call_id)
            if self._intake.is_draining and not self.running:
                self._idle.set()

    async def _run_streamed(self, request: CallRequest, call: StreamedCall) -> None:
        try:
            call.end(await self._run(request, call.live))
        except BaseException:
            stopped = ShuttingDown("The engine stopped before the call ended.", retryable=False)
            call.end(await answer_of_unrun(request, stopped, self._services))
            raise
