"""Gates: what parts require of a call that the policy permits, and what they hold while it runs.

Host side. `pass_gates` calls the gates of an engine in the order of their parts. Invariants: a gate
receives a call only after `authorize`. It can only refuse the call, delay it, or answer it with the
result of an identical call, which requires that the policy allows the call without approval. A gate
gets values that it cannot change, and an exception from it ends the call. A gate never receives a
refused call, so it cannot undo a refusal. Each hold ends exactly once, whatever happens to the
call.
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
    """Why a gate would refuse a call now."""

    error: EngineError
    shown: JsonObject
    """What a dry run reports about the excess."""
    record: JsonObject | None = None
    """If the gate has a `key`: data for the approval record."""
    words: str | None = None
    """If the gate has a `key`: a sentence about the excess for the human."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The successful result of an earlier, identical call, as that call's caller received it."""

    data: bytes
    """The result as JSON."""
    warnings: tuple[str, ...]
    """Warnings of the earlier run, without those about the earlier call's arguments or options."""
    metadata: Mapping[str, Any]
    """Fields of the answer's `Metadata` that the gate's part fills in."""
    redacted: int = 0
    metacognition: Metacognition | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A call that has ended after it may have had an effect."""

    envelope: Envelope
    is_whole: bool
    """Whether the call's own tool succeeded and `envelope` has its complete result."""
    warnings: tuple[str, ...]
    """Warnings of the run, without those about the call's arguments or options."""


class Hold:
    """What a gate holds for one call. Every method may be overridden; the defaults do nothing.

    If `begin` was called, `settle` is called when the call has ended; otherwise `release` is
    called. At the end, `close` is called in both cases.
    """

    metadata: Mapping[str, Any] = MappingProxyType({})
    """Fields of the answer's `Metadata` that the gate's part fills in."""

    def begin(self) -> None:
        """Record that the call may have an effect from now on. If this raises, nothing runs."""

    def take(self, *, requests: int, passed_bytes: int) -> bool:
        """Charge what a running program sends or receives. Return False if that is too much."""
        return True

    def settle(self, ended: Ended) -> None:
        """Settle the hold, because the call has ended. Its answer has not been sent yet."""

    def release(self) -> None:
        """Release the hold, because the call used nothing.

        The tool's fallback may still answer the call.
        """

    def close(self) -> None:
        """Close the hold at the end of the call, after it was settled or released."""


class Gate:
    """One gate of an engine. Subclasses override the methods that they need."""

    name: str | None = None
    """The field for `Excess.shown` in the answer of a dry run, or None to leave it out."""
    key: str | None = None
    """The key in `Part.excesses` by which rules of the policy test whether the gate has an excess.
    If a rule with the key asks, a human can let the call pass. None if nobody can."""

    def excess(self, validated: ValidatedCall) -> Excess | None:
        """Return why the gate would refuse a call now, or None. This changes nothing."""
        return None

    def standings(self, principal: Principal | None) -> Iterable[BudgetStanding]:
        """Return what is left of the gate's limits on one principal, or of all its limits."""
        return ()

    async def answer(
        self, permitted: PermittedCall, limit_s: Callable[[], float]
    ) -> KnownAnswer | Hold | None:
        """Return an identical call's result, a hold that lasts until this call has ended, or None.

        Called only for new calls without an idempotency key that the policy allows without
        approval. `limit_s` returns the call's time limit in seconds, or raises the EngineError that
        prevents the call from running.
        """
        return None

    async def hold(self, permitted: PermittedCall, *, is_let_pass: bool) -> Hold | None:
        """Hold what the call needs to run, or return None if it needs nothing.

        `is_let_pass` means that a human lets the call pass this gate although the gate has an
        `Excess`. It is always False for a gate without a `key`.

        Raises:
            EngineError: the gate refuses the call.
        """
        return None
