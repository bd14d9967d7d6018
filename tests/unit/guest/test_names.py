"""The name table: functions are called, constants are used, and nothing else exists."""

from __future__ import annotations

import ast
import builtins
import math

import pytest

from fumehood.guest.interpreter import sizes
from fumehood.guest.interpreter.tables import CONSTANTS, FUNCTIONS, Refused, check_names


def _check(text: str) -> None:
    check_names(list(ast.walk(ast.parse(text, mode="eval"))))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_name_is_allowed_only_in_a_call(name: str) -> None:
    _check(f"{name}(1)")
    with pytest.raises(Refused, match="call it"):
        _check(name)
    with pytest.raises(Refused, match="call it"):
        _check(f"max({name}, 1)")


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_cannot_be_called(name: str) -> None:
    _check(f"{name} + 1")
    with pytest.raises(Refused, match="no function"):
        _check(f"{name}(1)")


@pytest.mark.row("S2")
def test_builtins_outside_the_table_are_refused() -> None:
    for name in set(dir(builtins)) - FUNCTIONS.keys() - {"None", "True", "False", "__debug__"}:
        with pytest.raises(Refused, match="no function"):
            _check(f"{name}(1)")
        with pytest.raises(Refused, match="no name"):
            _check(name)


@pytest.mark.parametrize(
    ("text", "hint"), [("sqr(2)", "sqrt"), ("factoral(5)", "factorial"), ("taau", "tau")]
)
def test_misspelt_name_gets_a_hint(text: str, hint: str) -> None:
    with pytest.raises(Refused, match=f"did you mean {hint}"):
        _check(text)


def test_functions_with_large_results_have_size_checks() -> None:
    weighed = {
        name for name, function in FUNCTIONS.items() if function.__module__ == sizes.__name__
    }
    assert weighed == {"comb", "factorial", "lcm", "perm", "pow", "prod", "round", "sum"}


def test_every_function_of_math_is_offered() -> None:
    public = {name for name in dir(math) if not name.startswith("_")}
    assert public - FUNCTIONS.keys() - CONSTANTS.keys() <= {"fma", "sumprod"}
