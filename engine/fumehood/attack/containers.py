"""The container wall as targets: one for each runtime that Docker has. gVisor is optional: if
Docker does not have it, the scorecard shows it as absent.

Host side. The attacks look at the containers from outside by what Docker says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fumehood.attack.scorecard import Verdict, WallCard
from fumehood.attack.targets import Target, wall_target
from fumehood.docker.api import QUICK_S, Docker, DockerError
from fumehood.sandbox.container.spec import LABEL_ENGINE

OFFERED = ("runsc",)
ALIASES = ("io.",)
"""Prefix of other names for the same runtimes: containerd's `io.containerd.runc.v2` is also
runc."""

NOT_REGISTERED = "Docker has no runtime of this name."
REGISTER = (
    "Install it and register it in Docker's configuration (daemon.json, runtimes), if you want it."
)


async def targets_in_docker(
    environment: Mapping[str, str],
    wanted: str | None,
    wall: str,
    target: Callable[[Target], Target],
) -> list[Target | WallCard]:
    """Return what `target` makes of the containers of each runtime that Docker has, or of the
    runtime `wanted` alone.

    `wall` is the name of the targets' wall. `environment` may contain the variables that set
    Docker's address.
    """
    docker = Docker(environment)
    try:
        registered = [
            str(name)
            for name in (await docker.info()).get("Runtimes") or {}
            if not str(name).startswith(ALIASES)
        ]
    except DockerError as error:
        return [WallCard(wall, wanted, Verdict.UNTRIED, error.message, error.remedy, 0.0, ())]
    if wanted is not None:
        # It was requested by name, so a missing one is reported like a missing wall.
        return [target(container_target(wanted, docker))]
    return [
        *(target(container_target(name, docker)) for name in sorted(registered)),
        *(
            WallCard(wall, name, Verdict.ABSENT, NOT_REGISTERED, REGISTER, 0.0, ())
            for name in OFFERED
            if name not in registered
        ),
    ]


@dataclass(frozen=True, slots=True)
class Containers:
    """Queries Docker about the containers of one wall."""

    docker: Docker
    engine_id: str

    async def names(self) -> frozenset[str]:
        """Return the names of the running containers. Raises DockerError."""
        found = await self.docker.list(f"{LABEL_ENGINE}={self.engine_id}")
        return frozenset(one.name for one in found if not one.is_stopped)

    async def configs(self) -> tuple[dict[str, Any], ...]:
        """Return Docker's `HostConfig`, which contains the limits, of each running container.
        Raises DockerError.
        """
        found = [await self._ask("inspect_container", name) for name in await self.names()]
        return tuple(one["HostConfig"] for one in found)

    async def changes(self) -> dict[str, frozenset[str]]:
        """Return, by container name, the paths that changed in the file system of each running
        container. Raises DockerError.
        """
        changes = {}
        for name in await self.names():
            found = await self._ask("diff", name)
            changes[name] = frozenset(str(one["Path"]) for one in found or ())
        return changes

    async def _ask(self, what: str, name: str) -> Any:
        return await self.docker.ask(
            "inspect a container", lambda client: getattr(client, what)(name), QUICK_S
        )


def container_target(
    runtime: str,
    docker: Docker,
    *,
    command: tuple[str, ...] | None = None,
) -> Target:
    """Return the container wall with one OCI runtime as a target."""
    is_gvisor = runtime.split("-")[0] == "runsc"
    return wall_target(
        runtime, docker, lambda engine_id: Containers(docker, engine_id),
        oci_runtime=runtime, command=command, sees_processes=docker.is_local and not is_gvisor,
    )  # fmt: skip
