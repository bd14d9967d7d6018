"""Programs in containers: run them, and turn their endings and output into outcomes.

Host side, between `pipeline/execute` and a wall's lease. The ending, streams, exit status and files
are determined outside the program. The value, exception and traceback are claims of the program.
Names and contents of files are untrusted. Small files are included in the answer. Larger files
become blobs, which are written while they arrive. Files that the caller sent and the program did
not change are not returned. Invariants: a claim never turns a failure into a success; at most about
`SPILL_CHARACTERS` characters of a stream are in memory, and a longer stream is written to disk as a
blob.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import anyio

from fumehood.core.errors import (
    EndedBy,
    EngineError,
    InvalidParams,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES, Language
from fumehood.core.limits import CONTAINER_FILES_OUT, Limits
from fumehood.core.returned_file import FILE_CONTENT, PNG
from fumehood.core.session import FileKind
from fumehood.core.tool import SHELL_OUTPUT, ToolDefinition
from fumehood.core.workspace_path import path_fault
from fumehood.executors.around import HeldBack, Ran, Share, Surroundings, surrounded
from fumehood.executors.base import A_SESSION, Executor, Placement, ToolRun
from fumehood.executors.claims import NO_VALUE, FailureClaim, ValueClaim, read_claim, read_value
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
from fumehood.executors.outcome import MAX_DATA_BYTES, CutText, Outcome
from fumehood.observe.clock import timestamp
from fumehood.redaction.redactor import Redactor
from fumehood.sandbox.wall import OnOutput, RunEnding, RunSinks
from fumehood.storage.blobs import BlobStore, Draft, NotKept

_PLACEMENT = Placement(
    "container",
    "container",
    "executors 'code:…' always run in a container without network, with a read-only root and an "
    "unprivileged user. Only calls of the same caller and agent use it, and it is reset after each "
    "of them. With isolation=container_per_call, it is created for this call",
    isolations=MappingProxyType({"call": False, "container_per_call": True}),
)
IN_A_SESSION = Placement(
    "container",
    "container",
    "executors 'code:…' always run in a container without network, with a read-only root and an "
    "unprivileged user. With a session_id, it is the session's own container, which only calls of "
    "that session use, and which keeps its workspace's files between calls",
    isolations=A_SESSION,
    is_of_session=True,
)


class ProgramExecutor(Executor):
    """Runs programs of one language in a container."""

    language: str

    def __init__(self, language: Language) -> None:
        self.language = language.name

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return IN_A_SESSION if in_session else _PLACEMENT

    async def run(self, run: ToolRun) -> Outcome:
        """Run one program, and return the outcome. If the call uses a session, the program runs in
        the session's container, otherwise in a container for the call.

        If the program fails, the outcome has an error. Its `details` contain the same fields that
        `data` would contain and, if the language has values, `exception`. If a limit ended the
        program, they also contain `limit`.
        """
        results = _Results(run)
        try:
            async with surrounded(run) as around:
                results.around = around
                own = program_arguments(run.arguments, self.language)
                arguments = around.arguments(own, run.traceparent)
                sinks = results.sinks(with_digests=around.with_digests)
                ending = await around.run(run.lease, self.language, arguments, run, sinks)
        except BaseException:
            await results.discard()
            raise
        outcome, held_back = await results.of(ending)
        return await around.conclude(outcome, held_back)


class _Results:
    """Collects the output and files of one run, and builds the outcome."""

    def __init__(self, run: ToolRun) -> None:
        self._run = run
        self.around = Surroundings()
        self._cut: RunEnding | None = None
        """How the run ended if it was cancelled, otherwise None."""
        session_id = run.domain.session_id
        self._files = ProgramFiles(
            run.blobs,
            run.domain.principal_id,
            {file["path"]: _content(file) for file in run.arguments.get("files") or []},
            session_id,
            with_files=run.arguments.get("return_files") is not False,
        )
        self._streams = KeptStreams(
            run.blobs,
            run.domain.principal_id,
            run.limits.output_bytes,
            run.redactor,
            run.handle.hear,
            session_id,
        )

    def sinks(self, *, with_digests: bool) -> RunSinks:
        """Return the sinks that receive the run's output and files. `with_digests` means that all
        files are hashed.
        """
        self._files.with_digests = with_digests
        return self._run.handle.sinks(
            files=self._files, output=self._streams.hear, ending=self._on_cut
        )

    def _on_cut(self, ending: RunEnding) -> None:
        self._cut = ending

    async def discard(self) -> None:
        """Discard the files and output of a run that ended with an exception.

        If the caller cancelled the call, keep the output: the attribute `partial` of the call's
        handle is set to an outcome that contains it.
        """
        handle = self._run.handle
        self._files.discard()
        if self._cut is None or not handle.is_cancelled:
            self._streams.discard()
            return
        # The run may have ended by itself at the same moment, but the caller has already been
        # informed that it was cancelled.
        with anyio.CancelScope(shield=True):
            ending = replace(self._cut, ended_by=EndedBy.CANCELLED)
            outcome, _ = self._outcome(ending, await self._streams.finish())
            handle.partial = replace(outcome, kept=())  # parts use `kept` for complete runs only

    async def of(self, ending: RunEnding) -> tuple[Outcome, list[HeldBack]]:
        """Return the outcome of the run, and the actions of the program that parts hold back until
        a human approves them. `ending` says how the run has ended.
        """
        with anyio.CancelScope(shield=True):  # short, because it only waits for the disk
            await self._files.entries()
            kept = await self._streams.finish(is_cut=ending.ended_by is EndedBy.OUTPUT)
        return self._outcome(ending, kept)

    def _outcome(
        self, ending: RunEnding, kept: Mapping[str, KeptText]
    ) -> tuple[Outcome, list[HeldBack]]:
        shares = self.around.shares(Ran(ending, self._files.digests))
        outcome = _outcome(self._run, ending, kept, self._files, shares)
        held_back = [share.held_back for share in shares if share.held_back is not None]
        return replace(outcome, redacted=self._streams.redacted), held_back


def _outcome(
    run: ToolRun,
    ending: RunEnding,
    kept: Mapping[str, KeptText],
    left: ProgramFiles,
    shares: Sequence[Share],
) -> Outcome:
    tool, limits = run.tool.definition, run.limits
    session_id = run.domain.session_id
    language = LANGUAGES[tool.executor.removeprefix("code:")]
    if kept:  # otherwise there was no output, or only the ending contains it
        ending = replace(ending, stdout=kept["stdout"].text, stderr=kept["stderr"].text)
    failure = read_claim(FailureClaim, ending.claimed_error)
    value = read_value(ending.result) if ending.result is not None else NO_VALUE
    left_out = ending.files_left_out + left.left_out
    subject = Subject(language, in_session=session_id is not None)
    fields = _fields(language, ending, value, left.files, left.pictures, left_out)
    if session_id is not None:
        fields["session"] = session_fields(session_id, ending)
    for share in shares:
        fields |= {name: given for name, given in share.fields.items() if name not in fields}
    error: EngineError | None = None
    if ending.ended_by is not EndedBy.OK:
        error = _error(tool, ending, failure, limits, fields, subject)
    fault = next((share.fault for share in shares if share.fault is not None), None)
    if fault is not None and ending.ended_by is not EndedBy.CANCELLED:
        error = fault(fields)
    return Outcome(
        ended_by=ending.ended_by,
        isolation=ending.isolation,
        node=ending.node,
        data=fields if error is None else None,
        error=error,
        cpu_ms=ending.cpu_ms,
        peak_memory_bytes=ending.peak_memory_bytes,
        output_bytes=ending.stdout_bytes + ending.stderr_bytes
        if ending.output_bytes is None
        else ending.output_bytes,
        warnings=(
            (refused_by(ending.limits_hit, limits, subject) if ending.limits_hit else ())
            + (left_out_words(left_out) if left_out else ())
            + tuple(value.notes)
            + (state_words(ending) if session_id is not None else ())
            + tuple(warning for share in shares for warning in share.warnings)
        ),
        sandbox={name: value for share in reversed(shares) for name, value in share.sandbox.items()}
        | _strength_of(ending),
        kept=tuple(share.kept for share in shares if share.kept is not None),
        max_data_bytes=MAX_DATA_BYTES,
        cuts=tuple(stream.cut for stream in kept.values() if stream.cut is not None),
    )


def _strength_of(ending: RunEnding) -> JsonObject:
    """Return how strongly the container held the program, for the answer's field `sandbox`."""
    if ending.grade is None:
        return {}
    return {"runtime": ending.runtime, "grade": ending.grade, "held": ending.held}


def session_fields(session_id: str, ending: RunEnding) -> JsonObject:
    """Return the value of the field `session` in `data` or in the error's `details`."""
    fields = {
        "id": session_id,
        "state": ending.state,
        "variables_bytes": ending.variables_bytes,
    }
    if ending.state == "restored" and ending.copied_at is not None:
        fields["copied_at"] = timestamp(ending.copied_at)
    return fields


def _fields(
    language: Language,
    ending: RunEnding,
    value: ValueClaim,
    files: list[JsonObject],
    pictures: list[JsonObject],
    left_out: int,
) -> JsonObject:
    """Return the fields that both `data` and an error's `details` contain.

    `pictures` are the entries of drawn figures. `left_out` is the number of files that are not
    returned. If the language has no values, such as a shell, the fields for the value and the
    figures are left out.
    """
    if ending.ended_by is not EndedBy.OK:
        value = NO_VALUE
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
    if not language.has_value:
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
    exception = failure.exception if failure is not None else None
    details = dict(fields)
    if subject.language.has_value:
        details["exception"] = exception.model_dump() if exception is not None else None
    if ending.signal is not None:
        details["signal"] = ending.signal
    if ending.ended_by is EndedBy.SANDBOX_LOST:
        if subject.in_session:
            return session_lost(details, ending, has_disk=limits.disk_mb is not None)
        return container_lost(tool, details, ending)
    if failure is not None and failure.kind == "invalid" and ending.ended_by is EndedBy.EXCEPTION:
        message = failure_message(ending, failure, subject)
        is_directory = failure.message.startswith("the working directory")
        fields_at_fault = ["working_directory" if is_directory else "files"]
        return InvalidParams(message, fields=fields_at_fault, details=details)
    return program_error(ending, limits, failure, subject, details)


# -- arguments -----------------------------------------------------------------------------


def program_arguments(arguments: JsonObject, language: str = "python") -> JsonObject:
    """Return a program's arguments in the form that guests expect, without optional arguments that
    are None.
    """
    source = LANGUAGES[language].source
    further = ("stdin_base64", "argv", "env", "working_directory", "return_files")
    return {
        source: arguments.get(source),
        "stdin": arguments.get("stdin"),
        "files": arguments.get("files") or [],
        **{name: arguments[name] for name in further if arguments.get(name) is not None},
    }


def _content(file: JsonObject) -> bytes:
    text: str | None = file.get("content")
    return text.encode() if text is not None else base64.b64decode(file["content_base64"])


# -- streams --------------------------------------------------------------------------------

SPILL_CHARACTERS = 2 << 20
"""Maximum number of characters of a stream that stay in memory. A longer stream is written to disk.
This is more than the default output limit, so it happens only if that limit was raised."""

SIDE_CHARACTERS = 5000
"""Number of characters that the answer shows of a stream on disk: this many from its beginning, and
as many from its end."""

FEED_CHARACTERS = 256 * 1024
"""Number of characters of a stream that are collected before they are added to its file on disk."""

MANY_PIECES = 1024
"""If a stream has more pieces than this in memory, they are joined, because many small pieces take
more memory than their text."""


@dataclass(frozen=True, slots=True)
class KeptText:
    """The text of one output stream, which has ended. If the text is in memory, it is in `text`. If
    it is on disk, `text` is empty, and `cut` contains its beginning, its end and a link.
    """

    text: str
    cut: CutText | None = None


class KeptStreams:
    """Collects and redacts stdout and stderr of one run. Each redacted piece is also passed to
    `output`.

    In each stream, characters beyond `most_characters` are dropped.
    """

    def __init__(
        self,
        blobs: BlobStore,
        principal_id: str,
        most_characters: int,
        redactor: Redactor,
        output: OnOutput | None = None,
        session_id: str | None = None,
    ) -> None:
        self._has_heard = False
        self._output = output
        self._streams = {
            name: _Stream(blobs, lambda: blobs.draft(principal_id, session_id), most_characters)
            for name in ("stdout", "stderr")
        }
        self._redactors = {name: redactor.stream() for name in self._streams}

    @property
    def redacted(self) -> int:
        """The number of matches that redaction has replaced in both streams together."""
        return sum(redactor.count for redactor in self._redactors.values())

    def hear(self, stream: str, text: str) -> None:
        """Add the next characters of a stream."""
        self._has_heard = True
        self._keep(stream, self._redactors[stream].feed(text))

    def _keep(self, stream: str, text: str) -> None:
        kept = self._streams[stream].add(text)
        if kept and self._output is not None:
            self._output(stream, kept)

    async def finish(self, *, is_cut: bool = False) -> dict[str, KeptText]:
        """End both streams, and return their texts by the names of the streams. Return an empty
        dict if there was no output.

        If `is_cut` is True, the streams were cut off, possibly in the middle of a secret. Text at
        the end that could be the start of a secret is then left out. This method waits only for
        writes to disk.
        """
        if not self._has_heard:
            return {}
        if not is_cut:
            for name, redactor in self._redactors.items():
                self._keep(name, redactor.finish())
        return {name: await stream.finish(name) for name, stream in self._streams.items()}

    def discard(self) -> None:
        """Discard both streams."""
        for stream in self._streams.values():
            stream.discard()


class _Stream:
    def __init__(
        self, blobs: BlobStore, make_draft: Callable[[], Draft], most_characters: int
    ) -> None:
        self._blobs = blobs
        self._make_draft = make_draft
        self._left = most_characters
        self._length = 0
        self._parts: list[str] = []
        self._unfed = 0
        self._head = self._tail = ""
        self._draft: Draft | None = None

    def add(self, text: str) -> str:
        """Add text up to the stream's limit, and return the text that was added."""
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
            self._draft = self._make_draft()
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


# -- files ---------------------------------------------------------------------------------


MAX_INLINE_BYTES = 1_000_000
"""Files of at least this many bytes become blobs. Smaller files are included in the answer."""

MAX_INLINE_TOTAL_BYTES = 4_000_000
"""Maximum total size, in bytes, of the files that one answer includes. Further files become blobs,
so that the answer stays readable."""

UNKNOWN_TYPE = "application/octet-stream"
"""The media type of a file whose name does not indicate a type."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
"""The first bytes of every PNG file. *Source*: PNG specification, 5.2."""

_TYPES = mimetypes.MimeTypes(filenames=())
"""Python's built-in table of media types. The host's own tables are not used, so that a type never
depends on the host."""


@dataclass(slots=True)
class _Coming:
    """A file of the program that is being received or has been received. `announced` is its size in
    bytes according to the guest.
    """

    path: str
    announced: int
    kind: FileKind = "file"
    received: int = 0
    start: bytearray = field(default_factory=bytearray)
    """All bytes received so far, as long as the file is small enough to be included in the answer.
    Otherwise empty."""
    draft: Draft | None = None
    digest: Any = None
    """The SHA-256 of the bytes so far. None unless all files are hashed or this file may be one
    that the caller sent."""


class ProgramFiles:
    """Receives a program's files piece by piece. At the end, call `entries` or `discard`."""

    def __init__(
        self,
        blobs: BlobStore,
        principal_id: str,
        sent: Mapping[str, bytes],
        session_id: str | None = None,
        *,
        with_files: bool = True,
    ) -> None:
        """`sent` contains the files that the caller sent: path → content. If `with_files` is False,
        only pictures that the program drew are kept.
        """
        self._blobs = blobs
        self._principal_id = principal_id
        self._session_id = session_id
        self._with_files = with_files
        self.with_digests = False
        """Whether all files are hashed."""
        self.digests: dict[tuple[str, str], str] = {}
        """(kind, path) of each hashed file → SHA-256."""
        self._sent = sent
        self._coming: _Coming | None = None
        self._done: list[_Coming] = []
        self._names: set[tuple[FileKind, str]] = set()
        self._inline_total = 0
        self.files: list[JsonObject] = []
        self.pictures: list[JsonObject] = []
        """The answer's entries for all figures. `files` contains the entries for all files. The
        method `entries` sets both."""
        self.left_out = 0
        """Number of files that are not returned, because there are too many or they are incomplete
        or have invalid names."""

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        """End the previous file, and begin to receive a file of `size` bytes."""
        self._end_file()
        if kind == "file" and not self._with_files:
            return
        if path_fault(path) is not None or (kind, path) in self._names:
            self.left_out += 1
            return
        self._names.add((kind, path))
        self._coming = _Coming(path, size, kind)
        sent = self._sent.get(path) if kind == "file" else None
        if self.with_digests or (sent is not None and len(sent) == size):
            self._coming.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Add the next bytes of the file that was begun last."""
        coming = self._coming
        if coming is None:
            return
        if coming.kind == "image" and not coming.received and not data.startswith(PNG_SIGNATURE):
            self.left_out += 1  # not a PNG: the program wrote it, not the guest
            self._coming = None
            return
        coming.received += len(data)
        if coming.digest is not None:
            coming.digest.update(data)
        if coming.draft is None:
            coming.start += data
            size = len(coming.start)
            # The file may be too large for the answer, alone or together with the other files.
            if size >= MAX_INLINE_BYTES or self._inline_total + size > MAX_INLINE_TOTAL_BYTES:
                coming.draft = self._blobs.draft(self._principal_id, self._session_id)
                coming.draft.feed(bytes(coming.start))
                coming.start = bytearray()
        else:
            coming.draft.feed(data)

    async def entries(self) -> list[JsonObject]:
        """Build the answer's entries for files and pictures, store them in `files` and `pictures`,
        and return `files`.

        If this method is cancelled, blobs may remain to which no answer refers.
        """
        self._end_file()
        done, self._done = self._done, []
        entries = list(zip(done, await asyncio.gather(*map(self._entry, done)), strict=True))
        pictures = [entry for coming, entry in entries if coming.kind == "image"]
        # Keep the order in which the figures were drawn: figure 10 comes after figure 2.
        self.pictures = sorted(pictures, key=lambda one: (len(one["filename"]), one["filename"]))
        self.files = [entry for coming, entry in entries if coming.kind == "file"]
        return self.files

    def discard(self) -> None:
        """Discard all files, because the run has no answer."""
        self._end_file()
        self.left_out = 0
        for coming in self._done:
            if coming.draft is not None:
                coming.draft.discard()
        self._done = []

    def _end_file(self) -> None:
        coming, self._coming = self._coming, None
        if coming is None:
            return
        is_whole = coming.received == coming.announced
        is_empty_figure = coming.kind == "image" and not coming.received
        is_as_sent = is_whole and self._is_as_sent(coming)
        if is_as_sent or not is_whole or is_empty_figure or len(self._done) >= CONTAINER_FILES_OUT:
            self.left_out += not is_as_sent
            if coming.draft is not None:
                coming.draft.discard()
        else:
            self._inline_total += len(coming.start)
            self._done.append(coming)
            if coming.digest is not None:
                self.digests[coming.kind, coming.path] = coming.digest.hexdigest()

    def _is_as_sent(self, coming: _Coming) -> bool:
        sent = self._sent.get(coming.path) if coming.kind == "file" else None
        if sent is None or coming.digest is None:
            return False
        same: bool = coming.digest.digest() == hashlib.sha256(sent).digest()
        return same

    async def _entry(self, coming: _Coming) -> JsonObject:
        content_type = PNG if coming.kind == "image" else content_type_of(coming.path)
        entry: JsonObject = {
            "filename": coming.path,
            "content_type": content_type,
            "size": coming.received,
        }
        if coming.draft is None:
            return {**entry, FILE_CONTENT: base64.b64encode(coming.start).decode("ascii")}
        try:
            blob = await self._blobs.keep(coming.draft, coming.path, content_type)
        except NotKept as reason:
            return {**entry, "not_kept": f"{reason}, so its content is lost"}
        return {**entry, "url": blob.url, "expires_at": timestamp(blob.expires_at)}


def content_type_of(path: str) -> str:
    """Return the media type that the file's name indicates. For a compressed file, this is
    `UNKNOWN_TYPE`.
    """
    kind, encoding = _TYPES.guess_type(path.rpartition("/")[2])
    return kind if kind is not None and encoding is None else UNKNOWN_TYPE
