"""Size estimates: exact at 4,300 digits, and never in the way of what fits."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.guest.interpreter import sizes
from fumehood.guest.interpreter.sizes import MAX_ELEMENTS, TooLarge
from fumehood.protocol.strict_json import MAX_INTEGER, MAX_INTEGER_DIGITS

DIGITS_4300 = 10**4299
DIGITS_4301 = 10**4300

FITS: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    (sizes.power, (10, 4299), DIGITS_4300),
    (sizes.power, (-10, 4299), -DIGITS_4300),
    (sizes.power, (2, 14284), 2**14284),
    (sizes.power, (MAX_INTEGER, 1), MAX_INTEGER),
    (sizes.power, (2, -3), 0.125),
    (sizes.power, (2.0, 0.5), 2.0**0.5),
    (sizes.power, (7, 10**6, 13), pow(7, 10**6, 13)),
    (sizes.shift_left, (1, 14284), 1 << 14284),
    (sizes.shift_left, (0, 10**9), 0),
    (sizes.multiply, (DIGITS_4300, 9), DIGITS_4300 * 9),
    (sizes.multiply, ([0], MAX_ELEMENTS), [0] * MAX_ELEMENTS),
    (sizes.multiply, ([1, 2], -5), []),
    (sizes.factorial, (1520,), math.factorial(1520)),
    (sizes.factorial, (0,), 1),
    (sizes.factorial, (5.0,), 120),
    (sizes.combinations, (5000, 2), math.comb(5000, 2)),
    (sizes.combinations, (10**9, 10**9 - 2), math.comb(10**9, 2)),
    (sizes.permutations, (10**6, 2), 10**6 * (10**6 - 1)),
    (sizes.permutations, (5,), 120),
    (sizes.product, ([2, 3, 4],), 24),
    (sizes.product, ([DIGITS_4300, 9],), DIGITS_4300 * 9),
    (sizes.total, ([1, 2.5],), 3.5),
    (sizes.total, ([DIGITS_4300] * 9,), DIGITS_4300 * 9),
    (sizes.least_common_multiple, (4, 6), 12),
    (sizes.rounded, (2.5,), 2),
    (sizes.rounded, (1234, -2), 1200),
    (sizes.rounded, (1.25, 1), 1.2),
    (sizes.divide, (6, 3), 2),
    (sizes.divide, (DIGITS_4300, 10), 10**4298),
    (sizes.divide, (1, 4), 0.25),
    (sizes.power, (1, 10**400), 1),
    (sizes.power, (0, 10**400), 0),
    (sizes.power, (-1, 10**400), 1),
    # within the limit, and the estimate is never too high
    (sizes.combinations, (14_000, 7000), math.comb(14_000, 7000)),
    (sizes.combinations, (14_200, 7000), math.comb(14_200, 7000)),
    (sizes.permutations, (5, 6), 0),
    (sizes.combinations, (5, 6), 0),
]

TOO_LARGE: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (sizes.power, (10, 4301)),
    (sizes.power, (9, 9**9)),
    (sizes.power, (MAX_INTEGER, 2)),
    (sizes.shift_left, (1, 14290)),
    (sizes.shift_left, (1, 10**12)),
    (sizes.multiply, ([0], MAX_ELEMENTS + 1)),
    (sizes.multiply, (10**9, [0])),
    (sizes.multiply, ((0, 0), 5001)),
    (sizes.factorial, (1600,)),
    (sizes.factorial, (10**6,)),
    (sizes.combinations, (10**6, 10**5)),
    (sizes.permutations, (10**6, 10**5)),
    (sizes.permutations, (10**6,)),
    (sizes.product, ([DIGITS_4300, 10],)),
    (sizes.total, ([MAX_INTEGER, 1],)),
    (sizes.least_common_multiple, (DIGITS_4300, DIGITS_4300 + 1)),
    (sizes.rounded, (5, -(10**9))),
]


def _id(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.row("S4")
@pytest.mark.parametrize(("function", "arguments", "result"), FITS, ids=_id)
def test_result_within_the_limit_is_computed(
    function: Callable[..., Any], arguments: tuple[Any, ...], result: Any
) -> None:
    assert sizes.checked(function(*arguments)) == result


BEYOND_A_DOUBLE = [
    (sizes.power, (2, 10**400)),
    (sizes.shift_left, (1, 10**400)),
    (sizes.factorial, (10**306,)),
    (sizes.factorial, (10**400,)),
    (sizes.combinations, (10**400, 10**399)),
    (sizes.permutations, (10**400, 10**399)),
]


@pytest.mark.row("S4")
@pytest.mark.parametrize(("function", "arguments"), [*TOO_LARGE, *BEYOND_A_DOUBLE], ids=_id)
def test_oversized_result_is_refused_before_it_is_computed(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(TooLarge):
        function(*arguments)


@pytest.mark.row("S4")
def test_digit_limit_is_exact() -> None:
    assert len(str(MAX_INTEGER)) == MAX_INTEGER_DIGITS
    for fits in (MAX_INTEGER, -MAX_INTEGER, DIGITS_4300):
        assert sizes.checked(fits) is fits
    for too_large in (MAX_INTEGER + 1, -MAX_INTEGER - 1, DIGITS_4301):
        with pytest.raises(TooLarge):
            sizes.checked(too_large)


@pytest.mark.row("S4")
def test_element_limit_is_exact() -> None:
    for make in (list, tuple):
        assert sizes.checked(make(range(MAX_ELEMENTS)))
        with pytest.raises(TooLarge):
            sizes.checked(make(range(MAX_ELEMENTS + 1)))


@pytest.mark.parametrize("value", [["a"], [[1]], [(1,)], [None], ["1", "2"]])
def test_sum_and_product_of_non_numbers_are_refused(value: list[Any]) -> None:
    with pytest.raises(TypeError):
        sizes.total(value)
    with pytest.raises(TypeError):
        sizes.product(value)


MATCHING: list[tuple[Callable[..., Any], Callable[..., Any], tuple[st.SearchStrategy[int], ...]]] = [
    (sizes.power, operator.pow, (st.integers(-(10**40), 10**40), st.integers(0, 200))),
    (sizes.shift_left, operator.lshift,
     (st.integers(-(10**4200), 10**4200), st.integers(0, 15_000))),
    (sizes.factorial, math.factorial, (st.integers(0, 1700),)),
    (sizes.permutations, math.perm, (st.integers(0, 2000), st.integers(0, 2000))),
    (sizes.combinations, math.comb, (st.integers(0, 5000), st.integers(0, 5000))),
]  # fmt: skip


@pytest.mark.parametrize(("function", "python", "numbers"), MATCHING, ids=_id)
@given(data=st.data())
def test_result_matches_python_up_to_the_limit(
    function: Callable[..., Any], python: Callable[..., Any], numbers: Any, data: st.DataObject
) -> None:
    arguments = [data.draw(number) for number in numbers]
    expected = python(*arguments)
    if abs(expected) <= MAX_INTEGER:
        assert sizes.checked(function(*arguments)) == expected
    else:
        with pytest.raises(TooLarge):
            sizes.checked(function(*arguments))
