"""The method of `fumehood.Engine` that gives access to session files.

Host side, above the kernel's class `Engine`. This module uses only the public members of that
class.
"""

from __future__ import annotations

from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.workspace.in_engine import WorkspacePart
from fumehood.workspace.session_files import SessionFiles


class EngineWithFiles(Engine):
    """An engine that also gives access to session files."""

    def session_files(self, session_id: str, principal: Principal | None = None) -> SessionFiles:
        """Return the files of a session. `session_id` is the id or the name of the session.

        `principal` is the owner of the session. By default, it is the user who runs this process.
        Call this method only inside the engine's `with` block.
        """
        return self.part(WorkspacePart).files(session_id, principal or self.owner)
