"""Gates: a part's conditions for a permitted call, and what the part reserves while the call runs.

Host side. `pass_gates` calls the gates of an engine in the order of their parts. Invariants: a gate
receives a call only after `authorize` has permitted it, so a gate cannot undo a refusal. It can
only refuse the call, delay it, or, if the policy allows the call without approval, answer it with
the result of an identical call. Gates receive immutable values. If a gate raises an exception, the
call ends. Each hold ends exactly once, whatever happens to the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fumehood.core.envelope import Envelope, Metacognition
from fumehood.core.errors import EngineError
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.usage_table import BudgetStanding
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.validate import ValidatedCall


@dataclass(frozen=True, slots=True)
class Excess:
    """The reason why a gate would refuse a call now, such as an exceeded budget."""

    error: EngineError
    shown: JsonObject
    """What a dry run reports about the excess."""
    record: JsonObject | None = None
    """Data about the excess for the approval record. Only for a gate with a `key`."""
    words: str | None = None
    """A sentence about the excess for the approver. Only for a gate with a `key`."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The successful result of an earlier, identical call, as that call's caller received it."""

    data: bytes
    """The result as JSON."""
    warnings: tuple[str, ...]
    """Warnings of the earlier call's run. Warnings about its arguments or options are omitted."""
    metadata: Mapping[str, Any]
    """Fields that the gate's part adds to the answer's `Metadata`."""
    redacted: int = 0
    metacognition: Metacognition | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A call that has ended after it may have had an effect."""

    envelope: Envelope
    is_whole: bool
    """Whether `envelope` contains the complete result of the call's own tool, not of its
    fallback."""
    warnings: tuple[str, ...]
    """Warnings of the run. Warnings about the call's arguments or options are omitted."""


class Hold:
    """What a gate reserves for one call, such as an amount of a budget. Subclasses override the
    methods that they need. The methods of this class do nothing.

    If `begin` was called, `settle` is called after the call. If the call used nothing, `release` is
    called instead, possibly before the call has ended. Finally, `close` is called in both cases.
    """

    metadata: Mapping[str, Any] = MappingProxyType({})
    """Fields that the gate's part adds to the answer's `Metadata`."""

    def begin(self) -> None:
        """Called when the call starts, before it can have an effect. If this method raises, nothing
        runs.
        """

    def take(self, *, requests: int, passed_bytes: int) -> bool:
        """Charge requests and bytes of a running program. Return False if a limit of the gate does
        not allow them.
        """
        return True

    def settle(self, ended: Ended) -> None:
        """End the reservation after a call that may have had an effect, for example by charging
        what the call used. `ended` describes how the call ended. Called before the caller gets the
        answer.
        """

    def release(self) -> None:
        """Give back what is reserved, because the call's tool used nothing. The call has not
        necessarily ended, because the fallback tool may still answer it.
        """

    def close(self) -> None:
        """Close the hold at the end of the call, after it was settled or released."""


class Gate:
    """A check of a part that can refuse calls before they run, answer calls, or reserve what calls
    need. Budgets are an example. Subclasses override the methods that they need.
    """

    name: str | None = None
    """The field of a dry run's answer in which `Excess.shown` appears. None if it does not
    appear."""
    key: str | None = None
    """The name, in `Part.excesses`, under which policy rules test whether this gate would refuse a
    call. If such a rule requires approval, a human can let the call pass the gate. None if no human
    can."""

    def excess(self, validated: ValidatedCall) -> Excess | None:
        """Return the reason why the gate would refuse a call now, or None. This method changes
        nothing.
        """
        return None

    def standings(self, principal: Principal | None) -> Iterable[BudgetStanding]:
        """Return the limits of this gate that apply to `principal`, or all of them if `principal`
        is None, with the amount that is left of each.
        """
        return ()

    async def answer(
        self, permitted: PermittedCall, limit_s: Callable[[], float]
    ) -> KnownAnswer | Hold | None:
        """Return the result of an identical call, or None if this call must run.

        If the gate will share this call's result with later calls, it returns a hold instead of
        None. The hold lasts until this call has ended.

        `limit_s` returns the call's time limit in seconds. If the call cannot run, `limit_s` raises
        the EngineError that prevents it.

        The method is called only for a new call that has no idempotency key and that the policy
        allows without approval.
        """
        return None

    async def hold(self, permitted: PermittedCall, *, is_let_pass: bool) -> Hold | None:
        """Reserve what the call needs to run. Return None if the gate reserves nothing.

        `is_let_pass` means that a human has allowed the call to pass even if the gate has an
        `Excess`. For a gate without a `key`, it is always False.

        Raises:
            EngineError: the gate refuses the call.
        """
        return None
