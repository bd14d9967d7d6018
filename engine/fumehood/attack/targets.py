"""Which walls this host should have, and so which are attacked.

Host side. All three walls should be there, and every runtime that Docker has registered. gVisor
is shown where it is not: it is offered, not required.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fumehood.attack.scorecard import Verdict, WallCard
from fumehood.attack.standing import (
    Target,
    container_target,
    interpreter_target,
    jail_target,
)
from fumehood.sandbox.container.docker_api import QUICK_S, Docker, DockerError
from fumehood.sandbox.container.image_catalog import ImageFound

WALLS = ("interpreter", "jail", "container")
OFFERED = ("runsc",)
ALIASES = ("io.",)
"""Names under which containerd knows its own: `io.containerd.runc.v2` is runc once more."""

NOT_REGISTERED = "Docker knows no runtime of this name."
REGISTER = (
    "Install it and register it in Docker's configuration (daemon.json, runtimes), if you want it."
)


async def targets_of(
    walls: Sequence[str], runtime: str | None, environment: Mapping[str, str]
) -> list[Target | WallCard]:
    """The targets of these walls, and cards for what is offered and not here.

    `runtime` is the only one that is asked for; None asks for all. `environment` says where
    Docker is.
    """
    found: list[Target | WallCard] = []
    if "interpreter" in walls:
        found.append(interpreter_target())
    if "jail" in walls:
        found.append(jail_target())
    if "container" in walls:
        found += await _containers(Docker(environment), runtime)
    return found


async def _containers(docker: Docker, wanted: str | None) -> list[Target | WallCard]:
    try:
        registered = [
            str(name)
            for name in (await docker.info()).get("Runtimes") or {}
            if not str(name).startswith(ALIASES)
        ]
    except DockerError as error:
        return [WallCard("container", wanted, Verdict.UNTRIED, error.public, error.cure, 0.0, ())]
    if wanted is not None:
        # Asked for by name: where it is not there, that is told as any wall's would be.
        return [container_target(wanted, docker, find_image)]
    return [
        *(container_target(name, docker, find_image) for name in sorted(registered)),
        *(
            WallCard("container", name, Verdict.ABSENT, NOT_REGISTERED, REGISTER, 0.0, ())
            for name in OFFERED
            if name not in registered
        ),
    ]


async def find_image(docker: Docker, name: str) -> ImageFound:
    """The image that an engine of this version would use. Raises SandboxUnavailable."""

    def find(client: Any) -> ImageFound:
        from fumehood.sandbox.images.catalog import list_images, own_image

        return own_image(list_images(client, name), name)

    return await docker.ask(find, QUICK_S)
