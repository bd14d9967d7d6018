"""Frames between the container wall and the guest inside a container.

Host side. The guest's frames are hostile and become values only through these strict models. Each
kind of frame is small, so the host never holds much of a guest's data.

Host to guest:
    {"op": "part", "id", "text"}        the next piece of long arguments, as JSON, before `run`
    {"op": "run", "id", "program", "arguments" | null, "keep", "live", "thin",
     "limits": {wall_s, cpu_s, memory_bytes, output_bytes}}
                                        `arguments` is null if they were sent in parts;
                                        `keep` leaves files and variables for the next run;
                                        `live`: a client follows output and progress;
                                        `thin`: the program seems to need no preloaded modules;
                                        `streams` (optional): the kind of each of the run's streams
                                        → a text for the guest's code that serves the stream;
                                        `quiet` (optional): the host needs no files of the run;
                                        `trial` (optional): what to do with the variables of a
                                        trial, and the trial's token
    {"op": "pause", "id", "paused"}     stops the program's clock, or starts it again
    {"op": "cancel", "id"}
    {"op": "keep", "epoch", "wait_s"}   the container belongs to a session: see the guest's
                                        `takeover`
    {"op": "process", "id", "do", …}    a request about the registered processes, at any time;
                                        the ids of these requests are separate from run ids
Both ways: the frames of streams that the host has opened (`streams.StreamFrame`).
Guest to host, at any time: a `process` in reply to each `process`, and `processes` when a process
has ended.
Guest to host: `ready` once (see `messages`), then for each run any number of `output` and
`progress`, then for each file one `file` and its `data`, one `ended`, one `reset`. Runs do not
overlap: the host sends the next run only after a `reset` that reports a clean container.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit, Limits
from fumehood.core.session import FileKind, SessionState
from fumehood.core.workspace_path import MAX_PATH_BYTES
from fumehood.protocol import framing, strict_json
from fumehood.protocol.framing import FrameError
from fumehood.protocol.messages import (
    GuestProgress,
    GuestReady,
    StrictFrame,
    limits_in_frame,
    parse_frame,
)
from fumehood.protocol.streams import STREAM_START, StreamFrame

PART_CHARACTERS = 64 * 1024
"""Number of characters in each piece of long arguments."""

NO_STREAMS: Mapping[str, str] = MappingProxyType({})

OUTPUT_START = b'{"op":"output",'
"""The beginning that output frames have if the guest has written them. An output frame that begins
in another way is parsed more slowly.
"""

PROCESS_NAME = r"^[a-z0-9][a-z0-9.-]{0,62}$"
"""The pattern of the names of registered processes."""


class ContainerOutput(StrictFrame):
    """Output that a program has written since the last frame of this kind, decoded to text."""

    op: Literal["output"]
    id: int
    stream: Literal["stdout", "stderr"]
    text: str


class ContainerFile(StrictFrame):
    """The path and the size of a workspace file, or of a picture that the run has drawn. Frames
    `ContainerData` with the file's content follow. The path is untrusted.
    """

    op: Literal["file"]
    id: int
    kind: FileKind = "file"
    path: str = Field(min_length=1, max_length=MAX_PATH_BYTES)
    size: int = Field(ge=0)


def _decoded(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("not base64")  # noqa: TRY004  # pydantic's
    return base64.b64decode(value, validate=True)


class ContainerData(StrictFrame):
    """The next bytes of the file that the last `ContainerFile` announced."""

    op: Literal["data"]
    id: int
    data: Annotated[bytes, BeforeValidator(_decoded)]


class ContainerEnding(StrictFrame):
    """How one run ended. All values except `claim` were decided or measured outside the program."""

    op: Literal["ended"]
    id: int
    ended_by: EndedBy = Field(strict=False)
    cpu_ms: float | None = Field(ge=0)
    peak_memory_bytes: int | None = Field(ge=0)
    stdout_bytes: int = Field(ge=0)
    stderr_bytes: int = Field(ge=0)
    exit_code: int | None
    signal: int | None
    limits_hit: tuple[Annotated[Limit, Field(strict=False)], ...] = Field(strict=False)
    files_left_out: int = Field(ge=0)
    state: SessionState | None = None
    """The state of the session's variables, or None if the run could not change them."""
    variables_bytes: int | None = Field(default=None, ge=0)
    """Memory in bytes of the process that holds the variables."""
    claim: dict[str, Any] | None


class ContainerReset(StrictFrame):
    """The guest's report that it has cleaned up after a run. If `clean` is True, the container is
    in the same state as before the run. Otherwise, the host must remove the container.
    """

    op: Literal["reset"]
    id: int
    clean: bool
    why: str | None = Field(max_length=200)


class ContainerProcess(StrictFrame):
    """The state of a registered process, that is, of a background process that a session's tool
    started. Every field is an unverified claim of the guest.
    """

    key: ClassVar[str] = "process"
    name: str = Field(pattern=PROCESS_NAME)
    state: Literal["running", "ended"]
    exit_code: int | None = Field(ge=0, le=255)
    """Exit code of the first process of the registered program. Its child processes may still be
    running.
    """
    signal: int | None = Field(ge=1, le=64)
    lost: bool
    """Whether the registered process was killed because the guest could no longer manage it."""
    started_at: float = Field(ge=0, lt=1e11, allow_inf_nan=False)


class ContainerPiece(StrictFrame):
    """A piece of the output of a background process. `offset` is the position in the output at
    which the next piece begins. `skipped` is the number of lost bytes before this piece.
    """

    key: ClassVar[str] = "output"
    text: str = Field(max_length=framing.OUTPUT_PIECE_BYTES)
    offset: int = Field(ge=0, lt=1 << 53)
    skipped: int = Field(ge=0, lt=1 << 53)
    ended: bool


class ContainerFault(StrictFrame):
    """The refusal of a request about a session's background processes. `message` says why the guest
    has refused it.
    """

    kind: Literal["invalid", "not_found", "unavailable"]
    message: str


class ContainerAnswer(StrictFrame):
    """The answer to a request about a session's background processes. Exactly one of the fields
    `process`, `processes`, `output` and `fault` is set.
    """

    op: Literal["process"]
    id: int
    running: int = Field(ge=0, le=framing.MAX_PROCESSES)
    process: ContainerProcess | None = None
    processes: tuple[ContainerProcess, ...] | None = Field(
        default=None, max_length=2 * framing.MAX_PROCESSES, strict=False
    )
    output: ContainerPiece | None = None
    fault: ContainerFault | None = None

    @property
    def parts(self) -> JsonObject:
        """The fields of the answer that the caller receives. The answer must not be a fault."""
        for part in (self.process, self.output):
            if part is not None:
                return {part.key: part.model_dump()}
        return {"processes": [one.model_dump() for one in self.processes or ()]}

    @model_validator(mode="after")
    def _has_one_part(self) -> ContainerAnswer:
        given = (self.process, self.processes, self.output, self.fault)
        if sum(part is not None for part in given) != 1:
            raise ValueError("not one answer")
        return self


class ContainerProcesses(StrictFrame):
    """The number of background processes that are running in a session. The guest sends this frame
    when a process has ended.
    """

    op: Literal["processes"]
    running: int = Field(ge=0, le=framing.MAX_PROCESSES)


ContainerMessage = (
    GuestReady
    | ContainerOutput
    | GuestProgress
    | ContainerFile
    | ContainerData
    | ContainerEnding
    | ContainerReset
    | ContainerAnswer
    | ContainerProcesses
)

ContainerFrame = ContainerMessage | StreamFrame

_KINDS: dict[str, type[ContainerMessage]] = {
    "ready": GuestReady,
    "output": ContainerOutput,
    "progress": GuestProgress,
    "file": ContainerFile,
    "data": ContainerData,
    "ended": ContainerEnding,
    "reset": ContainerReset,
    "process": ContainerAnswer,
    "processes": ContainerProcesses,
}


def parse_container_body(body: bytes) -> ContainerFrame:
    """Parse the body of a frame from a container's guest, and return the frame.

    Raises:
        FrameError: the body is not one of the guest's messages.
    """
    if body.startswith(STREAM_START):
        return StreamFrame.parse(body)
    if not body.startswith(OUTPUT_START):
        return parse_frame(framing.parse_body(body), _KINDS)
    # Output frames are by far the most frequent, so they are parsed and validated in one step. This
    # is many times faster. It accepts repeated keys, which is safe, because no other code reads the
    # frame.
    try:
        return ContainerOutput.model_validate_json(body)
    except ValidationError as error:
        count = error.error_count()
        raise FrameError(f"a container's output is wrong in {count} places") from None


def run_frames(
    run_id: int,
    program: str,
    arguments: JsonObject,
    limits: Limits,
    *,
    keep: bool = False,
    live: bool = False,
    thin: bool = False,
    streams: Mapping[str, str] = NO_STREAMS,
    trial: tuple[str, str] | None = None,
) -> list[JsonObject]:
    """Return the frames that start a run: one `run` frame, and before it, if the arguments are
    long, `part` frames with pieces of them.

    Args:
        keep: whether the run's files and variables are kept for the next run.
        live: whether a client follows the output and the progress.
        thin: whether the program seems to need no preloaded modules.
        streams: a mapping from the kind of each stream of the run to a text. The guest's end of the
            stream receives this text.
        trial: an action and the token of a trial. If the action is `hold`, this run is the trial,
            and its variables are held back. `adopt` makes the held variables those of the session,
            and `drop` discards them.
    """
    run: JsonObject = {
        "op": "run",
        "id": run_id,
        "program": program,
        "arguments": arguments,
        "keep": keep,
        "live": live,
        "thin": thin,
        "tools": False,  # read by the guests of earlier engines, whose sessions are taken over
        "limits": limits_in_frame(limits),
    }
    if arguments.get("return_files") is False:
        run["quiet"] = True
    if streams:
        run["streams"] = dict(streams)
    if trial is not None:
        run["trial"] = list(trial)
    text = strict_json.dumps(arguments).decode()
    if len(text) <= PART_CHARACTERS:
        return [run]
    parts = [
        {"op": "part", "id": run_id, "text": text[start : start + PART_CHARACTERS]}
        for start in range(0, len(text), PART_CHARACTERS)
    ]
    return [*parts, {**run, "arguments": None}]
