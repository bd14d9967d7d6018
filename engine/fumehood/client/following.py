"""A call's events as they come: from bytes of a connection to values, and where they must end.

Client side, knows no socket. Invariant: a stream that breaks off is never taken for a call that
has ended; the last event is an answer, or the reader is told that there was none.
"""

from __future__ import annotations

from collections.abc import Mapping

from fumehood.client.ask import ApiRequest
from fumehood.client.errors import DaemonUnavailable
from fumehood.core.events import ErrorEvent, Event, ResultEvent, event_of
from fumehood.protocol import sse, strict_json

BROKEN_OFF = (
    "The events of the call ended before its answer. See the engine's log and the call log."
)


def is_followed(headers: Mapping[str, str]) -> bool:
    """Whether an answer is events, and not an envelope."""
    return headers.get("content-type", "").partition(";")[0].strip() == sse.MEDIA_TYPE


class Following:
    """One stream. `feed` gives the events that some bytes completed."""

    def __init__(self) -> None:
        self.is_over = False
        """The answer was among them; nothing comes after it."""
        self._decoder = sse.Decoder()

    def feed(self, chunk: bytes) -> list[Event]:
        """Raises ValueError where it is no engine that speaks."""
        events = []
        for frame in self._decoder.feed(chunk):
            event = event_of(frame.kind, frame.id, strict_json.loads(frame.data))
            if event is not None:
                events.append(event)
                self.is_over = isinstance(event, ResultEvent | ErrorEvent)
        return events

    def finish(self, ask: ApiRequest[Event]) -> None:
        """The bytes have ended. Raises DaemonUnavailable where the answer is missing."""
        if not self.is_over:
            raise DaemonUnavailable(f"{BROKEN_OFF} {ask.path}", may_have_acted=True)
