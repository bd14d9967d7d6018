"""What a program gives back: what it printed, its value, and how it failed.

Guest side. Invariants: printed text never grows beyond the output limit, and once it would, the
run can only end as one that printed too much. Of a value, only exact built-in types are looked
into; everything else is shown by its own `repr`, whose faults are the program's faults. Of a
failure, only lines of the program are shown, nothing of the files and functions around it; its
type and message are the program's own to choose, so they are cut.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

from fumehood.guest.interpreter.programs.nodes import FILENAME
from fumehood.protocol import strict_json
from fumehood.protocol.strict_json import MAX_VALUE_DEPTH

MAX_REPR_CHARACTERS = 4000

MAX_TEXT_CHARACTERS = 500
MAX_FRAMES = 10


class OutputFull(BaseException):
    """The program has printed or returned more than its output limit. `Refused` has the rules."""


class Printed:
    """The text that a program has printed so far."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._parts: list[str] = []
        self.is_full = False

    def text(self) -> str:
        """The whole text, with characters that UTF-8 cannot hold escaped."""
        return "".join(self._parts)

    def write(
        self, *values: Any, sep: Any = " ", end: Any = "\n", file: Any = None, flush: Any = False
    ) -> None:
        """`print(*values, sep=…, end=…)`; `flush` means nothing here, and `file` is refused.

        Raises:
            OutputFull: it is over the limit; what fitted is kept.
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
        # Cut first: a text of the program's whole memory need not be encoded to be too long.
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
    """The print collector that RestrictedPython's code uses; one for all functions."""

    __slots__ = ("_call_print",)

    def __init__(self, printed: Printed) -> None:
        def write(
            *values: Any, sep: Any = " ", end: Any = "\n", file: Any = None, flush: Any = False
        ) -> None:
            printed.write(*values, sep=sep, end=end, file=file, flush=flush)

        write.__name__ = write.__qualname__ = "print"  # as Python says where arguments are wrong
        self._call_print = write  # a function: no way back to the collector


def json_value(value: Any, max_bytes: int) -> Any:
    """The value as JSON, or None if JSON cannot hold it exactly.

    Raises:
        OutputFull: it is longer than `max_bytes`, which is seen before all of it is walked.
    """
    try:
        return strict_json.exact(value, max_bytes)
    except strict_json.TooLong:
        raise OutputFull from None
    except strict_json.Inexact:
        return None


def short_repr(value: Any) -> str:
    """`repr(value)`, cut after 4,000 characters without walking long containers to their end."""
    text = _repr(value, MAX_REPR_CHARACTERS + 1, MAX_VALUE_DEPTH)
    if len(text) > MAX_REPR_CHARACTERS:
        text = text[:MAX_REPR_CHARACTERS] + "…"
    return utf8(text)


def utf8(text: str) -> str:
    """Escape lone surrogates, which the channel refuses."""
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
        if type(value) is int:  # Python turns no integer of so many digits into text
            return f"an integer of {value.bit_length()} bits"
        raise


def describe(fault: BaseException, code: str) -> dict[str, Any]:
    """`{type, message, line, traceback}` of an exception that the program did not catch."""
    lines = code.splitlines()
    frames = [frame for frame in traceback.walk_tb(fault.__traceback__) if _is_programs(frame[0])]
    kind = utf8(type(fault).__name__)[:MAX_TEXT_CHARACTERS]
    message = _message(fault)
    shown = ["Traceback (most recent call last):\n"]
    if len(frames) > MAX_FRAMES:
        shown.append(f"  … {len(frames) - MAX_FRAMES} more\n")
    for frame, line in frames[-MAX_FRAMES:]:
        shown.append(f'  File "{FILENAME}", line {line}, in {utf8(frame.f_code.co_name)[:60]}\n')
        if 0 < line <= len(lines) and (text := utf8(lines[line - 1].strip())[:120]):
            shown.append(f"    {text}\n")
    shown.append(f"{kind}: {message}" if message else kind)
    return {
        "type": kind,
        "message": message,
        "line": frames[-1][1] if frames else None,
        "traceback": "".join(shown),
    }


def last_line(fault: BaseException) -> str:
    """The position in the program, in brackets, or nothing if it is unknown."""
    lines = [line for frame, line in traceback.walk_tb(fault.__traceback__) if _is_programs(frame)]
    return f" (line {lines[-1]})" if lines else ""


def describe_syntax(error: SyntaxError) -> dict[str, Any]:
    """The same for text that is not a valid program."""
    message = utf8(str(error.msg or "invalid syntax"))[:MAX_TEXT_CHARACTERS]
    where = f'  File "{FILENAME}", line {error.lineno}\n' if error.lineno else ""
    text = utf8(error.text.strip())[:120] if isinstance(error.text, str) else ""
    return {
        "type": type(error).__name__,
        "message": message,
        "line": error.lineno,
        "traceback": f"{where}{f'    {text}' + chr(10) if text else ''}SyntaxError: {message}",
    }


def _message(fault: BaseException) -> str:
    try:
        # A program's own class may have a `__str__` of its own, which may fail or be long.
        return utf8(str(fault)[:MAX_TEXT_CHARACTERS])
    except BaseException:  # what the sandbox itself raises there is remembered (`refusal`)
        return ""


def _is_programs(frame: Any) -> bool:
    return bool(frame.f_code.co_filename == FILENAME)
