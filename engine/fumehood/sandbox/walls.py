"""All walls of an engine. They are created from the settings, and started, stopped and reported
together.

Host side, used by `compose`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import ESSENTIAL_WALLS
from fumehood.core.part import PartError, named_faults
from fumehood.core.status import WallReadiness
from fumehood.observe.log import Logger
from fumehood.sandbox.container.additions import Additions
from fumehood.sandbox.container.disks import Disks
from fumehood.sandbox.container.runtime import NoRuntime, Runtime
from fumehood.sandbox.container.supply import Making
from fumehood.sandbox.container.wall import ContainerWall
from fumehood.sandbox.host import Host
from fumehood.sandbox.process.wall import JailWall, ProcessWall
from fumehood.sandbox.settings import EngineIdentity, WallSettings
from fumehood.sandbox.wall import OnEvent, SessionWall, Wall, Walls
from fumehood.storage.directory import owner_id

ID_BYTES = 16
"""Length of an engine's random id, in bytes."""

WARNINGS = frozenset(
    {
        "guest.lost",
        "container.unavailable",
        "container.failed",
        "container.dirty",
        "container.images_missing",
        "container.look_failed",
        "container.owner_unknown",
        "session.change_refused",
        "session.lost",
        "session.not_saved",
        "session.not_written",
    }
)
"""Events of walls and sessions that the log shows as warnings."""


def logged(log: Logger, warnings: Collection[str] = WARNINGS) -> OnEvent:
    """Return a function that logs the events of walls and sessions. Events named in `warnings` are
    logged as warnings, the others as information.
    """

    def on_event(event: str, values: JsonObject) -> None:
        level = log.warning if event in warnings else log.info
        level(event, **values)

    return on_event


@dataclass(frozen=True, slots=True)
class OwnWalls:
    """The settings of the engine's walls, and its container wall. A part of the engine can use them
    to make further walls.
    """

    settings: WallSettings
    container: ContainerWall | None
    """The wall for containers on this machine, which has not been started. None if the caller of
    `EngineWalls` has provided another container wall.
    """


NOTHING_GIVEN: Mapping[str, Wall] = MappingProxyType({})

WallsOfParts = Callable[[OwnWalls], Mapping[str, Wall]]
"""Makes the walls of parts. Returns name → wall."""


def no_walls(own: OwnWalls) -> Mapping[str, Wall]:
    """Return an empty mapping, and ignore `own`. `EngineWalls` uses this function as `of_parts` in
    an engine in which no part makes walls.
    """
    return {}


class EngineWalls:
    """The walls of one engine. Entering the asynchronous context starts the walls that are in use.

    `jailed_paths` are the import paths of sandboxed functions. `state` is the state directory, or
    None if the engine keeps no state.

    If `jail` or `container` is given, it is used instead of a new wall. `of_parts` makes the walls
    of parts. If a part makes a wall named `container`, that wall runs the engine's containers. A
    wall in `given` replaces the part's wall with the same name.
    """

    def __init__(
        self,
        settings: WallSettings,
        jailed_paths: frozenset[str],
        *,
        state: Path | None,
        on_event: OnEvent,
        jail: Wall | None = None,
        container: SessionWall | None = None,
        given: Mapping[str, Wall] = NOTHING_GIVEN,
        of_parts: WallsOfParts = no_walls,
    ) -> None:
        self._jailed_paths = jailed_paths
        self._given = given
        self._jail: Wall = jail or JailWall(jailed_paths, settings.jail.limits, on_event=on_event)
        self._own: ContainerWall | None = None
        """The wall for containers on this machine. None if `container` was given."""
        if container is None:
            self._own = container_wall(settings, state, on_event, eager=state is not None)
        self._added = {**of_parts(OwnWalls(settings, self._own)), **given}
        if self._own is not None and "container" in self._added:
            self._own.stand_by()
        found = container or self._added.get("container", self._own)
        if not isinstance(found, SessionWall):
            raise PartError("A part adds the wall 'container', which has no containers to keep.")
        self.container = found
        self._host = Host()
        self.by_name = Walls(
            **{
                **self._added,
                "jail": self._jail,
                "container": self.container,
                "host": self._host,
            }
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> EngineWalls:
        processes = [wall for wall in self._added.values() if isinstance(wall, ProcessWall)]
        if isinstance(self._jail, JailWall) and self._jailed_paths:
            processes.append(self._jail)
        async with AsyncExitStack() as started:  # ended if a later wall does not start
            for process in processes:
                started.push_async_exit(process)
                await process.begin()
            if self._own is not None:
                await started.enter_async_context(self._own)
            for name, wall in self._added.items():
                if (
                    name not in self._given
                    and isinstance(wall, AbstractAsyncContextManager)
                    and not isinstance(wall, ProcessWall)
                ):
                    with named_faults(f"The wall {name!r} could not be started"):
                        await started.enter_async_context(wall)
            for process in processes:  # their guests start side by side
                await process.first_guest()
            started.push_async_callback(self._host.stop)
            self._stack = started.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def report(self) -> dict[str, dict[str, Any]]:
        """Return the enforced limits, the readiness and the faults of each wall in use, by the
        wall's name.

        If a wall marked as `essential` is not ready, the engine refuses all calls. If another wall
        is not ready, the engine refuses only the calls of tools that need this wall.
        """
        walls = {name: wall for name, wall in self._added.items() if name in ESSENTIAL_WALLS}
        if self._jailed_paths:
            walls["jail"] = self._jail
        others = {"container": self.container, **self._added} | {"container": self.container}
        walls |= {name: wall for name, wall in others.items() if wall.status.is_in_use}
        return {name: _report(name, wall) for name, wall in walls.items()}

    def containers(self) -> dict[str, int]:
        """Return the number of containers in each state, and the number of calls that wait for a
        container.
        """
        counts: JsonObject = getattr(self.container, "counts", {})
        return {name: int(count) for name, count in counts.items()}

    def readiness(self) -> tuple[bool, dict[str, WallReadiness]]:
        """Return whether every essential wall is ready, and the public part of each wall's report,
        by the wall's name.
        """
        report = self.report()
        is_held = all(wall["ready"] for wall in report.values() if wall["essential"])
        shown = {
            name: WallReadiness(
                ready=wall["ready"],
                enforced=tuple(wall["enforced"]),
                missing=tuple(wall["missing"]),
                runtime=wall["runtime"],
                grade=wall["grade"],
                held=wall["held"],
                why=wall["why"],
            )
            for name, wall in report.items()
        }
        return is_held, shown


def _report(name: str, wall: Wall) -> dict[str, Any]:
    status = wall.status
    return {
        "enforced": sorted(limit.value for limit in status.seen),
        "ready": status.is_ready and not status.lacking(name),
        "essential": name in ESSENTIAL_WALLS,
        "faults": list(status.faults),
        "runtime": status.runtime,
        "grade": status.grade,
        "held": dict(status.held),
        # Only a grade that is too low has details.
        "why": status.remedy if status.details is not None else status.grade and status.grade.why,
        "missing": list(status.missing_images),
        "guest_pid": status.guest_pid,
    }


def container_wall(
    settings: WallSettings, state: Path | None, on_event: OnEvent, *, eager: bool
) -> ContainerWall:
    """Create the wall for containers on this machine.

    If `eager` is True, the wall queries the runtime when it starts, because an earlier engine with
    the same state may have left containers behind. Otherwise, the wall queries the runtime at the
    first call that needs a container.

    Raises:
        PartError: the runtime or the image maker cannot be created.
    """
    runtime: Runtime = NoRuntime()
    if settings.runtime is not None:
        with named_faults("The container runtime could not be made"):
            runtime = settings.runtime(settings.own_images)
    maker = None
    if settings.image_maker is not None:
        with named_faults("What adds to images could not be made"):
            maker = settings.image_maker(runtime, settings.own_images, state, on_event)
    return ContainerWall(
        settings.container,
        runtime,
        _identity(state, on_event),
        making=Making(
            held_s=settings.longest_session_s,
            held_with_disk_s=settings.longest_with_disk_s,
            orphan_s=settings.orphan_s,
        ),
        additions=Additions(runtime, maker),
        disks=Disks(state / "disks" if state is not None else None, runtime, on_event),
        eager=eager,
        part_of_one=settings.part_of_one,
        on_event=on_event,
    )


def _identity(state: Path | None, on_event: OnEvent) -> EngineIdentity:
    engine_id = secrets.token_hex(ID_BYTES)
    if state is None:
        return EngineIdentity(engine_id, engine_id)
    try:
        return EngineIdentity(engine_id, owner_id(state))
    except OSError as error:
        # If this engine crashes, its containers are now only removed after their deadline.
        on_event("container.owner_unknown", {"why": error.strerror or str(error)})
        return EngineIdentity(engine_id, engine_id)
