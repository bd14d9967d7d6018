"""The audit chain: rows that nobody can change, remove or reorder without being found out.

Host side. Every row's mac is an HMAC-SHA-256 over the mac of the row before it, its own number
and its body, with a key that lies outside the database. Rows are appended in the transaction of
what they tell, by the one writer, so that order of rows is order of commits.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select

from fumehood.model.json_types import JsonObject
from fumehood.store.schema import AUDIT
from fumehood.wire import strict_json

GENESIS = bytes(32)
"""What stands for the mac before the first row."""


@dataclass(frozen=True, slots=True)
class AuditKey:
    """The key of a chain; `id` is what rows call it."""

    id: str
    secret: bytes


class AuditChain:
    """Appends rows. The head is read from the database each time: a rollback needs no undoing."""

    def __init__(self, key: AuditKey) -> None:
        self._key = key

    def append(self, connection: Connection, kind: str, at: str, fields: JsonObject) -> int:
        """Add one row inside the caller's transaction, on the writer's thread; its number.

        `kind` is like `approval.created`; `at` is UTC, ISO 8601.
        """
        head = connection.execute(
            select(AUDIT.c.seq, AUDIT.c.mac).order_by(AUDIT.c.seq.desc()).limit(1)
        ).first()
        seq, before = (head.seq + 1, head.mac) if head is not None else (1, GENESIS)
        body = strict_json.dumps({"kind": kind, "at": at, **fields}).decode("ascii")
        row = {"seq": seq, "key_id": self._key.id, "body": body}
        mac = mac_of(self._key.secret, before, seq, body)
        connection.execute(insert(AUDIT), {**row, "mac": mac})
        return seq


def mac_of(secret: bytes, before: bytes, seq: int, body: str) -> bytes:
    """The mac of one row."""
    return hmac.digest(secret, before + seq.to_bytes(8, "big") + body.encode(), "sha256")
