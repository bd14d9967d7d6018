"""The hooks by which a part takes effect in one engine.

Host side. `engine_parts` calls the hooks, and parts override them.
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
    """The objects of the kernel (the engine without its parts) that every part can use.

    None of the objects has been started when a part is created.
    """

    config: Config
    database: Database
    clock: Clock
    log: Logger
    counter: TokenCounter = field(default_factory=EstimatingCounter)
    tracer_provider: TracerProvider | Literal["environment"] | None = None
    files: FilePlaces = field(default_factory=FilePlaces)
    subscribers: Subscribers = field(default_factory=no_subscribers)
    """All parts of the engine, as receivers of events. Empty until all parts have been created."""

    async def record(self, kind: str, fields: JsonObject) -> None:
        """Append a row to the audit chain (the tamper-evident log). Raises WriteFailed.

        `kind` is the kind of the row, and `fields` are its values.
        """
        at, chain = stamp(self.clock.now()), self.database.audit
        await self.database.write(lambda connection: chain.append(connection, kind, at, fields))

    async def record_change(
        self, by: str, action: str, subject: str, details: Mapping[str, str]
    ) -> None:
        """Record an administrative change that is not stored anywhere else. Raises WriteFailed.

        `by` is the principal who made the change, `action` is what was done, and `subject` is the
        object that was changed.
        """
        await self.database.write(
            recorded(
                lambda _: None, at=self.clock.now(), by=by, action=action, subject=subject,
                details=dict(details),
            )
        )  # fmt: skip

    async def notify(self, event: str, document: JsonObject) -> None:
        """Pass an event to the parts that notify people. Raises WriteFailed.

        `document` is the content of the event.
        """
        now = self.clock.now()

        def job(connection: Connection) -> None:
            for part in self.subscribers:
                part.on_notice(connection, event, document, now)

        await self.database.write(job)
        self.subscribers.committed()


class EnginePart(Subscriber, CallPart):
    """One part in one engine. Subclasses override the hooks that they need.

    Raises:
        ConfigError: the constructor raises this if a setting of the part cannot be used. The engine
            then does not start.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def approver(self) -> str | None:
        """The name of the principal in whose name this part decides on calls, or None if the part
        makes no decisions.
        """
        return None

    def gates(self) -> Iterable[Gate]:
        """Return the part's own gates (checks before a call), in the order in which they are
        called.
        """
        return ()

    def use_policy(self, values: Mapping[str, Any], tools: Collection[str]) -> None:
        """Receive the values of the policy keys that parts define (`Part.policy`).

        Called when the engine is created, and again whenever the policy changes. `values` maps a
        key to its value. It contains the keys of all parts, as far as the policy file has them.
        Without a policy file, it is empty. `tools` are the names of the registered tools.
        """

    def add_tools(self, registry: ToolIndex, registrations: Registrations) -> None:
        """Register the part's own tools, before the policy is read. `registrations` has the tools
        that administrators registered.
        """

    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        """Return the part's own walls by name. Called once.

        `own` contains the engine's wall settings and its container wall, from which the part can
        make its walls. An executor names its wall in its `Placement`.

        If a part returns a wall named `container`, this wall runs the engine's containers in place
        of the engine's own wall. It may wrap the engine's own wall.

        If a wall is an asynchronous context manager, the engine opens and closes it together with
        the engine's own walls.
        """
        return {}

    def image_maker(self) -> NewImageMaker | None:
        """Return a function that creates the `ImageMaker`, which adds packages to the images of the
        engine's containers. Return None if the part has no such function.

        Called once, before `walls`. At most one part of an engine may return a function.
        """
        return None

    def saver(self) -> Saver | None:
        """Return the object that saves the files of durable sessions outside their containers, or
        None.

        Called once. At most one part of an engine may return an object.
        """
        return None

    @asynccontextmanager
    async def around_lasting(self, program: LastingProgram) -> AsyncIterator[Given | None]:
        """Surround the run of a program that serves many calls. Implementations are asynchronous
        context managers: they are entered before the program starts, and left after it has ended.

        Yield what this part adds to the run, such as environment variables. Yield None if it adds
        nothing.

        Raises EngineError if the program must not run, or if this part has ended the program.
        """
        yield None

    @asynccontextmanager
    async def while_open(self) -> AsyncIterator[None]:
        """Work in the background while the database is open. Implementations are asynchronous
        context managers: they are entered before any other object of the engine is started, and
        left after every other object has stopped.
        """
        yield

    def figures(self) -> Iterable[Figure]:
        """Return the part's own metrics."""
        return ()

    def close(self) -> None:
        """Release the part's resources. Called in a thread, after the last call was recorded."""

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Work in the background while the engine runs. Implementations are asynchronous context
        managers: they are entered before the first call, and left after the last call. `made`
        contains the engine's objects.
        """
        yield

    def in_session(self, access: SessionAccess) -> object | None:
        """Return an object that this part's executors use while a call uses a session, or None.

        The executors get the object by its class (`SessionLease.part`). `access` gives access to
        the session.
        """
        return None

    async def in_new_container(self, access: SessionAccess, container: SessionContainer) -> None:
        """Prepare a session's new container before the first program runs in it. Must not raise an
        exception.

        The new container replaces an earlier one, which has ended with everything that ran in it.
        `access` gives access to the session.
        """

    async def carry_over(self, source: KeptValues, made: KeptValues) -> None:
        """Copy this part's values from a session to a new session that gets the same files.

        `source` has the values that parts keep with the existing session, and `made` those of the
        new session. The new session does not exist until all parts have copied their values. If
        this method raises an exception, the new session is not created.
        """

    async def outcomes(self) -> Mapping[str, EngineError | None]:
        """Finish or undo actions that an earlier process did not complete because it was killed.
        Return the outcomes of the calls to which these actions belong.

        The result maps a call's id to its outcome. The outcome is None if the call took its full
        effect, or the call's error if it had no effect. The engine ends each of these calls with
        its outcome. If an interrupted call is not in the result, its outcome counts as unknown.

        Called once, after `running` was entered and before any call can start. If the engine ends
        before it has called `recovered`, the next process must return the same outcomes.
        """
        return {}

    async def recovered(self) -> None:
        """Complete what an earlier process has left unfinished.

        Called once, after `outcomes`, when the engine has ended the interrupted calls. The engine
        counts as started only after this method has returned.
        """


@asynccontextmanager
async def around_lasting(
    program: LastingProgram, parts: Iterable[EnginePart]
) -> AsyncIterator[Surroundings]:
    """Enter the `around_lasting` hooks of all parts for a program that serves many calls. Yield
    what the parts together add to the program's run.

    Raises:
        SandboxUnavailable: the program needs a feature that no part provides.
        EngineError: a part refuses to let the program run, or has ended the program.
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
