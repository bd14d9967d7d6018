"""Budgets: how much may be spent, by whom, on what, in how long. Values only.

Money is decimal. A budget's counter is found by what its `per` names: with `per = ("agent",)`
each agent has its own, and with the period `day` a new one every day (UTC).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import quote, unquote

from pydantic import AwareDatetime, BaseModel, ConfigDict

from fumehood.budgets.settings import Per, Period


class Unit(StrEnum):
    """What is counted."""

    CALLS = "calls"
    TOKENS = "tokens"
    MONEY = "money"


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


__all__ = [
    "Amounts",
    "BudgetStanding",
    "Exceeded",
    "Spender",
    "Subject",
    "Unit",
    "subject_of",
]
