"""The parts of an engine in the pipeline: their gates and hooks.

Host side. `EnginePart` inherits the hooks of `CallPart`. `compose` passes the hooks that a part
overrides to the pipeline. Invariants: the hook before a call can only refuse the call; the hook
around a run is entered only after every gate has admitted the call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fumehood.core.json_types import JsonObject
from fumehood.core.part import PartError
from fumehood.executors.around import Around, Given
from fumehood.executors.base import ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.observe.subscriber import Subscribers, no_subscribers
from fumehood.pipeline.gate import Excess, Gate
from fumehood.pipeline.validate import ValidatedCall

if TYPE_CHECKING:
    from fumehood.pipeline.authorize import PermittedCall
    from fumehood.pipeline.context import CallContext, PipelineServices, RunCall


class CallPart:
    """The hooks of a part in calls. Every method may be overridden; the defaults do nothing."""

    holds_back_with: Mapping[str, Any] = {}
    """The call options with which this part holds back the effect of a run until a human has
    decided on it. A call that needs approval can then run before the decision. Empty if this part
    holds back no effects."""

    def require_possible(self, permitted: PermittedCall, services: PipelineServices) -> None:
        """Raise EngineError if the call uses an option of this part that is impossible for the
        program which the call would run.

        Called for each call that the policy permits, before approval is requested. An
        implementation must not change anything.
        """

    @asynccontextmanager
    async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given | None]:
        """Yield what this part contributes to a run, such as environment variables, or None.

        The context manager is entered before the program runs, and left after the run. `before`
        contains the contributions of earlier parts. Raises EngineError if the program must not run.
        """
        yield None

    async def decide(
        self, outcome: Outcome, call: CallContext, services: PipelineServices, run_call: RunCall
    ) -> Outcome:
        """Request a human's decision on the effect that this part holds back (`Outcome.held`).

        Apply the effect if it is approved, otherwise drop it completely. Return the outcome of the
        call.
        """
        raise NotImplementedError

    async def answered(
        self, call: CallContext, outcome: Outcome, data: JsonObject
    ) -> Mapping[str, Any]:
        """Return fields to add to the answer's metadata. They never replace fields that are already
        set.

        `data` is the data of the answer before long texts are shortened. `outcome.kept` contains
        the values that parts kept from the run.
        """
        return {}


@dataclass(frozen=True, slots=True)
class CallParts:
    """The parts of one engine, grouped by the hooks that they override. Each group is in the order
    of the parts.
    """

    all: tuple[CallPart, ...] = ()
    around: tuple[Around, ...] = ()
    requiring: tuple[CallPart, ...] = ()
    answering: tuple[CallPart, ...] = ()
    holding: CallPart | None = None
    """The part that holds back the effects of runs, or None if no part does."""
    gates: tuple[Gate, ...] = ()
    subscribers: Subscribers = field(default_factory=no_subscribers)

    @classmethod
    def of(
        cls,
        parts: Iterable[CallPart],
        gates: Iterable[Gate] = (),
        subscribers: Subscribers | None = None,
    ) -> CallParts:
        """Group the parts by the hooks that they override.

        Raises:
            PartError: more than one part holds back the effects of runs, or such a part does not
                belong to the product itself.
        """
        found = tuple(parts)
        holding = [part for part in found if part.holds_back_with]
        for part in holding:  # another part could let calls run that nobody has approved
            if not type(part).__module__.startswith("fumehood."):
                raise PartError("Only the product's own parts can hold back the effects of runs.")
        if len(holding) > 1:
            names = " and ".join(type(part).__name__ for part in holding)
            raise PartError(f"{names} both hold back the effects of runs.")
        return cls(
            all=found,
            around=tuple(part.around for part in found if type(part).around is not CallPart.around),
            requiring=tuple(
                part
                for part in found
                if type(part).require_possible is not CallPart.require_possible
            ),
            answering=tuple(part for part in found if type(part).answered is not CallPart.answered),
            holding=holding[0] if holding else None,
            gates=tuple(gates),
            subscribers=subscribers or no_subscribers(),
        )

    def excesses(
        self, validated: ValidatedCall, but: Container[Gate] = ()
    ) -> Iterator[tuple[Gate, Excess]]:
        """Yield each gate that would refuse a call now, with the reason. The gates in `but` are
        skipped.
        """
        for gate in self.gates:
            excess = gate.excess(validated) if gate not in but else None
            if excess is not None:
                yield gate, excess

    async def answered(
        self, call: CallContext, outcome: Outcome, data: JsonObject
    ) -> dict[str, Any]:
        """Return the fields that parts add to the answer's metadata.

        If several parts return the same field, the first part wins. If a part raises, the exception
        is logged, and the call still gets its answer.
        """
        added: dict[str, Any] = {}
        for part in self.answering:
            try:
                added = {**await part.answered(call, outcome, data), **added}
            except Exception as fault:
                call.trace.fault("part.internal_error", fault)
        return added
