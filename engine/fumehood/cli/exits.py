"""Exit codes of the command line, conversion of answers to JSON objects, and messages on the
terminal.

Untrusted text (answers, program output, names, reasons, files) is printed only by `say` and
`write`, or after `core/escaping.py` has escaped it.
"""

from __future__ import annotations

import json
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn, TextIO

import typer

from fumehood.core.errors import ERROR_CODES, RequiresHumanApproval
from fumehood.core.escaping import printable
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

if TYPE_CHECKING:
    from fumehood.core.envelope import Envelope


class ExitCode(IntEnum):
    """Exit codes that scripts can rely on."""

    SUCCESS = 0
    TOOL_FAILED = 1
    USAGE = 2
    WAITING_FOR_APPROVAL = 3
    UNAVAILABLE = 4


def exit_code_of(envelope: Envelope | JsonObject) -> int:
    """Return the exit code for an answer: 0 for a success, otherwise the exit code that belongs to
    the error's code. If only the tool defines the error code, return 1.

    If the call needs approval, but its error has no approval id, the call does not wait. Return 1
    in this case, too.
    """
    error = document_of(envelope)["error"]
    if error is None:
        return ExitCode.SUCCESS
    if error["code"] == RequiresHumanApproval.code and error.get("approval_id") is None:
        return ExitCode.TOOL_FAILED
    known = ERROR_CODES.get(error["code"])
    return known.exit_code if known is not None else ExitCode.TOOL_FAILED


def fail(message: str, code: ExitCode) -> NoReturn:
    """Print a message on stderr (or on stdout if stderr is closed), and end the command with
    `code`.

    The message is escaped, since it may contain text from a server or a package index.
    """
    say(message, to_stderr=True)
    raise typer.Exit(code)


ENVELOPE_KEYS = frozenset({"success", "status", "data", "error", "metadata"})


def read_answer(raw: bytes) -> JsonObject:
    """Parse an answer and return it as a JSON object, which has the fields of an envelope.

    Raises:
        ValueError: the answer is not an envelope.
    """
    document = strict_json.loads(raw)
    if not isinstance(document, dict) or not document.keys() >= ENVELOPE_KEYS:
        raise ValueError("not an envelope")
    return document


def document_of(envelope: Envelope | JsonObject) -> JsonObject:
    """Return an envelope as a JSON object. An envelope that already is a JSON object is returned
    unchanged.
    """
    if isinstance(envelope, dict):
        return envelope
    document: JsonObject = json.loads(envelope.model_dump_json())
    return document


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a message. Untrusted text in the message is escaped."""
    print(printable(text), file=sys.stderr if to_stderr else sys.stdout)


def write(stream: TextIO, text: str) -> None:
    """Write untrusted text. The text is escaped if `stream` is a terminal, and unchanged
    otherwise.
    """
    if stream.isatty():
        stream.write(printable(text))
    else:
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "replace"))
    stream.flush()
