"""Calls: options, queries of their log, events, and limits."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fumehood.call_options import CallBody, CallOptions
from fumehood.core.call_log import CallQuery
from fumehood.core.limits import smallest
from fumehood.streams.events import (
    ErrorEvent,
    NoticeEvent,
    OutputEvent,
    ProgressEvent,
    ResultEvent,
    RetryingEvent,
    event_of,
)
from support.answers import envelope_bytes

MISSION_DEFAULTS: dict[str, Any] = {
    "enable_cache": True,
    "enable_streaming": True,
    "enable_retry": True,
    "debug": False,
    "timeout_seconds": None,
    "memory_limit_mb": None,
    "max_length": None,
    "return_summary": True,
    "wait_for_approval": None,
    "dry_run": False,
    "session_id": None,
    "agent_id": None,
    "idempotency_key": None,
    "trace_id": None,
    "cancel_on_disconnect": False,
    "isolation": None,
    "new_call": False,
    "packages": None,
    "network": None,
    "preview": False,
    "receipt": False,
    "replay": None,
}


@pytest.mark.row("P11", "P12")
def test_every_call_option_has_its_documented_default() -> None:
    assert CallOptions().model_dump() == MISSION_DEFAULTS


@pytest.mark.row("P11")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("debug", "yes"),
        ("debug", 1),
        ("dry_run", "true"),
        ("enable_cache", None),
        ("timeout_seconds", "5"),
        ("timeout_seconds", True),
        ("timeout_seconds", 0),
        ("timeout_seconds", -1),
        ("timeout_seconds", 86_401),
        ("memory_limit_mb", True),
        ("memory_limit_mb", 0),
        ("memory_limit_mb", 1.5),
        ("max_length", 0),
        ("session_id", ""),
        ("session_id", "a b"),
        ("session_id", "a\n"),
        ("session_id", "a" * 129),
        ("agent_id", "../x"),
        ("trace_id", "-a"),
        ("trace_id", "a\x00"),
        ("idempotency_key", ""),
        ("idempotency_key", "k" * 256),
        ("isolation", "none"),
        ("colour", "red"),
    ],
)
def test_wrong_option_is_refused_under_its_name(option: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=option):
        CallOptions.model_validate({option: value})


@pytest.mark.row("P11")
@pytest.mark.parametrize("value", [1, 0.5, 86_400])
def test_timeout_is_a_number_of_seconds(value: float) -> None:
    assert CallOptions.model_validate({"timeout_seconds": value}).timeout_seconds == value


@pytest.mark.parametrize(
    "body",
    [
        {"arguments": []},
        {"arguments": None},
        {"arguments": "text"},
        {"options": None},
        {"options": []},
        {"args": {}},
    ],
)
def test_wrong_body_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CallBody.model_validate(body)


# -- What may be asked of the call log -----------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["2026-01-31T09:30:00Z", "2026-01-31T10:30:00+01:00", "2026-01-31T09:30:00.000000+00:00"],
)
def test_query_time_is_parsed_with_its_time_zone(text: str) -> None:
    assert CallQuery.model_validate({"since": text}).since == datetime(
        2026, 1, 31, 9, 30, tzinfo=UTC
    )


@pytest.mark.parametrize(
    "query",
    [
        {"since": "2026-01-31T09:30:00"}, {"since": "2026-01-31"}, {"since": "1769851800"},
        {"since": 5}, {"since": "1h"}, {"since": ""}, {"until": "0001-01-01T00:00:00+23:59"},
        {"limit": 0}, {"limit": 101}, {"limit": "many"}, {"limit": ""}, {"limit": -1},
        {"code": "ok"}, {"code": "A" * 70}, {"code": "OK' OR 1=1"}, {"agent": ""},
        {"agent": "a\nb"}, {"tool": ""}, {"tool": "x" * 161}, {"cursor": ""},
        {"cursor": "x" * 200}, {"principal": "uid:0"}, {"principal_id": "uid:0"},
    ],
    ids=str,
)  # fmt: skip
def test_query_of_calls_with_a_wrong_field_is_refused(query: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CallQuery.model_validate(query)


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "1"}, {"limit": 100}, {"code": "OK"}, {"code": "CITY_NOT_FOUND"},
        {"agent": "a.b-c"}, {"tool": "calculator@1.0.0"}, {"cursor": "call_0123"},
    ],
    ids=str,
)  # fmt: skip
def test_twin_valid_query_is_accepted(query: dict[str, Any]) -> None:
    assert CallQuery.model_validate(query)


# -- Events --------------------------------------------------------------------------------

METADATA = {"call_id": "call_1", "trace_id": "trace_1", "timestamp": "2026-01-01T00:00:00.000Z"}
OUTPUT = {"stream": "stdout", "offset": 3, "text": "ä", "metadata": METADATA}


@pytest.mark.row("D2")
@pytest.mark.parametrize(
    ("kind", "data", "made"),
    [
        ("tool_progress", {"progress": 0, "message": "started", "metadata": METADATA}, ProgressEvent),
        ("tool_output", OUTPUT, OutputEvent),
        ("tool_notice", {"message": "why", "metadata": METADATA}, NoticeEvent),
        (
            "tool_retrying",
            {"retry_count": 1, "max_retries": 3, "metadata": METADATA, "error": {
                "code": "NETWORK_ERROR", "message": "gone", "retryable": True,
                "human_review": False}},
            RetryingEvent,
        ),
        ("tool_result", json.loads(envelope_bytes({"value": 1})), ResultEvent),
        ("tool_error", json.loads(envelope_bytes({}, code="CANCELLED")), ErrorEvent),
    ],
)  # fmt: skip
def test_stream_event_is_parsed(kind: str, data: Any, made: type) -> None:
    event = event_of(kind, "4:17", data)
    assert isinstance(event, made)
    assert (event.type, event.id) == (kind, "4:17")


@pytest.mark.row("D2")
def test_unknown_stream_event_is_ignored() -> None:
    assert event_of("tool_thinking", "1:1", {"thought": 1}) is None


@pytest.mark.row("D2")
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
def test_malformed_stream_event_is_refused(kind: str, data: Any) -> None:
    with pytest.raises(ValueError, match=r"event|valid|should|required|Input"):
        event_of(kind, "1:1", data)


# -- Limits --------------------------------------------------------------------------------

amounts = st.floats(0.001, 1e6)
wishes = st.lists(st.none() | amounts, max_size=4)


@pytest.mark.row("T2")
@given(amounts, amounts, wishes)
def test_smallest_of_any_requests_is_the_smallest_number_among_them(
    default: float, ceiling: float, wished: list[float | None]
) -> None:
    requests = [wish for wish in wished if wish is not None] or [default]
    assert smallest(default, ceiling, *wished) == min(ceiling, *requests)
