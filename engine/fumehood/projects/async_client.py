"""The method of `AsyncClient` that creates a session from a local directory.

Client side: this module uses the protocol and plain values, but not the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fumehood.client.async_client import AsyncClient
from fumehood.client.files import proof, resolved
from fumehood.core.session import SessionRecord


class AsyncClientWithProjects(AsyncClient):
    """A client that can also create sessions from local directories."""

    async def create_session_from(
        self, directory: Path | str, *, everything: bool = False, **wishes: Any
    ) -> SessionRecord:
        """Create a session with a copy of the local directory `directory`.

        Files that the directory's `.gitignore` files exclude are not copied, unless `everything` is
        True. `wishes` are the arguments of `create_session`. The tool `apply_workspace` later
        writes the session's changes back into the directory.

        Raises:
            OSError: this program cannot write to the directory.
        """
        path = resolved(directory)
        project = await self.claim_project(str(path), everything=everything)
        with proof(path, project.proof):
            return await self.create_session(project=project.id, **wishes)
