"""Size estimates: arithmetic that refuses an operation before computing it if the result would be
too large.

Guest side. After the node table and the name table, this is the third check of the calculator.
`9**9**9` is a short text, but would take years. So every operation whose result can be much larger
than its text is estimated first. Invariant: no result of an operation is an integer over 4,300
digits or a sequence over 10,000 elements.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from fumehood.protocol.strict_json import MAX_INTEGER, MAX_INTEGER_DIGITS

MAX_ELEMENTS = 10_000


class TooLarge(Exception):
    """The result would exceed a size limit, so it was not computed."""


def checked(value: Any) -> Any:
    """Return `value` if it is within the limits.

    Raises:
        TooLarge: an integer has more than 4,300 digits, or a sequence more than 10,000 elements.
    """
    if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise TooLarge(f"the result has more than {MAX_INTEGER_DIGITS} digits")
    if isinstance(value, list | tuple) and len(value) > MAX_ELEMENTS:
        raise TooLarge(f"the list has more than {MAX_ELEMENTS} elements")
    return value


def check_literals(nodes: Iterable[ast.AST]) -> None:
    """Check the size of the number literals among `nodes`.

    Raises:
        TooLarge: a literal has more than 4,300 digits.
    """
    for node in nodes:
        # Python itself limits only decimal literals, but not hexadecimal, octal and binary ones.
        if isinstance(node, ast.Constant):
            checked(node.value)


def bits(value: int) -> float:
    """Return the logarithm to base 2 of an integer's magnitude, which is its size in bits as a real
    number.
    """
    return math.log2(abs(value)) if value else 0.0


def divide(left: Any, right: Any) -> Any:
    """Implement `/`. The result is an integer if two integers divide exactly, otherwise a
    double.
    """
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return left / right


def power(base: Any, exponent: Any, modulus: Any = None) -> Any:
    """Implement `**` and `pow`. Raises TooLarge if the result would exceed the limits."""
    if modulus is not None:
        return pow(base, exponent, modulus)
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        _weigh(_times(bits(base), exponent))
    return base**exponent


def shift_left(value: Any, count: Any) -> Any:
    """Implement `<<`. Raises TooLarge if the result would exceed the limits."""
    if isinstance(value, int) and isinstance(count, int) and value and count > 0:
        _weigh(bits(value) + _times(1.0, count))
    return value << count


def multiply(left: Any, right: Any) -> Any:
    """Implement `*` for two numbers, or for a list and a number. Raises TooLarge if the result
    would exceed the limits.
    """
    for sequence, count in ((left, right), (right, left)):
        is_repeated = isinstance(sequence, list | tuple) and isinstance(count, int)
        if is_repeated and len(sequence) * count > MAX_ELEMENTS:
            raise TooLarge(f"the list would have more than {MAX_ELEMENTS} elements")
    return left * right


def factorial(value: Any) -> int:
    """Implement `!` and `factorial`. Raises TooLarge if the result would exceed the limits."""
    number = _whole(value)
    _weigh(number - 1)  # every factor but the first is at least two
    return int(checked(math.factorial(number)))


def combinations(total: Any, chosen: Any) -> int:
    """Implement `comb`. Raises TooLarge if the result would exceed the limits."""
    if isinstance(total, int) and isinstance(chosen, int) and total >= chosen >= 0:
        # At least (total / fewer) ** fewer, and less than 3 ** fewer times as much.
        fewer = min(chosen, total - chosen)
        _weigh(_times(bits(total) - bits(fewer), fewer))
    return int(checked(math.comb(total, chosen)))


def permutations(total: Any, chosen: Any = None) -> int:
    """Implement `perm`. Raises TooLarge if the result would exceed the limits."""
    if chosen is None:
        return factorial(total)
    if isinstance(total, int) and isinstance(chosen, int) and total >= chosen >= 0:
        # Every factor is greater than total - chosen, so the result is at least this large.
        _weigh(_times(bits(max(total - chosen, 1)), chosen))
        if chosen > MAX_ELEMENTS:
            raise TooLarge(f"the result has more than {MAX_INTEGER_DIGITS} digits")
    return math.perm(total, chosen)


def product(values: Iterable[Any], start: Any = 1) -> Any:
    """Implement `prod`. Raises TooLarge if the result would exceed the limits."""
    result = start
    for value in _numbers(values):
        result = checked(result * value)
    return result


def total(values: Iterable[Any], start: Any = 0) -> Any:
    """Implement `sum`, but only for numbers. Raises TypeError for other values, and TooLarge if the
    result would exceed the limits.
    """
    result = start
    # Only numbers, because adding many lists takes quadratic time.
    for value in _numbers([start, *values])[1:]:
        result = checked(result + value)
    return result


def least_common_multiple(*values: int) -> int:
    """Implement `lcm`. Raises TooLarge if the result would exceed the limits."""
    result = 1
    for value in values:
        result = checked(math.lcm(result, value))
    return result


def rounded(value: Any, digits: Any = None) -> Any:
    """Implement `round`. Raises TooLarge if an integer is rounded to more than 4,300 places."""
    # Rounding an integer to -n places computes 10**n.
    if digits is not None and isinstance(value, int) and abs(_whole(digits)) > MAX_INTEGER_DIGITS:
        raise TooLarge(f"round() takes at most {MAX_INTEGER_DIGITS} places")
    return round(value, digits)


BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: multiply,
    ast.Div: divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: power,
    ast.LShift: shift_left,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}


def _times(factor: float, count: int) -> float:
    """Return `factor * count`. If a float cannot hold the product, return infinity, which exceeds
    every limit.
    """
    if factor == 0:
        return 0.0
    try:
        return factor * count
    except OverflowError:
        return math.inf


def _weigh(estimated_bits: float) -> None:
    # One bit of tolerance for rounding errors of the estimate; `checked` checks the real result.
    if estimated_bits > MAX_INTEGER.bit_length() + 1:
        raise TooLarge(f"the result would have more than {MAX_INTEGER_DIGITS} digits")


def _numbers(values: Iterable[Any]) -> list[Any]:
    numbers = list(values)
    if not all(isinstance(value, int | float) for value in numbers):
        raise TypeError("only numbers can be added up or multiplied")
    return numbers


def _whole(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        raise TypeError("a whole number is needed")
    return value
