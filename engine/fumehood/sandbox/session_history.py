"""Sessions that are over: what their owners are told of them for a day.

Host side, below `sessions`. Invariant: nobody's sessions crowd out anybody else's, and what is
to be written or deleted stays noted until the rows have taken it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Protocol

from fumehood.core.session import KeptSession

KEPT = timedelta(days=1)
MAX_OF_PRINCIPAL = 100
"""The newest of each; there are as many rows as that, and those of who is active."""


class SessionRows(Protocol):
    """Where sessions are written down."""

    async def change(self, put: list[KeptSession], delete: list[str]) -> None:
        """Write and delete rows in one transaction; when this returns, they are on the disk.

        Raises:
            EngineError: nothing of it is promised.
        """
        ...


class SessionHistory:
    """What is over, by id, and the rows that are still to be written."""

    def __init__(self, rows: SessionRows) -> None:
        self._rows = rows
        self._over: dict[str, KeptSession] = {}
        self._unwritten: dict[str, KeptSession] = {}
        self._undeleted: set[str] = set()

    def inherit(self, one: KeptSession) -> None:
        """One that was over before this engine, whose row is there."""
        self._keep(one)

    def find(self, principal_id: str, session_id: str) -> KeptSession | None:
        """One that is over, where it was this principal's."""
        found = self._over.get(session_id)
        return found if found is not None and found.principal_id == principal_id else None

    def of(self, principal_id: str) -> list[KeptSession]:
        """All of this principal's that are over, the last first."""
        mine = [one for one in self._over.values() if one.principal_id == principal_id]
        return mine[::-1]

    def add(self, one: KeptSession) -> None:
        """One is over. Its row is written by the next `write`."""
        self._keep(one)
        self.note(one)

    def note(self, one: KeptSession) -> None:
        """A row has changed. It is written by the next `write`."""
        self._unwritten[one.record.id] = one

    def drop(self, session_id: str) -> None:
        """There is no such session after all; its row, if there is one, goes."""
        self._forget([session_id])

    def prune(self, now: datetime) -> int:
        """Forget what was over a day ago; how many that were."""
        oldest = now - KEPT
        gone = [
            session_id
            for session_id, one in self._over.items()
            if one.finished_at is not None and one.finished_at < oldest
        ]
        self._forget(gone)
        return len(gone)

    async def write(self) -> None:
        """Bring the rows up to date. What could not be written is tried again by the next one.

        Raises:
            EngineError: nothing of it is promised.
        """
        put, delete = dict(self._unwritten), set(self._undeleted)
        if not put and not delete:
            return
        await self._rows.change(list(put.values()), sorted(delete))
        self._undeleted -= delete
        for session_id, one in put.items():
            if self._unwritten.get(session_id) is one:
                del self._unwritten[session_id]

    def _keep(self, one: KeptSession) -> None:
        self._over[one.record.id] = one
        mine = self.of(one.principal_id)
        self._forget([old.record.id for old in mine[MAX_OF_PRINCIPAL:]])

    def _forget(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            self._over.pop(session_id, None)
            self._unwritten.pop(session_id, None)
            self._undeleted.add(session_id)
