"""Exit codes of the command line, and ending a command with a message."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

import typer

from fumehood.cli.answers import document_of
from fumehood.cli.escaping import say
from fumehood.core.errors import ERROR_CODES, RequiresHumanApproval
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
