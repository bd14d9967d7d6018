"""Exit codes of the command line, answers as JSON objects, and messages on the terminal.

Untrusted text (answers, program output, names, reasons, files) goes through `say` and `write` here
or through `core/escaping.py`. Invariant: a document accepted by `read_answer` has every key that
the command line reads, with a value of the right type, so that showing it cannot fail.
"""

from __future__ import annotations

import json
import re
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from fumehood.core.errors import ERROR_CODES, RequiresHumanApproval
from fumehood.core.escaping import printable
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL, EXTERNAL_NAME_PATTERN, NAME_PATTERN

if TYPE_CHECKING:
    from fumehood.core.envelope import Envelope


class ExitCode(IntEnum):
    """Exit codes for scripts."""

    SUCCESS = 0
    TOOL_FAILED = 1
    USAGE = 2
    WAITING_FOR_APPROVAL = 3
    UNAVAILABLE = 4


def exit_code_of(envelope: Envelope | JsonObject) -> int:
    """Return the exit code of an answer; a tool's own error code is 1.

    A call waits for approval only if it names the approval; otherwise there was no approver.
    """
    error = document_of(envelope)["error"]
    if error is None:
        return ExitCode.SUCCESS
    if error["code"] == RequiresHumanApproval.code and error.get("approval_id") is None:
        return ExitCode.TOOL_FAILED
    known = ERROR_CODES.get(error["code"])
    return known.exit_code if known is not None else ExitCode.TOOL_FAILED


def require_tool_name(reference: str) -> None:
    """End with a usage error if this is not a valid tool name."""
    name, _, version = reference.removeprefix(EXTERNAL).partition("@")
    pattern = EXTERNAL_NAME_PATTERN if reference.startswith(EXTERNAL) else NAME_PATTERN
    if not re.fullmatch(pattern, name) or not re.fullmatch(r"[0-9A-Za-z.+-]*", version):
        fail(f"{reference[:80]!r} is not a tool's name (or name@version).", ExitCode.USAGE)


def fail(message: str, code: ExitCode) -> NoReturn:
    """Print a message on stderr (on stdout if that is closed) and exit.

    The message is escaped, since it may contain text of a server or an index.
    """
    say(message, to_stderr=True)
    raise typer.Exit(code)


NOTHING = type(None)
ENVELOPE: JsonObject = {
    "success": bool,
    "status": str,
    "data": dict,
    "error": (NOTHING, {"code": str, "message": str}),
    "metadata": {
        "tool_name": (str, NOTHING), "tool_version": (str, NOTHING), "call_id": (str, NOTHING),
        "trace_id": str, "execution_time_ms": (int, float), "warnings": [str],
        "sandbox": (NOTHING, {"placement": str, "isolation": str, "ended_by": str}),
        "usage": {"cost": str, "currency": str},
    },
}  # fmt: skip
"""The form of an answer: a type, an object with these keys, a list of one form, or alternatives."""

MAYBE_IN_ERROR: JsonObject = {"approval_id": (str, NOTHING), "details": (dict, NOTHING)}


def read_answer(raw: bytes) -> JsonObject:
    """Parse the bytes of an answer into an envelope.

    Raises:
        ValueError: the bytes are not an envelope.
    """
    try:
        document: JsonObject = json.loads(raw.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not _has_form(document, ENVELOPE):
        raise ValueError("not an envelope")
    error = document["error"] or {}
    if not all(_has_form(error.get(key), form) for key, form in MAYBE_IN_ERROR.items()):
        raise ValueError("not the error of an envelope")
    return document


def _has_form(value: Any, form: Any) -> bool:
    if isinstance(form, tuple):
        return any(_has_form(value, one) for one in form)
    if isinstance(form, type):
        return isinstance(value, form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(one, form[0]) for one in value)
    return isinstance(value, dict) and all(
        key in value and _has_form(value[key], one) for key, one in form.items()
    )


def document_of(envelope: Envelope | JsonObject) -> JsonObject:
    """Return an answer as a JSON object."""
    if isinstance(envelope, dict):
        return envelope
    document: JsonObject = json.loads(envelope.model_dump_json())
    return document


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a message that may contain untrusted text."""
    print(printable(text), file=sys.stderr if to_stderr else sys.stdout)


def write(stream: TextIO, text: str) -> None:
    """Write untrusted text: escaped on a terminal, unchanged elsewhere."""
    if stream.isatty():
        stream.write(printable(text))
    else:
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "replace"))
    stream.flush()
