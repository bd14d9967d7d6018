"""Budgets: how much may be spent, by whom, on what, in how long. Values only.

Money is decimal. A budget's counter is found by what its `per` names: with `per = ("agent",)`
each agent has its own, and with the period `day` a new one every day (UTC).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import quote, unquote

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator

from fumehood.core.call import Id
from fumehood.core.call_log import Moment
from fumehood.identity.model import PrincipalId

Per = Literal["principal", "agent", "session", "tool"]
"""What a budget is counted for each of."""


class Unit(StrEnum):
    """What is counted."""

    CALLS = "calls"
    TOKENS = "tokens"
    MONEY = "money"


class Period(StrEnum):
    """How long a budget has to last."""

    DAY = "day"
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Spender:
    """Who makes a call, of what."""

    principal_id: str
    agent_id: str | None
    session_id: str | None
    tool: str


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a call takes, or is expected to take."""

    calls: int = 1
    tokens: int = 0
    money: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """So much for each of what `per` names; of the three limits at least one is given.

    `tools` and `agents` are names, exact or with a written `*`. None means every one; a call
    without an agent is covered only where `agents` has none.
    """

    name: str
    per: tuple[Per, ...] = ()
    period: Period = Period.DAY
    tools: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    calls: int | None = None
    tokens: int | None = None
    money: Decimal | None = None


class Subject(NamedTuple):
    """Whose counter it is: the part of a spender that a budget tells apart.

    A session belongs to a principal, so that it has one here, too. What has no agent or no
    session is counted with its principal, and so escapes no limit and uses up nobody else's.
    """

    principal: str | None = None
    agent: str | None = None
    session: str | None = None
    tool: str | None = None

    @property
    def text(self) -> str:
        """As the table keeps it: `agent=a;tool=b`."""
        return ";".join(f"{name}={quote(value, safe=':@')}" for name, value in self.parts.items())

    @property
    def parts(self) -> dict[str, str]:
        """What it names."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def parse(cls, text: str) -> Subject:
        """The reverse of `text`. Raises ValueError or TypeError where it is none."""
        pairs = (part.split("=") for part in text.split(";") if part)
        return cls(**{name: unquote(value) for name, value in pairs})


def subject_of(spender: Spender, per: tuple[Per, ...]) -> Subject:
    """Whose counter a call goes to."""
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
    """The budget that has too little left for a call.

    Figures are whole numbers, of money a text with six decimal places. `left` is what neither
    was spent nor is held for calls that run.
    """

    budget: str
    unit: Unit
    limit: int | str
    left: int | str
    needed: int | str
    resets_at: datetime | None
    """None where it does not reset by itself."""
    subject: Subject
    """Whose it is."""


class BudgetStanding(BaseModel):
    """How much of one limit of one budget is left now, and for whom.

    `held` is reserved for calls that run. Money is a text with six decimal places.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    budget: str
    subject: dict[str, str]
    """Whose it is, such as `{"agent": "a"}`; empty means everybody's together."""

    period: Period
    unit: Unit
    limit: int | str
    spent: int | str
    held: int | str
    left: int | str
    resets_at: AwareDatetime | None


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
