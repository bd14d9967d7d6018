"""Events: values of what is told, and nothing that only looks like one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fumehood.core.envelope import Envelope
from fumehood.core.events import (
    ErrorEvent,
    NoticeEvent,
    OutputEvent,
    ProgressEvent,
    ResultEvent,
    event_of,
    last_event,
)
from support.answers import envelope_bytes

pytestmark = pytest.mark.row("D2")

METADATA = {"call_id": "call_1", "trace_id": "trace_1", "timestamp": "2026-01-01T00:00:00.000Z"}
OUTPUT = {"stream": "stdout", "offset": 3, "text": "ä", "metadata": METADATA}


@pytest.mark.parametrize(
    ("kind", "data", "made"),
    [
        ("tool_progress", {"progress": 0, "message": "started", "metadata": METADATA}, ProgressEvent),
        ("tool_output", OUTPUT, OutputEvent),
        ("tool_notice", {"message": "why", "metadata": METADATA}, NoticeEvent),
        ("tool_result", json.loads(envelope_bytes({"value": 1})), ResultEvent),
        ("tool_error", json.loads(envelope_bytes({}, code="CANCELLED")), ErrorEvent),
    ],
)  # fmt: skip
def test_event_is_read_as_it_was_told(kind: str, data: Any, made: type) -> None:
    event = event_of(kind, "4:17", data)
    assert isinstance(event, made)
    assert (event.type, event.id) == (kind, "4:17")


def test_event_of_a_later_version_is_left_out() -> None:
    assert event_of("tool_retrying", "1:1", {"retry_count": 1}) is None


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("tool_output", {**OUTPUT, "more": 1}),
        ("tool_output", {**OUTPUT, "id": "9:9"}),
        ("tool_output", {**OUTPUT, "stream": "log"}),
        ("tool_output", {**OUTPUT, "offset": -1}),
        ("tool_progress", {"progress": 101, "message": "", "metadata": METADATA}),
        ("tool_output", []),
        ("tool_result", {}),
    ],
)
def test_what_has_not_the_form_of_an_event_is_none(kind: str, data: Any) -> None:
    with pytest.raises(ValueError, match=r"event|valid|should|required|Input"):
        event_of(kind, "1:1", data)


def test_answer_without_events_is_the_last_event() -> None:
    good = Envelope.model_validate_json(envelope_bytes({}))
    bad = Envelope.model_validate_json(envelope_bytes({}, code="TOOL_NOT_FOUND"))
    assert [type(last_event(one)) for one in (good, bad)] == [ResultEvent, ErrorEvent]
