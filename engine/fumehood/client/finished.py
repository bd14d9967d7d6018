"""A program's result as agent frameworks need it: an exit code, and the complete stdout and stderr.

Client side, without I/O. An engine's error becomes an exit code only if a program ran and ended by
itself or by a limit. A refusal remains an error, which an adapter may convert to a result with
`refused`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio

from fumehood.core.envelope import CallFailed, Envelope
from fumehood.core.json_types import JsonObject

AsyncTurn = anyio.Lock
Turn = threading.Lock

NOT_THE_PROGRAM = frozenset({"SANDBOX_UNAVAILABLE", "CANCELLED", "INVALID_PARAMS"})
"""Codes of errors that are not a program's result, even if the program wrote output."""

TIMED_OUT = 124
"""The exit code of a program that exceeded its time limit. *Source*: timeout(1)."""

REFUSED = 126
"""The exit code of a refused call.

*Source*: the shell's exit status for a command that was found but could not be executed."""

BY_SIGNAL = 128
"""A program that was ended by a signal has this exit code plus the signal's number. *Source*: the
shell."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a program.

    `code` is None if the program ended by itself. Otherwise it is the error code of the limit that
    ended the program.
    """

    exit_code: int
    stdout: str
    stderr: str
    envelope: Envelope
    code: str | None = None

    @property
    def is_timeout(self) -> bool:
        """Whether the program exceeded its time limit."""
        return self.code == "TIMEOUT"

    @property
    def output(self) -> str:
        """The program's stdout and stderr, followed by the engine's message if a limit ended the
        program.
        """
        text = self.stdout
        for more in (self.stderr, self.message if self.code is not None else ""):
            text += "\n" if text and more and not text.endswith("\n") else ""
            text += more
        return text

    @property
    def message(self) -> str:
        """The engine's error message, or "" if there is no error."""
        return self.envelope.error.message if self.envelope.error is not None else ""


def program_result(envelope: Envelope) -> JsonObject:
    """Return the fields of a program's result, such as `stdout`, from the answer of a call that ran
    the program.

    The fields are the answer's `data` or, if the program failed, the details of the answer's error.

    Raises:
        CallFailed: no program ran, or its result is unknown.
    """
    if envelope.error is None:
        return envelope.data
    details = envelope.error.details or {}
    if "stdout" not in details or envelope.error.code in NOT_THE_PROGRAM:
        raise CallFailed(envelope)
    return details


def finished(envelope: Envelope, stdout: str, stderr: str) -> Finished:
    """Return a program's result, made from the answer and the complete `stdout` and `stderr`.

    Raises:
        CallFailed: no program ran, or its result is unknown.
    """
    result = program_result(envelope)
    exit_code, signal = result.get("exit_code"), result.get("signal")
    code = envelope.error.code if envelope.error is not None else None
    if code == "TIMEOUT":
        exit_code = TIMED_OUT
    elif exit_code is None:
        exit_code = BY_SIGNAL + signal if isinstance(signal, int) else 1
    own = result.get("ended_by") in ("ok", "exit", "exception", "signal")
    return Finished(exit_code, stdout, stderr, envelope, None if own else code)


def refused(failed: CallFailed) -> Finished:
    """Return a result with the exit code `REFUSED` for a program that the engine refused to run.

    An adapter that runs several programs uses this result, so that it can still return the results
    of the other programs.
    """
    reason = f"{failed.code}: {failed.message}\n"
    return Finished(REFUSED, "", reason, failed.envelope)


def program_arguments(
    program: str | Sequence[str],
    env: Mapping[str, str] | None,
    directory: str | None,
) -> JsonObject:
    """Return the arguments of `run_shell`. A `program` that is a string is a shell command, and a
    sequence is a program with its arguments. `env` are its environment variables, and `directory`
    is its working directory.
    """
    arguments: JsonObject = {"return_files": False}
    if isinstance(program, str):
        arguments["command"] = program
    else:
        arguments["argv"] = list(program)
    if env:
        arguments["env"] = [{"name": name, "value": value} for name, value in env.items()]
    if directory is not None:
        arguments["working_directory"] = directory
    return arguments
