"""The calls that an engine carries out now: each on its way through the spine, followed or not.

Part of the composition root. Above it `engine_composition`, below it `pipeline/`. Invariant: a call
that was taken has an end, also where whoever made it has left; when the engine is left, none runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio

from fumehood.core.call import CallBody, CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Principal
from fumehood.executors.handle import CallHandle
from fumehood.observe.clock import Clock, IdSource, timestamp
from fumehood.pipeline.run import run_call
from fumehood.pipeline.running import RunningCalls
from fumehood.pipeline.services import PipelineServices
from fumehood.pipeline.stream import StreamedCall
from fumehood.storage.recordings import RecordingStore


class Intake:
    """Whether calls are taken: from when it is open until it drains.

    Made before the calls, because the rooms that they pass through ask it.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_draining = False

    def takes_none(self) -> bool:
        """Whether new calls are refused."""
        return self.is_draining or not self.is_open


class EngineCalls:
    """Carries calls out. It drains `intake`, and leaves the refusing to the rooms.

    `output_bytes` is the most that a stream of a program can have.
    """

    def __init__(
        self,
        intake: Intake,
        rooms: PipelineServices,
        ids: IdSource,
        clock: Clock,
        spools: RecordingStore,
        *,
        output_bytes: int,
    ) -> None:
        self.running = RunningCalls()
        self.streamed: set[asyncio.Task[None]] = set()
        self._intake = intake
        self._rooms = rooms
        self._ids = ids
        self._clock = clock
        self._spools = spools
        self._output_bytes = output_bytes
        self._idle = anyio.Event()

    def run(
        self, tool: str, body: CallBody, principal: Principal | None, live: CallHandle
    ) -> Coroutine[Any, Any, Envelope]:
        """Carry out one call of somebody whose identity the face has established.

        No coroutine of its own: each that waits inside another costs every call a little.
        """
        return self._carry_out(self._request(tool, body, principal), live)

    def open_stream(self, tool: str, body: CallBody, principal: Principal | None) -> StreamedCall:
        """Carry out one call beside its caller, who follows its events or leaves."""
        request = self._request(tool, body, principal)
        call = StreamedCall(
            request,
            self._spools,
            output_bytes=self._output_bytes,
            timestamp=lambda: timestamp(self._clock.now()),
        )
        task = asyncio.create_task(self._run_streamed(request, call))
        self.streamed.add(task)
        task.add_done_callback(self.streamed.discard)
        return call

    def drain(self) -> None:
        """Take no new calls from now on; what runs goes on."""
        self._intake.is_draining = True
        if not self.running:
            self._idle.set()

    async def drained(self) -> None:
        """Wait, after `drain`, until no call runs any more."""
        await self._idle.wait()

    async def end_streamed(self) -> None:
        """End those that nobody waits for."""
        for task in self.streamed:
            task.cancel()
        await asyncio.gather(*self.streamed, return_exceptions=True)

    def _request(self, tool: str, body: CallBody, principal: Principal | None) -> CallRequest:
        return CallRequest(
            tool=tool,
            arguments=body.arguments,
            options=body.options,
            principal=principal,
            call_id=self._ids.call_id(),
            trace_id=body.options.trace_id or self._ids.trace_id(self._clock.now()),
        )

    async def _carry_out(self, request: CallRequest, live: CallHandle) -> Envelope:
        self.running.enter(request, live)
        try:
            return await run_call(request, self._rooms, live)
        finally:
            self.running.leave(request.call_id)
            if self._intake.is_draining and not self.running:
                self._idle.set()

    async def _run_streamed(self, request: CallRequest, call: StreamedCall) -> None:
        try:
            call.end(await self._carry_out(request, call.live))
        finally:
            call.drop()
