"""The operator's settings of budgets. Values only."""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Per = Literal["principal", "agent", "session", "tool"]
"""What a budget is counted for each of."""


class Period(StrEnum):
    """How long a budget has to last."""

    DAY = "day"
    TOTAL = "total"


class BudgetRule(BaseModel):
    """One budget: its limits, for each of what `per` names. At least one limit is given.

    A call without an agent is covered only if `agents` is empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    per: tuple[Per, ...] = ()
    period: Period = Period.DAY
    tools: tuple[str, ...] = ()
    """The tools that it counts, by name or with a written `*`; empty means all of them."""
    agents: tuple[str, ...] = ()
    """The agents that it counts, in the same way."""
    calls: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    money: Decimal | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.calls is None and self.tokens is None and self.money is None:
            raise ValueError("a budget needs `calls`, `tokens` or `money`")
        return self


def _require_unique_names(value: tuple[BudgetRule, ...]) -> tuple[BudgetRule, ...]:
    names = [budget.name for budget in value]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two budgets have the name {twice}")
    return value


AllBudgets = Annotated[tuple[BudgetRule, ...], AfterValidator(_require_unique_names)]

__all__ = ["AllBudgets", "BudgetRule", "Per", "Period"]
