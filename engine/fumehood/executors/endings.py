"""The endings of runs: the error, the limit and the message for the caller.

Host side, pure, for every wall. `ENDING_ERRORS` maps each ending to an error class, and `_LIMITS`
maps it to the limit that caused it. For each ending that its wall can report, an executor has one
message. Each message about a limit names the limit and a remedy. The ending is always determined
outside the program.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fumehood.core.errors import ENDING_ERRORS, EndedBy, EngineError, SandboxUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES, Language
from fumehood.core.limits import (
    CONTAINER_FILES_OUT,
    CONTAINER_FILES_OUT_MB,
    CONTAINER_OPEN_FILES,
    CONTAINER_PROCESSES,
    MB,
    Limit,
    Limits,
    container_writable_mb,
)
from fumehood.core.tool import ToolDefinition
from fumehood.executors.claims import ExceptionClaim, FailureClaim
from fumehood.observe.clock import timestamp
from fumehood.protocol.framing import whole_words
from fumehood.sandbox.wall import RunEnding

Messages = Mapping[EndedBy, str]
"""Ending → message template. In the template, `{limit}` stands for the value of the limit that
ended the run."""

_LIMITS: Mapping[EndedBy, tuple[str, str]] = MappingProxyType(
    {
        EndedBy.WALL_TIME: ("timeout_seconds", "wall_s"),
        EndedBy.CPU_TIME: ("cpu_seconds", "cpu_s"),
        EndedBy.MEMORY: ("memory_mb", "memory_mb"),
        EndedBy.OUTPUT: ("output_bytes", "output_bytes"),
    }
)
"""Ending → the limit that caused it: the limit's name in `details.limit`, and its field in
`Limits`."""

MAX_MESSAGE_CHARACTERS = 500
"""Maximum length, in characters, of text from a program in an error message."""


def error_of(
    ending: RunEnding,
    limits: Limits,
    messages: Messages,
    *,
    details: JsonObject,
    values: Mapping[str, str] = MappingProxyType({}),
    measured: JsonObject | None = None,
) -> EngineError | None:
    """Return the error of a run, or None if the run succeeded.

    `messages` has a message template for each ending. In the template, `{limit}` is replaced by the
    value of the limit that ended the run, and other placeholders by `values`. `details` become the
    details of the error.

    If a limit ended the run, `details["limit"]` is set. It is an object with the limit's name and
    value, and the fields of `measured`.
    """
    error_class = ENDING_ERRORS[ending.ended_by]
    if error_class is None:
        return None
    limit = None
    if ending.ended_by in _LIMITS:
        name, field = _LIMITS[ending.ended_by]
        limit = getattr(limits, field)
        details["limit"] = {name: limit, **(measured or {})}
    message = messages[ending.ended_by].format(limit=limit, **values)
    return error_class(message, details=details)


def sandbox_lost(tool: ToolDefinition, details: JsonObject) -> SandboxUnavailable:
    """Return the error for a run whose process was lost."""
    return SandboxUnavailable(
        "The sandbox was lost during the call; a new one is being started. "
        + ("Repeat the call." if tool.idempotent else "It may or may not have taken effect."),
        details=details,
        retryable=tool.idempotent,
        retry_after_ms=100,
    )


def container_lost(
    tool: ToolDefinition, details: JsonObject, ending: RunEnding
) -> SandboxUnavailable:
    """Return the error for a run whose container was lost."""
    node = _lost_node(ending)
    of_node = f" of the node {node}" if node is not None else ""
    return SandboxUnavailable(
        f"The container{of_node} was lost while the program ran; the next call gets another one. "
        + ("Repeat the call." if tool.idempotent else "It may or may not have taken effect."),
        details=details,
        retryable=tool.idempotent,
        retry_after_ms=100 if tool.idempotent else None,
    )


def _lost_node(ending: RunEnding) -> str | None:
    return ending.node if ending.is_node_lost else None


def session_lost(details: JsonObject, ending: RunEnding, *, has_disk: bool) -> SandboxUnavailable:
    """Return the error for a run whose session was lost. Its container no longer exists, or its
    node is lost.

    If `has_disk` is True, the session's files are on a disk of their own, which outlives the
    container.
    """
    node = _lost_node(ending)
    if ending.copied_at is not None:
        return SandboxUnavailable(
            f"The session's container was lost{f' on the node {node}' if node else ''}, with its "
            "variables and the effects of this call. The next call in the session restores its "
            f"files as they were at {timestamp(ending.copied_at)}.",
            details=details, retryable=False,
        )  # fmt: skip
    if node is not None:
        return SandboxUnavailable(
            f"The session was lost on the node {node} while the program ran. If the node returns "
            "soon, the session continues; `fumehood sessions show` shows its state.",
            details=details, retryable=False,
        )  # fmt: skip
    words = "with its files and variables. Start another session."
    if has_disk:
        words = "with its variables. Its files are still on its disk: check them, then continue."
    return SandboxUnavailable(
        f"The session's container was lost, {words}", details=details, retryable=False
    )


# -- programs in containers ----------------------------------------------------------------

MUCH_HELD = 0.4
"""If the session's variables use more than this fraction of the memory limit, the hint about memory
mentions them."""

IDLE_SHARE = 0.05
"""If a run used less CPU time than this fraction of its time limit, it is assumed to have waited
most of the time."""

NO_TERMINAL = "no terminal is available, and nobody can answer prompts"

_NETWORK_PROGRAMS = "curl|dig|nc|nslookup|ping|rsync|scp|sftp|ssh|telnet|wget"
_INSTALLERS = "conda|npm|npx|pip3?|pnpm|uv|yarn"

_CARRIAGE_RETURN = re.compile(
    r"\$'[^'\n]*\\r'|\\r['’]: No such file|\^M: bad interpreter"  # as bash and env quote it
)
_NO_NETWORK = re.compile(
    r"name resolution|Name or service not known|Network is unreachable|ENETUNREACH|gaierror"
    r"|Could not resolve (?:host|proxy)|EAI_AGAIN|ENOTFOUND|TypeError: fetch failed"
    r"|Failed to connect to (?!localhost|127\.|\[?::1)|Temporary failure resolving"
    rf"|\b(?:{_NETWORK_PROGRAMS}): (?:command )?not found"
    rf"|No such file or directory: '(?:{_NETWORK_PROGRAMS})'"
)
_NO_SCIENCE = re.compile(r"No module named '(?:pyarrow|scipy|sklearn|statsmodels)\b")
_NO_PACKAGE = re.compile(
    r"No module named|Cannot find (?:module|package) '[^./]"
    r"|: command not found$|\bsh: \d+: \S+: not found$"
    rf"|No such file or directory: '(?:{_INSTALLERS})'"
    r"|Unable to locate package|/var/lib/(?:dpkg|apt/lists)/",
    re.MULTILINE,
)
_NO_TERMINAL = re.compile(
    r"/dev/tty|not a (?:tty|terminal)|Inappropriate ioctl for device|TERM environment variable",
    re.IGNORECASE,
)

_HINTS: Mapping[re.Pattern[str], str] = MappingProxyType(
    {
        _CARRIAGE_RETURN: "The script's lines end with CR LF, and the CR becomes part of each "
        "command: use LF only (sed -i 's/\\r$//' FILE converts a file).",
        _NO_NETWORK: "Programs have no network: get the data with another tool, and pass it in as "
        "files or stdin; or request the host with the option network, if the operator allows it.",
        _NO_SCIENCE: "Programs have no network and cannot install packages; the image "
        "python-science has this one, and the operator can choose it for a session or for all "
        "programs.",
        _NO_PACKAGE: "Programs have no network and cannot install packages: if the operator allows "
        "it, request them with the option packages, or when a session is created (--package); or "
        "request an image that contains them (fumehood images new).",
        _NO_TERMINAL: f"It probably looked for a terminal: {NO_TERMINAL}.",
    }
)
"""Pattern in a failed program's output → hint for the caller. The hint of the first matching
pattern is used."""

LOOKED_AT_CHARACTERS = 4000
"""The patterns of `_HINTS` are searched for in this many last characters of each of stderr, the
traceback and the exception's message."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The program that a message describes: its language, and whether it ran in a session."""

    language: Language = LANGUAGES["python"]
    in_session: bool = False

    @property
    def more_memory(self) -> str:
        """A phrase that explains how to get more memory."""
        return "start a session with more" if self.in_session else "allow more (memory_limit_mb)"


PROGRAM = Subject()


_REACHED: Messages = MappingProxyType(
    {
        EndedBy.WALL_TIME: "The {what} was stopped after {limit:g} s. Try this: {hint}.",
        EndedBy.CPU_TIME: "The {what} was stopped after {limit:g} s of CPU time. Try this: {hint}.",
        EndedBy.MEMORY: "The {what} needed more than its {limit} MB of memory, which includes "
        "files in the sandbox. Try this: {hint}.",
        EndedBy.OUTPUT: "The {what} printed more than {limit} bytes. Try this: {hint}.",
    }
)


def program_error(
    ending: RunEnding,
    limits: Limits,
    claim: FailureClaim | None,
    subject: Subject,
    details: JsonObject,
) -> EngineError | None:
    """Return the error of a program in a container, or None if it succeeded."""
    values = {"what": subject.language.noun, "hint": ""}
    if ending.ended_by not in _LIMITS:
        messages = {ending.ended_by: "{message}"}
        values["message"] = failure_message(ending, claim, subject)
        return error_of(ending, limits, messages, details=details, values=values)
    measured = _measured(ending, limits, subject)
    values["hint"] = measured["hint"]
    return error_of(ending, limits, _REACHED, details=details, values=values, measured=measured)


def _measured(ending: RunEnding, limits: Limits, subject: Subject) -> JsonObject:
    """Return the error's fields about the limit that ended the run. They say how much of the
    resource the run used, such as `cpu_seconds`. The field `hint` suggests a remedy.
    """
    match ending.ended_by:
        case EndedBy.WALL_TIME:
            hint = _wall_time_hint(ending, limits, subject)
            return {"cpu_seconds": _cpu_s(ending), "hint": hint}
        case EndedBy.CPU_TIME:
            hint = "look for an endless loop, use fewer processes, or do less in one call"
            return {"peak_cpu_seconds": _cpu_s(ending), "hint": hint}
        case EndedBy.MEMORY:
            hint = _memory_hint(ending, limits, subject)
            return {**_peak_memory(ending, limits), "hint": hint}
        case _:
            printed = max(ending.stdout_bytes, ending.stderr_bytes)
            hint = "print less, or write to a file in the working directory"
            return {"peak_output_bytes": printed, "hint": hint}


def _memory_hint(ending: RunEnding, limits: Limits, subject: Subject) -> str:
    """Return a remedy for a lack of memory. It mentions the session's variables if they use much of
    the memory.
    """
    held_mb = (ending.variables_bytes or 0) / MB
    if subject.in_session and held_mb > (limits.memory_mb or 0) * MUCH_HELD:
        return (
            f"the session's variables alone take {held_mb:.0f} MB: delete unneeded ones "
            f"(del), or {subject.more_memory}"
        )
    return f"work on smaller parts, or {subject.more_memory}"


def _wall_time_hint(ending: RunEnding, limits: Limits, subject: Subject) -> str:
    """Return a remedy for a timeout.

    If a JavaScript or shell program used little CPU time, it is assumed to have waited: in
    JavaScript for timers and open handles, in a shell for input.
    """
    was_idle = ending.cpu_ms is not None and ending.cpu_ms < limits.wall_s * 1e3 * IDLE_SHARE
    if was_idle and subject.language.name == "javascript":
        return (
            "it was waiting, not computing: a program ends when nothing is pending, so "
            "clear timers and close open handles, or allow more (timeout_seconds)"
        )
    if was_idle and subject.language.name == "shell":
        return (
            f"it was waiting, not computing: {NO_TERMINAL}; use options that do not prompt (-y, "
            "--batch), give input as stdin, or allow more (timeout_seconds)"
        )
    return "look for an endless loop, do less in one call, or allow more (timeout_seconds)"


def refused_by(names: Iterable[str], limits: Limits, subject: Subject = PROGRAM) -> tuple[str, ...]:
    """Return one warning for each limit in `names`. These limits made operations of the program
    fail, but did not end the program.
    """
    more_memory = (
        "start a session with more memory"
        if subject.in_session
        else "allow more memory (memory_limit_mb)"
    )
    workspace_mb, *others = container_writable_mb(limits.memory_mb or 0).values()
    more_room, larger = more_memory, f"{more_memory}, which includes them"
    if limits.disk_mb is not None:
        workspace_mb = limits.disk_mb
        more_room = larger = "start a session with a larger disk"
    words = {
        Limit.PROCESSES: f"processes: more than {CONTAINER_PROCESSES} processes and threads at "
        "once were refused; start fewer, or wait for some to end",
        Limit.OPEN_FILES: f"open_files: more than {CONTAINER_OPEN_FILES} open files of a process "
        "were refused; close files when done",
        Limit.DISK: f"disk: more files were refused; the working directory holds {workspace_mb} "
        f"MB, /tmp {others[0]} MB and /dev/shm {others[1]} MB, each for a limited number of files; "
        f"write less or fewer, or {larger}",
        Limit.FILE_SIZE: f"file_size: a file of more than {workspace_mb} MB was refused; write "
        f"smaller ones, or {more_room}",
        Limit.NETWORK: "network: it is not available; send data as files",
        Limit.MEMORY: f"memory: a process of the {subject.language.noun} ran out of memory and "
        "was killed; "
        f"work on smaller parts, or {subject.more_memory}",
    }
    return tuple(
        f"limits_hit: {words.get(name, f'{name}: the sandbox refused more')}"  # type: ignore[call-overload]
        for name in names
    )


def left_out_words(count: int) -> tuple[str, ...]:
    """Return the warning that `count` files are missing from the answer."""
    how_many = "1 file was" if count == 1 else f"{count} files were"
    words = (
        f"files_left_out: {how_many} not returned; the limits are {CONTAINER_FILES_OUT} "
        f"files and {CONTAINER_FILES_OUT_MB} MB in total, and only readable regular files are "
        "returned; write fewer or smaller ones"
    )
    return (words,)


def failure_message(
    ending: RunEnding, claim: FailureClaim | None, subject: Subject = PROGRAM
) -> str:
    """Return the message for a run that failed without exceeding a limit in `_LIMITS`."""
    what = subject.language.noun
    match ending.ended_by:
        case EndedBy.EXCEPTION if claim is not None and claim.kind == "invalid":
            return f"The {what} was not started: {sentence(claim.message)}"
        case EndedBy.EXCEPTION:
            return f"The {what} failed: {sentence(_reason(claim))}{_hint(ending, claim, subject)}"
        case EndedBy.EXIT:
            return (
                f"The {what} exited with status {ending.exit_code}. Its output is in "
                "details.stdout and details.stderr." + _hint(ending, None, subject)
            )
        case EndedBy.SIGNAL:
            return f"The {what} was ended by {_signal_name(ending.signal)}."
        case EndedBy.POLICY:
            reason = claim.message if claim is not None else "it tried a forbidden operation"
            return f"The sandbox stopped the {what}: {sentence(reason)} Do not retry it as it is."
        case EndedBy.CANCELLED:
            return "The call was cancelled."
        case _:
            return f"The {what} ended before it answered."


def _hint(ending: RunEnding, claim: FailureClaim | None, subject: Subject) -> str:
    """Return the hint of the first pattern in `_HINTS` that the program's output matches, or ""."""
    thrown = claim.exception if claim is not None else None
    said = [ending.stderr] if thrown is None or thrown.type == "CalledProcessError" else []
    said += [thrown.traceback, f"{thrown.type}: {thrown.message}"] if thrown is not None else []
    text = "\n".join(text[-LOOKED_AT_CHARACTERS:] for text in said)
    for pattern, words in _HINTS.items():
        if pattern.search(text) and (
            pattern is not _NO_TERMINAL or subject.language.name == "shell"
        ):
            return f" {words}"
    return ""


_STATES = {
    "rolled_back": "session: call stopped; variables restored; files are not rolled back",
    "reset": "session: the variables are lost; files are not rolled back",
    "restarted": "session: it was stopped before this call; its earlier variables are gone",
}


def state_words(ending: RunEnding) -> tuple[str, ...]:
    """Return the warnings about a session's state after a run.

    They say that variables were rolled back or lost, that files were restored, or that files were
    not saved. If none of this has happened, there are no warnings.
    """
    words = []
    if ending.state == "restored" and ending.copied_at is not None:
        words.append(
            f"session: its container was lost; its files were restored to their state at "
            f"{timestamp(ending.copied_at)}, and its earlier variables are gone"
        )
    elif ending.state in _STATES:
        words.append(_STATES[ending.state])
    return (*words, *unsaved_words(ending.not_saved))


def unsaved_words(not_saved: str | None) -> tuple[str, ...]:
    """Return the warning that a session's files could not be saved for the reason `not_saved`.
    Return no warning if it is None.
    """
    if not_saved is None:
        return ()
    words = (
        f"session: its files were not saved after this call ({not_saved}); if the session is "
        "restored, it gets the files of an earlier copy"
    )
    return (words,)


def _reason(claim: FailureClaim | None) -> str:
    if claim is None:
        return "it gave no reason"
    if claim.exception is None:
        return claim.message or "it gave no reason"
    words = whole_words(_words(claim.exception), MAX_MESSAGE_CHARACTERS)
    line = claim.exception.line
    if line is None or words.endswith(f"line {line})"):  # a syntax error's message has it
        return words
    return f"{words} (line {line})"


def _words(said: ExceptionClaim) -> str:
    """Return an exception's type and message on one line.

    If a line of the message already contains the type, return the message from this line on.
    """
    lines = [line.strip() for line in said.message.splitlines() if line.strip()]
    if not lines:
        return said.type
    # Lines before the type can be source lines, as in a syntax error.
    named = [index for index, line in enumerate(lines) if said.type in line.split(":")[0]]
    if named:
        return " ".join(lines[named[0] :])
    return f"{said.type}: {' '.join(lines)}"


def sentence(text: str) -> str:
    """Return a text as a sentence: shortened if it is too long, and with a full stop at the end."""
    text = whole_words(text, MAX_MESSAGE_CHARACTERS + 40).strip()
    return text if text.endswith((".", "?", "!")) else text + "."


def _signal_name(number: int | None) -> str:
    try:
        name = signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}" if number is not None else "a signal"
    return f"signal {number} ({name})"


def _cpu_s(ending: RunEnding) -> float | None:
    return None if ending.cpu_ms is None else round(ending.cpu_ms / 1e3, 3)


def _peak_memory(ending: RunEnding, limits: Limits) -> JsonObject:
    """Return the program's peak memory in MB as a field. Return {} if the peak is unknown.

    A measured peak above the limit also counts as unknown.
    """
    peak, most = ending.peak_memory_bytes, limits.memory_mb
    # A peak above the limit includes memory of the container image.
    if peak is None or (most is not None and peak > most * MB):
        return {}
    return {"peak_memory_mb": round(peak / MB, 2)}
