"""Frames between the container wall and the guest inside a container.

Host side. The guest's frames are hostile and become values only through these strict models. Each
kind of frame is small, so the host never holds much of a guest's data.

Host to guest:
    {"op": "part", "id", "text"}        a piece of a long request's JSON, in order, before `run`
    {"op": "run", "id", "program", "arguments" | null, "keep", "live", "thin",
     "limits": {wall_s, cpu_s, memory_bytes, output_bytes}}
                                        `arguments` is null if the request was sent in parts;
                                        `keep` leaves files and variables for the next run;
                                        `live`: a client follows output and progress;
                                        `thin`: the program seems to need nothing that is preloaded;
                                        `streams` (optional): kind → a text for the guest's end
                                        of each of the run's streams;
                                        `quiet` (optional): the program's files are not needed;
                                        `trial` (optional): what to do with the variables of a
                                        trial, and the trial's token
    {"op": "pause", "id", "paused"}     stops the program's clock, or starts it again
    {"op": "cancel", "id"}
    {"op": "keep", "epoch", "wait_s"}   the container belongs to a session: see the guest's
                                        `takeover`
    {"op": "process", "id", "do", …}    a request about the registered processes, at any time;
                                        these ids are separate from those of runs
Both ways: the frames of streams that the host has opened (`streams.StreamFrame`).
Guest to host, at any time: a `process` for each such request, and `processes` when a process ended.
Guest to host: `ready` once (see `messages`), then for each run any number of `output` and
`progress`, then for each file one `file` and its `data`, one `ended`, one `reset`. One run at a
time: the next may be sent when a `reset` has arrived that reports a clean container.
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
"""Number of characters in each piece of a long request."""

NO_STREAMS: Mapping[str, str] = MappingProxyType({})

OUTPUT_START = b'{"op":"output",'
"""The beginning of an output frame as the guest writes it. Frames in other forms are parsed more
slowly."""

PROCESS_NAME = r"^[a-z0-9][a-z0-9.-]{0,62}$"
"""The names of registered processes."""


class ContainerOutput(StrictFrame):
    """The output, as decoded text, that a program has written since the previous frame of this
    kind.
    """

    op: Literal["output"]
    id: int
    stream: Literal["stdout", "stderr"]
    text: str


class ContainerFile(StrictFrame):
    """Begins a file of the workspace, or a picture that the run drew. The path is untrusted."""

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
    """The next bytes of the current file."""

    op: Literal["data"]
    id: int
    data: Annotated[bytes, BeforeValidator(_decoded)]


class ContainerEnding(StrictFrame):
    """How one run ended. Everything but `claim` was decided or measured outside the program."""

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
    """The state of the variables, if they were to be kept."""
    variables_bytes: int | None = Field(default=None, ge=0)
    """Memory of the process that holds the variables."""
    claim: dict[str, Any] | None


class ContainerReset(StrictFrame):
    """The report after a run. `clean` is True if the container is in the same state as before the
    run. Otherwise, the container must be removed.
    """

    op: Literal["reset"]
    id: int
    clean: bool
    why: str | None = Field(max_length=200)


class ContainerProcess(StrictFrame):
    """The state of a registered process. Every field is the guest's claim."""

    key: ClassVar[str] = "process"
    name: str = Field(pattern=PROCESS_NAME)
    state: Literal["running", "ended"]
    exit_code: int | None = Field(ge=0, le=255)
    """Exit code of the program's first process. Child processes may still be running."""
    signal: int | None = Field(ge=1, le=64)
    lost: bool
    """Whether the process was killed because its guest could no longer manage it."""
    started_at: float = Field(ge=0, lt=1e11, allow_inf_nan=False)


class ContainerPiece(StrictFrame):
    """A piece of a registered process's output."""

    key: ClassVar[str] = "output"
    text: str = Field(max_length=framing.OUTPUT_PIECE_BYTES)
    offset: int = Field(ge=0, lt=1 << 62)
    skipped: int = Field(ge=0, lt=1 << 62)
    ended: bool


class ContainerFault(StrictFrame):
    """Why a request was refused."""

    kind: Literal["invalid", "not_found", "unavailable"]
    message: str


class ContainerAnswer(StrictFrame):
    """The answer to a request about registered processes. Exactly one of the last four fields is
    set.
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
        """The fields of the answer for the caller, if the answer is not a fault."""
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
    """The number of running registered processes. The guest sends it when a process has ended."""

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
    """Parse the JSON of a frame of a container's guest.

    Output, by far the most frequent kind, is parsed and validated in one step, many times as fast.
    In output frames, a repeated key is not refused, which is safe because only this code reads the
    frame.

    Raises:
        FrameError: the body is not one of the guest's messages.
    """
    if body.startswith(STREAM_START):
        return StreamFrame.parse(body)
    if not body.startswith(OUTPUT_START):
        return parse_frame(framing.parse_body(body), _KINDS)
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
    """Return the frames that start a run. A long request is sent in parts before the run.

    `streams` maps the kind of each of the run's streams to the text for the guest's end of it.
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
