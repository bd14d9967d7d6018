"""What calls took together: what to add up, and the sums. Values only.

The fields bear the names that they have in envelopes. Sums are exact; money is decimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fumehood.budgets.model import BudgetStanding
from fumehood.core.call import Id
from fumehood.core.call_log import Moment
from fumehood.identity.agent import PrincipalId

Group = Literal["principal", "agent", "session", "tool", "day"]
GROUPS: tuple[Group, ...] = ("principal", "agent", "session", "tool", "day")

MAX_ROWS = 5000
MAX_STANDINGS = 1000

_ONE = f"({'|'.join(GROUPS)})"


class UsageQuery(BaseModel):
    """What to add up. Absent filters hold nothing back."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    by: str = Field(default="tool", pattern=f"^{_ONE}(,{_ONE}){{0,4}}$")
    """`principal`, `agent`, `session`, `tool` and `day` (UTC), with commas between; each once."""

    since: Moment | None = None
    until: Moment | None = None
    """The first moment that is too late."""

    agent: Id | None = None
    session: Id | None = None
    tool: str | None = Field(default=None, min_length=1, max_length=120)
    """`name`, or `name@version`."""

    @field_validator("by", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """A program may give a list."""
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("by")
    @classmethod
    def _each_once(cls, value: str) -> str:
        names = value.split(",")
        if len(set(names)) != len(names):
            raise ValueError("names one thing twice")
        return value

    @property
    def groups(self) -> tuple[Group, ...]:
        """What `by` names, in its order."""
        return cast("tuple[Group, ...]", tuple(self.by.split(",")))


class AllUsageQuery(UsageQuery):
    """The same of everybody's calls, or of one principal's."""

    principal: PrincipalId | None = None


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class UsageRow(_Value):
    """The sums of one group of calls; `errors` are those that did not end with OK."""

    group: dict[Group, str | None]
    """What they have in common: a value for each name in `by`."""

    calls: int
    errors: int
    input_tokens: int
    output_tokens: int
    tokens_used: int
    cost: dict[str, str]
    """Of each currency that was ever accounted in."""


class UsageTable(_Value):
    """What calls took, and what budgets have left.

    `has_more` says that there are more groups, or more budgets, than are shown. `total` counts
    all of them.
    """

    by: tuple[Group, ...]
    items: tuple[UsageRow, ...]
    total: UsageRow
    has_more: bool
    budgets: tuple[BudgetStanding, ...] = ()

    def with_budgets(self, standings: Sequence[BudgetStanding]) -> UsageTable:
        """The same table with these budgets, up to a limit."""
        has_more = self.has_more or len(standings) > MAX_STANDINGS
        shown = tuple(standings[:MAX_STANDINGS])
        return self.model_copy(update={"budgets": shown, "has_more": has_more})


__all__ = [
    "GROUPS",
    "MAX_ROWS",
    "MAX_STANDINGS",
    "AllUsageQuery",
    "Group",
    "UsageQuery",
    "UsageRow",
    "UsageTable",
]
