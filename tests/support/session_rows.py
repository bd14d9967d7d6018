"""The rows of sessions, in memory."""

from __future__ import annotations

import asyncio

from fumehood.core.errors import EngineError
from fumehood.core.session import KeptSession


class SessionRows:
    """Rows in memory, which fail when they are told to."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptSession] = {}
        self.failure: EngineError | None = None

    async def change(self, put: list[KeptSession], delete: list[str]) -> None:
        """Store and delete rows; whoever stops waiting does not stop the write."""
        if self.failure is not None:
            raise self.failure
        self.kept |= {one.record.id: one for one in put}
        for session_id in delete:
            self.kept.pop(session_id, None)
        await asyncio.sleep(0)
