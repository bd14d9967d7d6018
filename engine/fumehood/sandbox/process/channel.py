"""One guest process and the channel to it.

Host side. Above it the wall, below it the guest's supervisor, whose frames are hostile:
capped before they are kept, parsed strictly, and the first wrong one ends the guest. The
guest's clock reports, this side's clock decides: a run that is not answered in time takes
its guest with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import psutil

from fumehood.model.errors import EndedBy, RequestTooLarge
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import Limit, Limits
from fumehood.sandbox.wall import RunEnding
from fumehood.wire import framing
from fumehood.wire.messages import GuestEnding, GuestReady, parse_guest_frame, run_frame

GUEST_PROGRAM = Path(__file__).parents[2] / "guest"
START_DEADLINE_S = 10.0
ANSWER_GRACE_S = 5.0
"""How much later than the guest's own clock this side gives up on an answer. The guest's
clock starts when a child is there, and on a busy host forking one can take a while; giving
up ends every run of the guest."""

CANCEL_GRACE_S = 2.0
MAX_FRAME_BYTES = 4 << 20
MAX_REQUEST_BYTES = 1 << 20
"""The guest ends itself over a larger frame; see `HOST_FRAME_BYTES` there."""
MAX_CLAIM_CHARACTERS = 2000


class GuestFailed(Exception):
    """The guest did not start, or is gone."""


class GuestProcess(asyncio.Protocol):
    """A running guest. Made by `start`; after `dead` is set it answers nothing any more."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process
        self._decoder = framing.Decoder(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[RunEnding]] = {}
        self._next_id = 0
        self._ready = asyncio.Event()
        self.dead = asyncio.Event()
        self.enforced: frozenset[Limit] = frozenset()
        self.faults: tuple[str, ...] = ()

    @classmethod
    async def start(cls, command: Sequence[str]) -> GuestProcess:
        """Start a guest and wait until it has tried its own wall.

        Raises:
            GuestFailed: it could not be started, or was not ready within 10 s.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise GuestFailed(f"the guest could not be started: {error.strerror}") from None
        try:
            with theirs:
                process = await anyio.open_process(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=None,
                    env={},
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise GuestFailed(f"the guest could not be started: {error.strerror}") from None
        guest = cls(process)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: guest, sock=ours)
        try:
            with anyio.fail_after(START_DEADLINE_S):
                await guest._ready.wait()
        except TimeoutError:
            await guest.stop()
            raise GuestFailed("the guest was not ready in time") from None
        except BaseException:
            with anyio.CancelScope(shield=True):
                await guest.stop()
            raise
        if guest.dead.is_set():
            await guest.stop()
            raise GuestFailed("the guest ended while it started")
        return guest

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    async def run(
        self, key: str | None, program: str, arguments: JsonObject, limits: Limits
    ) -> RunEnding:
        """One run. Cancelling it ends the program inside before it raises."""
        if self.dead.is_set() or self._transport is None:
            return _lost()
        self._next_id += 1
        run_id = self._next_id
        frame = framing.encode(run_frame(run_id, key, program, arguments, limits))
        if len(frame) > MAX_REQUEST_BYTES:
            raise RequestTooLarge("The arguments are over 1 MB as JSON. Send less.")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[RunEnding] = loop.create_future()
        self._pending[run_id] = answer
        self._transport.write(frame)
        overdue = loop.call_later(limits.wall_s + ANSWER_GRACE_S, self._give_up, run_id)
        try:
            return await answer
        except asyncio.CancelledError:
            # The answer may have come in the same moment; then there is nothing to end.
            if not answer.done() or answer.cancelled():
                with anyio.CancelScope(shield=True):
                    await self._cancel(run_id)
            raise
        finally:
            overdue.cancel()
            self._pending.pop(run_id, None)

    async def stop(self) -> None:
        """End the guest and everything in it."""
        self.kill()
        with anyio.CancelScope(shield=True):
            await self._process.wait()

    def kill(self) -> None:
        """Kill supervisor and descendants; their own parent-death signals are the second way."""
        self._end()
        # Listed first: without its supervisor a child belongs to somebody else.
        family = _with_descendants(self._process.pid)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        for process in family:
            try:
                process.kill()
            except (psutil.Error, OSError):
                continue

    # -- asyncio.Protocol -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
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

    def _on_message(self, message: GuestReady | GuestEnding) -> None:
        if isinstance(message, GuestReady):
            self.enforced = message.enforced
            self.faults = message.faults
            if self._ready.is_set():
                self.kill()  # it has found out later that it cannot serve; the next one may
            self._ready.set()
            return
        answer = self._pending.pop(message.id, None)
        if answer is not None and not answer.done():
            answer.set_result(_as_ending(message))

    def _send(self, message: dict[str, Any]) -> None:
        if self._transport is not None:
            self._transport.write(framing.encode(message))

    async def _cancel(self, run_id: int) -> None:
        """Ask for the end of a run and wait for it; a guest that does not answer is killed."""
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
        """The guest kept a run past its deadline: that run timed out, the others are lost."""
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
        for answer in self._pending.values():
            if not answer.done():
                answer.set_result(_lost())
        self._pending.clear()


def guest_command(config: JsonObject, python: str = sys.executable) -> list[str]:
    """How to start the guest: isolated, without site packages, with nothing to write."""
    return [python, "-I", "-S", "-B", "-X", "utf8", str(GUEST_PROGRAM), json.dumps(config)]


def _as_ending(message: GuestEnding) -> RunEnding:
    claim = message.claim or {}
    error = claim.get("error")
    error = error if isinstance(error, dict) else {}
    result = claim.get("result")
    ended_by = message.ended_by
    if ended_by is EndedBy.OK and not isinstance(result, dict):
        ended_by = EndedBy.SANDBOX_LOST  # success without a result is not the guest's language
    return RunEnding(
        ended_by=ended_by,
        isolation=message.isolation,
        cpu_ms=message.cpu_ms,
        peak_memory_bytes=message.peak_memory_bytes,
        output_bytes=message.output_bytes,
        exit_code=message.exit_code,
        signal=message.signal,
        result=result if ended_by is EndedBy.OK else None,
        claimed_kind=_text(error.get("kind")),
        claimed_message=_text(error.get("message")),
    )


def _text(value: Any) -> str | None:
    return value[:MAX_CLAIM_CHARACTERS] if isinstance(value, str) else None


def _lost() -> RunEnding:
    return RunEnding(EndedBy.SANDBOX_LOST, "call")


def _with_descendants(pid: int) -> list[psutil.Process]:
    try:
        supervisor = psutil.Process(pid)
        return [supervisor, *supervisor.children(recursive=True)]
    except (psutil.Error, OSError):
        # Out of descriptors, too: the parent-death signals still end the children.
        return []
