"""Python: run a program as `python main.py` would, and tell the value of its last expression.

Guest side, in the child. What is told is a claim: printed text goes through the standard
streams, where the supervisor counts it, and how the run ended is told by the exit status.
"""

from __future__ import annotations

import _sitebuiltins
import ast
import atexit
import builtins
import contextlib
import gc
import io
import linecache
import os
import random
import sys
import threading
import traceback
import types
from types import TracebackType
from typing import Any

from fumehood.wire import strict_json

FILENAME = "<code>"
WORKSPACE = "/workspace"

MAX_VALUE_BYTES = 64 * 1024
MAX_VALUE_DEPTH = 50
"""A little under what the host reads: a value stands inside a claim inside a frame."""
MAX_REPR_CHARACTERS = 10_000
MAX_MESSAGE_CHARACTERS = 2000
MAX_TRACEBACK_CHARACTERS = 16_000
MAX_SAFE_INTEGER = 2**53 - 1
"""Readers whose numbers are doubles would read a larger one as another."""

OK = 0
FAILED = 1

PRELOADED = (
    "base64", "bisect", "collections", "copy", "csv", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "heapq", "itertools", "json", "math", "operator", "pathlib", "random",
    "re", "statistics", "string", "textwrap", "time", "typing",
)  # fmt: skip
"""Loaded once by the zygote; programs ask for these most. Every page of a module is paid for by
each program when it is forked and when it ends, so what is large and rarer (hashlib with OpenSSL,
subprocess, tempfile, uuid) is not here.
"""

Claim = dict[str, Any]


def preload() -> None:
    """Load what programs ask for most, so that each of them finds it there."""
    for name in PRELOADED:
        __import__(name)
    _add_site_names()


def _add_site_names() -> None:
    """`exit`, `quit` and `help`: every Python has them, and they come from `site`, without which
    the guest runs.
    """
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    setattr(builtins, "help", _sitebuiltins._Helper())  # noqa: B010  # unknown to type checkers


def warm_up() -> None:
    """Run a small program on a null device, to touch the pages that every program needs."""
    _open_standard_streams()
    _run_main(_DUMMY, _new_main())
    sys.stdout.flush()
    linecache.clearcache()


_DUMMY = """\
squares = [n * n for n in range(10)]
print(f"{sum(squares)}")
try:
    1 / 0
except ZeroDivisionError:
    pass
squares
"""


def get_ready() -> None:
    """Open the streams on what stands on 0, 1 and 2 now, and draw numbers of this process's own:
    forks of one zygote would otherwise all draw the same.
    """
    _open_standard_streams()
    random.seed()


def run(code: str) -> tuple[int, Claim]:
    """Run one program to its end, flushed and with its threads joined: (exit code, claim).

    `get_ready` comes first.
    """
    names = _new_main()
    exit_code, claim = _run_main(code, names)
    _finish(names)
    return exit_code, claim


def _new_main() -> dict[str, Any]:
    """The names of a new main module."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    return main.__dict__


def _run_main(code: str, names: dict[str, Any]) -> tuple[int, Claim]:
    lines = code.splitlines(keepends=True)
    linecache.cache[FILENAME] = (len(code), None, lines, FILENAME)
    try:
        value = _execute(code, names)
        return OK, _success(value)
    except SystemExit as request:
        return _exit_code(request), {}
    except MemoryError:
        _print_briefly("MemoryError: the program needed more memory than there is\n")
        return FAILED, {"error": {"kind": "memory", "message": "MemoryError"}}
    except BaseException as error:
        return FAILED, _failure(error)


class _NoValue:
    """The program does not end with an expression."""


def _execute(code: str, names: dict[str, Any]) -> Any:
    tree = ast.parse(code, FILENAME)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, FILENAME, "exec", dont_inherit=True), names)  # noqa: S102  # what it is for
    if not isinstance(last, ast.Expr):
        return _NoValue
    expression = ast.Expression(last.value)
    return eval(compile(expression, FILENAME, "eval", dont_inherit=True), names)  # noqa: S307


def _success(value: Any) -> Claim:
    if value is _NoValue or value is None:
        return {"result": {"value": None, "has_value": False, "value_repr": None}}
    return {"result": {"value": _plain(value), "has_value": True, "value_repr": _repr(value)}}


def _plain(value: Any) -> Any:
    """The value where JSON can hold it as it is; None elsewhere."""
    try:
        if _is_plain(value, MAX_VALUE_DEPTH, [MAX_VALUE_BYTES]):
            encoded = strict_json.dumps(value)
            if len(encoded) <= MAX_VALUE_BYTES:
                return strict_json.loads(encoded, max_depth=MAX_VALUE_DEPTH)
    except (ValueError, TypeError, RecursionError, UnicodeError):
        pass
    return None


def _is_plain(value: Any, depth: int, room: list[int]) -> bool:
    """Whether it is made of exactly JSON's own types, not too deep, nor too many of them."""
    room[0] -= 1
    kind = type(value)
    if depth < 0 or room[0] < 0:
        return False
    if value is None or kind in (bool, float, str):
        return kind is not str or len(value) <= MAX_VALUE_BYTES
    if kind is int:
        return bool(-MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER)
    if kind in (list, tuple):
        return all(_is_plain(item, depth - 1, room) for item in value)
    if kind is dict:
        return all(type(key) is str for key in value) and all(
            _is_plain(item, depth - 1, room) for item in value.values()
        )
    return False


def _repr(value: Any) -> str:
    try:
        text = repr(value)
        if type(text) is not str:  # a subclass of it is the program's own
            text = str.__str__(text)
    except MemoryError:
        raise
    except BaseException as error:
        return f"<repr() failed: {type(error).__name__}>"
    return _text(text, MAX_REPR_CHARACTERS)


def _failure(error: BaseException) -> Claim:
    """What an exception says, and the way through the program's own lines."""
    try:
        described = traceback.TracebackException(
            type(error), error, _in_program(error.__traceback__), limit=-50
        )
        shown = "".join(described.format())
        message = "".join(described.format_exception_only()).strip()
        words = str(error)
        line = _last_line(error)
    except MemoryError:
        raise
    except BaseException as fault:  # its own `__str__` may do anything
        words = shown = message = (
            f"{type(error).__name__} (which fails to say more: {type(fault).__name__})"
        )
        line = None
    _print_briefly(shown if shown.endswith("\n") else shown + "\n")
    return {
        "error": {
            "kind": "exception",
            "message": _text(message, MAX_MESSAGE_CHARACTERS),
            "errno": error.errno if isinstance(error, OSError) and _is_small(error.errno) else None,
            "exception": {
                "type": _text(type(error).__name__, 100),
                "message": _text(words, MAX_MESSAGE_CHARACTERS),
                "line": line,
                "traceback": _text(shown, MAX_TRACEBACK_CHARACTERS),
            },
        }
    }


def _in_program(entry: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first own frame on: what is above it is this file's."""
    while entry is not None and entry.tb_frame.f_code.co_filename != FILENAME:
        entry = entry.tb_next
    return entry


def _last_line(error: BaseException) -> int | None:
    """The line of the program in which it happened."""
    if isinstance(error, SyntaxError) and error.filename == FILENAME:
        return error.lineno if _is_small(error.lineno) else None
    line = None
    entry = error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code.co_filename == FILENAME:
            line = entry.tb_lineno
        entry = entry.tb_next
    return line


def _is_small(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 31


def _exit_code(request: SystemExit) -> int:
    """As Python does it: none is 0, a number is itself, anything else is printed and is 1."""
    code: object = request.code
    if code is None:
        return OK
    if isinstance(code, int):
        return int(code) & 0xFF
    _print_briefly(f"{_repr(code) if not isinstance(code, str) else code}\n")
    return FAILED


def _finish(names: dict[str, Any]) -> None:
    """What the interpreter does at its end: join threads, run exit handlers, let go of what the
    program holds, flush.
    """
    for step in (
        threading._shutdown,  # type: ignore[attr-defined]
        atexit._run_exitfuncs,
        _flush_files,  # first: those that hold each other are closed in no certain order
        lambda: _let_go(names),
    ):
        try:
            step()
        except BaseException as error:
            _print_briefly(f"{type(error).__name__} while the program ended\n")
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:  # closed, or replaced by the program
            pass


def _let_go(names: dict[str, Any]) -> None:
    """Archives and such write their last bytes when nobody holds them any more."""
    if len(sys._current_frames()) > 1:
        return  # a daemon's thread would go on with names that mean nothing any more
    for name in list(names):
        if name != "__builtins__":
            names[name] = None
    gc.collect()


def _flush_files() -> None:
    """Of files that the program has not closed, whoever holds them."""
    for held in gc.get_objects():
        if issubclass(type(held), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(Exception):  # closed, or its disk is full
                held.flush()


def _print_briefly(text: str) -> None:
    try:
        sys.stderr.flush()
    except BaseException:
        pass
    try:
        os.write(2, text[:MAX_TRACEBACK_CHARACTERS].encode("utf-8", "backslashreplace"))
    except OSError:
        pass


def _open_standard_streams() -> None:
    """Anew on descriptors 0, 1 and 2. Each line goes out at once, or a killed program's last
    words would be lost in a buffer.
    """
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8", errors="strict"
    )
    for name, descriptor, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _text(text: str, most: int) -> str:
    """Short enough, and such that every reader can read it; the end says more than the middle."""
    if len(text) > most:
        kept = most // 2 - 20
        text = f"{text[:kept]}\n… {len(text) - 2 * kept} characters …\n{text[-kept:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
