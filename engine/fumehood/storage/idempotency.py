"""Rows of idempotency keys: which call a key was used for, and what became of it.

Host side. Above it `pipeline/claim`, which claims and settles, and approvals, which own the key of
a call that waits. Every function runs on a connection inside its caller's
transaction, on the writer's thread, so that a key changes hands in the very commit of what it
is about. Invariants: of two calls with one key one is let through; a call that may have acted
leaves its key behind.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Row

from fumehood.core.errors import InternalError
from fumehood.core.idempotency import KEY_LIFETIME, KeptKey, KeyedCall, KeyState
from fumehood.storage.changes import stamp
from fumehood.storage.errors import StoreError
from fumehood.storage.prepared import Prepared
from fumehood.storage.schema import IDEMPOTENCY

FORGOTTEN_AT_ONCE = 500
"""Rows of one deletion: other writes wait for at most so many."""

_KEY = IDEMPOTENCY.c

# On the way of every call with a key.
_THIS = (_KEY.principal_id == bindparam("this_principal")) & (_KEY.key == bindparam("this_key"))
_RUNNING = _THIS & (_KEY.state == KeyState.RUNNING.value) & (_KEY.call_id == bindparam("this_call"))
_FIND = Prepared(select(IDEMPOTENCY).where(_THIS))
_INSERT = Prepared(insert(IDEMPOTENCY).on_conflict_do_nothing())
_FINISH = Prepared(
    update(IDEMPOTENCY)
    .where(_RUNNING)
    .values(state=KeyState.DONE.value, answer=bindparam("this_answer"))
)
_RELEASE = Prepared(delete(IDEMPOTENCY).where(_RUNNING))
_LOSE = Prepared(update(IDEMPOTENCY).where(_RUNNING).values(state=KeyState.UNKNOWN.value))


class KeyLost(StoreError, InternalError):
    """A key that was held is not there, or is another call's. Nothing of the change was kept."""

    def __init__(self) -> None:
        super().__init__("The idempotency key of this call is not its own any more.")


def take(
    connection: Connection,
    call: KeyedCall,
    now: datetime,
    is_held: Callable[[str], bool],
) -> KeptKey | None:
    """Claim a key for a call. None: it is its now; else what was there before.

    `is_held` says of a call id whether this engine still carries that call out. One that
    nobody does, and that has no ending, is a lost one.
    """
    if _insert(connection, call, now):
        return None
    found = _find(connection, call.principal_id, call.key)
    if found is not None and found.state == KeyState.RUNNING and not is_held(found.call_id):
        _lose(connection, found, now)
        found = _find(connection, call.principal_id, call.key)
    if found is not None and not _is_forgotten(found, now):
        return _kept(found)
    connection.execute(delete(IDEMPOTENCY).where(_is(call.principal_id, call.key)))
    _insert(connection, call, now)
    return None


def finish(connection: Connection, call: KeyedCall, answer: str) -> None:
    """Keep the answer of a running call.

    Raises:
        KeyLost: the key is not this call's.
    """
    _one(_FINISH.execute(connection, {**_this(call), "this_answer": answer}).rowcount)


def release(connection: Connection, call: KeyedCall) -> None:
    """Give the key of a running call back: it did not act, or may act twice."""
    _RELEASE.execute(connection, _this(call))


def lose(connection: Connection, call: KeyedCall) -> None:
    """The running call may have acted, and has no answer. Only what may be repeated is freed."""
    if call.may_repeat:
        release(connection, call)
        return
    _LOSE.execute(connection, _this(call))


def hand_over(connection: Connection, principal_id: str, key: str, approval_id: str) -> None:
    """The running call of this key waits for this approval, which owns the key from now on.

    Raises:
        KeyLost: no call with this key is running. The whole transaction should be given up.
    """
    held = _is(principal_id, key) & (_KEY.state == KeyState.RUNNING.value)
    values = {"state": KeyState.WAITING.value, "approval_id": approval_id}
    _one(connection.execute(update(IDEMPOTENCY).where(held).values(values)).rowcount)


def pass_on(connection: Connection, principal_id: str, key: str, approval_id: str) -> None:
    """The call that waits is asked about again: another approval owns the key from now on."""
    waiting = _is_waiting(principal_id, key)
    connection.execute(update(IDEMPOTENCY).where(waiting).values(approval_id=approval_id))


def complete(
    connection: Connection, principal_id: str, key: str, answer_json: str, now: datetime
) -> None:
    """The call that waited has ended; repeats get this answer for a day from `now`.

    `answer_json` comes from `wire.kept_answers.pack_answer`. Nothing happens where no call with
    this key waits.
    """
    values = {
        "state": KeyState.DONE.value,
        "answer": answer_json,
        "expires_at": stamp(now + KEY_LIFETIME),
    }
    waiting = _is_waiting(principal_id, key)
    connection.execute(update(IDEMPOTENCY).where(waiting).values(values))


def free(connection: Connection, principal_id: str, key: str) -> None:
    """The call that waited did not act and may be sent again."""
    connection.execute(delete(IDEMPOTENCY).where(_is_waiting(principal_id, key)))


def correct(
    connection: Connection,
    principal_id: str,
    key: str,
    approval_id: str,
    answer_json: str,
    now: datetime,
) -> None:
    """Another answer than the one that repeats got so far: a human has found out more.

    Nothing happens where the key is another call's by now: that may take longer than a day.
    """
    done = _is(principal_id, key) & (_KEY.state == KeyState.DONE.value)
    done &= _KEY.approval_id == approval_id
    values = {"answer": answer_json, "expires_at": stamp(now + KEY_LIFETIME)}
    connection.execute(update(IDEMPOTENCY).where(done).values(values))


def recover(connection: Connection, now: datetime) -> int:
    """At the start: what ran in an engine that is gone is lost; returns how many are unknown.

    What waits for an approval goes on waiting.
    """
    running = _KEY.state == KeyState.RUNNING.value
    connection.execute(delete(IDEMPOTENCY).where(running, _KEY.may_repeat))
    return connection.execute(update(IDEMPOTENCY).where(running).values(_unknown(now))).rowcount


def forget_old(connection: Connection, now: datetime) -> int:
    """Delete keys that have been known for long enough, some at a time; returns how many went."""
    over = _KEY.state.in_((KeyState.DONE.value, KeyState.UNKNOWN.value))
    old = (
        select(_KEY.principal_id, _KEY.key)
        .where(_KEY.expires_at <= stamp(now), over)
        .limit(FORGOTTEN_AT_ONCE)
    )
    rows = connection.execute(old).all()
    for row in rows:
        connection.execute(delete(IDEMPOTENCY).where(_is(row.principal_id, row.key)))
    return len(rows)


def _insert(connection: Connection, call: KeyedCall, now: datetime) -> bool:
    """Whether the key was nobody's: nearly always, so nobody looks before."""
    values = {
        "principal_id": call.principal_id,
        "key": call.key,
        "fingerprint": call.fingerprint,
        "call_id": call.call_id,
        "state": KeyState.RUNNING.value,
        "may_repeat": call.may_repeat,
        "created_at": stamp(now),
        "expires_at": stamp(now + KEY_LIFETIME),
    }
    return _INSERT.execute(connection, values).rowcount == 1


def _find(connection: Connection, principal_id: str, key: str) -> Row[Any] | None:
    return _FIND.execute(connection, {"this_principal": principal_id, "this_key": key}).first()


def _lose(connection: Connection, row: Row[Any], now: datetime) -> None:
    chosen = _is(row.principal_id, row.key)
    if row.may_repeat:
        connection.execute(delete(IDEMPOTENCY).where(chosen))
    else:
        connection.execute(update(IDEMPOTENCY).where(chosen).values(_unknown(now)))


def _unknown(now: datetime) -> dict[str, str]:
    """Known for a day from when it was found out: it may have been down for long."""
    return {"state": KeyState.UNKNOWN.value, "expires_at": stamp(now + KEY_LIFETIME)}


def _is_forgotten(row: Row[Any], now: datetime) -> bool:
    ended = row.state in (KeyState.DONE.value, KeyState.UNKNOWN.value)
    return ended and bool(row.expires_at <= stamp(now))


def _is(principal_id: str, key: str) -> Any:
    return (_KEY.principal_id == principal_id) & (_KEY.key == key)


def _this(call: KeyedCall) -> dict[str, str]:
    return {
        "this_principal": call.principal_id,
        "this_key": call.key,
        "this_call": call.call_id,
    }


def _is_waiting(principal_id: str, key: str) -> Any:
    return _is(principal_id, key) & (_KEY.state == KeyState.WAITING.value)


def _one(count: int) -> None:
    if count != 1:
        raise KeyLost


def _kept(row: Row[Any]) -> KeptKey:
    call = KeyedCall(row.principal_id, row.key, row.fingerprint, row.call_id, bool(row.may_repeat))
    return KeptKey(call, KeyState(row.state), row.approval_id, row.answer)
