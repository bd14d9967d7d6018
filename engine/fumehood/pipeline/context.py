"""The context of one call: what is known of it so far, and what it holds.

Made once for each call, by `run` or by the resumption of an approval, and handed from stage to
stage. `build_envelope` and `record` read it when the call has ended. Invariant: it opens no gate.
What lets a call go on is the value of its stage (`PermittedCall`, `AdmittedCall`), never a field
here. `CallTrace` measures the stages and logs them; it carries no state of the call.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fumehood.approvals.model import StoredApproval
from fumehood.budgets.ledger import Reservation, taken_by
from fumehood.budgets.limiter import RateHold
from fumehood.cache.store import Flight
from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.executors.handle import CallHandle
from fumehood.observe.clock import Clock
from fumehood.observe.log import Logger, log_fault
from fumehood.pipeline.claim import Claim
from fumehood.pipeline.plan import Plan
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.retry import Attempts
from fumehood.pipeline.validate import ValidatedCall

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FallbackAnswer:
    """How the call of another tool ended, in place of a failed one."""

    tool: str
    envelope: Envelope
    may_have_acted: bool
    """Whether it failed after it may have acted, and may not be repeated."""


@dataclass(slots=True)
class CallContext:
    """One call. An optional field is None until the stage that sets it has passed."""

    request: CallRequest
    trace: CallTrace
    handle: CallHandle
    approval: StoredApproval | None = None
    """The approval of a call that waited for a human and continues or ends now."""
    resolved: ResolvedCall | None = None
    validated: ValidatedCall | None = None
    tools: list[JsonObject] | None = None
    """The tools that a program may call, as its guest gets them."""
    claim: Claim | None = None
    """Held on its idempotency key until `settle`."""
    repeat_key: str | None = None
    """Set for a call that needs approval: a call with the same key is this call."""
    flight: Flight | None = None
    """Its answer is for the result cache, and equal calls may wait for it."""
    reservation: Reservation | None = None
    """Held in the budgets until `settle` or `release`."""
    rate: RateHold | None = None
    """Held in the rate limits until `begin` or `release`."""
    plan: Plan | None = None
    """Known once the call holds its place in the sandbox."""
    queue_ms: float | None = None
    is_approved: bool = False
    """Whether it passed the stage `approve` in this run."""
    is_parked: bool = False
    """Whether it continues without its caller after a human's approval."""
    has_begun: bool = False
    """Whether it may have acted."""
    attempts: Attempts = field(default_factory=Attempts)
    fallback: FallbackAnswer | None = None
    """Set if its tool failed and its fallback was called."""

    def begin(self) -> None:
        """Note that the call may act from now on, and count it in the rate limits."""
        self.has_begun = True
        if self.rate is not None:
            self.rate.take()

    def release(self) -> None:
        """Release what is held in budgets and rate limits, because nothing was used."""
        if self.rate is not None:
            self.rate.release()
        if self.reservation is not None:
            self.reservation.release()

    def close_flight(self) -> None:
        """Let a waiting equal call run instead, unless the answer is already there."""
        if self.flight is not None:
            self.flight.close()

    async def settle(self, envelope: Envelope) -> Envelope:
        """Settle the budgets and store the answer under the call's key.

        Returns the caller's answer.
        """
        if not self.has_begun:
            self.release()
        elif self.reservation is not None:
            self.reservation.settle(taken_by(envelope.metadata.usage))
        if self.claim is None:
            return envelope
        return await self.claim.settle(envelope, acted=self.has_begun)


class CallTrace:
    """The time of each stage of a call, and its log events with both ids.

    Argument values are logged at the level `debug` only.
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
        """Note that a stage is done, and pass its value on."""
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
        """Log a fault that the caller must not see."""
        log_fault(self._log, event, error, **self._ids)

    def stages(self) -> list[tuple[str, float, float]]:
        """Each stage with its start and end, in seconds relative to now. The last stage,
        `record`, has not ended yet."""
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
        """Duration of one stage, or None if the call has not passed it."""
        seconds = self._stages_s.get(stage)
        return round(seconds * 1e3, 3) if seconds is not None else None

    def stages_ms(self) -> dict[str, float]:
        """Return the duration of each passed stage in milliseconds."""
        return {stage: round(seconds * 1e3, 3) for stage, seconds in self._stages_s.items()}
