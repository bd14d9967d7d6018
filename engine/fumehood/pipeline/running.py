"""The calls that an engine runs now: started, followed, cancelled, and drained at the end.

Host side. Above it `engine`; below it `run` and `stream`. Invariants: a call is cancelled only for
its own principal, and does not exist for others; each call that was accepted ends, even if its
caller has left; when the engine has stopped, none runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio

from fumehood.core.call import CallBody, CallRequest
from fumehood.core.decision import ExternalCall
from fumehood.core.envelope import Envelope
from fumehood.core.errors import ResourceNotFound, ShuttingDown
from fumehood.core.identity import Principal
from fumehood.executors.handle import CallHandle
from fumehood.observe.clock import Clock, IdSource, timestamp
from fumehood.observe.tracing import INCOMING, read_traceparent
from fumehood.pipeline.run import run_call
from fumehood.pipeline.services import PipelineServices
from fumehood.pipeline.stream import StreamedCall, answer_of_unrun, last_record, lost_answer
from fumehood.storage.recordings import RecordingReader, RecordingStore

END_PATIENCE_S = 15.0
"""How long a cancellation waits for the end: longer than a wall takes to end a program."""


class RunningCalls:
    """The running calls, by id."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[Principal | None, CallHandle]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, request: CallRequest, live: CallHandle) -> None:
        """Add a call."""
        self._calls[request.call_id] = request.principal, live

    def leave(self, call_id: str) -> None:
        """Remove a call that has ended."""
        del self._calls[call_id]

    def has(self, call_id: str, principal: Principal) -> bool:
        """Whether this call of this principal runs."""
        return self._own(call_id, principal) is not None

    async def cancel(self, call_id: str, principal: Principal) -> None:
        """Cancel a call, and wait, bounded, until nothing of it runs.

        Raises:
            ResourceNotFound: this principal has no such call that can still be cancelled.
        """
        live = self._own(call_id, principal)
        if live is None or not live.cancel():
            raise ResourceNotFound("No such call of yours is running. Do not retry.")
        with anyio.move_on_after(END_PATIENCE_S):
            await live.over.wait()

    def _own(self, call_id: str, principal: Principal) -> CallHandle | None:
        by, live = self._calls.get(call_id, (None, None))
        return live if by is not None and by.id == principal.id else None


class Intake:
    """Whether calls are accepted: from the moment it is open until it drains.

    It is made before the services of the pipeline, which ask it.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_draining = False

    def takes_none(self) -> bool:
        """Whether new calls are refused."""
        return self.is_draining or not self.is_open


class Calls:
    """Runs calls. It drains `intake`; the pipeline refuses calls that come later.

    `output_bytes` is the limit for each stream of a program.
    """

    def __init__(
        self,
        intake: Intake,
        services: PipelineServices,
        ids: IdSource,
        clock: Clock,
        recordings: RecordingStore,
        *,
        output_bytes: int,
    ) -> None:
        self.running = RunningCalls()
        self.streamed: set[asyncio.Task[None]] = set()
        self._intake = intake
        self._services = services
        self._ids = ids
        self._clock = clock
        self._recordings = recordings
        self._output_bytes = output_bytes
        self._idle = anyio.Event()

    def run(
        self, tool: str, body: CallBody, principal: Principal | None, live: CallHandle
    ) -> Coroutine[Any, Any, Envelope]:
        """Run one call. The face has authenticated the principal.

        No coroutine of its own: each nested one costs every call a little.
        """
        return self._run(self._request(tool, body, principal), live)

    def open_stream(self, tool: str, body: CallBody, principal: Principal | None) -> StreamedCall:
        """Run one call independently of its caller, who may follow its events."""
        request = self._request(tool, body, principal)
        call = StreamedCall(
            request,
            self._recordings,
            output_bytes=self._output_bytes,
            timestamp=lambda: timestamp(self._clock.now()),
            redact=self._services.redactor.line,
        )
        call.live.is_delivered_later = True
        task = asyncio.create_task(self._run_streamed(request, call))
        self.streamed.add(task)
        task.add_done_callback(self.streamed.discard)
        return call

    def follow(self, call_id: str, principal: Principal, after: str | None) -> RecordingReader:
        """Read the events of a call that is or was followed, from behind the event `after`.

        Raises:
            ResourceNotFound: this principal has no such call whose events are kept.
        """
        reader = self._recordings.find(call_id, principal.id, after)
        if reader is None:
            raise ResourceNotFound(
                "The events of no such call of yours are kept. Look the call up by its call id "
                "instead."
            )
        return reader

    async def end_lost_streams(self) -> int:
        """Record the ends of followed calls that the engine before did not end; their number."""
        services = self._services
        return await self._recordings.end_lost(
            lambda call: lost_answer(call, services, last_record)
        )

    def delivered(self, live: CallHandle) -> None:
        """Note that the caller has its answer."""
        if live.answered_call is not None:
            self._services.approvals.fetched(live.answered_call)

    def drain(self) -> None:
        """Accept no new calls; running calls continue."""
        self._intake.is_draining = True
        if not self.running:
            self._idle.set()

    async def drained(self) -> None:
        """Wait, after `drain`, until no call runs."""
        await self._idle.wait()

    async def end_streamed(self) -> None:
        """End the calls of `open_stream`."""
        for task in self.streamed:
            task.cancel()
        await asyncio.gather(*self.streamed, return_exceptions=True)

    def _request(self, tool: str, body: CallBody, principal: Principal | None) -> CallRequest:
        """A new call, in the trace of the request that makes it, or of the option `trace_id`."""
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
        self.running.enter(request, live)
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
