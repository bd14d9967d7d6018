"""The walls to attack, and how each wall is created for the attacks.

Host side. Every host should have the jail, the container wall with each runtime that is registered
in Docker, and the gateway. The interpreter and gVisor are optional: if one is missing, the
scorecard shows it as absent. Without the part `docker`, the container wall and the gateway are
absent. Invariants: a wall is created for one run of the attacks, as small as possible, and removed
afterwards; if a wall cannot be created, the reason and the remedy are reported.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from fumehood.attack.attack import GVISOR, JAILED, LANDLOCK, Language
from fumehood.attack.scorecard import Verdict, WallCard
from fumehood.core.limits import MIN_CONTAINER_MB, Grade
from fumehood.sandbox.process.wall import JAIL_SPARES, JailWall, ProcessWall
from fumehood.sandbox.wall import NO_SINKS, RunSinks, Wall

if TYPE_CHECKING:
    from fumehood.sandbox.container.runtime import Runtime

IN_CONTAINERS = ("container", "gateway")
DIRECT = "direct"

WALLS = ("interpreter", "jail", *IN_CONTAINERS)
OF_PARTS = frozenset(WALLS) - {"jail", "container"}
"""Walls of parts. Each part's package has the name of its wall."""


def _absent(wall: str) -> WallCard:
    return WallCard(wall, None, Verdict.ABSENT, f"This engine has no wall {wall!r}.", "", 0.0, ())


async def targets_of(
    walls: Sequence[str], runtime: str | None, environment: Mapping[str, str]
) -> list[Target | WallCard]:
    """Return a target for each of these walls, and a `WallCard` for each wall that cannot be a
    target: it is optional and missing, or Docker cannot be used.

    `runtime` is the only Docker runtime to use; None means all runtimes. `environment` may contain
    the variables that set Docker's address.
    """
    absent = {wall for wall in OF_PARTS.intersection(walls) if not find_spec(f"fumehood.{wall}")}
    if not any(find_spec(f"fumehood.{part}") for part in ("docker", DIRECT, LANDLOCK)):
        absent |= set(IN_CONTAINERS).intersection(walls)
    walls = [wall for wall in walls if wall not in absent]
    found: list[Target | WallCard] = [_absent(wall) for wall in sorted(absent)]
    if "interpreter" in walls:
        found.append(interpreter_target())
    if "jail" in walls:
        found.append(jail_target())
    if "container" in walls:
        found += await _in_containers("container", runtime, environment, lambda target: target)
    if "gateway" in walls:
        from fumehood.attack.gateway import gateway_target  # not at the top: it needs TLS

        found += await _in_containers("gateway", runtime, environment, gateway_target)
    return found


async def _in_containers(
    wall: str,
    runtime: str | None,
    environment: Mapping[str, str],
    made_of: Callable[[Target], Target],
) -> list[Target | WallCard]:
    """Return the targets that need containers, for each runtime of this host or for `runtime`
    alone. `wall` is their wall, and `made_of` makes them from the container wall.
    """
    found: list[Target | WallCard] = []
    if find_spec("fumehood.docker") and runtime not in (DIRECT, GVISOR, LANDLOCK):
        from fumehood.attack.containers import targets_in_docker

        found += await targets_in_docker(environment, runtime, wall, made_of)
    if find_spec("fumehood.direct") and runtime in (None, DIRECT):
        from fumehood.attack.sandboxes import direct_targets

        found += direct_targets(wall, made_of, is_wanted=runtime == DIRECT)
    if find_spec("fumehood.gvisor") and runtime in (None, GVISOR):
        from fumehood.attack.own_kernels import gvisor_targets

        found += gvisor_targets(wall, made_of, is_wanted=runtime == GVISOR)
    if find_spec("fumehood.landlock"):
        from fumehood.attack.without_namespaces import landlock_targets

        found += landlock_targets(wall, made_of, is_wanted=runtime == LANDLOCK)
    return found


class Containers(Protocol):
    """Looks from outside at the containers of one wall. Its methods may raise RuntimeFault."""

    async def names(self) -> frozenset[str]:
        """Return the names of the running containers."""

    async def configs(self) -> tuple[dict[str, Any], ...]:
        """Return the limits of each running container, with the field names of Docker's
        `HostConfig`.
        """

    async def changes(self) -> dict[str, frozenset[str]]:
        """Return, by container name, the paths that changed in the root file system of each running
        container.
        """


PROCESS_WALL_MB = 64
"""Megabytes of memory for a program in the interpreter or the jail."""


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
    kind: str | None = None
    """The kind of the runtime, if results differ on it (`Attack.on`)."""

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


IMAGE, HOST_IMAGE = "python", "host"

CONTAINER_LIFETIME_S = 300
"""Seconds after which a container's guest ends itself, even if this process was killed."""


def wall_target(
    name: str,
    runtime: Runtime,
    look: Callable[[str], Containers],
    *,
    oci_runtime: str | None = None,
    image: str = IMAGE,
    command: tuple[str, ...] | None = None,
    sees_processes: bool = True,
) -> Target:
    """Return the container wall with the container runtime `runtime` as a target. The wall uses
    containers of the smallest size, creates a separate one for each trust domain, and starts none
    in advance.

    `name` is what the scorecard shows. `look` takes an engine id, and returns what looks at the
    engine's containers. `sees_processes` says whether this host's process table has the programs'
    processes.
    """
    # Not at the top: an attack on another wall does not need them.
    from fumehood.sandbox.container.spec import GUEST_COMMAND, grade_of
    from fumehood.sandbox.container.supply import Making
    from fumehood.sandbox.container.wall import ContainerWall
    from fumehood.sandbox.settings import ContainerSettings, EngineIdentity, LanguageImages

    @asynccontextmanager
    async def opened() -> AsyncIterator[Standing]:
        engine_id = secrets.token_hex(16)
        # Start none in advance, so that only containers made for attacks are seen.
        settings = ContainerSettings(
            images=LanguageImages(python=image, shell=image, javascript=image),
            runtime=oci_runtime,
            least_grade=Grade.PROCESS,  # each grade is attacked, and shown
            memory_mb=MIN_CONTAINER_MB,
            pool_min=0,
            pool_max=4,
            lifetime_seconds=CONTAINER_LIFETIME_S,
        )
        identity = EngineIdentity(engine_id, engine_id)
        making = Making(command or GUEST_COMMAND)
        async with ContainerWall(settings, runtime, identity, making=making) as wall:
            yield Standing(
                wall,
                Language.PYTHON,
                MIN_CONTAINER_MB,
                containers=look(engine_id),
                # Other users' process names can be read unless /proc is mounted with hidepid.
                sees_processes=sees_processes and os.access("/proc/1/comm", os.R_OK),
            )

    kinds = {Grade.KERNEL: GVISOR, Grade.PROCESS: LANDLOCK}
    return Target("container", opened, name, kinds.get(grade_of(oci_runtime)))
