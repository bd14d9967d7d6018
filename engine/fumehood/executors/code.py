"""Code in a container: what to run there, and what its ending means to the caller.

Host side, between `pipeline/execute` and a wall's lease. How a run ended, its streams, exit
status and files were measured outside the program; value, exception and traceback are its
own words, read in `code_claims`. A claim never makes a failure a success.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import anyio

from fumehood.core.errors import (
    ENDING_ERRORS,
    EndedBy,
    EngineError,
    InvalidParams,
    SandboxUnavailable,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import SHELL_OUTPUT, ToolDefinition
from fumehood.executors.code_arguments import program_arguments, sent_files
from fumehood.executors.code_claims import NO_VALUE, FailureClaim, read_failure, read_value
from fumehood.executors.code_words import (
    Subject,
    failure_message,
    left_out_words,
    reached_limit,
    refused_by,
    state_words,
)
from fumehood.executors.kept_streams import KeptStreams, KeptText
from fumehood.executors.live import CallHandle
from fumehood.executors.outcome import Outcome
from fumehood.executors.workspace_files import WorkspaceFiles
from fumehood.sandbox.wall import Lease, RunEnding
from fumehood.storage.blobs import BlobStore

MAX_DATA_BYTES = 16 * 1024 * 1024
"""Streams, value and files as base64, each of which has a bound of its own, fit in it."""

_CLAIMABLE = {"memory": EndedBy.MEMORY, "policy": EndedBy.POLICY}
"""What a program that failed may say of its failure."""


async def run_code(
    tool: ToolDefinition,
    arguments: JsonObject,
    limits: Limits,
    lease: Lease,
    blobs: BlobStore,
    principal_id: str,
    live: CallHandle,
    session_id: str | None = None,
) -> Outcome:
    """Run one program in its container, which is a session's where one is named, telling `live`
    what it prints and how far it is.

    Where it fails, `details` hold the same fields as `data` would, with `exception`, and
    `limit` where one ended it.
    """
    language = tool.executor.removeprefix("code:")
    files = WorkspaceFiles(blobs, principal_id, sent_files(arguments))
    streams = KeptStreams(blobs, principal_id, limits.output_bytes, live.output)
    cancelled: list[RunEnding] = []
    sinks = live.sinks(files=files, output=streams.hear, ending=cancelled.append)
    try:
        ending = await lease.run(language, program_arguments(arguments, language), limits, sinks)
    except BaseException:
        files.discard()
        if cancelled and live.is_cancelled:
            # It may have ended by itself in the same moment; its caller was told otherwise.
            ending = replace(cancelled[0], ended_by=EndedBy.CANCELLED)
            with anyio.CancelScope(shield=True):
                kept = await streams.finish()
                live.partial = _outcome(tool, ending, limits, kept, _Left(), session_id)
        else:
            streams.discard()
        raise
    with anyio.CancelScope(shield=True):  # bounded: the disk, not the program
        entries = await files.entries()
        kept = await streams.finish()
    left = _Left(entries, files.pictures, files.left_out)
    return _outcome(tool, ending, limits, kept, left, session_id)


@dataclass(frozen=True, slots=True)
class _Left:
    """What a program left in its workspace."""

    files: list[JsonObject] = field(default_factory=list)
    pictures: list[JsonObject] = field(default_factory=list)
    left_out: int = 0


def _outcome(
    tool: ToolDefinition,
    ending: RunEnding,
    limits: Limits,
    kept: dict[str, KeptText],
    left: _Left,
    session_id: str | None,
) -> Outcome:
    language = tool.executor.removeprefix("code:")
    if kept:  # else its wall tells no output while it runs
        ending = replace(ending, stdout=kept["stdout"].text, stderr=kept["stderr"].text)
    failure = read_failure(ending.claimed_error)
    ending = _as_claimed(ending, failure)
    left_out = ending.files_left_out + left.left_out
    subject = Subject(language, in_session=session_id is not None)
    fields = _fields(language, ending, left.files, left.pictures, left_out)
    if session_id is not None:
        fields["session"] = session_fields(session_id, ending)
    error = _error(tool, ending, failure, limits, fields, subject)
    return Outcome(
        ended_by=ending.ended_by,
        isolation=ending.isolation,
        data=fields if error is None else None,
        error=error,
        cpu_ms=ending.cpu_ms,
        peak_memory_bytes=ending.peak_memory_bytes,
        output_bytes=_output_bytes(ending),
        warnings=(
            refused_by(ending.limits_hit, limits, subject)
            + left_out_words(left_out)
            + tuple(read_value(ending.result).notes)
            + (state_words(ending.state) if session_id is not None else ())
        ),
        max_data_bytes=MAX_DATA_BYTES,
        cuts=tuple(stream.cut for stream in kept.values() if stream.cut is not None),
    )


def _as_claimed(ending: RunEnding, failure: FailureClaim | None) -> RunEnding:
    if ending.ended_by is not EndedBy.EXCEPTION or failure is None:
        return ending
    return replace(ending, ended_by=_CLAIMABLE.get(failure.kind, EndedBy.EXCEPTION))


def session_fields(session_id: str, ending: RunEnding) -> JsonObject:
    """What `data` and `error.details` say of the session."""
    return {
        "id": session_id,
        "state": ending.state,
        "variables_bytes": ending.variables_bytes,
    }


def _fields(
    language: str,
    ending: RunEnding,
    files: list[JsonObject],
    pictures: list[JsonObject],
    left_out: int,
) -> JsonObject:
    """What `data` and `error.details` have in common. A command has no value and no figures."""
    value = read_value(ending.result) if ending.ended_by is EndedBy.OK else NO_VALUE
    fields: JsonObject = {
        "stdout": ending.stdout,
        "stderr": ending.stderr,
        "exit_code": ending.exit_code,
        "value": value.value,
        "value_repr": value.value_repr,
        "files": files,
        "images": pictures,
        "ended_by": ending.ended_by.value,
    }
    if language == "shell":
        fields = {name: fields[name] for name in SHELL_OUTPUT["required"]}
    if ending.limits_hit:
        fields["limits_hit"] = list(ending.limits_hit)
    if left_out:
        fields["files_left_out"] = left_out
    return fields


def _error(
    tool: ToolDefinition,
    ending: RunEnding,
    failure: FailureClaim | None,
    limits: Limits,
    fields: JsonObject,
    subject: Subject,
) -> EngineError | None:
    error_class = ENDING_ERRORS[ending.ended_by]
    if error_class is None:
        return None
    exception = failure.exception if failure is not None else None
    details = dict(fields)
    if subject.language != "shell":
        details["exception"] = exception.model_dump() if exception is not None else None
    if ending.signal is not None:
        details["signal"] = ending.signal
    reached = reached_limit(ending, limits, subject)
    if reached is not None:
        details["limit"], message = reached
        return error_class(message, details=details)
    if ending.ended_by is EndedBy.SANDBOX_LOST:
        return session_lost(details) if subject.in_session else _lost(tool, details)
    message = failure_message(ending, failure, subject)
    if failure is not None and failure.kind == "invalid" and ending.ended_by is EndedBy.EXCEPTION:
        return InvalidParams(message, fields=["files"], details=details)
    return error_class(message, details=details)


def _output_bytes(ending: RunEnding) -> int:
    if ending.output_bytes is not None:
        return ending.output_bytes
    return ending.stdout_bytes + ending.stderr_bytes


def session_lost(details: JsonObject) -> SandboxUnavailable:
    """The container of a session is gone, and everything in it."""
    return SandboxUnavailable(
        "The session's container was lost meanwhile: its files and variables are gone. Begin "
        "another session.",
        details=details,
        retryable=False,
    )


def _lost(tool: ToolDefinition, details: JsonObject) -> SandboxUnavailable:
    return SandboxUnavailable(
        "The container was lost while the program ran; the next call gets another one. "
        + ("Repeat the call." if tool.idempotent else "Nothing outside of it can have changed."),
        details=details,
        retryable=tool.idempotent,
        retry_after_ms=100 if tool.idempotent else None,
    )
