"""The interfaces of walls and leases, and the code that walls share.

Host side. `pipeline` and the executors use the interfaces; `process/`, `container/` and `cluster/`
implement them. Invariants: a wall reports a limit only if the wall was seen to enforce it on this
host; if a lease is left during a run, the run is ended; a program may report the kind of its
failure, but can never turn a failure into success.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, TypedDict, runtime_checkable

import anyio
import anyio.abc

from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.core.fair_share import FairShare, Lack
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade, Held, Limit, Limits, WallLimits, least_limits
from fumehood.core.session import FileKind, SessionHome, SessionRecord, SessionState
from fumehood.protocol.messages import GuestEnding
from fumehood.sandbox.streams import Stream, StreamEnd

OnProgress = Callable[[float, str], None]
"""Receives a program's progress: a percentage (0 to 100) and a message of at most 200
characters.
"""


class FileSink(Protocol):
    """Receives the files that a run has left in its workspace, one file after the other."""

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        """Start the next file.

        `path` is relative and consists of plain names. `size` is the number of bytes that the
        program claims for the file.
        """

    def write(self, data: bytes) -> None:
        """Receive the next bytes of the current file, at most 64 KB at a time."""


OnOutput = Callable[[str, str], None]
"""Receives the name of a stream (`stdout`, `stderr`) and its next text."""

OnEvent = Callable[[str, JsonObject], None]
"""Receives the name of a log event and the values of the event."""

OnEnding = Callable[["RunEnding"], None]
"""Receives the ending of a run."""


class Brake:
    """Lets the receiver of a run's events pause the reading of the program's output.

    To pause it, the receiver sets `is_on`. When the receiver can process more events, it calls
    `release`.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._resume: Callable[[], None] | None = None

    def hold(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """If the brake is on, call `pause`, which must stop the reading. The next `release` then
        calls `resume`, which must continue it.
        """
        if self.is_on and self._resume is None:
            pause()
            self._resume = resume

    def release(self) -> None:
        """Turn the brake off. If the reading was stopped, let it continue."""
        self.is_on = False
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()


BUSY_S, MAX_BREAK_S = 0.001, 0.1
"""If processing one chunk of output takes more than `BUSY_S` seconds, the next chunk is read after
a break of four times this length, but at most of `MAX_BREAK_S` seconds.
"""


async def rest_after(took_s: float) -> None:
    """Pause between two chunks of a program's output, so that other tasks can run. `took_s` is the
    time in seconds that the last chunk took to process. If it is at most `BUSY_S`, do not pause.
    """
    if took_s > BUSY_S:
        await anyio.sleep(min(4 * took_s, MAX_BREAK_S))


@dataclass(frozen=True, slots=True)
class RunSinks:
    """The receivers of a run's events. An event without a receiver is dropped.

    Receivers are called in the event loop, so they must not block. If a receiver raises an
    exception, it is not called again, and the run continues. But if the host's end of a stream
    refuses a frame, the container is ended.
    """

    progress: OnProgress | None = None
    files: FileSink | None = None
    output: OnOutput | None = None
    """Receives all output. The run's ending also includes the beginnings of standard output and
    error.
    """
    ending: OnEnding | None = None
    """If a run is cancelled, this receives the run's ending, if the wall knows it, before the
    cancellation is raised.
    """
    is_live: bool = False
    """Whether output is sent as soon as the program writes it. If False, it is sent in few long
    pieces.
    """
    streams: tuple[Stream[StreamEnd], ...] = ()
    """The streams between the program and features of the engine. Each has a different kind."""
    brake: Brake | None = None
    """Pauses the reading of output and files while too much data is waiting to be processed."""
    trial: tuple[str, str] | None = None
    """An action on the variables of a session's trial, and the trial's token. The action is one of
    these: `hold` (this run is the trial, and its variables are held back when it ends), `adopt`
    (the session gets the held variables after this run), `drop` (the held variables are discarded).
    """


NO_SINKS = RunSinks()
"""No receivers: all events are dropped."""


@dataclass(frozen=True, slots=True)
class RunEnding:
    """How a run ended, and what it used and produced.

    `result` and the fields `claimed_…` come from the program and are limited in size. All other
    values were decided or measured outside the program.
    """

    ended_by: EndedBy
    isolation: str
    cpu_ms: float | None = None
    peak_memory_bytes: int | None = None
    output_bytes: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    result: JsonObject | None = None
    claimed_kind: str | None = None
    claimed_message: str | None = None
    claimed_error: JsonObject | None = None
    """The program's complete description of its failure. It is untrusted and must be validated
    before use.
    """
    stdout: str = ""
    stderr: str = ""
    """`stdout` and `stderr` are the beginnings of the program's standard output and error, if the
    wall captures them.
    """
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    limits_hit: tuple[str, ...] = ()
    """The `value` of each `Limit` that refused an operation, while the program continued."""
    files_left_out: int = 0
    """Number of workspace files that were not passed to `RunSinks.files`, because of their number
    or size.
    """
    state: SessionState | None = None
    """The state of the variables, if the lease keeps them for the next run."""
    copied_at: datetime | None = None
    """Time of the saved copy from which the session's files were restored, or will be restored."""
    not_saved: str | None = None
    """A clause that says why the files of a durable session were not saved after the run."""
    variables_bytes: int | None = None
    """Memory of the process that keeps the variables, in bytes."""
    runtime: str | None = None
    """The id of what ran the container, such as `docker`."""
    grade: Grade | None = None
    """How strongly the container held the program."""
    held: Mapping[Limit, Held] = field(default_factory=dict)
    """How the container held each limit."""
    node: str | None = None
    """The name of the node on which the program ran, if the engine has nodes."""
    is_node_lost: bool = False
    """Whether the whole node was lost, and not only the container."""


class Lease(Protocol):
    """The right to run one program behind a wall."""

    @property
    def queue_ms(self) -> float:
        """How long the call waited for the lease, in milliseconds."""

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run a program to its end, and return the ending. `program` names one of the programs in
        the guest. If the caller is cancelled, the program is ended before the cancellation is
        raised.

        `sinks.progress` receives the program's progress reports, which are unverified claims.
        """


@dataclass(frozen=True, slots=True)
class WallStatus:
    """The limits that a wall enforces at one moment, as far as known, and the reasons why the wall
    may not be ready.
    """

    required: frozenset[Limit]
    """The limits that this wall must enforce; otherwise, it runs no call."""
    enforced: frozenset[Limit]
    """The limits that are reported for calls. These are the required limits, except those that were
    seen to fail on this host.
    """
    seen: frozenset[Limit]
    """The limits that were seen to hold on this host."""
    is_ready: bool
    """Whether the wall would serve a call now."""
    is_in_use: bool = True
    runtime: str | None = None
    """The id of what runs the containers, such as `docker`. None if the wall has no containers, or
    several nodes.
    """
    grade: Grade | None = None
    """How strongly containers hold their programs. None if the wall has no containers, or has
    started none.
    """
    held: Mapping[Limit, Held] = field(default_factory=dict)
    """How the last container holds each limit."""
    faults: tuple[str, ...] = ()
    """Why the wall is not ready, in words for the operator."""
    remedy: str = ""
    """How the faults can be remedied, in words for callers."""
    heals: bool = True
    """Whether the wall may become ready without the operator's help."""
    details: JsonObject | None = None
    """The details of the error that callers get because of the faults."""
    missing_images: tuple[str, ...] = ()
    """One sentence for each missing image."""
    guest_pid: int | None = None

    def lacking(self, wall: str) -> frozenset[Limit]:
        """Return the required limits that the wall does not enforce. They include the limits that
        the engine requires of every wall with the name `wall`.
        """
        return (self.required | least_limits(wall)) - self.enforced


class Wall(Protocol):
    """One kind of sandbox, such as the containers of an engine."""

    @property
    def limits(self) -> WallLimits:
        """The default and maximum limits of calls behind this wall."""

    @property
    def status(self) -> WallStatus:
        """The limits that the wall enforces now, and its current faults."""

    def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        image: str | None = None,
    ) -> AbstractAsyncContextManager[Lease]:
        """Wait a bounded time for a sandbox of this trust domain, and lease it.

        If `fresh` is True, nothing has run in the sandbox before. If the wall offers several memory
        sizes or images, `memory_mb` and `image` choose one.

        Raises:
            SandboxUnavailable: no sandbox was available in time.
        """


RETRY_AFTER_MS = 1000
"""Delay in milliseconds that is suggested to callers before they repeat a call."""


def try_later(words: str) -> SandboxUnavailable:
    """Return an error with the message `words` that advises the caller to repeat the call soon. Use
    it if a resource is missing that will probably be available soon.
    """
    return SandboxUnavailable(words, retry_after_ms=RETRY_AFTER_MS)


class WallDown(SandboxUnavailable):
    """The wall currently enforces no limits at all, so nothing runs behind it."""


def require_enforcing(wall: str, status: WallStatus) -> frozenset[Limit]:
    """Check that a wall enforces all required limits, and return the required limits. `wall` is the
    wall's name, and `status` its status. The engine requires some limits of every wall with this
    name, and the status can require more.

    Raises:
        WallDown: limits are required, but the wall enforces no limits at all.
        SandboxUnavailable: the wall does not enforce all required limits.
    """
    required = status.required | least_limits(wall)
    missing = required - status.enforced
    if missing and not status.enforced:
        are = "Containers are" if wall == "container" else f"The {wall} is"
        raise WallDown(
            f"{are} unavailable; nothing ran. {status.remedy}",
            retryable=status.heals,
            details=status.details,
            retry_after_ms=RETRY_AFTER_MS if status.heals else None,
        )
    if missing:
        raise SandboxUnavailable(
            f"The {wall} wall cannot enforce {', '.join(sorted(missing))} on this host, so nothing "
            f"runs in it. {status.remedy} Run `fumehood doctor` for details.",
            retryable=status.heals,
            retry_after_ms=RETRY_AFTER_MS if status.heals else None,
        )
    return required


def require_grade(grade: Grade | None, least: Grade | None) -> None:
    """Check that a container with this grade may run what needs a grade of at least `least`. If
    `least` is None, it may. A grade of None is not known, and may not.

    Raises:
        SandboxUnavailable: the grade is too low.
    """
    if least is None or (grade is not None and grade.is_at_least(least)):
        return
    cure = f"Use an engine whose containers have the grade {least}."
    raise SandboxUnavailable(
        f"The grade {least} is needed, and this engine's containers have the grade {grade}. "
        f"Nothing ran. {cure}",
        retryable=False,
        details={"grade": grade and grade.value, "least_grade": least.value, "cure": cure},
    )


class ImageMissing(SandboxUnavailable):
    """An image does not exist, is not built, or was built by another version of the engine."""

    @classmethod
    def of(cls, image: str, fault: str, remedy: str) -> ImageMissing:
        """Return the error for an image. `fault` completes the sentence "The image NAME …", and
        `remedy` is a sentence that says what to do.
        """
        return cls(f"The image {image} {fault}. {remedy}", retryable=False)


REMOVE_S = 10.0
"""Maximum seconds to remove the container of a program that is stopped."""


@dataclass(frozen=True, slots=True)
class AttachedProgram:
    """A running program that the operator has configured, in a separate container without a guest.

    `reader` reads the program's standard output, and `writer` writes to its standard input. `said`
    returns the end of what the program has written to standard error so far.

    If the container has a network, both are connected to the container's front instead. A front is
    a process that starts the program and passes its data on.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    said: Callable[[], bytes]
    remove: Callable[[], Awaitable[None]]

    async def stop(self) -> None:
        """End the program by removing its container. If the runtime does not respond in time, the
        container is removed later, when the wall looks for leftover containers.
        """
        with anyio.CancelScope(shield=True):
            self.writer.close()
            with suppress(OSError), anyio.move_on_after(REMOVE_S):
                await self.remove()


@runtime_checkable
class OpensPrograms(Protocol):
    """A wall that can run programs that the operator configured. Each program gets a separate
    container.
    """

    async def open_program(
        self, command: tuple[str, ...], env: Mapping[str, str], *, image: str, memory_mb: int,
        has_network: bool = False,
    ) -> AttachedProgram:  # fmt: skip
        """Start a program in a separate container, and return it. `command` is the program with its
        arguments, and `env` contains its environment variables.

        Raises:
            ImageMissing: the image does not exist.
            SandboxUnavailable: the container runtime cannot be used, or failed.
        """


class HasImages(ABC):
    """A wall whose sandboxes need images. An image may be missing or change."""

    # A base class and not a protocol, because each call does several `isinstance` checks for it,
    # and those are slow for protocols.

    @abstractmethod
    def image_for(self, language: str) -> str:
        """Return the name of the image for programs in this language.

        Raises:
            ImageMissing: the image does not exist.
            SandboxUnavailable: no image is configured, or the image does not support the language.
        """

    @abstractmethod
    async def look_again(self) -> None:
        """Query the container runtime for the images again, and wait a bounded time for the result.

        Concurrent callers may share one query. A caller never gets the result of a query that began
        before its call.

        Raises:
            SandboxUnavailable: the engine is stopping.
        """

    @abstractmethod
    async def with_additions(self, image: str, wanted: Sequence[str], principal_id: str) -> str:
        """Return the name of the image that consists of `image` and the additions in `wanted`, for
        example packages. `principal_id` is the principal that requests the additions.

        Raises:
            InvalidParams: an entry of `wanted` is not available, or not allowed for this principal.
            SandboxUnavailable: the additions cannot be determined now.
        """

    @abstractmethod
    async def facts_of(self, image: str) -> JsonObject:
        """Return the facts of an image: its name, its digest, the container runtime, and what was
        added to it.

        Raises:
            SandboxUnavailable: the image does not exist, or the runtime cannot be queried.
        """


def pins_of(lock: str) -> tuple[str, ...]:
    """Return the packages that a lock names, each in the form NAME==VERSION. `lock` is the text of
    the lock.
    """
    return tuple(line.split()[0] for line in lock.splitlines() if "==" in line)


class Walls:
    """The walls of an engine, by name."""

    def __init__(self, **walls: Wall) -> None:
        self._walls = walls

    def get(self, name: str) -> Wall:
        """Return the wall with this name. Raises SandboxUnavailable if this engine does not have
        it.
        """
        if name not in self._walls:
            raise SandboxUnavailable(
                f"This engine has no {name} wall, and uses no weaker one instead.", retryable=False
            )
        return self._walls[name]


class SessionContainer(Protocol):
    """The container of one session, from the creation of the session to its end.

    The container serves one trust domain and one run at a time, and ends with its session.
    """

    @property
    def name(self) -> str:
        """The name by which a later engine can find the container."""

    @property
    def node(self) -> str:
        """The id of the node on which the container runs. Empty if the engine has no nodes."""

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that the container's image supports."""

    @property
    def lock(self) -> str:
        """The lock, which lists the packages added to the image with exact versions. Empty if
        nothing was added.
        """

    async def facts(self) -> JsonObject:
        """Return the facts of the image that the next run uses. They have the form of
        `HasImages.facts_of`.

        Raises:
            SandboxUnavailable: the facts cannot be determined now.
        """

    @property
    def grade(self) -> Grade | None:
        """How strongly the container holds its programs. None if it does not run."""

    @property
    def lost(self) -> str | None:
        """A clause that says why the container is permanently lost. None if the container exists or
        is only stopped.
        """

    @property
    def is_paused(self) -> bool:
        """Whether the container's processes are frozen."""

    @property
    def is_stopped(self) -> bool:
        """Whether the container has ended, but its disk is kept, so that the container can be
        started again.
        """

    @property
    def is_away(self) -> bool:
        """Whether the container cannot be reached because its node is gone. The node may come
        back.
        """

    async def stop(self, unless: Callable[[], bool] = lambda: False) -> None:
        """End the container after the current run, but keep its disk. The next `until_free` starts
        a new container with this disk.

        If `unless` returns True just before the end, the container is not stopped.
        """

    def copy_disk(self, copy: str) -> AbstractAsyncContextManager[int]:
        """Copy the container's disk to a new disk named `copy`. Must not be called during a run.
        The block gets the size of the copy in bytes.

        After the block, the copy is kept only if the function passed to `SessionWall.spare_copies`
        returns its name.

        Raises:
            SandboxUnavailable: there is no room, or the disk could not be copied.
        """

    async def restore(self, copy: str) -> None:
        """Stop the container, and replace its disk by a copy of the disk with the name `copy`. Must
        not be called during a run.

        Raises:
            SandboxUnavailable: there is no room, or the disk could not be replaced and is
                unchanged.
        """

    @property
    def running(self) -> int:
        """The number of registered processes that run in the container, as last reported by the
        guest. Registered processes run in the background, independently of calls.
        """

    async def processes(self, request: JsonObject) -> JsonObject:
        """Send a request about the registered processes to the guest, and return the guest's
        answer. Registered processes run in the background, independently of calls.

        `request["do"]` is `list`, `start`, `read`, `write` or `stop`. The caller must have checked
        that the request has all fields that the guest needs. A request is possible during a run. It
        neither starts nor thaws the container.

        Raises:
            InvalidParams: the request is too long, or cannot be carried out.
            ResourceNotFound: there is no such process.
            SandboxUnavailable: the container is stopped, paused or lost, or does not answer in
                time.
        """

    async def connect(self, port: int) -> anyio.abc.ByteStream:
        """Connect to a port on the container's loopback interface, and return the connection. The
        connection ends when the container ends or is paused. Connecting neither starts nor thaws
        the container.

        Raises:
            InvalidParams: `port` is not a valid port number.
            NetworkError: nothing listens on the port.
            SandboxUnavailable: the container is stopped, paused or lost, or does not answer in
                time.
        """

    async def pause(self) -> None:
        """Wait for the cleanup after the last run, then freeze the container's processes. Must not
        be called during a run.

        Raises:
            SandboxUnavailable: the container could not be frozen.
        """

    async def until_free(self) -> None:
        """Make the container ready for the next run: thaw it if it is frozen, or start it again if
        it is stopped. Then wait a bounded time for the cleanup after the last run, or until the
        container has ended.

        Raises:
            SandboxUnavailable: the container cannot be thawed or started now.
        """

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """Run a program, and return the ending.

        The caller must have awaited `until_free` before. The next run gets the files and variables
        that this run leaves.
        """

    def end(self, why: str) -> None:
        """End the container and everything that runs in it. `why` is a clause. Does nothing if the
        container has already ended.
        """

    async def until_gone(self) -> None:
        """Wait until the container is removed. The container must already have ended."""


FIRST_EPOCH = 1
"""The epoch of the engine that creates a session. Each later engine that takes the session over has
a higher epoch.
"""


@dataclass(frozen=True, slots=True)
class HostSize:
    """The size of the host on which a wall's containers run: its memory in MB, and its number of
    processors.
    """

    memory_mb: int
    cpus: float


@runtime_checkable
class SessionWall(Wall, Protocol):
    """A wall that can also create containers for sessions."""

    @property
    def host(self) -> HostSize:
        """The processors and the memory of the host on which containers run. Each is 0 if it is not
        known.
        """

    async def until_host_is_known(self) -> None:
        """Determine the size of the host on which containers run, unless it is already known.
        Raises SandboxUnavailable if the engine is stopping.
        """

    @property
    def keeps_sessions(self) -> bool:
        """Whether the containers of sessions continue to run when the engine ends."""

    async def hold(
        self,
        domain: TrustDomain,
        *,
        image: str,
        memory_mb: int,
        cpus: float | None = None,
        disk_mb: int | None = None,
        additions: Sequence[str] = (),
        lock: str = "",
        on_lost: Callable[[], None],
    ) -> SessionContainer:
        """Wait a bounded time for a container in which nothing has run, and reserve it for a
        session in this trust domain.

        If `disk_mb` is given, the working directory is a separate disk of this size. `additions`
        names what is added to the image, such as packages. `lock` is the lock of an earlier
        container, which lists the exact versions of its additions. If `lock` is given, `additions`
        is ignored.

        `on_lost` is called once the container has ended for any reason. If the container has a
        disk, `on_lost` is also called each time the container is stopped.

        Raises:
            InvalidParams: an addition is not allowed or not available.
            SandboxUnavailable: no container was available in time, there is no such image, or no
                disk can be made.
        """

    def spare_copies(self, copies: Callable[[], Iterable[str]]) -> None:
        """From now on, keep the copies of disks whose names `copies` returns, and remove other
        copies. Must be called before the wall's context is entered.
        """

    def sweep_soon(self) -> None:
        """Start removing disks and copies that are no longer needed. The removal takes place in the
        background.
        """

    def fork(
        self, copy: str, session_id: str, home: SessionHome
    ) -> AbstractAsyncContextManager[str]:
        """Make a disk for a new session. `copy` is the name of a copy of another session's disk,
        and the new disk gets the same content. `session_id` is the id of the new session. `home` is
        the other session's `SessionHome`, which names its host. The new disk is made on this host.

        The block gets the name for the new session's container, which does not exist yet. If the
        block fails, the new disk is removed.

        Raises:
            SandboxUnavailable: there is no room, or the disk could not be made.
        """

    def expect(self, record: SessionRecord, home: SessionHome) -> None:
        """Protect the container of a session from removal until `resume` is called. `record` and
        `home` are what an earlier engine has stored about the session. Must be called before the
        wall's context is entered.
        """

    def resume(
        self, record: SessionRecord, home: SessionHome, on_lost: Callable[[], None]
    ) -> SessionContainer:
        """Return the container of a session that an earlier engine created. This engine connects to
        the container when the container is first used, or before.

        `record` and `home` are what the earlier engine has stored about the session, except
        `home.epoch`. That field is the number of this engine among the engines that the session has
        had, and must be higher than that of every earlier engine. `on_lost` is called once the
        container has ended.
        """


MAX_FRAME_BYTES = 4 << 20
"""Maximum size of a frame from a guest, in bytes. The largest frame is an ending whose result is as
long as the output limit allows and is written with JSON escapes.
"""

CHUNK_BYTES = 64 * 1024
"""Maximum number of bytes read at once from a program or a worker."""

MAX_WAITING = 2000
"""Maximum number of calls that wait for one wall. One principal may have half of them."""

QUEUE_PATIENCE_S = 30.0
"""Maximum seconds that a call waits for a slot."""


class Slots:
    """The limit on concurrent runs behind one wall, and the queue of calls that wait for a slot.

    There are `most` slots. One principal can use at most three quarters of the slots (rounded up),
    and half of the places in the queue. A call waits at most `QUEUE_PATIENCE_S` seconds. `what`
    completes the error message "Too many calls wait for …".
    """

    def __init__(self, most: int, what: str) -> None:
        self._running = FairShare(most, most - most // 4)
        self._waiting = FairShare(MAX_WAITING, MAX_WAITING // 2)
        self._queue: dict[anyio.Event, str] = {}
        """Waiting calls in order of arrival: the event that is set when a slot is granted → the
        principal's id.
        """
        self._what = what

    async def take(self, principal_id: str) -> None:
        """Take a slot for a principal. If no slot is free, or the principal already uses its share
        of the slots, wait at most `QUEUE_PATIENCE_S` seconds.

        Raises:
            SandboxUnavailable: too many calls are already waiting, or no slot became free in time.
        """
        if self._running.take(principal_id) is None:  # a waiting call could not use this slot
            return
        if self._waiting.take(principal_id) is not None:
            raise self._busy()
        turn = anyio.Event()
        self._queue[turn] = principal_id
        try:
            with anyio.move_on_after(QUEUE_PATIENCE_S):
                await turn.wait()
        except BaseException:
            if turn.is_set():  # a slot was granted at the same moment
                self.leave(principal_id)
            raise
        finally:
            self._queue.pop(turn, None)
            self._waiting.give_back(principal_id)
        if not turn.is_set():
            raise self._busy()

    def leave(self, principal_id: str) -> None:
        """Give back a principal's slot. Then grant the free slots to waiting calls in order of
        arrival, but pass over calls whose principal has used up its share.
        """
        self._running.give_back(principal_id)
        for turn, waiting in list(self._queue.items()):
            lack = self._running.take(waiting)
            if lack is Lack.TOTAL:
                break
            if lack is None:
                del self._queue[turn]
                turn.set()

    def _busy(self) -> SandboxUnavailable:
        return try_later(f"Too many calls wait for {self._what}. Repeat the call later.")


LOST = RunEnding(EndedBy.SANDBOX_LOST, "call")
"""The ending of a run in a sandbox that was lost."""

_CLAIMABLE = {
    "memory": EndedBy.MEMORY,
    "output": EndedBy.OUTPUT,
    "policy": EndedBy.POLICY,
}
"""The kinds of failure that a program may claim (ADR 0010), and the endings that result from
them.
"""


def ending_of_reply(
    reply: JsonObject, *, isolation: str, cpu_ms: float | None, output_bytes: int | None
) -> RunEnding:
    """Return the ending of a run from `reply`, which the process of the run itself has sent to the
    host. Use this function only if no guest's supervisor reports the ending.

    `cpu_ms` and `output_bytes` are what the host has measured, or None. `isolation` says how the
    run was isolated.
    """
    error = reply.get("error")
    result = reply.get("result")
    if error is None and isinstance(result, dict):
        return RunEnding(
            EndedBy.OK, isolation, cpu_ms=cpu_ms, output_bytes=output_bytes, result=result
        )
    claimed = claims_of(error)
    return RunEnding(
        _CLAIMABLE.get(claimed["claimed_kind"] or "", EndedBy.EXCEPTION),
        isolation,
        cpu_ms=cpu_ms,
        output_bytes=output_bytes,
        **claimed,
    )


def ending_of_frame(message: GuestEnding) -> RunEnding:
    """Convert the report of a guest's supervisor to the ending of a run."""
    claim = message.claim or {}
    result = claim.get("result")
    ended_by = message.ended_by
    if ended_by is EndedBy.OK and not isinstance(result, dict):
        ended_by = EndedBy.SANDBOX_LOST
    return RunEnding(
        ended_by=ended_by,
        isolation="call",
        cpu_ms=message.cpu_ms,
        peak_memory_bytes=message.peak_memory_bytes,
        output_bytes=message.output_bytes,
        exit_code=message.exit_code,
        signal=message.signal,
        result=result if ended_by is EndedBy.OK else None,
        **claims_of(claim.get("error")),
    )


class Claims(TypedDict):
    """The error that a program reported, as fields of a `RunEnding`."""

    claimed_kind: str | None
    claimed_message: str | None
    claimed_error: JsonObject | None


def claims_of(error: object) -> Claims:
    """Return the fields of a `RunEnding` that describe `error`, the error in a program's reply. A
    field is None if the reply has no value for it.
    """
    found: JsonObject = error if isinstance(error, dict) else {}
    kind, message = (
        value if isinstance(value := found.get(key), str) else None for key in ("kind", "message")
    )
    return Claims(claimed_kind=kind, claimed_message=message, claimed_error=found or None)
