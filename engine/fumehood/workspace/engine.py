"""Access to session files in `fumehood.Engine`.

Host side, above the kernel's `Engine`. Only that class's public members are used.
"""

from __future__ import annotations

from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.workspace.in_engine import WorkspacePart
from fumehood.workspace.session_files import SessionFiles


class EngineWithFiles(Engine):
    """An engine that also gives access to session files."""

    def session_files(self, session_id: str, principal: Principal | None = None) -> SessionFiles:
        """Return the files of a session, given the session's id or name.

        `principal` is the session's owner. By default, it is the user who runs this process. The
        engine's context must have been entered.
        """
        return self.part(WorkspacePart).files(session_id, principal or self.owner)
