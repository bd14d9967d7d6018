"""What messages say of code that ended otherwise than well, and of limits that it met.

Host side, pure. Each limit that ended a run says what it was, how far the program came, and
what to try; each one that only refused something says what it was and what to try.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from fumehood.executors.code_claims import ExceptionClaim, FailureClaim
from fumehood.model.errors import EndedBy
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import (
    CONTAINER_FILES_OUT,
    CONTAINER_FILES_OUT_MB,
    CONTAINER_OPEN_FILES,
    CONTAINER_PROCESSES,
    MB,
    Limit,
    Limits,
    container_writable_mb,
)
from fumehood.sandbox.wall import RunEnding

MAX_MESSAGE_CHARACTERS = 500


def reached_limit(ending: RunEnding, limits: Limits) -> tuple[JsonObject, str] | None:
    """The limit that ended a run with its peak, and the message; None where no limit did."""
    match ending.ended_by:
        case EndedBy.WALL_TIME:
            hint = "look for an endless loop, do less in one call, or allow more (timeout_seconds)"
            limit: JsonObject = {"timeout_seconds": limits.wall_s, "cpu_seconds": _cpu_s(ending)}
            what = f"was stopped after {limits.wall_s:g} s"
        case EndedBy.CPU_TIME:
            hint = "look for an endless loop, use fewer processes, or do less in one call"
            limit = {"cpu_seconds": limits.cpu_s, "peak_cpu_seconds": _cpu_s(ending)}
            what = f"was stopped after {limits.cpu_s:g} s of CPU time"
        case EndedBy.MEMORY:
            hint = "work on smaller parts, or allow more (memory_limit_mb)"
            limit = {"memory_mb": limits.memory_mb, "peak_memory_mb": _peak_mb(ending)}
            what = (
                f"needed more than its {limits.memory_mb} MB of memory, of which files in the "
                "sandbox take a part"
            )
        case EndedBy.OUTPUT:
            hint = "print less, or write to a file in the working directory"
            printed = max(ending.stdout_bytes, ending.stderr_bytes)
            limit = {"output_bytes": limits.output_bytes, "peak_output_bytes": printed}
            what = f"printed more than {limits.output_bytes} bytes"
        case _:
            return None
    return {**limit, "hint": hint}, f"The program {what}. Try this: {hint}."


def refused_by(names: Iterable[str], limits: Limits) -> tuple[str, ...]:
    """A sentence for each limit that refused the program something and let it go on."""
    workspace_mb, *others = container_writable_mb(limits.memory_mb or 0).values()
    words = {
        Limit.PROCESSES: f"processes: more than {CONTAINER_PROCESSES} processes and threads at "
        "once were refused; start fewer, or wait for some to end",
        Limit.OPEN_FILES: f"open_files: more than {CONTAINER_OPEN_FILES} open files of a process "
        "were refused; close those that are done",
        Limit.DISK: f"disk: more files were refused; the working directory holds {workspace_mb} "
        f"MB, /tmp {others[0]} MB and /dev/shm {others[1]} MB, each in a limited number of files; "
        "write less or fewer, or allow more memory (memory_limit_mb), of which they are a part",
        Limit.FILE_SIZE: f"file_size: a file of more than {workspace_mb} MB was refused; write "
        "smaller ones, or allow more memory (memory_limit_mb)",
        Limit.NETWORK: "network: there is none here; send what is needed in with files",
        Limit.MEMORY: "memory: a process of the program was ended for want of memory; work on "
        "smaller parts, or allow more (memory_limit_mb)",
    }
    return tuple(
        f"limits_hit: {words.get(name, f'{name}: the sandbox refused more')}"  # type: ignore[call-overload]
        for name in names
    )


def left_out_words(count: int) -> tuple[str, ...]:
    """A sentence where files did not come back; none where all did."""
    if not count:
        return ()
    how_many = "1 file" if count == 1 else f"{count} files"
    words = (
        f"files_left_out: {how_many} did not come back; at most {CONTAINER_FILES_OUT} do, of "
        f"{CONTAINER_FILES_OUT_MB} MB together, and only plain files that can be read; write "
        "fewer or smaller ones"
    )
    return (words,)


def failure_message(ending: RunEnding, claim: FailureClaim | None) -> str:
    """What happened, where no limit ended the run."""
    match ending.ended_by:
        case EndedBy.EXCEPTION if claim is not None and claim.kind == "invalid":
            return f"The program was not started: {_sentence(claim.message)}"
        case EndedBy.EXCEPTION:
            return f"The program failed: {_sentence(_reason(claim))}"
        case EndedBy.EXIT:
            return (
                f"The program ended with exit status {ending.exit_code}. What it printed is in "
                "details.stdout and details.stderr."
            )
        case EndedBy.SIGNAL:
            return f"The program was ended by {_signal_name(ending.signal)}."
        case EndedBy.POLICY:
            reason = claim.message if claim is not None else "it tried what is not allowed here"
            return f"The sandbox stopped the program: {_sentence(reason)} Do not retry it as it is."
        case EndedBy.CANCELLED:
            return "The call was cancelled."
        case _:
            return "The program ended before it answered."


def _reason(claim: FailureClaim | None) -> str:
    if claim is None:
        return "it gave no reason"
    if claim.exception is None:
        return claim.message or "it gave no reason"
    words = _words(claim.exception)[:MAX_MESSAGE_CHARACTERS]
    line = claim.exception.line
    if line is None or words.endswith(f"line {line})"):  # a syntax error says it itself
        return words
    return f"{words} (line {line})"


def _words(said: ExceptionClaim) -> str:
    """Type and message on one line. A message can begin with its type already, and that of a
    syntax error with the lines that it is about.
    """
    lines = [line.strip() for line in said.message.splitlines() if line.strip()]
    if not lines:
        return said.type
    named = [index for index, line in enumerate(lines) if said.type in line.split(":")[0]]
    if named:
        return " ".join(lines[named[0] :])
    return f"{said.type}: {' '.join(lines)}"


def _sentence(text: str) -> str:
    text = text[: MAX_MESSAGE_CHARACTERS + 40].strip()
    return text if text.endswith((".", "?", "!")) else text + "."


def _signal_name(number: int | None) -> str:
    try:
        name = signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}" if number is not None else "a signal"
    return f"signal {number} ({name})"


def _cpu_s(ending: RunEnding) -> float | None:
    return None if ending.cpu_ms is None else round(ending.cpu_ms / 1e3, 3)


def _peak_mb(ending: RunEnding) -> float | None:
    peak = ending.peak_memory_bytes
    return None if peak is None else round(peak / MB, 2)
