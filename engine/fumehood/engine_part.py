"""The behaviour of a part in one engine.

Host side, used by `engine_parts`, and by the parts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import Connection

from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.core.usage import EstimatingCounter, TokenCounter
from fumehood.executors.around import Given, LastingProgram, Surroundings, not_given
from fumehood.observe.clock import Clock
from fumehood.observe.figures import Figure
from fumehood.observe.log import Logger
from fumehood.observe.subscriber import Subscriber, Subscribers, no_subscribers
from fumehood.pipeline.gate import Gate
from fumehood.pipeline.part import CallPart
from fumehood.registry.index import ToolIndex
from fumehood.registry.registrations import Registrations
from fumehood.sandbox.container.additions import NewImageMaker
from fumehood.sandbox.session import Saver
from fumehood.sandbox.session_use import KeptValues, SessionAccess
from fumehood.sandbox.wall import SessionContainer, Wall
from fumehood.sandbox.walls import OwnWalls
from fumehood.storage.changes import recorded, stamp
from fumehood.storage.database import Database
from fumehood.storage.files import FilePlaces

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from fumehood.compose import Composition
    from fumehood.config import Config  # not at run time: it loads the parts


@dataclass(slots=True)
class Kernel:
    """The objects that every part can use. None of them has started yet."""

    config: Config
    database: Database
    clock: Clock
    log: Logger
    counter: TokenCounter = field(default_factory=EstimatingCounter)
    tracer_provider: TracerProvider | Literal["environment"] | None = None
    files: FilePlaces = field(default_factory=FilePlaces)
    subscribers: Subscribers = field(default_factory=no_subscribers)
    """All parts of the engine, once they have been created."""

    async def record(self, kind: str, fields: JsonObject) -> None:
        """Append a row of this kind with these fields to the audit chain. Raises WriteFailed."""
        at, chain = stamp(self.clock.now()), self.database.audit
        await self.database.write(lambda connection: chain.append(connection, kind, at, fields))

    async def record_change(
        self, by: str, action: str, subject: str, details: Mapping[str, str]
    ) -> None:
        """Record an administrative change that nothing else stores. Raises WriteFailed."""
        await self.database.write(
            recorded(
                lambda _: None, at=self.clock.now(), by=by, action=action, subject=subject,
                details=dict(details),
            )
        )  # fmt: skip

    async def notify(self, event: str, document: JsonObject) -> None:
        """Pass an event to the parts that notify people. Raises WriteFailed."""
        now = self.clock.now()

        def job(connection: Connection) -> None:
            for part in self.subscribers:
                part.on_notice(connection, event, document, now)

        await self.database.write(job)
        self.subscribers.committed()


class EnginePart(Subscriber, CallPart):
    """A part of one engine. Subclasses override the methods that they need.

    Raises:
        ConfigError: a setting of the part cannot be used; the engine does not start.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def approver(self) -> str | None:
        """The principal that makes the decisions of this part, or None if it makes none."""
        return None

    def gates(self) -> Iterable[Gate]:
        """Return the part's own gates, in their order."""
        return ()

    def use_policy(self, values: Mapping[str, Any], tools: Collection[str]) -> None:
        """Use a policy's values of the keys that parts add to the file (`Part.policy`).

        Called when the engine is created, and again for each later policy. `values` contains only
        the keys that the file has, and is empty without a file. `tools` are the names of the
        registered tools.
        """

    def add_tools(self, registry: ToolIndex, registrations: Registrations) -> None:
        """Register the part's own tools, before the policy is read. `registrations` has the tools
        that administrators registered.
        """

    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        """Return the part's own walls by name. Called once.

        Executors of parts name the walls in their `Placement`. A wall named `container`, which may
        wrap the kernel's wall of this name, runs the engine's containers. Walls that are
        asynchronous context managers are open as long as the engine's own walls.
        """
        return {}

    def image_maker(self) -> NewImageMaker | None:
        """Return what creates the `ImageMaker` of the engine's containers, or None.

        Called once, before `walls`. One part of an engine at most may have one.
        """
        return None

    def saver(self) -> Saver | None:
        """Return what saves the files of durable sessions outside their containers, or None.

        Called once. One part of an engine at most may have one.
        """
        return None

    @asynccontextmanager
    async def around_lasting(self, program: LastingProgram) -> AsyncIterator[Given | None]:
        """Surround a program that serves many calls. Yield what this part adds to it, or None.

        Raises EngineError if the program must not run, or if the part has ended it.
        """
        yield None

    @asynccontextmanager
    async def while_open(self) -> AsyncIterator[None]:
        """Work while the database is open: from before anything else of the engine is started until
        everything else has stopped.
        """
        yield

    def figures(self) -> Iterable[Figure]:
        """Return the part's own metrics."""
        return ()

    def close(self) -> None:
        """Release what the part still holds, after the last call was recorded. Runs in a thread."""

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Run the part's background work, from before the first call until after the last."""
        yield

    def in_session(self, access: SessionAccess) -> object | None:
        """Return what this part's executors use during a turn in a session, or None.

        The executors find the object by its class (`SessionLease.part`).
        """
        return None

    async def in_new_container(self, access: SessionAccess, container: SessionContainer) -> None:
        """Prepare the new container of a session, whose earlier container has ended with everything
        that ran in it. Called before the first program runs there. Must not raise an exception.
        """

    async def carry_over(self, source: KeptValues, made: KeptValues) -> None:
        """Keep with a new session what this part keeps with the session that it is made like.

        The new session gets the files of the other one. It does not exist until all values are
        kept, and if this raises, it is not created.
        """

    async def outcomes(self) -> Mapping[str, EngineError | None]:
        """Finish or undo actions that a killed process had begun, and return how these calls ended:
        call id → None if the call did everything, or its error if it did nothing.

        Called once, in `running`, before any call can start and before the kernel ends interrupted
        calls, which it does with these outcomes. The outcome of any other interrupted call is
        unknown. What is returned must be returned again by the next process, until `recovered` was
        called.
        """
        return {}

    async def recovered(self) -> None:
        """End what an earlier process has left unfinished.

        Called once, in `running`, after the kernel has recovered interrupted calls. The engine has
        started when this method has returned.
        """


@asynccontextmanager
async def around_lasting(
    program: LastingProgram, parts: Iterable[EnginePart]
) -> AsyncIterator[Surroundings]:
    """Enter the hooks of all parts around a program that serves many calls.

    Raises:
        SandboxUnavailable: the program needs a feature that no part provides.
        EngineError: a part refuses to let the program run, or has ended it.
    """
    needs, given = frozenset({"network"} if program.hosts else ()), list[Given]()
    async with AsyncExitStack() as stack:
        for part in parts:
            one = await stack.enter_async_context(part.around_lasting(program))
            if one is not None:
                given.append(one)
                needs -= one.needs
        if needs:
            raise not_given(needs)
        yield Surroundings(given)
