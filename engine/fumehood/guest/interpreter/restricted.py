"""Restricted programs: small Python programs that are evaluated to a value and printed text.

Guest side, run by a fresh child that dies after its answer. A program is checked by Python's
parser, by the engine's tables (syntax, names, imports) and by RestrictedPython's policy. While the
program runs, the guards check it, with a separate table of attributes. Invariant: a program can
reach only what is in these tables; if the tables fail, the wall around the process still holds.

Output: printed text never exceeds the output limit. A program that prints more ends with the error
"output", whatever it does afterwards, or with the error "policy" if the guards have refused it
something. Values: only containers of exact built-in types are examined. Any other value is shown by
its own `repr`, and an exception in this `repr` counts as the program's. Failures: only lines of the
program are shown, but no other files and functions. The program can choose the type and the message
of an exception, so both are shortened.
"""

from __future__ import annotations

import ast
import gc
import mmap
import sys
import traceback
from collections.abc import Iterable
from types import CodeType
from typing import Any

from fumehood.guest.interpreter import modules, nodes
from fumehood.guest.interpreter.guards import Guards
from fumehood.guest.interpreter.nodes import FILENAME, VALUE, Refused, compile_program
from fumehood.protocol import strict_json
from fumehood.protocol.framing import before_word, whole_words
from fumehood.protocol.strict_json import MAX_VALUE_DEPTH

RESERVE_BYTES = 2 << 20
"""Address space in bytes that is reserved and released when a program has used up its memory limit,
because the report of this failure needs memory. The space is mapped but never touched, so it costs
no memory.
"""

REHEARSALS = 16
"""Number of times that each program in `_PRELOADS` runs before the first fork. Python rewrites the
bytecode of functions that run often. If it does so before the fork, all children share the memory
pages of this bytecode.
"""

KEPT_SHARE = 16
"""If an error and the printed text together exceed the output limit of N bytes, the first N /
`KEPT_SHARE` characters of the text are kept. In JSON, each character takes at most twelve bytes.
"""

_FUTURE_IGNORED = frozenset({"annotations"})
_BLOCKS = ("body", "orelse", "finalbody", "handlers")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the program in a request, and return the reply: `{result}` or `{error}`. A request is
    `{arguments: {code}, output_bytes}`.
    """
    return Run(request["arguments"]["code"], request["output_bytes"]).reply()


def warm_up() -> None:
    """Run a small program, to touch the memory pages that every program needs. A child must do this
    before it gets its request, so that no call waits for it.
    """
    strict_json.dumps(run({"arguments": {"code": _WARM_UP}, "output_bytes": 4096}))


def preload() -> None:
    """Run example programs in the zygote, so that libraries fill their caches. The children that
    are forked later share these caches.
    """
    # Python prints a finaliser's exception to standard error, which a sealed child may not use.
    sys.unraisablehook = lambda _: None
    for program in _PRELOADS * REHEARSALS:
        reply = run({"arguments": {"code": program}, "output_bytes": 4096})
        if "result" not in reply:
            raise RuntimeError(f"a program of our own failed: {reply['error']['message']}")


def compile_checked(code: str) -> CodeType:
    """Compile a program after checking its syntax, its imports and its names.

    Raises:
        SyntaxError: the program is not valid Python.
        Refused: the program uses something that is not allowed.
    """
    try:
        tree = ast.parse(code)
    except (RecursionError, MemoryError):
        # The parser's stack overflowed. Memory cannot run out: the schema bounds the text.
        raise SyntaxError("nested too deeply") from None
    except ValueError as error:  # NUL bytes, in some versions of Python
        raise SyntaxError(str(error)) from None
    tree = simplify(tree)
    nodes.check_names(nodes.check(tree))
    return compile_program(tree)


def simplify(tree: ast.Module) -> ast.Module:
    """Remove annotations and `from __future__ import annotations` from a program. Replace each bare
    `except:` by `except Exception:`. `tree` is changed in place and returned.
    """
    # Annotations are never evaluated. A bare `except:` could catch the sandbox's own exceptions.
    # Only statements are visited, because expressions contain none of these constructs.
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
    """One run of a program, from its text to the reply."""

    def __init__(self, code: str, max_bytes: int) -> None:
        self._code = code
        self._max_bytes = max_bytes
        self._printed = Printed(max_bytes)
        self._guards = Guards()
        self._reserve = mmap.mmap(-1, RESERVE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def reply(self) -> dict[str, Any]:
        """Compile and run the program. Return `{result}`, or `{error}` with the text printed so
        far.
        """
        try:
            program = compile_checked(self._code)
        except SyntaxError as error:
            description = describe_syntax(error)
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
        # The program's `finally` can swallow a refusal or the end of output, but they still count.
        if self._guards.refusal is not None or self._printed.is_full:
            return self._ended(None, namespace)
        if len(strict_json.dumps(result)) > self._max_bytes:
            return self._error("output", "the program printed or returned too much")
        return {"result": result}

    def namespace(self) -> dict[str, Any]:
        """Return the global variables of the program."""
        guards = self._guards
        made: dict[str, dict[str, Any]] = {
            "collections": {"namedtuple": guards.classes.named_tuple},
            "functools": {"total_ordering": guards.total_ordering},
        }
        door = PrintDoor(self._printed)
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
            "value": json_value(value, self._max_bytes),
            "value_repr": None if value is None else short_repr(value),
            "stdout": self._printed.text(),
        }

    def _ended(self, fault: BaseException | None, namespace: dict[str, Any]) -> dict[str, Any]:
        description = None
        if fault is not None and not isinstance(fault, MemoryError | OutputFull):
            # First, because an exception's `__str__` is the program's code: its refusals count.
            description = describe(fault, self._code)
        if self._guards.refusal is not None:
            line = last_line(self._guards.refusal)
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
        if self._printed.is_full:  # the text ends within a word, which may be a key
            stdout = before_word(stdout)
        error = {"kind": kind, "message": message, "details": _details(stdout, exception)}
        if len(strict_json.dumps(error)) > self._max_bytes:
            kept = whole_words(stdout, self._max_bytes // KEPT_SHARE)
            error["details"] = {**_details(kept, exception), "truncated": True}
        return {"error": error}


def _details(stdout: str, exception: dict[str, Any] | None) -> dict[str, Any]:
    return {"value": None, "value_repr": None, "stdout": stdout, "exception": exception}


def _summary(exception: dict[str, Any]) -> str:
    line = f" (line {exception['line']})" if exception["line"] else ""
    message = f": {exception['message']}" if exception["message"] else ""
    return f"{exception['type']}{message}{line}"


_WARM_UP = "1"
"""The warm-up program. It is short on purpose: parser, tables and policy need the same memory pages
for it as for every program. A longer program would touch further pages, and these would be copied
into every spare child needlessly.
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


# -- what a program gives back --------------------------------------------------------------

MAX_REPR_CHARACTERS = 4000

MAX_TEXT_CHARACTERS = 500
MAX_FRAMES = 10


class OutputFull(BaseException):
    """The program has printed or returned more than its output limit. Like `Refused`, this is an
    exception that programs cannot catch.
    """


class Printed:
    """The text that a program has printed so far."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._parts: list[str] = []
        self.is_full = False

    def text(self) -> str:
        """Return all text printed so far. Characters that UTF-8 cannot encode are escaped."""
        return "".join(self._parts)

    def write(
        self, *values: Any, sep: Any = " ", end: Any = "\n", file: Any = None, flush: Any = False
    ) -> None:
        """Implement `print(*values, sep=…, end=…)`. `flush` has no effect.

        Raises:
            TypeError: `file` was given, or `sep` or `end` is not a string.
            OutputFull: the text exceeds the limit; the part within the limit is kept.
        """
        if file is not None:
            raise TypeError("print() takes no file here; all output is collected")
        between, last = _text_or(sep, " ", "sep"), _text_or(end, "\n", "end")
        for place, value in enumerate(values):
            if place:
                self._keep(between)
            self._keep(str(value))
        self._keep(last)

    def _keep(self, text: str) -> None:
        # Cut before encoding: a text could be as large as the program's memory.
        encoded = text[: self._max_bytes + 1].encode("utf-8", "backslashreplace")
        room = self._max_bytes - self._bytes
        self._parts.append(encoded[:room].decode("utf-8", "ignore"))
        self._bytes += min(len(encoded), room)
        if len(encoded) > room:
            self.is_full = True
            raise OutputFull


def _text_or(value: Any, default: str, name: str) -> str:
    if value is None:
        return default
    if not isinstance(value, str):
        raise TypeError(f"{name} must be None or a string")
    return value


class PrintDoor:
    """The object through which code compiled by RestrictedPython prints. Each program has exactly
    one.
    """

    __slots__ = ("_call_print",)

    def __init__(self, printed: Printed) -> None:
        def write(
            *values: Any, sep: Any = " ", end: Any = "\n", file: Any = None, flush: Any = False
        ) -> None:
            printed.write(*values, sep=sep, end=end, file=file, flush=flush)

        write.__name__ = write.__qualname__ = "print"  # for Python's errors about arguments
        self._call_print = write  # not a method, which would expose the collector


def json_value(value: Any, max_bytes: int) -> Any:
    """Return the value as JSON, or None if JSON cannot hold it exactly.

    Raises:
        OutputFull: the JSON is longer than `max_bytes`.
    """
    try:
        return strict_json.exact(value, max_bytes)
    except strict_json.TooLong:
        raise OutputFull from None
    except strict_json.Inexact:
        return None


def short_repr(value: Any) -> str:
    """Return `repr(value)`, cut after 4,000 characters. The rest of a long container is not
    examined.
    """
    text = _repr(value, MAX_REPR_CHARACTERS + 1, MAX_VALUE_DEPTH)
    return utf8(whole_words(text, MAX_REPR_CHARACTERS))


def utf8(text: str) -> str:
    """Return `text` with its lone surrogates escaped, because the channel refuses them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _repr(value: Any, room: int, depth: int) -> str:
    kind = type(value)
    if kind is str or kind is bytes:
        return repr(value[:room])
    if depth == 0 or not value or kind not in (list, tuple, set, dict):
        return _own_repr(value)
    if kind is dict:
        pairs = ((key, item) for key, item in value.items())
        return "{" + _joined((_pair(*pair, room, depth - 1) for pair in pairs), room) + "}"
    inner = _joined((_repr(item, room, depth - 1) for item in value), room)
    if kind is list:
        return f"[{inner}]"
    if kind is set:
        return "{" + inner + "}"
    return f"({inner},)" if len(value) == 1 else f"({inner})"


def _pair(key: Any, item: Any, room: int, depth: int) -> str:
    return f"{_repr(key, room, depth)}: {_repr(item, room, depth)}"


def _joined(parts: Iterable[str], room: int) -> str:
    taken: list[str] = []
    for part in parts:
        taken.append(part)
        room -= len(part) + 2
        if room < 0:
            break
    return ", ".join(taken)


def _own_repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        if type(value) is int:  # Python refuses to convert so many digits to text
            return f"an integer of {value.bit_length()} bits"
        raise


def describe(fault: BaseException, code: str) -> dict[str, Any]:
    """Describe an exception that the program did not catch, as `{type, message, line,
    traceback}`.
    """
    lines = code.splitlines()
    frames = [frame for frame in traceback.walk_tb(fault.__traceback__) if _is_programs(frame[0])]
    kind = utf8(type(fault).__name__)[:MAX_TEXT_CHARACTERS]
    message = _message(fault)
    shown = ["Traceback (most recent call last):\n"]
    if len(frames) > MAX_FRAMES:
        shown.append(f"  … {len(frames) - MAX_FRAMES} more\n")
    for frame, line in frames[-MAX_FRAMES:]:
        shown.append(f'  File "{FILENAME}", line {line}, in {utf8(frame.f_code.co_name)[:60]}\n')
        if 0 < line <= len(lines) and (text := whole_words(utf8(lines[line - 1].strip()), 120)):
            shown.append(f"    {text}\n")
    shown.append(f"{kind}: {message}" if message else kind)
    return {
        "type": kind,
        "message": message,
        "line": frames[-1][1] if frames else None,
        "traceback": "".join(shown),
    }


def last_line(fault: BaseException) -> str:
    """Return the line of the program in which the exception `fault` was raised, as " (line N)".
    Return "" if the line is unknown.
    """
    lines = [line for frame, line in traceback.walk_tb(fault.__traceback__) if _is_programs(frame)]
    return f" (line {lines[-1]})" if lines else ""


def describe_syntax(error: SyntaxError) -> dict[str, Any]:
    """Describe why a program is not valid Python, as `{type, message, line, traceback}`."""
    message = whole_words(utf8(str(error.msg or "invalid syntax")), MAX_TEXT_CHARACTERS)
    where = f'  File "{FILENAME}", line {error.lineno}\n' if error.lineno else ""
    text = whole_words(utf8(error.text.strip()), 120) if isinstance(error.text, str) else ""
    return {
        "type": type(error).__name__,
        "message": message,
        "line": error.lineno,
        "traceback": f"{where}{f'    {text}' + chr(10) if text else ''}SyntaxError: {message}",
    }


def _message(fault: BaseException) -> str:
    try:
        # The `__str__` of a program's class may fail, or return a long text.
        return utf8(whole_words(str(fault), MAX_TEXT_CHARACTERS))
    except BaseException:  # refusals of the sandbox are remembered (`Guards.refusal`)
        return ""


def _is_programs(frame: Any) -> bool:
    return bool(frame.f_code.co_filename == FILENAME)
