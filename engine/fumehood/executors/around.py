"""Parts' hooks around a program's run, with which parts contribute to the run and its outcome.

Host side, between `ProgramExecutor` and the parts. The hooks are entered before the run in the
parts' order, and left after it in reverse order. Invariants: a part can only make a run stricter.
It cannot replace contributions of the kernel or of earlier parts. It can turn a success into a
failure, but never the reverse. If a run needs a feature that no part provides, it does not begin.
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
    """Actions of a program that a part holds back until a human approves them."""

    @property
    def shown(self) -> JsonObject:
        """Return the actions as approvers see them: field → value. Empty if there are none."""

    async def apply(self, run: ToolRun) -> EngineError | None:
        """Perform the actions. Return None if all were performed, otherwise the reason why some
        were not.
        """


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished run of a program, which is passed to the parts' hooks."""

    ending: RunEnding
    digests: Mapping[tuple[str, str], str]
    """(kind, path) of each returned file → SHA-256. Empty unless a part requested digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one part adds to the outcome of a run: fields, warnings, and possibly an error that
    makes the run fail.
    """

    fields: JsonObject = field(default_factory=dict)
    """Fields for `data`, or for the error's `details`. Fields of the kernel and of earlier parts
    take precedence."""
    fault: Callable[[JsonObject], EngineError] | None = None
    """None unless the part makes the run fail. Returns the error, given all fields of the
    outcome."""
    warnings: tuple[str, ...] = ()
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the part adds to the answer's `SandboxReport`."""
    kept: object | None = None
    """A value that is passed back to the part when the call is answered (`Outcome.kept`)."""
    held_back: HeldBack | None = None


NO_SHARE = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What one part adds to the run of a program, for example environment variables and streams."""

    needs: frozenset[str] = frozenset()
    """The features that this part provides for the run, by their names in `needs_of`."""
    arguments: JsonObject = field(default_factory=dict)
    """Arguments for the guest. If a name is given twice, the program's own argument and those of
    earlier parts take precedence."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the program. If a name is given twice, variables of the kernel, of
    earlier parts and of the caller take precedence."""
    streams: tuple[Stream[StreamEnd], ...] = ()
    """Streams between the program and this part. Only one part may provide streams of the same
    kind."""
    scope: anyio.CancelScope | None = None
    """A scope within which the program runs. The part cancels the scope to end the program."""
    lease: Lease | None = None
    """The lease on which the program runs instead of the call's own lease, or None."""
    holds_back: bool = False
    """Whether this part holds back the effect of the run until a human has decided on it. If so,
    later parts do not perform actions for the program, but return them as `Share.held_back`."""
    conclude: Callable[[Outcome, Sequence[HeldBack]], Awaitable[Outcome]] | None = None
    """Called after the run with its outcome and with the actions that parts hold back. Returns the
    outcome of the call."""
    with_digests: bool = False
    """Whether the part requests a hash of each returned file."""
    offer: object | None = None
    """An object for the use of later parts, which must know its type."""
    share: Callable[[Ran], Share] = lambda ran: NO_SHARE
    """Called after the run, also after a cancelled run that has a partial outcome. Returns what the
    part adds to the outcome."""
    used: Callable[[], Share] = lambda: NO_SHARE
    """For a `LastingProgram`: called after each call that the program has served, even if the
    program has ended. Returns what the part adds to that call's outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingProgram:
    """A program that the operator configured and that serves many calls. Parts receive this
    description of the program in their hook `around_lasting`.
    """

    id: str
    """The program's name in the audit log, where it takes the place of both the call and the
    caller."""
    tool: str
    """The tool whose secrets the program may use."""
    hosts: tuple[str, ...]
    """Hosts that the program requests. The operator's settings may allow fewer."""
    redactor: Redactor


Around = Callable[["ToolRun", Sequence[Given]], AbstractAsyncContextManager[Given | None]]
"""One part's hook around a run. The hook receives the run and the contributions of earlier parts,
and returns a context manager that is entered before the run. The context manager yields this part's
contributions, or None if the part makes none.

If entering raises an EngineError, the run does not begin.
"""


def needs_of(tool: ToolDefinition, arguments: JsonObject, hosts: Sequence[str]) -> frozenset[str]:
    """Return the names of the features that a call requests and that only parts can provide.

    The result contains "network" if the call requests `hosts`. It contains "tools" if the call runs
    Python code and its `arguments` request tools for this code.
    """
    is_python = tool.executor == "code:python"
    asked = {"network": hosts, "tools": is_python and arguments.get("tools")}
    return frozenset(name for name, value in asked.items() if value)


def not_given(needs: frozenset[str]) -> SandboxUnavailable:
    """Return the error for a call that needs features that no part of this engine provides. `needs`
    are the names of these features.
    """
    return SandboxUnavailable(
        f"This engine has no part that provides what the call needs ({', '.join(sorted(needs))}). "
        "Nothing ran.",
        retryable=False,
    )


class Surroundings:
    """The contributions of all parts to one run."""

    def __init__(self, given: Sequence[Given] = ()) -> None:
        self._given = given

    @property
    def with_digests(self) -> bool:
        """Whether at least one part requests hashes of the returned files."""
        return any(given.with_digests for given in self._given)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the parts contribute."""
        given: dict[str, str] = {}
        for added in self._given:
            for name, value in added.environment.items():
                given.setdefault(name, value)
        return given

    @property
    def streams(self) -> tuple[Stream[StreamEnd], ...]:
        """The streams that the parts contribute."""
        return tuple(stream for given in self._given for stream in given.streams)

    def arguments(self, own: JsonObject, traceparent: str) -> JsonObject:
        """Return the arguments that the guest gets.

        These are the arguments `own`, the arguments that parts contribute, and `env`, the
        environment variables of the run. `traceparent` becomes one of these variables.

        Raises:
            InternalError: a part's arguments contain `env`.
        """
        # If a name is given twice, the first value is used here, and the caller's in the guest.
        environment = {VARIABLE: traceparent}
        for name, value in self.environment.items():
            environment.setdefault(name, value)
        arguments = dict(own)
        for given in self._given:
            if "env" in given.arguments:
                raise InternalError("A part gives environment variables as an argument.")
            arguments = {**given.arguments, **arguments}
        named = [{"name": name, "value": value} for name, value in environment.items()]
        return {**arguments, "env": [*named, *own.get("env", [])]}

    def sinks(self, own: RunSinks) -> RunSinks:
        """Return the object that receives the events of a run: a copy of `own`, to which the
        streams of all parts are added.

        Raises:
            InternalError: two streams are of the same kind.
        """
        streams = [*own.streams, *self.streams]
        if len({stream.kind.name for stream in streams}) < len(streams):
            raise InternalError("Two parts give the program streams of the same kind.")
        return replace(own, streams=tuple(streams))

    async def run(
        self, lease: Lease, program: str, arguments: JsonObject, run: ToolRun, sinks: RunSinks
    ) -> RunEnding:
        """Run a program, and return how it ended.

        If a part contributes a lease, the program runs on this lease, otherwise on `lease`. If a
        part contributes a cancel scope, it can end the program by cancelling the scope. The
        returned ending then has `EndedBy.POLICY`.

        Raises:
            InternalError: two parts contribute a lease, or streams of the same kind. Also raised if
                the effect of the call must be held back, and no part does this. In all cases,
                nothing was run.
        """
        if run.must_hold_back and not any(map(_holds_back, self._given)):
            raise InternalError("No part holds back the effect of this call. Nothing ran.")
        lease = _only(given.lease for given in self._given) or lease
        endings: list[RunEnding] = []
        ending: RunEnding | None = None

        def on_ending(cut: RunEnding) -> None:
            endings.append(cut)
            if sinks.ending is not None:
                sinks.ending(cut)

        watched = replace(self.sinks(sinks), ending=on_ending)
        async with AsyncExitStack() as stack:
            for given in self._given:
                if given.scope is not None:
                    stack.enter_context(given.scope)
            ending = await lease.run(program, arguments, run.limits, watched)
        if ending is None:
            return replace(endings[0], ended_by=EndedBy.POLICY)
        return ending

    async def conclude(self, outcome: Outcome, held_back: Sequence[HeldBack]) -> Outcome:
        """Return the outcome of the call.

        `outcome` is the outcome of the run. `held_back` are the actions that parts hold back until
        a human approves them. If a part has a `conclude` function, this function makes the call's
        outcome from both. Otherwise, return `outcome`.

        Raises:
            InternalError: two parts have a `conclude` function.
        """
        conclude = _only(given.conclude for given in self._given)
        return outcome if conclude is None else await conclude(outcome, held_back)

    def shares(self, ran: Ran) -> list[Share]:
        """Return what each part adds to the outcome of the run, in the parts' order."""
        return [given.share(ran) for given in self._given]

    def used(self) -> list[Share]:
        """Return what each part adds to the outcome of a call that a `LastingProgram` has served,
        in the parts' order.
        """
        return [given.used() for given in self._given]


def _holds_back(given: Given) -> bool:
    return given.holds_back and given.lease is not None and given.conclude is not None


def _only(values: Iterable[T | None]) -> T | None:
    """Return the only value that is not None, or None. Raises InternalError if there are more."""
    found = [value for value in values if value is not None]
    if len(found) > 1:
        raise InternalError("Two parts replace the program's lease, or conclude its call.")
    return found[0] if found else None


@asynccontextmanager
async def surrounded(run: ToolRun) -> AsyncIterator[Surroundings]:
    """Enter the hooks of all parts around a run, and yield the parts' contributions.

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
        entered = await stack.enter_async_context(around(run, tuple(given)))
        if entered is not None:
            given.append(entered)
            needs -= entered.needs
    if needs:
        raise not_given(needs)
    if run.calls is not None:
        # Closed before the parts' hooks are left, because parts answer the calls.
        stack.push_async_callback(run.calls.close)
    return Surroundings(given)
