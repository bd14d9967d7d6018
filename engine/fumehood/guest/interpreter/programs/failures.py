"""How a program failed, in words that help to mend it: type, message, line, and its own lines.

Guest side. Invariant: only lines of the program are shown, nothing of the files and
functions around it. Type and message are the program's own to choose, so they are cut.
"""

from __future__ import annotations

import traceback
from typing import Any

from fumehood.guest.interpreter.programs.policy import FILENAME
from fumehood.guest.interpreter.programs.values import utf8

MAX_TEXT_CHARACTERS = 500
MAX_FRAMES = 10


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
    """Where in the program, in brackets; nothing where that is not known."""
    lines = [line for frame, line in traceback.walk_tb(fault.__traceback__) if _is_programs(frame)]
    return f" (line {lines[-1]})" if lines else ""


def describe_syntax(error: SyntaxError) -> dict[str, Any]:
    """The same for text that is no program."""
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
