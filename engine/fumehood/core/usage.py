"""The cost of a call: tokens and money. Money is decimal, never float."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal
from enum import StrEnum
from typing import Protocol

from pydantic import Field

from fumehood.core.value import Value

MICRO = Decimal("0.000001")


class TextKind(StrEnum):
    """The kind of a text, which determines the number of characters per token."""

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
"""Maps the kind of a text to the estimated number of characters per token."""


class TokenCounter(Protocol):
    """Counts the tokens of a text. `estimated` is True if the counts are only estimates."""

    estimated: bool

    def count(self, characters: str, kind: TextKind) -> int: ...


class EstimatingCounter:
    """The default counter. It estimates tokens as the number of characters divided by
    `CHARACTERS_PER_TOKEN`, rounded up.
    """

    estimated = True

    def count(self, characters: str, kind: TextKind) -> int:
        return -int(-len(characters) // CHARACTERS_PER_TOKEN[kind])


class Prices(Value):
    """The operator's prices for resources. Zero means that the resource is free."""

    cpu_second: Decimal = Field(default=Decimal(0), ge=0)
    gb_second: Decimal = Field(default=Decimal(0), ge=0)
    """Price of one GB of memory limit for one second."""
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$")


def money(amount: Decimal) -> str:
    """Return an amount of money in the form of the envelope: with six decimal places."""
    return str(amount.quantize(MICRO, rounding=ROUND_HALF_EVEN))
