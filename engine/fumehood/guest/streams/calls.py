"""The stream of a program's tool calls. It carries calls to the host, and answers to the program.

Guest side, used by the supervisor. Messages from the program are hostile. This module checks the
form and the number of its calls, and the host checks everything again. Answers are not parsed here.
"""

from __future__ import annotations

from typing import Any

from fumehood.guest.container import streams
from fumehood.guest.container.run import Run, is_running
from fumehood.protocol import framing, strict_json
from fumehood.protocol.streams import Joiner, StreamFrame

REFUSALS = 100
"""Number of tool calls that a program may make beyond its limit. Each of them is refused. A program
that ignores so many refusals is ended.
"""

MAX_TOOL_CHARACTERS = 256

MAX_UNREAD_BYTES = 16 << 20
"""Maximum number of bytes in answers to tool calls that a program has not read yet."""


class End(streams.End):
    """Forwards the tool calls of the current run's program, if the program may call tools."""

    def begin(self, run: Run, told: str) -> None:
        """Start to count the tool calls of `run` at zero. `told` is not used."""
        self._calls = 0
        self._answer = Joiner()

    def on_frame(self, run: Run | None, frame: StreamFrame) -> None:
        """Forward the answer to a tool call of the program of `run`, unless the program has
        ended.
        """
        if run is None or run.id != frame.run_id or not is_running(run):
            return
        answer = self._answer.add(frame.body)
        if answer is None:
            return
        if len(run.request) + len(answer) > MAX_UNREAD_BYTES:
            self.place.stop(run, "policy")
        else:
            self.place.write(run, framing.HEADER.pack(len(answer)) + answer)

    def on_message(self, run: Run, message: dict[str, Any]) -> bool:
        """If `message` is a tool call, forward it to the host, and return True. Otherwise, return
        False. If the call is invalid, or if the program has made too many calls, end the program
        instead.
        """
        if "call" not in message:
            return False
        if is_running(run):
            call = self._checked(message["call"])
            if call is None:
                self.place.stop(run, "policy")
            else:
                body = strict_json.dumps(call)
                self.place.host.send_frame(StreamFrame(self.kind, run.id, body))
        return True

    def on_garbage(self, run: Run) -> None:
        """End the program of `run`, because it has sent an invalid message."""
        # None of its messages is read any more, so it would wait for answers until its time limit.
        if is_running(run):
            self.place.stop(run, "policy")

    def _checked(self, claim: Any) -> dict[str, Any] | None:
        self._calls += 1
        if self._calls > framing.MAX_CALLS + REFUSALS or not isinstance(claim, dict):
            return None
        number, tool, arguments = (claim.get(key) for key in ("number", "tool", "arguments"))
        if type(number) is not int or not isinstance(tool, str) or not isinstance(arguments, dict):
            return None
        if not 0 <= number < 1 << 31 or len(tool) > MAX_TOOL_CHARACTERS:
            return None
        return {"number": number, "tool": tool, "arguments": arguments}
