"""Kept answers: given again as they were, marked, bounded, and without what was one caller's."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fumehood.core.envelope import Envelope, ErrorInfo
from fumehood.core.idempotency import MAX_ANSWER_BYTES
from fumehood.storage.idempotency import MAX_NOTES, pack_answer, replay_of
from support.keyed import answer, failure

pytestmark = pytest.mark.row("P3")


def _unmarked(envelope: Envelope) -> Envelope:
    assert envelope.metadata.idempotent_replay is True
    metadata = envelope.metadata.model_copy(update={"idempotent_replay": False})
    return envelope.model_copy(update={"metadata": metadata})


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"value": 4, "text": "vier – 四"}, None),
        ({}, failure("EXECUTION_ERROR", details={"stderr": "no"}, fields=("a",))),
        ({"big": 2**70, "list": [1, None, {"a": 0.5}]}, None),
    ],
)
def test_answer_is_given_again_as_it_was(data: dict[str, Any], error: ErrorInfo | None) -> None:
    first = answer("call_1", data, error)
    again = replay_of(pack_answer(first))
    assert _unmarked(again) == first
    assert again.metadata.call_id == "call_1"


def test_mark_is_left_out_of_every_other_answer() -> None:
    first = answer()
    assert "idempotent_replay" not in first.model_dump()["metadata"]
    assert '"idempotent_replay":true' in replay_of(pack_answer(first)).model_dump_json()


def test_what_was_shown_for_debugging_is_not_kept() -> None:
    first = answer("call_1", {"a": 1}).model_copy(update={"debug_info": {"arguments": "PRIVATE"}})
    packed = pack_answer(first)
    assert "PRIVATE" not in packed
    assert replay_of(packed).debug_info is None


def test_kept_failure_is_never_called_retryable() -> None:
    error = failure("CITY_BUSY", retryable=True, retry_after_ms=100)
    again = replay_of(pack_answer(answer(error=error)))
    assert again.error == failure("CITY_BUSY")


@pytest.mark.parametrize("character", ["x", "é", "\0"])
def test_answer_that_is_too_long_is_kept_without_its_data(character: str) -> None:
    first = answer("call_1", {"text": character * (MAX_ANSWER_BYTES)})
    again = replay_of(pack_answer(first))
    assert (again.success, again.error) == (True, None)
    assert again.data["truncated"] is True
    info = again.data["truncation_info"]
    assert info["original_length"] > MAX_ANSWER_BYTES
    assert info["returned_length"] == 0
    assert "Do not repeat" in info["summary"]
    assert len(pack_answer(first)) < 2000


def test_answer_that_just_fits_is_kept_whole() -> None:
    room = MAX_ANSWER_BYTES - len(answer("call_1", {"text": ""}).model_dump_json())
    for length, is_whole in ((room, True), (room + 1, False)):
        again = replay_of(pack_answer(answer("call_1", {"text": "x" * length})))
        assert ("truncated" not in again.data) is is_whole


def test_everything_a_caller_can_make_long_is_bounded() -> None:
    error = failure(
        "INVALID_PARAMS", fields=tuple(f"{n:080}" for n in range(20_000)), details={"a": "x" * 100}
    )
    first = answer("call_1", error=error)
    metadata = first.metadata.model_copy(update={"warnings": ("w" * 80,) * 20_000})
    packed = pack_answer(first.model_copy(update={"metadata": metadata}))
    assert len(packed) < 10_000
    again = replay_of(packed)
    assert again.error is not None
    assert again.error.fields is not None
    assert len(again.error.fields) == len(again.metadata.warnings) == MAX_NOTES
    assert again.error.details is not None
    assert again.error.details["truncated"] is True
    assert again.data == {}


@pytest.mark.parametrize("text", ["", "{}", "null", '{"success": true}'])
def test_what_is_no_envelope_is_no_answer(text: str) -> None:
    with pytest.raises(ValidationError):
        replay_of(text)
