"""The language of programs: which `ast` node classes and which built-in names are allowed or
refused.

Guest side. These are the first two tables that a program must pass. Invariants: a node class that
is neither in `ALLOWED` nor in `REFUSED` is also refused, so a newer Python with new syntax cannot
widen the language; every identifier in a node is checked after Python's parser has normalised it
(PEP 3131). None of the built-in functions reads an attribute by its name, makes code, opens
anything or looks at a namespace; `type` takes one argument; `print` collects text. `Exception` is
the most general exception that has a name, so that no program can catch what the sandbox raises.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from RestrictedPython.compile import compile_restricted_exec
from RestrictedPython.transformer import (
    INSPECT_ATTRIBUTES,
    IOPERATOR_TO_STR,
    RestrictingNodeTransformer,
    copy_locations,
)

from fumehood.guest.interpreter.modules import MODULES, import_module

MAX_DEPTH = 200
"""Maximum number of levels of nested nodes. `ProgramPolicy` walks the tree recursively, with four
Python frames for each level.
"""

ALLOWED = frozenset(
    {
        # structure and statements
        "Module", "Expr", "Pass", "Assign", "AugAssign", "Delete", "Assert", "Raise",
        "If", "For", "While", "Break", "Continue", "Try", "ExceptHandler",
        "FunctionDef", "Lambda", "Return", "Yield", "YieldFrom", "ClassDef",
        "Global", "Nonlocal", "Import", "ImportFrom",
        # expressions
        "Constant", "Name", "Attribute", "Subscript", "Slice", "Starred", "Call", "NamedExpr",
        "List", "Tuple", "Set", "Dict", "IfExp", "JoinedStr", "FormattedValue",
        "ListComp", "SetComp", "DictComp", "GeneratorExp",
        "BinOp", "Add", "Sub", "Mult", "Div", "FloorDiv", "Mod", "Pow",
        "LShift", "RShift", "BitAnd", "BitOr", "BitXor",
        "UnaryOp", "UAdd", "USub", "Invert", "Not", "BoolOp", "And", "Or",
        "Compare", "Eq", "NotEq", "Lt", "LtE", "Gt", "GtE", "Is", "IsNot", "In", "NotIn",
        # parts and contexts
        "comprehension", "arguments", "arg", "keyword", "alias", "Load", "Store", "Del",
    }
)  # fmt: skip

REFUSED = frozenset(
    {
        # annotations are removed before this table is used (`restricted.simplify`)
        "AnnAssign",
        # other roots
        "Expression", "Interactive", "FunctionType", "Suite",
        # nothing here is asynchronous, and nothing has to be opened or closed
        "AsyncFunctionDef", "AsyncFor", "AsyncWith", "Await", "With", "withitem",
        # exception groups confuse types (CVE-2025-22153); patterns read attributes by themselves
        "TryStar", "Match", "match_case", "MatchValue", "MatchSingleton", "MatchSequence",
        "MatchMapping", "MatchClass", "MatchStar", "MatchAs", "MatchOr",
        # newer than RestrictedPython's policy, which is applied after this table
        "TypeAlias", "TypeVar", "ParamSpec", "TypeVarTuple", "TemplateStr", "Interpolation",
        "MatMult", "TypeIgnore",
        # abstract bases and the classes of older Pythons that `ast` still names
        "AST", "mod", "stmt", "expr", "expr_context", "boolop", "operator", "unaryop",
        "cmpop", "excepthandler", "pattern", "slice", "type_ignore", "type_param",
        "ExtSlice", "Index", "AugLoad", "AugStore", "Param",
        "Num", "Str", "Bytes", "NameConstant", "Ellipsis",
    }
)  # fmt: skip

CONSTANT_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...))

MAGIC_METHODS = frozenset(
    {
        "__init__", "__call__", "__repr__", "__str__", "__bool__", "__hash__",
        "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
        "__len__", "__iter__", "__next__", "__contains__", "__reversed__",
        "__getitem__", "__setitem__", "__delitem__",
        "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__",
        "__mul__", "__rmul__", "__imul__", "__truediv__", "__rtruediv__",
        "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__divmod__",
        "__pow__", "__rpow__", "__neg__", "__pos__", "__abs__", "__invert__",
        "__and__", "__rand__", "__or__", "__ror__", "__xor__", "__rxor__",
        "__lshift__", "__rshift__", "__int__", "__float__", "__round__",
    }
)  # fmt: skip
"""Special methods that a class of a program may define. All of them are called only with the
program's own values. Excluded are methods for attribute access, class creation and copying, and
those that receive a traceback or buffer.
"""

RESERVED_NAMES = frozenset({"printed", "builtins", "breakpoint", "exec", "eval"})
"""Names that RestrictedPython also refuses, or that it uses itself (`printed`)."""

_SAID = {
    "With": "with statements", "AsyncFunctionDef": "coroutines", "Await": "coroutines",
    "AsyncFor": "coroutines", "AsyncWith": "coroutines", "TryStar": "except* clauses",
    "Match": "match statements", "MatMult": "matrix products", "TypeAlias": "type aliases",
    "TypeVar": "type parameters", "ParamSpec": "type parameters",
    "TypeVarTuple": "type parameters", "TemplateStr": "template strings",
}  # fmt: skip


class Refused(BaseException):
    """The program used a syntax node, name or object that programs may not use. The message says
    which.

    Programs cannot catch this exception, because it is not an `Exception`, and programs have no
    name for its base classes. But a program can swallow it with `finally: return`, so the
    guards also remember each refusal.
    """


def check(tree: ast.Module) -> list[ast.AST]:
    """Check every node of a program, and return all nodes.

    Raises:
        Refused: a node, identifier or import is not allowed, or the program is nested too deeply.
    """
    # No recursion: a very deep program would exceed Python's recursion limit.
    level: list[ast.AST] = [tree]
    nodes: list[ast.AST] = []
    for _ in range(MAX_DEPTH):
        below: list[ast.AST] = []
        for node in level:
            _check_node(node)
            if not node._fields:
                continue
            children, texts = _parts(node)
            if texts:
                _check_texts(node, texts)
            if not isinstance(node, ast.ClassDef):
                _check_no_methods(children)
            below += children
        nodes += level
        level = below
        if not level:
            return nodes
    raise Refused(f"the program is nested deeper than {MAX_DEPTH} levels")


def _parts(node: ast.AST) -> tuple[list[ast.AST], list[str]]:
    """Return the child nodes of a node, and the texts that the node itself stores."""
    children: list[ast.AST] = []
    texts: list[str] = []
    for value in vars(node).values():
        kind = type(value)
        if kind is int or value is None:
            continue
        for part in value if kind is list else (value,):
            if isinstance(part, ast.AST):
                children.append(part)
            elif isinstance(part, str):
                texts.append(part)
    return children, texts


def _check_node(node: ast.AST) -> None:
    kind = type(node).__name__
    if kind not in ALLOWED:
        raise _at(node, f"{_SAID.get(kind, kind)} are not part of the language")
    check = _CHECKS.get(kind)
    if check is not None:
        check(node)


def _check_constant(node: ast.Constant) -> None:
    if type(node.value) not in CONSTANT_TYPES:
        raise _at(node, "a constant of this type is not part of the language")


def _check_class(node: ast.ClassDef) -> None:
    if node.keywords:
        raise _at(node, "a class takes no keywords: there are no metaclasses here")


def _check_comprehension(node: ast.comprehension) -> None:
    if node.is_async:
        raise _at(node, "coroutines are not part of the language")


def _check_texts(node: ast.AST, texts: list[str]) -> None:
    """Raise Refused if one of `texts` is a name that programs may not use. `texts` are all texts
    that `node` stores, such as the names of variables, parameters and imports.
    """
    # A constant's text is not a name. `_check_attribute` checks the names of attributes.
    if not isinstance(node, ast.Constant | ast.Attribute):
        for text in texts:
            _check_name(node, text)


def _check_name(node: ast.AST, name: str) -> None:
    if isinstance(node, ast.Name) and name == "__name__" and isinstance(node.ctx, ast.Load):
        return  # `if __name__ == "__main__"`: the policy replaces the name by a constant
    if isinstance(node, ast.FunctionDef) and name in MAGIC_METHODS:
        return  # only within classes: `_check_no_methods`
    if name.startswith("_") and name != "_":
        raise _at(node, f"names that begin with an underscore are not allowed: {_shown(name)}")
    if name in RESERVED_NAMES or name.endswith("__roles__"):
        raise _at(node, f"the name {_shown(name)} is reserved")


def _check_attribute(node: ast.Attribute) -> None:
    name = node.attr
    is_read = isinstance(node.ctx, ast.Load)
    if is_read and (name == "__name__" or (name == "__init__" and _is_super(node.value))):
        return  # the policy makes a guard read either of them
    if name.startswith("_"):
        raise _at(node, f"attributes that begin with an underscore are not allowed: {_shown(name)}")
    if name.endswith("__roles__") or name in INSPECT_ATTRIBUTES:
        raise _at(node, f"the attribute {_shown(name)} is not allowed")


def _check_import(node: ast.Import | ast.ImportFrom) -> None:
    if getattr(node, "is_lazy", 0):
        raise _at(node, "lazy imports are not part of the language")
    if isinstance(node, ast.Import):
        for alias in node.names:
            _require_module(node, alias.name)
        return
    if node.level or node.module is None:
        raise _at(node, "relative imports are not part of the language")
    members = _require_module(node, node.module)
    for alias in node.names:
        if alias.name not in members:
            raise _at(node, f"{node.module} has no {_shown(alias.name)} here")


def _require_module(node: ast.AST, name: str) -> frozenset[str]:
    if name not in MODULES:
        raise _at(
            node, f"the module {_shown(name)} cannot be imported here, only {', '.join(MODULES)}"
        )
    return frozenset(MODULES[name])


def _check_targets(node: ast.Assign) -> None:
    if len(node.targets) > 1 and any(isinstance(t, ast.Tuple) for t in node.targets):
        # RestrictedPython would compute the value once for each target.
        raise _at(node, "several targets with a tuple among them are not part of the language")


def _check_no_methods(children: list[ast.AST]) -> None:
    """Raise Refused if one of the nodes `children`, which are not in a class, defines a special
    method.
    """
    for node in children:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("__"):
            raise _at(node, "methods with underscores can only be defined in a class")


_CHECKS: Mapping[str, Callable[[Any], None]] = types.MappingProxyType(
    {
        "Constant": _check_constant,
        "Import": _check_import,
        "ImportFrom": _check_import,
        "Attribute": _check_attribute,
        "ClassDef": _check_class,
        "comprehension": _check_comprehension,
        "Assign": _check_targets,
    }
)
"""Name of a node class → a function that makes a further check of nodes of this class."""


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "super"
        and not node.args
        and not node.keywords
    )


def _at(node: ast.AST, message: str) -> Refused:
    line = getattr(node, "lineno", None)
    return Refused(message if line is None else f"{message} (line {line})")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 40 else name[:40] + "…")


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
"""Built-in names whose functions are created separately for each program: `print` writes to the
program's output, and `type` is one of the program's guards.
"""

STATIC: Mapping[str, Any] = types.MappingProxyType(
    {name: getattr(builtins, name) for name in (*CONSTANTS, *FUNCTIONS, *EXCEPTIONS)}
)

NAMES = tuple(sorted({*STATIC, *MADE_FOR_EACH}))

BUILT_INS: Any = {
    **STATIC,
    "__import__": import_module,
    "__build_class__": builtins.__build_class__,
}
"""The `__builtins__` of every program. Python requires a plain dictionary for it. No program can
access this dictionary, and it is never changed.
"""


def check_names(nodes: list[ast.AST]) -> None:
    """Check the built-in names that a program uses. Names that the program defines itself are not
    checked.

    `nodes` are all nodes of the program. Unknown names are not refused: the program gets a
    NameError when it uses one.

    Raises:
        Refused: the program uses a built-in name that is not in the table. The message names an
            alternative, if there is one.
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


FILENAME = "<code>"
VALUE = "_value_"
"""The variable that gets the value of a program's last expression. No program can assign to it."""


def compile_program(tree: ast.Module) -> CodeType:
    """Compile a program to code that accesses objects only through guards. `tree` must have passed
    `check`.

    Raises:
        Refused: RestrictedPython refused the program.
        SyntaxError: Python's compiler refused the program.
    """
    result = compile_restricted_exec(tree, filename=FILENAME, policy=ProgramPolicy)
    if result.code is None:
        raise Refused("; ".join(result.errors) or "RestrictedPython refused it")
    return result.code


class ProgramPolicy(RestrictingNodeTransformer):
    """RestrictedPython's policy, which rewrites the syntax tree of a program so that the program
    calls guards. The methods below allow more than RestrictedPython's own policy. The tree must
    have passed `check`.
    """

    def check_name(self, node: Any, name: str | None, allow_magic_methods: bool = False) -> None:
        """Check a name as RestrictedPython does, but also allow all special methods in
        `MAGIC_METHODS`.
        """
        if allow_magic_methods and isinstance(node, ast.FunctionDef) and name in MAGIC_METHODS:
            return
        super().check_name(node, name, allow_magic_methods)

    def visit_Module(self, node: ast.Module) -> Any:
        """If the program's last statement is an expression, assign its value to the variable
        `VALUE`. No program can use this name.
        """
        visited: ast.Module = super().visit_Module(node)  # type: ignore[assignment]
        last = visited.body[-1] if visited.body else None
        if isinstance(last, ast.Expr):
            kept = ast.Assign(targets=[ast.Name(VALUE, ast.Store())], value=last.value)
            copy_locations(kept, last)
            visited.body[-1] = kept
        return visited

    def visit_Name(self, node: ast.Name) -> Any:
        """Replace `__name__` by the constant "__main__"."""
        if node.id == "__name__" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant("__main__"), node)
        return super().visit_Name(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Allow reading `__name__` and `__init__`. Each of the two is read by its own guard."""
        guard = {"__name__": "_name_of_", "__init__": "_super_init_"}.get(node.attr)
        if guard is None or not isinstance(node.ctx, ast.Load):
            return super().visit_Attribute(node)
        return _guarded(node, guard, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """Allow `+=` and similar statements for items and attributes, by replacing the statement
        with a call of a guard. The guard executes the statement.
        """
        target, operation = node.target, ast.Constant(IOPERATOR_TO_STR[type(node.op)])
        if isinstance(target, ast.Name):
            return super().visit_AugAssign(node)
        where: ast.expr
        if isinstance(target, ast.Subscript):
            guard, where = "_inplace_item_", self.visit(target.slice)
        else:
            guard, where = "_inplace_attribute_", ast.Constant(target.attr)
        call = _guarded(
            node, guard, operation, self.visit(target.value), where, self.visit(node.value)
        )
        statement = ast.Expr(call)
        copy_locations(statement, node)
        return statement

    def visit_Nonlocal(self, node: ast.Nonlocal) -> Any:
        """Allow `nonlocal`. `check` has already accepted its names."""
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """Transform a class statement as RestrictedPython does, but keep its position in the
        source.
        """
        visited: ast.ClassDef = super().visit_ClassDef(node)  # type: ignore[assignment]
        # RestrictedPython does not copy the position, but tracebacks need it to show the right
        # line.
        copy_locations(visited, node)
        for keyword in visited.keywords:
            ast.copy_location(keyword, node)
            ast.copy_location(keyword.value, node)
        return visited


def _guarded(node: Any, guard: str, *arguments: ast.expr) -> ast.Call:
    call = ast.Call(func=ast.Name(guard, ast.Load()), args=list(arguments), keywords=[])
    copy_locations(call, node)
    return call
