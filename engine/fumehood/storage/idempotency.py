"""Idempotency keys: the call of each key, its outcome, and the answer that repeats get.

Host side. Above it are `pipeline/claim`, which claims and settles keys, and approvals, which own
the key of a waiting call. Functions with a connection run inside their caller's transaction, on the
writer's thread, so that a key changes owner in the same commit as the change that causes it.
A key belongs to its principal; the same text from another principal is another key.

    (no row) → running → done | unknown | (no row)      running → waiting → done | (no row)

`done` has an answer, which repeated calls get; `unknown` has none, and may have had effects.
Invariants: only one of two calls with the same key proceeds; a call that may have acted keeps its
key; a stored answer is bounded, has no `debug_info`, and is marked when it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    bindparam,
    delete,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Row
from sqlalchemy.sql.expression import ClauseElement

from fumehood.core.envelope import Envelope, ErrorInfo
from fumehood.core.errors import InternalError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.protocol.messages import decode_envelope
from fumehood.storage.changes import stamp
from fumehood.storage.database import DELETED_AT_ONCE
from fumehood.storage.errors import StoreError
from fumehood.storage.schema import IDEMPOTENCY

KEY_LIFETIME = timedelta(hours=24)
"""How long a key is known (mission P3). One that is running or waiting is known until it ends."""

MAX_ANSWER_BYTES = MB
"""Size limit of a stored answer as JSON; a longer one is stored without its data."""


class KeyState(StrEnum):
    """What became of the call that a key was first used for."""

    RUNNING = "running"
    WAITING = "waiting"
    """Waiting for approval; the approval owns the key."""
    DONE = "done"
    UNKNOWN = "unknown"
    """It may have taken effect, and its answer is lost."""


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """A call and the key that it came with."""

    principal_id: str
    key: str
    fingerprint: str
    call_id: str
    may_repeat: bool
    """Whether running it twice does no harm: its tool is `idempotent` or `read_only`."""


@dataclass(frozen=True, slots=True)
class KeptKey:
    """A key as it is kept."""

    call: KeyedCall
    state: KeyState
    approval_id: str | None
    answer: str | None
    """The envelope as JSON, where it is done."""


class _Prepared:
    """A statement that is compiled once; a column without a value is null.

    Building, looking up and compiling a statement takes longer than SQLite takes to run it. Takes
    only values that SQLite knows itself: no column type is consulted.
    """

    def __init__(self, statement: ClauseElement) -> None:
        compiled = statement.compile(dialect=sqlite.dialect(paramstyle="named"))
        self._text = str(compiled)
        self._fixed: dict[str, Any] = dict(compiled.params)

    def execute(self, connection: Connection, values: dict[str, Any]) -> CursorResult[Any]:
        """Run it in the caller's transaction with these values (text, numbers, bytes)."""
        return connection.exec_driver_sql(self._text, {**self._fixed, **values})


_KEY = IDEMPOTENCY.c

# Run for every call with a key, so these are compiled once.
_THIS = (_KEY.principal_id == bindparam("this_principal")) & (_KEY.key == bindparam("this_key"))
_RUNNING = _THIS & (_KEY.state == KeyState.RUNNING.value) & (_KEY.call_id == bindparam("this_call"))
_FIND = _Prepared(select(IDEMPOTENCY).where(_THIS))
_INSERT = _Prepared(insert(IDEMPOTENCY).on_conflict_do_nothing())
_FINISH = _Prepared(
    update(IDEMPOTENCY)
    .where(_RUNNING)
    .values(state=KeyState.DONE.value, answer=bindparam("this_answer"))
)
_RELEASE = _Prepared(delete(IDEMPOTENCY).where(_RUNNING))
_LOSE = _Prepared(update(IDEMPOTENCY).where(_RUNNING).values(state=KeyState.UNKNOWN.value))


class KeyLost(StoreError, InternalError):
    """A held key is missing or belongs to another call. The change was rolled back."""

    def __init__(self) -> None:
        super().__init__("This call no longer owns its idempotency key.")


def take(
    connection: Connection,
    call: KeyedCall,
    now: datetime,
    is_held: Callable[[str], bool],
) -> KeptKey | None:
    """Claim a key for a call. None if that succeeded, else the existing key.

    `is_held` tells whether this engine is still running the call with an id. A call that is neither
    running nor ended is lost.
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
    """Release the key of a running call that did not act, or may act twice."""
    _RELEASE.execute(connection, _this(call))


def lose(connection: Connection, call: KeyedCall) -> None:
    """Mark a running call as lost: it may have acted. The key of a repeatable call is released."""
    if call.may_repeat:
        release(connection, call)
        return
    _LOSE.execute(connection, _this(call))


def hand_over(connection: Connection, principal_id: str, key: str, approval_id: str) -> None:
    """Make this approval the owner of the running call's key.

    Raises:
        KeyLost: no call with this key is running. The caller should roll back its transaction.
    """
    held = _is(principal_id, key) & (_KEY.state == KeyState.RUNNING.value)
    values = {"state": KeyState.WAITING.value, "approval_id": approval_id}
    _one(connection.execute(update(IDEMPOTENCY).where(held).values(values)).rowcount)


def complete(
    connection: Connection, principal_id: str, key: str, answer_json: str, now: datetime
) -> None:
    """End the waiting call; repeats get this answer for a day from `now`.

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
    """Delete the key of a waiting call that did not act and may be repeated."""
    connection.execute(delete(IDEMPOTENCY).where(_is_waiting(principal_id, key)))


def correct(
    connection: Connection,
    principal_id: str,
    key: str,
    approval_id: str,
    answer_json: str,
    now: datetime,
) -> None:
    """Replace the answer that repeats get, after a human has found out more.

    Does nothing if another call has the key by now, which is possible after a day.
    """
    done = _is(principal_id, key) & (_KEY.state == KeyState.DONE.value)
    done &= _KEY.approval_id == approval_id
    values = {"answer": answer_json, "expires_at": stamp(now + KEY_LIFETIME)}
    connection.execute(update(IDEMPOTENCY).where(done).values(values))


def recover(connection: Connection, now: datetime) -> int:
    """At startup, mark calls of a previous engine as lost; returns how many outcomes are unknown.

    Calls that wait for an approval keep waiting.
    """
    running = _KEY.state == KeyState.RUNNING.value
    connection.execute(delete(IDEMPOTENCY).where(running, _KEY.may_repeat))
    return connection.execute(update(IDEMPOTENCY).where(running).values(_unknown(now))).rowcount


def answer_of(connection: Connection, principal_id: str, call_id: str) -> str | None:
    """The stored answer of a call."""
    own = (_KEY.principal_id == principal_id) & (_KEY.call_id == call_id)
    return connection.execute(select(_KEY.answer).where(own)).scalars().first()


def forget_old(connection: Connection, now: datetime) -> int:
    """Delete a batch of expired keys; returns their number."""
    over = _KEY.state.in_((KeyState.DONE.value, KeyState.UNKNOWN.value))
    row: ColumnElement[int] = literal_column("rowid")
    old = select(row).select_from(IDEMPOTENCY).where(_KEY.expires_at <= stamp(now), over)
    few = old.limit(DELETED_AT_ONCE)
    return connection.execute(delete(IDEMPOTENCY).where(row.in_(few))).rowcount


def _insert(connection: Connection, call: KeyedCall, now: datetime) -> bool:
    """Whether the key was free. It nearly always is, so this inserts without reading first."""
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
    """Kept for a day from now: the engine may have been down for a long time."""
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


MAX_NOTES = 20
"""Warnings and fields that stay in an answer that is too long, because callers control their size.
"""

NOT_KEPT = (
    "The call has ended, but its answer was too long to be kept. Do not repeat the call to see it."
)


def pack_answer(envelope: Envelope) -> str:
    """The envelope as it is stored; if it is too long, its data is replaced by a note."""
    text = envelope.model_copy(update={"debug_info": None}).model_dump_json()
    if _size(text) <= MAX_ANSWER_BYTES:
        return text
    return _without_data(envelope, len(text)).model_dump_json()


def replay_of(answer: str) -> Envelope:
    """A stored answer for a repeated call: marked as such, and never retryable.

    Raises:
        ValueError: it is not an envelope of this version.
    """
    envelope = decode_envelope(answer.encode())
    metadata = envelope.metadata.model_copy(update={"idempotent_replay": True})
    error = envelope.error
    if error is not None:  # the same key gives the same answer, whatever the tool thinks of it
        error = error.model_copy(update={"retryable": False, "retry_after_ms": None})
    return envelope.model_copy(update={"metadata": metadata, "error": error})


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


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
    warnings = envelope.metadata.warnings[:MAX_NOTES]
    return envelope.model_copy(
        update={
            "data": note if error is None else {},
            "error": _short(error, note) if error is not None else None,
            "metadata": envelope.metadata.model_copy(update={"warnings": warnings}),
            "debug_info": None,
        }
    )


def _short(error: ErrorInfo, note: JsonObject) -> ErrorInfo:
    fields = error.fields[:MAX_NOTES] if error.fields is not None else None
    return error.model_copy(update={"details": note, "fields": fields})
