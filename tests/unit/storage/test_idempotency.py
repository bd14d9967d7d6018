"""Rows of keys: one call a key, and a key whose call may have acted is never free again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from fumehood.core.idempotency import KEY_LIFETIME, KeptKey, KeyedCall, KeyState
from fumehood.storage import idempotency as rows
from fumehood.storage.database import Database, open_database
from fumehood.storage.idempotency import KeyLost
from fumehood.storage.schema import IDEMPOTENCY
from support.keyed import NOW, keyed

pytestmark = pytest.mark.row("P3")

MOMENT = timedelta(microseconds=1)


def _held(call_id: str) -> bool:
    return True


def _gone(call_id: str) -> bool:
    return False


@pytest.fixture(params=["file", "memory"])
def database(request: pytest.FixtureRequest, home: Path) -> Iterator[Database]:
    opened = open_database(home / "state.db" if request.param == "file" else None)
    yield opened
    opened.close()


@pytest.fixture
def do(database: Database) -> Callable[..., Any]:
    """Carries out one function of the room in a transaction of its own."""

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return database.write_now(lambda connection: function(connection, *arguments))

    return run


def _take(
    do: Callable[..., Any], call: KeyedCall, now: Any = NOW, is_held: Any = _held
) -> KeptKey | None:
    kept: KeptKey | None = do(rows.take, call, now, is_held)
    return kept


def _count(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(IDEMPOTENCY)).scalar_one()


def test_second_call_with_a_key_finds_the_first(do: Callable[..., Any]) -> None:
    assert _take(do, keyed("call_1")) is None
    found = _take(do, keyed("call_2", fingerprint="other"))
    assert found == KeptKey(keyed("call_1"), KeyState.RUNNING, None, None)


@pytest.mark.parametrize("other", [{"key": "K"}, {"key": "k "}, {"principal_id": "uid:2"}])
def test_key_is_its_principals_and_compared_exactly(
    do: Callable[..., Any], other: dict[str, str]
) -> None:
    assert _take(do, keyed("call_1")) is None
    do(rows.finish, keyed("call_1"), "{}")
    assert _take(do, keyed("call_2", **other)) is None


def test_answer_is_found_by_who_comes_after(do: Callable[..., Any]) -> None:
    _take(do, keyed("call_1"))
    do(rows.finish, keyed("call_1"), '{"a": 1}')
    found = _take(do, keyed("call_2"))
    assert found is not None
    assert (found.state, found.answer, found.call.call_id) == (
        KeyState.DONE, '{"a": 1}', "call_1",
    )  # fmt: skip


@pytest.mark.parametrize("may_repeat", [True, False])
def test_running_call_that_nobody_carries_out_is_lost(
    do: Callable[..., Any], may_repeat: bool
) -> None:
    _take(do, keyed("call_1", may_repeat=may_repeat))
    found = _take(do, keyed("call_2", may_repeat=may_repeat), is_held=_gone)
    if may_repeat:
        assert found is None
    else:
        assert found is not None
        assert (found.state, found.call.call_id) == (KeyState.UNKNOWN, "call_1")


def test_call_that_runs_now_is_not_taken_for_a_lost_one(do: Callable[..., Any]) -> None:
    _take(do, keyed("call_1", may_repeat=True))
    found = _take(do, keyed("call_2", may_repeat=True), is_held="call_1".__eq__)
    assert found is not None
    assert found.state is KeyState.RUNNING


def _done(do: Callable[..., Any]) -> None:
    do(rows.finish, keyed("call_1"), "{}")


def _unknown(do: Callable[..., Any]) -> None:
    do(rows.lose, keyed("call_1"))


def _waits(do: Callable[..., Any]) -> None:
    do(rows.hand_over, "uid:1", "k", "apr_1")


def _runs(do: Callable[..., Any]) -> None:
    """As it is."""


@pytest.mark.parametrize(
    ("end", "is_forgotten"), [(_done, True), (_unknown, True), (_waits, False), (_runs, False)]
)
def test_key_is_known_for_a_day_and_for_as_long_as_its_call_is_open(
    do: Callable[..., Any], end: Callable[..., None], is_forgotten: bool
) -> None:
    _take(do, keyed("call_1"))
    end(do)
    assert do(rows.forget_old, NOW + KEY_LIFETIME - MOMENT) == 0
    assert _take(do, keyed("call_2"), NOW + KEY_LIFETIME - MOMENT) is not None
    assert do(rows.forget_old, NOW + KEY_LIFETIME) == int(is_forgotten)
    taken = _take(do, keyed("call_3"), NOW + KEY_LIFETIME)
    assert (taken is None) is is_forgotten


def test_old_key_is_free_before_it_was_cleared_away(do: Callable[..., Any]) -> None:
    _take(do, keyed("call_1"))
    _done(do)
    assert _take(do, keyed("call_2", fingerprint="other"), NOW + KEY_LIFETIME) is None
    found = _take(do, keyed("call_3"), NOW + KEY_LIFETIME)
    assert found is not None
    assert (found.call.fingerprint, found.answer) == ("other", None)


def test_old_keys_go_some_at_a_time(
    do: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "FORGOTTEN_AT_ONCE", 2)
    for number in range(5):
        call = keyed(f"call_{number}", key=f"k{number}")
        _take(do, call)
        do(rows.finish, call, "{}")
    gone = [do(rows.forget_old, NOW + KEY_LIFETIME) for _ in range(4)]
    assert gone == [2, 2, 1, 0]
    assert do(_count) == 0


def test_call_that_waits_is_ended_by_its_approval_alone(do: Callable[..., Any]) -> None:
    _take(do, keyed("call_1"))
    _waits(do)
    do(rows.release, keyed("call_1"))
    do(rows.lose, keyed("call_1"))
    with pytest.raises(KeyLost):
        do(rows.finish, keyed("call_1"), "mine")
    found = _take(do, keyed("call_2"), is_held=_gone)
    assert found is not None
    assert (found.state, found.approval_id) == (KeyState.WAITING, "apr_1")
    late = NOW + timedelta(days=3)
    do(rows.complete, "uid:1", "k", "answer", late)
    found = _take(do, keyed("call_3"), late + KEY_LIFETIME - MOMENT)
    assert found is not None
    assert (found.state, found.answer) == (KeyState.DONE, "answer")


def test_call_that_waited_in_vain_frees_its_key(do: Callable[..., Any]) -> None:
    _take(do, keyed("call_1"))
    _waits(do)
    do(rows.free, "uid:1", "k")
    assert _take(do, keyed("call_2")) is None


@pytest.mark.parametrize("end", [_done, _unknown, _runs])
def test_approval_changes_no_key_that_does_not_wait(
    do: Callable[..., Any], end: Callable[..., None]
) -> None:
    _take(do, keyed("call_1"))
    end(do)
    before = _take(do, keyed("call_2"))
    do(rows.free, "uid:1", "k")
    do(rows.complete, "uid:1", "k", "forged", NOW)
    assert _take(do, keyed("call_3")) == before


def test_what_became_of_one_call_is_no_answer_to_another_with_its_key(
    do: Callable[..., Any],
) -> None:
    """An interrupted call is resolved when its key has long been used for another one."""
    later = NOW + KEY_LIFETIME
    for number, now in ((1, NOW), (2, later)):
        call = keyed(call_id=f"call_{number}")
        assert _take(do, call, now) is None
        do(rows.hand_over, call.principal_id, call.key, f"apr_{number}")
        do(rows.complete, call.principal_id, call.key, f"answer {number}", now)
    do(rows.correct, call.principal_id, call.key, "apr_1", "resolved", later)
    kept = _take(do, call, later)
    assert kept is not None
    assert (kept.approval_id, kept.answer) == ("apr_2", "answer 2")
    do(rows.correct, call.principal_id, call.key, "apr_2", "resolved", later)  # the twin
    kept = _take(do, call, later)
    assert kept is not None
    assert kept.answer == "resolved"


@pytest.mark.parametrize("end", [_done, _unknown, _waits])
def test_key_that_is_not_running_cannot_be_handed_over(
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


@pytest.mark.parametrize("job", [rows.release, rows.lose])
def test_ending_of_one_call_never_touches_anothers_key(
    do: Callable[..., Any], job: Callable[..., None]
) -> None:
    _take(do, keyed("call_1"))
    do(job, keyed("call_2"))
    with pytest.raises(KeyLost):
        do(rows.finish, keyed("call_2"), "stolen")
    found = _take(do, keyed("call_3"))
    assert found is not None
    assert (found.state, found.call.call_id) == (KeyState.RUNNING, "call_1")


def test_start_finds_what_was_lost_and_leaves_the_rest(do: Callable[..., Any]) -> None:
    for key, may_repeat in (("harmless", True), ("acts", False), ("waits", False)):
        _take(do, keyed(f"call_{key}", key=key, may_repeat=may_repeat))
    do(rows.hand_over, "uid:1", "waits", "apr_1")
    later = NOW + timedelta(days=30)
    assert do(rows.recover, later) == 1
    assert _take(do, keyed("call_4", key="harmless"), later) is None
    for key, state in (("acts", KeyState.UNKNOWN), ("waits", KeyState.WAITING)):
        found = _take(do, keyed("call_5", key=key), later + KEY_LIFETIME - MOMENT)
        assert found is not None
        assert found.state is state
    assert do(rows.recover, later) == 1  # the key that was taken anew
