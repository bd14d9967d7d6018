"""What a call cost: tokens and money. Money is decimal, never float."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from enum import StrEnum
from typing import Protocol

MICRO = Decimal("0.000001")


class TextKind(StrEnum):
    """What a text is, which decides how many characters make a token."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    CODE = "code"


CHARACTERS_PER_TOKEN = {
    TextKind.TEXT: 4.0,
    TextKind.JSON: 3.5,
    TextKind.MARKDOWN: 3.5,
    TextKind.CODE: 2.0,
}
"""*Source*: mission E2."""


class TokenCounter(Protocol):
    """Counts the tokens of a text; `estimated` says whether its counts are guesses."""

    estimated: bool

    def count(self, characters: str, kind: TextKind) -> int: ...


class EstimatingCounter:
    """The default counter: characters divided by a constant, rounded up."""

    estimated = True

    def count(self, characters: str, kind: TextKind) -> int:
        return -int(-len(characters) // CHARACTERS_PER_TOKEN[kind])


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices on resources. Zero means that the resource is free."""

    cpu_second: Decimal = Decimal(0)
    gb_second: Decimal = Decimal(0)
    currency: str = "USD"


def money(amount: Decimal) -> str:
    """An amount as the envelope shows it: six decimal places."""
    return str(amount.quantize(MICRO, rounding=ROUND_HALF_EVEN))
