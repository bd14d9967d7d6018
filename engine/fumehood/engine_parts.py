"""The parts of one engine: create them, pass them the objects that they use, start and stop them.

Host side, used by `compose`. `compose` creates the `EngineParts` after the objects that parts can
use, and before the gates (the checks before a call), because the gates notify the parts of events.
Invariants: a fault in a part is reported with the part's name; every part is closed, even if
another part fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

import anyio.to_thread

from fumehood.core.errors import EngineError, FumehoodError
from fumehood.core.limits import KERNEL_WALLS, least_limits
from fumehood.core.part import Part, PartError, imported, named_faults, part_among
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
    """All parts of one engine, in a fixed order.

    Raises:
        PartError: the constructor raises this if a part cannot be created, or if the engine's
            stored state needs a part that is not installed. The message names the part.
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
        """Return this engine's instance of the part class `kind`. Raises PartError if there is no
        such part.
        """
        return part_among(self, kind)

    def add_tools(self, registry: ToolIndex, registrations: Registrations) -> None:
        """Let each part register its own tools. Raises PartError if they cannot be registered."""
        for part in self:
            with named_faults(f"The tools of {type(part).__name__} could not be registered"):
                part.add_tools(registry, registrations)

    def approvers(self) -> Iterable[str]:
        """Return the names of the principals in whose names parts decide on calls."""
        return {part.approver for part in self if part.approver}

    def image_maker(self) -> NewImageMaker | None:
        """Return the function that creates the `ImageMaker`, which adds packages to the images of
        the engine's containers. Return None if no part has such a function.

        Raises PartError if two parts have such a function.
        """
        return _only("make images", ((part, part.image_maker()) for part in self))

    def saver(self) -> Saver | None:
        """Return the object that saves the files of durable sessions, or None if no part has one.

        Raises PartError if two parts have such an object.
        """
        return _only("save files of sessions", ((part, part.saver()) for part in self))

    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        """Return the walls that parts add, by name. `own` contains the engine's wall settings and
        its container wall, from which parts can make their walls.

        Raises:
            PartError: a wall cannot be created, or has the name of another wall. Also raised if a
                wall does not require all limits that walls with its name must enforce
                (`least_limits`).
            ConfigError: a setting of a part cannot be used.
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
        """Pass the policy's values for the keys of parts to every part.

        A part can define keys of its own for the policy file (`Part.policy`). Each part receives
        the values of these keys, also of the keys that other parts have defined.

        `registry` has the registered tools. `policy` is None if there is no policy file; the parts
        then receive no values.
        """
        values = policy.of_parts if policy is not None else {}
        tools = {tool.definition.name for tool in registry}
        for part in self:
            part.use_policy(values, tools)

    def in_calls(self) -> CallParts:
        """Return the hooks of all parts that run during a call.

        Raises:
            PartError: a part adds a key to policy rules (`Part.excesses`) that no gate (check
                before a call) tests. Also raised for the reasons for which `CallParts.of` raises
                it.
        """
        gates = tuple(gate for part in self for gate in part.gates())
        # A policy rule with a key that no gate tests would never match.
        if missing := self._keys - {gate.key for gate in gates}:
            raise PartError(f"A part adds the key {min(missing)!r} to rules, and no gate has it.")
        return CallParts.of(self, gates, self._kernel.subscribers)

    async def open(self, stack: AsyncExitStack) -> None:
        """Enter the context manager `while_open` of each part. The contexts are left when `stack`
        is closed.
        """
        for part in self:
            with self._starting(part):
                await stack.enter_async_context(part.while_open())

    async def start(self, made: Composition, stack: AsyncExitStack) -> None:
        """Enter the context manager `running` of each part, with the engine's objects `made`. The
        contexts are left when `stack` is closed.
        """
        for part in self:
            with self._starting(part):
                await stack.enter_async_context(part.running(made))

    def in_sessions(self) -> list[InSession]:
        """Return the `in_session` hooks of the parts that override this hook."""
        return [
            part.in_session for part in self if type(part).in_session is not EnginePart.in_session
        ]

    def in_new_containers(self) -> list[InNewContainer]:
        """Return the `in_new_container` hooks of the parts that override this hook."""
        kernel = EnginePart.in_new_container
        return [part.in_new_container for part in self if type(part).in_new_container is not kernel]

    def carry_overs(self) -> list[CarryOver]:
        """Return the `carry_over` hooks of the parts that override this hook."""
        return [
            part.carry_over for part in self if type(part).carry_over is not EnginePart.carry_over
        ]

    async def outcomes(self) -> dict[str, EngineError | None]:
        """Return the outcomes of interrupted calls from all parts (see `EnginePart.outcomes`), by
        call id.

        Raises PartError if two parts return an outcome for the same call.
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
        """Let each part complete what an earlier process has left unfinished
        (`EnginePart.recovered`).
        """
        for part in self:
            with self._starting(part):
                await part.recovered()

    async def close(self) -> None:
        """Close all parts in reverse order. If a part fails to close, this is only logged."""
        for part in reversed(self._all):
            try:
                await anyio.to_thread.run_sync(part.close)
            except Exception as fault:
                log_fault(self._kernel.log, "part.not_closed", fault, part=type(part).__name__)

    @contextmanager
    def _starting(self, part: EnginePart) -> Iterator[None]:
        """Convert an exception that the block raises to a PartError with the part's name.

        Exceptions that are already a `FumehoodError` are not converted.
        """
        try:
            yield
        except FumehoodError:
            raise
        except Exception as fault:
            log_fault(self._kernel.log, "part.not_started", fault, part=type(part).__name__)
            raise PartError(f"{type(part).__name__} could not be started: {fault}") from fault


def _only(does: str, found: Iterable[tuple[EnginePart, T | None]]) -> T | None:
    """Return the only object in `found` that is not None, or None if there is no such object.

    Each item of `found` is a part and the part's object. `does` says what the object does, for the
    error's message. Raises PartError if two parts have an object.
    """
    given = [(part, one) for part, one in found if one is not None]
    if len(given) > 1:
        names = " and ".join(type(part).__name__ for part, _ in given)
        raise PartError(f"{names} both {does}. Only one part may.")
    return given[0][1] if given else None


def _make(part: Part, kernel: Kernel) -> EnginePart:
    """Create the `EnginePart` of a part for one engine."""
    with named_faults(f"The part {part.name!r} could not be made"):
        made: EnginePart = imported(part.in_engine)(kernel)
    return made
