"""The output, files and ending of one run, collected as they arrive.

Host side, pure. Every frame was parsed strictly; here its order is also checked. Invariant:
whatever a guest sends, at most the output limit of each stream is kept, and only files that fit
the workspace are forwarded, with relative paths that stay inside it.
"""

from __future__ import annotations

from collections.abc import Callable

from fumehood.core.errors import EndedBy
from fumehood.core.limits import CONTAINER_FILES_OUT, MB, Limits
from fumehood.protocol.container_frames import (
    ContainerCall,
    ContainerData,
    ContainerEnding,
    ContainerFile,
    ContainerOutput,
)
from fumehood.protocol.framing import ConnectionFrame, FrameError
from fumehood.protocol.messages import GuestProgress
from fumehood.sandbox.wall import CallPort, FileSink, FrameSink, RunEnding, RunSinks, claims_of

BEGINNING_CHARACTERS = 64 * 1024
"""Characters of each stream that are kept if a sink receives all of it."""

_CLAIMABLE = {"memory": EndedBy.MEMORY, "policy": EndedBy.POLICY}
"""Failures that a program may report about itself (ADR 0010): a report never turns failure into
success. Excess output is not among them, because output is counted outside the program.
"""


class _KeptText:
    """The beginning of a stream, up to `most` characters."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        if text and self._left:
            kept = text[: self._left]
            self._left -= len(kept)
            self._parts.append(kept)
            if len(self._parts) > 1024:  # many small strings need more memory than their text
                self._parts = ["".join(self._parts)]

    @property
    def text(self) -> str:
        return "".join(self._parts)


class ReceivedRun:
    """Collects what the host receives from one run.

    Its methods raise FrameError for a frame that breaks the protocol's order or limits.
    """

    def __init__(
        self,
        run_id: int,
        limits: Limits,
        sinks: RunSinks,
        isolation: str,
        send: Callable[[bytes], None] = lambda frame: None,
        port: CallPort | None = None,
    ) -> None:
        """`send` sends a frame to the guest, and `port` answers and pauses the program."""
        self.id = run_id
        self._connections: FrameSink | None = None
        if sinks.network is not None and port is not None:
            self._connections = sinks.network.open(run_id, send, port)
        self.is_collecting = False
        """Whether the program has ended and its files follow."""
        self.brake = sinks.brake
        self._isolation = isolation
        most = limits.output_bytes
        if sinks.output is not None:
            most = min(most, BEGINNING_CHARACTERS)
        self._texts = {"stdout": _KeptText(most), "stderr": _KeptText(most)}
        self._sink: FileSink | None = sinks.files
        self._on_output = sinks.output
        self._on_progress = sinks.progress
        self._on_call = sinks.call
        self._has_tools = sinks.call is not None
        self._files = 0
        self._file_left = 0
        self._disk_left = (limits.memory_mb or 0) * MB

    def mute(self) -> None:
        """Drop files, progress and tool calls from now on. Output is still passed on."""
        self._sink = self._on_progress = self._on_call = None

    def on_output(self, frame: ContainerOutput) -> None:
        """Keep the next characters of a stream. Raises FrameError."""
        self._must_be_mine(frame.id)
        self._texts[frame.stream].add(frame.text)
        if self._on_output is not None:
            try:
                self._on_output(frame.stream, frame.text)
            except Exception:  # a failing sink is not called again; the run continues
                self._on_output = None

    def on_progress(self, frame: GuestProgress) -> None:
        """Pass on a report of progress. Raises FrameError."""
        self._must_be_mine(frame.id)
        if self._on_progress is not None:
            try:
                self._on_progress(frame.percent, frame.message)
            except Exception:
                self._on_progress = None

    def on_call(self, frame: ContainerCall, port: CallPort) -> None:
        """Pass on the program's call of a tool. Raises FrameError."""
        self._must_be_mine(frame.id)
        if not self._has_tools or self.is_collecting:
            raise FrameError("a call of a tool that no program can have made")
        if self._on_call is not None:
            self._on_call(frame.number, frame.tool, frame.arguments, port)

    def on_connection(self, frame: ConnectionFrame) -> None:
        """Take a frame of one of the program's connections. Raises FrameError."""
        if self._connections is None or self.is_collecting:
            raise FrameError("a connection that no program can have made")
        self._connections.on_frame(frame)

    def close_connections(self) -> None:
        """Break the program's connections: it has ended."""
        if self._connections is not None:
            self._connections.close()

    def on_file(self, frame: ContainerFile) -> None:
        """Start a file. Raises FrameError."""
        self._must_be_mine(frame.id)
        self.is_collecting = True
        self._files += 1
        self._disk_left -= frame.size
        if self._files > CONTAINER_FILES_OUT or self._disk_left < 0:
            raise FrameError("more files than a workspace holds")
        if not is_plain_path(frame.path):
            raise FrameError("a path that leads out of the workspace, or nowhere")
        self._file_left = frame.size
        self._hand_on(lambda sink: sink.start(frame.path, frame.size, frame.kind))

    def on_data(self, frame: ContainerData) -> None:
        """Forward the next bytes of the file that was started last. Raises FrameError."""
        self._must_be_mine(frame.id)
        content = frame.data
        if not self._files or len(content) > self._file_left:
            raise FrameError("more bytes than the file was said to have")
        self._file_left -= len(content)
        self._hand_on(lambda sink: sink.write(content))

    def on_ended(self, frame: ContainerEnding) -> RunEnding:
        """Convert the guest's last message to the run's ending. Raises FrameError."""
        self._must_be_mine(frame.id)
        claim = frame.claim or {}
        result, claims = claim.get("result"), claims_of(claim.get("error"))
        ended_by = frame.ended_by
        if ended_by is EndedBy.EXCEPTION:
            ended_by = _CLAIMABLE.get(claims["claimed_kind"] or "", ended_by)
        return RunEnding(
            ended_by=ended_by,
            isolation=self._isolation,
            cpu_ms=frame.cpu_ms,
            peak_memory_bytes=frame.peak_memory_bytes,
            output_bytes=frame.stdout_bytes + frame.stderr_bytes,
            exit_code=frame.exit_code,
            signal=frame.signal,
            # The exit status decides success; a program that ends itself has no result.
            result=result if ended_by is EndedBy.OK and isinstance(result, dict) else None,
            **claims,
            stdout=self._texts["stdout"].text,
            stderr=self._texts["stderr"].text,
            stdout_bytes=frame.stdout_bytes,
            stderr_bytes=frame.stderr_bytes,
            limits_hit=tuple(dict.fromkeys(limit.value for limit in frame.limits_hit)),
            files_left_out=frame.files_left_out,
            state=frame.state,
            variables_bytes=frame.variables_bytes,
        )

    def cut_off(self, ended_by: EndedBy) -> RunEnding:
        """Return the ending of a run whose guest did not report one, with the output so far."""
        stdout, stderr = self._texts["stdout"].text, self._texts["stderr"].text
        sizes = [len(text.encode("utf-8", "replace")) for text in (stdout, stderr)]
        return RunEnding(
            ended_by=ended_by,
            isolation=self._isolation,
            output_bytes=sum(sizes),
            stdout=stdout,
            stderr=stderr,
            stdout_bytes=sizes[0],
            stderr_bytes=sizes[1],
        )

    def _must_be_mine(self, frame_id: int) -> None:
        if frame_id != self.id:
            raise FrameError("a message about another run")

    def _hand_on(self, say: Callable[[FileSink], None]) -> None:
        if self._sink is None:
            return
        try:
            say(self._sink)
        except Exception:  # a failing sink is not called again; the run continues
            self._sink = None


def is_plain_path(path: str) -> bool:
    """Whether a path is relative and made only of valid file names."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in path and all(name not in ("", ".", "..") for name in path.split("/"))
