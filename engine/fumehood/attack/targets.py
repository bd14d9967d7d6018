"""The walls to attack, and how each wall is created for the attacks.

Host side. Every host should have the jail, the container wall with each runtime that is registered
in Docker, and the gateway. The interpreter and gVisor are optional: if one is missing, the
scorecard shows it as absent. Invariants: a wall is created for one run of the attacks, as small as
possible, and removed afterwards; if a wall cannot be created, the reason and the remedy are
reported.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from fumehood.attack.attack import JAILED, Language
from fumehood.attack.scorecard import Verdict, WallCard
from fumehood.core.limits import MIN_CONTAINER_MB
from fumehood.sandbox.container.docker_api import QUICK_S, Docker, DockerError
from fumehood.sandbox.container.spec import GUEST_COMMAND, LABEL_ENGINE
from fumehood.sandbox.container.supply import FindImage, Making, image_finder
from fumehood.sandbox.container.wall import ContainerWall
from fumehood.sandbox.process.wall import JAIL_SPARES, JailWall, ProcessWall
from fumehood.sandbox.settings import ContainerSettings, EngineIdentity, LanguageImages
from fumehood.sandbox.wall import NO_SINKS, RunSinks, Wall

WALLS = ("interpreter", "jail", "container", "gateway")
OF_PARTS = frozenset(WALLS) - {"jail", "container"}
"""Walls of parts. Each part's package has the name of its wall."""
OFFERED = ("runsc",)
ALIASES = ("io.",)
"""Prefix of other names for the same runtimes: containerd's `io.containerd.runc.v2` is also
runc."""

NOT_REGISTERED = "Docker has no runtime of this name."
REGISTER = (
    "Install it and register it in Docker's configuration (daemon.json, runtimes), if you want it."
)


def _absent(wall: str) -> WallCard:
    return WallCard(wall, None, Verdict.ABSENT, f"This engine has no {wall}.", "", 0.0, ())


async def targets_of(
    walls: Sequence[str], runtime: str | None, environment: Mapping[str, str]
) -> list[Target | WallCard]:
    """Return a target for each of these walls, and a `WallCard` for each wall that cannot be a
    target: it is optional and missing, or Docker cannot be used.

    `runtime` is the only Docker runtime to use; None means all runtimes. `environment` may contain
    the variables that set Docker's address.
    """
    absent = {wall for wall in OF_PARTS.intersection(walls) if not find_spec(f"fumehood.{wall}")}
    walls = [wall for wall in walls if wall not in absent]
    found: list[Target | WallCard] = [_absent(wall) for wall in sorted(absent)]
    if "interpreter" in walls:
        found.append(interpreter_target())
    if "jail" in walls:
        found.append(jail_target())
    docker = Docker(environment)
    if "container" in walls:
        found += await _containers(docker, runtime, "container", container_target)
    if "gateway" in walls:
        from fumehood.attack.gateway import gateway_target  # not at the top: it needs TLS

        found += await _containers(docker, runtime, "gateway", gateway_target)
    return found


async def _containers(
    docker: Docker,
    wanted: str | None,
    wall: str,
    target: Callable[[str, Docker, FindImage], Target],
) -> list[Target | WallCard]:
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
        return [target(wanted, docker, find_image)]
    return [
        *(target(name, docker, find_image) for name in sorted(registered)),
        *(
            WallCard(wall, name, Verdict.ABSENT, NOT_REGISTERED, REGISTER, 0.0, ())
            for name in OFFERED
            if name not in registered
        ),
    ]


find_image = image_finder()

IMAGE = "python"
PROCESS_WALL_MB = 64
"""Megabytes of memory for a program in the interpreter or the jail."""

CONTAINER_LIFETIME_S = 300
"""Seconds after which a container's guest ends itself, even if this process was killed."""


@dataclass(frozen=True, slots=True)
class Containers:
    """Queries Docker about the containers of one wall."""

    docker: Docker
    engine_id: str

    async def names(self) -> frozenset[str]:
        """Return the names of the running containers. Raises DockerError."""
        found = await self.docker.list(f"{LABEL_ENGINE}={self.engine_id}")
        return frozenset(one.name for one in found if one.state == "running")

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


@dataclass(frozen=True, slots=True)
class Standing:
    """A wall that is ready for attacks. The host observes it through `guest_pid` (a process wall)
    or `containers` (a container wall).
    """

    wall: Wall
    hello: Language
    """The language of the harmless first program."""
    memory_mb: int
    guest_pid: Callable[[], int | None] = lambda: None
    """Returns the process id of a process wall's guest, or None for other walls."""
    standing_processes: int = 0
    """Number of processes below the guest while no program runs."""
    containers: Containers | None = None
    sees_processes: bool = True
    """Whether the host's process table shows the program's processes."""
    sinks: RunSinks = NO_SINKS
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the programs."""
    losses: Callable[[], list[str]] = list
    """Returns a description of each loss, such as a write that a program was able to make, since
    the previous call of this function. Losses of the bait are not included."""


Open = Callable[[], AbstractAsyncContextManager[Standing]]


@dataclass(frozen=True, slots=True)
class Target:
    """A wall to be attacked. `runtime` is the Docker runtime of the wall's containers, or None for
    a process wall.

    `open` starts the wall.
    """

    wall: str
    open: Open
    runtime: str | None = None
    is_gvisor: bool = False

    @property
    def name(self) -> str:
        """The target's name on the scorecard, for example `container/runc`."""
        return self.wall if self.runtime is None else f"{self.wall}/{self.runtime}"


def interpreter_target(command: Sequence[str] | None = None) -> Target:
    """Return the interpreter wall as a target. Tests pass a `command` that starts a different
    guest.
    """
    from fumehood.interpreter.wall import INTERPRETER_SPARES, InterpreterWall  # a part's

    # The zygote, the spares, and one resident process for the attacker.
    standing = 1 + INTERPRETER_SPARES + 1
    wall = partial(InterpreterWall, command=command)
    return Target("interpreter", partial(_opened, wall, Language.CALCULATOR, standing))


def jail_target(command: Sequence[str] | None = None) -> Target:
    """Return the jail as a target. The jailed function can read nothing of the engine's code except
    the directory from which the attacks are imported. Tests pass a `command` that starts a
    different guest.
    """

    wall = partial(JailWall, [JAILED], command=command)
    standing = 1 + JAIL_SPARES
    return Target("jail", partial(_opened, wall, Language.FUNCTION, standing))


@asynccontextmanager
async def _opened(
    make: Callable[[], ProcessWall],
    hello: Language,
    standing: int,
) -> AsyncIterator[Standing]:
    async with make() as wall:
        yield Standing(wall, hello, PROCESS_WALL_MB, lambda: wall.guest_pid, standing)


def container_target(
    runtime: str,
    docker: Docker,
    find_image: FindImage,
    *,
    command: tuple[str, ...] | None = None,
) -> Target:
    """Return the container wall with one runtime as a target. The wall uses containers of the
    smallest size, creates a separate one for each trust domain, and starts none in advance.
    """
    is_gvisor = runtime.split("-")[0] == "runsc"

    @asynccontextmanager
    async def opened() -> AsyncIterator[Standing]:
        engine_id = secrets.token_hex(16)
        # Start none in advance, so that Docker reports only containers made for attacks.
        settings = ContainerSettings(
            images=LanguageImages(python=IMAGE, shell=IMAGE, javascript=IMAGE),
            runtime=runtime,
            memory_mb=MIN_CONTAINER_MB,
            pool_min=0,
            pool_max=4,
            lifetime_seconds=CONTAINER_LIFETIME_S,
        )
        identity = EngineIdentity(engine_id, engine_id)
        async with ContainerWall(
            settings, docker, find_image, identity, making=Making(command or GUEST_COMMAND)
        ) as wall:
            yield Standing(
                wall,
                Language.PYTHON,
                MIN_CONTAINER_MB,
                containers=Containers(docker, engine_id),
                # Other users' process names can be read unless /proc is mounted with hidepid.
                sees_processes=docker.is_local
                and not is_gvisor
                and os.access("/proc/1/comm", os.R_OK),
            )

    return Target("container", opened, runtime, is_gvisor)
