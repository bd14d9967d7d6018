"""Docker as a part of one engine: the runtime of its containers."""

from __future__ import annotations

import os
from pathlib import Path

from fumehood.docker.api import Docker
from fumehood.engine_part import EnginePart
from fumehood.sandbox.container.runtime import NewRuntime


class DockerContainers(EnginePart):
    """The part that lets an engine run containers in Docker."""

    def runtime(self) -> NewRuntime:
        """Return the function that creates the runtime of a container wall."""
        return new_docker


def new_docker(own_images: Path) -> Docker:
    """Create the runtime of a container wall, from the variables of this process. `own_images` is
    the folder of the image recipes that the operator wrote.
    """
    return Docker(os.environ, own_images)
