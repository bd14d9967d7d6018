"""Around a run: what parts give to a program before it runs, and add to its outcome afterwards.

Host side, between `ProgramExecutor` and the parts. Each part that has something to do with a run
is entered before it, in the parts' order, and left after it, in the reverse order. Invariants: a
part can only make a run stricter. It adds to the gifts of the kernel and of earlier parts, and
replaces nothing. It can turn a success into a failure, and never the reverse. A run that needs what
no part gives does not begin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio

from fumehood.core.envelope import NetworkReport
from fumehood.core.errors import EndedBy, EngineError, InternalError, SandboxUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.observe.trace_context import VARIABLE
from fumehood.sandbox.wall import Lease, Network, OnCall, RunEnding, RunSinks

if TYPE_CHECKING:
    from fumehood.executors.base import ToolRun

T = TypeVar("T")


class HeldBack(Protocol):
    """What a part holds back of a trial, until a human has said yes to it."""

    @property
    def shown(self) -> JsonObject:
        """What it is, as approvers see it, by field. Empty if nothing is held back."""

    async def apply(self, run: ToolRun) -> EngineError | None:
        """Do it. Return why a part of it was not done, or None."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a part learns of a run that has ended."""

    ending: RunEnding
    digests: Mapping[tuple[str, str], str]
    """Kind and path of each file → SHA-256, if a part asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one part adds to the outcome of a run."""

    fields: JsonObject = field(default_factory=dict)
    """Fields of `data`, or of the error's `details`. Those of the kernel and of earlier parts
    stay."""
    fault: Callable[[JsonObject], EngineError] | None = None
    """Makes, from these fields, the error with which the run ends."""
    warnings: tuple[str, ...] = ()
    network: NetworkReport | None = None
    kept: object | None = None
    """A value for the part itself when the call is answered (`Outcome.kept`)."""
    held_back: HeldBack | None = None


NO_SHARE = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What one part gives to a run."""

    needs: frozenset[str] = frozenset()
    """The names in `needs_of` that it meets."""
    arguments: JsonObject = field(default_factory=dict)
    """Arguments of the guest. Those of the program stay."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the program. Those of the kernel, of earlier parts and of the caller stay."""
    call: OnCall | None = None
    network: Network | None = None
    scope: anyio.CancelScope | None = None
    """Within it the program runs. The part ends the program by cancelling it."""
    with_digests: bool = False
    """Whether files that come back are hashed."""
    offer: object | None = None
    """What it offers to the parts after it, which know its type."""
    share: Callable[[Ran], Share] = lambda ran: NO_SHARE
    """Called after the run, also after one that was cancelled and has a partial outcome."""


Around = Callable[["ToolRun", Sequence[Given]], AbstractAsyncContextManager[Given | None]]
"""What one part does around a run: it gets what earlier parts give, and gives something, or None.

It may raise an EngineError before the run, which then does not begin.
"""


def needs_of(run: ToolRun) -> frozenset[str]:
    """Return what the call asks for that only parts can give."""
    options = run.request.options
    is_python = run.tool.definition.executor == "code:python"
    asked = {
        "network": run.network,
        "tools": is_python and run.arguments.get("tools"),
        "receipt": options.receipt or options.replay is not None,
    }
    return frozenset(name for name, value in asked.items() if value)


class Surroundings:
    """What all parts give to one run."""

    def __init__(self, given: Sequence[Given] = ()) -> None:
        self._given = given

    @property
    def with_digests(self) -> bool:
        """Whether a part wants files to be hashed."""
        return any(one.with_digests for one in self._given)

    def arguments(self, own: JsonObject, traceparent: str) -> JsonObject:
        """Return the guest's arguments with what the parts give. Raises InternalError."""
        # Where a name is given twice, the first wins here, and the caller's own in the guest.
        environment = {VARIABLE: traceparent}
        arguments = dict(own)
        for one in self._given:
            if "env" in one.arguments:
                raise InternalError("A part gives variables as an argument.")
            arguments = {**one.arguments, **arguments}
            for name, value in one.environment.items():
                environment.setdefault(name, value)
        named = [{"name": name, "value": value} for name, value in environment.items()]
        return {**arguments, "env": [*named, *own.get("env", [])]}

    def sinks(self, own: RunSinks) -> RunSinks:
        """Return the sinks of a run, with those of parts.

        Raises:
            InternalError: two of them are for the same events.
        """
        return replace(
            own,
            call=_only(own.call, (one.call for one in self._given)),
            network=_only(own.network, (one.network for one in self._given)),
        )

    async def run(
        self, lease: Lease, program: str, arguments: JsonObject, run: ToolRun, sinks: RunSinks
    ) -> RunEnding:
        """Run a program within the parts' scopes. If one was cancelled, the policy ended it."""
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

    def shares(self, ran: Ran) -> list[Share]:
        """Return what all parts add to the outcome, in their order."""
        return [one.share(ran) for one in self._given]


def _only(own: T | None, given: Iterable[T | None]) -> T | None:
    found = [one for one in (own, *given) if one is not None]
    if len(found) > 1:
        raise InternalError("Two parts receive the same events of a program.")
    return found[0] if found else None


@asynccontextmanager
async def surrounded(run: ToolRun) -> AsyncIterator[Surroundings]:
    """Enter what all parts do around a run.

    Raises:
        SandboxUnavailable: the call needs what no part gives.
        EngineError: a part does not let the program run.
    """
    failure: BaseException | None = None
    async with AsyncExitStack() as stack:
        try:
            yield await _entered(run, stack)
        except BaseException as error:
            failure = error
            raise
    if failure is not None:  # a part has suppressed it, which none may
        raise failure


async def _entered(run: ToolRun, stack: AsyncExitStack) -> Surroundings:
    needs = needs_of(run)
    given: list[Given] = []
    for around in run.around:
        one = await stack.enter_async_context(around(run, tuple(given)))
        if one is not None:
            given.append(one)
            needs -= one.needs
    if needs:
        raise SandboxUnavailable(
            f"This engine has no part that gives programs what the call asks for "
            f"({', '.join(sorted(needs))}), so nothing ran.",
            retryable=False,
        )
    if run.calls is not None:  # before the parts are left, which answer its requests
        stack.push_async_callback(run.calls.close)
    return Surroundings(given)
