"""Envelopes as results: content for a model, data for a program, and links for what is large."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from fumehood.core.envelope import Envelope
from fumehood.mcp.server import result_of
from support.answers import envelope_bytes

pytestmark = pytest.mark.row("D3")

PICTURE = base64.b64encode(b"\x89PNG").decode()
BLOB = "/v1/blobs/blob_" + "0" * 32 + "?expires=1&signature=" + "f" * 64


def result(data: Any = None, error: Any = None) -> dict[str, Any]:
    document = json.loads(envelope_bytes({}))
    document |= {"data": data or {}, "error": error, "success": error is None}
    document["metadata"]["call_id"] = "call_1"
    document["status"] = "success" if error is None else "error"
    return result_of(Envelope.model_validate(document))


def failure(**details: Any) -> dict[str, Any]:
    return {
        "code": "EXECUTION_ERROR", "message": "It failed.", "retryable": False,
        "human_review": False, "details": details,
    }  # fmt: skip


def test_mcp_result_has_structured_content_and_equal_text() -> None:
    found = result({"value": 7, "text": "sieben · 7"})
    assert found["structuredContent"] == {"value": 7, "text": "sieben · 7"}
    assert found["isError"] is False
    (text,) = found["content"]
    assert json.loads(text["text"]) == found["structuredContent"]
    assert "sieben · 7" in text["text"]  # a model reads characters, not escapes
    stamped = found["_meta"]["fumehood/envelope"]
    assert stamped["success"] is True
    assert "data" not in stamped


def test_figure_is_an_image_block_and_not_in_the_text() -> None:
    figure = {"filename": "a.png", "content_type": "image/png", "content_base64": PICTURE}
    found = result({"stdout": "", "images": [figure]})
    text, image = found["content"]
    assert image == {"type": "image", "data": PICTURE, "mimeType": "image/png"}
    assert PICTURE not in text["text"]
    assert found["structuredContent"]["images"] == [figure]
    assert result(error=failure(images=[figure]))["content"][1] == image


def test_blobs_are_resource_links() -> None:
    field = {"field": "stdout", "original_length": 9, "returned_length": 1, "resource_url": BLOB}
    file = {"filename": "big.csv", "content_type": "text/csv", "size": 9, "url": BLOB}
    found = result({"files": [file], "truncated": True, "truncation_info": {"fields": [field]}})
    assert [block["type"] for block in found["content"]] == ["text", *["resource_link"] * 2]
    assert found["content"][1] == {
        "type": "resource_link", "uri": f"fumehood://{BLOB}", "name": "big.csv",
        "mimeType": "text/csv",
    }  # fmt: skip


def test_mcp_failure_has_the_program_traceback_and_no_data() -> None:
    exception = {"type": "KeyError", "message": "'a'", "line": 1, "traceback": "line 1, in f"}
    found = result(error=failure(exception=exception, stdout="so far", stderr="", other="hidden"))
    assert found["isError"] is True
    assert "structuredContent" not in found
    assert found["content"][0]["text"] == (
        "EXECUTION_ERROR: It failed.\ntraceback:\nline 1, in f\nstdout:\nso far"
    )


def test_traceback_on_stderr_is_not_repeated() -> None:
    exception = {"type": "KeyError", "message": "'a'", "line": 1, "traceback": "line 1, in f\n"}
    found = result(error=failure(exception=exception, stderr="warned\nline 1, in f\n"))
    assert found["content"][0]["text"].count("line 1, in f") == 1


@pytest.mark.parametrize(
    "data",
    [
        {"images": "none", "files": {"url": 1}, "truncation_info": []},
        {"images": [1, {"content_base64": 7, "content_type": "image/png"}], "files": [None]},
        {"truncation_info": {"fields": [{"resource_url": BLOB}, 3]}},
    ],
)
def test_malformed_file_entries_are_returned_as_plain_data(data: dict[str, Any]) -> None:
    found = result(data)
    assert found["structuredContent"] == data
    assert len(found["content"]) == 1
