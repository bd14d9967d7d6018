"""The calculator's tables: node classes, allowed or refused, and every name with its value.

Guest side, the first two of three tables that an expression passes (nodes, names, sizes).
Invariants: a node class in neither set is refused, so a newer Python with a new node cannot widen
the language; a test fails until somebody has classified it. No function here returns an object from
which anything but numbers, lists and tuples can be reached; each that can grow its result is the
version of `sizes`.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fumehood.guest.interpreter import sizes

MAX_DEPTH = 500
"""Levels of nested nodes. A sum of as many terms is as deep. The evaluator takes two Python frames
per level, for which `calculator` makes room.
"""

CONSTANT_TYPES = (bool, int, float)

ALLOWED = frozenset(
    {
        # structure
        "Expression", "Constant", "Name", "Load", "Call", "List", "Tuple", "IfExp",
        # operators; `^` (BitXor) is refused before this table with the cure
        "BinOp", "Add", "Sub", "Mult", "Div", "FloorDiv", "Mod", "Pow",
        "LShift", "RShift", "BitAnd", "BitOr",
        "UnaryOp", "UAdd", "USub", "Invert", "Not",
        "BoolOp", "And", "Or",
        "Compare", "Eq", "NotEq", "Lt", "LtE", "Gt", "GtE", "In", "NotIn",
    }
)  # fmt: skip

REFUSED = frozenset(
    {
        # other roots and statements: an expression has none, but the table is complete
        "Module", "Interactive", "FunctionType", "Suite",
        "FunctionDef", "AsyncFunctionDef", "ClassDef", "Return", "Delete", "Assign",
        "AugAssign", "AnnAssign", "TypeAlias", "For", "AsyncFor", "While", "If", "With",
        "AsyncWith", "Match", "Raise", "Try", "TryStar", "Assert", "Import", "ImportFrom",
        "Global", "Nonlocal", "Expr", "Pass", "Break", "Continue",
        # expressions that reach attributes, keep state, run code or build text
        "Attribute", "Subscript", "Slice", "ExtSlice", "Index", "Starred", "NamedExpr",
        "Lambda", "ListComp", "SetComp", "DictComp", "GeneratorExp", "Await", "Yield",
        "YieldFrom", "JoinedStr", "FormattedValue", "TemplateStr", "Interpolation",
        "Dict", "Set", "keyword",
        # operators and contexts
        "BitXor", "MatMult", "Is", "IsNot", "Store", "Del", "AugLoad", "AugStore", "Param",
        # parts of what is refused above
        "comprehension", "ExceptHandler", "arguments", "arg", "alias", "withitem",
        "match_case", "MatchValue", "MatchSingleton", "MatchSequence", "MatchMapping",
        "MatchClass", "MatchStar", "MatchAs", "MatchOr", "type_ignore", "TypeIgnore",
        "TypeVar", "ParamSpec", "TypeVarTuple",
        # abstract bases and the classes of older Pythons that `ast` still names
        "AST", "mod", "stmt", "expr", "expr_context", "boolop", "operator", "unaryop",
        "cmpop", "excepthandler", "pattern", "slice", "type_param", "NodeList",
        "Num", "Str", "Bytes", "NameConstant", "Ellipsis",
    }
)  # fmt: skip

_SAID = {
    "Attribute": "attributes", "Subscript": "subscripts", "Starred": "starred arguments",
    "Lambda": "lambdas", "ListComp": "comprehensions", "SetComp": "comprehensions",
    "DictComp": "comprehensions", "GeneratorExp": "comprehensions",
    "JoinedStr": "strings", "TemplateStr": "strings", "keyword": "keyword arguments",
    "NamedExpr": "assignments", "Dict": "dictionaries", "Set": "sets",
    "MatMult": "matrix products", "Is": "identity tests", "IsNot": "identity tests",
    "Yield": "generators", "YieldFrom": "generators", "Await": "coroutines",
}  # fmt: skip


class Refused(Exception):
    """The expression has a node or a name that the tables do not allow. The message gives it."""


def check_nodes(tree: ast.Expression) -> list[ast.AST]:
    """Check the whole tree. Returns its nodes, for the tables that follow.

    Iterative, because the text decides the depth.

    Raises:
        Refused: a refused or unknown node, a constant that is not a number, or too deep.
    """
    level: list[ast.AST] = [tree]
    nodes: list[ast.AST] = []
    for _ in range(MAX_DEPTH):
        for node in level:
            _check_node(node)
        nodes += level
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return nodes
    raise Refused(f"the expression is nested deeper than {MAX_DEPTH} levels")


def _check_node(node: ast.AST) -> None:
    kind = type(node).__name__
    if kind not in ALLOWED:
        raise Refused(f"{_SAID.get(kind, kind)} are not part of the calculator")
    if isinstance(node, ast.Constant) and type(node.value) not in CONSTANT_TYPES:
        said = "strings" if isinstance(node.value, str | bytes) else f"{node.value!r:.20}"
        raise Refused(f"{said} cannot be used in the calculator, only real numbers")
    if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
        raise Refused("only a function of the calculator can be called, by its name")


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


def check_names(nodes: Sequence[ast.AST]) -> None:
    """Check each name in its position: functions may only be called.

    Raises:
        Refused: an unknown name, a function used as a value, or a constant called.
    """
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if not isinstance(node, ast.Name):
            continue
        if id(node) in called:
            if node.id not in FUNCTIONS:
                raise Refused(_unknown(node.id, FUNCTIONS, "function"))
        elif node.id not in CONSTANTS:
            if node.id in FUNCTIONS:
                raise Refused(f"{node.id} is a function; call it, as in {node.id}(2)")
            raise Refused(_unknown(node.id, CONSTANTS, "name"))


def _unknown(name: str, known: Mapping[str, Any], kind: str) -> str:
    close = difflib.get_close_matches(name[:40], known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    shown = ascii(name if len(name) <= 40 else name[:40] + "…")
    return f"the calculator has no {kind} {shown}{hint}"
