"""The channel to the guest of one container: its attached stream, as frames.

Host side. Above it `container`, below it a stranger: capped before anything is kept, parsed
strictly, in the protocol's order or not at all; the first wrong frame ends the container. The
guest's clock reports, this side's clock decides.

Of a run the guest sends output, files, its ending, and after that whether it is clean again.
Only what comes before the ending is waited for by the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

import anyio

from fumehood.core.errors import EndedBy, InternalError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit, Limits
from fumehood.protocol import framing
from fumehood.protocol.container_frames import (
    ContainerData,
    ContainerEnding,
    ContainerFile,
    ContainerFrame,
    ContainerOutput,
    ContainerProgress,
    ContainerReset,
    parse_container_body,
    run_frames,
)
from fumehood.protocol.framing import FrameError
from fumehood.protocol.messages import GuestReady
from fumehood.sandbox.container.demux import STDERR, Demultiplexer, NotMultiplexed
from fumehood.sandbox.container.imports import needs_preloaded
from fumehood.sandbox.container.received import ReceivedRun
from fumehood.sandbox.wall import RunEnding, RunSinks

PRELOAD_GRACE_S = 30.0
"""For a program that needs an image's modules, while they are being loaded in a new container."""

ANSWER_GRACE_S = 5.0
"""How much later than the guest's own clock this side gives up on an answer: on a busy host,
starting a program and taking it down can take a while."""

COLLECT_DEADLINE_S = 30.0
"""For the files of one run, from the first on. They fill at most a quarter of the memory."""

CANCEL_GRACE_S = 3.0
RESET_DEADLINE_S = 10.0
"""The guest itself takes at most a few seconds and then says that it is not clean."""

MAX_FRAME_BYTES = 4 << 20
"""The largest is an ending with a claim as large as the output limit, in JSON's escapes."""

STREAM_ENDED = "its stream ended"
"""Why a channel ended that neither side had ended on purpose."""

DIRTY = "it is not clean: "
"""What a guest says of it follows."""

NOT_CLEAN_IN_TIME = "it was not clean in time"
NOT_ENDED_IN_TIME = "it did not end a run in time"

MAX_COMPLAINT_BYTES = 4096
"""Of stderr, for the log. What is beyond is dropped."""


class Clocks(Protocol):
    """The deadlines of this side, so that a test need not wait for them."""

    answer_grace_s: float
    collect_s: float
    cancel_s: float
    reset_s: float


class DefaultClocks:
    answer_grace_s = ANSWER_GRACE_S
    collect_s = COLLECT_DEADLINE_S
    cancel_s = CANCEL_GRACE_S
    reset_s = RESET_DEADLINE_S


class ChannelListener(Protocol):
    """Who hears of a channel. Called from the event loop; nothing here may wait."""

    def on_clean(self) -> None:
        """The container is as it was before the run: the next may be sent."""

    def on_end(self, why: str) -> None:
        """Nothing more will come. Once, and the last thing."""


class Lost(Exception):
    """The stream ended in the middle of a run; `run` holds what had come."""

    def __init__(self, run: ReceivedRun) -> None:
        super().__init__("the stream ended")
        self.run = run


class Channel(asyncio.Protocol):
    """One guest's channel. After `dead` is set it answers nothing any more."""

    def __init__(self, listener: ChannelListener, clocks: Clocks | None = None) -> None:
        self.dead = asyncio.Event()
        self.ready = asyncio.Event()
        """Set by the first message, and by the end."""
        self.why = ""
        """Why it ended."""
        self.enforced: frozenset[Limit] = frozenset()
        self.faults: tuple[str, ...] = ()
        self.complaint = b""
        """The beginning of what the guest wrote to stderr. Logged, never believed."""
        self.is_dirty = False
        """Whether the guest said, or showed, that it could not clean up."""
        self._listener = listener
        self._clocks = clocks if clocks is not None else DefaultClocks()
        self._demultiplexer = Demultiplexer()
        self._decoder = framing.Decoder(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._runs = 0
        self._run: ReceivedRun | None = None
        self._answer: asyncio.Future[RunEnding] | None = None
        self._resetting: int | None = None
        """The run after which the guest has not said yet whether it is clean."""
        self._overdue: asyncio.TimerHandle | None = None

    @property
    def is_resetting(self) -> bool:
        """A run has ended, and the container is not yet clean."""
        return self._resetting is not None

    @property
    def is_free(self) -> bool:
        """The next run may be sent."""
        return not (self.dead.is_set() or self._run is not None or self.is_resetting)

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
        """One run, until its ending. Cancelling it ends the program inside before it raises.

        `keep` leaves its files, and a Python program's variables, for the next run.

        Raises:
            Lost: the stream ended first.
        """
        if not self.is_free or not self.ready.is_set() or self._transport is None:
            raise InternalError("A run was given to a container that is not free.")
        self._runs += 1
        received = self._run = ReceivedRun(self._runs, limits, sinks, isolation)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[RunEnding] = loop.create_future()
        self._answer = answer
        thin = program == "python" and not needs_preloaded(arguments["code"])
        for frame in run_frames(
            received.id, program, arguments, limits, keep=keep, live=sinks.is_live, thin=thin
        ):
            self._transport.write(framing.encode(frame))
        grace_s = self._clocks.answer_grace_s + (
            PRELOAD_GRACE_S if program == "python" and not thin else 0.0
        )
        self._expect_by(limits.wall_s + grace_s, self._give_up)
        try:
            return await answer
        except asyncio.CancelledError:
            # The answer may have come in the same moment; then there is nothing to end.
            if not answer.done() or answer.cancelled():
                received.mute()
                with anyio.CancelScope(shield=True):
                    ending = await self._cancel(received.id)
                if sinks.ending is not None:
                    sinks.ending(ending or received.cut_off(EndedBy.CANCELLED))
            # The exception is looked at, so that nobody reports it as forgotten.
            elif answer.exception() is None and sinks.ending is not None:
                sinks.ending(answer.result())
            raise

    def end(self, why: str) -> None:
        """Let go of the stream: the guest's stdin closes, and it ends itself. Once."""
        if self.dead.is_set():
            return
        self.why = why
        self.dead.set()
        self.ready.set()
        self._expect_nothing()
        if self._transport is not None:
            self._transport.abort()
        if self._run is not None and self._answer is not None and not self._answer.done():
            self._answer.set_exception(Lost(self._run))
        self._listener.on_end(why)

    # -- asyncio.Protocol -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, chunk: bytes) -> None:
        try:
            for stream, piece in self._demultiplexer.feed(chunk):
                if self.dead.is_set():
                    return
                if stream == STDERR:
                    self._on_complaint(piece)
                    continue
                for body in self._decoder.bodies(piece):
                    self._on_frame(parse_container_body(body))
                    if self.dead.is_set():
                        return
        except (FrameError, NotMultiplexed) as error:
            self.end(f"it sent what it must not: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.end(STREAM_ENDED)

    # -- inside -------------------------------------------------------------------

    def _on_frame(self, frame: ContainerFrame) -> None:
        """Raises FrameError where it is not this frame's turn."""
        if isinstance(frame, GuestReady):
            if self.ready.is_set():
                raise FrameError("it was ready before")
            self.enforced, self.faults = frame.enforced, frame.faults
            self.ready.set()
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
            case ContainerProgress():
                run.on_progress(frame)
            case ContainerFile():
                if not run.is_collecting:
                    self._expect_by(self._clocks.collect_s, self._give_up)
                run.on_file(frame)
            case ContainerData():
                run.on_data(frame)
            case ContainerEnding():
                ending = run.on_ended(frame)
                answer, self._answer, self._run = self._answer, None, None
                self._resetting = run.id
                self._expect_by(self._clocks.reset_s, self._give_up_reset)
                if answer is not None and not answer.done():
                    answer.set_result(ending)
            case _:
                raise FrameError("not while a program runs")

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
        self._listener.on_clean()

    def _on_complaint(self, piece: bytes) -> None:
        self.complaint += piece[: MAX_COMPLAINT_BYTES - len(self.complaint)]

    async def _cancel(self, run_id: int) -> RunEnding | None:
        """Ask for the end of a run and wait for it; a guest that does not answer is ended."""
        if self._run is None or self._transport is None:
            return None
        ended: asyncio.Future[RunEnding] = asyncio.get_running_loop().create_future()
        self._answer = ended
        self._transport.write(framing.encode({"op": "cancel", "id": run_id}))
        with anyio.move_on_after(self._clocks.cancel_s):
            with contextlib.suppress(Lost):
                return await ended
            return None
        self._answer = None
        self.end("it did not end a cancelled run")
        return None

    def _give_up(self) -> None:
        """The guest kept a run past its deadline."""
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

    def _expect_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
