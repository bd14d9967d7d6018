"""The calculator's tables: each node class is in exactly one set, each name in its place."""

from __future__ import annotations

import ast
import builtins
import math

import pytest

from fumehood.guest.interpreter import sizes
from fumehood.guest.interpreter.calculator import (
    ALLOWED,
    CONSTANTS,
    FUNCTIONS,
    MAX_DEPTH,
    REFUSED,
    Refused,
    check_names,
    check_nodes,
)
from support.ast_nodes import NODE_CLASSES


def _check(text: str) -> None:
    check_nodes(ast.parse(text, mode="eval"))


@pytest.mark.row("S2")
def test_every_ast_node_class_is_either_allowed_or_refused() -> None:
    assert {name for name in NODE_CLASSES if (name in ALLOWED) + (name in REFUSED) != 1} == set()


@pytest.mark.row("S2")
def test_unclassified_ast_node_is_refused() -> None:
    class Teleport(ast.expr):
        pass

    with pytest.raises(Refused, match="Teleport"):
        check_nodes(ast.Expression(body=Teleport()))


@pytest.mark.row("S2")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(1).real", "attributes"),
        ("[1][0]", "subscripts"),
        ("f(*[1])", "starred arguments"),
        ("f(a=1)", "keyword arguments"),
        ("f(**a)", "keyword arguments"),
        ("lambda: 1", "lambdas"),
        ("[x for x in y]", "comprehensions"),
        ("{x for x in y}", "comprehensions"),
        ("{x: x for x in y}", "comprehensions"),
        ("f(x for x in y)", "comprehensions"),
        ("{}", "dictionaries"),
        ("{1}", "sets"),
        ("(a := 1)", "assignments"),
        ("f'{1}'", "strings"),
        ("'a'", "strings"),
        ("b'a'", "strings"),
        ("1j", "only real numbers"),
        ("None", "only real numbers"),
        ("...", "only real numbers"),
        ("1 is 1", "identity tests"),
        ("1 @ 2", "matrix products"),
        ("1 ^ 2", "BitXor"),
        ("(yield)", "generators"),
        ("await a", "coroutines"),
        ("sqrt(2)(3)", "only a function of the calculator"),
        ("(sqrt if 1 else sin)(2)", "only a function of the calculator"),
        ("[sqrt][0](2)", "only a function"),
    ],
)
def test_other_syntax_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(Refused) as caught:
        _check(text)
    assert words in str(caught.value)


def test_nesting_depth_limit_is_exact() -> None:
    tree = ast.Expression(body=ast.Constant(1))
    for _ in range(MAX_DEPTH - 2):
        tree = ast.Expression(body=ast.UnaryOp(op=ast.USub(), operand=tree.body))
    check_nodes(tree)
    deeper = ast.Expression(body=ast.UnaryOp(op=ast.USub(), operand=tree.body))
    with pytest.raises(Refused, match="nested deeper"):
        check_nodes(deeper)


def _check_names(text: str) -> None:
    check_names(list(ast.walk(ast.parse(text, mode="eval"))))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_name_is_allowed_only_in_a_call(name: str) -> None:
    _check_names(f"{name}(1)")
    with pytest.raises(Refused, match="call it"):
        _check_names(name)
    with pytest.raises(Refused, match="call it"):
        _check_names(f"max({name}, 1)")


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_cannot_be_called(name: str) -> None:
    _check_names(f"{name} + 1")
    with pytest.raises(Refused, match="no function"):
        _check_names(f"{name}(1)")


@pytest.mark.row("S2")
def test_builtins_outside_the_table_are_refused() -> None:
    for name in set(dir(builtins)) - FUNCTIONS.keys() - {"None", "True", "False", "__debug__"}:
        with pytest.raises(Refused, match="no function"):
            _check_names(f"{name}(1)")
        with pytest.raises(Refused, match="no name"):
            _check_names(name)


@pytest.mark.parametrize(
    ("text", "hint"), [("sqr(2)", "sqrt"), ("factoral(5)", "factorial"), ("taau", "tau")]
)
def test_misspelt_name_gets_a_hint(text: str, hint: str) -> None:
    with pytest.raises(Refused, match=f"did you mean {hint}"):
        _check_names(text)


def test_functions_with_large_results_have_size_checks() -> None:
    weighed = {
        name for name, function in FUNCTIONS.items() if function.__module__ == sizes.__name__
    }
    assert weighed == {"comb", "factorial", "lcm", "perm", "pow", "prod", "round", "sum"}


def test_every_function_of_math_is_offered() -> None:
    public = {name for name in dir(math) if not name.startswith("_")}
    assert public - FUNCTIONS.keys() - CONSTANTS.keys() <= {"fma", "sumprod"}
