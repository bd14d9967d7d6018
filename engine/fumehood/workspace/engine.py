"""The files of the sessions of `fumehood.Engine`.

Host side, above the kernel's engine, of which only public members are used.
"""

from __future__ import annotations

from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.workspace.in_engine import WorkspacePart
from fumehood.workspace.session_files import SessionFiles


class EngineWithFiles(Engine):
    """An engine that also gives access to the files of sessions."""

    def session_files(self, session_id: str, principal: Principal | None = None) -> SessionFiles:
        """Return the files of a session of this process's owner, or of another principal. Only for
        an engine that was entered.
        """
        return self.part(WorkspacePart).files(session_id, principal or self.owner)
