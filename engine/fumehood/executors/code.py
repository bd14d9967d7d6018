"""Code in a container: run a program and turn its ending into an outcome.

Host side, between `pipeline/execute` and a wall's lease. The ending, streams, exit status and files
are measured outside the program; value, exception and traceback are its claims. Invariants: a claim
never turns a failure into a success; no more than `SPILL_CHARACTERS` of a stream are in memory, the
rest goes to disk as a blob, and both ends stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import anyio

from fumehood.core.errors import EndedBy, EngineError, InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import SHELL_OUTPUT, ToolDefinition
from fumehood.executors.claims import NO_VALUE, FailureClaim, read_failure, read_value
from fumehood.executors.code_arguments import program_arguments, sent_files
from fumehood.executors.endings import (
    Subject,
    container_lost,
    failure_message,
    left_out_words,
    program_error,
    refused_by,
    session_lost,
    state_words,
)
from fumehood.executors.live import CallHandle
from fumehood.executors.outcome import CutText, Outcome
from fumehood.executors.workspace_files import WorkspaceFiles
from fumehood.observe.clock import timestamp
from fumehood.sandbox.wall import Lease, OnOutput, RunEnding
from fumehood.storage.blobs import BlobStore, Draft, NotKept

MAX_DATA_BYTES = 16 * 1024 * 1024
"""Large enough for streams, value and files as base64, each of which has its own limit."""

SPILL_CHARACTERS = 2 << 20
"""More than the default output limit, so only a raised limit lets streams spill to disk."""

SIDE_CHARACTERS = 5000
"""The length of the head and the tail that stay in memory; the answer shows no more."""

FEED_CHARACTERS = 256 * 1024
"""The characters written to disk at once."""

MANY_PIECES = 1024
"""Join pieces beyond this number: small ones take more memory than their text."""

_CLAIMABLE = {"memory": EndedBy.MEMORY, "policy": EndedBy.POLICY}
"""The causes that a failed program may claim for its failure."""


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
    """Run one program in its container, or in its session's, reporting output and progress to
    `live`.

    If it fails, `details` hold the same fields as `data` would, with `exception`, and with `limit`
    if a limit ended it.
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
            # It may have ended by itself at the same moment, but its caller was told otherwise.
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
    """The files that a program left in its workspace."""

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
    if kept:  # else its wall does not report output while a program runs
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
    """The session's fields in `data` and `error.details`."""
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
    """The common fields of `data` and `error.details`. A command has no value and no images."""
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
    if ending.ended_by is EndedBy.OK:
        return None
    exception = failure.exception if failure is not None else None
    details = dict(fields)
    if subject.language != "shell":
        details["exception"] = exception.model_dump() if exception is not None else None
    if ending.signal is not None:
        details["signal"] = ending.signal
    if ending.ended_by is EndedBy.SANDBOX_LOST:
        return session_lost(details) if subject.in_session else container_lost(tool, details)
    if failure is not None and failure.kind == "invalid" and ending.ended_by is EndedBy.EXCEPTION:
        message = failure_message(ending, failure, subject)
        return InvalidParams(message, fields=["files"], details=details)
    return program_error(ending, limits, failure, subject, details)


def _output_bytes(ending: RunEnding) -> int:
    if ending.output_bytes is not None:
        return ending.output_bytes
    return ending.stdout_bytes + ending.stderr_bytes


# -- streams -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptText:
    """A complete stream, or its head and tail with a link to the blob."""

    text: str
    cut: CutText | None = None


class KeptStreams:
    """Both streams of one run. Each piece is also passed to `output`."""

    def __init__(
        self,
        blobs: BlobStore,
        principal_id: str,
        most_characters: int,
        output: OnOutput | None = None,
    ) -> None:
        self._has_heard = False
        self._output = output
        self._streams = {
            name: _Stream(blobs, principal_id, most_characters) for name in ("stdout", "stderr")
        }

    def hear(self, stream: str, text: str) -> None:
        """Add the next characters of a stream."""
        self._has_heard = True
        kept = self._streams[stream].add(text)
        if kept and self._output is not None:
            self._output(stream, kept)

    async def finish(self) -> dict[str, KeptText]:
        """Both streams by name; empty if there was no output. Bounded by the disk."""
        if not self._has_heard:
            return {}
        return {name: await stream.finish(name) for name, stream in self._streams.items()}

    def discard(self) -> None:
        """Drop both streams."""
        for stream in self._streams.values():
            stream.discard()


class _Stream:
    def __init__(self, blobs: BlobStore, principal_id: str, most_characters: int) -> None:
        self._blobs = blobs
        self._principal_id = principal_id
        self._left = most_characters
        self._length = 0
        self._parts: list[str] = []
        self._unfed = 0
        self._head = self._tail = ""
        self._draft: Draft | None = None

    def add(self, text: str) -> str:
        """Returns the part that was within the limit."""
        kept = text if len(text) <= self._left else text[: self._left]
        if not kept:
            return ""
        self._left -= len(kept)
        self._length += len(kept)
        self._parts.append(kept)
        self._unfed += len(kept)
        if len(self._parts) > MANY_PIECES:
            self._parts = ["".join(self._parts)]
        if self._unfed > (SPILL_CHARACTERS if self._draft is None else FEED_CHARACTERS):
            self._feed()
        return kept

    def _feed(self) -> None:
        text = "".join(self._parts)
        self._parts, self._unfed = [], 0
        if self._draft is None:
            self._draft = self._blobs.draft(self._principal_id)
            self._head = text[:SIDE_CHARACTERS]
        self._tail = (self._tail + text[-SIDE_CHARACTERS:])[-SIDE_CHARACTERS:]
        self._draft.feed(text.encode("utf-8", "replace"))

    async def finish(self, name: str) -> KeptText:
        if self._draft is None:
            return KeptText("".join(self._parts))
        if self._parts:
            self._feed()
        cut = CutText(name, self._head, self._tail, self._length, await self._link(name))
        return KeptText("", cut)

    async def _link(self, name: str) -> JsonObject:
        assert self._draft is not None
        try:
            blob = await self._blobs.keep(self._draft, f"{name}.txt", "text/plain; charset=utf-8")
        except NotKept as reason:
            return {"not_kept": f"{reason}, so the rest is lost"}
        return {"resource_url": blob.url, "expires_at": timestamp(blob.expires_at)}

    def discard(self) -> None:
        if self._draft is not None:
            self._draft.discard()
