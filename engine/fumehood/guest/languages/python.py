"""Python: run a program like `python main.py`, and report the value of its last expression.

Guest side, in the child. The report is a claim: printed text goes through the standard streams,
where the supervisor counts it, and the exit status decides how the run ended. In a session, the
names of one program are available to the next program, although a different process runs the next
program (see `container.link`).

A value is reported as text, and also as JSON if possible. A pandas table becomes a list of records,
and a NumPy array a list of numbers, if it is small enough for an answer. An index other than row
numbers becomes a column. If JSON cannot hold exactly the table's values, the table is reported as
text only. pandas and NumPy are never loaded for this.
"""

from __future__ import annotations

import _sitebuiltins
import ast
import atexit
import builtins
import contextlib
import functools
import gc
import io
import json
import linecache
import math
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from fumehood.guest.languages.given import GivenModules
from fumehood.guest.languages.libraries import LIBRARIES, MAX_NOTES, late_modules
from fumehood.protocol import strict_json
from fumehood.protocol.framing import MAX_KEY_CHARACTERS, MAX_REPORTS, OF_WORDS, whole_words

FILENAME = "<code>"
"""File name of the first program; later ones of a session are `<code 2>` and so on."""

KEY_BEGINS, KEY_ENDS = "-----BEGIN ", "-----END "
"""Beginnings of the lines before and after a private key in PEM. *Source*: RFC 7468."""

MAX_MESSAGE_CHARACTERS = 2000
MAX_TRACEBACK_CHARACTERS = 16_000

OK = 0
FAILED = 1

COROUTINE = 0x80
"""Flag of code that contains a top-level `await`. *Source*: inspect.CO_COROUTINE."""

PRELOADED = (
    "base64", "bisect", "collections", "copy", "csv", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "heapq", "itertools", "json", "math", "operator", "pathlib", "random",
    "re", "statistics", "string", "textwrap", "time", "typing",
)  # fmt: skip
"""Modules loaded once by the zygote, because programs use them most. Each page of a loaded module
costs every program time when it is forked and when it ends, so large and rarer modules (hashlib
with OpenSSL, subprocess, tempfile, uuid) are left out.
"""

Claim = dict[str, Any]
Report = Callable[[float, str], None]
"""Reports a program's progress: a percentage and a short message."""


def preload(modules: Sequence[str] = ()) -> None:
    """Load common modules (`PRELOADED`) and the image's `modules`, so that all children share them.
    Also add the built-in names `exit`, `quit` and `help`. If pandas was loaded, set it up.
    """
    for library in LIBRARIES:
        library.preload(modules)
    for name in (*PRELOADED, *modules):
        __import__(name)
    _add_site_names()
    if "pandas" in sys.modules:
        _set_up_pandas()


def expect_late() -> None:
    """Arrange that libraries that `preload` has not loaded are set up when a program imports them.
    An example is pandas.
    """
    late = late_modules()
    for library in LIBRARIES:
        late.around.update(library.AROUND)
    late.around["pandas"] = _pandas_set_up


@contextlib.contextmanager
def _pandas_set_up() -> Iterator[None]:
    yield
    _set_up_pandas()


def _set_up_pandas() -> None:
    """Set pandas to a constant display width, because there is no terminal."""
    sys.modules["pandas"].set_option("display.width", 120, "display.max_columns", 20)


def _add_site_names() -> None:
    """Add `exit`, `quit` and `help`, as the module `site` would; the guest runs without `site`."""
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    setattr(builtins, "help", _sitebuiltins._Helper())  # noqa: B010  # unknown to type checkers


def warm_up() -> None:
    """Run a small program, to touch the memory pages that every program needs. The process must do
    this before it gets a request, so that no call waits for it. Standard output should be a null
    device.
    """
    dummy = Program(memory_bytes=0)
    dummy.run(_DUMMY)
    if "pandas" in sys.modules:
        dummy.run(_DATA_DUMMY)
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

_DATA_DUMMY = """\
import numpy as np
import pandas as pd
table = pd.DataFrame({"key": np.arange(200) % 7, "value": np.arange(200) * 1.5})
table.groupby("key")["value"].agg(["mean", "sum"])
"""


def get_ready() -> None:
    """Reseed the random generators of Python and NumPy. Each child must call this after the fork,
    because otherwise all children would draw the same numbers.
    """
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


class Program:
    """Runs programs in one main module, one after the other, so that a program can use the names of
    earlier programs. The process must have called `get_ready`.

    `memory_bytes` bounds the size of figures that are saved as files. Each call of `progress()` in
    a program is passed to `report`.
    """

    def __init__(self, memory_bytes: int, report: Report = lambda percent, message: None) -> None:
        self._names = _new_main()
        self._memory_bytes = memory_bytes
        self._report = report
        self._programs = 0
        self._reports = 0
        self._results = [library.Results(memory_bytes) for library in LIBRARIES]
        self._code = ""
        _catch_spawn(lambda: self._code)
        self._given = GivenModules()

    def run(self, code: str, arguments: Mapping[str, Any] | None = None) -> tuple[int, Claim]:
        """Run the program `code`, and return its exit code and its claim. Threads of the program
        may still be running afterwards. If `arguments` has an argument with the name of a module
        that the guest provides, such as `tools`, the program can import this module.
        """
        self._programs += 1
        self._code = code
        with contextlib.suppress(OSError):  # the working directory was deleted
            # Programs build paths from it. The file does not exist.
            self._names["__file__"] = os.path.join(os.getcwd(), "main.py")
        self._given.give(arguments or {})
        self._reports = 0
        for results in self._results:
            results.begin()
        builtins.progress = self._progress  # type: ignore[attr-defined]
        filename = FILENAME if self._programs == 1 else f"<code {self._programs}>"
        exit_code, claim = _run_main(code, self._names, filename)
        try:
            for results in self._results if self._memory_bytes else ():
                results.take()
        except MemoryError as error:
            return FAILED, {"error": {"kind": "memory", "message": str(error)}}
        notes = [note for results in self._results for note in results.notes]
        if notes and isinstance(claim.get("result"), dict):
            claim["result"]["notes"] = [*claim["result"].get("notes", []), *notes][:MAX_NOTES]
        return exit_code, claim

    def finish(self) -> None:
        """Run the steps with which the interpreter ends a program. No program may run
        afterwards.
        """
        _finish(self._names)
        self._given.close()

    def pause(self) -> None:
        """Wait for all threads of the program except daemon threads, and flush its files. Must be
        called before this process is copied.
        """
        for step in (_join_threads, _flush_files):
            try:
                step()
            except BaseException as error:
                _print_briefly(f"{type(error).__name__} while the program ended\n")
        self._given.close()
        _flush_streams()

    def _progress(self, percent: float, message: str = "") -> None:
        """Report the progress of this program: 0 to 100, and a short message."""
        self._reports += 1
        # Further reports would be ignored. The pipe could fill up unread, and block the program.
        if self._reports <= MAX_REPORTS:
            with self._given.writing:
                self._report(float(percent), str(message))


def _catch_spawn(code: Callable[[], str]) -> None:
    """Make processes that `multiprocessing` spawns load the running program as their main module.
    `code` returns the text of the running program.
    """
    late_modules().around["multiprocessing.spawn"] = lambda: _spawn_caught(code)
    if "multiprocessing.spawn" in sys.modules:
        _replace_preparation(code)


@contextlib.contextmanager
def _spawn_caught(code: Callable[[], str]) -> Iterator[None]:
    yield
    _replace_preparation(code)


def _replace_preparation(code: Callable[[], str]) -> None:
    spawn: Any = sys.modules["multiprocessing.spawn"]
    util = sys.modules["multiprocessing.util"]
    prepare = spawn.get_preparation_data
    prepare = getattr(prepare, "__wrapped__", prepare)  # wrapped for an earlier main module

    @functools.wraps(prepare)
    def with_program(name: str) -> dict[str, Any]:
        told: dict[str, Any] = prepare(name)
        if "init_main_from_path" in told:
            import tempfile

            told["init_main_from_path"] = path = os.path.join(util.get_temp_dir(), "main.py")
            number, draft = tempfile.mkstemp(dir=util.get_temp_dir())
            with open(number, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
                file.write(code())
            os.replace(draft, path)  # an earlier process may still be reading the old file
        return told

    spawn.get_preparation_data = with_program


def _is_program(filename: str | None) -> bool:
    return filename is not None and filename.startswith("<code") and filename.endswith(">")


def _join_threads() -> None:
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def _new_main() -> dict[str, Any]:
    """Create a new main module, and return its namespace."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    return main.__dict__


def _run_main(code: str, names: dict[str, Any], filename: str) -> tuple[int, Claim]:
    lines = code.splitlines(keepends=True)
    linecache.cache[filename] = (len(code), None, lines, filename)
    try:
        value = _execute(code, names, filename)
        return OK, success(value)
    except SystemExit as request:
        return _exit_code(request), {}
    except MemoryError:
        _print_briefly("MemoryError: the program needed more memory than there is\n")
        return FAILED, {"error": {"kind": "memory", "message": "MemoryError"}}
    except BaseException as error:
        return FAILED, _failure(error)


def _execute(code: str, names: dict[str, Any], filename: str) -> Any:
    tree = ast.parse(code, filename)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    parts = [compile(tree, filename, "exec", flags, dont_inherit=True)]
    if isinstance(last, ast.Expr):
        expression = ast.Expression(last.value)
        parts.append(compile(expression, filename, "eval", flags, dont_inherit=True))
    value = None
    with contextlib.ExitStack() as stack:
        runner: Any = None
        for part in parts:
            value = eval(part, names)  # noqa: S307  # what it is for
            if part.co_flags & COROUTINE:
                if runner is None:
                    runner = stack.enter_context(_event_loop())
                value = runner.run(value)
    return value if len(parts) > 1 else NoValue


def _event_loop() -> Any:
    """Return a runner with a new event loop, for a program with a top-level `await`. When the
    runner is closed, it cancels all tasks that still run.
    """
    import asyncio

    # Not kept for the session's next program, because another process runs that program.
    return asyncio.Runner()


def _failure(error: BaseException) -> Claim:
    """Print the traceback of an exception, and return the claim for it. Both show only the
    program's own lines.
    """
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
    except BaseException as fault:  # the exception's `__str__` may do anything
        words = shown = message = (
            f"{type(error).__name__} (which fails to say more: {type(fault).__name__})"
        )
        line = None
    _print_briefly(shown if shown.endswith("\n") else shown + "\n")
    return {
        "error": {
            "kind": "exception",
            "message": shortened(message, MAX_MESSAGE_CHARACTERS),
            "errno": error.errno if isinstance(error, OSError) and _is_small(error.errno) else None,
            "exception": {
                "type": shortened(type(error).__name__, 100),
                "message": shortened(words, MAX_MESSAGE_CHARACTERS),
                "line": line,
                "traceback": shortened(shown, MAX_TRACEBACK_CHARACTERS),
            },
        }
    }


def _in_program(entry: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the program's first frame on, without the frames of this file."""
    while entry is not None and not _is_program(entry.tb_frame.f_code.co_filename):
        entry = entry.tb_next
    return entry


def _last_line(error: BaseException) -> int | None:
    """Return the number of the program's line in which an exception was raised. Return None if the
    exception's traceback has no line of the program.
    """
    if isinstance(error, SyntaxError) and _is_program(error.filename):
        return error.lineno if _is_small(error.lineno) else None
    line = None
    entry = error.__traceback__
    while entry is not None:
        if _is_program(entry.tb_frame.f_code.co_filename):
            line = entry.tb_lineno
        entry = entry.tb_next
    return line


def _is_small(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 31


def _exit_code(request: SystemExit) -> int:
    """Return the exit code that Python itself would use. This is 0 for None, and the lowest 8 bits
    for an integer. Anything else is printed and gives 1.
    """
    code: object = request.code
    if code is None:
        return OK
    if isinstance(code, int):
        return int(code) & 0xFF
    _print_briefly(f"{represent(code) if not isinstance(code, str) else code}\n")
    return FAILED


def _finish(names: dict[str, Any]) -> None:
    """End a program as Python's interpreter does: join threads, run exit handlers, flush files, and
    release the program's objects. `names` is the namespace of the program's main module.
    """
    for step in (
        threading._shutdown,  # type: ignore[attr-defined]
        atexit._run_exitfuncs,
        _flush_files,  # before the release, which closes files in cycles in an arbitrary order
        lambda: _let_go(names),
    ):
        try:
            step()
        except BaseException as error:
            _print_briefly(f"{type(error).__name__} while the program ended\n")
    _flush_streams()


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:  # closed, or replaced by the program
            pass


def _let_go(names: dict[str, Any]) -> None:
    """Set all names of the program to None, so that its objects are released. If a daemon thread
    still runs, do nothing.
    """
    if len(sys._current_frames()) > 1:
        return  # a daemon thread would continue with names that are None
    # Some objects, such as open archives, write their last bytes only when they are released.
    for name in list(names):
        if name != "__builtins__":
            names[name] = None
    gc.collect()


def _flush_files() -> None:
    """Flush files that the program has not closed."""
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
        os.write(2, whole_words(text, MAX_TRACEBACK_CHARACTERS).encode("utf-8", "backslashreplace"))
    except OSError:
        pass


def open_standard_streams() -> None:
    """Reopen the standard streams on descriptors 0, 1 and 2. Output is flushed after each line, so
    that the last output of a killed program is not lost.
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


MAX_VALUE_BYTES = 64 * 1024
MAX_REPR_CHARACTERS = 10_000

MAX_RECORDS_BYTES = 10 * 1024
"""Size limit of a table as JSON in an answer. A larger table is reported as text only."""

LEAST_CELL_BYTES = 2
"""Minimum size of a table's cell in JSON, in bytes: a digit and a comma."""

TOO_LARGE = (
    "value: the table is too large to stand in the answer as records, so it is there as text, "
    "shortened; write it to a file (to_csv), or end with a part of it (head)"
)


class NoValue:
    """The value of a program that does not end with an expression. The class itself is used as this
    value, and has no instances.
    """


def success(value: Any) -> Claim:
    """Return the claim for a program that ended with `value`. It contains the value as JSON and as
    text. If the value is a table that is too large for JSON, the JSON is None, and `notes` says
    why.
    """
    if value is NoValue or value is None:
        return {"result": {"value": None, "has_value": False, "value_repr": None}}
    notes = []
    try:
        plain = _plain(plain_table(value))
    except TooLarge:
        plain, notes = None, [TOO_LARGE]
    except NoTable:
        plain = _plain(value)
    told = {"value": plain, "has_value": True, "value_repr": represent(value)}
    return {"result": told | ({"notes": notes} if notes else {})}


def _plain(value: Any) -> Any:
    """Return the value if JSON can hold it unchanged within the size limit, else None."""
    try:
        plain = strict_json.exact(value, MAX_VALUE_BYTES)
    except (strict_json.Inexact, strict_json.TooLong):
        return None
    return plain if len(strict_json.dumps(plain)) <= MAX_VALUE_BYTES else None


def represent(value: Any) -> str:
    try:
        text = repr(value)
        if type(text) is not str:  # a subclass of `str` is the program's own
            text = str.__str__(text)
    except MemoryError:
        raise
    except BaseException as error:
        return f"<repr() failed: {type(error).__name__}>"
    return shortened(text, MAX_REPR_CHARACTERS)


def shortened(text: str, most: int) -> str:
    """Return a text as valid UTF-8, without its middle if the text is longer than `most`
    characters.
    """
    if len(text) > most:
        head = whole_words(text, most // 2 - 20).removesuffix("…")
        tail = _end_of(text, most // 2 - 20)
        text = f"{head}\n… {len(text) - len(head) - len(tail)} characters …\n{tail}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _end_of(text: str, most: int) -> str:
    """Return about the last `most` characters of a text. If they would begin in the middle of a
    word or of a private key, the rest of that word or key is left out. Of a word, at most
    `MAX_KEY_CHARACTERS` characters are left out.
    """
    at = len(text) - most
    begins = text.rfind(KEY_BEGINS, 0, at + len(KEY_BEGINS))
    is_in_key = begins >= 0 and text.find(KEY_ENDS, begins, at) < 0
    end = text[at:].partition(KEY_ENDS)[2] if is_in_key else text[at:]
    if text[at - 1] not in OF_WORDS:
        return end
    return max(end.lstrip(OF_WORDS), end[MAX_KEY_CHARACTERS:], key=len)


class NoTable(Exception):
    """The value is not a table of pandas or NumPy, or JSON cannot hold it."""


class TooLarge(NoTable):
    """The table is too large for an answer."""


def plain_table(value: Any) -> Any:
    """Return the records of a DataFrame or Series, or the numbers of a NumPy array or scalar.

    Raises:
        NoTable: the value is not of these types, or JSON cannot hold it exactly.
        TooLarge: the table is too large for an answer.
    """
    pandas, numpy = sys.modules.get("pandas"), sys.modules.get("numpy")
    try:
        if pandas is not None and isinstance(value, pandas.Series):
            value = value.to_frame(value.name if value.name is not None else "value")
        if pandas is not None and isinstance(value, pandas.DataFrame):
            return _records(value, pandas)
        if numpy is not None and isinstance(value, numpy.generic):
            return value.item()
        if numpy is not None and isinstance(value, numpy.ndarray):
            _require_room(value)
            return value.tolist()
    except NoTable:
        raise
    except Exception:  # the program's own classes may be among its cells
        raise NoTable from None
    raise NoTable


def _require_room(table: Any) -> None:
    """Raise TooLarge if a table has too many cells for an answer. The caller must check this before
    it converts the table, because the conversion is slow.
    """
    if table.size * LEAST_CELL_BYTES > MAX_RECORDS_BYTES:
        raise TooLarge


def _records(table: Any, pandas: Any) -> list[dict[str, Any]]:
    _require_room(table)
    is_numbered = isinstance(table.index, pandas.RangeIndex) and table.index.name is None
    if not is_numbered:
        table = table.reset_index()
    names = [str(name) for name in table.columns]
    if len(set(names)) != len(names):
        raise NoTable  # a record cannot have the same name twice
    columns = [
        [_cell(cell, pandas) for cell in table.iloc[:, number].tolist()]
        for number in range(len(names))
    ]
    records = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    if len(json.dumps(records)) > MAX_RECORDS_BYTES:
        raise TooLarge
    return records


def _cell(cell: Any, pandas: Any) -> Any:
    """Return a table's cell as JSON: missing values as None, times and durations in ISO 8601.
    Raises NoTable if JSON cannot hold the cell exactly.
    """
    if cell is None or cell is pandas.NaT or cell is pandas.NA:
        return None
    kind = type(cell)
    if kind is float:
        if math.isinf(cell):
            raise NoTable
        return None if math.isnan(cell) else cell
    if kind in (str, bool, int):
        return cell
    if isinstance(cell, pandas.Timestamp | pandas.Timedelta) or hasattr(cell, "isoformat"):
        return str(cell.isoformat())
    numpy = sys.modules["numpy"]
    if isinstance(cell, numpy.generic):
        return _cell(cell.item(), pandas)
    raise NoTable
