"""Requests about the registered processes of one session's container.

Host side, used by the container's channel. Requests are checked before they are sent, and the
answers of the guest are untrusted. Invariants: each request waits a bounded time by the host's
clock; an answer that nobody asked for, and a count of processes that nothing explains, break the
protocol; a guest has no more than `MAX_OPEN` requests to answer.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Annotated, Literal

import anyio
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fumehood.core.arguments import (
    MAX_VARIABLES,
    MAX_WORDS,
    Base64,
    PathOrRoot,
    Source,
    Text,
    Variable,
    Word,
)
from fumehood.core.errors import InvalidParams, ResourceNotFound, SandboxUnavailable, faults_of
from fumehood.core.json_types import JsonObject
from fumehood.protocol import framing
from fumehood.protocol.container_frames import (
    PROCESS_NAME,
    ContainerAnswer,
    ContainerFault,
    ContainerProcesses,
)
from fumehood.protocol.framing import MAX_GRACE_S, MAX_INPUT_BYTES, FrameError
from fumehood.sandbox.wall import try_later

MAX_OPEN = 64
"""Requests to one guest that are not answered yet, including those that nobody waits for."""

ANSWER_S = 15.0
"""Seconds for an answer, on a busy host. The guest gives up on a process sooner."""

MAX_WORDS_CHARACTERS = 500

DEFAULT_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @property
    def patience_s(self) -> float:
        """How long to wait for the answer."""
        return ANSWER_S

    def frame(self) -> JsonObject:
        """The fields of the frame to the guest."""
        return self.model_dump(exclude_none=True)


class _List(_Request):
    do: Literal["list"]


class _OfOne(_Request):
    name: str = Field(pattern=PROCESS_NAME)


class _Start(_OfOne):
    do: Literal["start"]
    command: Source | None = None
    argv: list[Word] | None = Field(None, min_length=1, max_length=MAX_WORDS)
    env: list[Variable] | None = Field(None, max_length=MAX_VARIABLES)
    working_directory: PathOrRoot | None = None

    @model_validator(mode="after")
    def _has_one_program(self) -> _Start:
        if (self.command is None) == (self.argv is None) or (self.argv and not self.argv[0]):
            raise ValueError("needs either a command, or argv with a program")
        return self


class _Read(_OfOne):
    do: Literal["read"]
    after: int = Field(0, ge=0, lt=1 << 62)


class _Write(_OfOne):
    do: Literal["write"]
    text: Text | None = None
    text_base64: Base64 | None = None
    close: bool = False

    @model_validator(mode="after")
    def _is_short(self) -> _Write:
        if self.text is not None and self.text_base64 is not None:
            raise ValueError("has text and text_base64")
        if len(self._data()) > MAX_INPUT_BYTES:
            raise ValueError(f"has more than {MAX_INPUT_BYTES} bytes at once")
        return self

    def _data(self) -> bytes:
        return (self.text or "").encode() or base64.b64decode(self.text_base64 or "")

    def frame(self) -> JsonObject:
        data = base64.b64encode(self._data()).decode("ascii")
        return {"do": self.do, "name": self.name, "data": data, "close": self.close}


class _Stop(_OfOne):
    do: Literal["stop"]
    grace_s: float = Field(DEFAULT_GRACE_S, ge=0, le=MAX_GRACE_S, allow_inf_nan=False)

    @property
    def patience_s(self) -> float:
        return ANSWER_S + self.grace_s


_REQUEST: TypeAdapter[_List | _Start | _Read | _Write | _Stop] = TypeAdapter(
    Annotated[_List | _Start | _Read | _Write | _Stop, Field(discriminator="do")]
)


class ProcessRequests:
    """The requests to one guest. `send` sends a frame, and `on_change` is called when the number of
    running processes has changed.
    """

    def __init__(self, send: Callable[[bytes], None], on_change: Callable[[], None]) -> None:
        self.running: int | None = None
        """Running processes as the guest last said, or None if it has said nothing."""
        self._send = send
        self._on_change = on_change
        self._ids = 0
        self._open: dict[int, asyncio.Future[ContainerAnswer]] = {}

    async def ask(self, request: JsonObject) -> JsonObject:
        """Send a request and wait for its answer.

        Raises:
            InvalidParams: the request is not valid, or cannot be carried out.
            ResourceNotFound: there is no such process.
            SandboxUnavailable: the guest has ended, does not answer, or has too much to answer.
        """
        try:
            checked = _REQUEST.validate_python(request)
        except ValidationError as error:
            # The path begins with the kind of the request.
            faults = [(path.partition(".")[2] or path, why) for path, why in faults_of(error)]
            words = "; ".join(f"{path}: {why}" for path, why in faults)
            raise InvalidParams(
                f"The request about processes is not valid: {words[:MAX_WORDS_CHARACTERS]}.",
                fields=[path for path, _ in faults],
            ) from None
        if len(self._open) >= MAX_OPEN:
            raise try_later("Too many requests wait for this session. Repeat it later.")
        self._ids += 1
        number = self._ids
        frame = framing.encode({"op": "process", "id": number, **checked.frame()})
        if len(frame) > framing.MAX_REQUEST_BYTES:
            raise InvalidParams("The request about processes is too long.")
        answered = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(frame)
        with anyio.move_on_after(checked.patience_s):
            return _result_of(await answered)
        raise try_later("The session did not answer in time. Repeat the request.")

    def on_answer(self, frame: ContainerAnswer) -> None:
        """Take an answer of the guest. Raises FrameError."""
        waiting = self._open.pop(frame.id, None)
        if waiting is None:
            raise FrameError("an answer that nobody asked for")
        self._count(frame.running)
        if not waiting.done():
            waiting.set_result(frame)

    def on_count(self, frame: ContainerProcesses) -> None:
        """Take a new number of running processes. Raises FrameError.

        Without a start it only falls; so a guest cannot send one such frame after the other.
        """
        if self.running is not None and frame.running >= self.running:
            raise FrameError("a number of processes that nothing explains")
        self._count(frame.running)

    def close(self) -> None:
        """Fail all requests: the guest has ended."""
        self.running = 0
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(_ended())
                waiting.exception()  # it may be that nobody waits for it
        self._open.clear()

    def _count(self, running: int) -> None:
        before, self.running = self.running, running
        if before != running:
            self._on_change()


def _ended() -> SandboxUnavailable:
    return try_later("The session's container has ended.")


def _result_of(answer: ContainerAnswer) -> JsonObject:
    fault = answer.fault
    if fault is None:
        return answer.parts
    raise _error_of(fault)


def _error_of(fault: ContainerFault) -> Exception:
    """The error for a fault. The guest's text is shown, so only what can be printed of it."""
    words = "".join(one for one in fault.message if one.isprintable()).strip() or "It was refused."
    if fault.kind == "invalid":
        return InvalidParams(words)
    if fault.kind == "not_found":
        return ResourceNotFound(words, fields=["name"])
    return SandboxUnavailable(words)
