"""The base class `Executor`: how one kind of tool is placed, previewed and run.

Host side, above the walls, below the pipeline. To add a kind, write a file in this package with an
`Executor`, and add a row to `EXECUTORS` in `kinds.py`. The engine makes one `CallHandle` for each
call, and the pipeline passes it to the executor. Invariants: a placement never has a weaker wall
than the definition requires; a run uses only the contents of its `ToolRun`; a call is cancelled at
most once, and only while it runs.
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
from fumehood.core.envelope import Envelope
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
from fumehood.sandbox.streams import RunClock
from fumehood.sandbox.wall import (
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
    """Where a tool runs. `why` is the explanation that a dry run shows."""

    kind: str
    wall: str
    why: str
    fresh: bool = False
    """Whether every call gets a new process, regardless of its `isolation` option."""
    isolations: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    """Each `isolation` option that a call may have → whether the option needs a sandbox in which
    nothing has run before. Other options cannot be enforced here."""
    is_of_session: bool = False
    """Whether the tool runs in the sandbox of a session, which the call must then name."""
    is_outside: bool = False
    """Whether the caller runs the tool, without any wall or limit of the engine."""

    def needs_fresh_place(self, isolation: str | None) -> bool:
        """Whether a call with this `isolation` needs a sandbox in which nothing has run before."""
        return self.fresh or (isolation is not None and self.isolations[isolation])


A_PROCESS_A_CALL = MappingProxyType({"call": True})
"""`Placement.isolations` of walls that can give each call a separate process."""

A_SESSION = MappingProxyType({"session": False})
"""`Placement.isolations` of tools that run in a session's sandbox."""


class ProgramCalls(Protocol):
    """The calls that parts make for one program while it runs."""

    def start(
        self,
        tool: str,
        arguments: JsonObject,
        answer: Callable[[Envelope | EngineError], None],
        clock: RunClock,
    ) -> None:
        """Start a call of a tool, as a call of the program's caller. Must not block. `answer`
        receives the answer. `clock` is the program's, and is paused while the call waits for a
        human.
        """

    async def ask(
        self, tool: str, arguments: JsonObject, action: HeldAction, clock: RunClock
    ) -> EngineError | None:
        """Request approval of an action that a part does for the program, as a call of `tool`.
        Return why the action was not done, or None if it was done. `clock` is the program's, and is
        paused until the action begins.
        """

    def spend(self, *, requests: int = 0, passed_bytes: int = 0) -> bool:
        """Deduct requests, and bytes that the program sends or receives, from the budgets. Return
        False if too little is left.
        """

    def cancel(self, task: asyncio.Task[None]) -> bool:
        """Withdraw the approval request that `task` has made with `ask`. Return False if there is
        no such request.
        """

    async def close(self) -> None:
        """Cancel the calls that are still running, and wait until they have ended."""


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One admitted call, with everything that the executor may use."""

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
    """Hosts that the call requests for the program. The operator's settings may allow fewer."""
    expected: str | None = None
    """`Effect.base` of the preview that a human approved. The run fails if the value has changed.
    """
    calls: ProgramCalls | None = None
    """Set for a program that needs features that only parts provide (`needs_of`)."""
    around: tuple[Around, ...] = ()
    """The hooks of parts around a program's run, in the parts' order."""
    must_hold_back: bool = False
    """Whether the program may run only if a part holds back its effect, because the call needs a
    consent that it does not have."""

    @property
    def traceparent(self) -> str:
        """The `traceparent` header of the call's own span, for requests to other services."""
        request = self.request
        return str(context_of(request.trace_id, request.call_id, request.traceparent))


class Executor(ABC):
    """One kind of tool."""

    language: str | None = None
    """The language that the sandbox must support, or None if every sandbox is suitable."""
    has_preview = False
    """Whether a human can see a call's effect before the call runs."""
    place: Placement
    """Where the tools run, unless a subclass overrides `placement`."""
    effect: Effect | None = None
    """The effect of the call, if this executor is for a single call whose effect is known."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        """Return where a tool runs. `in_session` is whether the call names a session."""
        return self.place

    def upstream(self, tool: ToolDefinition) -> str | None:
        """Return the name of the service that a tool calls, or None if it calls no service. All
        calls to one service share a circuit breaker.
        """
        return None

    async def preview(
        self, tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
    ) -> Effect | None:
        """Return the effect that a call would have in the leased sandbox, without changing it.

        Return None if this kind of tool has no preview.

        Raises:
            InvalidParams: the effect is too large to show, or files cannot be read.
            EngineError: for the same reasons as in `run`.
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
        """Return the request that a call would send to another service, as shown to approvers.
        Nothing is sent.

        The result contains the names of secrets, never their values. Return None if the engine
        sends no request for this kind of tool.

        Raises:
            EngineError: the call would fail with this error.
        """
        return None

    @abstractmethod
    def run(self, run: ToolRun) -> Awaitable[Outcome]:
        """Run the tool once.

        If the tool fails, return an `Outcome` with an error. Raise an error only if there is
        nothing else to report about the run.
        """


class HeldAction(Executor):
    """An action that is held in this engine's memory until a human approves it, and is done at most
    once.

    A call with this action in its request (`CallRequest.held`) asks for the approval, and then runs
    the action instead of its tool's executor. The code that waits for the approval withdraws the
    action when it stops waiting.
    """

    needs: ClassVar[Need]
    always_asks: ClassVar[bool] = False
    gone: ClassVar[str]
    """The error message if the program or trial that the action needs has ended."""

    def __init__(self) -> None:
        self.has_begun = False
        self.is_withdrawn = False
        self.result: Outcome | EngineError | None = None
        """The action's outcome or error. None until `over` is set, and also after that if the way
        in which the action ended is unknown.
        """
        self.over = asyncio.Event()
        """Set when the action has ended."""
        self.on_begun: Callable[[], None] = lambda: None
        """Called when the action begins."""

    def withdraw(self) -> None:
        """Prevent the action from being done, unless it has begun."""
        self.is_withdrawn = True

    async def run(self, run: ToolRun) -> Outcome:
        """Do the action, and set `result` and `over` for the code that waits for it.

        Raises:
            ApprovalExpired: the action was withdrawn, or has begun already.
        """
        if self.is_withdrawn or self.has_begun:
            raise ApprovalExpired(self.gone)
        self.has_begun = True
        try:
            self.on_begun()
            self.result = outcome = await self.carry_out(run)
        except EngineError as error:
            self.result = error
            raise
        finally:
            self.over.set()
        return outcome

    async def ended(self) -> EngineError | None:
        """Wait until the action, which has begun, has ended. Return its error, or None.

        Raises:
            CancelledError: the action was interrupted, so it is unknown what was done.
        """
        await self.over.wait()
        if self.result is None:
            raise asyncio.CancelledError
        return self.result.error if isinstance(self.result, Outcome) else self.result

    @abstractmethod
    async def carry_out(self, run: ToolRun) -> Outcome:
        """Do the action. Called at most once."""


# -- the handle of a running call -----------------------------------------------------------

HEARD_CHARACTERS = 16 * 1024
"""Number of characters at the end of each output stream that are kept while a call runs."""


class CallHandle:
    """One running call: its listeners, its state, and its cancellation. The pipeline calls
    `attach`, `begin` and `close`.
    """

    __slots__ = (
        "_cancelling_before", "_is_over", "_on_begun", "_on_output", "_on_progress",
        "_on_retrying", "_on_waiting", "_redact", "_reports", "_task", "drained", "has_output",
        "heard", "is_cancelled", "is_delivered_later", "is_waiting", "on_delivered", "output",
        "over", "partial", "progress",
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
        """Whether followers have received output. Output cannot be taken back, so the call is not
        retried from then on."""
        self.heard: dict[str, str] = {}
        """Stream name → the end of the stream's output so far."""
        self.progress: tuple[float, str] | None = None
        """The last progress report: percentage and redacted message."""
        self.is_waiting = False
        """Whether the call waits for a human."""
        self.drained = drained
        """A function that waits until the listener can take more output, or None if it always can.
        """
        self.partial: Outcome | None = None
        """The partial outcome of a cancelled run, if the executor provides one."""
        self.is_cancelled = False
        """Whether the caller has cancelled the call."""
        self.on_delivered: Callable[[], None] | None = None
        """Called when the caller has received the answer, if the code that stored the answer needs
        to know."""
        self.is_delivered_later = False
        """Whether the public interface (such as HTTP) calls `Engine.delivered` after it has sent
        the answer."""
        self.over = asyncio.Event()
        """Set when the call has ended."""
        self._on_progress = progress
        self._on_begun = begun
        self._on_retrying = retrying
        self._on_waiting = waiting
        self._reports = 0
        self._redact: Callable[[str], str] = str
        self._task: asyncio.Task[object] | None = None
        self._cancelling_before = 0
        self._is_over = False

    def attach(self, redact: Callable[[str], str]) -> None:
        """Record that the current task runs the call, so that `cancel` cancels this task.

        `redact` is applied to the messages of progress reports.
        """
        self._redact = redact
        self._task = asyncio.current_task()
        self._cancelling_before = self._task.cancelling() if self._task is not None else 0

    def begin(self) -> None:
        """Notify the listener, once, that the call has passed every gate. The call may still wait
        for a sandbox.
        """
        on_begun, self._on_begun = self._on_begun, None
        if on_begun is not None:
            on_begun()

    def report(self, percent: float, message: str) -> None:
        """Redact the tool's progress report, keep it and pass it to the listener, up to a maximum
        number of reports. May be called in any thread.
        """
        self._reports += 1
        if self._reports <= MAX_REPORTS:
            self.progress = report = percent, self._redact(message)
            if self._on_progress is not None:
                self._on_progress(*report)

    @contextlib.contextmanager
    def waiting_for_human(self) -> Iterator[None]:
        """Notify the listener that the call is waiting for a human, and that it no longer is when
        the block is left.
        """
        tell = self._on_waiting or (lambda is_waiting: None)
        self.is_waiting = True
        tell(True)
        try:
            yield
        finally:
            self.is_waiting = False
            tell(False)

    def hear(self, stream: str, text: str) -> None:
        """Add text to the kept end of a stream, and pass it to the listener."""
        self.heard[stream] = (self.heard.get(stream, "") + text)[-HEARD_CHARACTERS:]
        if self._on_output is not None:
            self._pass_on(stream, text)

    def _pass_on(self, stream: str, text: str) -> None:
        self.has_output = True
        if self._on_output is not None:
            self._on_output(stream, text)

    def retrying(self, retry_count: int, max_retries: int, error: EngineError) -> None:
        """Notify the listener that an attempt failed with `error`, and that another one follows."""
        if self._on_retrying is not None:
            self._on_retrying(retry_count, max_retries, error)

    def for_fallback(self) -> CallHandle:
        """Return a handle for a fallback tool's call, which runs in this call's task.

        The fallback's events go to this call's listeners. Cancelling this call also ends the
        fallback.
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
        """Return the sinks for a run behind a wall: the sinks in the arguments, and this call's
        listener for progress.
        """
        return RunSinks(
            progress=self.report,
            files=files,
            output=output,
            ending=ending,
            is_live=self.output is not None or self._on_progress is not None,
        )

    def cancel(self) -> bool:
        """Cancel the call. Return False if it is not running."""
        if self._is_over or self._task is None:
            return False
        if not self.is_cancelled:
            self.is_cancelled = True
            self._task.cancel()
        return True

    def close(self) -> bool:
        """Record that the call has ended. Return whether its caller cancelled it.

        Return False if the call's task is also being cancelled from outside, in which case the task
        must end.
        """
        if not self._is_over:
            self._is_over = True
            self.over.set()
            if self.is_cancelled and self._task is not None:
                self._task.uncancel()
        if not self.is_cancelled:
            return False
        return self._task is None or self._task.cancelling() <= self._cancelling_before
