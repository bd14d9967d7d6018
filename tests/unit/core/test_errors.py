"""Errors: the tables of the code are the tables of the mission, word for word."""

from __future__ import annotations

import pytest

from fumehood.core.errors import (
    ENDING_ERRORS,
    ERROR_CODES,
    EndedBy,
    ToolError,
    code_of,
)

# code: (HTTP status, retryable, human_review), from mission E.
MISSION_CODES = {
    "INVALID_PARAMS": (400, False, False),
    "UNAUTHORIZED": (401, False, False),
    "PERMISSION_DENIED": (403, False, False),
    "REQUIRES_HUMAN_APPROVAL": (403, False, True),
    "APPROVAL_DENIED": (403, False, False),
    "APPROVAL_EXPIRED": (403, False, False),
    "SANDBOX_VIOLATION": (403, False, False),
    "TOOL_DISABLED": (403, False, False),
    "TOOL_NOT_FOUND": (404, False, False),
    "RESOURCE_NOT_FOUND": (404, False, False),
    "METHOD_NOT_ALLOWED": (405, False, False),
    "IDEMPOTENCY_CONFLICT": (409, False, False),
    "OUTCOME_UNKNOWN": (409, False, True),
    "CALL_IN_PROGRESS": (409, True, False),
    "TOOL_DEPRECATED": (410, False, False),
    "REQUEST_TOO_LARGE": (413, False, False),
    "OUTPUT_LIMIT_EXCEEDED": (413, False, False),
    "UNSUPPORTED_MEDIA_TYPE": (415, False, False),
    "RATE_LIMITED": (429, True, False),
    "QUOTA_EXCEEDED": (429, False, False),
    "CANCELLED": (499, False, False),
    "EXECUTION_ERROR": (500, False, False),
    "INTERNAL_ERROR": (500, False, False),
    "NETWORK_ERROR": (503, True, False),
    "SANDBOX_UNAVAILABLE": (503, True, False),
    "STATE_UNAVAILABLE": (503, True, False),  # from the design of clusters
    "CIRCUIT_OPEN": (503, True, False),
    "SHUTTING_DOWN": (503, True, False),
    "TIMEOUT": (504, False, False),
    "MEMORY_LIMIT_EXCEEDED": (507, False, False),
}

# ended_by: code, from mission E; None is a success.
MISSION_ENDINGS = {
    "ok": None,
    "exception": "EXECUTION_ERROR",
    "exit": "EXECUTION_ERROR",
    "signal": "EXECUTION_ERROR",
    "wall_time": "TIMEOUT",
    "cpu_time": "TIMEOUT",
    "memory": "MEMORY_LIMIT_EXCEEDED",
    "output": "OUTPUT_LIMIT_EXCEEDED",
    "policy": "SANDBOX_VIOLATION",
    "cancelled": "CANCELLED",
    "sandbox_lost": "SANDBOX_UNAVAILABLE",
}


@pytest.mark.row("E1")
def test_error_codes_match_the_specification() -> None:
    table = {
        code: (error.http_status, error.retryable, error.human_review)
        for code, error in ERROR_CODES.items()
    }
    assert table == MISSION_CODES


@pytest.mark.row("S4")
def test_run_endings_match_the_specification() -> None:
    table = {
        ending.value: None if error is None else error.code
        for ending, error in ENDING_ERRORS.items()
    }
    assert table == MISSION_ENDINGS
    assert set(ENDING_ERRORS) == set(EndedBy)


@pytest.mark.row("E1")
@pytest.mark.parametrize("code", ["CITY_NOT_FOUND", "ABC", "A1_", "A" * 64])
def test_tool_error_can_have_its_own_code(code: str) -> None:
    error = ToolError(code, "No such city.", details={"city": "Atlantis"}, retry_after_ms=5)
    assert code_of(error) == code
    assert (error.http_status, error.may_retry, error.retry_after_ms) == (422, False, 5)
    assert error.details == {"city": "Atlantis"}


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    "code",
    [
        "",
        "AB",
        "city_not_found",
        "City",
        "1CITY",
        "_CITY",
        "A B C",
        "CITY-GONE",
        "A" * 65,
        "ÄÖÜ",
        "CITY_NOT_FOUND\n",
        *MISSION_CODES,
    ],
)
def test_tool_error_code_that_is_malformed_or_the_engines_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="own error code"):
        ToolError(code, "No.")
