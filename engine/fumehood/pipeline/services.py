"""The services that the stages of a call use. `compose` creates them once for each engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fumehood.approvals.requests import ApprovalRequests
from fumehood.budgets.ledger import Budgets, Reservation, estimate_of
from fumehood.budgets.limiter import Exceeded as RateExceeded
from fumehood.budgets.limiter import RateLimits
from fumehood.budgets.model import Amounts, Exceeded, Spender
from fumehood.cache.store import ResultCache
from fumehood.circuits.breaker import Circuits
from fumehood.core.usage import Prices, TokenCounter
from fumehood.executors.outcome import HeldTrial
from fumehood.executors.upstreams import Upstreams
from fumehood.identity.agents import Agents
from fumehood.observe.alerts import CallObserver
from fumehood.observe.clock import Clock
from fumehood.observe.log import Logger
from fumehood.pipeline.check_result import ResultCheckers
from fumehood.pipeline.claim import Keys
from fumehood.pipeline.retry import Retries
from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy.service import PolicyGate
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import ToolIndex
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.sandbox.wall import Walls
from fumehood.storage.blobs import BlobStore
from fumehood.storage.calls import CallLog


@dataclass(frozen=True, slots=True)
class PipelineServices:
    """Everything that the stages of a call use."""

    registry: ToolIndex
    agents: Agents
    walls: Walls
    clock: Clock
    log: Logger
    counter: TokenCounter
    prices: Prices
    allow_debug: bool
    is_draining: Callable[[], bool]
    calls: CallLog
    blobs: BlobStore
    cursors: Cursors
    upstreams: Upstreams
    sessions: SessionKeeper
    policy: PolicyGate
    keys: Keys
    cache: ResultCache
    budgets: Budgets
    rates: RateLimits
    approvals: ApprovalRequests
    redactor: Redactor
    checkers: ResultCheckers | None
    circuits: Circuits
    retries: Retries
    observer: CallObserver
    trials: dict[str, HeldTrial] = field(default_factory=dict)
    """Id of the call that asks a human → the effect of a trial."""

    def estimate(self, validated: ValidatedCall) -> Amounts:
        """Return the amounts that a call is expected to take from its budgets."""
        tool = validated.tool.definition
        return estimate_of(tool, validated.shown_arguments, self.counter)

    def exceeded(self, validated: ValidatedCall) -> Exceeded | None:
        """Return the budget that has too little left for a call, or None."""
        if self.budgets.is_empty:
            return None
        return self.budgets.exceeded(spender_of(validated), self.estimate(validated))

    def rate_exceeded(self, validated: ValidatedCall) -> RateExceeded | None:
        """Return the rate limit that would refuse a call now, or None."""
        per_minute = validated.tool.definition.rate_limit
        return self.rates.exceeded(spender_of(validated), per_minute)

    def is_over_budget(self, validated: ValidatedCall, held: Reservation | None) -> bool:
        """Whether a call exceeds a budget; never if it already holds its reservation.

        Computed only if a policy rule needs it.
        """
        return held is None and self.exceeded(validated) is not None


def spender_of(validated: ValidatedCall) -> Spender:
    """Return whose budgets and rate limits a call counts against."""
    request = validated.request
    return Spender(
        request.principal.id if request.principal is not None else "",
        request.options.agent_id,
        request.options.session_id,
        validated.tool.definition.name,
    )
