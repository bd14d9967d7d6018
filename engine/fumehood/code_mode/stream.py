"""The host's end of the stream by which a program calls tools.

Host side. The guest's end is `guest/streams/calls.py`. Each frame from the guest is one call, as
JSON. An answer is JSON, split into several frames if necessary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field, ValidationError

from fumehood.core.call import MAX_TOOL_CHARACTERS
from fumehood.core.json_types import JsonObject
from fumehood.protocol.framing import FrameError, parse_body
from fumehood.protocol.messages import StrictFrame
from fumehood.protocol.streams import pieces_of
from fumehood.sandbox.streams import RunClock, StreamKind, StreamPort

CALLS = StreamKind("calls", modules=("tools",))

OnCall = Callable[[int, str, JsonObject, Callable[[bytes], None], RunClock], None]
"""A function that receives a call of a program. Its arguments are the call's number, the tool, the
arguments, a function that sends the answer, and the clock of the program's run."""


class ProgramCall(StrictFrame):
    """A tool call that a program makes. Every field is untrusted."""

    number: int = Field(ge=0, lt=1 << 31)
    """The program chooses this number. The answer to the call has the same number."""
    tool: str = Field(max_length=MAX_TOOL_CHARACTERS)
    arguments: dict[str, Any]


class CallStream:
    """Passes a program's tool calls to `on_call`, and the answers back to the program."""

    def __init__(self, on_call: OnCall, port: StreamPort) -> None:
        self._on_call = on_call
        self._port = port
        self._is_closed = False

    def on_frame(self, body: bytes) -> None:
        """Parse a call and pass it to `on_call`, unless the stream is closed. Raises FrameError if
        the call is invalid.
        """
        try:
            call = ProgramCall.model_validate(parse_body(body))
        except ValidationError as error:
            raise FrameError(f"a call is wrong in {error.error_count()} places") from None
        if not self._is_closed:
            self._on_call(call.number, call.tool, call.arguments, self._answer, self._port)

    def close(self) -> None:
        """Ignore calls that arrive from now on."""
        self._is_closed = True

    def _answer(self, answer: bytes) -> None:
        for piece in pieces_of(answer):
            self._port.send(piece)
