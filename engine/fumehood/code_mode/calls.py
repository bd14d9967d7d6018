"""The calls of tools that one program makes ("code mode").

Host side. Everything from the program is untrusted. Therefore the program's list of tools and the
number of its calls are enforced here, and not in the container. Each call then passes the whole
pipeline (`pipeline/program_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fumehood.core.envelope import Envelope, ErrorInfo
from fumehood.core.errors import (
    EngineError,
    OutputLimitExceeded,
    QuotaExceeded,
    RateLimited,
    ToolNotFound,
)
from fumehood.core.json_types import JsonObject
from fumehood.executors.base import ProgramCalls
from fumehood.pipeline.result import MAX_RESULT_BYTES, shape_error
from fumehood.protocol import strict_json
from fumehood.protocol.framing import MAX_CALLS, MAX_OPEN_CALLS
from fumehood.sandbox.streams import RunClock

ANSWER_BYTES = 1024
"""Bytes reserved for everything in an answer except its result."""

Answer = Callable[[bytes], None]
"""A function that sends the answer to a call, as JSON, to the program."""


class ToolCalls:
    """Starts or refuses the tool calls of one program, and sends the answers to the program."""

    def __init__(self, tools: Sequence[JsonObject], calls: ProgramCalls) -> None:
        self._names = frozenset(tool["name"] for tool in tools)
        self._calls = calls
        self._made = self._failed = self._unanswered = 0

    @property
    def report(self) -> JsonObject:
        """The number of calls that the program made and the number that failed, as `{"made": …,
        "failed": …}`. Both numbers include refused calls.
        """
        return {"made": self._made, "failed": self._failed}

    def on_call(
        self, number: int, tool: str, arguments: JsonObject, answer: Answer, clock: RunClock
    ) -> None:
        """Start a call of the program, or refuse the call.

        `answer` is called once, with the encoded result or error, which contains the call's
        `number`. For a refused call, this happens at once. `clock` is the clock of the program's
        run.
        """
        self._made += 1
        refusal = self._refusal(tool)
        if refusal is not None:
            self._answer(number, answer, refusal)
            return
        self._unanswered += 1
        self._calls.start(tool, arguments, partial(self._on_end, number, answer), clock)

    def _refusal(self, tool: str) -> EngineError | None:
        if self._made > MAX_CALLS:
            return QuotaExceeded(
                f"One program can make {MAX_CALLS} calls. Finish it, and go on in another one."
            )
        if self._unanswered >= MAX_OPEN_CALLS:
            return RateLimited(
                f"One program can have {MAX_OPEN_CALLS} calls open.", retry_after_ms=100
            )
        if tool not in self._names:
            return ToolNotFound(
                f"The program has no tool {tool[:80]!r}; the argument `tools` of its call says "
                "which it has. Do not retry."
            )
        return None

    def _on_end(self, number: int, answer: Answer, ended: Envelope | EngineError) -> None:
        self._unanswered -= 1
        self._answer(number, answer, ended)

    def _answer(self, number: int, send: Answer, ended: Envelope | EngineError) -> None:
        """Encode the result or the error of the call with this `number`, and pass it to `send`. A
        result that is too long is replaced by an error.
        """
        data: JsonObject = {}
        if isinstance(ended, EngineError):
            error: ErrorInfo | None = shape_error(ended)
        else:
            data, error = ended.data, ended.error
        answer = _encoded(number, data, error)
        if len(answer) > MAX_RESULT_BYTES + ANSWER_BYTES:
            error = shape_error(
                OutputLimitExceeded(
                    f"The tool has run, but its result has {len(answer)} bytes, and a program "
                    f"takes {MAX_RESULT_BYTES}. Ask for less."
                )
            )
            answer = _encoded(number, data, error)
        self._failed += error is not None
        send(answer)


def _encoded(number: int, data: JsonObject, error: ErrorInfo | None) -> bytes:
    told = {"data": data} if error is None else {"error": error.model_dump(mode="json")}
    return strict_json.dumps({"call": number, **told})
