"""The operator's settings of rate limits. Values only."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Per = Literal["all", "principal", "agent", "session"]
"""What a limit is counted for each of; `all` is one count for all callers."""

MAX_REFILL_S = 366 * 86_400
MAX_WAIT_S = 300


class RateLimitRule(BaseModel):
    """One limit: `limit` calls in `period_seconds`, up to `burst` of them at once.

    `tool` is an exact name or a pattern with a written `*`; all tools that it matches are counted
    together. An absent `burst` is `limit`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool: str = Field(min_length=1, max_length=120)
    per: Per = "all"
    limit: int = Field(ge=1, le=1_000_000_000)
    period_seconds: float = Field(default=60.0, gt=0, le=MAX_REFILL_S, allow_inf_nan=False)
    burst: int | None = Field(default=None, ge=1, le=1_000_000_000)
    max_wait_seconds: float = Field(default=0, ge=0, le=MAX_WAIT_S, allow_inf_nan=False)
    """The longest time that a call waits instead of being refused."""

    @model_validator(mode="after")
    def _refills(self) -> Self:
        if self.period_seconds * (self.burst or self.limit) / self.limit > MAX_REFILL_S:
            raise ValueError("a used `burst` would take more than 366 days to be free again")
        return self

    @property
    def id(self) -> str:
        """The name of its counters in the database. Another rate is another limit."""
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

__all__ = ["AllRateLimits", "Per", "RateLimitRule"]
