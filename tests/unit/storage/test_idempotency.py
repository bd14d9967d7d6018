"""Idempotency keys and stored answers: the key of a call that may have acted is not released."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from fumehood.core.envelope import Envelope, ErrorInfo
from fumehood.storage import idempotency as rows
from fumehood.storage.database import Database
from fumehood.storage.idempotency import (
    KEY_LIFETIME,
    MAX_ANSWER_BYTES,
    KeptKey,
    KeyedCall,
    KeyLost,
    KeyState,
    pack_answer,
    replay_of,
)
from support.answers import details_of, error_of, failure
from support.keyed import NOW, answer, keyed

pytestmark = pytest.mark.sqlite

MOMENT = timedelta(microseconds=1)


def _held(call_id: str) -> bool:
    return True


def _gone(call_id: str) -> bool:
    return False


@pytest.fixture
def do(database: Database) -> Callable[..., Any]:
    """Runs one function of `rows` in its own transaction."""

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return database.write_now(lambda connection: function(connection, *arguments))

    return run


def _take(
    do: Callable[..., Any], call: KeyedCall, now: Any = NOW, is_held: Any = _held
) -> KeptKey | None:
    kept: KeptKey | None = do(rows.take, call, now, is_held)
    return kept


@pytest.mark.row("P3")
@pytest.mark.parametrize("other", [{"key": "K"}, {"key": "k "}, {"principal_id": "uid:2"}])
def test_key_is_scoped_to_principal_and_compared_exactly(
    do: Callable[..., Any], other: dict[str, str]
) -> None:
    assert _take(do, keyed("call_1")) is None
    do(rows.finish, keyed("call_1"), "{}")
    assert _take(do, keyed("call_2", **other)) is None


@pytest.mark.row("P3")
@pytest.mark.parametrize("may_repeat", [True, False])
def test_orphaned_running_key_is_unknown_unless_repeatable(
    do: Callable[..., Any], may_repeat: bool
) -> None:
    _take(do, keyed("call_1", may_repeat=may_repeat))
    found = _take(do, keyed("call_2", may_repeat=may_repeat), is_held=_gone)
    if may_repeat:
        assert found is None
    else:
        assert (found.state, found.call.call_id) == (KeyState.UNKNOWN, "call_1")


@pytest.mark.row("P3")
def test_held_running_key_is_not_treated_as_lost(do: Callable[..., Any]) -> None:
    _take(do, keyed("call_1", may_repeat=True))
    found = _take(do, keyed("call_2", may_repeat=True), is_held="call_1".__eq__)
    assert found.state is KeyState.RUNNING


def _done(do: Callable[..., Any]) -> None:
    do(rows.finish, keyed("call_1"), "{}")


def _unknown(do: Callable[..., Any]) -> None:
    do(rows.lose, keyed("call_1"))


def _waits(do: Callable[..., Any]) -> None:
    do(rows.hand_over, "uid:1", "k", "apr_1")


def _runs(do: Callable[..., Any]) -> None:
    """Leave the key running."""


@pytest.mark.row("P3")
@pytest.mark.parametrize(
    ("end", "is_forgotten"), [(_done, True), (_unknown, True), (_waits, False), (_runs, False)]
)
def test_key_is_kept_for_its_lifetime_and_while_its_call_is_open(
    do: Callable[..., Any], end: Callable[..., None], is_forgotten: bool
) -> None:
    _take(do, keyed("call_1"))
    end(do)
    assert do(rows.forget_old, NOW + KEY_LIFETIME - MOMENT) == 0
    assert _take(do, keyed("call_2"), NOW + KEY_LIFETIME - MOMENT) is not None
    assert do(rows.forget_old, NOW + KEY_LIFETIME) == int(is_forgotten)
    taken = _take(do, keyed("call_3"), NOW + KEY_LIFETIME)
    assert (taken is None) is is_forgotten


@pytest.mark.row("P3")
def test_expired_key_can_be_taken_before_it_is_pruned(do: Callable[..., Any]) -> None:
    _take(do, keyed("call_1"))
    _done(do)
    assert _take(do, keyed("call_2", fingerprint="other"), NOW + KEY_LIFETIME) is None
    found = _take(do, keyed("call_3"), NOW + KEY_LIFETIME)
    assert (found.call.fingerprint, found.answer) == ("other", None)


@pytest.mark.row("P3")
def test_waiting_key_is_completed_only_by_its_approval(do: Callable[..., Any]) -> None:
    _take(do, keyed("call_1"))
    _waits(do)
    do(rows.release, keyed("call_1"))
    do(rows.lose, keyed("call_1"))
    with pytest.raises(KeyLost):
        do(rows.finish, keyed("call_1"), "mine")
    found = _take(do, keyed("call_2"), is_held=_gone)
    assert (found.state, found.approval_id) == (KeyState.WAITING, "apr_1")
    late = NOW + timedelta(days=3)
    do(rows.complete, "uid:1", "k", "answer", late)
    found = _take(do, keyed("call_3"), late + KEY_LIFETIME - MOMENT)
    assert (found.state, found.answer) == (KeyState.DONE, "answer")


@pytest.mark.row("P3")
@pytest.mark.parametrize("end", [_done, _unknown, _runs])
def test_approval_does_not_change_a_key_that_is_not_waiting(
    do: Callable[..., Any], end: Callable[..., None]
) -> None:
    _take(do, keyed("call_1"))
    end(do)
    before = _take(do, keyed("call_2"))
    do(rows.free, "uid:1", "k")
    do(rows.complete, "uid:1", "k", "forged", NOW)
    assert _take(do, keyed("call_3")) == before


@pytest.mark.row("P3")
def test_resolution_does_not_overwrite_answer_of_later_call_with_same_key(
    do: Callable[..., Any],
) -> None:
    """An interrupted call is resolved after its key has been reused by another call."""
    later = NOW + KEY_LIFETIME
    for number, now in ((1, NOW), (2, later)):
        call = keyed(call_id=f"call_{number}")
        assert _take(do, call, now) is None
        do(rows.hand_over, call.principal_id, call.key, f"apr_{number}")
        do(rows.complete, call.principal_id, call.key, f"answer {number}", now)
    do(rows.correct, call.principal_id, call.key, "apr_1", "resolved", later)
    kept = _take(do, call, later)
    assert (kept.approval_id, kept.answer) == ("apr_2", "answer 2")
    do(rows.correct, call.principal_id, call.key, "apr_2", "resolved", later)  # the twin
    kept = _take(do, call, later)
    assert kept.answer == "resolved"


@pytest.mark.row("P3")
@pytest.mark.parametrize("end", [_done, _unknown, _waits])
def test_key_that_is_not_running_cannot_be_handed_to_an_approval(
    do: Callable[..., Any], end: Callable[..., None]
) -> None:
    _take(do, keyed("call_1"))
    end(do)
    before = _take(do, keyed("call_2"))
    with pytest.raises(KeyLost):
        do(rows.hand_over, "uid:1", "k", "apr_2")
    with pytest.raises(KeyLost):
        do(rows.hand_over, "uid:1", "no such key", "apr_2")
    assert _take(do, keyed("call_3")) == before


@pytest.mark.row("P3")
@pytest.mark.parametrize("job", [rows.release, rows.lose])
def test_ending_a_call_does_not_change_a_key_held_by_another(
    do: Callable[..., Any], job: Callable[..., None]
) -> None:
    _take(do, keyed("call_1"))
    do(job, keyed("call_2"))
    with pytest.raises(KeyLost):
        do(rows.finish, keyed("call_2"), "stolen")
    found = _take(do, keyed("call_3"))
    assert (found.state, found.call.call_id) == (KeyState.RUNNING, "call_1")


@pytest.mark.row("P3")
def test_recovery_releases_or_marks_lost_keys_and_keeps_waiting_ones(
    do: Callable[..., Any],
) -> None:
    for key, may_repeat in (("harmless", True), ("acts", False), ("waits", False)):
        _take(do, keyed(f"call_{key}", key=key, may_repeat=may_repeat))
    do(rows.hand_over, "uid:1", "waits", "apr_1")
    later = NOW + timedelta(days=30)
    assert do(rows.recover, later) == 1
    assert _take(do, keyed("call_4", key="harmless"), later) is None
    for key, state in (("acts", KeyState.UNKNOWN), ("waits", KeyState.WAITING)):
        found = _take(do, keyed("call_5", key=key), later + KEY_LIFETIME - MOMENT)
        assert found.state is state
    assert do(rows.recover, later) == 1  # the key that was taken anew


# -- Kept answers --------------------------------------------------------------------------


def _unmarked(envelope: Envelope) -> Envelope:
    assert envelope.metadata.idempotent_replay is True
    metadata = envelope.metadata.model_copy(update={"idempotent_replay": False})
    return envelope.model_copy(update={"metadata": metadata})


@pytest.mark.row("P3")
@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"value": 4, "text": "vier – 四"}, None),
        ({}, failure("EXECUTION_ERROR", details={"stderr": "no"}, fields=("a",))),
        ({"big": 2**70, "list": [1, None, {"a": 0.5}]}, None),
    ],
)
def test_stored_answer_is_replayed_unchanged(data: dict[str, Any], error: ErrorInfo | None) -> None:
    first = answer("call_1", data, error)
    again = replay_of(pack_answer(first))
    assert _unmarked(again) == first
    assert again.metadata.call_id == "call_1"


@pytest.mark.row("P3")
def test_debug_info_is_not_stored() -> None:
    first = answer("call_1", {"a": 1}).model_copy(update={"debug_info": {"arguments": "PRIVATE"}})
    packed = pack_answer(first)
    assert "PRIVATE" not in packed
    assert replay_of(packed).debug_info is None


@pytest.mark.row("P3")
def test_stored_failure_is_never_retryable() -> None:
    error = failure("CITY_BUSY", retryable=True, retry_after_ms=100)
    again = replay_of(pack_answer(answer(error=error)))
    assert again.error == failure("CITY_BUSY")


@pytest.mark.row("P3")
@pytest.mark.parametrize("character", ["x", "é", "\0"])
def test_oversized_answer_is_stored_without_its_data(character: str) -> None:
    first = answer("call_1", {"text": character * (MAX_ANSWER_BYTES)})
    again = replay_of(pack_answer(first))
    assert (again.success, again.error) == (True, None)
    assert again.data["truncated"] is True
    info = again.data["truncation_info"]
    assert info["original_length"] > MAX_ANSWER_BYTES
    assert info["returned_length"] == 0
    assert "Do not repeat" in info["summary"]
    assert len(pack_answer(first)) < 2000


@pytest.mark.row("P3")
def test_stored_fields_warnings_and_details_are_bounded() -> None:
    error = failure(
        "INVALID_PARAMS", fields=tuple(f"{n:080}" for n in range(20_000)), details={"a": "x" * 100}
    )
    first = answer("call_1", error=error)
    metadata = first.metadata.model_copy(update={"warnings": ("w" * 80,) * 20_000})
    packed = pack_answer(first.model_copy(update={"metadata": metadata}))
    assert len(packed) < 10_000
    again = replay_of(packed)
    assert (error_of(again).fields, again.metadata.warnings) == (None, ())
    assert details_of(again)["truncated"] is True
    assert again.data == {}


@pytest.mark.row("P3")
@pytest.mark.parametrize("text", ["", "{}", "null", '{"success": true}'])
def test_invalid_stored_envelope_is_rejected(text: str) -> None:
    with pytest.raises(ValidationError):
        replay_of(text)
