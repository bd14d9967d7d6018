"""The walls to attack, and how each wall is created for the attacks.

Host side. Every host should have the jail, the container wall with each runtime that is registered
in Docker, and the gateway. The interpreter and gVisor are optional: if one is missing, the
scorecard shows it as absent. Without the part `docker`, the container wall and the gateway are
absent. Invariants: a wall is created for one run of the attacks, as small as possible, and removed
afterwards; if a wall cannot be created, the reason and the remedy are reported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fumehood.attack.attack import JAILED, Language
from fumehood.attack.scorecard import Verdict, WallCard
from fumehood.sandbox.process.wall import JAIL_SPARES, JailWall, ProcessWall
from fumehood.sandbox.wall import NO_SINKS, RunSinks, Wall

if TYPE_CHECKING:
    from fumehood.attack.containers import Containers

IN_DOCKER = ("container", "gateway")
WALLS = ("interpreter", "jail", *IN_DOCKER)
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
    if not find_spec("fumehood.docker"):
        absent |= set(IN_DOCKER).intersection(walls)
    walls = [wall for wall in walls if wall not in absent]
    found: list[Target | WallCard] = [_absent(wall) for wall in sorted(absent)]
    if "interpreter" in walls:
        found.append(interpreter_target())
    if "jail" in walls:
        found.append(jail_target())
    # Not at the top: these need Docker, and TLS.
    if "container" in walls:
        from fumehood.attack.containers import targets_in_docker

        found += await targets_in_docker(environment, runtime, "container", lambda target: target)
    if "gateway" in walls:
        from fumehood.attack.containers import targets_in_docker
        from fumehood.attack.gateway import gateway_target

        found += await targets_in_docker(environment, runtime, "gateway", gateway_target)
    return found


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
