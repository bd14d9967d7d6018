"""A followed call: its events go into a recording, and from there to readers.

Host side, in the event loop. The call never waits for readers. If a call is refused before it
begins, it has no recording, and its caller gets the answer immediately. If the caller sends
`enable_streaming=false`, the answer is the only event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import anyio

from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.executors.base import CallHandle
from fumehood.pipeline.result import brief_error
from fumehood.protocol import strict_json
from fumehood.protocol.messages import encode_envelope
from fumehood.streams.events import Event, event_of
from fumehood.streams.options import ENABLE_STREAMING
from fumehood.streams.recordings import RecordedCall, Recording, RecordingReader, RecordingStore

STARTED = "started"
STOPPED = "From here on events are missing, because {}. The call goes on; its answer comes last."


class StreamedCall:
    """A call whose events are recorded, so that clients can read them. The engine reports output
    and progress to the handlers in `live`, and passes the call's answer to `end`.
    """

    def __init__(
        self,
        request: CallRequest,
        recordings: RecordingStore,
        *,
        timestamp: Callable[[], str],
        redact: Callable[[str], str],
    ) -> None:
        self.call_id = request.call_id
        self._is_silent = not ENABLE_STREAMING.of(request.options)
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
        """Wait until the call begins. Return None if it has begun. If it ended before it began,
        return its answer.

        If None is returned, the caller must close the reader that `reader` returns. If this method
        is cancelled, it closes the reader itself.
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
        """Return the reader of all events of the call, which must have begun. The caller must close
        the reader.
        """
        assert self._reader is not None
        return self._reader

    def end(self, envelope: Envelope) -> None:
        """Record the call's answer, which is the call's last event."""
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
    """Return the kind and the data of a call's last event, which contains the call's answer."""
    return "tool_result" if envelope.success else "tool_error", encode_envelope(envelope)


async def events_of(call: StreamedCall) -> AsyncIterator[Event]:
    """Yield the events of a call that has begun. Close the call's reader at the end."""
    reader = call.reader()
    try:
        while records := await reader.read():
            for record in records:
                event = event_of(record.kind, record.id, strict_json.loads(record.data))
                if event is not None:
                    yield event
    finally:
        reader.close()
