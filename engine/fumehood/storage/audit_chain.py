"""The audit chain: a table in which any change, removal or reordering of rows can be detected.

Host side. Each row has a mac: an HMAC-SHA-256 over the previous row's mac, the row's own number and
the row's own body. The key for the macs is kept outside the database (`audit_keys`). The part
`audit` checks the chain. The database has only one writer. It appends a row in the transaction of
the change that the row records, so rows are in the order of commits. Only the keys are kept in
memory. The newest row, called the head, is always read from the database.
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
"""Maximum number of rows of a chain that is only in memory. Older rows are deleted. Such a chain is
lost when its process ends."""

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
    """The content of one row to append.

    `kind` is a name like `approval.created`. `at` is the UTC time in ISO 8601. `fields` must not
    contain the keys `kind` and `at`.
    """

    kind: str
    at: str
    fields: JsonObject


class AuditChain:
    """Appends rows to the audit chain, a table in which each row has a mac that depends on the row
    before it.

    `key` is the key for the next row. `kept` is the number of newest rows to keep, or None to keep
    all rows. After each append, `on_growth` is called on the writer's thread with the number of
    appended rows. The transaction may still be rolled back then.
    """

    def __init__(self, key: AuditKey, *, kept: int | None = None) -> None:
        self._first_key = key
        self._keys = {key.id: key}
        self.kept = kept
        self.on_growth: Callable[[int], None] = lambda rows: None

    @property
    def keys(self) -> dict[str, bytes]:
        """The secrets of all keys that were used since the chain was opened, by key id."""
        return {key.id: key.secret for key in self._keys.values()}

    def append(self, connection: Connection, kind: str, at: str, fields: JsonObject) -> int:
        """Append a row in the caller's transaction, and return the row's number. Must be called on
        the writer's thread. The arguments are those of `AuditEntry`.
        """
        return self.append_all(connection, [AuditEntry(kind, at, fields)])

    def append_all(self, connection: Connection, entries: Sequence[AuditEntry]) -> int:
        """Append rows in the given order, as `append` does. Return the number of the last row."""
        head = head_of(connection)  # not remembered, because a transaction may be rolled back
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
        """Add a key, so that this object can write rows with the key once `rotate` has announced
        it.
        """
        self._keys[key.id] = key

    def rotate(self, connection: Connection, at: str, key: AuditKey, fields: JsonObject) -> int:
        """Replace the key of the chain: append a row that announces the new key `key`, and return
        this row's number. It is the last row that is written with the old key.

        The new key must already have been added with `learn`. `fields` are further fields of the
        row.
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
    """Return the newest row of the chain, or None if the chain is empty."""
    return next(_linked(connection.execute(_HEAD).all(), None), None)


def key_id_after(head: AuditRow) -> str:
    """Return the id of the key that the row after `head` must be written with."""
    announced = next_key_of(head.body)
    return announced[0] if announced is not None else head.key_id


def rows_after(connection: Connection, after: int, limit: int) -> list[AuditRow]:
    """Return at most `limit` rows that follow row number `after`. Each returned row includes the
    previous row's mac if the previous row exists.
    """
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
    """Yield every row of the chain in order, including rows that are added during the iteration."""
    # Start below every possible number, so that rows with invalid negative numbers are also found.
    after = -(2**63)
    while rows := rows_after(connection, after, READ_AT_ONCE):
        yield from rows
        after = rows[-1].seq


def attach_chain(engine: Engine, chain: AuditChain) -> None:
    """Attach an audit chain to all connections of `engine`, a SQLAlchemy engine, so that `chain_of`
    can find the chain.
    """

    @event.listens_for(engine, "engine_connect")
    def attach(connection: Connection) -> None:
        connection.info["audit"] = chain


def chain_of(connection: Connection) -> AuditChain:
    """Return the audit chain that `attach_chain` attached to the connection."""
    chain: AuditChain = connection.info["audit"]
    return chain


def _linked(found: Iterable[Any], before: bytes | None) -> Iterator[AuditRow]:
    """Convert rows of the database to audit rows, which also contain the previous row's mac.

    `found` are the rows, in order. `before` is the mac of the row before the first of them, or None
    if it is unknown. If the previous row is missing, an audit row contains None.
    """
    follows = None
    # By position: access by name would double the duration of a full verification.
    for seq, key_id, body, mac in found:
        linked = before if follows is None or seq == follows else None
        yield AuditRow(seq, key_id.decode("ascii", "replace"), body, mac, linked)
        follows, before = seq + 1, mac
