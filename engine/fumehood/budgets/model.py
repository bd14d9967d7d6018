"""Budgets and usage as plain values: limits, what is left of them, and sums of past calls.

Money is decimal, and sums are exact. A budget has one counter for each combination of its `per`
keys: with `per = ("agent",)`, one for each agent. With the period `day`, new counters begin every
day (UTC). Fields of usage have the same names as in envelopes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, cast
from urllib.parse import quote, unquote

from pydantic import AwareDatetime, Field, field_validator

from fumehood.budgets.settings import Per, Period, Unit
from fumehood.core.call import Id
from fumehood.core.call_log import Moment
from fumehood.core.json_types import Written
from fumehood.core.value import Value
from fumehood.identity.model import PrincipalId


@dataclass(frozen=True, slots=True)
class Spender:
    """The caller and the tool of a call."""

    principal_id: str
    agent_id: str | None
    session_id: str | None
    tool: str


@dataclass(frozen=True, slots=True)
class Amounts:
    """The amounts that a call takes from budgets, expected or actual."""

    calls: int = 1
    tokens: int = 0
    money: Decimal = Decimal(0)


class Subject(NamedTuple):
    """The owner of a counter: the keys by which a budget or rate limit counts.

    A session includes its principal. A call without an agent or session is counted under its
    principal, so such a call neither escapes a limit nor uses up another caller's limit.
    """

    principal: str | None = None
    agent: str | None = None
    session: str | None = None
    tool: str | None = None

    @property
    def text(self) -> str:
        """The subject as it is stored, such as `agent=a;tool=b`."""
        return ";".join(f"{name}={quote(value, safe=':@')}" for name, value in self.parts.items())

    @property
    def parts(self) -> dict[str, str]:
        """The keys that are set, with their values."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Parse a text that `text` returned. Raises ValueError or TypeError for other texts."""
        pairs = (part.split("=") for part in text.split(";") if part)
        return cls(**{name: unquote(value) for name, value in pairs})


def subject_of(spender: Spender, per: tuple[Per, ...]) -> Subject:
    """Return the owner of the counter to which a call is added."""
    by_agent = "agent" in per
    by_session = "session" in per
    needs_principal = (
        "principal" in per or by_session or (by_agent and spender.agent_id is None)
    )  # fmt: skip
    return Subject(
        spender.principal_id if needs_principal else None,
        spender.agent_id if by_agent else None,
        spender.session_id if by_session else None,
        spender.tool if "tool" in per else None,
    )


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A budget that has too little left for a call.

    Amounts are integers, except money, which is a text with six decimal places. `left` is neither
    spent nor held for running calls; `needed` is what the call would take.
    """

    budget: str
    unit: Unit
    limit: int | str
    left: int | str
    needed: int | str
    resets_at: datetime | None
    """The time of the budget's reset, or None if it does not reset."""
    subject: Subject
    """The owner of the budget's counter."""


class BudgetStanding(Value):
    """What is left of one limit of a budget, and the owner of the budget's counter (`subject`).

    `held` is the amount reserved for running calls. Money is a text with six decimal places.
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
        """Return the unit as shown to people. For money, this is the currency."""
        return currency if self.unit is Unit.MONEY else self.unit.value


Group = Literal["principal", "agent", "session", "tool", "day"]
GROUPS: tuple[Group, ...] = ("principal", "agent", "session", "tool", "day")

MAX_ROWS = 5000
"""Maximum number of rows in a usage table, and of budgets shown with it."""

_ONE = f"({'|'.join(GROUPS)})"


class UsageQuery(Value):
    """A usage query: which calls to sum up, and how to group them. An absent filter excludes
    nothing.
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
        """Accept a list of names, which programs may pass, as well as a text."""
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
        """The names in the field `by`, in order."""
        return cast("tuple[Group, ...]", tuple(self.by.split(",")))


class AllUsageQuery(UsageQuery):
    """A usage query over all calls, or over those of one principal."""

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
    """Currency in the call log → amount."""


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

    def with_budgets(self, standings: Sequence[BudgetStanding], currency: str) -> UsageTable:
        """Return the same table with these budgets, at most `MAX_ROWS` of them."""
        has_more = self.has_more or len(standings) > MAX_ROWS
        shown = tuple(standings[:MAX_ROWS])
        return self.model_copy(
            update={"budgets": shown, "currency": currency, "has_more": has_more}
        )
