"""Which walls this host should have, and so which are attacked.

Host side. All three walls should be there, and every runtime that Docker has registered. gVisor
is shown where it is not: it is offered, not required.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fumehood.attack.attack import JAILED, Language
from fumehood.attack.scorecard import Verdict, WallCard
from fumehood.core.errors import SandboxUnavailable
from fumehood.core.limits import CONTAINER_PROCESSES, MIN_CONTAINER_MB
from fumehood.sandbox.container.docker_api import QUICK_S, Docker, DockerError
from fumehood.sandbox.container.host_check import why_unfit
from fumehood.sandbox.container.image_catalog import FindImage, ImageFound
from fumehood.sandbox.container.pool import PoolRules
from fumehood.sandbox.container.settings import ContainerSettings, EngineIdentity
from fumehood.sandbox.container.spec import GUEST_PROCESSES, LABEL_ENGINE
from fumehood.sandbox.container.wall import ContainerWall
from fumehood.sandbox.process import interpreter, jail
from fumehood.sandbox.wall import Wall

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


IMAGE = "python"
IMAGES = MappingProxyType({"python": IMAGE})
PROCESS_WALL_MB = 64
CONTAINER_LIFETIME_S = 300
"""After which the guest of a container ends itself, also where this process was killed."""

MOST_PROCESSES = CONTAINER_PROCESSES + GUEST_PROCESSES
"""Of one container as the host sees it: the program's, and the guest's own."""


class CannotTry(Exception):
    """There is no such wall here to be attacked."""

    def __init__(self, why: str, cure: str) -> None:
        super().__init__(why)
        self.why = why
        self.cure = cure


@dataclass(frozen=True, slots=True)
class Containers:
    """Docker's own word on the containers of one wall."""

    docker: Docker
    engine_id: str

    async def names(self) -> frozenset[str]:
        """Those that run. Raises DockerError."""
        found = await self.docker.list(f"{LABEL_ENGINE}={self.engine_id}")
        return frozenset(one.name for one in found if one.state == "running")

    async def configs(self) -> tuple[dict[str, Any], ...]:
        """What Docker says that it holds each of them to. Raises DockerError."""
        found = [await self._ask("inspect_container", name) for name in await self.names()]
        return tuple(one["HostConfig"] for one in found)

    async def changes(self) -> dict[str, frozenset[str]]:
        """What of their file systems is not their image's any more. Raises DockerError."""
        changes = {}
        for name in await self.names():
            found = await self._ask("diff", name)
            changes[name] = frozenset(str(one["Path"]) for one in found or ())
        return changes

    async def _ask(self, what: str, name: str) -> Any:
        return await self.docker.ask(lambda client: getattr(client, what)(name), QUICK_S)


@dataclass(frozen=True, slots=True)
class Standing:
    """A wall that stands, and from where it can be looked at."""

    wall: Wall
    hello: Language
    """What a first program is sent in."""
    memory_mb: int
    guest_pid: Callable[[], int | None] = lambda: None
    """Of a wall made of processes."""
    standing_processes: int = 0
    """How many that guest has when nothing runs."""
    containers: Containers | None = None
    sees_processes: bool = True
    """Whether the host's process table shows the program's."""


Open = Callable[[], AbstractAsyncContextManager[Standing]]


@dataclass(frozen=True, slots=True)
class Target:
    """A wall to be attacked; `runtime` is Docker's, where it is a container. Entering `open`
    raises CannotTry where there is no such wall."""

    wall: str
    runtime: str | None = None
    is_gvisor: bool = False
    open: Open = field(default=lambda: _nowhere())

    @property
    def name(self) -> str:
        """As the scorecard has it."""
        return self.wall if self.runtime is None else f"{self.wall}/{self.runtime}"


def _nowhere() -> AbstractAsyncContextManager[Standing]:
    raise CannotTry("It was not said how it is made.", "")


def interpreter_target(command: Sequence[str] | None = None) -> Target:
    """The interpreter wall. `command` starts another guest than the engine's, for tests."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Standing]:
        async with interpreter.InterpreterWall(command=command) as wall:
            # The zygote, the spares, and the one resident of whoever attacks.
            standing = 1 + interpreter.SPARES + 1
            yield Standing(
                wall, Language.CALCULATOR, PROCESS_WALL_MB, lambda: wall.guest_pid, standing
            )

    return Target("interpreter", open=opened)


def jail_target(command: Sequence[str] | None = None) -> Target:
    """The jail, which is let see the attacks' own import path and no other."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Standing]:
        async with jail.JailWall([JAILED], command=command) as wall:
            standing = 1 + jail.SPARES
            yield Standing(
                wall, Language.FUNCTION, PROCESS_WALL_MB, lambda: wall.guest_pid, standing
            )

    return Target("jail", open=opened)


def container_target(
    runtime: str,
    docker: Docker,
    find_image: FindImage,
    *,
    command: tuple[str, ...] | None = None,
) -> Target:
    """Containers of one runtime, the smallest, one trust domain each, none warm in advance."""
    is_gvisor = runtime.split("-")[0] == "runsc"

    @asynccontextmanager
    async def opened() -> AsyncIterator[Standing]:
        await _require_docker(docker, runtime, find_image)
        engine_id = secrets.token_hex(16)
        # None in advance: what Docker counts is then what attacks were given.
        rules = PoolRules(
            least_warm=0,
            most=4,
            warm_memory_mb=MIN_CONTAINER_MB,
            lifetime_s=CONTAINER_LIFETIME_S,
        )
        settings = ContainerSettings(rules=rules, images=IMAGES, runtime=runtime)
        if command is not None:
            settings = ContainerSettings(
                rules=rules, images=IMAGES, runtime=runtime, command=command
            )
        identity = EngineIdentity(engine_id, engine_id)
        async with ContainerWall(settings, docker, find_image, identity) as wall:
            yield Standing(
                wall,
                Language.PYTHON,
                MIN_CONTAINER_MB,
                containers=Containers(docker, engine_id),
                sees_processes=docker.is_local and not is_gvisor and _sees_everybody(),
            )

    return Target("container", runtime, is_gvisor, opened)


async def _require_docker(docker: Docker, runtime: str, find_image: FindImage) -> None:
    """Raises CannotTry with what is missing."""
    try:
        unfit = why_unfit(await docker.info(), runtime=runtime, has_swap=False)
        if unfit is None:
            await find_image(docker, IMAGE)
            return
    except DockerError as error:
        raise CannotTry(error.public, error.cure) from None
    except SandboxUnavailable as error:
        raise CannotTry(error.message, "") from None  # it says how to build it
    raise CannotTry(unfit.fault, unfit.cure)


def _sees_everybody() -> bool:
    """Whether the names of other users' processes can be read here (not with hidepid)."""
    return os.access("/proc/1/comm", os.R_OK)
