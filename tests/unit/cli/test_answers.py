"""An envelope that no model has read: what is let through can be shown."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fumehood.cli.answers import document_of, read_answer
from fumehood.cli.exits import exit_code_of
from fumehood.cli.show import show_envelope
from fumehood.core.envelope import Envelope
from support.answers import envelope_bytes

SANDBOX = {
    "placement": "interpreter", "isolation": "call", "ended_by": "ok",
    "limits": {"timeout_seconds": 1.0, "memory_mb": 64},
}  # fmt: skip


def whole(code: str | None) -> dict[str, Any]:
    """An envelope with everything that the command line reads."""
    document: dict[str, Any] = json.loads(envelope_bytes({"value": 1}, code=code))
    document["metadata"] |= {
        "tool_name": "calculator", "tool_version": "1.0.0", "call_id": "call_1",
        "sandbox": SANDBOX, "warnings": ["w"],
    }  # fmt: skip
    if document["error"] is not None:
        document["error"] |= {"approval_id": "apr_1", "details": {"why": "so"}}
    return document


def paths(document: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield (*above, key)
            yield from paths(value, (*above, key))


def changed(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(document)
    parent = copied
    for key in path[:-1]:
        parent = parent[key]
    if value is KeyError:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return copied


@pytest.mark.parametrize("code", [None, "INVALID_PARAMS"])
def test_answer_is_read_as_the_model_reads_it(code: str | None) -> None:
    raw = envelope_bytes({"value": [1, "ä", None, 1.5]}, code=code)
    assert read_answer(raw) == document_of(Envelope.model_validate_json(raw))


@pytest.mark.parametrize("code", [None, "REQUIRES_HUMAN_APPROVAL"])
@pytest.mark.parametrize("value", [KeyError, None, 7, "x", [], {}, [1]], ids=str)
def test_changed_answer_is_refused_or_can_be_shown(code: str | None, value: Any) -> None:
    document = whole(code)
    refused = 0
    for path in paths(document):
        try:
            answer = read_answer(json.dumps(changed(document, path, value)).encode())
        except ValueError:
            refused += 1
        else:
            show_envelope(answer, as_json=False)
            exit_code_of(answer)
    assert refused >= 5


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"<hi>", b"\xff", b"[" * 100_000])
def test_what_is_no_envelope_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_answer(raw)
