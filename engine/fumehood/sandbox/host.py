"""Execution on the host: functions that the operator trusts run without a sandbox.

Host side. This module enforces two limits: wall time (by cancelling the call, or by killing its
worker process) and the size of the result. It reports only these limits. It also limits how many
calls run at once, so that one tool cannot occupy the engine.

Synchronous functions run in workers, so that they can be killed. A worker is a process that serves
one call at a time and is reused. If a worker exceeded its time, was cancelled, died or sent
anything but one reply, it is killed with all its descendants, and the next call gets a new worker.
A call waits at most 30 s for a slot on the host, and then at most 30 s for a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
import psutil

from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits, WallLimits, least_limits
from fumehood.protocol import framing
from fumehood.sandbox.wall import (
    CHUNK_BYTES,
    NO_SINKS,
    RunEnding,
    RunSinks,
    Slots,
    WallStatus,
    ending_of_reply,
    try_later,
)

HOST_LIMITS = WallLimits(
    default_wall_s=30,
    max_wall_s=600,
    default_memory_mb=None,
    max_memory_mb=None,
    min_memory_mb=0,
    output_bytes=MB,
)
ENFORCED = least_limits("host")
"""The limits that are enforced for functions on the host."""

MAX_RUNNING = 64
"""Maximum number of concurrent calls on the host."""

MAX_REQUESTS = 32
"""Maximum number of concurrent requests to one service."""

WORKER_PROGRAM = Path(__file__).parents[1] / "executors" / "worker_main.py"

START_DEADLINE_S = 20.0
"""Maximum seconds until a new worker is ready."""

REPLY_OVERHEAD_BYTES = 16 * 1024
"""Number of bytes by which a reply may exceed the output limit, because of JSON syntax or a
traceback.
"""

MAX_WORKERS = 8
"""Maximum number of workers that run calls at the same time."""

MAX_IDLE = 2
"""Maximum number of idle workers that are kept."""

MAX_KILL_ROUNDS = 100
"""Maximum number of searches for the descendants of a worker that is being killed."""


@dataclass(frozen=True, slots=True)
class HostLease:
    """The right to run one call on the host, either in the engine's process or in a worker."""

    queue_ms: float
    workers: Workers
    principal_id: str

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Call a synchronous function in a worker, and return the ending. `arguments` names the
        function and its arguments, as in `Workers.run`; `program` is ignored.
        """
        return await self.workers.run(arguments, limits, self.principal_id, sinks)


class Host:
    """Leases the right to run calls on the host. All functions together may run at most a fixed
    number of calls at once. Requests to registered services have separate limits (`for_upstream`).
    """

    limits = HOST_LIMITS
    status = WallStatus(ENFORCED, ENFORCED, ENFORCED, is_ready=True)

    def __init__(self, most: int = MAX_RUNNING, what: str = "the host") -> None:
        self._slots = Slots(most, what)
        self._workers = Workers()
        self._upstreams: dict[str, Host] = {}  # bounded by the number of registered services

    def for_upstream(self, upstream: str) -> Host:
        """Return the separate `Host` that limits the concurrent requests to the service `upstream`.
        Because each service is limited separately, a slow service does not delay the others.
        """
        if upstream not in self._upstreams:
            self._upstreams[upstream] = Host(MAX_REQUESTS, "this tool's service")
        return self._upstreams[upstream]

    async def stop(self) -> None:
        """Kill all workers, and everything that runs in them."""
        await self._workers.stop()

    @asynccontextmanager
    async def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        image: str | None = None,
    ) -> AsyncIterator[HostLease]:
        """Lease the right to run one call on the host. If the maximum number of calls already run,
        in total or for the principal, wait at most 30 s. The lease counts as a running call until
        the block ends. Only the principal of `domain` matters; the other arguments are ignored.

        Raises:
            SandboxUnavailable: too many calls are waiting, or the wait was too long.
        """
        asked = time.monotonic()
        await self._slots.take(domain.principal_id)
        try:
            yield HostLease((time.monotonic() - asked) * 1e3, self._workers, domain.principal_id)
        finally:
            self._slots.leave(domain.principal_id)


# -- workers for synchronous functions ------------------------------------------------------


class Workers:
    """The worker processes of one engine, which run synchronous functions. A worker is started when
    a call needs it.
    """

    def __init__(self) -> None:
        self._slots = Slots(MAX_WORKERS, "the workers of synchronous functions")
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    async def run(
        self,
        call: JsonObject,
        limits: Limits,
        principal_id: str,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Call a function in a worker, and return the ending. `call` names the function and its
        arguments: `{module, name, arguments}`. The calls of one principal use at most its fair
        share of the workers.

        If the caller is cancelled, the worker is killed before the cancellation is raised.

        Raises:
            SandboxUnavailable: no worker was free in time, or none could be started.
        """
        await self._slots.take(principal_id)
        try:
            worker = await self._worker()
            ending: RunEnding | None = None
            try:
                ending = await worker.run(call, limits, sinks)
            finally:
                await self._give_back(worker, is_fit=ending is not None and worker.is_fit)
            return ending
        finally:
            self._slots.leave(principal_id)

    async def stop(self) -> None:
        """Kill all workers, and everything that runs in them."""
        for worker in list(self._all):
            await self._discard(worker)

    async def _worker(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            await self._discard(worker)
        worker = await _Worker.start()
        self._all.add(worker)
        return worker

    async def _give_back(self, worker: _Worker, *, is_fit: bool) -> None:
        if is_fit and worker in self._all and len(self._idle) < MAX_IDLE:
            self._idle.append(worker)
        else:
            await self._discard(worker)

    async def _discard(self, worker: _Worker) -> None:
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        await worker.kill()


class _Worker:
    """A worker process and the channel to it. `is_fit` is True if the worker may be used for
    another call.
    """

    def __init__(
        self,
        process: anyio.abc.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.is_fit = True

    @classmethod
    async def start(cls) -> _Worker:
        """Start a worker process and return it. Raises SandboxUnavailable if it cannot be
        started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # Connected first, so that no process is left if the connection fails or is cancelled.
            reader, writer = await asyncio.open_connection(sock=ours)
            given = map(str, (theirs.fileno(), os.getpid()))
            try:
                process = await anyio.open_process(
                    [sys.executable, "-P", str(WORKER_PROGRAM), *given],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=None,
                    stderr=None,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException as error:
                writer.transport.abort()
                if isinstance(error, OSError):
                    raise _unavailable() from None
                raise
        worker = cls(process, reader, writer)
        try:
            with anyio.fail_after(START_DEADLINE_S):
                ready = await worker._ask({"path": _import_path()}, REPLY_OVERHEAD_BYTES)
        except TimeoutError:
            ready = None
        except BaseException:
            await worker.kill()
            raise
        if ready != {"ready": True}:
            await worker.kill()
            raise _unavailable()
        return worker

    @property
    def is_alive(self) -> bool:
        """Whether the process is running. This queries the operating system, because the event loop
        notices the end of a process only later.
        """
        if self._process.returncode is not None:
            return False
        try:
            peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, peek) is None
        except ChildProcessError:
            return False

    async def run(self, call: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS) -> RunEnding:
        """Run one call, and return its ending. Afterwards `is_fit` says whether the worker may be
        used for another call.
        """
        self.is_fit = False
        try:
            with anyio.fail_after(limits.wall_s):
                reply = await self._ask(call, limits.output_bytes + REPLY_OVERHEAD_BYTES, sinks)
        except TimeoutError:
            return RunEnding(EndedBy.WALL_TIME, "none")
        except framing.FrameTooLarge:
            return RunEnding(EndedBy.OUTPUT, "none")
        except framing.FrameError:
            return RunEnding(EndedBy.SANDBOX_LOST, "none")
        if reply is None:
            return await self._death()
        self.is_fit = True
        return ending_of_reply(reply, isolation="none", cpu_ms=None, output_bytes=None)

    async def kill(self) -> None:
        """Kill the process and its descendants, and wait until the process itself has ended."""
        self._writer.transport.abort()
        if self._process.returncode is None:
            _kill_tree(self._process.pid)
        with anyio.CancelScope(shield=True):
            await self._process.wait()

    async def _ask(
        self, message: JsonObject, max_bytes: int, sinks: RunSinks = NO_SINKS
    ) -> JsonObject | None:
        """Send one message to the worker, and return the reply. Return None if the worker died.
        Progress reports and partial results are passed to `sinks`.

        Raises:
            FrameTooLarge: the reply has more than `max_bytes` bytes.
            FrameError: the worker sent something other than one reply.
        """
        decoder = framing.Decoder(max_bytes)
        try:
            self._writer.write(framing.encode(message))
            await self._writer.drain()
            while chunk := await self._reader.read(CHUNK_BYTES):
                replies = _without_events(decoder.feed(chunk), sinks)
                if len(replies) > 1:
                    raise framing.FrameError("more than one reply")
                if replies:
                    return replies[0]
        except OSError:
            pass
        return None

    async def _death(self) -> RunEnding:
        # The children of a dead process can only be found by its process group.
        _kill_group(self._process.pid)
        with anyio.CancelScope(shield=True):
            code = await self._process.wait()
        if code < 0:
            return RunEnding(EndedBy.SIGNAL, "none", signal=-code)
        return RunEnding(EndedBy.EXIT, "none", exit_code=code)


def _without_events(frames: list[JsonObject], sinks: RunSinks) -> list[JsonObject]:
    """Return those of a worker's frames that are replies. Pass the other frames, which are progress
    reports and partial results, to `sinks`.
    """
    replies = []
    for frame in frames:
        if frame.keys() == {"percent", "message"}:
            if sinks.progress is not None:
                sinks.progress(frame["percent"], frame["message"])
        elif frame.keys() == {"part"}:
            if sinks.output is not None:
                sinks.output("stdout", frame["part"])
        else:
            replies.append(frame)
    return replies


def _import_path() -> list[str]:
    """Return this process's import path with every entry made absolute. An empty entry becomes the
    current directory.
    """
    return [str(Path(entry).absolute()) for entry in sys.path]


def _kill_tree(pid: int) -> None:
    """Kill the worker with this process id, and all its descendants."""
    try:
        worker = psutil.Process(pid)
        worker.suspend()  # so that it starts no more processes
        # When a process is killed, its children become children of the worker, because the worker
        # is their subreaper. The next round finds them there.
        for _ in range(MAX_KILL_ROUNDS):
            below = [each for each in worker.children(recursive=True) if _runs(each)]
            if not below:
                break
            for process in below:
                with contextlib.suppress(psutil.Error):
                    process.kill()
    except (psutil.Error, OSError):
        pass
    _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _unavailable() -> SandboxUnavailable:
    return try_later("The worker process for synchronous functions could not be started.")
