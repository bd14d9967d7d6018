"""What a client's own session has to do with an answer, as `fumehood mcp` reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fumehood.core.envelope import Envelope
from fumehood.mcp.messages import encode_result
from fumehood.mcp.results import result_of
from fumehood.mcp.stdio import is_without_session
from support.answers import envelope_bytes

pytestmark = pytest.mark.row("D3")

OVER = {"code": "RESOURCE_NOT_FOUND", "message": "The session has ended."}


def answer(data: Any = None, error: dict[str, Any] | None = None) -> bytes:
    document = json.loads(envelope_bytes({})) | {"data": data or {}, "success": error is None}
    document["status"] = "success" if error is None else "error"
    document["error"] = error and {"retryable": False, "human_review": False, **error}
    result = result_of(Envelope.model_validate(document))
    return encode_result(7, json.dumps(result).encode())


def test_call_that_found_its_session_over_is_known() -> None:
    assert is_without_session(answer(error={**OVER, "fields": ["session_id"]}))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"value": {**OVER, "fields": ["session_id"]}}, None),
        (None, {**OVER, "fields": ["paths"], "details": {"fields": ["session_id"]}}),
        (None, {**OVER, "details": {"error": {**OVER, "fields": ["session_id"]}}}),
        (None, {**OVER, "code": "EXECUTION_ERROR", "fields": ["session_id"]}),
    ],
    ids=["value of a program", "missing file", "details", "another code"],
)
def test_call_that_ran_keeps_its_own_answer(data: Any, error: dict[str, Any] | None) -> None:
    assert not is_without_session(answer(data, error))


def test_answer_without_a_result_is_the_clients() -> None:
    assert not is_without_session(b'{"jsonrpc":"2.0","id":7,"error":{"code":-32602}}')
