"""Session files as a part of one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fumehood.core.identity import Principal
from fumehood.engine_part import EnginePart
from fumehood.protocol.cursors import Cursors
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.workspace.session_files import SessionFiles

if TYPE_CHECKING:
    from fumehood.compose import Composition


class WorkspacePart(EnginePart):
    """Gives principals access to the files of their sessions."""

    _sessions: SessionKeeper
    _cursors: Cursors

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Store the sessions and the cursors of the starting engine, because `files` needs them."""
        self._sessions, self._cursors = made.services.sessions, made.services.cursors
        yield

    def files(self, session_id: str, principal: Principal) -> SessionFiles:
        """Return the files of a principal's session. `session_id` is the id or the name of the
        session.
        """
        own_id = self._sessions.id_of(principal, session_id)
        return SessionFiles(self._sessions, self._cursors, principal, own_id)
