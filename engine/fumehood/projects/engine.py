"""The projects of `fumehood.Engine`.

Host side, above the kernel's engine, of which only public members are used.
"""

from __future__ import annotations

from fumehood.engine import Engine
from fumehood.projects.in_engine import ProjectsPart
from fumehood.projects.service import Projects


class EngineWithProjects(Engine):
    """An engine that can also copy directories of the host into sessions."""

    @property
    def projects(self) -> Projects:
        """The projects of this engine's sessions. Only available after the engine was entered as a
        context manager.
        """
        return self.part(ProjectsPart).projects
