"""The name table: every name that an expression may use, and its value.

Guest side, the second table. Invariants: nothing here returns an object from which anything but
numbers, lists and tuples can be reached; each function that can grow its result is the version of
`sizes`.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fumehood.guest.interpreter import sizes

CONSTANTS: Mapping[str, float] = {
    "pi": math.pi,
    "e": math.e,
    "tau": math.tau,
    "inf": math.inf,
    "nan": math.nan,
}

_WEIGHED: Mapping[str, Callable[..., Any]] = {
    "comb": sizes.combinations,
    "factorial": sizes.factorial,
    "lcm": sizes.least_common_multiple,
    "perm": sizes.permutations,
    "pow": sizes.power,
    "prod": sizes.product,
    "round": sizes.rounded,
    "sum": sizes.total,
}

for _name, _function in _WEIGHED.items():
    _function.__qualname__ = _name  # which Python writes into errors about arguments

_PLAIN = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign",
    "cos", "cosh", "degrees", "dist", "erf", "erfc", "exp", "exp2", "expm1", "fabs",
    "floor", "fmod", "fsum", "gamma", "gcd", "hypot", "isclose", "isfinite", "isinf",
    "isnan", "isqrt", "ldexp", "lgamma", "log", "log10", "log1p", "log2", "modf",
    "nextafter", "radians", "remainder", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
    "ulp", "frexp",
)  # fmt: skip

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in _PLAIN},
    **_WEIGHED,
    "abs": abs,
    "bool": bool,
    "divmod": divmod,
    "float": float,
    "int": int,
    "len": len,
    "max": max,
    "min": min,
    "sorted": sorted,
}


class NameRefused(Exception):
    """The expression uses an unknown name, which the message gives."""


def check(nodes: Sequence[ast.AST]) -> None:
    """Check each name in its position: functions may only be called.

    Raises:
        NameRefused: an unknown name, a function used as a value, or a constant called.
    """
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if not isinstance(node, ast.Name):
            continue
        if id(node) in called:
            if node.id not in FUNCTIONS:
                raise NameRefused(_unknown(node.id, FUNCTIONS, "function"))
        elif node.id not in CONSTANTS:
            if node.id in FUNCTIONS:
                raise NameRefused(f"{node.id} is a function; call it, as in {node.id}(2)")
            raise NameRefused(_unknown(node.id, CONSTANTS, "name"))


def symbols() -> dict[str, Any]:
    """A new symbol table for the evaluator."""
    return {**CONSTANTS, **FUNCTIONS}


def _unknown(name: str, known: Mapping[str, Any], kind: str) -> str:
    close = difflib.get_close_matches(name[:40], known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    shown = ascii(name if len(name) <= 40 else name[:40] + "…")
    return f"the calculator has no {kind} {shown}{hint}"
