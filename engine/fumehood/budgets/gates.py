"""Budgets and rate limits as gates (`pipeline/gate.py`), through which the pipeline passes each
call.

The gate of the rate limits reserves a start for a call until the call starts. The gate of the
budgets reserves the call's expected cost until the actual cost is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime

from fumehood.budgets.ledger import Budgets, Reservation, details_of, estimate_of, refusal, taken_by
from fumehood.budgets.limiter import RateHold, RateLimits
from fumehood.budgets.model import Amounts, Exceeded, Spender
from fumehood.core.identity import Principal
from fumehood.core.usage import TokenCounter
from fumehood.core.usage_table import BudgetStanding, Unit
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.gate import Ended, Excess, Gate, Hold
from fumehood.pipeline.validate import ValidatedCall


class RateGate(Gate):
    """The gate that lets calls start only as often as the rate limits allow."""

    name = "rate_limit"

    def __init__(self, rates: RateLimits) -> None:
        self._rates = rates

    def excess(self, validated: ValidatedCall) -> Excess | None:
        """Return the exceeded rate limit with the longest delay if a limit would refuse the call
        now, or None. No start is reserved.
        """
        per_minute = validated.tool.definition.rate_limit
        over = self._rates.exceeded(spender_of(validated), per_minute)
        if over is None:
            return None
        shown = {**over.limit.details, "retry_after_ms": over.retry_after_ms}
        return Excess(over.refusal(), shown)

    async def hold(self, permitted: PermittedCall, *, is_let_pass: bool) -> Hold | None:
        """Reserve one start for the call in each rate limit that applies to the call. Return None
        if no rate limit applies.

        `is_let_pass` is always False, because humans cannot allow a call to exceed a rate limit.

        Raises:
            RateLimited: a limit would stay exceeded for longer than it lets calls wait.
        """
        per_minute = permitted.tool.definition.rate_limit
        if per_minute is None and not self._rates.has_rules:
            return None
        held = await self._rates.hold(spender_of(permitted.validated), per_minute)
        return _Place(held) if held is not None else None


class _Place(Hold):
    def __init__(self, held: RateHold) -> None:
        self._held = held

    def begin(self) -> None:
        self._held.take()

    def release(self) -> None:
        self._held.release()


class BudgetGate(Gate):
    """The gate that lets calls run only if their budgets have enough left."""

    name = "budget"
    key = "over_budget"

    def __init__(
        self, budgets: Budgets, counter: TokenCounter, now: Callable[[], datetime]
    ) -> None:
        self._budgets = budgets
        self._counter = counter
        self._now = now

    def excess(self, validated: ValidatedCall) -> Excess | None:
        """Return the budget that has too little left for the call, or None if all have enough."""
        if self._budgets.is_empty:
            return None
        over = self._budgets.exceeded(spender_of(validated), self._estimate(validated))
        if over is None:
            return None
        record = {**details_of(over), "needed": over.needed, "subject": over.subject.parts}
        shown = {"exceeded": over.budget, "unit": over.unit.value, "left": over.left}
        return Excess(refusal(over, self._now()), shown, record, _in_words(over))

    def standings(self, principal: Principal | None) -> Iterable[BudgetStanding]:
        """Yield what is left of every budget. If `principal` is given, include only the budgets
        that limit this principal.
        """
        return self._budgets.standings(principal)

    async def hold(self, permitted: PermittedCall, *, is_let_pass: bool) -> Hold | None:
        """Reserve the call's expected cost in its budgets. If `is_let_pass` is True, reserve the
        cost even if too little is left. Return None if the engine has no budgets.

        Raises:
            QuotaExceeded: a budget has too little left.
            WriteFailed, ReadFailed: the database failed, so nothing is reserved.
        """
        if self._budgets.is_empty:
            return None
        validated = permitted.validated
        estimate = self._estimate(validated)
        held = await self._budgets.reserve(spender_of(validated), estimate, force=is_let_pass)
        return _Cost(held)

    def _estimate(self, validated: ValidatedCall) -> Amounts:
        return estimate_of(validated.tool.definition, validated.shown_arguments, self._counter)


class _Cost(Hold):
    def __init__(self, held: Reservation) -> None:
        self._held = held

    def take(self, *, requests: int, passed_bytes: int) -> bool:
        return self._held.take(requests=requests, passed_bytes=passed_bytes)

    def settle(self, ended: Ended) -> None:
        self._held.settle(taken_by(ended.envelope.metadata.usage))

    def release(self) -> None:
        self._held.release()


def _in_words(over: Exceeded) -> str:
    parts = over.subject.parts
    whose = ", ".join(f"{name} {value}" for name, value in parts.items()) or "everybody together"
    what = "(money)" if over.unit is Unit.MONEY else over.unit.value
    resets_at = details_of(over)["resets_at"]
    when = "it does not reset" if resets_at is None else f"it resets at {resets_at}"
    return (
        f"Over budget: {over.budget} of {whose} had {over.left} of {over.limit} {what} "
        f"left when this was asked, the call needs {over.needed}, and {when}."
    )


def spender_of(validated: ValidatedCall) -> Spender:
    """Return the caller and the tool of a call. Budgets and rate limits count calls by these
    values.
    """
    request = validated.request
    return Spender(
        request.principal.id if request.principal is not None else "",
        request.options.agent_id,
        request.options.session_id,
        validated.tool.definition.name,
    )
