"""Idempotency keys: for each key, the call that first used it, its state, and the stored answer.

Host side. `pipeline/claim` claims and settles keys. While a call waits for approval, the approval
owns the call's key. Functions that take a connection run inside their caller's transaction, on the
writer's thread, so that a key changes in the same commit as its call or approval. A key belongs to
its principal; the same text from another principal is another key. A key changes its state in these
ways:

    (no row) → running → done | unknown | (no row)      running → waiting → done | (no row)

A `done` key has a stored answer, which repeated calls get. An `unknown` key has no answer, and its
call may have had effects. Invariants: only one of two calls with the same key proceeds; a call that
may have had effects keeps its key; a stored answer has a maximum size and no `debug_info`; an
answer to a repeated call is marked as a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    Connection,
    bindparam,
    delete,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.engine import Row

from fumehood.core.envelope import Envelope
from fumehood.core.errors import InternalError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.protocol.messages import decode_envelope
from fumehood.storage.changes import stamp
from fumehood.storage.database import DELETED_AT_ONCE
from fumehood.storage.errors import StoreError
from fumehood.storage.schema import IDEMPOTENCY, storable

KEY_LIFETIME = timedelta(hours=24)
"""How long a key is kept. The key of a running or waiting call never expires."""

MAX_ANSWER_BYTES = MB
"""Maximum size in bytes of a stored answer as JSON. If an answer is larger, it is stored without
its data."""


class KeyState(StrEnum):
    """The state of an idempotency key: what has become of the call that first used the key."""

    RUNNING = "running"
    WAITING = "waiting"
    """The call waits for approval. The approval owns the key."""
    DONE = "done"
    UNKNOWN = "unknown"
    """The call may have taken effect, but its answer is lost."""


_OPEN = (KeyState.RUNNING.value, KeyState.WAITING.value)
"""States in which a key never expires."""


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """A call and its idempotency key."""

    principal_id: str
    key: str
    fingerprint: str
    call_id: str
    may_repeat: bool
    """Whether running the call twice does no harm: its tool is `idempotent` or `read_only`."""


@dataclass(frozen=True, slots=True)
class KeptKey:
    """An idempotency key as it is stored, with its state and the call that first used it."""

    call: KeyedCall
    state: KeyState
    approval_id: str | None
    answer: str | None
    """The call's envelope as JSON if the state is `done`, otherwise None."""


_KEY = IDEMPOTENCY.c
_OWN = (_KEY.principal_id, _KEY.key)

# These run for every call with a key, so they are built once, and SQLAlchemy compiles them once.
_THIS = (_KEY.principal_id == bindparam("this_principal")) & (_KEY.key == bindparam("this_key"))
_RUNNING = _THIS & (_KEY.state == KeyState.RUNNING.value) & (_KEY.call_id == bindparam("this_call"))
_FIND = select(IDEMPOTENCY).where(_THIS)
_INSERT = text(
    """INSERT INTO idempotency
    (principal_id, key, fingerprint, call_id, state, may_repeat, created_at, expires_at)
    VALUES (:principal_id, :key, :fingerprint, :call_id, :state, :may_repeat, :created_at,
    :expires_at) ON CONFLICT DO NOTHING"""
)
_FINISH = (
    update(IDEMPOTENCY)
    .where(_RUNNING)
    .values(state=KeyState.DONE.value, answer=bindparam("this_answer"))
)
_RELEASE = delete(IDEMPOTENCY).where(_RUNNING)
_LOSE = update(IDEMPOTENCY).where(_RUNNING).values(state=KeyState.UNKNOWN.value)


class KeyLost(StoreError, InternalError):
    """A call or approval no longer owns its idempotency key: the key is missing or belongs to
    another call. The change was rolled back.
    """

    def __init__(self) -> None:
        super().__init__("This call no longer owns its idempotency key.")


def take(
    connection: Connection,
    call: KeyedCall,
    now: datetime,
    is_held: Callable[[str], bool],
) -> KeptKey | None:
    """Claim the key of a call. Return None if the call now owns the key, otherwise the existing
    key. An expired key is replaced, unless its call is running or waits for an approval.

    `is_held` tells whether this engine is still running the call with the given id. If an existing
    key has the state `running`, but its call is not held, that call was lost. If the lost call may
    be repeated, its key is replaced. Otherwise, its key is marked as `unknown` and returned.

    Raises:
        UnstorableText: the key contains a NUL character.
    """
    storable(call.key)  # the INSERT is plain SQL, without the check of text columns
    if _insert(connection, call, now):
        return None
    found = _find(connection, call.principal_id, call.key)
    if found is not None and found.state == KeyState.RUNNING and not is_held(found.call_id):
        lost = _is(call.principal_id, call.key)
        connection.execute(delete(IDEMPOTENCY).where(lost, _KEY.may_repeat))
        connection.execute(update(IDEMPOTENCY).where(lost).values(_unknown(now)))
        found = _find(connection, call.principal_id, call.key)
    if found is not None and (found.state in _OPEN or found.expires_at > stamp(now)):
        return _kept(found)
    connection.execute(delete(IDEMPOTENCY).where(_is(call.principal_id, call.key)))
    _insert(connection, call, now)
    return None


def finish(connection: Connection, call: KeyedCall, answer: str) -> None:
    """Store the answer of a running call. `answer` comes from `pack_answer`.

    Raises:
        KeyLost: the key does not belong to this call.
    """
    _one(connection.execute(_FINISH, {**_this(call), "this_answer": answer}).rowcount)


def release(connection: Connection, call: KeyedCall) -> None:
    """Delete the key of a running call, so that the key can be used again. The caller must know
    that the call had no effect, or that it is safe to repeat it.
    """
    connection.execute(_RELEASE, _this(call))


def lose(connection: Connection, call: KeyedCall) -> None:
    """Mark the key of a running call as `unknown`, because the call may have had effects.

    If the call may be repeated (`may_repeat`), its key is deleted instead.
    """
    if call.may_repeat:
        release(connection, call)
        return
    connection.execute(_LOSE, _this(call))


def hand_over(connection: Connection, principal_id: str, key: str, approval_id: str) -> None:
    """Make an approval the owner of a running call's key. The state of the key becomes `waiting`.

    Raises:
        KeyLost: no call with this key is running. The caller should roll back its transaction.
    """
    held = _is(principal_id, key) & (_KEY.state == KeyState.RUNNING.value)
    values = {"state": KeyState.WAITING.value, "approval_id": approval_id}
    _one(connection.execute(update(IDEMPOTENCY).where(held).values(values)).rowcount)


def complete(
    connection: Connection, principal_id: str, key: str, answer_json: str, now: datetime
) -> None:
    """Store the answer of a waiting call. Repeated calls get this answer until a day after `now`.

    `answer_json` comes from `pack_answer`. Does nothing if no call with this key is waiting.
    """
    values = {
        "state": KeyState.DONE.value,
        "answer": answer_json,
        "expires_at": stamp(now + KEY_LIFETIME),
    }
    waiting = _is_waiting(principal_id, key)
    connection.execute(update(IDEMPOTENCY).where(waiting).values(values))


def free(connection: Connection, principal_id: str, key: str) -> None:
    """Delete the key of a waiting call that had no effect, so that the call may be repeated."""
    connection.execute(delete(IDEMPOTENCY).where(_is_waiting(principal_id, key)))


def correct(
    connection: Connection,
    principal_id: str,
    key: str,
    approval_id: str,
    answer_json: str,
    now: datetime,
) -> None:
    """Replace the stored answer of a call, after a human has found out how the call really ended.
    Repeated calls get this answer until a day after `now`.

    `answer_json` comes from `pack_answer`. If the approval `approval_id` does not own the key any
    more, do nothing. This can happen after a day, when another call may use the key.
    """
    done = _is(principal_id, key) & (_KEY.state == KeyState.DONE.value)
    done &= _KEY.approval_id == approval_id
    values = {"answer": answer_json, "expires_at": stamp(now + KEY_LIFETIME)}
    connection.execute(update(IDEMPOTENCY).where(done).values(values))


def recover(connection: Connection, now: datetime) -> int:
    """Settle the keys of calls that were running when an earlier engine ended. Return the number of
    keys that were marked as `unknown`. Called at the engine's start.

    If such a call may be repeated, its key is deleted. Otherwise, its key is marked as `unknown`.
    The keys of calls that wait for an approval do not change.
    """
    running = _KEY.state == KeyState.RUNNING.value
    connection.execute(delete(IDEMPOTENCY).where(running, _KEY.may_repeat))
    return connection.execute(update(IDEMPOTENCY).where(running).values(_unknown(now))).rowcount


def answer_of(connection: Connection, principal_id: str, call_id: str) -> str | None:
    """Return the stored answer of a principal's call as JSON, or None if there is none."""
    own = (_KEY.principal_id == principal_id) & (_KEY.call_id == call_id)
    return connection.execute(select(_KEY.answer).where(own)).scalars().first()


def forget_old(connection: Connection, now: datetime) -> int:
    """Delete a batch of expired keys. Return the number of deleted keys."""
    is_over = _KEY.state.not_in(_OPEN)
    few = select(*_OWN).where(_KEY.expires_at <= stamp(now), is_over).limit(DELETED_AT_ONCE)
    return connection.execute(delete(IDEMPOTENCY).where(tuple_(*_OWN).in_(few))).rowcount


def _insert(connection: Connection, call: KeyedCall, now: datetime) -> bool:
    """Insert the key of a call. Return False if the key already exists."""
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
    # Without a query beforehand, because most keys are new.
    return connection.execute(_INSERT, values).rowcount == 1


def _find(connection: Connection, principal_id: str, key: str) -> Row[Any] | None:
    return connection.execute(_FIND, {"this_principal": principal_id, "this_key": key}).first()


def _unknown(now: datetime) -> dict[str, str]:
    """Return the column values that mark a key as `unknown` and let it expire a day after `now`."""
    return {"state": KeyState.UNKNOWN.value, "expires_at": stamp(now + KEY_LIFETIME)}


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


NOT_KEPT = (
    "The call has ended, but its answer was too long to be kept. Do not repeat the call to see it."
)


def pack_answer(envelope: Envelope) -> str:
    """Return an envelope as JSON for storage. If the JSON is too long, a note replaces the
    envelope's data.
    """
    text = envelope.model_copy(update={"debug_info": None}).model_dump_json()
    if len(text.encode()) <= MAX_ANSWER_BYTES:
        return text
    return _without_data(envelope, len(text)).model_dump_json()


def replay_of(answer: str) -> Envelope:
    """Return the envelope that a repeated call gets, made from a stored answer. The envelope is
    marked as a replay, and its error is never retryable.

    Raises:
        ValueError: the text is not an envelope of this version.
    """
    envelope = decode_envelope(answer.encode())
    metadata = envelope.metadata.model_copy(update={"idempotent_replay": True})
    error = envelope.error
    if error is not None:  # a retry with the same key would only get the same answer
        error = error.model_copy(update={"retryable": False, "retry_after_ms": None})
    return envelope.model_copy(update={"metadata": metadata, "error": error})


def _without_data(envelope: Envelope, length: int) -> Envelope:
    note: JsonObject = {
        "truncated": True,
        "truncation_info": {
            "original_length": length,
            "returned_length": 0,
            "summary": NOT_KEPT,
        },
    }
    error = envelope.error
    if error is not None:
        error = error.model_copy(update={"details": note, "fields": None})
    return envelope.model_copy(
        update={
            "data": note if error is None else {},
            "error": error,
            "metadata": envelope.metadata.model_copy(update={"warnings": ()}),
            "debug_info": None,
        }
    )
