"""The operator's settings for budgets and rate limits, as plain values."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fumehood.core.part import Setting
from fumehood.core.usage_table import Period, Unit
from fumehood.core.value import Value

Per = Literal["principal", "agent", "session", "tool"]
"""A key by which a budget can count. With `agent`, for example, each agent has a counter of its
own.
"""


class BudgetRule(Value):
    """One budget. At least one limit must be given.

    `per` contains the keys by which calls are counted. With `agent`, for example, each agent has
    its own count. If there are several keys, each combination of values has its own count. The
    limits hold for each count. Calls without an agent are covered only if `agents` is empty.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    per: tuple[Per, ...] = ()
    period: Period = Period.DAY
    tools: tuple[str, ...] = ()
    """The tools whose calls the budget counts, as names or as patterns with `*`. If empty, the
    calls of all tools count.
    """
    agents: tuple[str, ...] = ()
    """The agents whose calls the budget counts, as ids or as patterns with `*`. If empty, the calls
    of all agents count, and so do calls without an agent.
    """
    calls: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    money: Decimal | None = Field(default=None, ge=0)
    requests: int | None = Field(default=None, ge=0)
    """Maximum number of requests that programs send through the gateway."""
    network_bytes: int | None = Field(default=None, ge=0)
    """Maximum number of bytes in the requests that programs send through the gateway, and in the
    answers to them.
    """

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if all(getattr(self, unit) is None for unit in Unit):
            raise ValueError(f"a budget needs one of {', '.join(f'`{unit}`' for unit in Unit)}")
        return self


def _require_unique_names(value: tuple[BudgetRule, ...]) -> tuple[BudgetRule, ...]:
    names = [budget.name for budget in value]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two budgets have the name {twice}")
    return value


AllBudgets = Annotated[tuple[BudgetRule, ...], AfterValidator(_require_unique_names)]

RatePer = Literal["all", "principal", "agent", "session"]
"""The key by which a rate limit counts. With `all`, all callers share one count."""

MAX_REFILL_S = 366 * 86_400
"""Maximum number of seconds after which a fully used burst must be free again."""

MAX_WAIT_S = 300
"""Maximum value of `max_wait_seconds`."""


class RateLimitRule(Value):
    """One rate limit: `limit` calls in `period_seconds`, up to `burst` of them at once.

    `tool` is an exact name, or a pattern with `*`. All tools that match the pattern are counted
    together. `burst` defaults to `limit`.
    """

    tool: str = Field(min_length=1, max_length=120)
    per: RatePer = "all"
    limit: int = Field(ge=1, le=1_000_000_000)
    period_seconds: float = Field(default=60.0, gt=0, le=MAX_REFILL_S, allow_inf_nan=False)
    burst: int | None = Field(default=None, ge=1, le=1_000_000_000)
    max_wait_seconds: float = Field(default=0, ge=0, le=MAX_WAIT_S, allow_inf_nan=False)
    """Maximum number of seconds that a call waits to start. A call that would have to wait longer
    is refused.
    """

    @model_validator(mode="after")
    def _refills(self) -> Self:
        if self.period_seconds * (self.burst or self.limit) / self.limit > MAX_REFILL_S:
            raise ValueError("a used `burst` would take more than 366 days to be free again")
        return self

    @property
    def id(self) -> str:
        """The name under which the limit's counts are stored. If the rate of a rule changes, its id
        changes too, so its counts start from zero.
        """
        return f"rule:{self.tool} {self.per} {self.limit}/{self.period_seconds!r}"


def _require_different(value: tuple[RateLimitRule, ...]) -> tuple[RateLimitRule, ...]:
    ids = [rule.id for rule in value]
    twice = next((rule for rule in value if ids.count(rule.id) > 1), None)
    if twice is not None:
        raise ValueError(
            f"two rate limits of {twice.tool} have the same `per`, `limit` and `period_seconds`"
        )
    return value


AllRateLimits = Annotated[tuple[RateLimitRule, ...], AfterValidator(_require_different)]

SETTINGS = {"budgets": Setting(AllBudgets, ()), "rate_limits": Setting(AllRateLimits, ())}
