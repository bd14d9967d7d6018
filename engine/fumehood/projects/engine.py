"""The attribute of `fumehood.Engine` that gives access to projects.

Host side, above the kernel's class `Engine`. This module uses only the public members of that
class.
"""

from __future__ import annotations

from fumehood.engine import Engine
from fumehood.projects.in_engine import ProjectsPart
from fumehood.projects.service import Projects


class EngineWithProjects(Engine):
    """An engine that can also copy directories of the host into sessions."""

    @property
    def projects(self) -> Projects:
        """The projects of the engine's sessions. Use this only inside the engine's `with` block."""
        return self.part(ProjectsPart).projects
