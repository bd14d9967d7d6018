"""The name table: every built-in name that a program has without importing anything.

Guest side. Invariants: nothing here reads an attribute by name, makes code, opens anything
or looks at a namespace; `type` takes one argument; `print` collects. Names of exceptions
stop at `Exception`, so that no program can catch what the sandbox raises.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Iterator, Mapping
from typing import Any

from fumehood.guest.interpreter.programs.modules import import_module
from fumehood.guest.interpreter.programs.nodes import Refused

CONSTANTS = ("False", "None", "True", "Ellipsis", "NotImplemented")

FUNCTIONS = (
    "abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable", "chr",
    "classmethod", "complex", "dict", "divmod", "enumerate", "filter", "float", "format",
    "frozenset", "hex", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max",
    "min", "next", "object", "oct", "ord", "pow", "property", "range", "repr", "reversed",
    "round", "set", "slice", "sorted", "staticmethod", "str", "sum", "super", "tuple", "zip",
)  # fmt: skip

EXCEPTIONS = (
    "ArithmeticError", "AssertionError", "AttributeError", "Exception", "FloatingPointError",
    "IndexError", "KeyError", "LookupError", "MemoryError", "NameError", "NotImplementedError",
    "OverflowError", "RecursionError", "RuntimeError", "StopIteration", "TypeError",
    "UnboundLocalError", "UnicodeDecodeError", "UnicodeEncodeError", "UnicodeError",
    "ValueError", "ZeroDivisionError",
)  # fmt: skip

MADE_FOR_EACH = ("print", "type")
"""Names created for each program: `print` belongs to its output, `type` to its guards."""

STATIC: Mapping[str, Any] = types.MappingProxyType(
    {name: getattr(builtins, name) for name in (*CONSTANTS, *FUNCTIONS, *EXCEPTIONS)}
)

NAMES = tuple(sorted({*STATIC, *MADE_FOR_EACH}))

BUILT_INS: Any = {
    **STATIC,
    "__import__": import_module,
    "__build_class__": builtins.__build_class__,
}
"""The `__builtins__` of every program. Python requires a plain dictionary; no program can reach it,
and it is never changed.
"""


def check(nodes: list[ast.AST]) -> None:
    """Refuse built-in names that are not in the table, unless the program binds them itself.

    `nodes` are all nodes of the program.

    An unknown name is the program's mistake, and raises NameError when it is reached.

    Raises:
        Refused: the first such name, with what to do instead where there is something.
    """
    bound = set(_bound(nodes))
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in _NOT_FOR_PROGRAMS and node.id not in bound:
            instead = _INSTEAD.get(node.id)
            cure = f"; {instead}" if instead else ""
            raise Refused(f"the name {node.id!r} is not for programs{cure} (line {node.lineno})")


def _bound(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


_NOT_FOR_PROGRAMS = frozenset(
    name for name in dir(builtins) if not name.startswith("_") and name not in NAMES
)

_INSTEAD: Mapping[str, str] = types.MappingProxyType(
    {
        "open": "there are no files here",
        "input": "nobody is there to answer",
        "eval": "write the expression itself",
        "exec": "write the statements themselves",
        "getattr": "write the attribute with a dot",
        "setattr": "write the attribute with a dot",
        "hasattr": "use try and except AttributeError",
        "vars": "keep the values in a dict",
        "dir": "see the documentation for what exists",
        "globals": "keep the values in a dict",
        "locals": "keep the values in a dict",
        "hash": "compare the values themselves",
        "id": "compare with `is`",
        "compile": "write the statements themselves",
        "BaseException": "catch Exception",
    }
)
