"""The method of `AsyncClient` that copies a directory into a session.

Client side: this module uses the protocol and values, but not the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fumehood.client.async_client import AsyncClient
from fumehood.client.files import proof, resolved
from fumehood.core.session import SessionRecord


class AsyncClientWithProjects(AsyncClient):
    """A client that can also make sessions from local directories."""

    async def create_session_from(
        self, directory: Path | str, *, everything: bool = False, **wishes: Any
    ) -> SessionRecord:
        """Create a session with a copy of a local directory.

        Files that the directory's `.gitignore` files exclude are left out, unless `everything` is
        True. `wishes` are the arguments of `create_session`. The tool `apply_workspace` writes
        changes back into the directory.

        Raises:
            OSError: this program cannot write to the directory.
        """
        path = resolved(directory)
        project = await self.claim_project(str(path), everything=everything)
        with proof(path, project.proof):
            return await self.create_session(project=project.id, **wishes)
