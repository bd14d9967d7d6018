"""Gates: what parts require of a call that the policy permits, and what they hold while it runs.

Host side. `pass_gates` asks the gates of an engine in their order, which is that of the parts.
Invariants: a gate sees a call only after `authorize`, and can only refuse it, let it wait, or give
it the result of an equal call, which takes a call that the policy allows without asking. It gets
values that it cannot change, and what it raises ends the call. It never sees a refusal, so it
cannot take one back. What it holds ends once, whatever happens to the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fumehood.core.envelope import Envelope, Metacognition
from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.validate import ValidatedCall


@dataclass(frozen=True, slots=True)
class Excess:
    """Why a gate would refuse a call now."""

    error: EngineError
    shown: JsonObject
    """What a dry run says of it."""
    record: JsonObject | None = None
    """If a human may let the call pass in spite of it: what the approval records."""
    words: str | None = None
    """Then also a sentence for the human."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The successful result of an equal call, as its caller got it."""

    data: bytes
    """As JSON."""
    warnings: tuple[str, ...]
    """Warnings of its run, without those about its arguments or options."""
    metadata: Mapping[str, Any]
    """The part's own fields of `Metadata`."""
    redacted: int = 0
    metacognition: Metacognition | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A call that has ended after it may have had an effect."""

    envelope: Envelope
    is_whole: bool
    """Whether it is the whole answer of the call's own tool, which succeeded."""
    warnings: tuple[str, ...]
    """Warnings of its run, as in `KnownAnswer`."""


class Hold:
    """What a gate holds for one call. Each method may be overridden; none of these does anything.

    After `begin` it gets `settle`, otherwise `release`, and in any case `close`.
    """

    metadata: Mapping[str, Any] = MappingProxyType({})
    """The part's own fields of `Metadata`."""

    def begin(self) -> None:
        """The call may have an effect from now on. What this raises ends the call before."""

    def take(self, *, requests: int, passed_bytes: int) -> bool:
        """Take what a running program sends or gets. False if that is too much."""
        return True

    def settle(self, ended: Ended) -> None:
        """The call has ended, and is not answered yet."""

    def release(self) -> None:
        """The call uses nothing. It may still be answered by its fallback."""

    def close(self) -> None:
        """The call is over."""


class Gate:
    """One gate of an engine. It overrides what it needs."""

    name: str | None = None
    """The key of `Excess.shown` in dry runs, if the gate has an excess."""

    def excess(self, validated: ValidatedCall) -> Excess | None:
        """Return why the gate would refuse a call now, or None. Changes nothing."""
        return None

    async def answer(
        self, permitted: PermittedCall, limit_s: Callable[[], float]
    ) -> KnownAnswer | Hold | None:
        """Return the result of an equal call, what is held until this one has ended, or None.

        Only for new calls without an idempotency key that the policy allows without asking.
        `limit_s` returns the time limit of the call in seconds, or raises the EngineError for
        which it cannot run.
        """
        return None

    async def hold(self, permitted: PermittedCall, *, is_let_pass: bool) -> Hold | None:
        """Hold what the call needs to run, or return None if it needs nothing.

        `is_let_pass` says that a human lets it pass in spite of an `Excess` with a `record`.

        Raises:
            EngineError: the gate refuses the call.
        """
        return None
