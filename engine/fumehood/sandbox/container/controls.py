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

import anyio

from fumehood.core.arguments import ARGUMENTS, argument_faults
from fumehood.core.errors import (
    MAX_MESSAGE_CHARACTERS,
    InvalidParams,
    ResourceNotFound,
    SandboxUnavailable,
)
from fumehood.core.json_types import JsonObject
from fumehood.protocol import framing
from fumehood.protocol.container_frames import (
    ContainerAnswer,
    ContainerProcesses,
)
from fumehood.protocol.framing import MAX_INPUT_BYTES, FrameError
from fumehood.sandbox.wall import try_later

MAX_OPEN = 64
"""Requests to one guest that are not answered yet, including those that nobody waits for."""

ANSWER_S = 15.0
"""Seconds for an answer, on a busy host. The guest gives up on a process sooner."""

DEFAULT_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


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
        fields = _fields_of(request)
        if len(self._open) >= MAX_OPEN:
            raise try_later("Too many requests wait for this session. Repeat it later.")
        self._ids += 1
        number = self._ids
        frame = framing.encode({"op": "process", "id": number, **fields})
        if len(frame) > framing.MAX_REQUEST_BYTES:
            raise InvalidParams("The request about processes is too long.")
        answered = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(frame)
        with anyio.move_on_after(ANSWER_S + fields.get("grace_s", 0)):
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
                waiting.set_exception(try_later("The session's container has ended."))
                waiting.exception()  # it may be that nobody waits for it
        self._open.clear()

    def _count(self, running: int) -> None:
        before, self.running = self.running, running
        if before != running:
            self._on_change()


def _fields_of(request: JsonObject) -> JsonObject:
    """Return the fields of a request's frame. Raises InvalidParams."""
    given = {name: value for name, value in request.items() if value is not None}
    do = given.pop("do")
    faults = argument_faults(f"process:{do}", given)
    if faults:
        words = "; ".join(f"{path}: {why}" for path, why in faults)
        raise InvalidParams(
            f"The request about processes is not valid: {words}.",
            fields=[path for path, _ in faults],
        )
    given = ARGUMENTS[f"process:{do}"].model_validate(given).model_dump(exclude_none=True)
    match do:
        case "read":
            given = {"after": 0, **given}
        case "stop":
            given = {"grace_s": DEFAULT_GRACE_S, **given}
        case "write":
            text, encoded = given.pop("text", ""), given.pop("text_base64", "")
            data = text.encode() or base64.b64decode(encoded)
            if len(data) > MAX_INPUT_BYTES:
                raise InvalidParams(f"A process takes {MAX_INPUT_BYTES} bytes of input at once.")
            given |= {
                "data": base64.b64encode(data).decode("ascii"), "close": given.get("close", False),
            }  # fmt: skip
    return {"do": do, **given}


def _result_of(answer: ContainerAnswer) -> JsonObject:
    """Return the result, or raise the error for a fault."""
    fault = answer.fault
    if fault is None:
        return answer.parts
    # The guest's text is shown, so only what can be printed of it.
    told = fault.message[:MAX_MESSAGE_CHARACTERS]
    words = "".join(one for one in told if one.isprintable()).strip() or "It was refused."
    if fault.kind == "invalid":
        raise InvalidParams(words)
    if fault.kind == "not_found":
        raise ResourceNotFound(words, fields=["name"])
    raise SandboxUnavailable(words)
