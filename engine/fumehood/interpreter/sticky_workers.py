"""Sticky workers: children of the supervisor that each evaluate one trust domain's expressions.

Host side, between the wall and a guest's channel. The guest creates, seals, limits and kills a
child. The host has the child's two pipes, enforces deadlines and decides how a run ended (ADR
0006). Data from a pipe is untrusted: it is limited in size, parsed strictly, and at most a claim.
Invariants: a worker has one run at a time. It is never used again after a failed run, after too
many runs, after being idle for too long, or if it used CPU time between runs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.protocol import framing
from fumehood.protocol.messages import GuestEnding
from fumehood.sandbox.wall import CHUNK_BYTES, RunEnding, ending_of_reply

MAX_REQUEST_BYTES = 32 * 1024
"""Size limit of a request in bytes: half of a pipe's capacity. Larger requests are sent to the
supervisor, and run in a fresh child.
"""

REPLY_OVERHEAD_BYTES = 4096
"""Bytes that a reply may have beyond the output limit, for JSON keys and escapes."""

LOOK_EVERY_S = 1.0
"""Maximum seconds between checks for workers that were idle for too long."""

IDLE_CPU_NS = 50_000_000
"""A worker that uses more CPU time than this between calls, in nanoseconds, is replaced. A correct
worker waits in a system call and uses almost none.
"""

MAX_CPU_NS = 1_000_000_000
"""Total CPU time in nanoseconds after which a worker is replaced. The Linux kernel's limit for the
process is set once, to one run's limit plus this value. This value must therefore be small."""

MAX_ATTEMPTS = 3
"""Attempts to find a living child for a call, so that a child that has died does not fail the call.
"""

SPIN_S = 0.0004
"""Seconds for which a call polls for its answer before the event loop may sleep. Most expressions
take less time. Putting a processor to sleep and waking it takes as long as evaluating an
expression.
"""

LOOK_S = 0.00005
"""Seconds for which a pipe is polled before the event loop gets a turn. A turn of the event loop
takes a tenth of the time that evaluating an expression takes.
"""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A child process of the guest that the guest has handed over to the host, with the file
    descriptors of the two pipes for requests and replies.
    """

    id: int
    pid: int
    request_fd: int
    reply_fd: int


@dataclass(frozen=True, slots=True)
class StickyWorkerSettings:
    """How many sticky workers are kept, and for how long."""

    most: int = 8
    """Maximum number of workers of one guest."""
    uses: int = 1000
    """Number of runs after which a worker is replaced."""
    idle_s: float = 60.0
    """Seconds without a run after which a worker is ended."""


DEFAULT_RULES = StickyWorkerSettings()


class StickyWorkers:
    """The workers of one guest. When there are too many, the least recently used idle workers are
    ended.

    `check_out` takes two limits, memory in bytes and CPU time in seconds. It returns a child
    process with these limits, or None if the child or the guest is lost. `end_checkout` takes the
    id of a checkout, and kills its child. The guest reports the child's end when the Linux kernel
    has confirmed it.
    """

    def __init__(
        self,
        check_out: Callable[[int, float], Awaitable[Checkout | None]],
        end_checkout: Callable[[int], None],
        rules: StickyWorkerSettings,
    ) -> None:
        self._check_out = check_out
        self._end_checkout = end_checkout
        self._rules = rules
        self._by_key: OrderedDict[str, StickyWorker] = OrderedDict()
        self._by_checkout: dict[int, StickyWorker] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._can_spin = len(os.sched_getaffinity(0)) > 1

    async def run(self, key: str, request: bytes, limits: Limits) -> RunEnding:
        """Run a request in the worker of the trust domain `key`, and return how the run ended. If
        the domain has no usable worker, create one.

        `request` is one frame of at most `MAX_REQUEST_BYTES`. The caller must ensure that nothing
        else runs for this key at the same time. If the caller is cancelled, the program is ended
        before the cancellation is raised.
        """
        for _ in range(MAX_ATTEMPTS):
            worker = await self._worker_for(key, limits)
            if worker is None:
                continue
            busy = any(other.is_busy for other in self._by_key.values())
            try:
                ending = await worker.run(
                    request, limits, spin_s=SPIN_S if self._can_spin and not busy else 0.0
                )
            finally:
                if not worker.is_fit or worker.uses >= self._rules.uses:
                    self._retire(worker)
            if ending is not None:
                return ending
        return RunEnding(EndedBy.SANDBOX_LOST, "resident")

    def on_ended(self, ending: GuestEnding) -> bool:
        """Handle the guest's report of a child's death. Return whether the child was a sticky
        worker.
        """
        worker = self._by_checkout.pop(ending.id, None)
        if worker is None:
            return False
        self._forget(worker)
        worker.bury(ending)
        return True

    def lose_all(self) -> None:
        """Forget all workers and end their runs, because the guest and all its children are
        lost.
        """
        if self._sweep is not None:
            self._sweep.cancel()
        for worker in self._by_checkout.values():
            worker.bury(None)
        self._by_checkout.clear()
        self._by_key.clear()

    async def _worker_for(self, key: str, limits: Limits) -> StickyWorker | None:
        assert limits.memory_mb is not None
        worker = self._by_key.get(key)
        if worker is not None:
            if self._is_fit(worker, limits):
                self._by_key.move_to_end(key)
                return worker
            self._retire(worker)
        self._make_room()
        checkout = await self._check_out(limits.memory_mb << 20, limits.cpu_s + MAX_CPU_NS / 1e9)
        return None if checkout is None else self._take(key, checkout, limits)

    def _take(self, key: str, checkout: Checkout, limits: Limits) -> StickyWorker:
        worker = StickyWorker(checkout, key, limits, self._end_checkout)
        self._by_key[key] = self._by_checkout[checkout.id] = worker
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._look_s, self._look)
        return worker

    def _is_fit(self, worker: StickyWorker, limits: Limits) -> bool:
        return (
            worker.is_fit
            and worker.memory_mb == limits.memory_mb
            and worker.cpu_s >= limits.cpu_s
            and worker.was_idle()
        )

    def _make_room(self) -> None:
        """Retire the least recently used idle workers until there is room for another worker, or
        until all workers are busy.
        """
        while len(self._by_key) >= self._rules.most:
            idle = next((r for r in self._by_key.values() if not r.is_busy), None)
            if idle is None:
                return
            self._retire(idle)

    def _retire(self, worker: StickyWorker) -> None:
        self._forget(worker)
        worker.stop(EndedBy.CANCELLED)

    def _forget(self, worker: StickyWorker) -> None:
        if self._by_key.get(worker.key) is worker:
            del self._by_key[worker.key]

    @property
    def _look_s(self) -> float:
        return min(LOOK_EVERY_S, self._rules.idle_s)

    def _look(self) -> None:
        """Retire workers that were idle for too long or used CPU time between calls. If any workers
        are left, schedule the next check.
        """
        oldest = time.monotonic() - self._rules.idle_s
        for worker in list(self._by_key.values()):
            if not worker.is_busy and (worker.idle_since < oldest or not worker.was_idle()):
                self._retire(worker)
        self._sweep = None
        if self._by_key:
            self._sweep = asyncio.get_running_loop().call_later(self._look_s, self._look)


class StickyWorker:
    """One child process that the guest has handed over. It performs at most one run at a time."""

    def __init__(
        self, checkout: Checkout, key: str, limits: Limits, end_checkout: Callable[[int], None]
    ) -> None:
        self.key = key
        self.memory_mb = limits.memory_mb
        self.cpu_s = limits.cpu_s
        self.uses = 0
        self.is_fit = True
        self.idle_since = time.monotonic()
        self._checkout = checkout
        self._end_checkout = end_checkout
        self._cpu_clock = (~checkout.pid << 3) | 2  # *Source*: clock_getcpuclockid(3)
        self._idle_cpu_ns = self._first_cpu_ns = self._cpu_ns()
        self._limits = limits
        self._decoder = framing.Decoder(0)
        self._answer: asyncio.Future[RunEnding] | None = None
        self._stopped_for: EndedBy | None = None
        self._cpu_watch: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(checkout.reply_fd, self._on_readable)

    @property
    def is_busy(self) -> bool:
        """Whether a run is in progress."""
        return self._answer is not None

    def was_idle(self) -> bool:
        """Return whether the worker has used almost no CPU time since its last run."""
        return self._cpu_ns() - self._idle_cpu_ns <= IDLE_CPU_NS

    async def run(self, request: bytes, limits: Limits, *, spin_s: float) -> RunEnding | None:
        """Send a request to the child, and return how the run ended. Return None if the child died
        before it could read any of the request.

        Poll for the reply for `spin_s` seconds, then wait. If the run ends without a reply of the
        child, the child is dead when this method returns.
        """
        loop = self._loop
        answer: asyncio.Future[RunEnding] = loop.create_future()
        self._answer = answer
        self._limits = limits
        self._decoder.max_bytes = limits.output_bytes + REPLY_OVERHEAD_BYTES
        self._idle_cpu_ns = self._cpu_ns()
        self.uses += 1
        overdue = loop.call_later(limits.wall_s, self.stop, EndedBy.WALL_TIME)
        if limits.cpu_s < limits.wall_s:
            self._watch_cpu()
        try:
            if not self._send(request):
                return None
            if spin_s:
                await self._look_for(answer, spin_s)
            return await answer
        except asyncio.CancelledError:
            # The answer may have arrived at the same moment; then there is nothing to end.
            if not answer.done() or answer.cancelled():
                await self._end_shielded()
            raise
        finally:
            overdue.cancel()
            if self._cpu_watch is not None:
                self._cpu_watch.cancel()
            self._answer = None
            self.idle_since = time.monotonic()
            self._idle_cpu_ns = self._cpu_ns()

    def stop(self, reason: EndedBy) -> None:
        """Kill the child. `reason` becomes the run's ending, whatever the guest reports."""
        self.is_fit = False
        if self._stopped_for is None:
            self._stopped_for = reason
            self._end_checkout(self._checkout.id)

    def bury(self, ending: GuestEnding | None) -> None:
        """Handle the death of the child and end its run. `ending` is the guest's report, or None if
        the guest is lost.
        """
        self.is_fit = False
        if ending is not None:
            self._on_readable()
        self._loop.remove_reader(self._checkout.reply_fd)
        for descriptor in (self._checkout.request_fd, self._checkout.reply_fd):
            os.close(descriptor)
        if self._answer is None or self._answer.done():
            return
        if ending is None:
            lost = self._stopped_for or EndedBy.SANDBOX_LOST
            self._answer.set_result(RunEnding(lost, "resident"))
            return
        before_ms = self._idle_cpu_ns / 1e6
        self._answer.set_result(
            RunEnding(
                self._stopped_for or ending.ended_by,
                "resident",
                cpu_ms=None if ending.cpu_ms is None else max(0.0, ending.cpu_ms - before_ms),
                output_bytes=0,
                exit_code=ending.exit_code,
                signal=ending.signal,
            )
        )

    def _send(self, request: bytes) -> bool:
        try:
            written = os.write(self._checkout.request_fd, request)
        except BrokenPipeError:
            self.is_fit = False
            return False
        except BlockingIOError:
            written = 0
        if written < len(request):  # the child has not read the last request: it is compromised
            self.stop(EndedBy.SANDBOX_LOST)
        return True

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._checkout.reply_fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:  # the guest's report of its exit status gives the reason
            self._loop.remove_reader(self._checkout.reply_fd)
            return
        try:
            replies = self._decoder.feed(chunk)
        except framing.FrameTooLarge:
            self.stop(EndedBy.OUTPUT)
            return
        except framing.FrameError:
            self.stop(EndedBy.SANDBOX_LOST)
            return
        for reply in replies:
            self._on_reply(reply)

    def _on_reply(self, reply: JsonObject) -> None:
        answer = self._answer
        if answer is None or answer.done():
            self.stop(EndedBy.SANDBOX_LOST)  # an unrequested reply: the child is compromised
            return
        if self._stopped_for is not None:
            return
        now_ns = self._cpu_ns()
        ending = ending_of_reply(
            reply,
            isolation="resident",
            cpu_ms=(now_ns - self._idle_cpu_ns) / 1e6,
            output_bytes=self._decoder.last_size,
        )
        # Decide this before another call can use the worker.
        self.is_fit = ending.ended_by is EndedBy.OK and now_ns - self._first_cpu_ns < MAX_CPU_NS
        answer.set_result(ending)

    async def _end_shielded(self) -> None:
        ended: asyncio.Future[RunEnding] = self._loop.create_future()
        self._answer = ended
        self.stop(EndedBy.CANCELLED)
        with anyio.CancelScope(shield=True):
            await ended

    def _watch_cpu(self) -> None:
        """End the current run if it has reached its CPU limit. Otherwise, schedule the next check
        for the earliest time at which the run could reach the limit.
        """
        used_s = (self._cpu_ns() - self._idle_cpu_ns) / 1e9
        left_s = self._limits.cpu_s - used_s
        if left_s <= 0:
            self.stop(EndedBy.CPU_TIME)
        self._cpu_watch = self._loop.call_later(max(left_s, 0.001), self._watch_cpu)

    def _cpu_ns(self) -> int:
        try:  # called several times per call: `suppress` would be slower
            return time.clock_gettime_ns(self._cpu_clock)
        except OSError:
            return 0

    async def _look_for(self, answer: asyncio.Future[RunEnding], seconds: float) -> None:
        """Poll for the answer for at most `seconds`, without letting the event loop sleep.

        Between short periods of polling, the event loop runs other tasks that are ready, so that
        other calls can continue.
        """
        now = time.monotonic()
        give_up = now + seconds
        while not answer.done() and now < give_up:
            await asyncio.sleep(0)
            now = time.monotonic()
            turn_over = now + LOOK_S
            while not answer.done() and now < turn_over:
                self._on_readable()
                now = time.monotonic()
