"""The node table: every node class of the running Python stands in exactly one set."""

from __future__ import annotations

import ast

import pytest

from fumehood.guest.interpreter.tables import (
    ALLOWED,
    MAX_DEPTH,
    REFUSED,
    Refused,
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


def test_tree_deeper_than_the_python_stack_is_refused() -> None:
    body: ast.expr = ast.Constant(1)
    for _ in range(5000):
        body = ast.UnaryOp(op=ast.USub(), operand=body)
    with pytest.raises(Refused, match="nested deeper"):
        check_nodes(ast.Expression(body=body))
