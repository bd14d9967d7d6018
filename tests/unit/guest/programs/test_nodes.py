"""The syntax table of programs: complete, and held to every name that a program can write."""

from __future__ import annotations

import ast

import pytest

from fumehood.guest.interpreter.nodes import (
    ALLOWED,
    MAX_DEPTH,
    REFUSED,
    Refused,
    check,
    check_names,
)
from fumehood.guest.interpreter.restricted import simplify
from support.ast_nodes import NODE_CLASSES


def _check(code: str) -> None:
    check_names(check(simplify(ast.parse(code))))


@pytest.mark.row("S2")
def test_every_ast_node_class_is_either_allowed_or_refused() -> None:
    assert len(NODE_CLASSES) > 100
    assert {name for name in NODE_CLASSES if (name in ALLOWED) + (name in REFUSED) != 1} == set()


@pytest.mark.row("S2")
def test_unclassified_ast_node_is_refused() -> None:
    class Teleport(ast.stmt):
        pass

    with pytest.raises(Refused, match="Teleport"):
        check(ast.Module(body=[Teleport()], type_ignores=[]))


@pytest.mark.row("S2")
def test_constant_of_an_unknown_type_is_refused() -> None:
    tree = ast.parse("1")
    assert isinstance(tree.body[0], ast.Expr)
    tree.body[0].value = ast.Constant(object())
    with pytest.raises(Refused, match="constant"):
        check(tree)


WAYS_TO_WRITE_A_NAME = [
    "{} = 1",
    "{}: int = 1",
    "{} += 1",
    "({} := 1)",
    "for {} in []: pass",
    "[1 for {} in []]",
    "def {}(): pass",
    "def f({}): pass",
    "def f({}=1): pass",
    "def f({}, /): pass",
    "def f(*, {}): pass",
    "def f(*{}): pass",
    "def f(**{}): pass",
    "lambda {}: 1",
    "lambda {}, /: 1",
    "class {}: pass",
    "import math as {}",
    "from math import pi as {}",
    "try: pass\nexcept Exception as {}: pass",
    "def f():\n    global {}",
    "def f():\n    x = 1\n    def g():\n        nonlocal {}",
    "del {}",
    "f({}=1)",
    "class A:\n    {} = 1",
    "a, *{} = [1]",
    "(a, (b, {})) = 1",
    "{}",
    "x.{}",
    "x.{} = 1",
    "del x.{}",
]


@pytest.mark.row("S2")
@pytest.mark.parametrize("name", ["_getattr_", "__builtins__", "_x", "__ｃｌａｓｓ__"])
@pytest.mark.parametrize("way", WAYS_TO_WRITE_A_NAME)
def test_name_with_an_underscore_is_refused_everywhere(way: str, name: str) -> None:
    with pytest.raises(Refused, match="underscore"):
        _check(way.format(name))
    _check("x = b = f = g = 1\n" + way.format("plain"))


@pytest.mark.row("S2")
def test_every_identifier_of_an_ast_node_is_checked() -> None:
    """The fields of this Python's grammar that hold identifiers, as its documentation has them."""
    keeping = {
        name: value.__doc__
        for name in ALLOWED
        if (value := getattr(ast, name, None)) is not None and "identifier" in (value.__doc__ or "")
    }
    assert keeping.keys() == {
        "FunctionDef", "ClassDef", "Global", "Nonlocal", "Name", "Attribute", "ExceptHandler", "arg",
        "keyword", "alias", "ImportFrom",
    }  # fmt: skip


def test_single_underscore_is_an_allowed_name() -> None:
    _check("for _ in range(3): pass\n_, x = 1, 2")


@pytest.mark.parametrize("name", ["printed", "exec", "eval", "breakpoint"])
def test_reserved_name_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="reserved"):
        _check(f"{name} = 1")


def test_magic_method_is_allowed_only_directly_in_a_class() -> None:
    _check("class A:\n    def __init__(self): pass\n    def __len__(self): return 1")
    for code in (
        "def __init__(): pass",
        "class A:\n    def f(self):\n        def __init__(): pass",
        "class A:\n    if 1:\n        def __init__(self): pass",
    ):
        with pytest.raises(Refused, match="in a class"):
            _check(code)


@pytest.mark.parametrize(
    "code",
    ["import os", "import os.path", "import math, os", "from os import path", "from math import sys",
     "from . import math", "from .math import pi", "import json.decoder", "from math import *"],
)  # fmt: skip
def test_import_outside_the_table_is_refused(code: str) -> None:
    with pytest.raises(Refused):
        _check(code)


def test_withheld_builtin_is_refused_with_a_remedy() -> None:
    with pytest.raises(Refused, match=r"'getattr'.*dot \(line 2\)"):
        _check("x = 1\ngetattr(x, 'real')")
    _check("def getattr(a): return a\ngetattr(1)")  # the program's own
    _check("nobody_knows_this_name")  # an error when it is reached


def test_bare_except_catches_exceptions_only() -> None:
    assert "except Exception" in ast.unparse(simplify(ast.parse("try: pass\nexcept: pass")))


@pytest.mark.row("S2")
def test_nesting_beyond_the_limit_is_refused() -> None:
    levels = 60  # of two or three nodes each, below the parser's own limit
    deep = "[" * levels + "]" * levels
    _check(deep)
    with pytest.raises(Refused, match=str(MAX_DEPTH)):
        _check("x" + " + x" * MAX_DEPTH)
