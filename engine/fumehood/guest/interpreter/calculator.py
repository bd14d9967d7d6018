"""The calculator: evaluates one expression to one value, and keeps no state.

Guest side, run by the child. An expression is translated from the calculator's notation, parsed by
Python, and checked by the node table and the name table. While asteval evaluates it, the size
estimates check each operation. Invariant: the node table allows no node that stores anything, so
one process may evaluate many expressions of one trust domain.

The node table consists of the sets `ALLOWED` and `REFUSED` of syntax nodes. A node class in neither
set is also refused, so a newer Python with a new node cannot widen the language; a test fails until
the class is in one of the sets. The name table has the functions and constants that an expression
may use. From the result of such a function, an expression can reach only numbers, lists and tuples.
Functions whose results can be large come from `sizes`.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import keyword
import math
import re
import sys
import unicodedata  # noqa: F401  # the parser imports it for the first non-ASCII name
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# asteval imports NumPy if it is installed. The calculator does not need NumPy, and NumPy's memory
# pages would be copied into every child.
sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]
sys.modules.setdefault("numpy_financial", None)  # type: ignore[arg-type]

import asteval  # noqa: E402

from fumehood.guest.interpreter import sizes  # noqa: E402
from fumehood.protocol.framing import whole_words  # noqa: E402
from fumehood.protocol.strict_json import (  # noqa: E402
    MAX_INTEGER_DIGITS,
    MAX_SAFE_INTEGER,
    MAX_VALUE_DEPTH,
)

HANDLED = frozenset(
    {"constant", "name", "call", "list", "tuple", "binop", "unaryop", "boolop", "compare", "ifexp"}
)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the expression in a request, and return the reply: `{result}`, or `{error}` if the
    expression is invalid, is refused or has no value. A request is `{arguments: {expression,
    precision?}, output_bytes}`.
    """
    arguments = request["arguments"]
    try:
        value = evaluate(arguments["expression"])
        return {"result": render(value, arguments.get("precision"), request["output_bytes"])}
    except (Refused, sizes.TooLarge) as refusal:
        return _error("policy", str(refusal))
    except NotationRefused as refusal:
        return _error("invalid", str(refusal))
    except SyntaxError as error:
        return _error("invalid", _syntax_message(error))
    except MemoryError:
        raise
    except Exception as error:
        return _error("exception", _failure_message(error))


def evaluate(text: str) -> Any:
    """Return the value of the expression `text`.

    Raises:
        NotationRefused, SyntaxError: the text is not an expression.
        Refused: the expression uses a syntax node or a name that is not allowed.
        TooLarge: a number in the expression, a result or an intermediate result is too large.
        ArithmeticError, ValueError, TypeError: the expression has no value.
    """
    tree = _parse(rewrite(text))
    _refuse_bare_comma(tree.body, text)
    nodes = check_nodes(tree)
    check_names(nodes)
    sizes.check_literals(nodes)
    return _value(tree.body)


def render(value: Any, precision: int | None, max_bytes: int) -> dict[str, Any]:
    """Return the result as `{value, text}`. `value` is the value as JSON, with None in place of
    integers that JSON cannot hold exactly. `text` is the value as text. Long lists in `text` are
    cut soon after `max_bytes` characters. If `precision` is given, both are rounded to this number
    of decimal places.

    Raises:
        TooLarge: lists are nested too deeply.
        ValueError, TypeError: the value is not finite, or not a real number.
    """
    if _depth(value) > MAX_VALUE_DEPTH:
        raise sizes.TooLarge(f"the result is nested deeper than {MAX_VALUE_DEPTH} lists")
    rounded = _rounded(value, precision)
    return {"value": _json_value(rounded), "text": _text(rounded, max_bytes + 1)}


def preload() -> None:
    """Create everything that evaluating an expression needs. Called before any process is forked,
    so that the children share it.
    """
    sys.setrecursionlimit(RECURSION_LIMIT)
    # The parser warns about odd but valid text (`1if 2else 3`). Printing the warning would end a
    # sealed process.
    warnings.simplefilter("ignore")
    for expression in ("5! + 2**10", "max(sqrt(2), 0.5) if 1 < 2 else [1, 2]", "1/0", "open('x')"):
        json.dumps(run({"arguments": {"expression": expression}, "output_bytes": 1024}))


def _value(node: ast.expr) -> Any:
    """Return the value of the expression `node`. The caller must have checked it with `check_nodes`
    and `check_names`.
    """
    interpreter = _interpreter()
    # asteval keeps errors, text and flow flags between runs; reset them for each expression.
    interpreter.error, interpreter.error_msg, interpreter.code_text = [], None, []
    interpreter._interrupt, interpreter.retval, interpreter.expr = None, None, "expression"
    try:
        return sizes.checked(interpreter.run(node))
    except Exception as error:
        raise _root_cause(error) from None
    finally:
        interpreter.error = []


@functools.cache
def _interpreter() -> asteval.Interpreter:
    """Return the interpreter of asteval that evaluates expressions. It accepts only the syntax
    nodes in `HANDLED`. Its operators and function calls raise TooLarge if a result would be too
    large.
    """
    interpreter = asteval.Interpreter(
        symtable={**CONSTANTS, **FUNCTIONS},
        use_numpy=False,
        minimal=True,
        config={"ifexp": True},
    )
    interpreter.symtable.pop("print")  # added by asteval to any table
    for node in list(interpreter.node_handlers):
        if node not in HANDLED:
            interpreter.remove_nodehandler(node)

    def binary_operation(node: ast.BinOp) -> Any:
        operation: Callable[[Any, Any], Any] = sizes.BINARY[type(node.op)]
        return sizes.checked(operation(interpreter.run(node.left), interpreter.run(node.right)))

    def call(node: ast.Call) -> Any:
        function = interpreter.symtable[node.func.id]  # type: ignore[attr-defined]
        return sizes.checked(function(*[interpreter.run(a) for a in node.args]))

    interpreter.set_nodehandler("binop", binary_operation)
    interpreter.set_nodehandler("call", call)
    return interpreter


def _parse(text: str) -> ast.Expression:
    try:
        return ast.parse(text.strip(), mode="eval")
    except (RecursionError, MemoryError):
        # The parser's stack overflowed. Memory cannot run out: the schema bounds the text.
        raise SyntaxError("nested too deeply") from None
    except ValueError as error:  # NUL bytes, in some versions of Python
        raise SyntaxError(str(error)) from None


def _refuse_bare_comma(body: ast.expr, text: str) -> None:
    """Raise NotationRefused if the expression `text` is like `1,000` or `2,5`. `body` is the parsed
    expression.
    """
    # In Python, this is a tuple, but the caller means a number.
    if isinstance(body, ast.Tuple) and not text.lstrip().startswith("("):
        raise NotationRefused(
            "a comma outside brackets is no part of a number; write 1000 and 2.5, or [1, 2]"
        )


def _root_cause(error: BaseException) -> BaseException:
    """Return the first exception in a chain of exceptions. `error` is the last one."""
    # asteval wraps an exception once for each level of the expression.
    while error.__context__ is not None:
        error = error.__context__
    return error


def _rounded(value: Any, precision: int | None) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_rounded(item, precision) for item in value)
    if isinstance(value, complex):
        raise TypeError("the result is a complex number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the result is not a finite number")
        return value if precision is None else round(value, precision)
    if not isinstance(value, int):
        raise TypeError("the result is not a number")
    return value


def _depth(value: Any) -> int:
    """Return how deeply the lists of a value are nested."""
    # No recursion: a very deep value would exceed Python's recursion limit.
    depth = 0
    level = [value]
    while any(isinstance(item, list | tuple) for item in level):
        depth += 1
        level = [inner for item in level if isinstance(item, list | tuple) for inner in item]
    return depth


def _json_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_SAFE_INTEGER:
        return None
    return value


def _text(value: Any, max_chars: int) -> str:
    """Return `repr(value)`. If `value` is a list or tuple, the text is cut soon after `max_chars`
    characters.
    """
    if not isinstance(value, list | tuple):
        return repr(value)
    parts: list[str] = []
    length = 0
    for item in value:
        parts.append(_text(item, max_chars - length))
        length += len(parts[-1]) + 2
        # The supervisor refuses longer results anyway.
        if length > max_chars:
            break
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    inner = ", ".join(parts) + comma
    return f"[{inner}]" if isinstance(value, list) else f"({inner})"


def _syntax_message(error: SyntaxError) -> str:
    message = (error.msg or "invalid syntax").split("(<unknown>")[0].strip()
    if message.startswith("Exceeds the limit"):
        message = f"an integer has more than {MAX_INTEGER_DIGITS} digits"
    where = f" (column {error.offset})" if error.offset else ""
    return f"the expression cannot be read: {whole_words(message, 200)}{where}"


def _failure_message(error: Exception) -> str:
    if isinstance(error, ZeroDivisionError):
        return "division by zero"
    if isinstance(error, OverflowError):
        return f"overflow: {whole_words(str(error), 200) or 'the result is too large for a double'}"
    return whole_words(str(error), 200) or type(error).__name__


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


_STRING = re.compile(r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""", re.DOTALL)
_GROUPED = re.compile(r",\s*(0_?\d{1,20})", re.ASCII)
_TOKEN = re.compile(
    rf"""
      (?P<space>\s+)
    | (?P<string>{_STRING.pattern})
    | (?P<number>0[xXoObB][0-9a-fA-F_]+
                |(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?[jJ]?)
    | (?P<name>[^\W\d]\w*)
    | (?P<operator>\*\*|//|<<|>>|<=|>=|==|!=|.)
    """,
    re.VERBOSE | re.DOTALL,
)

_AFTER_PERCENT_SIGN = frozenset("*/)%],<>=!&|") | {"**", "//", "<<", ">>", "<=", ">=", "==", "!="}


_WORDS = frozenset(keyword.kwlist) - {"True", "False", "None"}
"""Python's keywords except constants, such as `not` and `in`. If a parenthesis follows one of these
words, this is not a call.
"""


class NotationRefused(Exception):
    """The expression uses a notation that the calculator lacks. The message says what to write
    instead.
    """


def rewrite(text: str) -> str:
    """Translate an expression from the calculator's notation to Python, and return it.

    Raises:
        NotationRefused: the text contains `^`, a percent sign, `5!!`, a `!` with nothing before it,
            a comma that groups digits, a comment or a continued line.
    """
    if "#" in text or "\\\n" in text:
        raise NotationRefused("comments and continued lines are not part of an expression")
    if "," in text and (grouped := _GROUPED.search(_STRING.sub("", text))) is not None:
        # Python reads 1,000 as two numbers, so `max(1,000, 999)` would be 999.
        raise NotationRefused(
            "a comma does not group digits; write 1000 for 1,000 "
            f"({grouped[1]} behind a comma begins with a zero)"
        )
    if "!" not in text and "^" not in text and "%" not in text:
        return text
    tokens = [(match.lastgroup or "", match.group()) for match in _TOKEN.finditer(text)]
    _refuse_misleading_signs(tokens)
    return _rewrite_factorials(tokens)


def _refuse_misleading_signs(tokens: list[tuple[str, str]]) -> None:
    for index, (kind, token) in enumerate(tokens):
        if kind != "operator":
            continue
        if token == "^":
            raise NotationRefused("^ is not the power sign here; write ** (2**10)")
        if token == "%" and _is_percent_sign(tokens, index):
            raise NotationRefused(
                "% between two operands is the remainder; for percent write * 5 / 100"
            )


def _is_percent_sign(tokens: list[tuple[str, str]], index: int) -> bool:
    """Return whether the `%` at `index` means percent. This is so if no operand follows, or if the
    spacing shows it, as in `5% - 3`.
    """
    following = [t for t in tokens[index + 1 :] if t[0] != "space"][:1]
    if not following or following[0][1] in _AFTER_PERCENT_SIGN:
        return True
    if following[0][0] == "name" and following[0][1] in ("of", "and", "or", "if", "else", "in"):
        return True
    attached = index > 0 and tokens[index - 1][0] != "space"
    spaced = index + 1 < len(tokens) and tokens[index + 1][0] == "space"
    return following[0][1] in ("+", "-") and attached and spaced


def _rewrite_factorials(tokens: list[tuple[str, str]]) -> str:
    """Replace `n!` by `factorial(n)` in a single pass, and return the text."""
    out: list[str] = []
    opened: list[int] = []  # for each open parenthesis: index in `out` where its operand begins
    operand: int | None = None  # index in `out` where the operand before this token begins, if any
    finished = False  # whether that operand is itself a factorial
    for kind, token in tokens:
        if kind == "space":
            out.append(token)
            continue
        if kind == "operator" and token == "!":
            if finished:
                raise NotationRefused(
                    "!! is not defined here; for the factorial of a factorial write (n!)!"
                )
            if operand is None:
                raise NotationRefused("! stands after the number that it belongs to, as in 5!")
            # The function's name must be separated from a word before it (`not(3)!`).
            apart = " " if operand and out[operand - 1][-1:].isalnum() else ""
            out[operand] = f"{apart}factorial(" + out[operand]
            out.append(")")
            finished = True
            continue
        if token in ("(", "["):
            # A call keeps its function's name as part of the operand: sqrt(9)! is 3!.
            is_call = operand is not None and token == "("
            opened.append(operand if is_call and operand is not None else len(out))
            operand, finished = None, False
        elif token in (")", "]"):
            operand, finished = (opened.pop() if opened else None), False
        else:
            is_operand = kind in ("number", "name", "string") and token not in _WORDS
            operand, finished = (len(out) if is_operand else None), False
        out.append(token)
    return "".join(out)


# -- the tables: node classes, and every name with its value --------------------------------

MAX_DEPTH = 500
"""Maximum number of levels of nested nodes. A sum of N terms has N levels. The evaluator needs two
Python frames for each level, and `RECURSION_LIMIT` allows that many.
"""

RECURSION_LIMIT = 1000 + 4 * MAX_DEPTH

CONSTANT_TYPES = (bool, int, float)

ALLOWED = frozenset(
    {
        # structure
        "Expression", "Constant", "Name", "Load", "Call", "List", "Tuple", "IfExp",
        # operators; `^` (BitXor) is refused before this table, by a message with the remedy
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
    """The expression has a syntax node or a name that is not allowed. The message says which."""


def check_nodes(tree: ast.Expression) -> list[ast.AST]:
    """Check every node in the syntax tree of an expression, and return all nodes.

    Raises:
        Refused: a node is not allowed, a constant is not a number, or the tree is too deep.
    """
    # No recursion: a very deep expression would exceed Python's recursion limit.
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
    _function.__qualname__ = _name  # Python's errors about arguments contain it

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
    """Check that each called name is an allowed function, and that each other name is an allowed
    constant.

    Raises:
        Refused: a name is unknown, a function is used without calling it, or a constant is called.
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
