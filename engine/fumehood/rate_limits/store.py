"""Rows of rate limits: one moment for each count, from which on its whole burst is free again.

Host side. `rate_limits/limiter` decides in memory; this is what outlives it. Rows are written
behind the answers of calls, like the call log: a crash may lose those of the last second.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from fumehood.budgets.model import Subject
from fumehood.storage.database import Database
from fumehood.storage.schema import RATE_LIMITS
from fumehood.storage.writer import Row

PRUNED_AT_ONCE = 500
"""Rows in one deletion, so that other writes wait for a bounded time."""


class RateKey(NamedTuple):
    """The key of one count."""

    limit: str
    subject: Subject


class RateTable:
    """The table of counts. It knows no limits."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load_now(self, now: datetime) -> list[tuple[RateKey, int]]:
        """At the start: each count that is not free again, and how many nanoseconds that takes.

        Raises:
            ReadFailed: the database cannot be read.
            ValueError, TypeError: a row was not written by an engine.
        """
        now_ns = unix_ns(now)

        def query(connection: Connection) -> list[tuple[RateKey, int]]:
            rows = connection.execute(select(RATE_LIMITS).where(RATE_LIMITS.c.free_at > now_ns))
            return [
                (RateKey(row.limit, Subject.parse(row.subject)), row.free_at - now_ns)
                for row in rows
            ]

        return self._database.read_now(query)

    def put_soon(self, limit: str, subject: str, free_at: int) -> None:
        """Store when a count is free again, in Unix nanoseconds. Neither waits nor fails."""
        self._database.post(_put, {"limit": limit, "subject": subject, "free_at": free_at})

    async def prune(self, now: datetime) -> int:
        """Delete the rows of counts that are free again. Returns the number of rows.

        Raises:
            WriteFailed: the rest stays until the next run.
        """
        gone, is_free = 0, RATE_LIMITS.c.free_at <= unix_ns(now)
        expired = select(RATE_LIMITS.c.seq).where(is_free).limit(PRUNED_AT_ONCE)

        def job(connection: Connection) -> int:
            return connection.execute(
                delete(RATE_LIMITS).where(RATE_LIMITS.c.seq.in_(expired))
            ).rowcount

        while count := await self._database.write(job):
            gone += count
        return gone


def unix_ns(moment: datetime) -> int:
    """Nanoseconds since 1970, exact to a microsecond."""
    return round(moment.timestamp() * 1e6) * 1000


def _put(connection: Connection, rows: list[Row]) -> None:
    newest = {(row["limit"], row["subject"]): row for row in rows}
    connection.execute(_PUT, list(newest.values()))


_INSERT = insert(RATE_LIMITS)
_PUT = _INSERT.on_conflict_do_update(
    index_elements=["limit", "subject"], set_={"free_at": _INSERT.excluded.free_at}
)

__all__ = ["RateKey", "RateTable", "unix_ns"]
