"""What differs between two receipts, as people read it."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.receipts.receipt import Cassette, Exchange, Receipt, differences


def exchange(url: str, status: int = 200) -> Exchange:
    return Exchange(
        method="GET", url=url, body_sha256=None, status=status, headers=[], body_base64=""
    )


def receipt(*urls: str, **changed: Any) -> Receipt:
    known: dict[str, Any] = {
        "format": "fumehood.receipt.1", "call_id": "call_1", "timestamp": "2026-11-27T00:00:00Z",
        "tool": "run_python", "tool_version": "1.0.0", "arguments": {}, "options": {},
        "place": {"image": "python", "image_digest": "sha256:1"},
        "network": Cassette(exchanges=[exchange(url) for url in urls]), "ended_by": "ok",
        "fields": {"stdout": "1\n", "value": 1, "files": []},
    }  # fmt: skip
    return Receipt(**known | changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"call_id": "call_2", "timestamp": "later"}, []),
        ({"place": None}, ["image: python → null", "image_digest: sha256:1 → null"]),
        ({"ended_by": "timeout", "error": "TIMEOUT"},
         ["ended_by: ok → timeout", "error: null → TIMEOUT"]),
        ({"fields": {"stdout": "1\n", "value": 2, "files": []}}, ["value: 1 → 2"]),
        ({"fields": {"stdout": "1\n2\n", "value": 1, "files": []}},
         ["stdout:", "  @@ -1 +1,2 @@", "   1", "  +2"]),
        ({"fields": {"stdout": "1\n", "value": 1,
                     "files": [{"filename": "a", "size": 1, "sha256": "0", "url": "/x"}]}},
         ['files: a: null → {"size": 1, "sha256": "0"}']),
    ],
)  # fmt: skip
def test_each_difference_is_said(changed: dict[str, Any], said: list[str]) -> None:
    assert differences(receipt(), receipt(**changed)) == said


def test_requests_are_compared_whatever_their_order() -> None:
    assert differences(receipt("http://a/", "http://b/"), receipt("http://b/", "http://a/")) == []
    assert differences(receipt("http://a/", "http://a/"), receipt("http://b/")) == [
        "not sent any more: GET http://a/ (answered 200), 2 times",
        "new: GET http://b/ (answered 200)",
    ]
