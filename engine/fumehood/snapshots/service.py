"""Snapshots and forks: copies of sessions' disks, made at the request of the sessions' owners.

Host side, above the sessions. A session's record lists its snapshots; the wall keeps the disk copy
of each listed snapshot. Invariants: a snapshot is stored before it is reported; copies that are not
listed are removed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import datetime

from fumehood.core.errors import InvalidParams, QuotaExceeded, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.session import SessionHome, SessionRecord, Snapshot
from fumehood.sandbox.sessions import ID_BYTES, SessionKeeper, require_disk
from fumehood.sandbox.wall import SessionWall, try_later
from fumehood.snapshots.model import MAX_SNAPSHOTS

NO_COPIES = "cannot be copied. Make one with a disk."


class Snapshots:
    """Takes, restores and deletes snapshots of sessions, and forks sessions. `now` is the clock."""

    def __init__(
        self, sessions: SessionKeeper, wall: SessionWall, now: Callable[[], datetime]
    ) -> None:
        self._sessions = sessions
        self._wall = wall
        self._now = now

    async def take(
        self, principal: Principal, session_id: str, name: str | None = None
    ) -> Snapshot:
        """Copy the files of a principal's session to a new snapshot, as soon as the session's
        running and waiting calls have finished. Return the snapshot.

        Raises:
            InvalidParams: the session has no disk, or already has a snapshot with this name.
            QuotaExceeded: the session already has the maximum number of snapshots.
            ResourceNotFound: this principal has no such session, or the session has ended.
            SandboxUnavailable: the calls take too long, or the disk could not be copied.
            StoreError: the snapshot could not be stored, so it does not exist.
        """
        async with self._sessions.turn(principal, session_id) as session:
            require_disk(session, NO_COPIES)
            if len(session.snapshots) >= MAX_SNAPSHOTS:
                raise QuotaExceeded(
                    f"This session has {MAX_SNAPSHOTS} snapshots, the maximum. Delete one first."
                )
            if name is not None and name in [snapshot.name for snapshot in session.snapshots]:
                words = f"This session already has a snapshot {name!r}. Choose another name."
                raise InvalidParams(words, fields=["name"])
            snapshot_id = _new_id()
            async with session.container.copy_disk(snapshot_id) as size:
                self._sessions.usable(principal, session_id)
                made = Snapshot(id=snapshot_id, name=name, bytes=size, created_at=self._now())
                await self._sessions.set(session, "snapshots", (*session.snapshots, made))
        return made

    async def delete(self, principal: Principal, session_id: str, snapshot_id: str) -> Snapshot:
        """Delete a snapshot of a principal's session, and return the snapshot's record.

        Raises:
            ResourceNotFound: this principal has no such session or snapshot, or the session has
                ended.
            StoreError: the deletion could not be stored, so the snapshot was not deleted.
        """
        session = self._sessions.usable(principal, session_id)
        found = _found(session.snapshots, snapshot_id)
        left = tuple(snapshot for snapshot in session.snapshots if snapshot != found)
        await self._sessions.set(session, "snapshots", left)
        self._wall.sweep_soon()
        return found

    async def restore(
        self, principal: Principal, session_id: str, snapshot_id: str
    ) -> SessionRecord:
        """Restore the files of a principal's session from one of its snapshots, and return the
        session's record. `snapshot_id` is the snapshot's id or name.

        The files are restored as soon as the session's running and waiting calls have finished.
        Everything else that runs in the session is ended, and the session's variables are lost.

        Raises:
            ResourceNotFound: the session has no such snapshot.
            SandboxUnavailable: the session is durable, and its new files could not be saved.
            EngineError: for the reasons of `SessionKeeper.resume`.
        """
        async with self._sessions.turn(principal, session_id) as session:
            found = _found(session.snapshots, snapshot_id)
            await session.container.restore(found.id)
            not_saved = await self._sessions.continue_with(
                session, f"Its files were restored from the snapshot {found.name or found.id}."
            )
            if not_saved is not None:
                raise try_later(
                    f"The snapshot was restored, but its files could not be saved: {not_saved}."
                    " If its container is lost before they are saved, the session has the earlier "
                    "files again. Repeat the call."
                )
        return self._sessions.find(principal, session.id)

    async def fork(
        self,
        principal: Principal,
        session_id: str,
        *,
        snapshot_id: str | None = None,
        name: str | None = None,
        count: int = 1,
    ) -> list[SessionRecord]:
        """Create `count` stopped sessions with the files of a principal's session. Return the
        records of the new sessions.

        If `snapshot_id` is given, it is the id or name of a snapshot of the session, and the new
        sessions have the snapshot's files. The session itself can then also be lost. If `count` is
        above 1, a number is appended to `name` for each session.

        Raises:
            ResourceNotFound: this principal has no such session or snapshot.
            EngineError: for the reasons of `take` and `SessionKeeper.make_like`.
        """
        record = self._sessions.original(principal, session_id)
        names = [name] * count
        if name is not None and count > 1:
            names = [f"{name}-{number}" for number in range(1, count + 1)]
        why = f"It is a fork of {record.id} and has not been used yet."
        async with AsyncExitStack() as stack:
            if snapshot_id is not None:
                copy = _found(record.snapshots, snapshot_id).id
            else:
                copy = _new_id()
                async with self._sessions.turn(principal, record.id) as session:
                    require_disk(session, NO_COPIES)
                    await stack.enter_async_context(session.container.copy_disk(copy))

            def disk(fork_id: str, home: SessionHome) -> AbstractAsyncContextManager[str]:
                return self._wall.fork(copy, fork_id, home)

            return await self._sessions.make_like(principal, record.id, names, why, disk)


def _new_id() -> str:
    return f"snap_{secrets.token_hex(ID_BYTES)}"


def _found(snapshots: Sequence[Snapshot], reference: str) -> Snapshot:
    """Return a snapshot by its id or name. Raises ResourceNotFound."""
    found = [snapshot for snapshot in snapshots if reference in (snapshot.id, snapshot.name)]
    if not found:
        words = "This session has no such snapshot. List them: `fumehood sessions snapshots ID`."
        raise ResourceNotFound(words, fields=["snapshot_id"])
    return found[0]
