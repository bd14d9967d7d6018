"""One guest process and the channel to it.

Host side, between the wall and the guest's supervisor. The supervisor's frames are untrusted: they
are limited in size and parsed strictly, and the first invalid frame ends the guest. Deadlines use
the host's clock. If a run does not end in time, its guest is killed, and all other runs in this
guest are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.abc
import psutil

from fumehood.core.errors import EndedBy, RequestTooLarge
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit, Limits
from fumehood.protocol import framing
from fumehood.protocol.messages import (
    GuestEnding,
    GuestFrame,
    GuestPart,
    GuestProgress,
    GuestReady,
    parse_guest_frame,
    run_frame,
)
from fumehood.sandbox.wall import (
    LOST,
    MAX_FRAME_BYTES,
    NO_SINKS,
    RunEnding,
    RunSinks,
    ending_of_frame,
)

GUEST_PROGRAM = Path(__file__).parents[2] / "guest"
START_DEADLINE_S = 10.0
"""Maximum seconds until a new guest is ready."""

ANSWER_GRACE_S = 30.0
"""Seconds that the host waits for a run's ending beyond the guest's own deadline. After that, all
runs of the guest are killed, including those of other callers, so the time is generous. It is also
needed because the guest's clock starts only when a child is ready, which takes time on a busy host.
"""

CANCEL_GRACE_S = 30.0
"""Maximum seconds until the guest ends a cancelled run. If a guest takes longer, it is killed, and
all its other runs are lost.
"""


class GuestFailed(Exception):
    """The guest could not be started, or has ended."""


class GuestProcess(asyncio.Protocol):
    """A running guest process, created by `start`. Once `dead` is set, the guest has ended, and
    every run in it ends with `LOST`.
    """

    def __init__(self, process: anyio.abc.Process, handover: socket.socket) -> None:
        self._process = process
        self._handover = handover
        self._decoder = framing.Decoder(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[RunEnding]] = {}
        self._listeners: dict[int, RunSinks] = {}
        self._next_id = 0
        self._ready = asyncio.Event()
        self.dead = asyncio.Event()
        self.enforced: frozenset[Limit] = frozenset()
        self.faults: tuple[str, ...] = ()

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        make: Callable[[anyio.abc.Process, socket.socket], Self] | None = None,
    ) -> Self:
        """Start a guest with `command`, wait until the guest has tested itself, and return its
        `GuestProcess`.

        `make` creates the returned object. Its arguments are the guest's process and a socket,
        through which the guest passes the pipes of child processes to the host. If `make` is None,
        the class itself creates the object.

        Raises:
            GuestFailed: the guest could not be started, has ended, or was not ready within
                `START_DEADLINE_S` seconds.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            try:
                channel, their_channel = socket.socketpair()
                ours.enter_context(channel)
                theirs.enter_context(their_channel)
                handover, their_handover = socket.socketpair(type=socket.SOCK_SEQPACKET)
                ours.enter_context(handover)
                theirs.enter_context(their_handover)
                process = await anyio.open_process(
                    [*command, str(their_handover.fileno())],
                    cwd="/",
                    stdin=their_channel.fileno(),
                    stdout=their_channel.fileno(),
                    stderr=None,
                    env={},
                    start_new_session=True,
                    pass_fds=[their_handover.fileno()],
                )
            except OSError as error:
                raise GuestFailed(f"the guest could not be started: {error.strerror}") from None
            ours.pop_all()
        handover.setblocking(False)
        guest = (make or cls)(process, handover)
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: guest, sock=channel)
            loop.add_reader(handover, guest._on_handover)
            with anyio.fail_after(START_DEADLINE_S):
                await guest._ready.wait()
        except TimeoutError:
            await guest.stop()
            raise GuestFailed("the guest was not ready in time") from None
        except BaseException:
            await guest.stop()
            channel.close()
            raise
        if guest.dead.is_set():
            await guest.stop()
            raise GuestFailed("the guest ended while it started")
        return guest

    @property
    def pid(self) -> int:
        """The process id of the guest's supervisor."""
        return self._process.pid

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run a program in a child process in which nothing has run before, and return the ending.

        If the caller is cancelled, the program is ended before the cancellation is raised.

        Raises:
            RequestTooLarge: the arguments are too large for a request.
        """
        if self.dead.is_set() or self._transport is None:
            return LOST
        run_id = self._new_id()
        frame = framing.encode(run_frame(run_id, program, arguments, limits))
        if len(frame) > framing.MAX_REQUEST_BYTES:
            raise RequestTooLarge("The arguments are over 1 MB as JSON. Send less.")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[RunEnding] = loop.create_future()
        self._pending[run_id] = answer
        self._listeners[run_id] = sinks
        self._transport.write(frame)
        overdue = loop.call_later(limits.wall_s + ANSWER_GRACE_S, self._give_up, run_id)
        try:
            return await answer
        except asyncio.CancelledError:
            # The ending may have arrived at the same moment; then there is nothing to cancel.
            if not answer.done() or answer.cancelled():
                with anyio.CancelScope(shield=True):
                    await self._cancel(run_id)
            raise
        finally:
            overdue.cancel()
            self._pending.pop(run_id, None)
            self._listeners.pop(run_id, None)

    async def stop(self) -> None:
        """Kill the guest's supervisor and everything below it, and wait until the supervisor has
        ended.
        """
        self.kill()
        with anyio.CancelScope(shield=True):
            await self._process.wait()

    def kill(self) -> None:
        """Kill the guest's supervisor and all its descendants."""
        self._end()
        # Kill each descendant, because the operating system may not signal them when their parent
        # dies. List them first, because children of a dead supervisor get another parent.
        family = _with_descendants(self._process.pid)
        if self._process.returncode is None:
            # Use the pid: `kill` of the process object would first collect the exit status, for
            # which asyncio waits, and asyncio would log a warning.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        for process in family:
            try:
                process.kill()
            except (psutil.Error, OSError):
                continue

    # -- asyncio.Protocol -----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, chunk: bytes) -> None:
        if self.dead.is_set():
            return
        try:
            for message in self._decoder.feed(chunk):
                self._on_message(parse_guest_frame(message))
        except framing.FrameError:
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        self.kill()

    # -- inside -------------------------------------------------------------------

    def _on_message(self, message: GuestFrame) -> None:
        if isinstance(message, GuestReady):
            self.enforced = message.enforced
            self.faults = message.faults
            if self._ready.is_set():
                self.kill()  # a second report: it lost a limit after its start
            self._ready.set()
            return
        if isinstance(message, GuestProgress | GuestPart):
            self._on_event(message)
        else:
            self._on_ended(message)

    def _on_ended(self, message: GuestEnding) -> None:
        answer = self._pending.pop(message.id, None)
        if answer is not None and not answer.done():
            answer.set_result(ending_of_frame(message))

    def _on_event(self, message: GuestProgress | GuestPart) -> None:
        sinks = self._listeners.get(message.id, NO_SINKS)
        try:
            if isinstance(message, GuestProgress):
                if sinks.progress is not None:
                    sinks.progress(message.percent, message.message)
            elif sinks.output is not None:
                sinks.output("stdout", message.text)
        except Exception:  # a failing listener is not called again; the run continues
            self._listeners.pop(message.id, None)

    def _on_handover(self) -> None:
        """Kill the guest. It has sent the pipes of a child process, but the host had requested
        none.
        """
        self.kill()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _send(self, message: dict[str, Any]) -> None:
        if self._transport is not None:
            self._transport.write(framing.encode(message))

    async def _cancel(self, run_id: int) -> None:
        """Cancel a run, and wait for its end. If the guest does not end the run in time, kill the
        guest.
        """
        if self.dead.is_set():
            return
        ended: asyncio.Future[RunEnding] = asyncio.get_running_loop().create_future()
        self._pending[run_id] = ended
        self._send({"op": "cancel", "id": run_id})
        with anyio.move_on_after(CANCEL_GRACE_S):
            await ended
            return
        self.kill()

    def _give_up(self, run_id: int) -> None:
        """Kill the guest, because it did not end a run by the run's deadline. This run ends as
        timed out, and all other runs of the guest are lost.
        """
        answer = self._pending.pop(run_id, None)
        if answer is not None and not answer.done():
            answer.set_result(RunEnding(EndedBy.WALL_TIME, "call"))
        self.kill()

    def _end(self) -> None:
        if self.dead.is_set():
            return
        self.dead.set()
        self._ready.set()
        if self._transport is not None:
            self._transport.abort()
        asyncio.get_running_loop().remove_reader(self._handover)
        self._handover.close()
        self._lose_all()

    def _lose_all(self) -> None:
        """End all runs with the ending `LOST`."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_result(LOST)
        self._pending.clear()


def guest_command(config: JsonObject, python: str = sys.executable) -> list[str]:
    """Return the command that starts a guest with this configuration. `python` is the path of
    Python, which runs in isolated mode and without site packages.
    """
    return [python, "-I", "-S", "-B", "-X", "utf8", str(GUEST_PROGRAM), json.dumps(config)]


def _with_descendants(pid: int) -> list[psutil.Process]:
    try:
        supervisor = psutil.Process(pid)
        return [supervisor, *supervisor.children(recursive=True)]
    except (psutil.Error, OSError):
        # This may also be a lack of descriptors. Parent-death signals still end the children.
        return []
