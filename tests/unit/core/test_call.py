"""Calls: options have the mission's defaults, and nothing else is accepted."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from fumehood.core.call import CallBody, CallOptions, ToolResult

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
}


@pytest.mark.row("P11", "P12")
def test_every_option_has_the_default_of_the_mission() -> None:
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


def test_body_may_be_empty() -> None:
    body = CallBody.model_validate({})
    assert (body.arguments, body.options) == ({}, CallOptions())


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


@pytest.mark.row("E2", "E3")
def test_a_result_reports_nothing_unless_told() -> None:
    assert (ToolResult(1).tokens_used, ToolResult(1).cost) == (0, Decimal(0))
