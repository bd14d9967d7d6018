"""The running calls of an engine: start, follow and cancel them, and drain them at the end.

Host side. Used by `engine`; uses `run`. The events of a followed call go into a recording, and
from there to readers; the call never waits for readers. A call that is refused before it begins has
no recording: its caller gets the answer immediately. If the engine ends before the call, the call's
last event is an error, which this process writes when it stops, or the next process after a crash.
With `enable_streaming=false` the answer is the only event. Invariants: only a call's own principal
can find or cancel it; each accepted call ends with a recorded answer, even if its caller has left;
when the engine has stopped, no call is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import datetime
from typing import Any, NamedTuple

import anyio

from fumehood.core.call import (
    MAX_TOOL_CHARACTERS,
    CallBody,
    CallOptions,
    CallRequest,
    replaced,
)
from fumehood.core.call_log import RUNNING, CallRecord, RunningCall
from fumehood.core.decision import ExternalCall
from fumehood.core.envelope import Envelope, UsageReport
from fumehood.core.errors import (
    EngineError,
    OutcomeUnknown,
    ResourceNotFound,
    SandboxUnavailable,
    ShuttingDown,
    ToolNotFound,
)
from fumehood.core.events import Event, event_of
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.executors.base import CallHandle
from fumehood.observe.clock import Clock, IdSource, timestamp
from fumehood.observe.trace_context import INCOMING, read_traceparent
from fumehood.pipeline.context import CallContext, CallTrace, PipelineServices
from fumehood.pipeline.record import record_ending
from fumehood.pipeline.result import brief_error, build_envelope
from fumehood.pipeline.run import run_call
from fumehood.protocol import strict_json
from fumehood.protocol.messages import decode_envelope, encode_envelope
from fumehood.storage.errors import StoreError
from fumehood.storage.recordings import (
    RecordedCall,
    Recording,
    RecordingReader,
    RecordingStore,
)

END_PATIENCE_S = 15.0
"""Seconds that a cancellation waits for the call's end: more than a wall takes to end a program."""


class LiveCall(NamedTuple):
    """A call that has not ended."""

    request: CallRequest
    handle: CallHandle
    began_at: datetime

    def record(self, now: datetime, currency: str, *, with_output: bool = False) -> CallRecord:
        """Return the call as the call log shows it.

        `with_output` adds the end of the call's output.
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
    """Whether an engine accepts calls: from its start until it drains.

    An intake is created before the pipeline's services, which query it.
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
        self.running: dict[str, LiveCall] = {}
        """The calls that have not ended, by id."""
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

        This method returns the coroutine instead of awaiting it, because a nested coroutine would
        slow down every call.
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
            FilesAway: the remote place of its events cannot be used now.
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

        Return the number of these calls.
        """
        services = self._services
        return await self._recordings.end_lost(lambda call: lost_answer(call, services))

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
        """Cancel a call, and wait at most `END_PATIENCE_S` until it has ended.

        Return False if the call can no longer be cancelled.
        """
        if not live.cancel():
            return False
        with anyio.move_on_after(END_PATIENCE_S):
            await live.over.wait()
        return True

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
        """Build a new call. Its trace is given by the option `trace_id`, or by the HTTP request.

        A session's name becomes its id here: an approval or a key must not pass to the next session
        with that name.
        """
        options = body.options
        if options.session_id is not None and principal is not None:
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
            self._ids.call_id(),
            given or self._ids.trace_id(self._clock.now()),
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
            if self._intake.is_draining and not self.running:
                self._idle.set()

    async def _run_streamed(self, request: CallRequest, call: StreamedCall) -> None:
        try:
            call.end(await self._run(request, call.live))
        except BaseException:
            stopped = ShuttingDown("The engine stopped before the call ended.", retryable=False)
            context = _context(request, self._services)
            call.end(await build_envelope(context, stopped, self._services))
            raise


# -- followed calls -------------------------------------------------------------------------

STARTED = "started"
STOPPED = "From here on events are missing, because {}. The call goes on; its answer comes last."


class StreamedCall:
    """One recorded call. The pipeline uses the handle `live`; the engine calls `end`."""

    def __init__(
        self,
        request: CallRequest,
        recordings: RecordingStore,
        *,
        timestamp: Callable[[], str],
        redact: Callable[[str], str],
    ) -> None:
        self.call_id = request.call_id
        self._is_silent = not request.options.enable_streaming
        self.live = (
            CallHandle(begun=self._on_begun)
            if self._is_silent
            else CallHandle(
                output=self._on_output,
                progress=self._on_progress,
                begun=self._on_begun,
                retrying=self._on_retrying,
                drained=recordings.room.drained,
            )
        )
        self._ids = {"call_id": request.call_id, "trace_id": request.trace_id}
        self._timestamp = timestamp
        self._redact = redact
        self._offsets = {"stdout": 0, "stderr": 0}
        self._answer: Envelope | None = None
        self._settled = anyio.Event()
        self._recording: Recording | None = None
        self._reader: RecordingReader | None = None
        self._is_left = False
        self._recordings = recordings
        self._call = RecordedCall(
            call_id=request.call_id,
            principal_id=request.principal.id if request.principal is not None else "",
            tool=request.tool,
            trace_id=request.trace_id,
        )

    async def begun(self) -> Envelope | None:
        """Wait until the call begins.

        Return None, or the answer if the call ended before it began.

        If this method is cancelled, the `reader` is closed. Otherwise the caller must close the
        reader.
        """
        try:
            await self._settled.wait()
        except BaseException:
            self._is_left = True
            if self._reader is not None:
                self._reader.close()
            raise
        return self._answer

    def reader(self) -> RecordingReader:
        """Return the reader of all events of a call that has begun. The caller must close it."""
        assert self._reader is not None
        return self._reader

    def end(self, envelope: Envelope) -> None:
        """Record the call's answer as its last event."""
        if self._recording is None:
            self._answer = envelope
            self._settled.set()
        else:
            self._recording.finish(*last_record(envelope))

    def _on_begun(self) -> None:
        self._recording = self._recordings.new(self._call, self._notice)
        # The reader is opened before the first event: without one, the recording could be removed.
        self._reader = self._recording.reader()
        if self._is_left:
            self._reader.close()
        if not self._is_silent:
            self._on_progress(0, STARTED)
        self._settled.set()

    def _on_progress(self, percent: float, message: str) -> None:
        self._record("tool_progress", {"progress": percent, "message": message})

    def _on_output(self, stream: str, text: str) -> None:
        offset = self._offsets[stream]
        # ASCII text is counted without making a copy.
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        self._offsets[stream] = offset + size
        self._record("tool_output", {"stream": stream, "offset": offset, "text": text})

    def _on_retrying(self, retry_count: int, max_retries: int, error: EngineError) -> None:
        told = brief_error(error, self._redact).model_dump(mode="json")
        fields: JsonObject = {"retry_count": retry_count, "max_retries": max_retries}
        self._record("tool_retrying", fields | {"error": told})

    def _notice(self, why: str) -> JsonObject:
        return {"message": STOPPED.format(why), "metadata": self._metadata()}

    def _record(self, kind: str, fields: JsonObject) -> None:
        if self._recording is not None:
            fields["metadata"] = self._metadata()
            self._recording.record(kind, fields)

    def _metadata(self) -> JsonObject:
        return {**self._ids, "timestamp": self._timestamp()}


def last_record(envelope: Envelope) -> tuple[str, bytes]:
    """Return the kind and the data of a call's last event, which contains its answer."""
    return "tool_result" if envelope.success else "tool_error", encode_envelope(envelope)


async def events_of(call: StreamedCall) -> AsyncIterator[Event]:
    """Yield the events of a call that has begun, then close its reader."""
    reader = call.reader()
    try:
        while records := await reader.read():
            for record in records:
                event = event_of(record.kind, record.id, strict_json.loads(record.data))
                if event is not None:
                    yield event
    finally:
        reader.close()


# -- lost calls ----------------------------------------------------------------------------


async def lost_answer(call: RecordedCall, services: PipelineServices) -> tuple[str, bytes]:
    """Return the last event of a recorded call that was running when the previous process ended.

    The event has the call's stored answer, or an error if no answer was stored.
    """
    # This principal only names the caller in the log, so it has no scopes.
    principal = Principal(call.principal_id, frozenset(), frozenset())
    request = CallRequest(call.tool, {}, CallOptions(), principal, call.call_id, call.trace_id)
    try:
        found = await services.asker.ending_of(call.call_id, call.principal_id)
        found = found or await _of_key(call, services)
        code = await _logged(call, services)
    except (StoreError, ValueError):  # ValueError: another version of the engine wrote the answer
        found, code = None, None
    if isinstance(found, Envelope):
        return last_record(found)
    error = found if found is not None else _lost(call, code, services)
    context = _context(request, services)
    envelope = await build_envelope(context, error, services)
    if found is None and code is None:  # otherwise its end is or will be recorded elsewhere
        record_ending(context, envelope, services)
    return last_record(envelope)


async def _of_key(call: RecordedCall, services: PipelineServices) -> Envelope | None:
    """Return the answer that was stored under the call's idempotency key, or None."""
    answer = await services.keys.answer_of(call.principal_id, call.call_id)
    return None if answer is None else decode_envelope(answer.encode())


async def _logged(call: RecordedCall, services: PipelineServices) -> str | None:
    """Return the call's code from the call log, or None. The call log does not store answers."""
    try:
        return (await services.calls.get(call.principal_id, call.call_id)).code
    except ResourceNotFound:
        return None


def _lost(call: RecordedCall, code: str | None, services: PipelineServices) -> EngineError:
    if code is not None:
        return OutcomeUnknown(
            f"The call ended with {code}, but the engine ended before its answer was kept. Do not "
            "retry; a human must check what it did.",
            details={"logged_code": code},
        )
    if _may_repeat(call, services):
        return SandboxUnavailable(
            "The engine ended while the call ran. Its tool may be repeated: make the call again."
        )
    return OutcomeUnknown(
        "The engine ended while the call ran. It may have taken effect. Do not retry; a human must "
        "check whether it did."
    )


def _may_repeat(call: RecordedCall, services: PipelineServices) -> bool:
    """Whether repeating the call is harmless."""
    try:
        tool = services.registry.get(call.tool).definition
    except ToolNotFound:
        return False
    return tool.idempotent or tool.read_only


def _context(request: CallRequest, services: PipelineServices) -> CallContext:
    name = request.tool.partition("@")[0]
    trace = CallTrace(name, request.call_id, request.trace_id, services.clock, services.log)
    return CallContext(request, trace, CallHandle())
