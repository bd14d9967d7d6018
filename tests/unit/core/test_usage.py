"""Usage: estimated tokens are characters divided by the mission's constants; money is exact."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.usage import EstimatingCounter, TextKind, money

PER_TOKEN = {"text": 4.0, "json": 3.5, "markdown": 3.5, "code": 2.0}


@pytest.mark.row("E2")
@pytest.mark.parametrize(
    ("kind", "characters", "tokens"),
    [
        ("text", 0, 0),
        ("text", 1, 1),
        ("text", 4, 1),
        ("text", 5, 2),
        ("json", 7, 2),
        ("json", 8, 3),
        ("markdown", 7, 2),
        ("code", 2, 1),
        ("code", 3, 2),
    ],
)
def test_tokens_are_estimated_as_the_mission_says(kind: str, characters: int, tokens: int) -> None:
    assert EstimatingCounter().count("x" * characters, TextKind(kind)) == tokens


@pytest.mark.row("E2")
@given(st.integers(0, 5000), st.sampled_from(TextKind))
def test_estimates_are_rounded_up(characters: int, kind: TextKind) -> None:
    expected = math.ceil(characters / PER_TOKEN[kind])
    assert EstimatingCounter().count("x" * characters, kind) == expected


@pytest.mark.row("E2")
def test_estimates_are_marked_as_such() -> None:
    assert EstimatingCounter().estimated is True


@pytest.mark.row("E3")
@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("0", "0.000000"),
        ("0.1", "0.100000"),
        ("1E-7", "0.000000"),
        ("0.0000005", "0.000000"),
        ("0.0000015", "0.000002"),
        ("1E+3", "1000.000000"),
        ("123456789.1234567", "123456789.123457"),
    ],
)
def test_money_is_shown_with_six_places_and_no_exponent(amount: str, shown: str) -> None:
    assert money(Decimal(amount)) == shown


@pytest.mark.row("E3")
@given(st.decimals(0, 10**9, places=6))
def test_micro_amounts_are_shown_exactly(amount: Decimal) -> None:
    assert Decimal(money(amount)) == amount
