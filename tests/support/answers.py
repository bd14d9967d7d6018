"""Envelopes as a daemon sends them, without a daemon."""

from __future__ import annotations

from typing import Any

from fumehood.core.envelope import (
    Envelope,
    ErrorInfo,
    Metadata,
    Performance,
    Resources,
    SandboxReport,
    UsageReport,
)
from fumehood.core.json_types import JsonObject


def failure(code: str, message: str = "No.", **fields: Any) -> ErrorInfo:
    """The error of an envelope."""
    given = {"retryable": False, "human_review": False, **fields}
    return ErrorInfo(code=code, message=message, **given)


def envelope_of(
    data: JsonObject | None = None, error: ErrorInfo | None = None, **metadata: Any
) -> Envelope:
    """The envelope of a call that succeeded with this data, or failed."""
    given = {
        "tool_name": None, "tool_version": None, "call_id": None, "trace_id": "trace_1",
        "timestamp": "2026-01-01T00:00:00.000Z", "execution_time_ms": 0.0,
        "performance": Performance(total_ms=0.0), "sandbox": None, "resources": Resources(),
        "usage": UsageReport(), **metadata,
    }  # fmt: skip
    return Envelope(
        success=error is None,
        status="success" if error is None else "error",
        data=data or {},
        error=error,
        metadata=Metadata(**given),
    )


def envelope_bytes(data: JsonObject, *, code: str | None = None, message: str = "No.") -> bytes:
    """A successful envelope with this data, or one with this error, as bytes."""
    error = None if code is None else failure(code, message)
    return envelope_of(data, error).model_dump_json().encode()


def error_of(answer: Any) -> Any:
    """The error of an envelope or outcome, which failed."""
    assert answer.error is not None, answer.data
    return answer.error


def details_of(answer: Any) -> JsonObject:
    """The details of a failed call's error."""
    details: JsonObject | None = error_of(answer).details
    assert details is not None
    return details


def sandbox_of(answer: Envelope) -> SandboxReport:
    """Where a call ran, which ran in a sandbox."""
    assert answer.metadata.sandbox is not None
    return answer.metadata.sandbox


def code_of(answer: Any) -> str:
    """The error code of an envelope or outcome, or `OK`."""
    code: str = "OK" if answer.error is None else answer.error.code
    return code
