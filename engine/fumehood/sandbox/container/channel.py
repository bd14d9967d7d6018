"""The channel to the guest of one container: what it writes, decoded to frames.

Host side, used by `container`. All input of the channel is untrusted. Sizes are checked before
anything is kept. Frames are parsed strictly and accepted only in the protocol's order, and the
first invalid frame ends the container. Times that the guest measures are only reported; deadlines
use the host's clock. Whatever a guest sends, of each output stream at most the output limit is
kept. Files are forwarded only if they fit into the workspace and have relative paths that stay
inside it.

During a run, the guest first sends output and files, then the run's ending, and then whether the
container is clean again. The caller waits only until the ending.

A Python program that imports only the standard library runs in a process without the image's
preloaded modules. If the host chooses wrongly, only speed is affected: if the modules are needed
after all, the program must import them; if they are not needed, it starts more slowly. So the
program's text is searched with regular expressions instead of parsed, and in doubt the modules
count as needed.

Requests about a session's registered processes each wait a bounded time by the host's clock. An
answer that does not fit its request, or an impossible number of processes, breaks the protocol. At
any time, at most `MAX_OPEN` requests to a guest are unanswered.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import anyio

from fumehood.core.errors import (
    MAX_MESSAGE_CHARACTERS,
    EndedBy,
    InternalError,
    InvalidParams,
    ResourceNotFound,
    SandboxUnavailable,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import CONTAINER_FILES_OUT, MB, Limit, Limits
from fumehood.protocol import framing
from fumehood.protocol.container_frames import (
    PART_CHARACTERS,
    ContainerAnswer,
    ContainerData,
    ContainerEnding,
    ContainerFile,
    ContainerFrame,
    ContainerOutput,
    ContainerProcesses,
    ContainerReset,
    parse_container_body,
    run_frames,
)
from fumehood.protocol.framing import FrameError, whole_words
from fumehood.protocol.messages import GuestProgress, GuestReady
from fumehood.protocol.streams import NO_RUN, StreamFrame
from fumehood.sandbox.container.runtime import Receiver
from fumehood.sandbox.streams import Dial, K, Stream, StreamEnd, StreamKind, StreamPort
from fumehood.sandbox.wall import (
    MAX_FRAME_BYTES,
    FileSink,
    RunEnding,
    RunSinks,
    claims_of,
    try_later,
)

PRELOAD_GRACE_S = 30.0
"""Extra seconds for a run whose program needs the image's preloaded modules, because a new
container may still be loading them.
"""

STREAM_ENDED = "its stream ended"
"""The reason for the end of a channel that neither side has ended on purpose."""

INVALID = "it sent what it must not: "
"""Prefix of the reason for the end of a channel whose guest has sent an invalid frame."""

DIRTY = "it is not clean: "
"""Prefix of the reason for the end of a channel whose guest could not clean up. The guest's own
reason follows.
"""

NOT_CLEAN_IN_TIME = "it was not clean in time"
NOT_ENDED_IN_TIME = "it did not end a run in time"

BEGINNING_CHARACTERS = 64 * 1024
"""Maximum number of characters of each output stream that are kept for the run's ending, if a sink
receives the whole output.
"""

_CLAIMABLE = {"memory": EndedBy.MEMORY, "policy": EndedBy.POLICY}
"""The kinds of failure that a program may report about itself (ADR 0010). A report never turns
failure into success. Too much output is not among these kinds, because output is counted outside
the program.
"""

_IMPORT = re.compile(r"\bfrom[ \t]+([\w.]+)[ \t]+import\b|\bimport\b[ \t]*([^\n;#]*)")
_DOUBT = re.compile(
    r"__import__|importlib|__builtins__|__loader__|__spec__|sys\.modules|\bmodules\b|\brunpy\b"
    r"|\bpkgutil\b|\bzipimport\b|pickle|\bexec\b|\beval\b|(?<![.\w])compile\b"
)
"""Text in a program that may load a module without an import statement."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """How many seconds the host waits for a silent guest before it ends the guest."""

    # The times are long, because a session's files and variables are lost with the guest, and a
    # guest on a busy host is slow. A working guest does not need these limits: it measures its own
    # CPU time, and reports if it cannot end a process.

    answer_grace_s: float = 60.0
    """Maximum seconds to wait for a run's ending after the guest's own deadline."""
    collect_s: float = 60.0
    """Maximum seconds to wait for the next frame while a run's files are transferred."""
    collect_most_s: float = 600.0
    """Maximum seconds for the whole transfer of a run's files. Without this limit, a hostile guest
    could prolong the transfer without end by sending a frame from time to time.
    """
    cancel_s: float = 60.0
    """Maximum seconds to wait for the end of a cancelled run."""
    reset_s: float = 60.0
    """Maximum seconds to wait for the cleanup after a run."""


USUAL_CLOCKS = Clocks()


class ChannelListener(Protocol):
    """The current user of a channel, which is the pool or a session. It receives the channel's
    events in the event loop, so the methods must not block.
    """

    def on_clean(self) -> None:
        """Called when the container is clean again after a run. The next run may then be sent."""

    def on_end(self, why: str) -> None:
        """Called once when the channel has ended, after all other events. `why` is the reason."""


class Channel(Receiver):
    """The host's end of the channel to the guest of one container. After `dead` is set, the channel
    can no longer be used.
    """

    def __init__(
        self, listener: ChannelListener | None = None, clocks: Clocks = USUAL_CLOCKS
    ) -> None:
        self.listener = listener
        """The current user of the container, which receives the channel's events: the pool, or a
        session.
        """
        self.dead = asyncio.Event()
        self.ready = asyncio.Event()
        """Set by the guest's first message, or when the channel ends."""
        self.why = ""
        """A clause that says why the channel has ended. Empty while the channel is open."""
        self.enforced: frozenset[Limit] = frozenset()
        self.watched: tuple[str, ...] = ()
        """The limits that the guest enforces by looking at them from time to time."""
        self.faults: tuple[str, ...] = ()
        self._kinds: frozenset[str] = frozenset()
        """The kinds of streams that the guest supports."""
        self._complaint = b""
        self.is_dirty = False
        """Whether the guest could not clean up after a run, or did not finish the cleanup in
        time.
        """
        self._clocks = clocks
        self._decoder = framing.Decoder(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._runs = 0
        self._run: ReceivedRun | None = None
        self._answer: asyncio.Future[RunEnding] | None = None
        self._resetting: int | None = None
        """Id of the run after which the guest is still cleaning up. None if it is not cleaning
        up.
        """
        self._overdue: asyncio.TimerHandle | None = None
        self._collect_until = 0.0
        """Time, by the event loop's clock, at which the transfer of the run's files must have
        ended.
        """
        self._paused_at: float | None = None
        self._is_kept = False
        """Whether the container belongs to a session."""
        self.on_processes: Callable[[], None] = lambda: None
        """Called when the number of running registered processes has changed."""
        self.processes = ProcessRequests(self._send, lambda: self.on_processes())
        """Sends requests about a session's registered processes, which belong to no run."""
        self._streams: dict[str, Any] = {}  # each is the end that its `Stream` opens
        """Kind → host's end, for the streams that belong to the container and not to a run."""

    @property
    def complaint(self) -> str:
        """The beginning of the guest's standard error. It is logged, but never trusted."""
        return self._complaint.decode("utf-8", "backslashreplace")

    @property
    def is_dead(self) -> bool:
        """Whether the channel, and thus the container, has ended."""
        return self.dead.is_set()

    @property
    def is_resetting(self) -> bool:
        """Whether a run has ended, but the container is not clean yet."""
        return self._resetting is not None

    @property
    def is_free(self) -> bool:
        """Whether the next run may be sent: the channel is open, no run is in progress, and the
        container is clean.
        """
        return not (self.is_dead or self._run is not None or self.is_resetting)

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks,
        isolation: str,
        *,
        keep: bool = False,
    ) -> RunEnding:
        """Run `program`, one of the guest's programs, and return its ending.

        If `keep` is True, the next run gets the files of this run and, after a Python program, its
        variables. `isolation` says how the container is isolated. It is only copied into the
        ending.

        If the channel ends before the run does, the ending is `SANDBOX_LOST`. If the caller is
        cancelled, the program is ended before the cancellation is raised.

        Raises:
            SandboxUnavailable: the guest does not support one of the streams in `sinks`.
        """
        if not self.is_free or not self.ready.is_set() or self._transport is None:
            raise InternalError("A run was given to a container that is not free.")
        kinds = [stream.kind for stream in sinks.streams]
        self._require(kinds)
        self._runs += 1
        write = self._transport.write
        received = self._run = ReceivedRun(
            self._runs, limits, sinks, isolation, partial(_Port, self, self._runs)
        )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[RunEnding] = loop.create_future()
        self._answer = answer
        given = {module for kind in kinds for module in kind.modules}
        thin = program == "python" and not needs_preloaded(arguments["code"], given)
        self._paused_at = None
        for frame in run_frames(
            received.id, program, arguments, limits,
            keep=keep, live=sinks.is_live, thin=thin,
            streams={kind.name: kind.told for kind in kinds}, trial=sinks.trial,
        ):  # fmt: skip
            write(framing.encode(frame))
        grace_s = self._clocks.answer_grace_s + (
            PRELOAD_GRACE_S if program == "python" and not thin else 0.0
        )
        self._expect_by(limits.wall_s + grace_s, self._give_up)
        try:
            return await answer
        except asyncio.CancelledError:
            # The ending may have arrived at the same moment; then there is nothing to cancel.
            if not answer.done() or answer.cancelled():
                received.mute()
                with anyio.CancelScope(shield=True):
                    ending = await self._cancel(received.id)
                if sinks.ending is not None:
                    sinks.ending(ending or received.cut_off(EndedBy.CANCELLED))
            elif sinks.ending is not None:
                sinks.ending(answer.result())
            raise
        finally:
            received.close_streams()

    def opened(self, stream: Stream[K]) -> K:
        """Return the host's end of a stream that belongs to the container, and not to a run. The
        first call opens the stream, which then stays open until the channel ends.

        Raises:
            SandboxUnavailable: the guest does not support this kind of stream.
        """
        self._require([stream.kind])
        found: K | None = self._streams.get(stream.kind.name)
        if found is None:
            found = stream.open(_Port(self, NO_RUN, stream.kind))
            self._streams[stream.kind.name] = found
            if self.is_dead:
                found.close()
        return found

    def interrupt_streams(self) -> None:
        """Break the transfers over the streams that belong to the container, because the container
        is about to be frozen.
        """
        for end in self._streams.values():
            end.interrupt()

    def end(self, why: str) -> None:
        """End the channel for the reason `why`. This closes the guest's standard input, so that the
        guest ends itself. Afterwards, the owner of the container must remove the container. If the
        channel has already ended, do nothing.
        """
        if self.dead.is_set():
            return
        self.why = why
        self.dead.set()
        self.ready.set()
        self._expect_nothing()
        if self._transport is not None:
            self._transport.abort()
        self.processes.close()
        for end in self._streams.values():
            end.close()
        if self._run is not None and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._run.cut_off(EndedBy.SANDBOX_LOST))
        if self.listener is not None:
            self.listener.on_end(why)

    # -- Receiver -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if self.is_dead:
            transport.abort()

    def data_received(self, chunk: bytes) -> None:
        if self.dead.is_set():
            return
        try:
            for body in self._decoder.bodies(chunk):
                self._on_frame(parse_container_body(body))
                if self.dead.is_set():
                    return
        except FrameError as error:
            self.end(f"{INVALID}{error}")
        else:
            if self._run is not None and self._run.brake is not None and self._transport:
                self._run.brake.hold(self._transport.pause_reading, self._transport.resume_reading)

    def errors_received(self, chunk: bytes) -> None:
        # For the log, limited to the length of an error message.
        self._complaint += chunk[: MAX_MESSAGE_CHARACTERS - len(self._complaint)]

    def stream_broken(self, why: str) -> None:
        self.end(f"{INVALID}{why}")

    def connection_lost(self, error: Exception | None) -> None:
        self.end(STREAM_ENDED)

    # -- inside -------------------------------------------------------------------

    def _on_frame(self, frame: ContainerFrame) -> None:
        """Process one frame from the guest. Raises FrameError if the protocol does not allow this
        frame now.
        """
        if isinstance(frame, GuestReady):
            if self.ready.is_set():
                raise FrameError("it was ready before")
            self.enforced, self.faults = frame.enforced, frame.faults
            self.watched = frame.watched
            self._kinds = frozenset(frame.streams)
            self.ready.set()
        elif isinstance(frame, ContainerAnswer):
            self.processes.on_answer(frame)
        elif isinstance(frame, ContainerProcesses):
            if not self._is_kept:
                raise FrameError("only sessions have processes")
            self.processes.on_count(frame)
        elif isinstance(frame, StreamFrame) and frame.run_id == NO_RUN:
            if frame.kind not in self._streams:
                raise FrameError("a stream that the host has not opened")
            self._streams[frame.kind].on_frame(frame.body)
        elif self._run is not None:
            self._on_run_frame(self._run, frame)
        elif self._resetting is not None:
            self._on_reset(frame, self._resetting)
        else:
            raise FrameError("nobody asked")

    def _on_run_frame(self, run: ReceivedRun, frame: ContainerFrame) -> None:
        match frame:
            case ContainerOutput():
                run.on_output(frame)
            case GuestProgress():
                run.on_progress(frame)
            case StreamFrame():
                run.on_stream(frame)
            case ContainerFile():
                if not run.is_collecting:
                    now = asyncio.get_running_loop().time()
                    self._collect_until = now + self._clocks.collect_most_s
                run.on_file(frame)
                self._expect_files()
            case ContainerData():
                run.on_data(frame)
                self._expect_files()
            case ContainerEnding():
                ending = run.on_ended(frame)
                answer, self._answer, self._run = self._answer, None, None
                self._resetting = run.id
                self._expect_by(self._clocks.reset_s, self._give_up_reset)
                if answer is not None and not answer.done():
                    answer.set_result(ending)
            case _:
                raise FrameError("not while a program runs")

    def keep(self, epoch: int, wait_s: float) -> None:
        """Inform the guest that its container now belongs to a session. If this engine disappears,
        the guest waits `wait_s` seconds for another engine that takes the session over.

        `epoch` is the number of this engine among the engines that the session has had. The guest
        accepts another engine only if that engine has a higher number.
        """
        self._is_kept = True
        self._send(framing.encode({"op": "keep", "epoch": epoch, "wait_s": wait_s}))

    def _send(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def _require(self, kinds: Iterable[StreamKind]) -> None:
        """Raise SandboxUnavailable if the guest does not support one of these kinds of streams."""
        lacking = [kind.name for kind in kinds if kind.name not in self._kinds]
        if lacking and not self.is_dead:
            raise SandboxUnavailable(
                "An earlier version of the engine started this session's container, whose guest "
                f"does not know {', '.join(sorted(lacking))}. Nothing ran. Use a new session.",
                retryable=False,
            )

    def send_frame(self, run_id: int, kind: StreamKind, body: bytes) -> None:
        """Send a frame of a stream to the guest, unless the stream's run has ended. If the guest
        has left too many bytes of streams unread, end the container instead.
        """
        is_open = run_id == NO_RUN or (self._run is not None and self._run.id == run_id)
        if not is_open or self._transport is None:
            return
        if self._transport.get_write_buffer_size() > kind.max_unread_bytes:
            self.end(f"it did not read the frames of a stream ({kind.name})")
            return
        self._transport.write(StreamFrame(kind.name, run_id, body).encode())

    def refuse(self, run_id: int, why: str) -> None:
        """End the container because its guest has sent an invalid frame of a stream. `why`
        describes the fault. Do nothing if the stream's run has already ended.
        """
        if run_id == NO_RUN or (self._run is not None and self._run.id == run_id):
            self.end(f"{INVALID}{why}")

    def pause(self, run_id: int, *, is_paused: bool) -> None:
        """If `is_paused` is True, stop the deadlines of a run, on the host and in the guest.
        Otherwise, let them continue. Do nothing if the run's program has ended.
        """
        run, overdue = self._run, self._overdue
        if run is None or run.id != run_id or run.is_collecting or self._transport is None:
            return
        now = asyncio.get_running_loop().time()
        if is_paused and self._paused_at is None and overdue is not None:
            overdue.cancel()
            self._paused_at = now
        elif not is_paused and self._paused_at is not None and overdue is not None:
            self._expect_by(overdue.when() - self._paused_at, self._give_up)
            self._paused_at = None
        self._transport.write(framing.encode({"op": "pause", "id": run_id, "paused": is_paused}))

    def _on_reset(self, frame: ContainerFrame, run_id: int) -> None:
        if not isinstance(frame, ContainerEnding | ContainerReset):
            raise FrameError("nothing but a reset comes after the ending")
        if isinstance(frame, ContainerEnding) or frame.id != run_id:
            raise FrameError("a reset of another run")
        if not frame.clean:
            self.is_dirty = True
            self.end(f"{DIRTY}{frame.why}")
            return
        self._expect_nothing()
        self._resetting = None
        if self.listener is not None:
            self.listener.on_clean()

    async def _cancel(self, run_id: int) -> RunEnding | None:
        """Cancel a run, wait for its end, and return its ending. If the guest does not end the run
        in time, end the channel and return None.
        """
        if self._run is None or self._transport is None:
            return None
        ended: asyncio.Future[RunEnding] = asyncio.get_running_loop().create_future()
        self._answer = ended
        self._transport.write(framing.encode({"op": "cancel", "id": run_id}))
        with anyio.move_on_after(self._clocks.cancel_s):
            ending = await ended
            return ending if ending.ended_by is not EndedBy.SANDBOX_LOST else None
        self._answer = None
        self.end("it did not end a cancelled run")
        return None

    def _give_up(self) -> None:
        """End the channel, because the guest did not end a run by its deadline. The run ends with
        `WALL_TIME` or, if its program had already ended, with `SANDBOX_LOST`.
        """
        run, answer = self._run, self._answer
        if run is not None and answer is not None and not answer.done():
            late = EndedBy.SANDBOX_LOST if run.is_collecting else EndedBy.WALL_TIME
            answer.set_result(run.cut_off(late))
        self.end(NOT_ENDED_IN_TIME)

    def _give_up_reset(self) -> None:
        self.is_dirty = True
        self.end(NOT_CLEAN_IN_TIME)

    def _expect_by(self, seconds: float, late: Callable[[], None]) -> None:
        self._expect_nothing()
        self._overdue = asyncio.get_running_loop().call_later(seconds, late)

    def _expect_files(self) -> None:
        left_s = self._collect_until - asyncio.get_running_loop().time()
        self._expect_by(min(self._clocks.collect_s, left_s), self._give_up)

    def _expect_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None


@dataclass(frozen=True, slots=True)
class _Port:
    """Gives the host's end of one stream access to the channel (`StreamPort`): to send frames, to
    pause the run's clock, and to end the container.
    """

    channel: Channel
    run_id: int
    kind: StreamKind
    dial: Dial | None = None

    def send(self, body: bytes) -> None:
        self.channel.send_frame(self.run_id, self.kind, body)

    def pause(self, *, is_paused: bool) -> None:
        self.channel.pause(self.run_id, is_paused=is_paused)

    def refuse(self, why: str) -> None:
        self.channel.refuse(self.run_id, why)


# -- one run -------------------------------------------------------------------------------


class _KeptText:
    """Keeps the beginning of an output stream, at most `most` characters."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._kept = io.StringIO()

    def add(self, text: str) -> None:
        self._left -= self._kept.write(text[: self._left])

    @property
    def text(self) -> str:
        return self._kept.getvalue()


class ReceivedRun:
    """Processes the frames of one run: keeps the beginning of the output for the run's ending, and
    passes events to the sinks.

    The methods raise FrameError if a frame breaks the order or the limits of the protocol.
    """

    def __init__(
        self,
        run_id: int,
        limits: Limits,
        sinks: RunSinks,
        isolation: str,
        port: Callable[[StreamKind], StreamPort],
    ) -> None:
        """`port` creates the `StreamPort` for a stream of this run, given the stream's kind."""
        self.id = run_id
        self._streams: dict[str, StreamEnd] = {
            stream.kind.name: stream.open(port(stream.kind)) for stream in sinks.streams
        }
        self.is_collecting = False
        """Whether the program has ended, so that its files follow."""
        self.brake = sinks.brake
        self._isolation = isolation
        most = limits.output_bytes
        if sinks.output is not None:
            most = min(most, BEGINNING_CHARACTERS)
        self._texts = {"stdout": _KeptText(most), "stderr": _KeptText(most)}
        self._sink: FileSink | None = sinks.files
        self._on_output = sinks.output
        self._on_progress = sinks.progress
        self._files = 0
        self._file_left = 0
        self._disk_left = (limits.memory_mb or 0) * MB

    def mute(self) -> None:
        """From now on, ignore files and progress reports of the run, and close the streams between
        the run and parts of the engine. The program's output is still passed on.
        """
        self._sink = self._on_progress = None
        self.close_streams()

    def on_output(self, frame: ContainerOutput) -> None:
        """Pass a piece of the run's output to the sink. Also add it to the text for the run's
        ending, which contains only the beginning of each output stream. Raises FrameError if the
        frame belongs to another run.
        """
        self._must_be_mine(frame.id)
        self._texts[frame.stream].add(frame.text)
        if self._on_output is not None:
            try:
                self._on_output(frame.stream, frame.text)
            except Exception:  # a failing sink is not called again; the run continues
                self._on_output = None

    def on_progress(self, frame: GuestProgress) -> None:
        """Pass a progress report to the sink. Raises FrameError if it is invalid."""
        self._must_be_mine(frame.id)
        if self._on_progress is not None:
            try:
                self._on_progress(frame.percent, frame.message)
            except Exception:
                self._on_progress = None

    def on_stream(self, frame: StreamFrame) -> None:
        """Pass a frame of a stream to the host's end of this stream. Raises FrameError if the frame
        is invalid or the run has no such stream.
        """
        self._must_be_mine(frame.run_id)
        if frame.kind not in self._streams or self.is_collecting:
            raise FrameError("a frame of a stream that no program can have used")
        self._streams[frame.kind].on_frame(frame.body)

    def close_streams(self) -> None:
        """Close the host's ends of the run's streams. Frames that arrive later are dropped."""
        for end in self._streams.values():
            end.close()

    def on_file(self, frame: ContainerFile) -> None:
        """Start to receive a file that the run has left in the workspace. Raises FrameError if the
        file is invalid or too large.
        """
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
        """Pass the next bytes of the current file to the sink. Raises FrameError if there are too
        many.
        """
        self._must_be_mine(frame.id)
        content = frame.data
        if not self._files or not 0 < len(content) <= self._file_left:
            raise FrameError("no bytes, or more than the file was said to have")
        self._file_left -= len(content)
        self._hand_on(lambda sink: sink.write(content))

    def on_ended(self, frame: ContainerEnding) -> RunEnding:
        """Convert the guest's report on the end of the run to the run's ending. Raises FrameError
        if the report is invalid.
        """
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
        """Return an ending for a run that the guest did not end properly. `ended_by` says how it
        ended. The ending contains the output received so far.
        """
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
    """Whether a path from a guest is relative and consists only of valid file names."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in path and all(name not in ("", ".", "..") for name in path.split("/"))


# -- the choice between two processes ------------------------------------------------------


def needs_preloaded(code: str, given: Collection[str] = ()) -> bool:
    """Whether a Python program may import a module that is not in the standard library. A program
    that is too long to be sent in one frame is not searched, and the result is True.

    Imports of the modules `given` do not count, because the guest provides these modules.
    """
    if len(code) > PART_CHARACTERS or _DOUBT.search(code):
        return True
    return any(
        name.partition(".")[0] not in sys.stdlib_module_names and name not in given
        for clause in _IMPORT.finditer(code)
        for name in _modules_of(clause)
    )


def _modules_of(clause: re.Match[str]) -> list[str]:
    """Return the names of the modules that an import statement imports. `clause` is the match of
    the statement.

    The result may also contain text that is not the name of a module. This does no harm, because
    such text never equals the name of a module in the standard library.
    """
    source, imported = clause.groups()
    if source is not None:
        return [source]
    return [(part.split() or [""])[0] for part in imported.split(",")]


# -- requests about registered processes ------------------------------------------------------

MAX_OPEN = 64
"""Maximum number of unanswered requests to one guest, including those for which no caller waits any
more.
"""

ANSWER_S = 15.0
"""Maximum seconds to wait for an answer. This is enough for a busy host. The guest's own time limit
for each request is shorter.
"""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request about a session's background processes that was not answered yet. `do` is the
    requested action, and `name` is the name of the process, or None.
    """

    do: str
    name: str | None
    answer: asyncio.Future[ContainerAnswer]

    def fits(self, frame: ContainerAnswer) -> bool:
        """Return whether an answer is of the kind that the request expects. A refusal fits any
        request.
        """
        if frame.fault is not None:
            return True
        if self.do == "list":
            return frame.processes is not None
        if self.do == "read":
            return frame.output is not None
        return frame.process is not None and frame.process.name == self.name


class ProcessRequests:
    """Sends requests about background processes of a session to one guest. `send` sends the bytes
    of a frame. `on_change` is called when the number of running processes has changed.
    """

    def __init__(self, send: Callable[[bytes], None], on_change: Callable[[], None]) -> None:
        self.running: int | None = None
        """Last reported number of running processes, or None if there was no report yet."""
        self._send = send
        self._on_change = on_change
        self._ids = 0
        self._open: dict[int, _Asked] = {}

    async def ask(self, request: JsonObject) -> JsonObject:
        """Send a request to the guest, and return the result that its answer contains.

        Raises:
            InvalidParams: the request is too long, or cannot be carried out.
            ResourceNotFound: there is no such process.
            SandboxUnavailable: the guest has ended, does not answer in time, or has too many
                unanswered requests.
        """
        if len(self._open) >= MAX_OPEN:
            raise try_later("Too many requests wait for this session. Repeat it later.")
        self._ids += 1
        number = self._ids
        frame = framing.encode({**request, "op": "process", "id": number})
        if len(frame) > framing.MAX_REQUEST_BYTES:
            raise InvalidParams("The request about processes is too long.")
        answered = asyncio.get_running_loop().create_future()
        self._open[number] = _Asked(request["do"], request.get("name"), answered)
        self._send(frame)
        with anyio.move_on_after(ANSWER_S + request.get("grace_s", 0)):
            return _result_of(await answered)
        raise try_later("The session did not answer in time. Repeat the request.")

    def on_answer(self, frame: ContainerAnswer) -> None:
        """Process the guest's answer to a request. Raises FrameError if there is no such request,
        or if the answer does not fit it.
        """
        asked = self._open.get(frame.id)
        if asked is None:
            raise FrameError("an answer that nobody asked for")
        if not asked.fits(frame):
            raise FrameError("an answer to another request")
        del self._open[frame.id]
        self._count(frame.running)
        if not asked.answer.done():
            asked.answer.set_result(frame)

    def on_count(self, frame: ContainerProcesses) -> None:
        """Process the guest's report of how many processes still run. Raises FrameError if the
        number is not lower than the previous number.
        """
        # The number rises only in the answer to a request to start a process. So each report must
        # lower the number, and a guest cannot send reports without end.
        if self.running is not None and frame.running >= self.running:
            raise FrameError("a number of processes that nothing explains")
        self._count(frame.running)

    def close(self) -> None:
        """Make all unanswered requests fail, because the guest has ended."""
        self.running = 0
        for waiting in (asked.answer for asked in self._open.values()):
            if not waiting.done():
                waiting.set_exception(try_later("The session's container has ended."))
                waiting.exception()  # the caller may have given up
        self._open.clear()

    def _count(self, running: int) -> None:
        before, self.running = self.running, running
        if before != running:
            self._on_change()


def _result_of(answer: ContainerAnswer) -> JsonObject:
    """Return the result in the guest's answer. If the answer is a refusal, raise the corresponding
    error.
    """
    fault = answer.fault
    if fault is None:
        return answer.parts
    # The guest's text is shown to people, so it is reduced to printable characters.
    told = whole_words(fault.message, MAX_MESSAGE_CHARACTERS)
    words = "".join(one for one in told if one.isprintable()).strip() or "It was refused."
    if fault.kind == "invalid":
        raise InvalidParams(words)
    if fault.kind == "not_found":
        raise ResourceNotFound(words, fields=["name"])
    raise SandboxUnavailable(words)
