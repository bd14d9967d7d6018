"""The plain values of budgets: who spends, which amounts a call uses, and which counter is charged.

Money is decimal. A budget has one counter for each combination of values of its `per` keys. With
`per = ("agent",)`, for example, it has one counter for each agent. With the period `day`, new
counters begin every day (UTC).
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
    """Who makes a call, and the called tool. Budgets and rate limits count calls by these
    values.
    """

    principal_id: str
    agent_id: str | None
    session_id: str | None
    tool: str


@dataclass(frozen=True, slots=True)
class Amounts:
    """The amounts that a call uses of its budgets, either expected or actual."""

    calls: int = 1
    tokens: int = 0
    money: Decimal = Decimal(0)


class Subject(NamedTuple):
    """Identifies a counter of a budget or a rate limit. It has a value for each key by which the
    limit counts. Calls with the same values share a counter.

    A subject with a session also contains the session's principal. If a limit counts by agent or by
    session, calls without an agent or a session are counted under their principal. So these calls
    neither escape the limit nor use up the amount of another caller.
    """

    principal: str | None = None
    agent: str | None = None
    session: str | None = None
    tool: str | None = None

    @property
    def text(self) -> str:
        """The subject in the form that is stored, such as `agent=a;tool=b`."""
        return ";".join(f"{name}={quote(value, safe=':@')}" for name, value in self.parts.items())

    @property
    def parts(self) -> dict[str, str]:
        """The keys of the subject that have a value, with their values."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Return the subject for a text in the form of the property `text`.

        Raises ValueError or TypeError if the text has another form.
        """
        pairs = (part.split("=") for part in text.split(";") if part)
        return cls(**{name: unquote(value) for name, value in pairs})


def subject_of(spender: Spender, per: tuple[Per, ...]) -> Subject:
    """Return the subject under which a call of `spender` is counted, for a limit that counts by the
    keys `per`.
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
    amount of the limit that is neither spent nor held for running calls. `needed` is the amount
    that the refused call is expected to use.
    """

    budget: str
    unit: Unit
    limit: int | str
    left: int | str
    needed: int | str
    resets_at: datetime | None
    """The time at which the budget resets, or None if it never resets."""
    subject: Subject
    """The subject of the counter that would be exceeded."""
