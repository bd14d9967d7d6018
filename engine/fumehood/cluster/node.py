"""A node: the containers of one machine, for engines on others.

It runs in a process of its own on its machine, as a Ray actor (`ray_nodes`), and holds a container
wall for each engine that joined it. Invariants: of one engine's commands it obeys those with the
highest number only, and an engine that joins again ends what it ran before, sessions aside; an
engine that is silent for `SILENCE_S` is left, as if it had stopped. What a program sends is read by
the wall here, as on a machine of its own; only values that passed it go on.
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
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import remember
from fumehood.core.session import FileKind, SessionHome, SessionRecord
from fumehood.protocol.framing import MAX_CONNECTIONS, ConnectionFrame
from fumehood.sandbox.container.packages import PLUS
from fumehood.sandbox.container.wall import ContainerWall, HeldContainer
from fumehood.sandbox.settings import WallSettings
from fumehood.sandbox.wall import (
    Brake,
    CallPort,
    Dial,
    FrameSink,
    Network,
    OnEvent,
    OpenConnections,
    RunEnding,
    RunSinks,
    try_later,
)
from fumehood.storage.directory import InUse, StateError, hold_lock, owner_id, private_directory

SILENCE_S = 60.0
"""Seconds without a word from an engine after which what it runs here is ended."""

REPORT_S = 1.0
"""Seconds that a report waits for a change."""

PIECE_BYTES = 1 << 20
"""Bytes of events, or of an image, in one piece. While as many bytes of events wait to be fetched,
the program's stream is not read."""

EVENT_BYTES = 256
"""Bytes of an event besides its content, about."""

FORGET_S = 60.0
"""Seconds after its end for which the events of a run wait to be fetched."""

DIAL_S = 30.0
"""Seconds to connect to a host for the engine's gateway."""

MakeWall = Callable[[WallSettings, Path, OnEvent], ContainerWall]
"""Makes an engine's wall; its state is in the directory."""


class Fenced(SandboxUnavailable):
    """The node obeys a newer command of the same engine."""

    def __init__(self) -> None:
        super().__init__("The node obeys a newer engine.", retryable=True)

    def __reduce__(self) -> tuple[type[Fenced], tuple[()]]:
        return Fenced, ()


LAST = ("ending", "refused")
"""The names of a run's last event."""


class Events:
    """The events of one run that are not sent yet."""

    def __init__(self) -> None:
        self.brake = Brake()
        self._waiting: deque[tuple[RunEvent, int]] = deque()
        self._bytes = 0
        self._is_over = False
        self._come = asyncio.Event()

    def add(self, *event: Any, size: int = 0) -> None:
        """Add an event, the last one with the name `ending` or `refused`."""
        self._is_over = self._is_over or event[0] in LAST
        self._waiting.append((event, size))
        self._bytes += EVENT_BYTES + size
        self.brake.is_on = self._bytes >= PIECE_BYTES
        self._come.set()

    def close(self, ending: RunEnding) -> None:
        """Add an ending, unless there is one. A task cancelled before it begins has added none."""
        if not self._is_over:
            self.add("ending", ending)

    async def next(self) -> list[RunEvent]:
        """Wait for events, and return those that came."""
        await self._come.wait()
        self._come.clear()
        piece = [event for event, _ in self._waiting]
        self._waiting.clear()
        self._bytes = 0
        self.brake.release()
        return piece

    def sinks(
        self, order: RunOrder, on_call: Callable[[int, CallPort], None], open_: OpenConnections
    ) -> RunSinks:
        """Return receivers that add events, for those that the order wants."""

        def progress(percent: float, message: str) -> None:
            self.add("progress", percent, message)

        def output(stream: str, text: str) -> None:
            self.add("output", stream, text, size=len(text))

        def call(number: int, tool: str, arguments: JsonObject, port: CallPort) -> None:
            on_call(number, port)
            self.add("call", number, tool, arguments, size=len(str(arguments)))

        wants = order.wants
        return RunSinks(
            progress=progress if "progress" in wants else None,
            files=_Files(self) if "files" in wants else None,
            output=output if "output" in wants else None,
            call=call if "call" in wants else None,
            network=Network(open_, order.trust) if order.trust is not None else None,
            trial=order.trial,
            is_live=order.is_live,
            brake=self.brake,
        )


class _Files:
    """Adds the files of a run to its events."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        self._events.add("file", path, size, kind)

    def write(self, data: bytes) -> None:
        self._events.add("data", data, size=len(data))


class _Passing:
    """Passes the frames of a run's connections on, unread, to the engine and back."""

    def __init__(self, run: _Run, send: Callable[[bytes], None]) -> None:
        self._run = run
        run.send = send

    def on_frame(self, frame: ConnectionFrame) -> None:
        self._run.events.add("connection", frame.body(), size=len(frame.data))

    def close(self) -> None:
        self._run.send = None


@dataclass(eq=False, slots=True)
class _Run:
    task: asyncio.Task[None]
    events: Events
    port: CallPort | None = None
    send: Callable[[bytes], None] | None = None
    """Sends frames of its connections to its guest."""
    dialled: dict[int, anyio.abc.ByteStream] = field(default_factory=dict)
    """Connections from this machine that the engine's gateway made for it."""
    dialling: int = 0
    """Connections in the making."""
    ended: float | None = None
    """When it ended, by the monotonic clock."""
    told: int = 0
    """How often the engine has told it something."""
    early: dict[int, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    """What the engine told it, and its turn has not come."""

    def answer(self, answer: bytes) -> None:
        """Pass the answer to a program's tool call on."""
        if self.port is not None:
            self.port.answer(answer)

    def pause(self, is_paused: bool) -> None:
        """Pause its clock, or let it go on."""
        if self.port is not None:
            self.port.pause(is_paused=is_paused)

    def connection(self, frame: bytes) -> None:
        """Pass a frame of a program's connection on to its guest."""
        if self.send is not None:
            self.send(frame)


@dataclass(eq=False, slots=True)
class _Joined:
    """One engine that joined: its wall, its sessions and its runs."""

    ticket: Ticket
    wall: ContainerWall
    copies: set[str]
    heard: float
    copies_number: int = 0
    """Of what was said last of copies."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    held: dict[str, HeldContainer] = field(default_factory=dict)
    """Session id → its container."""
    runs: dict[str, _Run] = field(default_factory=dict)
    cancelled: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Runs that were cancelled before they came."""
    holding: dict[str, object] = field(default_factory=dict)
    """Session id → the command that takes a container for it, while somebody waits for that."""
    ports: dict[str, dict[int, anyio.abc.ByteStream]] = field(default_factory=dict)
    """Session id → its connections to ports, by their numbers."""
    connecting: set[int] = field(default_factory=set)
    """Numbers of those in the making."""
    transfers: dict[str, IO[bytes]] = field(default_factory=dict)
    """Images on their way from or to another node."""
    number: int = 0
    changes: dict[str, int] = field(default_factory=dict)
    """Session id → the number of its last change."""
    has_changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def running(self) -> int:
        """The number of runs that have not ended."""
        return sum(run.ended is None for run in self.runs.values())

    def hold(self, session_id: str, held: HeldContainer) -> None:
        """Know the container of a session, and report its changes."""
        self.held[session_id] = held
        held.on_processes = lambda: self.on_change(session_id)

    def forget_old(self) -> None:
        """Forget the runs whose events nobody fetches any more."""
        oldest = time.monotonic() - FORGET_S
        for run_id, run in list(self.runs.items()):
            if run.ended is not None and run.ended < oldest:
                del self.runs[run_id]

    def on_change(self, session_id: str | None = None) -> None:
        """Let reports show a change."""
        self.number += 1
        if session_id is not None:
            self.changes[session_id] = self.number
        self.has_changed.set()


class NodeHome:
    """The directory of a node, and its name. Used until `close`.

    Several nodes of one machine have one each below `base`; a node that is started again takes the
    one that the last left, and finds its sessions there.
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
        """Let another node use the directory."""
        self._stack.close()


class Node:
    """The containers of one machine. Its methods are those that engines call."""

    def __init__(self, home: NodeHome, slots: int, make_wall: MakeWall) -> None:
        self._home = home
        self._slots = slots
        self._make_wall = make_wall
        self._drained = home.path / "drained"
        """A file that is there while the node takes nothing new."""
        self._joined: dict[str, _Joined] = {}
        self._newest: dict[str, int] = {}
        """Owner → the highest number that was seen."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._joining = anyio.Lock()

    async def facts(self) -> NodeFacts:
        """Return what an engine checks before it joins."""
        return NodeFacts(
            id=self._home.id, name=self._home.name, version=VERSION, slots=self._slots,
            clock=time.time(),
        )  # fmt: skip

    async def join(self, ticket: Ticket, terms: Terms) -> None:
        """Obey an engine from now on, and end what it ran here before, sessions aside.

        Raises:
            Fenced: a newer engine of this state has joined.
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
                raise SandboxUnavailable("The node could not start what holds its containers.")
            self._joined[ticket.owner] = joined

    async def leave(self, ticket: Ticket) -> None:
        """Obey an engine no longer: it stops. Its sessions wait for the next."""
        await self._leave(self._of(ticket))

    async def close(self) -> None:
        """Leave all engines."""
        for joined in list(self._joined.values()):
            await self._leave(joined)
        self._home.close()

    async def report(self, ticket: Ticket, seen: int) -> NodeReport:
        """Return the state of the node, once it differs from report `seen`, or after a second."""
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
        others = [one for one in self._joined.values() if one is not joined]
        changed = [one for one, number in joined.changes.items() if number > seen]
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
            others=sum(one.running for one in others),
            engines=len(others) + 1,
            changed={one: _state_of(joined.held[one]) for one in changed if one in joined.held},
        )

    async def drain(self, ticket: Ticket, *, is_drained: bool) -> None:
        """Let the node take nothing new, from any engine, or again."""
        self._of(ticket)
        if is_drained:
            self._drained.touch()
        else:
            self._drained.unlink(missing_ok=True)
        for joined in self._joined.values():
            joined.on_change()

    # -- images ----------------------------------------------------------------------------

    async def find_image(self, ticket: Ticket, image: str) -> str:
        """Look for an image, and return its digest; reports show it from then on. Raises
        SandboxUnavailable.
        """
        joined = self._of(ticket)
        facts = await joined.wall.facts_of(image)
        joined.on_change()
        return str(facts["image_digest"])

    async def look_again(self, ticket: Ticket) -> None:
        """Query Docker again."""
        joined = self._of(ticket)
        await joined.wall.look_again()
        joined.on_change()

    async def with_packages(
        self, ticket: Ticket, image: str, packages: tuple[str, ...], principal_id: str
    ) -> tuple[str, str]:
        """Return the name of an image with packages, and their lock. Raises as the wall's."""
        wall = self._of(ticket).wall
        name = await wall.with_packages(image, packages, principal_id)
        return name, wall.lock_text(name)

    async def save_image(self, ticket: Ticket, transfer: str, image: str) -> int:
        """Save an image for another node, in a file; return the number of its pieces."""
        joined = self._of(ticket)
        file = joined.transfers[transfer] = tempfile.TemporaryFile()  # noqa: SIM115
        await joined.wall.save_image(image, file)
        size = file.tell()
        file.seek(0)
        return -(-size // PIECE_BYTES)

    async def read_image(self, ticket: Ticket, transfer: str) -> bytes:
        """Return the next piece of a saved image."""
        file = self._transfer(ticket, transfer)
        return await anyio.to_thread.run_sync(file.read, PIECE_BYTES)

    async def write_image(self, ticket: Ticket, transfer: str, piece: bytes) -> None:
        """Add a piece to an image of another node."""
        transfers = self._of(ticket).transfers
        if transfer not in transfers:
            transfers[transfer] = tempfile.TemporaryFile()  # noqa: SIM115
        await anyio.to_thread.run_sync(transfers[transfer].write, piece)

    async def load_image(self, ticket: Ticket, transfer: str) -> None:
        """Load an image whose pieces were written. Raises SandboxUnavailable."""
        file = self._transfer(ticket, transfer)
        file.seek(0)
        await self._of(ticket).wall.load_image(file)
        await self.look_again(ticket)

    def end_transfer(self, ticket: Ticket, transfer: str) -> None:
        """Remove the file of an image."""
        file = self._of(ticket).transfers.pop(transfer, None)
        if file is not None:
            file.close()

    def _transfer(self, ticket: Ticket, transfer: str) -> IO[bytes]:
        file = self._of(ticket).transfers.get(transfer)
        if file is None:
            raise try_later("The image is not on its way any more.")
        return file

    # -- runs ------------------------------------------------------------------------------

    async def run(self, ticket: Ticket, order: RunOrder) -> list[RunEvent]:
        """Run a program, and return its first events. `more` returns the next ones, until one is
        `ending` or `refused`.
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
        """Wait for more events of a run."""
        joined = self._of(ticket)
        run = joined.runs.get(run_id)
        if run is None:
            raise try_later("The node does not know this run any more.")
        piece = await run.events.next()
        if piece[-1][0] in LAST:
            joined.runs.pop(run_id, None)
        return piece

    def cancel(self, ticket: Ticket, run_id: str) -> None:
        """End a run; its stream ends with its ending."""
        joined = self._of(ticket)
        run = joined.runs.get(run_id)
        if run is not None:
            run.task.cancel()
        else:
            remember(joined.cancelled, run_id, None)

    def tell(self, ticket: Ticket, run_id: str, number: int, name: str, *values: Any) -> None:
        """Tell a run something, in the order of the numbers: Ray does not keep that of calls."""
        run = self._of(ticket).runs.get(run_id)
        if run is None:
            return
        run.early[number] = name, values
        while (next_one := run.early.pop(run.told, None)) is not None:
            run.told += 1
            name, values = next_one
            getattr(run, name)(*values)

    async def dial(self, ticket: Ticket, run_id: str, address: str, port: int) -> int:
        """Connect to an address for the engine's gateway, and return the connection's number.

        Raises:
            NetworkError: it cannot be reached.
        """
        run = self._of(ticket).runs.get(run_id)
        if run is None or len(run.dialled) + run.dialling >= MAX_CONNECTIONS:
            raise NetworkError("The program has ended, or has too many connections.")
        run.dialling += 1
        try:
            with anyio.fail_after(DIAL_S):
                stream = await anyio.connect_tcp(address, port)
        except (OSError, TimeoutError):
            raise NetworkError("It cannot be reached from the node.") from None
        finally:
            run.dialling -= 1
        if run.ended is not None:
            self._close_soon(stream)
            raise NetworkError("The program has ended.")
        number = next(self._numbers)
        run.dialled[number] = stream
        return number

    async def connect(self, ticket: Ticket, session_id: str, number: int, port: int) -> None:
        """Connect to a port of a session. The methods for the connections of runs take the
        session's id and this number for it. Raises as the wall's.
        """
        joined = self._of(ticket)
        joined.connecting.add(number)
        try:
            stream = await self._held(ticket, session_id).connect(port)
            if number in joined.connecting:
                joined.ports.setdefault(session_id, {})[number] = stream
            else:  # nobody waits for it any more
                self._close_soon(stream)
        finally:
            joined.connecting.discard(number)

    async def use_dialled(
        self, ticket: Ticket, run_id: str, number: int, operation: str, *arguments: Any
    ) -> Any:
        """Call `receive`, `send` or `send_eof` of a connection. At its end, `receive` returns no
        bytes. Raises NetworkError.
        """
        stream = self._connections(ticket, run_id).get(number)
        if stream is None:
            raise NetworkError("The connection is closed.")
        try:
            return await getattr(stream, operation)(*arguments)
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise NetworkError("The connection broke off.") from None

    def close_dialled(self, ticket: Ticket, run_id: str, number: int) -> None:
        """Close a connection."""
        self._of(ticket).connecting.discard(number)
        stream = self._connections(ticket, run_id).pop(number, None)
        if stream is not None:
            self._close_soon(stream)

    def _connections(self, ticket: Ticket, owner_id: str) -> dict[int, anyio.abc.ByteStream]:
        """The connections of a run, or those to ports of a session."""
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
        packages: tuple[str, ...],
        lock: str,
    ) -> HeldState:
        """Take a container for a session. Raises as the wall's."""
        joined, session_id = self._of(ticket), domain.session_id or ""
        mine = joined.holding[session_id] = object()
        try:
            held = await joined.wall.hold(
                domain, image=image, memory_mb=memory_mb, cpus=cpus, disk_mb=disk_mb,
                packages=packages, lock=lock, on_lost=lambda: joined.on_change(session_id),
            )  # fmt: skip
        finally:
            is_wanted = joined.holding.get(session_id) is mine
            if is_wanted:
                del joined.holding[session_id]
        if not is_wanted:  # nobody waits for it any more
            held.end("nobody waits for it")
            return _state_of(held)
        joined.hold(session_id, held)
        return _state_of(held)

    async def drop(self, ticket: Ticket, session_id: str, why: str) -> None:
        """End the container of a session that the engine does not know, also one in the making."""
        joined = self._of(ticket)
        joined.holding.pop(session_id, None)
        held = joined.held.get(session_id)
        if held is not None:
            held.end(why)
            await self.in_session(ticket, session_id, "until_gone")

    async def resume(self, ticket: Ticket, record: SessionRecord, home: SessionHome) -> HeldState:
        """Take an earlier session's container over, soon, and before its first use."""
        joined = self._of(ticket)
        held = joined.wall.resume(record, home, lambda: joined.on_change(record.id))
        joined.hold(record.id, held)
        return _state_of(held)

    async def in_session(
        self, ticket: Ticket, session_id: str, operation: str, *arguments: Any
    ) -> tuple[Any, HeldState]:
        """Do something with a session's container; return its result and the state afterwards."""
        held = self._held(ticket, session_id)
        result = await getattr(held, operation)(*arguments)
        if operation == "until_gone":
            joined = self._of(ticket)
            if joined.held.get(session_id) is held:  # it may have been restored here meanwhile
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
        """Copy a session's disk; the copy stays until a later `keep_copies` leaves it out."""
        joined, held = self._of(ticket), self._held(ticket, session_id)
        joined.copies.add(copy)
        joined.copies_number = max(joined.copies_number, number)
        async with held.copy_disk(copy) as size:
            return size

    def keep_copies(self, ticket: Ticket, copies: frozenset[str], number: int) -> None:
        """Remove all copies of disks but these, soon, unless something newer was said of copies."""
        joined = self._of(ticket)
        if number < joined.copies_number:
            return
        joined.copies, joined.copies_number = set(copies), number
        joined.wall.sweep_soon()

    async def fork(self, ticket: Ticket, copy: str, session_id: str, home: SessionHome) -> str:
        """Make a new session's disk from a copy. It stays unless `unfork` is called."""
        async with self._of(ticket).wall.fork(copy, session_id, home) as name:
            return name

    async def unfork(self, ticket: Ticket, session_id: str) -> None:
        """Remove the disk of a fork that was not made."""
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
        """Keep an engine's wall open until it leaves, is silent for long, or joins again."""
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

        def on_call(number: int, port: CallPort) -> None:
            joined.runs[order.id].port = port

        def pass_on(
            run_id: int, send: Callable[[bytes], None], port: CallPort, dial: Dial | None = None
        ) -> FrameSink:
            run = joined.runs[order.id]
            run.port = port
            return _Passing(run, send)

        sinks = replace(events.sinks(order, on_call, pass_on), ending=cancelled.append)
        try:
            events.add("ending", await self._ending(joined, order, sinks))
        except EngineError as error:
            events.add("refused", error)
        except asyncio.CancelledError:
            if cancelled and joined.is_over.is_set():  # nobody has cancelled it
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
            wall.add_packages(order.kind.image, order.lock)
        async with wall.lease(
            order.domain, fresh=order.fresh, memory_mb=order.kind.memory_mb, image=order.kind.image
        ) as lease:
            below = wall.images.get(order.kind.image.partition(PLUS)[0])
            found = lease.container.image_id if not order.lock else below and below.id
            if found != order.digest:  # it was built again since the call was placed
                raise try_later(f"The image {order.kind.image} has changed. Repeat the call.")
            return await lease.run(order.program, arguments, limits, sinks)


def _not_yet() -> SandboxUnavailable:
    return try_later("The session's node has only just come back. Repeat the call.")


def _cut_off(joined: _Joined, order: RunOrder) -> RunEnding:
    """Return the ending of a run that was cancelled by its engine, or whose engine is away."""
    isolation = "session" if order.session_id else "call"
    if joined.is_over.is_set():
        return RunEnding(EndedBy.SANDBOX_LOST, isolation, is_node_lost=True)
    return RunEnding(EndedBy.CANCELLED, isolation)


def _state_of(held: HeldContainer) -> HeldState:
    return HeldState(
        held.name, held.languages, held.lock, held.lost, held.is_paused, held.is_stopped,
        held.running,
    )  # fmt: skip
