"""The type `Executor`: one kind of tool, and everything about it that depends on its kind.

Host side, above the walls, below the pipeline. To add a kind, write a file in this package with an
`Executor`, and add a row to `EXECUTORS` in `kinds.py`. Invariants: a placement is never a weaker
wall than the definition asks for, and a run uses only what its `ToolRun` holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from fumehood.core.call import CallRequest
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.effects import Effect
from fumehood.executors.handle import CallHandle
from fumehood.executors.outcome import Outcome
from fumehood.executors.upstreams import Upstreams
from fumehood.observe.tracing import context_of
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import RegisteredTool
from fumehood.sandbox.wall import CallPort, Lease
from fumehood.storage.blobs import BlobStore


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tool runs, and the sentence that a dry run shows."""

    kind: str
    wall: str
    why: str
    fresh: bool = False
    """Whether every call gets a new process, whatever it asks for."""
    isolations: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    """The `isolation` that a call may ask for, and whether it needs a place in which nothing has
    run before. Any other could not be enforced."""
    is_of_session: bool = False
    """Whether it is the place of the call's session, which the call must then name."""
    is_outside: bool = False
    """Whether the caller runs the tool itself, without any wall or limit of the engine."""

    def needs_fresh_place(self, isolation: str | None) -> bool:
        """Whether the place must be new for a call with this option."""
        return self.fresh or (isolation is not None and self.isolations[isolation])


A_PROCESS_A_CALL = MappingProxyType({"call": True})
A_SESSION = MappingProxyType({"session": False})


class ProgramCalls(Protocol):
    """The calls of other tools that one program makes."""

    @property
    def tools(self) -> list[JsonObject]:
        """The tools that it may call, as the guest describes them to it."""
        ...

    @property
    def report(self) -> JsonObject:
        """What became of its calls."""
        ...

    def on_call(self, number: int, tool: str, arguments: JsonObject, port: CallPort) -> None:
        """Begin a call, or refuse it. Must not wait."""
        ...

    async def close(self) -> None:
        """Cancel the calls that are open, and wait for their end."""
        ...


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One admitted call, as its executor gets it."""

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
    expected: str | None = None
    """The `base` of the `Effect` that a human approved; the run must find it unchanged."""
    calls: ProgramCalls | None = None
    """Set for a program that may call other tools."""

    @property
    def traceparent(self) -> str:
        """The call's own span, for those whom it calls."""
        request = self.request
        return str(context_of(request.trace_id, request.call_id, request.traceparent))


class Executor(ABC):
    """One kind of tool."""

    language: str | None = None
    """The language that the place must support, or None for any place."""
    has_preview = False
    """Whether a human can see a call's effect before the call runs."""

    @abstractmethod
    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        """Where a tool runs, in a call that names a session or none."""

    async def preview(
        self, tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
    ) -> Effect | None:
        """The effect that a call would have, in the leased sandbox. Changes nothing.

        Raises:
            InvalidParams: there is too much to see, or it cannot be read.
            SandboxUnavailable, Timeout, …: as `run` would raise.
        """
        return None

    @abstractmethod
    def run(self, run: ToolRun) -> Awaitable[Outcome]:
        """Run the tool once.

        A program that fails is an `Outcome` with an error. Raises only if nothing can be said
        about the run.
        """
