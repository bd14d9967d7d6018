"""The rules by which clients read the events of a call over any number of connections.

Client side. `async_client.py` and its generated twin follow these rules. Invariant: each event of a
stream is delivered once, however often the stream is resumed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import httpx2

from fumehood.client.api_request import ApiRequest, DaemonUnavailable, address
from fumehood.client.exchange import Endpoint, Progress, may_send_again, no_engine, read_answer
from fumehood.protocol import strict_json
from fumehood.protocol.messages import decode_envelope
from fumehood.streams import sse
from fumehood.streams.events import LAST_KINDS, ErrorEvent, Event, event_of, last_event

BROKEN_OFF = (
    "The events of the call ended before its answer. See the engine's log and the call log."
)

RESUMES = 10
"""Maximum number of consecutive attempts to resume a stream without receiving a new event. The
client then gives up."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""First and longest pause, in seconds, before an attempt to resume a stream. Each pause is twice
the one before, and half of it is random."""


def is_followed(headers: Mapping[str, str]) -> bool:
    """Return whether an answer with these headers is a stream of events. Otherwise, the answer is
    an envelope.
    """
    return headers.get("content-type", "").partition(";")[0].strip() == sse.MEDIA_TYPE


class Following:
    """Reads the events of one call. If the stream breaks off, `Following` prepares the request that
    resumes the stream on a new connection.
    """

    def __init__(self, request: ApiRequest[Event], endpoint: Endpoint) -> None:
        self.request = request
        """The next request to send."""
        self.is_over = False
        """Whether the last event, which contains the answer, has arrived."""
        self._endpoint = endpoint
        self._call_id = ""
        self._last_id = ""
        self._sequence = -1
        self._decoder = sse.Decoder()
        self._has_failed = False
        self._attempts = 0

    def feed(self, chunk: bytes) -> list[Event]:
        """Add bytes from the stream. Return the events that they complete, without events that were
        already returned.

        Raises:
            DaemonUnavailable: the bytes are not events of an engine.
        """
        events = []
        try:
            for frame in self._decoder.feed(chunk):
                event = event_of(frame.kind, frame.id, strict_json.loads(frame.data))
                if event is not None and self._is_new(frame):
                    events.append(event)
                    self._call_id = self._call_id or event.metadata.call_id
        except ValueError:
            raise no_engine(self.request, self._endpoint.path) from None
        return events

    def read_answer(self, raw: bytes) -> Event | None:
        """Read an envelope that arrived instead of a stream of events.

        If no event has arrived before, return the call's last event, which contains the envelope.
        Otherwise, the request was to resume a stream, and the envelope is an error. If another
        attempt to resume may succeed, return None.

        Raises:
            DaemonUnavailable: the answer is not an engine's, or the stream cannot be resumed.
        """
        if not self._last_id:
            self.is_over = True
            return read_answer(self.request, raw, self._endpoint)
        refused = read_answer(self.request, raw, self._endpoint)
        error = refused.envelope.error if isinstance(refused, ErrorEvent) else None
        if error is None:
            raise no_engine(self.request, self._endpoint.path)
        if error.retryable:
            return None
        raise self._gone(f"{error.code}: {error.message}")

    def may_send_again(self, error: httpx2.HTTPError, progress: Progress) -> bool:
        """Return whether the request that failed with `error` should be sent once more,
        immediately. Only the first call of this method can return True.

        `progress` says how far the failed attempt got.
        """
        is_first, self._has_failed = not self._has_failed, True
        return is_first and may_send_again(self.request, error, progress)

    def pause_s(self, failed: DaemonUnavailable | None) -> float:
        """Prepare the request that resumes the stream, and return the seconds to wait before
        sending it. `failed` is the error of the last attempt, or None.

        Raises:
            DaemonUnavailable: too many attempts have failed, or no event has arrived yet, so that
                the call's id is unknown.
        """
        if not self._last_id:
            raise failed or DaemonUnavailable(
                f"{BROKEN_OFF} {self.request.path}", may_have_acted=True
            )
        if self._attempts == RESUMES:
            raise self._gone(f"{RESUMES} attempts to resume failed. {failed or ''}".rstrip())
        pause_s: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._attempts)
        self._attempts += 1
        self._decoder = sse.Decoder()
        self.request = follow_request(self._call_id, self._last_id)
        return pause_s * random.uniform(0.5, 1)  # noqa: S311 - a pause is no secret

    def _is_new(self, frame: sse.Frame) -> bool:
        """Record that an event has arrived, and return whether it is new.

        After a stream was resumed, the engine may send events that were already delivered.
        """
        sequence = int(frame.id.partition(":")[0])
        self.is_over = frame.kind in LAST_KINDS
        if sequence <= self._sequence and not self.is_over:
            return False
        self._sequence, self._last_id, self._attempts = sequence, frame.id, 0
        return True

    def _gone(self, why: str) -> DaemonUnavailable:
        return DaemonUnavailable(
            f"The events of the call {self._call_id} broke off behind event {self._last_id}. {why} "
            "Look the call up by its id before you repeat it.",
            may_have_acted=True,
        )


def follow_request(call_id: str, after: str | None) -> ApiRequest[Event]:
    """Return the request for the events of a call. If `after` is given, the engine sends only the
    events that follow the event with the id `after`.
    """
    headers = {} if after is None else {"last-event-id": after}
    return ApiRequest(
        "GET", address("calls", call_id, "events"), answer_without_events, headers=headers
    )


def answer_without_events(raw: bytes) -> Event:
    return last_event(decode_envelope(raw))
