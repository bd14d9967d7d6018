"""The audit chain: rows that cannot be changed, removed or reordered unnoticed.

Host side. Each row's mac is an HMAC-SHA-256 over the mac of the previous row, its own number and
its body, with a key that is kept outside the database (`audit_keys`). The part `audit` checks the
chain. The database's only writer appends rows in the transaction of the change that they record, so
the order of rows is the order of commits. Only keys are kept in memory; the newest row, the head,
is read from the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, LargeBinary, cast, delete, event, insert, select

from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json
from fumehood.storage.audit_rows import (
    GENESIS,
    ROTATED,
    AuditKey,
    AuditRow,
    commitment_to,
    mac_of,
    next_key_of,
)
from fumehood.storage.backend import RawBytes
from fumehood.storage.errors import AuditKeyLost
from fumehood.storage.schema import AUDIT

IN_MEMORY_KEPT = 10_000
"""Number of newest rows that are kept if the chain is only in memory. A chain in memory is lost
when its process ends."""

READ_AT_ONCE = 2000
"""Number of rows that are read from the database at a time."""

_INSERT = insert(AUDIT)

# Read as bytes, so that invalid text is reported instead of failing to be read.
_COLUMNS = (
    AUDIT.c.seq,
    RawBytes(AUDIT.c.key_id).label("key_id"),
    RawBytes(AUDIT.c.body).label("body"),
    cast(AUDIT.c.mac, LargeBinary).label("mac"),
)
_HEAD = select(*_COLUMNS).order_by(AUDIT.c.seq.desc()).limit(1)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """The content of one row. `kind` is a name like `approval.created`; `at` is UTC in ISO 8601."""

    kind: str
    at: str
    fields: JsonObject


class AuditChain:
    """Appends rows to the chain. The chain's newest row is read from the database each time, so the
    object holds no state that a rollback would have to undo.

    `kept` is the number of newest rows to keep, or None to keep all. `on_growth` is called on the
    writer's thread with the number of appended rows, even if they are rolled back.
    """

    def __init__(self, key: AuditKey, *, kept: int | None = None) -> None:
        self._first_key = key
        self._keys = {key.id: key}
        self.kept = kept
        self.on_growth: Callable[[int], None] = lambda rows: None

    @property
    def keys(self) -> dict[str, bytes]:
        """The secrets used since the chain was opened, by id."""
        return {key.id: key.secret for key in self._keys.values()}

    def append(self, connection: Connection, kind: str, at: str, fields: JsonObject) -> int:
        """Append a row in the caller's transaction, on the writer's thread. Return its number."""
        return self.append_all(connection, [AuditEntry(kind, at, fields)])

    def append_all(self, connection: Connection, entries: Sequence[AuditEntry]) -> int:
        """Append rows in order. Return the last row's number."""
        head = head_of(connection)
        key = self._key_after(head)
        seq, before = (head.seq, head.mac) if head is not None else (0, GENESIS)
        rows = []
        for entry in entries:
            if {"kind", "at"} & entry.fields.keys():
                raise ValueError("a row of the audit chain has its kind and its time already")
            seq += 1
            body = strict_json.dumps({"kind": entry.kind, "at": entry.at, **entry.fields})
            before = mac_of(key.secret, before, seq, body)
            rows.append({"seq": seq, "key_id": key.id, "body": body.decode("ascii"), "mac": before})
        connection.execute(_INSERT, rows)
        if self.kept is not None:
            connection.execute(delete(AUDIT).where(AUDIT.c.seq <= seq - self.kept))
        self.on_growth(len(rows))
        return seq

    def learn(self, key: AuditKey) -> None:
        """Add the key that the next rotation will announce."""
        self._keys[key.id] = key

    def rotate(self, connection: Connection, at: str, key: AuditKey, fields: JsonObject) -> int:
        """Append the last row under the old key. The row announces a new key, which `learn` has
        added.

        Return the row's number.
        """
        announced = {
            "next_key_id": key.id,
            "commitment": commitment_to(key.secret),
            **fields,
        }
        return self.append(connection, ROTATED, at, announced)

    def _key_after(self, head: AuditRow | None) -> AuditKey:
        if head is None:
            return self._first_key
        wanted = key_id_after(head)
        key = self._keys.get(wanted)
        if key is None:
            raise AuditKeyLost(
                f"The audit chain continues with the key {wanted[:40]!r}, which this engine does "
                "not have: the database was changed while it ran."
            )
        return key


def head_of(connection: Connection) -> AuditRow | None:
    """Return the newest row, or None."""
    return next(_linked(connection.execute(_HEAD).all(), None), None)


def key_id_after(head: AuditRow) -> str:
    """Return the id of the key for the row after `head`."""
    announced = next_key_of(head.body)
    return announced[0] if announced is not None else head.key_id


def rows_after(connection: Connection, after: int, limit: int) -> list[AuditRow]:
    """Return at most `limit` rows after row `after`, each with the previous row's mac if known."""
    found = connection.execute(
        select(*_COLUMNS).where(AUDIT.c.seq > after).order_by(AUDIT.c.seq).limit(limit)
    ).all()
    if not found:
        return []
    first = select(_COLUMNS[3]).where(AUDIT.c.seq == found[0].seq - 1)
    before = connection.execute(first).scalar_one_or_none()
    if before is None and found[0].seq == 1:
        before = GENESIS
    return list(_linked(found, before))


def all_rows(connection: Connection) -> Iterator[AuditRow]:
    """Yield every row in order, including rows that are added during the iteration."""
    # Start below every possible number, so that a row with an invalid, negative one is also found.
    after = -(2**63)
    while rows := rows_after(connection, after, READ_AT_ONCE):
        yield from rows
        after = rows[-1].seq


def attach_chain(engine: Engine, chain: AuditChain) -> None:
    """Attach the chain to all connections of `engine`, so that `chain_of` finds it."""

    @event.listens_for(engine, "engine_connect")
    def attach(connection: Connection) -> None:
        connection.info["audit"] = chain


def chain_of(connection: Connection) -> AuditChain:
    """Return the chain of the database to which a connection belongs."""
    chain: AuditChain = connection.info["audit"]
    return chain


def _linked(found: Iterable[Any], before: bytes | None) -> Iterator[AuditRow]:
    """Yield the found rows, each with the mac of the row before it. `before` is the mac of the row
    that precedes the first found row.

    Columns are read by position: access by name would double the time of a full verification.
    """
    follows = None
    for seq, key_id, body, mac in found:
        linked = before if follows is None or seq == follows else None
        yield AuditRow(seq, key_id.decode("ascii", "replace"), body, mac, linked)
        follows, before = seq + 1, mac
