"""Usage as plain values: sums of past calls, and what is left of limits on spending.

Money is decimal, and sums are exact. Fields of usage have the same names as in envelopes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, cast

from pydantic import AwareDatetime, Field, field_validator

from fumehood.core.call import Id, PrincipalId
from fumehood.core.call_log import Moment
from fumehood.core.json_types import Written
from fumehood.core.value import Value


class Period(StrEnum):
    """The period after which a budget resets. `total` means never."""

    DAY = "day"
    TOTAL = "total"


class Unit(StrEnum):
    """The unit of an amount that a budget limits."""

    CALLS = "calls"
    TOKENS = "tokens"
    MONEY = "money"
    REQUESTS = "requests"
    NETWORK_BYTES = "network_bytes"


class BudgetStanding(Value):
    """One limit of a budget: how much is spent, held and left.

    `subject` says to whom the budget's counter belongs. `held` is the amount reserved for running
    calls. Money is a text with six decimal places.
    """

    budget: str
    subject: dict[str, str]
    """For example `{"agent": "a"}`; empty for a budget shared by all callers."""

    period: Period
    unit: Unit
    limit: int | str
    spent: int | str
    held: int | str
    left: int | str
    resets_at: AwareDatetime | None

    def unit_in(self, currency: str) -> str:
        """Return the name of the unit that people see. For money, this is the currency."""
        return currency if self.unit is Unit.MONEY else self.unit.value


Group = Literal["principal", "agent", "session", "tool", "day"]
GROUPS: tuple[Group, ...] = ("principal", "agent", "session", "tool", "day")

MAX_ROWS = 5000
"""Maximum number of rows in a usage table, and of budgets shown with it."""

_ONE = f"({'|'.join(GROUPS)})"


class UsageQuery(Value):
    """A usage query: which calls to sum up, and how to group them. A filter that is absent excludes
    no calls.
    """

    by: Annotated[str, Written(str | Iterable[str])] = Field(
        default="tool", pattern=f"^{_ONE}(,{_ONE}){{0,4}}$"
    )
    """`principal`, `agent`, `session`, `tool` and `day` (UTC), separated by commas, each at most
    once."""

    since: Moment | None = None
    until: Moment | None = None
    """Calls at or after this time are excluded."""

    agent: Id | None = None
    session: Id | None = None
    tool: str | None = Field(default=None, min_length=1, max_length=160)
    """`name`, or `name@version`."""

    @field_validator("by", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Convert an iterable of names, which a program may pass, to the text that the field
        holds.
        """
        is_text = isinstance(value, str | bytes)
        return value if is_text or not isinstance(value, Iterable) else ",".join(map(str, value))

    @field_validator("by")
    @classmethod
    def _each_once(cls, value: str) -> str:
        names = value.split(",")
        if len(set(names)) != len(names):
            raise ValueError("names one thing twice")
        return value

    @property
    def groups(self) -> tuple[Group, ...]:
        """The names in the field `by`, in the same order."""
        return cast("tuple[Group, ...]", tuple(self.by.split(",")))


class AllUsageQuery(UsageQuery):
    """A usage query over the calls of all principals, or of one principal."""

    principal: PrincipalId | None = None


class UsageRow(Value):
    """The total usage of one group of calls."""

    group: dict[Group, str | None]
    """The group's value for each name in `by`."""

    calls: int
    errors: int
    """Calls that did not end with OK."""
    failed: int
    """Calls that failed because of a program, the engine or a service. Refused, denied and invalid
    calls are not included."""
    input_tokens: int
    output_tokens: int
    tokens_used: int
    cost: dict[str, str]
    """Maps each currency in the call log to the amount in this currency."""


class UsageTable(Value):
    """Usage of past calls, and what is left of budgets.

    `has_more` is true if there are more groups or budgets than are shown. `total` is the sum of all
    groups, including those that are not shown.
    """

    by: tuple[Group, ...]
    items: tuple[UsageRow, ...]
    total: UsageRow
    has_more: bool
    budgets: tuple[BudgetStanding, ...] = ()
    currency: str = "USD"
    """Currency of the budgets. Past calls may have had other currencies."""

    def with_standings(self, standings: Sequence[BudgetStanding], currency: str) -> UsageTable:
        """Return a copy of the table that shows these budgets, at most `MAX_ROWS` of them.
        `currency` is the currency of the budgets.
        """
        has_more = self.has_more or len(standings) > MAX_ROWS
        shown = tuple(standings[:MAX_ROWS])
        return self.model_copy(
            update={"budgets": shown, "currency": currency, "has_more": has_more}
        )
