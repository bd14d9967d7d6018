"""The interpreter's guest, which also hands over children to the host, as sticky workers.

Host side, between the wall and `sticky_workers`. The supervisor sends a child's two pipes on a
separate socket. If the supervisor sends anything else on that socket, the guest is killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from dataclasses import dataclass

import anyio.abc

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.interpreter.sticky_workers import (
    DEFAULT_RULES,
    MAX_REQUEST_BYTES,
    Checkout,
    StickyWorkers,
    StickyWorkerSettings,
)
from fumehood.protocol import framing
from fumehood.protocol.messages import GuestEnding, lend_frame, program_request
from fumehood.sandbox.process.channel import GuestProcess
from fumehood.sandbox.wall import LOST, NO_SINKS, RunEnding, RunSinks

LEND_DEADLINE_S = 30.0
"""Maximum seconds until the guest hands over a child. A slower guest is killed."""

KILL_GRACE_S = 30.0
"""Maximum seconds until the guest confirms that a child was killed. A slower guest is killed, and
all its runs are lost."""

CHECKOUT = struct.Struct("!qi")
"""Binary format of the message with which the guest hands over a child: the checkout's id and the
child's process id."""


@dataclass(eq=False, slots=True)
class _PendingCheckout:
    """A request to the guest to hand over one of its child processes. `handed` receives the child,
    or None if the child or the guest was lost. `died` is True if the child died before it was
    handed over.
    """

    handed: asyncio.Future[Checkout | None]
    died: bool = False


class StickyGuest(GuestProcess):
    """A running guest whose workers are sticky: each serves several runs of one trust domain, and
    does not end after one run.
    """

    def __init__(
        self,
        process: anyio.abc.Process,
        handover: socket.socket,
        rules: StickyWorkerSettings = DEFAULT_RULES,
    ) -> None:
        super().__init__(process, handover)
        self._pending_checkouts: dict[int, _PendingCheckout] = {}
        self._ending_checkouts: dict[int, asyncio.TimerHandle] = {}
        self._sticky = StickyWorkers(self.check_out, self.end_checkout, rules)

    async def run_for(
        self,
        key: str | None,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run a program in the sticky worker of the trust domain `key`. Without a key, or if the
        request is large, run the program in a fresh child.

        If the caller is cancelled, end the program before the cancellation is raised.

        Raises:
            RequestTooLarge: the arguments exceed the maximum size of a request.
        """
        if self.dead.is_set():
            return LOST
        if key is not None:
            request = framing.encode(program_request(program, arguments, limits))
            if len(request) <= MAX_REQUEST_BYTES:
                return await self._sticky.run(key, request, limits)
        return await self.run(program, arguments, limits, sinks)

    async def check_out(self, memory_bytes: int, cpu_s: float) -> Checkout | None:
        """Get a child process with these limits from the guest. The guest has sealed the child,
        which means that it has restricted the child's system calls. Return None if the child or the
        guest is lost.
        """
        if self.dead.is_set():
            return None
        checkout_id = self._new_id()
        loop = asyncio.get_running_loop()
        pending = self._pending_checkouts[checkout_id] = _PendingCheckout(loop.create_future())
        self._send(lend_frame(checkout_id, memory_bytes, cpu_s))
        overdue = loop.call_later(LEND_DEADLINE_S, self.kill)
        try:
            checkout = await pending.handed
        except asyncio.CancelledError:
            handed = pending.handed
            if handed.done() and not handed.cancelled() and (checkout := handed.result()):
                self._return_checkout(checkout, dead=pending.died)
            raise
        else:
            # If the child or the guest has died since, no report of the child's end would follow.
            if checkout is not None and (pending.died or self.dead.is_set()):
                self._return_checkout(checkout, dead=True)
                return None
            return checkout
        finally:
            overdue.cancel()
            self._pending_checkouts.pop(checkout_id, None)

    def end_checkout(self, checkout_id: int) -> None:
        """Order the guest to kill a checked-out child. If the guest does not confirm the child's
        death in time, kill the guest.
        """
        if self.dead.is_set():
            return
        self._send({"op": "cancel", "id": checkout_id})
        loop = asyncio.get_running_loop()
        self._ending_checkouts[checkout_id] = loop.call_later(KILL_GRACE_S, self.kill)

    # -- inside -------------------------------------------------------------------

    def _on_ended(self, message: GuestEnding) -> None:
        timer = self._ending_checkouts.pop(message.id, None)
        if timer is not None:
            timer.cancel()
        if self._sticky.on_ended(message):
            return
        pending = self._pending_checkouts.get(message.id)
        if pending is None:
            super()._on_ended(message)
            return
        pending.died = True  # the child died before it was handed over
        if not pending.handed.done():
            pending.handed.set_result(None)

    def _on_handover(self) -> None:
        """Receive a child's two pipes from the guest. If the guest sent anything else, kill the
        guest.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._handover, CHECKOUT.size, 2)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if (
            len(data) != CHECKOUT.size
            or len(descriptors) != 2
            or not all(map(_is_pipe, descriptors))
        ):
            for descriptor in descriptors:
                os.close(descriptor)
            self.kill()
            return
        checkout = Checkout(*CHECKOUT.unpack(data), *descriptors)
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
        pending = self._pending_checkouts.get(checkout.id)
        if pending is None or pending.handed.done():
            self._return_checkout(checkout, dead=False)  # its request was cancelled
        else:
            pending.handed.set_result(checkout)

    def _return_checkout(self, checkout: Checkout, *, dead: bool) -> None:
        os.close(checkout.request_fd)
        os.close(checkout.reply_fd)
        if not dead:
            self.end_checkout(checkout.id)

    def _lose_all(self) -> None:
        for timer in self._ending_checkouts.values():
            timer.cancel()
        self._ending_checkouts.clear()
        for pending in self._pending_checkouts.values():
            if not pending.handed.done():
                pending.handed.set_result(None)
        self._sticky.lose_all()
        super()._lose_all()


def _is_pipe(descriptor: int) -> bool:
    return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
