"""The base class `Executor`: how one kind of tool is placed, previewed and run.

Host side, above the walls, below the pipeline. To add a kind, write a file in this package with an
`Executor`, and add a row to `EXECUTORS` in `kinds.py`. The engine makes one `CallHandle` for each
call, and the pipeline passes it to the executor. Invariants: a placement is never a weaker wall
than the definition requires; a run uses only what its `ToolRun` holds; a call is cancelled at most
once, and only while it still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Protocol

from fumehood.core.call import CallRequest, Need
from fumehood.core.errors import ApprovalExpired, EngineError
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.around import Around
from fumehood.executors.effects import Effect
from fumehood.executors.outcome import Outcome
from fumehood.executors.upstreams import Upstreams
from fumehood.observe.trace_context import context_of
from fumehood.protocol.cursors import Cursors
from fumehood.protocol.framing import MAX_REPORTS
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import RegisteredTool
from fumehood.sandbox.wall import (
    CallPort,
    FileSink,
    Lease,
    OnEnding,
    OnOutput,
    OnProgress,
    RunSinks,
)
from fumehood.storage.blobs import BlobStore


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tool runs. `why` is the sentence that a dry run shows about it."""

    kind: str
    wall: str
    why: str
    fresh: bool = False
    """Whether every call gets a new process, regardless of its `isolation` option."""
    isolations: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    """The `isolation` options that a call may have → whether that option needs a sandbox in which
    nothing has run before. Others cannot be enforced here."""
    is_of_session: bool = False
    """Whether the tool runs in the sandbox of a session, which the call must then name."""
    is_outside: bool = False
    """Whether the caller runs the tool itself, without any wall or limit of the engine."""

    def needs_fresh_place(self, isolation: str | None) -> bool:
        """Whether a call with this `isolation` needs a sandbox in which nothing has run before."""
        return self.fresh or (isolation is not None and self.isolations[isolation])


A_PROCESS_A_CALL = MappingProxyType({"call": True})
"""`Placement.isolations` of walls that can give each call a process of its own."""

A_SESSION = MappingProxyType({"session": False})
"""`Placement.isolations` of tools that run in a session's sandbox."""


class ProgramCalls(Protocol):
    """The calls of other tools that one program makes."""

    @property
    def tools(self) -> list[JsonObject]:
        """The tools that the program may call, in the form that the guest receives."""

    @property
    def report(self) -> JsonObject:
        """The calls of the program as `{"made": …, "failed": …}`. Both numbers include refused
        calls."""

    def on_call(self, number: int, tool: str, arguments: JsonObject, port: CallPort) -> None:
        """Start a call, or refuse it. Must not block. The answer is sent through `port`."""

    async def ask(
        self,
        arguments: JsonObject,
        send: Callable[[], Awaitable[EngineError | None]],
        port: CallPort,
    ) -> EngineError | None:
        """Let a human decide on a request of the program, which `send` sends after a yes. Return
        why it was not sent, or None.
        """

    def spend(self, *, requests: int = 0, network_bytes: int = 0) -> bool:
        """Take what the program sends or gets from the budgets. False if too little is left."""

    def cancel(self, task: asyncio.Task[None]) -> bool:
        """Withdraw the question that a task has put to a human. False if there is none."""

    async def close(self) -> None:
        """Cancel the calls that still run, and wait until they have ended."""


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One admitted call, with everything that its executor may use."""

    tool: RegisteredTool
    arguments: JsonObject
    limits: Limits
    lease: Lease
    domain: TrustDomain
    handle: CallHandle
    blobs: BlobStore
    cursors: Cursors
    redactor: Redactor
    upstreams: Upstreams
    request: CallRequest
    network: tuple[str, ...] = ()
    """Hosts that the program may reach, as far as the operator allows them."""
    expected: str | None = None
    """`Effect.base` of the preview that a human approved. The run fails if it is different now."""
    calls: ProgramCalls | None = None
    """Set for a program that may call other tools, or has network."""
    around: tuple[Around, ...] = ()
    """What parts do around a run of a program, in their order."""

    @property
    def traceparent(self) -> str:
        """The `traceparent` header of the call's own span, for requests to other services."""
        request = self.request
        return str(context_of(request.trace_id, request.call_id, request.traceparent))


class Executor(ABC):
    """One kind of tool."""

    language: str | None = None
    """The language that the sandbox must support, or None if any sandbox will do."""
    has_preview = False
    """Whether a human can see a call's effect before the call runs."""
    place: Placement
    """Where its tools run, unless it has a `placement` of its own."""
    effect: Effect | None = None
    """The effect of its one call, if that is known beforehand."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        """Return where a tool runs. `in_session` is whether the call names a session."""
        return self.place

    def upstream(self, tool: ToolDefinition) -> str | None:
        """Return the service that a tool calls, or None. Calls of one service share a circuit."""
        return None

    async def preview(
        self, tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
    ) -> Effect | None:
        """Return the effect that a call would have in the leased sandbox. Changes nothing.

        Return None if this kind of tool has no preview.

        Raises:
            InvalidParams: the effect is too large to show, or files cannot be read.
            SandboxUnavailable, Timeout, …: in the same cases as `run`.
        """
        return None

    def sends(
        self,
        tool: RegisteredTool,
        arguments: JsonObject,
        upstreams: Upstreams,
        cursors: Cursors,
        principal_id: str,
    ) -> JsonObject | None:
        """Return what a call would send to another service, as approvers see it. Sends nothing.

        It has the names of secrets, never their values. Return None if this kind of tool is no
        request of the engine's own.

        Raises:
            EngineError: the call would fail with this error.
        """
        return None

    @abstractmethod
    def run(self, run: ToolRun) -> Awaitable[Outcome]:
        """Run the tool once.

        If the tool fails, return an `Outcome` with an error. Raise only if nothing is known about
        the run.
        """


class HeldAction(Executor):
    """An action that waits in this engine's memory for a human's yes, and is then done once.

    The request of the call that asks has it, and the call runs it instead of its tool's executor.
    Approvals keep it by their id until the call has ended. Whoever waits for it withdraws it at the
    end of its wait.
    """

    needs: ClassVar[Need]
    always_asks: ClassVar[bool] = False
    gone: ClassVar[str]
    """The message after what it needs has ended."""

    def __init__(self) -> None:
        self.has_begun = False
        self.is_withdrawn = False
        self.result: Outcome | EngineError | None = None
        """How it ended; None after `over` if that is unknown."""
        self.over = asyncio.Event()

    def withdraw(self) -> None:
        """Never do it, unless it has begun."""
        self.is_withdrawn = True

    async def run(self, run: ToolRun) -> Outcome:
        """Do it, and tell the call that waits for it how it ended.

        Raises:
            ApprovalExpired: what it needs has ended, or it was done before.
        """
        if self.is_withdrawn or self.has_begun:
            raise ApprovalExpired(self.gone)
        self.has_begun = True
        try:
            self.result = outcome = await self.carry_out(run)
        except EngineError as error:
            self.result = error
            raise
        finally:
            self.over.set()
        return outcome

    @abstractmethod
    async def carry_out(self, run: ToolRun) -> Outcome:
        """Do it once. Raises as `run`."""


# -- the handle of a running call -----------------------------------------------------------

HEARD_CHARACTERS = 16 * 1024
"""Characters of each stream of a running call that can be looked at."""


class CallHandle:
    """One running call. The pipeline calls `attach`, `begin` and `close`."""

    __slots__ = (
        "_cancelling_before", "_is_over", "_on_begun", "_on_output", "_on_progress",
        "_on_retrying", "_on_waiting", "_reports", "_task", "drained", "has_output", "heard",
        "is_cancelled", "is_delivered_later", "is_waiting", "on_delivered", "output", "over",
        "partial", "progress",
    )  # fmt: skip

    def __init__(
        self,
        *,
        output: OnOutput | None = None,
        progress: OnProgress | None = None,
        begun: Callable[[], None] | None = None,
        retrying: Callable[[int, int, EngineError], None] | None = None,
        drained: Callable[[], Awaitable[None]] | None = None,
        waiting: Callable[[bool], None] | None = None,
    ) -> None:
        self._on_output = output
        self.output = self._pass_on if output is not None else None
        self.has_output = False
        """Whether followers have received output. It cannot be taken back, so no retry follows."""
        self.heard: dict[str, str] = {}
        """The end of what each stream has printed so far."""
        self.progress: tuple[float, str] | None = None
        """The last report: percent, and a message."""
        self.is_waiting = False
        """Whether it waits for a human."""
        self.drained = drained
        """Function that waits until the output so far is on disk, or None if it is not recorded."""
        self.partial: Outcome | None = None
        """The partial outcome of a cancelled run, if its executor knows it."""
        self.is_cancelled = False
        """Whether the caller has cancelled the call."""
        self.on_delivered: Callable[[], None] | None = None
        """Called when the caller has its answer, if whoever stored the answer wants to know."""
        self.is_delivered_later = False
        """Whether the face (such as HTTP) itself calls `Engine.delivered` after the answer."""
        self.over = asyncio.Event()
        """Set when the call no longer runs."""
        self._on_progress = progress
        self._on_begun = begun
        self._on_retrying = retrying
        self._on_waiting = waiting
        self._reports = 0
        self._task: asyncio.Task[object] | None = None
        self._cancelling_before = 0
        self._is_over = False

    def attach(self) -> None:
        """Record the current task as the one that runs the call, and that `cancel` cancels."""
        self._task = asyncio.current_task()
        self._cancelling_before = self._task.cancelling() if self._task is not None else 0

    def begin(self) -> None:
        """Notify the listener, once, that the call has passed every gate. It may still queue."""
        on_begun, self._on_begun = self._on_begun, None
        if on_begun is not None:
            on_begun()

    def report(self, percent: float, message: str) -> None:
        """Pass the tool's progress to the listener. May run in any thread."""
        self._reports += 1
        if self._reports <= MAX_REPORTS:
            self.progress = percent, message
        if self._on_progress is not None and self._reports <= MAX_REPORTS:
            self._on_progress(percent, message)

    @contextlib.contextmanager
    def waiting_for_human(self) -> Iterator[None]:
        """Notify the listener while the call waits for an approval and the answer after it."""
        tell = self._on_waiting or (lambda is_waiting: None)
        self.is_waiting = True
        tell(True)
        try:
            yield
        finally:
            self.is_waiting = False
            tell(False)

    def hear(self, stream: str, text: str) -> None:
        """Keep the end of a stream, and pass a piece of it to the listener."""
        self.heard[stream] = (self.heard.get(stream, "") + text)[-HEARD_CHARACTERS:]
        if self._on_output is not None:
            self._pass_on(stream, text)

    def _pass_on(self, stream: str, text: str) -> None:
        self.has_output = True
        if self._on_output is not None:
            self._on_output(stream, text)

    def retrying(self, retry_count: int, max_retries: int, error: EngineError) -> None:
        """Notify the listener that an attempt failed and another one follows."""
        if self._on_retrying is not None:
            self._on_retrying(retry_count, max_retries, error)

    def for_fallback(self) -> CallHandle:
        """Return a handle for a fallback tool's call, which runs in this call's task.

        Its events go to this call's listeners. Cancelling this call also ends the fallback.
        """
        return CallHandle(
            output=self.output,
            progress=self._on_progress,
            begun=self.begin,
            retrying=self._on_retrying,
            drained=self.drained,
        )

    def sinks(
        self,
        *,
        files: FileSink | None = None,
        output: OnOutput | None = None,
        ending: OnEnding | None = None,
    ) -> RunSinks:
        """Return the sinks for a run behind a wall: the executor's, and this call's progress."""
        return RunSinks(
            progress=self.report,
            files=files,
            output=output,
            ending=ending,
            is_live=self.output is not None or self._on_progress is not None,
        )

    def cancel(self) -> bool:
        """Cancel the call. Return False if it does not run."""
        if self._is_over or self._task is None:
            return False
        if not self.is_cancelled:
            self.is_cancelled = True
            self._task.cancel()
        return True

    def close(self) -> bool:
        """Record that the call no longer runs. Return whether its caller cancelled it.

        Return False if the task is also being cancelled from outside, so that the task ends.
        """
        if not self._is_over:
            self._is_over = True
            self.over.set()
            if self.is_cancelled and self._task is not None:
                self._task.uncancel()
        if not self.is_cancelled:
            return False
        return self._task is None or self._task.cancelling() <= self._cancelling_before
