"""Hooks of parts around a run: parts give things to a program, and add to its outcome.

Host side, between `ProgramExecutor` and the parts. Each part with a hook is entered before the run,
in the parts' order, and left after the run, in reverse order. Invariants: a part can only make a
run stricter. It adds to the contributions of the kernel and of earlier parts, and replaces none of
them. It can turn a success into a failure, but never the reverse. A run that needs a feature that
no part provides does not begin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio

from fumehood.core.errors import EndedBy, EngineError, InternalError, SandboxUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.observe.trace_context import VARIABLE
from fumehood.redaction.redactor import Redactor
from fumehood.sandbox.streams import Stream, StreamEnd
from fumehood.sandbox.wall import Lease, RunEnding, RunSinks

if TYPE_CHECKING:
    from fumehood.executors.base import ToolRun
    from fumehood.executors.outcome import Outcome

T = TypeVar("T")


class HeldBack(Protocol):
    """Actions of a program that a part holds back until a human has approved them."""

    @property
    def shown(self) -> JsonObject:
        """The actions as shown to approvers: field → value. Empty if there are none."""

    async def apply(self, run: ToolRun) -> EngineError | None:
        """Do the actions. Return why some of them were not done, or None if all were done."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run that has ended, as shown to parts."""

    ending: RunEnding
    digests: Mapping[tuple[str, str], str]
    """Kind and path of each returned file → SHA-256, if a part requested digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The fields, and possibly the failure, that one part adds to the outcome of a run."""

    fields: JsonObject = field(default_factory=dict)
    """Fields for `data`, or for the error's `details`. Fields of the kernel and of earlier parts
    take precedence."""
    fault: Callable[[JsonObject], EngineError] | None = None
    """Set if the part makes the run fail. Returns the error, given all fields of the outcome."""
    warnings: tuple[str, ...] = ()
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the answer's `SandboxReport` that the part fills in."""
    kept: object | None = None
    """A value that the part gets back when the call is answered (`Outcome.kept`)."""
    held_back: HeldBack | None = None


NO_SHARE = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One part's contributions to a run."""

    needs: frozenset[str] = frozenset()
    """The names returned by `needs_of` whose features this part provides."""
    arguments: JsonObject = field(default_factory=dict)
    """Arguments for the guest. The program's own arguments and those of earlier parts take
    precedence."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the program. Variables of the kernel, of earlier parts and of the
    caller take precedence.
    """
    streams: tuple[Stream[StreamEnd], ...] = ()
    """Streams between the program and the part. No other part may give a stream of this kind."""
    scope: anyio.CancelScope | None = None
    """The program runs within this scope. The part ends the program by cancelling the scope."""
    lease: Lease | None = None
    """A lease that runs the program instead of the call's lease."""
    holds_back: bool = False
    """Whether this part holds back the effect of the run until a human has decided on it. Later
    parts then do not act for the program, but return the actions as `Share.held_back`."""
    conclude: Callable[[Outcome, Sequence[HeldBack]], Awaitable[Outcome]] | None = None
    """Called with the outcome of a run that has ended, and with the actions that parts hold back.
    Returns the outcome of the call.
    """
    with_digests: bool = False
    """Whether returned files must be hashed."""
    offer: object | None = None
    """An object for later parts, which know its type."""
    share: Callable[[Ran], Share] = lambda ran: NO_SHARE
    """Called after the run, even after a cancelled run that has a partial outcome. Returns the
    part's additions to the outcome.
    """
    used: Callable[[], Share] = lambda: NO_SHARE
    """For a `LastingProgram`: called after each call that the program has served, even if the
    program has ended. Returns the part's additions to the outcome of the call.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingProgram:
    """A program that the operator configured and that serves many calls, as shown to parts."""

    id: str
    """Its name in the audit log, as the call and as the caller."""
    tool: str
    """The tool whose secrets the program may use."""
    hosts: tuple[str, ...]
    """Hosts that the program may reach, as far as the operator allows them."""
    redactor: Redactor


Around = Callable[["ToolRun", Sequence[Given]], AbstractAsyncContextManager[Given | None]]
"""One part's hook around a run. The hook receives the run and the contributions of earlier parts,
and returns a context manager that is entered before the run. The context manager yields this part's
contributions, or None if the part makes none.

If entering raises an EngineError, the run does not begin.
"""


def needs_of(tool: ToolDefinition, arguments: JsonObject, hosts: Sequence[str]) -> frozenset[str]:
    """Return the names of features that a call requests and that only parts can provide."""
    is_python = tool.executor == "code:python"
    asked = {"network": hosts, "tools": is_python and arguments.get("tools")}
    return frozenset(name for name, value in asked.items() if value)


def not_given(needs: frozenset[str]) -> SandboxUnavailable:
    """Return the error for a call that needs features that no part of this engine provides."""
    return SandboxUnavailable(
        f"This engine has no part that gives programs what the call asks for "
        f"({', '.join(sorted(needs))}), so nothing ran.",
        retryable=False,
    )


class Surroundings:
    """Everything that parts give to one run."""

    def __init__(self, given: Sequence[Given] = ()) -> None:
        self._given = given

    @property
    def with_digests(self) -> bool:
        """Whether a part requires that files are hashed."""
        return any(one.with_digests for one in self._given)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that parts give."""
        given: dict[str, str] = {}
        for one in self._given:
            for name, value in one.environment.items():
                given.setdefault(name, value)
        return given

    @property
    def streams(self) -> tuple[Stream[StreamEnd], ...]:
        """The streams that parts give."""
        return tuple(stream for one in self._given for stream in one.streams)

    def arguments(self, own: JsonObject, traceparent: str) -> JsonObject:
        """Return the guest's arguments: `own`, and those that parts give. Raises InternalError if a
        part gives environment variables as an argument.
        """
        # If a name is given twice, the first value is used here, and the caller's in the guest.
        environment = {VARIABLE: traceparent}
        for name, value in self.environment.items():
            environment.setdefault(name, value)
        arguments = dict(own)
        for one in self._given:
            if "env" in one.arguments:
                raise InternalError("A part gives variables as an argument.")
            arguments = {**one.arguments, **arguments}
        named = [{"name": name, "value": value} for name, value in environment.items()]
        return {**arguments, "env": [*named, *own.get("env", [])]}

    def sinks(self, own: RunSinks) -> RunSinks:
        """Return the sinks of a run: `own`, and those that parts give.

        Raises:
            InternalError: two streams are of the same kind.
        """
        streams = [*own.streams, *self.streams]
        if len({stream.kind.name for stream in streams}) < len(streams):
            raise InternalError("Two parts give a program streams of the same kind.")
        return replace(own, streams=tuple(streams))

    async def run(
        self, lease: Lease, program: str, arguments: JsonObject, run: ToolRun, sinks: RunSinks
    ) -> RunEnding:
        """Run a program within the parts' scopes, on `lease` or on the lease that a part gives. If
        a part has cancelled its scope, the returned ending has `EndedBy.POLICY`.

        Raises:
            InternalError: two parts give the same, or no part holds back an effect that must be
                held back. Nothing ran.
        """
        if run.must_hold_back and not any(map(_holds_back, self._given)):
            raise InternalError("No part holds back the effect of this call. Nothing ran.")
        lease = _only(one.lease for one in self._given) or lease
        endings: list[RunEnding] = []
        ending: RunEnding | None = None

        def on_ending(cut: RunEnding) -> None:
            endings.append(cut)
            if sinks.ending is not None:
                sinks.ending(cut)

        watched = replace(self.sinks(sinks), ending=on_ending)
        async with AsyncExitStack() as stack:
            for one in self._given:
                if one.scope is not None:
                    stack.enter_context(one.scope)
            ending = await lease.run(program, arguments, run.limits, watched)
        if ending is None:
            return replace(endings[0], ended_by=EndedBy.POLICY)
        return ending

    async def conclude(self, outcome: Outcome, held_back: Sequence[HeldBack]) -> Outcome:
        """Return the outcome of the call: `outcome`, or the one that a part makes of it.

        Raises:
            InternalError: two parts make one.
        """
        conclude = _only(one.conclude for one in self._given)
        return outcome if conclude is None else await conclude(outcome, held_back)

    def shares(self, ran: Ran) -> list[Share]:
        """Return the additions of all parts to the outcome, in the parts' order."""
        return [one.share(ran) for one in self._given]

    def used(self) -> list[Share]:
        """Return the additions of all parts to a call that a `LastingProgram` has served."""
        return [one.used() for one in self._given]


def _holds_back(one: Given) -> bool:
    return one.holds_back and one.lease is not None and one.conclude is not None


def _only(given: Iterable[T | None]) -> T | None:
    found = [one for one in given if one is not None]
    if len(found) > 1:
        raise InternalError("Two parts give the same to a program.")
    return found[0] if found else None


@asynccontextmanager
async def surrounded(run: ToolRun) -> AsyncIterator[Surroundings]:
    """Enter the hooks of all parts around a run, and yield everything that the parts give.

    Raises:
        SandboxUnavailable: the call needs a feature that no part provides.
        EngineError: a part refuses to let the program run.
    """
    failure: BaseException | None = None
    async with AsyncExitStack() as stack:
        try:
            yield await _entered(run, stack)
        except BaseException as error:
            failure = error
            raise
    if failure is not None:  # a part has suppressed the exception, which it must not do
        raise failure


async def _entered(run: ToolRun, stack: AsyncExitStack) -> Surroundings:
    needs = needs_of(run.tool.definition, run.arguments, run.network)
    given: list[Given] = []
    for around in run.around:
        one = await stack.enter_async_context(around(run, tuple(given)))
        if one is not None:
            given.append(one)
            needs -= one.needs
    if needs:
        raise not_given(needs)
    if run.calls is not None:  # closed before the parts are left, because they answer its requests
        stack.push_async_callback(run.calls.close)
    return Surroundings(given)
