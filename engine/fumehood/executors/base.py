"""The base class `Executor`: how one kind of tool is placed, previewed and run.

Host side, above the walls, below the pipeline. To add a kind, write a file in this package with an
`Executor`, and add a row to `EXECUTORS` in `kinds.py`. Invariants: a placement is never a weaker
wall than the definition requires, and a run uses only what its `ToolRun` holds.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from fumehood.core.call import CallRequest
from fumehood.core.errors import EngineError
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.effects import Effect
from fumehood.executors.handle import CallHandle
from fumehood.executors.outcome import HeldTrial, Outcome
from fumehood.executors.upstreams import Upstreams
from fumehood.observe.tracing import context_of
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import RegisteredTool
from fumehood.sandbox.wall import CallPort, Lease
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
        ...

    @property
    def report(self) -> JsonObject:
        """The calls of the program as `{"made": …, "failed": …}`. Both numbers include refused
        calls."""
        ...

    def on_call(self, number: int, tool: str, arguments: JsonObject, port: CallPort) -> None:
        """Start a call, or refuse it. Must not block. The answer is sent through `port`."""
        ...

    async def ask(
        self,
        arguments: JsonObject,
        send: Callable[[], Awaitable[EngineError | None]],
        port: CallPort,
    ) -> EngineError | None:
        """Let a human decide on a request of the program, which `send` sends after a yes. Return
        why it was not sent, or None.
        """
        ...

    def spend(self, *, requests: int = 0, network_bytes: int = 0) -> bool:
        """Take what the program sends or gets from the budgets. False if too little is left."""
        ...

    def cancel(self, task: asyncio.Task[None]) -> bool:
        """Cancel what a task asks a human about. False if it asks nothing."""
        ...

    async def close(self) -> None:
        """Cancel the calls that still run, and wait until they have ended."""
        ...


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
    held: HeldTrial | None = None
    """The effect of a trial, to be put in instead of a run."""
    calls: ProgramCalls | None = None
    """Set for a program that may call other tools, or has network."""

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

    @abstractmethod
    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        """Return where a tool runs. `in_session` is whether the call names a session."""

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

    @abstractmethod
    def run(self, run: ToolRun) -> Awaitable[Outcome]:
        """Run the tool once.

        If the tool fails, return an `Outcome` with an error. Raise only if nothing is known about
        the run.
        """
