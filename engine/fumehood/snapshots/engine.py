"""The snapshots of `fumehood.Engine`.

Host side, above the kernel's engine. Uses only the engine's public members.
"""

from __future__ import annotations

from fumehood.engine import Engine
from fumehood.snapshots.in_engine import SnapshotsPart
from fumehood.snapshots.service import Snapshots


class EngineWithSnapshots(Engine):
    """An engine that can also copy and restore the files of sessions with a disk."""

    @property
    def snapshots(self) -> Snapshots:
        """Makes and restores snapshots and forks of this engine's sessions. Available once the
        engine was entered.
        """
        return self.part(SnapshotsPart).snapshots
