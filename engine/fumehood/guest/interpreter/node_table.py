"""Every `ast` node class of the running Python: allowed in an expression, or refused.

Guest side, the first of three tables that an expression passes (nodes, names, sizes).
Invariant: a class in neither set is refused, so a newer Python with a new node
cannot widen the language; a test fails until somebody has classified it.
"""

from __future__ import annotations

import ast

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


class NodeRefused(Exception):
    """The expression contains a node that the table does not allow, which the message names."""


def check(tree: ast.Expression) -> list[ast.AST]:
    """Check the whole tree. Returns its nodes, for the tables that follow.

    Iterative, because the text decides the depth.

    Raises:
        NodeRefused: a refused or unknown node, a constant that is not a number, or too deep.
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
    raise NodeRefused(f"the expression is nested deeper than {MAX_DEPTH} levels")


def _check_node(node: ast.AST) -> None:
    kind = type(node).__name__
    if kind not in ALLOWED:
        raise NodeRefused(f"{_SAID.get(kind, kind)} are not part of the calculator")
    if isinstance(node, ast.Constant) and type(node.value) not in CONSTANT_TYPES:
        said = "strings" if isinstance(node.value, str | bytes) else f"{node.value!r:.20}"
        raise NodeRefused(f"{said} cannot be used in the calculator, only real numbers")
    if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
        raise NodeRefused("only a function of the calculator can be called, by its name")
