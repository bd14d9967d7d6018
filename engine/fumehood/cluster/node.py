"""A node: the containers of one machine, used by engines on other machines.

A node runs in a separate process, as a Ray actor (`ray_nodes`), and has one container wall for each
engine that joined it. Invariants: of an engine's commands, the node obeys only those with the
engine's highest ticket number; when an engine joins again, the node ends everything that it ran for
the engine, except sessions; an engine that is silent for `SILENCE_S` is treated as if it had
stopped. The node's wall checks everything that a program sends, as in an engine without a cluster,
except the frames of streams. These are checked in the engine, by the owners of the streams.
"""

from __future__ import annotations

import asyncio
import itertools
import platform
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.abc
import anyio.to_thread

from fumehood.cluster.model import (
    VERSION,
    HeldState,
    ImageFacts,
    NodeFacts,
    NodeReport,
    RunEvent,
    RunOrder,
    Terms,
    Ticket,
)
from fumehood.core.errors import (
    EndedBy,
    EngineError,
    InternalError,
    NetworkError,
    SandboxUnavailable,
)
from fumehood.core.identity import TrustDomain
from fumehood.core.limits import remember
from fumehood.core.session import FileKind, SessionHome, SessionRecord
from fumehood.protocol.connections import MAX_CONNECTIONS
from fumehood.sandbox.container.additions import PLUS
from fumehood.sandbox.container.wall import ContainerWall, HeldContainer
from fumehood.sandbox.settings import WallSettings
from fumehood.sandbox.streams import Stream, StreamKind, StreamPort
from fumehood.sandbox.wall import Brake, OnEvent, RunEnding, RunSinks, try_later
from fumehood.storage.directory import InUse, StateError, hold_lock, owner_id, private_directory

SILENCE_S = 60.0
"""Seconds without a request from an engine after which the node ends everything that it runs for
that engine."""

REPORT_S = 1.0
"""Maximum seconds that a report waits for a change."""

PIECE_BYTES = 1 << 20
"""Size in bytes of one piece of an image. Also the maximum size of a run's events that the engine
has not fetched: beyond this size, the program's stream is not read."""

EVENT_BYTES = 256
"""Approximate size of an event in bytes, without its content."""

FORGET_S = 60.0
"""Seconds for which a run's events can still be fetched after the run has ended."""

DIAL_S = 30.0
"""Timeout in seconds for a connection that a node opens for the engine's gateway."""

MakeWall = Callable[[WallSettings, Path, OnEvent], ContainerWall]
"""Creates an engine's wall, given its settings, the directory for its state and a receiver of
events."""


class Fenced(SandboxUnavailable):
    """The node refuses a command, because the command's ticket is not valid, or no longer valid.

    Perhaps a newer engine with the same state has joined, or the engine has left the node. The
    engine may also have been silent for too long.
    """

    def __init__(self) -> None:
        super().__init__(
            "This engine is not joined to the node; a newer start may be.", retryable=True
        )

    def __reduce__(self) -> tuple[type[Fenced], tuple[()]]:
        return Fenced, ()


LAST = ("ending", "refused")
"""The names of the two events that can end a run."""


class Events:
    """A queue of the events of one run that have not been sent to the engine yet."""

    def __init__(self) -> None:
        self.brake = Brake()
        self._waiting: deque[tuple[RunEvent, int]] = deque()
        self._bytes = 0
        self._is_over = False
        self._come = asyncio.Event()

    def add(self, *event: Any, size: int = 0) -> None:
        """Add an event. `event` is the event's name and its values, and `size` is the size in bytes
        of the content in these values.

        The last event of a run has the name `ending` or `refused`.
        """
        self._is_over = self._is_over or event[0] in LAST
        self._waiting.append((event, size))
        self._bytes += EVENT_BYTES + size
        self.brake.is_on = self._bytes >= PIECE_BYTES
        self._come.set()

    def close(self, ending: RunEnding) -> None:
        """Add `ending` as the last event. If the run already has a last event, do nothing."""
        # A run whose task was cancelled before it started has no last event yet.
        if not self._is_over:
            self.add("ending", ending)

    async def next(self) -> list[RunEvent]:
        """Wait until there are events, and return them all."""
        await self._come.wait()
        self._come.clear()
        piece = [event for event, _ in self._waiting]
        self._waiting.clear()
        self._bytes = 0
        self.brake.release()
        return piece

    def sinks(self, order: RunOrder, on_open: Callable[[str, StreamPort], None]) -> RunSinks:
        """Return receivers for the events that `order` wants.

        The receivers add the events to this object. `on_open` receives the kind and the port of
        each stream.
        """

        def progress(percent: float, message: str) -> None:
            self.add("progress", percent, message)

        def output(stream: str, text: str) -> None:
            self.add("output", stream, text, size=len(text))

        def opening(kind: StreamKind) -> Callable[[StreamPort], _Passing]:
            def open_(port: StreamPort) -> _Passing:
                on_open(kind.name, port)
                return _Passing(self, kind.name)

            return open_

        wants = order.wants
        return RunSinks(
            progress=progress if "progress" in wants else None,
            files=_Files(self) if "files" in wants else None,
            output=output if "output" in wants else None,
            streams=tuple(Stream(kind, opening(kind)) for kind in order.streams),
            trial=order.trial,
            is_live=order.is_live,
            brake=self.brake,
        )


class _Files:
    """Receives the files that a run returns, and adds them to the run's events."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        self._events.add("file", path, size, kind)

    def write(self, data: bytes) -> None:
        self._events.add("data", data, size=len(data))


class _Passing:
    """Passes the frames of one stream to the engine, without parsing the frames."""

    def __init__(self, events: Events, kind: str) -> None:
        self._events = events
        self._kind = kind

    def on_frame(self, body: bytes) -> None:
        self._events.add("frame", self._kind, body, size=len(body))

    def close(self) -> None:
        pass  # the run's ending, which follows, closes the stream in the engine


@dataclass(eq=False, slots=True)
class _Run:
    task: asyncio.Task[None]
    events: Events
    ports: dict[str, StreamPort] = field(default_factory=dict)
    """Kind → the port of the run's stream of this kind."""
    dialled: dict[int, anyio.abc.ByteStream] = field(default_factory=dict)
    """The connections that this node opened for the run at the request of the engine's gateway."""
    dialling: int = 0
    """The number of connections for the run that are being opened."""
    ended: float | None = None
    """When the run ended, by the monotonic clock, or None."""
    processed: int = 0
    """The number of messages from the engine that the run has processed."""
    early: dict[int, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    """Messages from the engine, by number, that wait because an earlier message has not arrived
    yet."""

    def frame(self, kind: str, body: bytes) -> None:
        """Pass a frame from the engine to the guest. `kind` is the kind of the frame's stream."""
        self.ports[kind].send(body)

    def pause(self, kind: str, is_paused: bool) -> None:
        """If `is_paused` is True, stop the clock of the run. If it is False, let the clock
        continue. `kind` is the kind of the stream that requests this.
        """
        self.ports[kind].pause(is_paused=is_paused)

    def refuse(self, kind: str, why: str) -> None:
        """End the container, because the engine received an invalid frame of the stream of this
        `kind`. `why` describes the fault.
        """
        self.ports[kind].refuse(why)


@dataclass(eq=False, slots=True)
class _Joined:
    """One engine that has joined the node, with its wall, sessions and runs."""

    ticket: Ticket
    wall: ContainerWall
    copies: set[str]
    heard: float
    copies_number: int = 0
    """Number of the newest command about disk copies."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    held: dict[str, HeldContainer] = field(default_factory=dict)
    """Session id → the session's container."""
    runs: dict[str, _Run] = field(default_factory=dict)
    cancelled: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Ids of runs that were cancelled before their order arrived."""
    holding: dict[str, object] = field(default_factory=dict)
    """Session id → the pending command that takes a container for the session."""
    ports: dict[str, dict[int, anyio.abc.ByteStream]] = field(default_factory=dict)
    """Session id → the connections to the session's ports, by connection number."""
    connecting: set[int] = field(default_factory=set)
    """The numbers of the connections to ports that are being opened."""
    transfers: dict[str, IO[bytes]] = field(default_factory=dict)
    """Images that are being copied to or from another node."""
    number: int = 0
    changes: dict[str, int] = field(default_factory=dict)
    """Session id → the number of the session's last change."""
    has_changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def running(self) -> int:
        """The number of runs that have not ended."""
        return sum(run.ended is None for run in self.runs.values())

    def hold(self, session_id: str, held: HeldContainer) -> None:
        """Store the container of a session, and report the container's changes from now on."""
        self.held[session_id] = held
        held.on_processes = lambda: self.on_change(session_id)

    def forget_old(self) -> None:
        """Forget each ended run whose events were not fetched within `FORGET_S`."""
        oldest = time.monotonic() - FORGET_S
        for run_id, run in list(self.runs.items()):
            if run.ended is not None and run.ended < oldest:
                del self.runs[run_id]

    def on_change(self, session_id: str | None = None) -> None:
        """Record a change of the node or, with an id, of a session. The next report includes the
        change.
        """
        self.number += 1
        if session_id is not None:
            self.changes[session_id] = self.number
        self.has_changed.set()


class NodeHome:
    """The directory and the name of a node. The directory is locked until `close`.

    Each node on a machine has its own directory under `base`. A restarted node takes over the
    directory and the sessions that its predecessor left.
    """

    def __init__(self, base: Path) -> None:
        self._stack = ExitStack()
        private_directory(base)
        for number in itertools.count():
            self.path = private_directory(base / f"node-{number}")
            try:
                self._stack.enter_context(hold_lock(self.path / "node.lock", "this node"))
            except InUse:
                continue
            host = platform.node() or "node"
            self.id, self.name = owner_id(self.path), host if number == 0 else f"{host}-{number}"
            return

    def close(self) -> None:
        """Release the directory, so that another node can use it."""
        self._stack.close()


class Node:
    """The containers of one machine. The engines that have joined the node call the public
    methods.
    """

    def __init__(self, home: NodeHome, slots: int, make_wall: MakeWall) -> None:
        self._home = home
        self._slots = slots
        self._make_wall = make_wall
        self._drained = home.path / "drained"
        """A file that exists while the node is drained."""
        self._joined: dict[str, _Joined] = {}
        self._newest: dict[str, int] = {}
        """Owner → the highest number with which the owner tried to join."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._joining = anyio.Lock()

    async def facts(self) -> NodeFacts:
        """Return the node's id, name, package version, number of slots and clock. An engine checks
        them before it joins this node.
        """
        return NodeFacts(
            id=self._home.id, name=self._home.name, version=VERSION, slots=self._slots,
            clock=time.time(),
        )  # fmt: skip

    async def join(self, ticket: Ticket, terms: Terms) -> None:
        """Let an engine join, after ending everything that the node ran for it, except sessions.

        From now on, the node obeys only those of the engine's commands that have this ticket.

        Raises:
            Fenced: a newer start of the same engine has joined.
            SandboxUnavailable: the engine's wall could not be opened.
        """
        if ticket.epoch <= self._newest.get(ticket.owner, 0):
            raise Fenced
        self._newest[ticket.owner] = ticket.epoch
        async with self._joining:
            await self._leave(self._joined.get(ticket.owner))
            if ticket.epoch < self._newest[ticket.owner]:
                raise Fenced
            try:
                directory = private_directory(self._home.path / ticket.owner)
            except StateError as error:
                raise SandboxUnavailable(str(error)) from None
            container = terms.settings.container
            container = container.model_copy(
                update={
                    "pool_max": self._slots, "pool_min": min(container.pool_min, self._slots),
                }
            )  # fmt: skip
            settings = replace(terms.settings, container=container, part_of_one=1.0)
            wall = self._make_wall(settings, directory, lambda *event: joined.on_change())
            joined = _Joined(ticket, wall, set(terms.copies), time.monotonic())
            wall.spare_copies(lambda: joined.copies)
            for record, home in terms.sessions:
                wall.expect(record, home)
            is_open = asyncio.Event()
            task = asyncio.ensure_future(self._serve(joined, is_open))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await is_open.wait()
            if joined.ended.is_set():
                raise SandboxUnavailable("The node could not start its container wall.")
            self._joined[ticket.owner] = joined

    async def leave(self, ticket: Ticket) -> None:
        """End everything that the node runs for an engine that stops.

        The sessions stay for the engine's next start.
        """
        await self._leave(self._of(ticket))

    async def close(self) -> None:
        """End everything that the node runs for all engines, and release the directory."""
        for joined in list(self._joined.values()):
            await self._leave(joined)
        self._home.close()

    async def report(self, ticket: Ticket, seen: int) -> NodeReport:
        """Wait until the node's state has changed since the report with the number `seen`, but at
        most `REPORT_S` seconds. Then return the current state.

        Raises:
            Fenced: the engine is no longer joined to the node.
        """
        joined = self._of(ticket)
        joined.heard = time.monotonic()
        if joined.number <= seen:
            joined.has_changed.clear()
            with anyio.move_on_after(REPORT_S):
                await joined.has_changed.wait()
        joined.heard = time.monotonic()
        if joined.is_over.is_set():
            raise Fenced
        joined.forget_old()
        wall, status = joined.wall, joined.wall.status
        others = [engine for engine in self._joined.values() if engine is not joined]
        changed = [key for key, number in joined.changes.items() if number > seen]
        return NodeReport(
            number=joined.number,
            is_ready=status.is_ready,
            is_drained=self._drained.exists(),
            seen=status.seen,
            faults=status.faults,
            host=wall.host,
            images={
                name: ImageFacts(image.id, image.created.timestamp(), image.languages)
                for name, image in wall.images.items()
            },
            warm=dict(wall.warm),
            counts=wall.counts,
            others=sum(engine.running for engine in others),
            engines=len(others) + 1,
            changed={key: _state_of(joined.held[key]) for key in changed if key in joined.held},
            grade=status.grade,
        )

    async def drain(self, ticket: Ticket, *, is_drained: bool) -> None:
        """If `is_drained` is True, drain this node, so that it accepts no new calls and sessions.
        Otherwise, let the node accept calls and sessions again.

        The change applies to all engines that have joined the node.
        """
        self._of(ticket)
        if is_drained:
            self._drained.touch()
        else:
            self._drained.unlink(missing_ok=True)
        for joined in self._joined.values():
            joined.on_change()

    # -- images ----------------------------------------------------------------------------

    async def find_image(self, ticket: Ticket, image: str) -> str:
        """Search for an image and return its digest. From now on, reports include the image.

        Raises:
            SandboxUnavailable: the image does not exist, or the container runtime cannot be used.
        """
        joined = self._of(ticket)
        facts = await joined.wall.facts_of(image)
        joined.on_change()
        return str(facts["image_digest"])

    async def look_again(self, ticket: Ticket) -> None:
        """Query the current images and limits again."""
        joined = self._of(ticket)
        await joined.wall.look_again()
        joined.on_change()

    async def with_additions(
        self, ticket: Ticket, image: str, wanted: tuple[str, ...], principal_id: str
    ) -> tuple[str, str]:
        """Return the name of the image that consists of `image` and the additions `wanted`, such as
        package names. Also return the lock, a text that fixes what exactly is added.

        A part of the engine determines what is added for the principal `principal_id`.
        """
        wall = self._of(ticket).wall
        name = await wall.with_additions(image, wanted, principal_id)
        return name, wall.lock_text(name)

    async def save_image(self, ticket: Ticket, transfer: str, image: str) -> int:
        """Save an image to a temporary file, so that it can be copied to another node. Return the
        number of pieces that `read_image` will return.

        `transfer` is the id of this copying, which the engine has chosen.
        """
        joined = self._of(ticket)
        file = joined.transfers[transfer] = tempfile.TemporaryFile()  # noqa: SIM115
        await joined.wall.save_image(image, file)
        size = file.tell()
        file.seek(0)
        return -(-size // PIECE_BYTES)

    async def read_image(self, ticket: Ticket, transfer: str) -> bytes:
        """Return the next piece of an image that `save_image` saved."""
        file = self._transfer(ticket, transfer)
        return await anyio.to_thread.run_sync(file.read, PIECE_BYTES)

    async def write_image(self, ticket: Ticket, transfer: str, piece: bytes) -> None:
        """Append a piece to an image that is being copied from another node."""
        transfers = self._of(ticket).transfers
        if transfer not in transfers:
            transfers[transfer] = tempfile.TemporaryFile()  # noqa: SIM115
        await anyio.to_thread.run_sync(transfers[transfer].write, piece)

    async def load_image(self, ticket: Ticket, transfer: str) -> None:
        """Load an image. All pieces of the image must have been written with
        `write_image`.

        Raises:
            SandboxUnavailable: the runtime cannot load the image, or the image is no longer being
                copied.
        """
        file = self._transfer(ticket, transfer)
        file.seek(0)
        await self._of(ticket).wall.load_image(file)
        await self.look_again(ticket)

    def end_transfer(self, ticket: Ticket, transfer: str) -> None:
        """Delete the temporary file of an image transfer."""
        file = self._of(ticket).transfers.pop(transfer, None)
        if file is not None:
            file.close()

    def _transfer(self, ticket: Ticket, transfer: str) -> IO[bytes]:
        file = self._of(ticket).transfers.get(transfer)
        if file is None:
            raise try_later("The image is no longer being copied.")
        return file

    # -- runs ------------------------------------------------------------------------------

    async def run(self, ticket: Ticket, order: RunOrder) -> list[RunEvent]:
        """Start a program and return its first events.

        `more` returns the next events, until an event is `ending` or `refused`.
        """
        joined = self._of(ticket)
        if order.id in joined.cancelled:
            del joined.cancelled[order.id]
            return [("ending", RunEnding(EndedBy.CANCELLED, "call"))]
        events = Events()
        task = asyncio.ensure_future(self._run(joined, order, events))
        run = joined.runs[order.id] = _Run(task, events)

        def on_done(task: asyncio.Task[None]) -> None:
            events.close(_cut_off(joined, order))
            run.ended = time.monotonic()
            for stream in run.dialled.values():
                self._close_soon(stream)

        task.add_done_callback(on_done)
        return await self.more(ticket, order.id)

    async def more(self, ticket: Ticket, run_id: str) -> list[RunEvent]:
        """Wait for more events of a run and return them."""
        joined = self._of(ticket)
        run = joined.runs.get(run_id)
        if run is None:
            raise try_later("The node no longer knows this run.")
        piece = await run.events.next()
        if piece[-1][0] in LAST:
            joined.runs.pop(run_id, None)
        return piece

    def cancel(self, ticket: Ticket, run_id: str) -> None:
        """Cancel a run. The run then ends, and its last event is `ending`. If the order to start
        the run has not arrived yet, the run will not start.
        """
        joined = self._of(ticket)
        run = joined.runs.get(run_id)
        if run is not None:
            run.task.cancel()
        else:
            remember(joined.cancelled, run_id, None)

    def tell(self, ticket: Ticket, run_id: str, number: int, name: str, *values: Any) -> None:
        """Pass a message from the engine to a run. `name` is the method of `_Run` that processes
        the message.

        Messages are processed in the order of their numbers, because Ray does not keep the order of
        calls.
        """
        run = self._of(ticket).runs.get(run_id)
        if run is None:
            return
        run.early[number] = name, values
        while (next_one := run.early.pop(run.processed, None)) is not None:
            run.processed += 1
            name, values = next_one
            getattr(run, name)(*values)

    async def dial(self, ticket: Ticket, run_id: str, address: str, port: int) -> int:
        """Connect to `address` and `port`, because the engine's gateway requests this for the
        program of the run `run_id`. Return the connection's number.

        Raises:
            NetworkError: the address cannot be reached, or the program has ended or has too many
                connections.
        """
        run = self._of(ticket).runs.get(run_id)
        if run is None or len(run.dialled) + run.dialling >= MAX_CONNECTIONS:
            raise NetworkError("The program has ended, or has too many connections.")
        run.dialling += 1
        try:
            with anyio.fail_after(DIAL_S):
                stream = await anyio.connect_tcp(address, port)
        except (OSError, TimeoutError):
            raise NetworkError("The address cannot be reached from the node.") from None
        finally:
            run.dialling -= 1
        if run.ended is not None:
            self._close_soon(stream)
            raise NetworkError("The program has ended.")
        number = next(self._numbers)
        run.dialled[number] = stream
        return number

    async def connect(self, ticket: Ticket, session_id: str, number: int, port: int) -> None:
        """Open a connection to a port of a session. The engine has chosen the connection's number.

        To use or close the connection, pass the session's id and this number to `use_dialled` or
        `close_dialled`. Raises the same errors as the container's `connect`.
        """
        joined = self._of(ticket)
        joined.connecting.add(number)
        try:
            stream = await self._held(ticket, session_id).connect(port)
            if number in joined.connecting:
                joined.ports.setdefault(session_id, {})[number] = stream
            else:  # no longer wanted
                self._close_soon(stream)
        finally:
            joined.connecting.discard(number)

    async def use_dialled(
        self, ticket: Ticket, run_id: str, number: int, operation: str, *arguments: Any
    ) -> Any:
        """Call the method `operation` of a connection: `receive`, `send` or `send_eof`. `run_id` is
        the id of the connection's run or session.

        `receive` returns empty bytes once the connection has ended.

        Raises:
            NetworkError: the connection is closed or broken.
        """
        stream = self._connections(ticket, run_id).get(number)
        if stream is None:
            raise NetworkError("The connection is closed.")
        try:
            return await getattr(stream, operation)(*arguments)
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise NetworkError("The connection was lost.") from None

    def close_dialled(self, ticket: Ticket, run_id: str, number: int) -> None:
        """Close a connection of a run or session. A connection that is still being opened is
        abandoned.
        """
        self._of(ticket).connecting.discard(number)
        stream = self._connections(ticket, run_id).pop(number, None)
        if stream is not None:
            self._close_soon(stream)

    def _connections(self, ticket: Ticket, owner_id: str) -> dict[int, anyio.abc.ByteStream]:
        """Return the connections of the run or session with this id, by number."""
        joined = self._of(ticket)
        run = joined.runs.get(owner_id)
        return run.dialled if run is not None else joined.ports.get(owner_id, {})

    def _close_soon(self, stream: anyio.abc.ByteStream) -> None:
        task = asyncio.ensure_future(stream.aclose())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- sessions --------------------------------------------------------------------------

    async def hold(
        self,
        ticket: Ticket,
        domain: TrustDomain,
        *,
        image: str,
        memory_mb: int,
        cpus: float | None,
        disk_mb: int | None,
        additions: tuple[str, ...],
        lock: str,
    ) -> HeldState:
        """Take a container for the session of `domain`, and return the container's state.

        `lock` is a text that fixes what exactly the `additions` add to the image. Raises the same
        errors as the wall's `hold`.
        """
        joined, session_id = self._of(ticket), domain.session_id or ""
        request = joined.holding[session_id] = object()
        try:
            held = await joined.wall.hold(
                domain, image=image, memory_mb=memory_mb, cpus=cpus, disk_mb=disk_mb,
                additions=additions, lock=lock, on_lost=lambda: joined.on_change(session_id),
            )  # fmt: skip
        finally:
            is_wanted = joined.holding.get(session_id) is request
            if is_wanted:
                del joined.holding[session_id]
        if not is_wanted:  # no longer wanted
            held.end("it is no longer wanted")
            return _state_of(held)
        joined.hold(session_id, held)
        return _state_of(held)

    async def drop(self, ticket: Ticket, session_id: str, why: str) -> None:
        """End the container of a session that the engine has given up, even if the container is
        still being created.
        """
        joined = self._of(ticket)
        joined.holding.pop(session_id, None)
        held = joined.held.get(session_id)
        if held is not None:
            held.end(why)
            await self.in_session(ticket, session_id, "until_gone")

    async def resume(self, ticket: Ticket, record: SessionRecord, home: SessionHome) -> HeldState:
        """Begin to take over the container of a session, and return the container's state. The
        session either existed before a restart of the engine or the node, or is a new fork.

        The takeover continues after this method has returned. The container is not used before the
        takeover is complete.
        """
        joined = self._of(ticket)
        held = joined.wall.resume(record, home, lambda: joined.on_change(record.id))
        joined.hold(record.id, held)
        return _state_of(held)

    async def in_session(
        self, ticket: Ticket, session_id: str, operation: str, *arguments: Any
    ) -> tuple[Any, HeldState]:
        """Call the method `operation` of a session's container.

        Return the method's result and the container's new state.
        """
        held = self._held(ticket, session_id)
        result = await getattr(held, operation)(*arguments)
        if operation == "until_gone":
            joined = self._of(ticket)
            if (
                joined.held.get(session_id) is held
            ):  # the session may have been restored on this node meanwhile
                del joined.held[session_id]
                joined.ports.pop(session_id, None)
                joined.changes.pop(session_id, None)
        return result, _state_of(held)

    def end(self, ticket: Ticket, session_id: str, why: str) -> None:
        """End a session's container."""
        joined = self._of(ticket)
        held = joined.held.get(session_id)
        if held is not None:
            held.end(why)

    async def copy_disk(self, ticket: Ticket, session_id: str, copy: str, number: int) -> int:
        """Copy a session's disk, and return the size of the copy in bytes. `copy` is the id that
        the copy gets.

        The copy is kept until `keep_copies` is called without its id. `number` is the engine's
        number for this command. The engine gives each command about copies a higher number than the
        previous one.
        """
        joined, held = self._of(ticket), self._held(ticket, session_id)
        joined.copies.add(copy)
        joined.copies_number = max(joined.copies_number, number)
        async with held.copy_disk(copy) as size:
            return size

    def keep_copies(self, ticket: Ticket, copies: frozenset[str], number: int) -> None:
        """Delete all disk copies except those with the ids `copies`, in the background.

        `number` is the engine's number for this command. If a command about copies with a higher
        number has already arrived, do nothing.
        """
        joined = self._of(ticket)
        if number < joined.copies_number:
            return
        joined.copies, joined.copies_number = set(copies), number
        joined.wall.sweep_soon()

    async def fork(self, ticket: Ticket, copy: str, session_id: str, home: SessionHome) -> str:
        """Create the disk of the new session `session_id` from the disk copy with the id `copy`.
        Return the disk's name.

        The disk stays unless `unfork` is called.
        """
        async with self._of(ticket).wall.fork(copy, session_id, home) as name:
            return name

    async def unfork(self, ticket: Ticket, session_id: str) -> None:
        """Delete the disk that `fork` created, because the new session was not completed."""
        self._of(ticket).wall.drop_disk(f"fumehood-{session_id}")

    # -- inside ----------------------------------------------------------------------------

    def _of(self, ticket: Ticket) -> _Joined:
        joined = self._joined.get(ticket.owner)
        if joined is None or joined.ticket != ticket or joined.is_over.is_set():
            raise Fenced
        return joined

    def _held(self, ticket: Ticket, session_id: str) -> HeldContainer:
        held = self._of(ticket).held.get(session_id)
        if held is None:
            raise _not_yet()
        return held

    async def _leave(self, joined: _Joined | None) -> None:
        if joined is not None:
            joined.is_over.set()
            joined.has_changed.set()
            await joined.ended.wait()

    async def _serve(self, joined: _Joined, is_open: asyncio.Event) -> None:
        """Keep an engine's wall open until the engine leaves or joins again, or is silent for
        `SILENCE_S`.
        """
        try:
            async with joined.wall:
                is_open.set()
                with suppress(EngineError):
                    await joined.wall.look_again()
                while not joined.is_over.is_set():
                    left_s = joined.heard + SILENCE_S - time.monotonic()
                    if left_s <= 0:
                        joined.is_over.set()
                    with anyio.move_on_after(max(left_s, 0.0)):
                        await joined.is_over.wait()
                runs = [run.task for run in joined.runs.values()]
                for task in runs:
                    task.cancel()
                await asyncio.gather(*runs, return_exceptions=True)
        finally:
            if self._joined.get(joined.ticket.owner) is joined:
                del self._joined[joined.ticket.owner]
            for file in joined.transfers.values():
                file.close()
            is_open.set()
            joined.ended.set()

    async def _run(self, joined: _Joined, order: RunOrder, events: Events) -> None:
        cancelled: list[RunEnding] = []

        def on_open(kind: str, port: StreamPort) -> None:
            joined.runs[order.id].ports[kind] = port

        sinks = replace(events.sinks(order, on_open), ending=cancelled.append)
        try:
            events.add("ending", await self._ending(joined, order, sinks))
        except EngineError as error:
            events.add("refused", error)
        except asyncio.CancelledError:
            if cancelled and joined.is_over.is_set():  # the engine has not cancelled the run
                lost = replace(cancelled[0], ended_by=EndedBy.SANDBOX_LOST, is_node_lost=True)
                cancelled = [lost]
            events.add("ending", cancelled[0] if cancelled else _cut_off(joined, order))
            raise
        except Exception as error:
            events.add("refused", InternalError(f"A node failed: {type(error).__name__}."))
            raise

    async def _ending(self, joined: _Joined, order: RunOrder, sinks: RunSinks) -> RunEnding:
        wall, arguments, limits = joined.wall, order.arguments, order.limits
        if order.session_id is not None:
            held = joined.held.get(order.session_id)
            if held is None:
                raise _not_yet()
            if held.lost is not None:
                return RunEnding(EndedBy.SANDBOX_LOST, "session")
            await held.until_free()
            return await held.run(order.program, arguments, limits, sinks)
        assert order.kind is not None
        if order.lock:
            wall.add_lock(order.kind.image, order.lock)
        async with wall.lease(
            order.domain, fresh=order.fresh, memory_mb=order.kind.memory_mb, image=order.kind.image
        ) as lease:
            below = wall.images.get(order.kind.image.partition(PLUS)[0])
            found = lease.container.image_id if not order.lock else below and below.id
            if found != order.digest:  # the image was rebuilt after the call was placed
                raise try_later(f"The image {order.kind.image} has changed. Repeat the call.")
            return await lease.run(order.program, arguments, limits, sinks)


def _not_yet() -> SandboxUnavailable:
    return try_later("The session's node has only just returned. Repeat the call.")


def _cut_off(joined: _Joined, order: RunOrder) -> RunEnding:
    """Return the ending of a run that was ended from outside. `order` is the order that started the
    run.

    The ending is `SANDBOX_LOST` if the engine is no longer joined to the node. Otherwise it is
    `CANCELLED`, because the engine has cancelled the run.
    """
    isolation = "session" if order.session_id else "call"
    if joined.is_over.is_set():
        return RunEnding(EndedBy.SANDBOX_LOST, isolation, is_node_lost=True)
    return RunEnding(EndedBy.CANCELLED, isolation)


def _state_of(held: HeldContainer) -> HeldState:
    return HeldState(
        held.name, held.languages, held.lock, held.lost, held.is_paused, held.is_stopped,
        held.running, held.grade,
    )  # fmt: skip
