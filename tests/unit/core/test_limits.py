"""Limits: absent is the wall's default, and nothing is ever over a wish or the ceiling."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.limits import Limit, WallLimits, smallest

amounts = st.floats(0.001, 1e6)
wishes = st.lists(st.none() | amounts, max_size=4)
WALL = WallLimits(30, 600, 512, 2048, 128, 1 << 20)


@pytest.mark.row("T2")
@given(amounts, amounts, wishes)
def test_effective_limit_is_never_over_ceiling_or_wish(
    default: float, ceiling: float, wished: list[float | None]
) -> None:
    effective = smallest(default, ceiling, *wished)
    assert effective <= ceiling
    assert all(effective <= wish for wish in wished if wish is not None)


@pytest.mark.row("T2")
@given(amounts, amounts, wishes)
def test_effective_limit_is_one_of_those_given(
    default: float, ceiling: float, wished: list[float | None]
) -> None:
    assert smallest(default, ceiling, *wished) in [default, ceiling, *wished]


@pytest.mark.row("T2")
@given(amounts, amounts, st.integers(0, 4))
def test_no_wish_at_all_means_the_default(default: float, ceiling: float, absent: int) -> None:
    assert smallest(default, ceiling, *[None] * absent) == min(default, ceiling)


@pytest.mark.row("T2")
@given(amounts, amounts, amounts)
def test_an_absent_wish_changes_nothing(default: float, ceiling: float, wish: float) -> None:
    assert smallest(default, ceiling, None, wish, None) == smallest(default, ceiling, wish)


@pytest.mark.row("T2")
@pytest.mark.parametrize(
    ("default", "ceiling", "wished", "effective"),
    [
        (5, 30, (), 5),
        (5, 30, (10,), 10),
        (5, 30, (60,), 30),
        (5, 30, (10, 2), 2),
        (5, 30, (None, 20), 20),
        (50, 30, (), 30),
    ],
)
def test_the_smallest_wins(
    default: float, ceiling: float, wished: tuple[float | None, ...], effective: float
) -> None:
    assert smallest(default, ceiling, *wished) == effective


def test_every_limit_of_the_walls_has_a_name() -> None:
    assert {limit.value for limit in Limit} == {
        "wall_time",
        "cpu_time",
        "memory",
        "output",
        "processes",
        "files",
        "network",
        "open_files",
        "file_size",
        "disk",
    }


def test_a_memory_limit_is_rounded_down_to_a_class_where_there_are_any() -> None:
    some = replace(WALL, memory_classes=(128, 256, 512))
    assert [some.memory_class(wish) for wish in (128, 255, 256, 9000)] == [128, 128, 256, 512]
    assert WALL.memory_class(77) == 77
