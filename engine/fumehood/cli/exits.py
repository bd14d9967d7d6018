"""Exit codes of the command line, answers as JSON objects, and messages on the terminal.

Untrusted text (answers, program output, names, reasons, files) goes through `say` and `write` here
or through `core/escaping.py`.
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
    """Exit codes for scripts."""

    SUCCESS = 0
    TOOL_FAILED = 1
    USAGE = 2
    WAITING_FOR_APPROVAL = 3
    UNAVAILABLE = 4


def exit_code_of(envelope: Envelope | JsonObject) -> int:
    """Return the exit code for an answer; a tool's own error code gives 1.

    If the error of a call that needs approval names no approval, the call does not wait: no
    approver exists, and the exit code is 1.
    """
    error = document_of(envelope)["error"]
    if error is None:
        return ExitCode.SUCCESS
    if error["code"] == RequiresHumanApproval.code and error.get("approval_id") is None:
        return ExitCode.TOOL_FAILED
    known = ERROR_CODES.get(error["code"])
    return known.exit_code if known is not None else ExitCode.TOOL_FAILED


def fail(message: str, code: ExitCode) -> NoReturn:
    """Print a message on stderr (on stdout if that is closed) and exit.

    The message is escaped, since it may contain text from a server or a package index.
    """
    say(message, to_stderr=True)
    raise typer.Exit(code)


ENVELOPE_KEYS = frozenset({"success", "status", "data", "error", "metadata"})


def read_answer(raw: bytes) -> JsonObject:
    """Parse the bytes of an answer into an envelope.

    Raises:
        ValueError: the bytes are not an envelope.
    """
    document = strict_json.loads(raw)
    if not isinstance(document, dict) or not document.keys() >= ENVELOPE_KEYS:
        raise ValueError("not an envelope")
    return document


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
    """Write untrusted text. If `stream` is a terminal, the text is escaped, otherwise unchanged."""
    if stream.isatty():
        stream.write(printable(text))
    else:
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "replace"))
    stream.flush()
