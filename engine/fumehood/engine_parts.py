"""The parts of one engine: create them, pass them what they use, start and stop them.

Host side, used by `compose`, which creates the `EngineParts` after the objects that the parts can
use and before the gates, so that the gates know the parts as subscribers. Invariants: a fault of a
part is reported with the part's name; every part is closed, also after a fault of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

import anyio.to_thread

from fumehood.core.errors import EngineError, FumehoodError
from fumehood.core.limits import KERNEL_WALLS, least_limits
from fumehood.core.part import Part, PartError, imported, named_faults
from fumehood.engine_part import EnginePart, Kernel
from fumehood.observe.log import log_fault
from fumehood.observe.subscriber import Subscribers
from fumehood.parts import parts
from fumehood.pipeline.part import CallParts
from fumehood.policy.model import Policy
from fumehood.registry.index import ToolIndex
from fumehood.registry.registrations import Registrations
from fumehood.sandbox.container.additions import NewImageMaker
from fumehood.sandbox.session import Saver
from fumehood.sandbox.session_use import CarryOver, InNewContainer, InSession
from fumehood.sandbox.wall import Wall
from fumehood.sandbox.walls import OwnWalls
from fumehood.storage.needed_parts import require_parts

if TYPE_CHECKING:
    from fumehood.compose import Composition

T = TypeVar("T")


class EngineParts:
    """The parts of one engine, in their order.

    Raises:
        PartError: a part itself fails, or the state needs a part that is not there. The message
            has its name.
        ConfigError: a setting of a part cannot be used.
    """

    def __init__(self, kernel: Kernel) -> None:
        found = tuple(part for part in parts() if part.in_engine is not None)
        require_parts(kernel.database, {part.name for part in parts()})
        self._all = tuple(_make(part, kernel) for part in found)
        self._keys = frozenset(key for part in parts() for key in part.excesses)
        self._kernel = kernel
        kernel.subscribers = Subscribers(self._all, kernel.log)

    def __iter__(self) -> Iterator[EnginePart]:
        return iter(self._all)

    def part(self, kind: type[T]) -> T:
        """Return this engine's instance of the part class `kind`."""
        return next(part for part in self if isinstance(part, kind))

    def add_tools(self, registry: ToolIndex, registrations: Registrations) -> None:
        """Let each part register its own tools. Raises PartError if they cannot be registered."""
        for part in self:
            with named_faults(f"The tools of {type(part).__name__} could not be registered"):
                part.add_tools(registry, registrations)

    def approvers(self) -> Iterable[str]:
        """Return the principals that make the decisions of parts."""
        return {part.approver for part in self if part.approver}

    def image_maker(self) -> NewImageMaker | None:
        """Return what creates the image maker of this engine, or None if no part has one.

        Raises PartError if two parts have one.
        """
        return _only("make images", ((part, part.image_maker()) for part in self))

    def saver(self) -> Saver | None:
        """Return what saves the files of durable sessions, or None if no part does.

        Raises PartError if two parts do.
        """
        return _only("save files of sessions", ((part, part.saver()) for part in self))

    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        """Return the walls of parts by name.

        Raises:
            PartError: a wall cannot be created, has the name of another one, or does not require
                the limits that the engine always requires.
            ConfigError: a setting of the part cannot be used.
        """
        found: dict[str, Wall] = {}
        for part in self:
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

    def use_policy(self, registry: ToolIndex, policy: Policy | None) -> None:
        """Pass the values of the parts' own keys to them. `policy` is None without a file."""
        values = policy.of_parts if policy is not None else {}
        tools = {tool.definition.name for tool in registry}
        for part in self:
            part.use_policy(values, tools)

    def in_calls(self) -> CallParts:
        """Return what the pipeline uses of the parts.

        Raises:
            PartError: no gate has one of the keys that parts add to rules (`Part.excesses`), so
                that a rule with this key would never match. Or see `CallParts.of`.
        """
        gates = tuple(gate for part in self for gate in part.gates())
        if missing := self._keys - {gate.key for gate in gates}:
            raise PartError(f"A part adds the key {min(missing)!r} to rules, and no gate has it.")
        return CallParts.of(self, gates, self._kernel.subscribers)

    async def open(self, stack: AsyncExitStack) -> None:
        """Start what the parts do while the database is open, which ends with `stack`."""
        for part in self:
            with self._starting(part):
                await stack.enter_async_context(part.while_open())

    async def start(self, made: Composition, stack: AsyncExitStack) -> None:
        """Start the parts' background work, which ends with `stack`."""
        for part in self:
            with self._starting(part):
                await stack.enter_async_context(part.running(made))

    def in_sessions(self) -> list[InSession]:
        """Return the functions that make the parts' objects for a turn in a session."""
        return [
            part.in_session for part in self if type(part).in_session is not EnginePart.in_session
        ]

    def in_new_containers(self) -> list[InNewContainer]:
        """Return the functions by which parts prepare the new container of a session."""
        kernel = EnginePart.in_new_container
        return [part.in_new_container for part in self if type(part).in_new_container is not kernel]

    def carry_overs(self) -> list[CarryOver]:
        """Return the functions that carry the parts' values over to a session made like another."""
        return [
            part.carry_over for part in self if type(part).carry_over is not EnginePart.carry_over
        ]

    async def outcomes(self) -> dict[str, EngineError | None]:
        """Return the outcomes of interrupted calls that parts know (`EnginePart.outcomes`).

        Raises PartError if two parts know the outcome of the same call.
        """
        known: dict[str, EngineError | None] = {}
        for part in self:
            with self._starting(part):
                found = await part.outcomes()
                if again := known.keys() & found.keys():
                    raise PartError(f"Two parts know how the call {min(again)} ended.")
                known.update(found)
        return known

    async def recover(self) -> None:
        """Let each part end what an earlier process has left unfinished."""
        for part in self:
            with self._starting(part):
                await part.recovered()

    async def close(self) -> None:
        """Release what the parts hold, in reverse order. A fault is only logged."""
        for part in reversed(self._all):
            try:
                await anyio.to_thread.run_sync(part.close)
            except Exception as fault:
                log_fault(self._kernel.log, "part.not_closed", fault, part=type(part).__name__)

    @contextmanager
    def _starting(self, part: EnginePart) -> Iterator[None]:
        """Raise PartError, with the part's name, for an exception that is not the engine's."""
        try:
            yield
        except FumehoodError:
            raise
        except Exception as fault:
            log_fault(self._kernel.log, "part.not_started", fault, part=type(part).__name__)
            raise PartError(f"{type(part).__name__} could not be started: {fault}") from fault


def _only(does: str, found: Iterable[tuple[EnginePart, T | None]]) -> T | None:
    """Return the one object that parts have, or None. Raises PartError if two parts have one."""
    given = [(part, one) for part, one in found if one is not None]
    if len(given) > 1:
        names = " and ".join(type(part).__name__ for part, _ in given)
        raise PartError(f"{names} both {does}. Only one part may.")
    return given[0][1] if given else None


def _make(part: Part, kernel: Kernel) -> EnginePart:
    """Create the object of a part for one engine."""
    with named_faults(f"The part {part.name!r} could not be made"):
        made: EnginePart = imported(part.in_engine)(kernel)
    return made
