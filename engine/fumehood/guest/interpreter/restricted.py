"""Restricted programs: small Python programs, evaluated to a value and printed text.

Guest side, run by a fresh child that dies after its answer. A program passes Python's
parser, our tables (syntax, names, imports), RestrictedPython's policy, and while it runs
the guards, which read attributes by a table of their own. Invariant: what a program can
reach is in these tables; the wall around the process holds if they fail.
"""

from __future__ import annotations

import ast
import gc
import mmap
import sys
from types import CodeType
from typing import Any

from fumehood.guest.interpreter.programs import modules, nodes, output
from fumehood.guest.interpreter.programs.guards import Guards
from fumehood.guest.interpreter.programs.nodes import VALUE, Refused, compile_program
from fumehood.guest.interpreter.programs.output import OutputFull
from fumehood.protocol import strict_json

RESERVE_BYTES = 2 << 20
"""Address space released if a program has used up its own, because reporting that needs some. It is
mapped and never touched, so it costs no memory.
"""

REHEARSALS = 16
"""Runs of the warm-up programs before the first fork. Python rewrites code that runs often; if that
happens here, the pages stay shared.
"""

KEPT_SHARE = 16
"""Part of the output limit that is kept of output that does not fit, in characters; in JSON each
takes at most twelve bytes.
"""

_FUTURE_IGNORED = frozenset({"annotations"})
_BLOCKS = ("body", "orelse", "finalbody", "handlers")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request of the form `{arguments: {code}, output_bytes}`."""
    return Run(request["arguments"]["code"], request["output_bytes"]).reply()


def warm_up() -> None:
    """Touch the pages that a program touches, so that the first one finds them warm."""
    strict_json.dumps(run({"arguments": {"code": _WARM_UP}, "output_bytes": 4096}))


def preload() -> None:
    """Fill caches that libraries fill at first use, once, before anything is forked."""
    # Python writes what a finaliser raises to standard error, which a sealed child may not.
    sys.unraisablehook = lambda _: None
    for program in _PRELOADS * REHEARSALS:
        reply = run({"arguments": {"code": program}, "output_bytes": 4096})
        if "result" not in reply:
            raise RuntimeError(f"a program of our own failed: {reply['error']['message']}")


def compile_checked(code: str) -> CodeType:
    """Compile a program that passes every table.

    Raises:
        SyntaxError: it is no Python.
        Refused: one of the tables refused it, or RestrictedPython did.
    """
    try:
        tree = ast.parse(code)
    except (RecursionError, MemoryError):
        # The parser's own stack, long before memory: the text is bounded by the schema.
        raise SyntaxError("nested too deeply") from None
    except ValueError as error:  # NUL bytes, in some versions of Python
        raise SyntaxError(str(error)) from None
    tree = simplify(tree)
    nodes.check_names(nodes.check(tree))
    return compile_program(tree)


def simplify(tree: ast.Module) -> ast.Module:
    """Remove annotations and `from __future__`, and narrow bare `except:`.

    Annotations are never evaluated. A bare `except:` becomes `except Exception:`, so that it cannot
    catch the sandbox's own exceptions. Walks only statements, because expressions contain none of
    these. Adds nothing that the tables would refuse.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for parameter in _parameters(node.args):
                parameter.annotation = None
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            node.type = ast.copy_location(ast.Name("Exception", ast.Load()), node)
        for name in _BLOCKS:
            block = getattr(node, name, None)
            if isinstance(block, list):
                statements = [_statement(statement) for statement in block]
                setattr(node, name, statements)
                waiting += statements
    return tree


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return named + [rest for rest in (arguments.vararg, arguments.kwarg) if rest is not None]


def _statement(statement: ast.stmt) -> ast.stmt:
    if isinstance(statement, ast.AnnAssign):
        if statement.value is None:
            return ast.copy_location(ast.Pass(), statement)
        plain = ast.Assign(targets=[statement.target], value=statement.value)
        return ast.copy_location(plain, statement)
    if (
        isinstance(statement, ast.ImportFrom)
        and statement.module == "__future__"
        and {alias.name for alias in statement.names} <= _FUTURE_IGNORED
    ):
        return ast.copy_location(ast.Pass(), statement)
    return statement


class Run:
    """Run one program, from its text to the reply."""

    def __init__(self, code: str, max_bytes: int) -> None:
        self._code = code
        self._max_bytes = max_bytes
        self._printed = output.Printed(max_bytes)
        self._guards = Guards()
        self._reserve = mmap.mmap(-1, RESERVE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def reply(self) -> dict[str, Any]:
        """Run compiled code. Returns the result, or the error with the text printed so far."""
        try:
            program = compile_checked(self._code)
        except SyntaxError as error:
            description = output.describe_syntax(error)
            return self._error("exception", _summary(description), description)
        except Refused as refusal:
            return self._error("policy", str(refusal))
        namespace = self.namespace()
        try:
            exec(program, namespace)  # noqa: S102  # what this file is for
            result = self._result(namespace.get(VALUE))
        except BaseException as fault:
            self._reserve.close()
            return self._ended(fault, namespace)
        # Swallowed by the program's `finally`, but they have happened.
        if self._guards.refusal is not None or self._printed.is_full:
            return self._ended(None, namespace)
        if len(strict_json.dumps(result)) > self._max_bytes:
            return self._error("output", "the program printed or returned too much")
        return {"result": result}

    def namespace(self) -> dict[str, Any]:
        """The globals of the program."""
        guards = self._guards
        made: dict[str, dict[str, Any]] = {
            "collections": {"namedtuple": guards.classes.named_tuple},
            "functools": {"total_ordering": guards.total_ordering},
        }
        door = output.PrintDoor(self._printed)
        return {
            "__builtins__": nodes.BUILT_INS,
            "__name__": "__main__",
            "type": guards.type_of,
            "_print_": lambda _getattr: door,
            modules.FINDER: modules.ModuleFinder(made),
            **guards.table(),
        }

    def _result(self, value: Any) -> dict[str, Any]:
        return {
            "value": output.json_value(value, self._max_bytes),
            "value_repr": None if value is None else output.short_repr(value),
            "stdout": self._printed.text(),
        }

    def _ended(self, fault: BaseException | None, namespace: dict[str, Any]) -> dict[str, Any]:
        description = None
        if fault is not None and not isinstance(fault, MemoryError | OutputFull):
            # Asks the exception for its words, which is the program's code: what it does counts.
            description = output.describe(fault, self._code)
        if self._guards.refusal is not None:
            line = output.last_line(self._guards.refusal)
            return self._error("policy", f"{self._guards.refusal}{line}")
        if isinstance(fault, MemoryError) and not self._printed.is_full:
            fault.__traceback__ = None
            namespace.clear()
            gc.collect()
            return self._error("memory", "the program needed more memory than its limit")
        if description is None or self._printed.is_full:
            return self._error("output", "the program printed or returned too much")
        return self._error("exception", _summary(description), description)

    def _error(
        self, kind: str, message: str, exception: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        stdout = self._printed.text()
        error = {"kind": kind, "message": message, "details": _details(stdout, exception)}
        if len(strict_json.dumps(error)) > self._max_bytes:
            kept = stdout[: self._max_bytes // KEPT_SHARE]
            error["details"] = {**_details(kept, exception), "truncated": True}
        return {"error": error}


def _details(stdout: str, exception: dict[str, Any] | None) -> dict[str, Any]:
    return {"value": None, "value_repr": None, "stdout": stdout, "exception": exception}


def _summary(exception: dict[str, Any]) -> str:
    line = f" (line {exception['line']})" if exception["line"] else ""
    message = f": {exception['message']}" if exception["message"] else ""
    return f"{exception['type']}{message}{line}"


_WARM_UP = "1"
"""The warm-up program. Short on purpose: what parser, tables and policy touch for it, they touch
for every program, and each further page would be copied into every spare child for nothing.
"""

_PRELOADS = (
    """
import math, re, json
class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def norm(self):
        return math.sqrt(self.x ** 2 + self.y ** 2)
def squares(n):
    for i in range(n):
        yield i * i
found = {k: v for k, v in zip("abc", squares(3))}
found["a"] += 1
try:
    found["z"]
except KeyError as error:
    print(f"{error!r:>10}", sorted(found.items(), key=lambda pair: -pair[1]))
text = re.sub("[0-9]+", "x", json.dumps(found)).upper()
[Point(3, 4).norm(), text.split(",")]
""",
    """
import datetime, decimal, fractions, statistics, textwrap, heapq, copy, random, string
moment = datetime.datetime.strptime("2024-02-29 12:30", "%Y-%m-%d %H:%M")
print(moment.strftime("%A %d %B %Y"), moment.isocalendar(), datetime.datetime.now())
print(decimal.Decimal("1.10") / 3, fractions.Fraction("1/3"), statistics.stdev([1, 2, 4]))
print(textwrap.fill("a b c " * 30), copy.deepcopy([1, {2: 3}]), random.Random("a").random())
print("é".encode("latin-1"), b"x".decode("ascii"), "ü".encode("utf-16"), string.capwords("a b"))
""",
)
