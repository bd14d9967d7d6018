"""What a part does in one engine.

Host side, beside `compose`, which makes the `EnginePart`s after what they can use and before the
gates, so that these know their subscribers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sqlalchemy import Connection

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import KERNEL_WALLS, least_limits
from fumehood.core.part import PartError, named_faults
from fumehood.observe.clock import Clock
from fumehood.observe.figures import Figure
from fumehood.observe.log import Logger
from fumehood.observe.subscriber import Subscriber, Subscribers, no_subscribers
from fumehood.pipeline.gate import Gate
from fumehood.pipeline.part import CallPart
from fumehood.sandbox.wall import Wall
from fumehood.sandbox.walls import OwnWalls
from fumehood.storage.database import Database

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from fumehood.compose import Composition
    from fumehood.config import Config  # which loads the parts, and so must not begin here


@dataclass(slots=True)
class Kernel:
    """What every part can use. None of it has started yet."""

    config: Config
    database: Database
    clock: Clock
    log: Logger
    tracer_provider: TracerProvider | Literal["environment"] | None = None
    subscribers: Subscribers = field(default_factory=no_subscribers)
    """All parts of the engine, once they are made."""

    async def notify(self, event: str, document: JsonObject) -> None:
        """Pass a notice to the parts that tell people. Raises WriteFailed."""
        now = self.clock.now()

        def job(connection: Connection) -> None:
            for part in self.subscribers:
                part.on_notice(connection, event, document, now)

        await self.database.write(job)
        self.subscribers.committed()


class EnginePart(Subscriber, CallPart):
    """A part of one engine. It overrides what it needs.

    Raises:
        ConfigError: a setting of the part cannot be used; the engine does not start.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def approver(self) -> str | None:
        """The principal of decisions that come through this part, or None if it makes none."""
        return None

    def gates(self) -> Iterable[Gate]:
        """Return the part's own gates, in their order."""
        return ()

    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        """Return the part's own walls by name. Called once.

        The executors of parts name them in their `Placement`. One named `container`, which may wrap
        the kernel's, has the engine's containers. Those that are asynchronous context managers run
        as long as the engine's walls.
        """
        return {}

    def figures(self) -> Iterable[Figure]:
        """Return the part's own figures."""
        return ()

    def close(self) -> None:
        """Release what is left, after the last call was recorded. Runs in a thread."""

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Run what the part does beside calls, from before the first call until after the last."""
        yield


def walls_of(parts: Iterable[EnginePart], own: OwnWalls) -> Mapping[str, Wall]:
    """Return the walls of parts by name.

    Raises:
        PartError: a wall cannot be made, replaces another one, or does not require the limits on
            which the engine insists.
        ConfigError: a setting of the part cannot be used.
    """
    found: dict[str, Wall] = {}
    for part in parts:
        with named_faults(f"The walls of {type(part).__name__} could not be made"):
            added = {name: (wall, wall.status) for name, wall in part.walls(own).items()}
        for name, (wall, status) in added.items():
            words = f"{type(part).__name__} adds the wall {name!r}, which"
            if name in found or name in KERNEL_WALLS:
                raise PartError(f"{words} exists.")
            if lacking := least_limits(name) - status.required:
                raise PartError(f"{words} does not require {', '.join(sorted(lacking))}.")
            found[name] = wall
    return found
