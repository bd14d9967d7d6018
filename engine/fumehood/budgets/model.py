"""Budgets as plain values: who spends, which amounts a call uses, and which counter is charged.

Money is decimal. A budget has one counter for each combination of its `per` keys: with `per =
("agent",)`, one for each agent. With the period `day`, new counters begin every day (UTC).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple
from urllib.parse import quote, unquote

from fumehood.budgets.settings import Per
from fumehood.core.usage_table import Unit


@dataclass(frozen=True, slots=True)
class Spender:
    """The caller and the tool of a call, by which the call is counted."""

    principal_id: str
    agent_id: str | None
    session_id: str | None
    tool: str


@dataclass(frozen=True, slots=True)
class Amounts:
    """The expected or actual amounts that a call uses of its budgets."""

    calls: int = 1
    tokens: int = 0
    money: Decimal = Decimal(0)


class Subject(NamedTuple):
    """The subject of a counter: the values of the keys by which a budget or rate limit counts.

    A subject with a session also contains the session's principal. If a limit counts by agent or
    session, a call without one is counted under its principal. So this call neither escapes the
    limit nor uses up another caller's.
    """

    principal: str | None = None
    agent: str | None = None
    session: str | None = None
    tool: str | None = None

    @property
    def text(self) -> str:
        """The subject in its stored form, such as `agent=a;tool=b`."""
        return ";".join(f"{name}={quote(value, safe=':@')}" for name, value in self.parts.items())

    @property
    def parts(self) -> dict[str, str]:
        """The keys of the subject that are set, with their values."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Parse a subject in the form of the property `text`. Raises ValueError or TypeError for
        other texts.
        """
        pairs = (part.split("=") for part in text.split(";") if part)
        return cls(**{name: unquote(value) for name, value in pairs})


def subject_of(spender: Spender, per: tuple[Per, ...]) -> Subject:
    """Return the subject to whose counter a call is added, for a limit that counts by the keys
    `per`.
    """
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

    Amounts are integers, except money, which is a text with six decimal places. `left` is the
    amount that is neither spent nor held for running calls. `needed` is the amount that the call
    would use.
    """

    budget: str
    unit: Unit
    limit: int | str
    left: int | str
    needed: int | str
    resets_at: datetime | None
    """The time at which the budget resets, or None if it never resets."""
    subject: Subject
    """The subject of the exceeded counter."""
