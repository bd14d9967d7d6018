"""Budgets: how much may be spent, by whom, on what, in how long. Values only.

Money is decimal. A budget's counter is found by what its `per` names: with `("agent", "day")`
each agent has its own, every day anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum


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


__all__ = ["Amounts", "Spender", "Unit"]
