"""The base class `Executor`: how one kind of tool is placed, previewed and run.

Host side, above the walls, below the pipeline. To add a kind of tool, write a file in this package
with an `Executor`, and add a row to `EXECUTORS` in `kinds.py`. The engine creates one `CallHandle`
for each call, and the pipeline passes this handle to the executor. Invariants: a placement never
has a weaker wall than the tool's definition requires; a run uses only the contents of its
`ToolRun`; a call is cancelled at most once, and only while it is running.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Protocol, TypeVar

from fumehood.core.call import CallRequest, Need
from fumehood.core.envelope import Envelope
from fumehood.core.errors import ApprovalExpired, EndedBy, EngineError
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.part import part_among
from fumehood.core.tool import ToolDefinition
from fumehood.executors.around import Around
from fumehood.executors.effects import Effect
from fumehood.executors.outcome import MAX_DATA_BYTES, Outcome
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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tool runs. `why` is the reason for this place, as dry runs show it to callers."""

    kind: str
    wall: str
    why: str
    fresh: bool = False
    """Whether every call gets a new process, regardless of its `isolation` option."""
    isolations: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    """Each value of the option `isolation` that can be enforced here → whether it requires a
    sandbox in which nothing has run before."""
    is_of_session: bool = False
    """Whether the tool runs in a session's sandbox. The call must then name a session."""
    is_outside: bool = False
    """Whether the caller itself runs the tool, so that no wall or limit of the engine applies."""

    def needs_fresh_place(self, isolation: str | None) -> bool:
        """Whether a call with this `isolation` option requires a sandbox in which nothing has run
        before.
        """
        return self.fresh or (isolation is not None and self.isolations[isolation])


A_PROCESS_A_CALL = MappingProxyType({"call": True})
"""`Placement.isolations` of walls that can give each call a separate process."""

A_SESSION = MappingProxyType({"session": False})
"""`Placement.isolations` of tools that run in a session's sandbox."""


def in_session(why: str) -> Placement:
    """Return the placement of tools that run in the container of the call's session."""
    return Placement("container", "container", why, isolations=A_SESSION, is_of_session=True)


class ProgramCalls(Protocol):
    """With this object, parts call tools, request approvals and spend budgets on behalf of one
    running program.
    """

    def start(
        self,
        tool: str,
        arguments: JsonObject,
        answer: Callable[[Envelope | EngineError], None],
        clock: RunClock,
    ) -> None:
        """Start a call of the tool `tool` on behalf of the program's caller. Must not block.

        `answer` is called with the call's envelope, or with an error. `clock` is the program's
        clock, which is paused while the call waits for a human.
        """

    async def ask(
        self, tool: str, arguments: JsonObject, action: HeldAction, clock: RunClock
    ) -> EngineError | None:
        """Request approval of `action`, which a part performs for the program.

        The approval is requested by a call of `tool` with `arguments`. Wait for the decision.
        Return None if the action was performed, otherwise the error that says why it was not.
        `clock` is the program's clock, which is paused until the action begins.
        """

    def spend(self, *, requests: int = 0, passed_bytes: int = 0) -> bool:
        """Charge requests of the program, and bytes that it sends or receives, to the budgets of
        the call. Return False if a budget has too little left.
        """

    def cancel(self, task: asyncio.Task[None]) -> bool:
        """Withdraw the approval request that `task` made with `ask`. Return False if there is no
        such request.
        """

    async def close(self) -> None:
        """Cancel the calls that are still running, and wait until they have ended."""


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
    request: CallRequest
    network: tuple[str, ...] = ()
    """Hosts that the call requests for the program. The operator's settings may allow fewer."""
    expected: str | None = None
    """The workspace state (`Effect.base`) of the preview that a human approved. The run fails if
    the state has changed since."""
    calls: ProgramCalls | None = None
    """Used by parts to make calls for the program. None if the program needs no feature of parts
    (`needs_of`)."""
    around: tuple[Around, ...] = ()
    """The hooks of parts that surround a program's run, in the parts' order."""
    parts: tuple[object, ...] = ()
    """All parts of the engine, for `part`."""
    must_hold_back: bool = False
    """Whether the program may run only if a part holds back its effect, because the call lacks the
    required consent."""

    def part(self, kind: type[T]) -> T:
        """Return the engine's instance of the part class `kind`, for executors of parts. Raises
        PartError if there is no such part.
        """
        return part_among(self.parts, kind)

    @property
    def traceparent(self) -> str:
        """The `traceparent` header of the call's own span, for requests to other services."""
        request = self.request
        return str(context_of(request.trace_id, request.call_id, request.traceparent))


def outcome_in_session(run: ToolRun, data: JsonObject) -> Outcome:
    """Return the outcome of a tool that has used its session, but has run no program in it. `data`
    is the tool's result.
    """
    session = {"id": run.domain.session_id, "state": None, "variables_bytes": None}
    return Outcome(
        EndedBy.OK, "session", data={**data, "session": session}, max_data_bytes=MAX_DATA_BYTES
    )


class Executor(ABC):
    """Decides where the tools of one kind run, previews their effects, and runs them."""

    language: str | None = None
    """The language that the sandbox must support, or None if any sandbox is suitable."""
    has_preview = False
    """Whether approvers can see the effect of a call before it runs."""
    place: Placement
    """The placement of all tools of this kind, unless a subclass overrides `placement`."""
    effect: Effect | None = None
    """The effect of the call, if this executor is made for a single call whose effect is already
    known."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        """Return where a tool runs. `in_session` means that the call names a session."""
        return self.place

    def upstream(self, tool: ToolDefinition) -> str | None:
        """Return the name of the service that a tool calls, or None if it calls none. All calls to
        the same service share a circuit breaker.
        """
        return None

    async def preview(
        self, tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
    ) -> Effect | None:
        """Return the effect that a call would have in the sandbox of `lease`, without changing
        anything.

        Return None if this kind of tool has no preview.

        Raises:
            InvalidParams: the effect is too large to show, or files cannot be read.
            EngineError: the preview failed for another reason.
        """
        return None

    def sends(
        self,
        tool: RegisteredTool,
        arguments: JsonObject,
        cursors: Cursors,
        principal_id: str,
    ) -> JsonObject | None:
        """Return the request that a call would send to another service, as approvers see it.
        Nothing is sent.

        Return None if the engine sends no request for this kind of tool. The result contains the
        names of secrets, never their values. `principal_id` is the id of the caller. If `arguments`
        contain a cursor, which requests a further page of results, `cursors` decodes it.

        Raises:
            EngineError: the call would fail with this error.
        """
        return None

    @abstractmethod
    def run(self, run: ToolRun) -> Awaitable[Outcome]:
        """Run the tool once, and return the outcome.

        If the tool fails, an implementation returns an `Outcome` that contains the error. If it has
        nothing to report but the error, it raises the error instead.
        """


class HeldAction(Executor):
    """An action that this engine holds in memory until a human approves it. The action is performed
    at most once.

    A call with the action in `CallRequest.held` requests the approval. Once this call is approved,
    it performs the action, and does not run its tool's executor. If the code that waits for the
    approval stops waiting, it withdraws the action.
    """

    needs: ClassVar[Need]
    always_asks: ClassVar[bool] = False
    gone: ClassVar[str]
    """The error message if the program or trial to which the action belongs has ended."""

    def __init__(self) -> None:
        self.has_begun = False
        self.is_withdrawn = False
        self.result: Outcome | EngineError | None = None
        """The action's outcome or error. None while `over` is not set. If `over` is set, None means
        that it is unknown how the action ended."""
        self.over = asyncio.Event()
        """Set when the action has ended."""
        self.on_begun: Callable[[], None] = lambda: None
        """Called when the action begins."""

    def withdraw(self) -> None:
        """Prevent the action from being performed. This has no effect if the action has already
        begun.
        """
        self.is_withdrawn = True

    async def run(self, run: ToolRun) -> Outcome:
        """Perform the action and return its outcome. Afterwards, store the outcome or error in
        `result`, and set the event `over`.

        Raises:
            ApprovalExpired: the action was withdrawn, or has already begun.
            EngineError: the action failed.
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
        """Wait until the action has ended. Return its error, or None if it succeeded.

        The caller must only call this method after the action has begun.

        Raises:
            CancelledError: the action was interrupted, so it is unknown what was done.
        """
        await self.over.wait()
        if self.result is None:
            raise asyncio.CancelledError
        return self.result.error if isinstance(self.result, Outcome) else self.result

    @abstractmethod
    async def carry_out(self, run: ToolRun) -> Outcome:
        """Perform the action. Called at most once."""


# -- the handle of a running call -----------------------------------------------------------

HEARD_CHARACTERS = 16 * 1024
"""Number of characters that are kept of each output stream while a call runs: the last ones."""


class CallHandle:
    """The handle of one running call. It passes the call's events to a listener, records the state
    of the call, and can cancel the call. The pipeline calls `attach`, `begin` and `close`.
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
        """Whether the listener has received output. Output cannot be taken back, so the call is
        then no longer retried."""
        self.heard: dict[str, str] = {}
        """Stream name → the last `HEARD_CHARACTERS` characters of output so far."""
        self.progress: tuple[float, str] | None = None
        """The last progress report: percentage and redacted message."""
        self.is_waiting = False
        """Whether the call is waiting for a human."""
        self.drained = drained
        """Waits until the listener can receive more output. None if the listener never has to be
        waited for."""
        self.partial: Outcome | None = None
        """The partial outcome of a cancelled run, if the executor provides one."""
        self.is_cancelled = False
        """Whether the caller has cancelled the call."""
        self.on_delivered: Callable[[], None] | None = None
        """Called once the caller has received the answer. Set by code that must record the
        delivery."""
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
        """Notify the listener that the call has passed every gate, although it may still wait for a
        sandbox. Only the first call of this method has an effect.
        """
        on_begun, self._on_begun = self._on_begun, None
        if on_begun is not None:
            on_begun()

    def report(self, percent: float, message: str) -> None:
        """Redact the tool's progress report, store it and pass it to the listener. Reports beyond
        the maximum number are dropped. May be called in any thread.
        """
        self._reports += 1
        if self._reports <= MAX_REPORTS:
            self.progress = report = percent, self._redact(message)
            if self._on_progress is not None:
                self._on_progress(*report)

    @contextlib.contextmanager
    def waiting_for_human(self) -> Iterator[None]:
        """Tell the listener that the call waits for a human when the block begins, and that it no
        longer waits when the block ends.
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
        """Record new output of a stream, and pass it to the listener."""
        self.heard[stream] = (self.heard.get(stream, "") + text)[-HEARD_CHARACTERS:]
        if self._on_output is not None:
            self._pass_on(stream, text)

    def _pass_on(self, stream: str, text: str) -> None:
        self.has_output = True
        if self._on_output is not None:
            self._on_output(stream, text)

    def retrying(self, retry_count: int, max_retries: int, error: EngineError) -> None:
        """Notify the listener that an attempt failed with `error` and will be repeated."""
        if self._on_retrying is not None:
            self._on_retrying(retry_count, max_retries, error)

    def for_fallback(self) -> CallHandle:
        """Return a handle for the call of a fallback tool, which runs in this call's task.

        The fallback's events go to this call's listeners. If this call is cancelled, the fallback
        ends too.
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
        """Return the object that receives the events of a program's run. Progress reports go to
        this call's listener. Files, output and the ending go to the given receivers, or are dropped
        if the receiver is None.
        """
        return RunSinks(
            progress=self.report,
            files=files,
            output=output,
            ending=ending,
            is_live=self.output is not None or self._on_progress is not None,
        )

    def cancel(self) -> bool:
        """Cancel the call. Return False if the call is not running."""
        if self._is_over or self._task is None:
            return False
        if not self.is_cancelled:
            self.is_cancelled = True
            self._task.cancel()
        return True

    def close(self) -> bool:
        """Record that the call has ended. Return whether the task that ran the call can continue
        although the call was cancelled.

        Return True if `cancel` has cancelled the call, and nothing else has cancelled the task.
        Return False if the call was not cancelled. Also return False if other code has cancelled
        the task, which must then end.
        """
        if not self._is_over:
            self._is_over = True
            self.over.set()
            if self.is_cancelled and self._task is not None:
                self._task.uncancel()
        if not self.is_cancelled:
            return False
        return self._task is None or self._task.cancelling() <= self._cancelling_before
