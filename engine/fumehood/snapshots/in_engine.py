"""Snapshots and forks in one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fumehood.engine_part import EnginePart
from fumehood.snapshots.service import Snapshots

if TYPE_CHECKING:
    from fumehood.compose import Composition


class SnapshotsPart(EnginePart):
    """Takes and restores snapshots of sessions, and forks sessions."""

    snapshots: Snapshots

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Create the object that takes and restores snapshots. The engine's sessions have already
        started.
        """
        now = self.kernel.clock.now
        self.snapshots = Snapshots(made.services.sessions, made.walls.container, now)
        yield
