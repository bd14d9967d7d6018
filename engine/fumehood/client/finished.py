"""The ending of a program for frameworks: an exit code and both whole streams.

Client side, pure. An engine's error becomes an exit code only if a program ran and ended by itself
or by a limit; a refusal stays an error, which an adapter may convert to an ending (`refused`).
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
"""Error codes that are not a result of the program, even with output."""

TIMED_OUT = 124
"""*Source*: timeout(1)."""

REFUSED = 126
"""*Source*: the shell's exit status of a command that was found and could not be executed."""

BY_SIGNAL = 128
"""*Source*: the shell's exit status of a program that a signal ended, with the signal added."""


@dataclass(frozen=True, slots=True)
class Finished:
    """`code` is None if the program ended by itself, else the error of the limit that ended it."""

    exit_code: int
    stdout: str
    stderr: str
    envelope: Envelope
    code: str | None = None

    @property
    def is_timeout(self) -> bool:
        """Whether it exceeded its time limit."""
        return self.code == "TIMEOUT"

    @property
    def output(self) -> str:
        """Both streams, and the message if a limit ended the program."""
        text = self.stdout
        for more in (self.stderr, self.message if self.code is not None else ""):
            text += "\n" if text and more and not text.endswith("\n") else ""
            text += more
        return text

    @property
    def message(self) -> str:
        """The engine's message."""
        return self.envelope.error.message if self.envelope.error is not None else ""


def program_result(envelope: Envelope) -> JsonObject:
    """Return the fields of a program's answer, also if it failed.

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
    """Return the ending of a program. Raises CallFailed as `program_result`."""
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
    """Make an ending of a refusal, so that the output of other programs is not lost."""
    reason = f"{failed.code}: {failed.message}\n"
    return Finished(REFUSED, "", reason, failed.envelope)


def program_arguments(
    program: str | Sequence[str],
    env: Mapping[str, str] | None,
    directory: str | None,
) -> JsonObject:
    """Return a command, or a program with its arguments, as arguments of `run_shell`."""
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
