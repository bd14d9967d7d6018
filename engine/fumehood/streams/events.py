"""Events of a running call. The last event is the call's answer.

Values only. An event's id is `SEQUENCE:CHECK`. SEQUENCE is the event's number in the call, counted
from 0. CHECK is a number that only events of this call have. On the wire, the kind and the id are
not in the data, because they have fields of their own.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from fumehood.core.envelope import Envelope, ErrorInfo
from fumehood.core.value import StrictValue

StreamName = Literal["stdout", "stderr"]

LAST_KINDS = ("tool_result", "tool_error")
"""Kinds of the last event, which contains the call's answer."""


class _Event(StrictValue):
    id: str
    """The event's id, `SEQUENCE:CHECK`."""


class EventMetadata(StrictValue):
    """The ids of an event's call and trace, and the time at which the event was recorded."""

    call_id: str
    trace_id: str
    timestamp: str


class ProgressEvent(_Event):
    """The progress that the tool reports. The first event of every call reports 0 percent."""

    type: Literal["tool_progress"] = "tool_progress"
    progress: float = Field(ge=0, le=100)
    message: str
    metadata: EventMetadata


class OutputEvent(_Event):
    """The output that a program has written since the previous output event. The text contains only
    whole characters.

    `offset` is the number of UTF-8 bytes that the program wrote to the same stream before this
    output.
    """

    type: Literal["tool_output"] = "tool_output"
    stream: StreamName
    offset: int = Field(ge=0)
    text: str
    metadata: EventMetadata


class RetryingEvent(_Event):
    """An attempt failed, and the tool runs again after a pause. `retry_count` starts at 1."""

    type: Literal["tool_retrying"] = "tool_retrying"
    retry_count: int = Field(ge=1)
    max_retries: int = Field(ge=1)
    error: ErrorInfo
    metadata: EventMetadata


class NoticeEvent(_Event):
    """A message in which the engine says that later events are missing, and why."""

    type: Literal["tool_notice"] = "tool_notice"
    message: str
    metadata: EventMetadata


class _LastEvent(_Event):
    envelope: Envelope

    @property
    def metadata(self) -> EventMetadata:
        """The event's metadata, which is taken from the envelope."""
        told = self.envelope.metadata
        return EventMetadata(
            call_id=told.call_id or "", trace_id=told.trace_id, timestamp=told.timestamp
        )


class ResultEvent(_LastEvent):
    """The last event of a call that succeeded."""

    type: Literal["tool_result"] = "tool_result"


class ErrorEvent(_LastEvent):
    """The last event of a call that failed or was refused."""

    type: Literal["tool_error"] = "tool_error"


Event = ProgressEvent | OutputEvent | RetryingEvent | NoticeEvent | ResultEvent | ErrorEvent

_WITH_FIELDS: dict[str, type[ProgressEvent | OutputEvent | RetryingEvent | NoticeEvent]] = {
    "tool_progress": ProgressEvent,
    "tool_output": OutputEvent,
    "tool_retrying": RetryingEvent,
    "tool_notice": NoticeEvent,
}
_WITH_ENVELOPE: dict[str, type[ResultEvent | ErrorEvent]] = {
    "tool_result": ResultEvent,
    "tool_error": ErrorEvent,
}


def event_of(kind: str, event_id: str, data: Any) -> Event | None:
    """Parse an event from its kind, its id and its data on the wire.

    Return None for an unknown kind, because newer engines may send further kinds.

    Raises:
        ValueError: the data does not fit the event's kind.
    """
    if kind in _WITH_ENVELOPE:
        envelope = Envelope.model_validate(data, strict=False)
        return _WITH_ENVELOPE[kind](id=event_id, envelope=envelope)
    if kind not in _WITH_FIELDS:
        return None
    if not isinstance(data, dict) or data.keys() & {"id", "type"}:
        raise ValueError("the data of an event are an object of its fields")
    return _WITH_FIELDS[kind].model_validate({**data, "id": event_id})


def last_event(envelope: Envelope, event_id: str = "0:0") -> Event:
    """Return the last event of a call, which contains the envelope with the call's answer."""
    kind = ResultEvent if envelope.success else ErrorEvent
    return kind(id=event_id, envelope=envelope)
