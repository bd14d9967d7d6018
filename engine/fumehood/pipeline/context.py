"""The context of one call (the facts collected so far), and the services that all calls share.

A context is created once for each call, by `run` or when an approved call is resumed, and passed
from stage to stage. `result` and `record` read it when the call has ended. Invariant: a context
never decides whether a call may continue; each stage requires the previous stage's value for that
(`PermittedCall`, `AdmittedCall`). `CallTrace` measures and logs the stages, and contains no state
of the call. `compose` creates the `PipelineServices` once for each engine.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fumehood.circuits.breaker import Circuits
from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Principal
from fumehood.core.usage import Prices, TokenCounter
from fumehood.executors.base import CallHandle
from fumehood.identity.identities import Identities
from fumehood.observe.clock import Clock
from fumehood.observe.log import Logger, log_fault
from fumehood.pipeline.approve import Asked, Asker
from fumehood.pipeline.check_result import ResultCheckers
from fumehood.pipeline.claim import Claim, Keys
from fumehood.pipeline.gate import Ended, Gate, Hold
from fumehood.pipeline.part import CallParts
from fumehood.pipeline.plan import Plan
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.retry import Attempts, Retries
from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy.service import PolicyGate
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import ToolIndex
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.sandbox.wall import Walls
from fumehood.storage.calls import Record
from fumehood.storage.stores import Stores

T = TypeVar("T")

FALLBACK_SUFFIX = "_fallback"
"""The id of a fallback's call is the id of the first call with this suffix."""


@dataclass(frozen=True, slots=True)
class FallbackAnswer:
    """The answer of the fallback tool that was called after the first tool failed."""

    tool: str
    envelope: Envelope
    may_have_acted: bool
    """Whether the fallback may have had an effect, so that its call must not be repeated."""


@dataclass(slots=True)
class CallContext:
    """The context of one call. An optional field is None until a stage sets it."""

    request: CallRequest
    trace: CallTrace
    handle: CallHandle
    asked: Asked | None = None
    """Set only if the call was stored to wait for a decision."""
    resolved: ResolvedCall | None = None
    validated: ValidatedCall | None = None
    claim: Claim | None = None
    """The claim on the call's idempotency key. `settle` ends it."""
    repeat_key: str | None = None
    """Set if the call needs approval and has no idempotency key. A later call with the same repeat
    key counts as a repeat of this call."""
    holds: list[tuple[Gate, Hold]] = field(default_factory=list)
    """The gates' holds for this call, each with its gate. `close` ends them."""
    is_released: bool = False
    """Whether `release` has released the holds."""
    plan: Plan | None = None
    """Set once the call holds its place in the sandbox."""
    queue_ms: float | None = None
    """Milliseconds that the call waited for its place in the sandbox."""
    is_approved: bool = False
    """Whether the call has passed the stage `approve`, so that it may run."""
    parked_as: str | None = None
    """An approval id: of this call once it is stored, or of the stored call that this call repeats
    and waits for. The stored call continues without its caller."""
    has_begun: bool = False
    """Whether the call may have had an effect."""
    has_record: bool = False
    """Whether `record` is final. Long calls set `record` before the answer is sent, possibly to
    None."""
    record: Record | None = None
    attempts: Attempts = field(default_factory=Attempts)
    fallback: FallbackAnswer | None = None
    """Set if the tool failed and its fallback was called."""

    def begin(self) -> None:
        """Call `begin` of each reservation that gates have made for the call (`holds`). Then record
        that the call may have an effect from now on.
        """
        for _, hold in self.holds:
            hold.begin()
        self.has_begun = True

    def release(self) -> None:
        """Release what gates have reserved for the call (`holds`), because the call used nothing.
        Further calls of this method do nothing.
        """
        if not self.is_released:
            self.is_released = True
            self._end_holds(lambda hold: hold.release())

    def close(self) -> None:
        """Close what gates have reserved for the call (`holds`), because the call has ended."""
        self._end_holds(lambda hold: hold.close())

    async def settle(self, envelope: Envelope) -> Envelope:
        """Settle what gates have reserved for the call (`holds`), or release it if the call has not
        begun. If the call has an idempotency key, store the envelope under the key.

        Return the envelope. If it could not be stored, it contains an additional warning.
        """
        if not self.has_begun:
            self.release()
        elif self.holds and not self.is_released:  # a fallback begins after the release
            ended = self._ended(envelope)
            self._end_holds(lambda hold: hold.settle(ended))
        if self.claim is None:
            return envelope
        return await self.claim.settle(envelope, acted=self.has_begun)

    def _ended(self, envelope: Envelope) -> Ended:
        is_cut = self.handle.partial is not None or "limits_hit" in envelope.data
        is_anothers = envelope.metadata.fallback is not None
        own = sum(len(stage.warnings) for stage in (self.validated, self.plan) if stage is not None)
        return Ended(
            envelope,
            is_whole=envelope.error is None and not is_cut and not is_anothers,
            warnings=envelope.metadata.warnings[own:],
        )

    def _end_holds(self, act: Callable[[Hold], None]) -> None:
        """Call `act` with each of the reservations that gates have made for the call (`holds`). If
        `act` raises, log the exception and continue with the next reservation.
        """
        for _, hold in self.holds:
            try:
                act(hold)
            except Exception as fault:
                self.trace.fault("gate.internal_error", fault)


class CallTrace:
    """Measures the stages of a call, and logs events with the call's id and trace id.

    Argument values are logged only at the level `debug`.
    """

    __slots__ = ("_clock", "_ids", "_last", "_log", "_logs_stages", "_stages_s", "_started")

    def __init__(self, tool: str, call_id: str, trace_id: str, clock: Clock, log: Logger) -> None:
        self._clock = clock
        self._log = log
        self._logs_stages = log.is_enabled_for(logging.DEBUG)
        self._ids = {"call_id": call_id, "trace_id": trace_id, "tool": tool[:80]}
        self._started = self._last = clock.monotonic()
        self._stages_s: dict[str, float] = {}

    def passed(self, stage: str, value: T) -> T:
        """Record that a stage has ended, and return `value`, the stage's result."""
        now = self._clock.monotonic()
        self._stages_s[stage] = now - self._last
        self._last = now
        if self._logs_stages:
            self._log.debug(f"call.{stage}", **self._ids, ms=self.stage_ms(stage))
        return value

    def note(self, event: str, **values: Any) -> None:
        """Log an event between stages at the level `debug`."""
        self._log.debug(event, **self._ids, **values)

    def tell(self, event: str, **values: Any) -> None:
        """Log an event between stages at the level `info`, so that operators see it."""
        self._log.info(event, **self._ids, **values)

    def conclude(self, event: str, **values: Any) -> None:
        """Log the call's last event at the level `info`, with the time of every stage."""
        self._log.info(event, **self._ids, **values, stages_ms=self.stages_ms())

    def fault(self, event: str, error: BaseException) -> None:
        """Log the exception behind a failure. The caller must not see this exception."""
        log_fault(self._log, event, error, **self._ids)

    def stages(self) -> list[tuple[str, float, float]]:
        """Return the name, start and end of each stage. Times are in seconds relative to now, so
        never positive.

        The last stage is `record`, which is still running.
        """
        now = self._clock.monotonic()
        found, at = [], self._started - now
        for stage, seconds in self._stages_s.items():
            found.append((stage, at, at + seconds))
            at += seconds
        return [*found, ("record", min(at, 0.0), 0.0)]

    @property
    def total_ms(self) -> float:
        """Milliseconds since the call arrived."""
        return (self._clock.monotonic() - self._started) * 1e3

    def stage_ms(self, stage: str) -> float | None:
        """Return the milliseconds that one stage took, or None if the call has not passed it."""
        seconds = self._stages_s.get(stage)
        return round(seconds * 1e3, 3) if seconds is not None else None

    def stages_ms(self) -> dict[str, float]:
        """Return the duration of each passed stage in milliseconds."""
        return {stage: round(seconds * 1e3, 3) for stage, seconds in self._stages_s.items()}


# -- services -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Settings for what envelopes contain in addition to the tool's result."""

    counter: TokenCounter
    prices: Prices
    checkers: ResultCheckers | None
    allow_debug: bool


@dataclass(frozen=True, slots=True)
class PipelineServices:
    """The services and settings of one engine that the stages of a call use, such as the policy."""

    registry: ToolIndex
    identities: Identities
    policy: PolicyGate
    asker: Asker
    parts: CallParts
    walls: Walls
    sessions: SessionKeeper
    circuits: Circuits
    retries: Retries
    stores: Stores
    keys: Keys
    cursors: Cursors
    redactor: Redactor
    answers: AnswerSettings
    clock: Clock
    log: Logger
    is_draining: Callable[[], bool]

    def present(self, principal: Principal | None) -> Principal | None:
        """Return the principal with its current authority. Return None if there is no principal, or
        if its token is no longer valid.
        """
        if principal is None:
            return None
        return self.identities.present(
            principal.id, principal.token_id, self.clock.now(), is_program=principal.is_program
        )


def context_of(request: CallRequest, services: PipelineServices) -> CallContext:
    """Create a context for a call that is answered without running."""
    name = request.tool.partition("@")[0]
    trace = CallTrace(name, request.call_id, request.trace_id, services.clock, services.log)
    return CallContext(request, trace, CallHandle())


RunCall = Callable[[CallRequest, PipelineServices, CallHandle], Awaitable[Envelope]]
"""Runs a call through the pipeline: `run.run_call`, passed in to avoid an import cycle."""
