"""The wall of an engine whose containers are on many machines.

Host side. To the rest of the engine, this wall looks like a wall with containers on the engine's
own machine. The wall reaches each node through a `NodePort`. Invariants: each call is placed once,
by `placing`, and only on a node that has joined, enforces every limit, and has the newest version
of the call's image; a run whose node is lost ends as `sandbox_lost`, never as a success and never
twice; a session stays on its node. The sessions of a lost node are lost if the node does not come
back within `lost_s` seconds.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.abc
import anyio.lowlevel

from fumehood.cluster.model import (
    VERSION,
    HeldState,
    ImageFacts,
    NodeReport,
    RunEvent,
    RunOrder,
    Terms,
    Ticket,
)
from fumehood.cluster.placing import PlacedNode, Placer, PlaceRequest
from fumehood.core.errors import (
    EndedBy,
    EngineError,
    InvalidParams,
    NetworkError,
    ResourceNotFound,
    SandboxUnavailable,
)
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import (
    CONTAINER_MEMORY_CLASSES,
    Grade,
    Limit,
    Limits,
    remember,
    weakest,
)
from fumehood.core.session import SessionHome, SessionRecord, SessionStatus
from fumehood.core.status import NodeRecord, NodeState
from fumehood.core.tasks import start_soon
from fumehood.protocol.framing import FrameError
from fumehood.sandbox.container.additions import PLUS
from fumehood.sandbox.container.pool import Kind
from fumehood.sandbox.streams import Dial, StreamEnd
from fumehood.sandbox.wall import (
    FIRST_EPOCH,
    NO_SINKS,
    HasImages,
    HostSize,
    ImageMissing,
    OnEvent,
    RunEnding,
    RunSinks,
    WallStatus,
    pins_of,
    try_later,
)

LOOK_S = 1.0
"""Seconds between two searches for new nodes."""

AGAIN_S = 5.0
"""Seconds until the engine tries again to join a node that was refused."""

FIRST_JOIN_S = 15.0
"""Seconds after the start during which calls wait for a first node to join."""

RESUME_S = 10.0
"""Maximum seconds that a call to a session waits until the session's node has taken over the
session's container."""

SILENT_S = 10.0
"""Seconds without a report after which a node counts as lost."""

REPORT_PAUSE_S = 0.05
"""Minimum seconds between two reports of a node."""

MAX_SKEW_S = 300.0
"""Maximum difference in seconds between the clocks of a node and the engine."""

JOIN_S = 60.0
"""Timeout in seconds for joining a node. The node first ends what it ran for an earlier start of
the engine."""

CANCEL_S = 6.0
"""Timeout in seconds for a node to end a cancelled run."""

LEAVE_S = 10.0
"""Timeout in seconds for the nodes to end what they run for an engine that stops."""

JOINS = 1_000_000
"""Maximum number of times that one start of an engine can join the same node. The number in a
ticket is the number of the start, multiplied by this value, plus the number of the join."""

COPY_AGAIN_S = 600.0
"""Minimum seconds between two successful copies of the same image to the same node."""

PROMISED = 0.75
"""Maximum fraction of a node's memory that may be promised to its sessions."""


class NodeGone(Exception):
    """A node cannot be reached. The results of its pending commands are unknown."""


class NodePort(Protocol):
    """Calls methods of a node by their names.

    Every asynchronous method may raise NodeGone.
    """

    key: str
    """Identifies the node until the node is restarted."""

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the node, and return its result. `options` are the method's keyword
        arguments.
        """

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the node without waiting for the result."""

    async def pass_piece(self, ticket: Ticket, transfer: str, to: NodePort, its: Ticket) -> None:
        """Pass the next piece of a saved image to the node `to`. `transfer` is the id with which
        the image was saved.

        `ticket` is the ticket for this node, and `its` the ticket for the node `to`.
        """


class Membership(Protocol):
    """Finds the nodes of the cluster."""

    async def ports(self) -> Sequence[NodePort]:
        """Return the nodes that can be reached now.

        The same object is returned for a node until the node is restarted.

        Raises:
            SandboxUnavailable: the cluster cannot be reached now.
        """

    async def close(self) -> None:
        """Disconnect from the cluster."""


@dataclass(eq=False, slots=True)
class _Link:
    """The engine's link to a node that has joined."""

    port: NodePort
    ticket: Ticket
    placed: PlacedNode
    said_slots: int
    """The number of slots with which the node was started. If the node's memory is too small for so
    many slots, the node takes fewer calls."""
    report: NodeReport | None = None
    promised_mb: dict[str, int] = field(default_factory=dict)
    """Session id → promised MB, for the node's sessions that are not stopped."""
    copied: dict[tuple[str, str], float] = field(default_factory=dict)
    """Name and digest of an image → the time, by the monotonic clock, when a copy to this node
    began."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the node is lost, or has been silent for too long."""

    async def unless_gone(self, asked: Coroutine[Any, Any, Any]) -> Any:
        """Await a request to the node and return its result.

        Raises NodeGone as soon as the node is lost.
        """
        answer = asyncio.ensure_future(asked)
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise NodeGone("it is silent")
            return answer.result()
        finally:
            gone.cancel()
            answer.cancel()


class ClusterWall(HasImages):
    """Runs programs in the containers of nodes, while its asynchronous context is open.

    `owner` is the id of the engine's state, and `epoch` the number of the engine's start.
    """

    def __init__(
        self,
        terms: Terms,
        membership: Membership,
        *,
        owner: str,
        epoch: int,
        lost_s: float,
        keeps_sessions: bool,
        open_program: Callable[..., Any],
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        self.keeps_sessions = keeps_sessions
        self.limits = terms.settings.container.limits
        self.open_program = open_program
        """Starts a program that the operator configured, on the engine's own machine."""
        self._terms = terms
        self._by_language: dict[str, str] = terms.settings.container.images.model_dump()
        self._membership = membership
        self._numbers = 0
        self._owner = owner
        self._epoch = epoch
        self._lost_s = lost_s
        self._on_event = on_event
        self._placer = Placer()
        self._links: dict[str, _Link] = {}
        """Node id → the node."""
        self._names: dict[str, str] = {}
        """Node id → name, of the nodes that have joined and of the lost nodes."""
        self._refused: dict[str, tuple[str, str]] = {}
        """Key of a node → its name, if known, and why it was refused."""
        self._joins: dict[str, int] = {}
        self._held: dict[str, RemoteContainer] = {}
        """Session id → the container of the session."""
        self._expected: dict[str, tuple[SessionRecord, SessionHome]] = {}
        """Session id → record and home of an earlier engine's session, until `resume`."""
        self._waits: dict[str, object] = {}
        """Node id → the latest wait for a node that is lost or has not joined yet."""
        self._copies: Callable[[], Iterable[str]] = tuple
        self._copying: set[str] = set()
        """Ids of the disk copies that are being made."""
        self._locks: OrderedDict[str, str] = OrderedDict()
        """Name of an image with additions → its lock."""
        self._newest: dict[str, ImageFacts] | None = None
        """The last result of `_images`, or None if the nodes or their images have changed since."""
        self._away: str | None = None
        """Why the cluster cannot be reached, or None if it can be reached."""
        self._hopes_until = 0.0
        self._has_come = anyio.Event()
        self._syncing: set[tuple[str, str]] = set()
        self._group: anyio.abc.TaskGroup | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ClusterWall:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(self._group.cancel_scope.cancel)
        self._hopes_until = time.monotonic() + FIRST_JOIN_S
        self._group.start_soon(self._follow)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._group = None  # from here on no node joins again
        try:
            with anyio.move_on_after(LEAVE_S, shield=True):
                async with anyio.create_task_group() as group:
                    for link in self._links.values():
                        leaving = link.port.call("leave", link.ticket)
                        group.start_soon(self._guarded, self._quietly, leaving)
        finally:
            try:
                await self._stack.aclose()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._membership.close()

    # -- for the operator --------------------------------------------------------------------

    def nodes(self) -> list[NodeRecord]:
        """Return all nodes: those that have joined, were refused, or cannot be reached."""
        found = [_record(link) for link in self._links.values()]
        for name, why in self._refused.values():
            found.append(NodeRecord(name=name, state=NodeState.REFUSED, why=why))
        # A machine that is back with an empty directory has its old name and a new id.
        gone = set(self._names.values()) - {node.name for node in found}
        found += [
            NodeRecord(name=name, state=NodeState.GONE, why="The node is lost.") for name in gone
        ]
        for node_id in self._waits:
            if self.is_away(node_id) and node_id not in self._names:
                found.append(NodeRecord(name=node_id, state=NodeState.GONE, why=_NEVER_CAME))
        return sorted(found, key=lambda record: record.name)

    async def drain(self, name: str, *, is_drained: bool) -> NodeRecord:
        """If `is_drained` is True, drain a node, so that it takes no new calls or sessions.
        Otherwise, let the node take calls and sessions again. Return the node's new state.

        `name` is the node's name or id.

        Raises:
            ResourceNotFound: no such node has joined.
            InvalidParams: several nodes have this name.
            SandboxUnavailable: the node was lost.
        """
        called = [
            joined
            for joined in self._links.values()
            if name in (joined.placed.name, joined.placed.id)
        ]
        if len(called) > 1:
            ids = " or ".join(link.placed.id for link in called)
            raise InvalidParams(f"Several nodes have this name: use {ids}.", fields=["node"])
        link = called[0] if called else None
        if link is None or link.report is None:
            raise ResourceNotFound("No such node has joined.", fields=["node"])
        await self._ask(link, "drain", is_drained=is_drained)
        link.report = replace(link.report, is_drained=is_drained)
        self._place(link)
        return _record(link)

    # -- the wall ----------------------------------------------------------------------------

    @property
    def status(self) -> WallStatus:
        """The wall's status. The wall is ready if at least one node is ready."""
        required = frozenset(Limit)
        ready = [report for report in self._reports if report.is_ready]
        faults = [fault for report in self._reports for fault in report.faults]
        remedy = ""
        if not ready:
            away = self._away or "no node has joined"
            # The reason may name paths of the node's machine, which callers must not see.
            refused = ["nodes were refused (see fumehood nodes list)"] if self._refused else []
            words = "; ".join(reason.rstrip(".") for reason in [*faults, *refused, away])
            remedy = f"No node can be used: {words}."
            faults += [f"{name}: {why}" for name, why in self._refused.values()]
            faults.append(away)
        # Right after the start, calls wait, because nodes need a moment to join.
        is_usable = bool(ready) or self._is_hopeful
        return WallStatus(
            required,
            required if is_usable else frozenset(),
            frozenset.intersection(*(report.seen for report in ready)) if ready else frozenset(),
            is_ready=bool(ready),
            grade=weakest(report.grade for report in ready),
            faults=() if ready else tuple(faults),
            remedy=remedy,
            missing_images=tuple(
                f"No node has the image {name}."
                for name in dict.fromkeys(self._by_language.values())
                if ready and name not in self._images()
            ),
        )

    @property
    def _reports(self) -> list[NodeReport]:
        return [link.report for link in self._links.values() if link.report is not None]

    @property
    def _is_hopeful(self) -> bool:
        return self._away is None and time.monotonic() < self._hopes_until

    @property
    def counts(self) -> JsonObject:
        """The number of containers on all nodes by state, and the number of waiting calls."""
        counts: JsonObject = {}
        for report in self._reports:
            for name, count in report.counts.items():
                counts[name] = counts.get(name, 0) + count
        return {**counts, "waiting": len(self._placer.queue)}

    async def until_host_is_known(self) -> None:
        """Wait until a node has reported its size. Raises SandboxUnavailable if this takes too
        long.
        """
        with anyio.move_on_after(self._terms.settings.container.queue_seconds):
            while not self.host.memory_mb:
                await self._until_change()
            return
        raise try_later(self.status.remedy)

    @property
    def host(self) -> HostSize:
        """The memory of all nodes together, and the processors of the largest node.

        Without nodes, both are zero.
        """
        sizes = [report.host for report in self._reports]
        return HostSize(
            sum(size.memory_mb for size in sizes), max((size.cpus for size in sizes), default=0)
        )

    def image_for(self, language: str) -> str:
        """Return the name of the image for programs in a language.

        Raises:
            ImageMissing: no node has the image.
            SandboxUnavailable: the image does not have the language.
        """
        name = self._by_language[language]
        found = self._images().get(name)
        if found is None and self.status.is_ready and not self._is_hopeful:
            raise _image_missing(name)
        if found is not None and language not in found.languages:
            raise SandboxUnavailable(
                f"The image {name} has no {language}. Set container.images.{language} to an image "
                "that has it.",
                retryable=False,
            )
        return name

    async def look_again(self) -> None:
        """Let all nodes query their current images and limits again."""
        await self._ask_all("look_again")

    async def facts_of(self, image: str) -> JsonObject:
        """Return an image's name, digest and runtime and, if the image has additions, the added
        packages.

        The digest is always that of the image without additions.
        """
        below, plus, _ = image.partition(PLUS)
        found = await self._find(below)
        lock = self._locks.get(image, "")
        return {
            "image": image,
            # Each node builds its own image with the additions, so there is no common digest of it.
            "image_digest": found.id,
            "runtime": self._terms.settings.container.runtime or "default",
            **({"packages": list(pins_of(lock))} if plus else {}),
        }

    async def with_additions(self, image: str, wanted: Sequence[str], principal_id: str) -> str:
        """Return the name of the image that consists of `image` and the additions `wanted`, such as
        package names.

        One node determines what exactly is added, and returns this as a text, the lock. Other nodes
        make the same image from this lock.
        """
        await self._find(image)
        link = next((link for link in self._links.values() if image in link.placed.images), None)
        if link is None:  # the image's node is lost, or no longer ready
            raise try_later(f"No node has the image {image} now. Repeat the call.")
        name, lock = await self._ask(link, "with_additions", image, tuple(wanted), principal_id)
        remember(self._locks, name, lock)
        return str(name)

    @asynccontextmanager
    async def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        image: str | None = None,
    ) -> AsyncIterator[NodeLease]:
        """Wait a bounded time for a slot on a node, and yield a lease. The slot is freed at the end
        of the context.

        If `fresh` is True, nothing has run in the container before.

        Raises:
            SandboxUnavailable: no slot was free in time, too many calls wait, or no node has the
                image.
        """
        asked = time.monotonic()
        image = image or self._by_language["python"]
        memory_mb = memory_mb or self.limits.default_memory_mb or CONTAINER_MEMORY_CLASSES[0]
        below = image.partition(PLUS)[0]
        await self._find(below)
        granted = asyncio.Event()
        request = PlaceRequest(domain, Kind(below, memory_mb), fresh, granted.set)
        if not self._placer.ask(request):
            raise try_later("Too many calls wait for a node. Repeat the call later.")
        queue_s = self._terms.settings.container.queue_seconds
        try:
            with anyio.fail_after(queue_s):
                await granted.wait()
        except BaseException as error:
            self._placer.forget(request)
            if request.node is not None:
                self._placer.give_back(request)
            if isinstance(error, TimeoutError):
                waited = f"No node had a free slot for {queue_s:g} s. Repeat the call later."
                raise try_later(waited) from None
            raise
        assert request.node is not None
        try:
            order = RunOrder(
                "", "", {}, _NO_LIMITS, domain, fresh=fresh, kind=Kind(image, memory_mb),
                digest=request.node.images.get(below, ""), lock=self._locks.get(image, ""),
            )  # fmt: skip
            yield NodeLease(self, request.node.id, order, (time.monotonic() - asked) * 1e3)
        finally:
            self._placer.give_back(request)

    async def run(self, node_id: str, order: RunOrder, sinks: RunSinks) -> RunEnding:
        """Run a program on a node, and return how the run ended. If this task is cancelled, the
        program is ended before CancelledError is raised.

        Raises:
            SandboxUnavailable: the node cannot be reached, so the program has not started.
            EngineError: the node refused the run.
        """
        isolation = "session" if order.session_id else "call"
        link = self._links.get(node_id)
        name = self._names.get(node_id)
        if link is None:  # so the program has certainly not started
            raise self._unreachable(node_id)
        wants = {sink for sink in ("progress", "files", "output") if getattr(sinks, sink)}
        order = replace(
            order, id=secrets.token_hex(8), wants=frozenset(wants), is_live=sinks.is_live,
            streams=tuple(stream.kind for stream in sinks.streams), trial=sinks.trial,
        )  # fmt: skip
        receiver = _Receiver(link, order, sinks)
        reading = asyncio.ensure_future(link.unless_gone(receiver.read()))
        try:
            ending: RunEnding = await asyncio.shield(reading)
        except asyncio.CancelledError:
            receiver.is_mute = True
            last = None
            with anyio.move_on_after(CANCEL_S, shield=True), suppress(NodeGone, EngineError):
                link.port.tell("cancel", link.ticket, order.id)
                last = await asyncio.shield(reading)
            reading.cancel()
            if sinks.ending is not None:
                last = last or RunEnding(EndedBy.CANCELLED, isolation)
                sinks.ending(replace(last, node=name))
            raise
        except NodeGone as error:
            self._on_event("node.lost_run", {"node": name, "why": str(error)})
            return RunEnding(EndedBy.SANDBOX_LOST, isolation, node=name, is_node_lost=True)
        finally:
            receiver.close()
        return replace(ending, node=name)

    # -- sessions ----------------------------------------------------------------------------

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
    ) -> RemoteContainer:
        """Take a container for the session of `domain`. The container is on the node that has
        promised the smallest fraction of its memory to sessions.

        `lock` is a text that fixes what exactly the `additions` add to the image. `on_lost` is
        called when the container is lost or stopped.

        Raises:
            SandboxUnavailable: no node has the image or enough memory, or the node was lost.
        """
        await self._find(image)
        session_id = domain.session_id or ""
        link = self._roomiest(image, memory_mb)
        link.promised_mb[session_id] = memory_mb
        try:
            state = await self._ask(
                link, "hold", domain, image=image, memory_mb=memory_mb, cpus=cpus,
                disk_mb=disk_mb, additions=tuple(additions), lock=lock,
            )  # fmt: skip
        except BaseException:  # the node may have created the container
            link.promised_mb.pop(session_id, None)
            link.port.tell("drop", link.ticket, session_id, "it is no longer wanted")
            raise
        record = SessionRecord.model_construct(
            id=session_id, image=image, memory_mb=memory_mb, cpus=cpus, disk_mb=disk_mb,
            languages=state.languages, state=SessionStatus.ACTIVE,
        )  # fmt: skip
        held = RemoteContainer(self, link.placed.id, record, FIRST_EPOCH, state, on_lost)
        held.is_known.set()
        self._held[session_id] = held
        return held

    def _roomiest(self, image: str, memory_mb: int) -> _Link:
        def promised(link: _Link) -> float:
            assert link.report is not None
            size = max(link.report.host.memory_mb, 1)
            return (sum(link.promised_mb.values()) + memory_mb) / size

        fitting = [
            link
            for link in self._links.values()
            if link.placed.is_open and image in link.placed.images and promised(link) <= PROMISED
        ]
        if not fitting:
            raise try_later(f"No node has room for a session of {memory_mb} MB.")
        return min(fitting, key=promised)

    def spare_copies(self, copies: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the ids of the disk copies to keep."""
        self._copies = copies

    @property
    def _needed(self) -> frozenset[str]:
        return frozenset(self._copies()) | self._copying

    def sweep_soon(self) -> None:
        """Let the nodes delete disk copies that are no longer needed."""
        needed, number = self._needed, self.next_number()
        for node_id in self._links:
            self.tell(node_id, "keep_copies", needed, number)

    def next_number(self) -> int:
        """Return a number for a command about disk copies or for a connection.

        Nodes use the numbers to recognize commands that arrive late.
        """
        self._numbers += 1
        return self._numbers

    @asynccontextmanager
    async def copied(self, copy: str) -> AsyncIterator[None]:
        """Keep the disk copy `copy` during the block. Afterwards, the copy is deleted unless it is
        still needed.
        """
        self._copying.add(copy)
        try:
            yield
        finally:
            self._copying.discard(copy)
            self.sweep_soon()

    @asynccontextmanager
    async def fork(self, copy: str, session_id: str, home: SessionHome) -> AsyncIterator[str]:
        """Create the disk of a new session from a copy, on the copy's node. Yield the disk's name.
        If the block fails, the disk is deleted.
        """
        try:
            yield await self.ask(home.node, "fork", copy, session_id, home)
        except BaseException:
            self.tell(home.node, "unfork", session_id)
            raise

    def expect(self, record: SessionRecord, home: SessionHome) -> None:
        """Announce a session that an earlier engine process left. Call this before `resume` is
        called for the session.

        If the session's node joins between the two calls, the node then keeps the session's
        container.
        """
        self._expected[record.id] = record, home

    def resume(
        self, record: SessionRecord, home: SessionHome, on_lost: Callable[[], None]
    ) -> RemoteContainer:
        """Return the container of a session. The session either was left by an earlier engine
        process, or is a new fork.

        The session's node takes over the container in the background, as soon as the node has
        joined. `on_lost` is called when the container is lost or stopped.
        """
        state = HeldState(
            home.container,
            record.languages,
            home.lock,
            None,
            record.state is SessionStatus.PAUSED,
            record.state is SessionStatus.STOPPED,
        )
        held = RemoteContainer(self, home.node, record, home.epoch, state, on_lost)
        self._expected.pop(record.id, None)
        self._held[record.id] = held
        link = self._links.get(home.node)
        if link is not None:
            self._start_soon(self._quietly, self._resume(link, held))
        else:
            self._wait_for(home.node)
        return held

    def let_go(self, held: RemoteContainer) -> None:
        """Forget the container of a session that has ended."""
        other = self._held.get(held.session_id)
        if other is held:
            del self._held[held.session_id]
        link = self._links.get(held.node)
        if link is not None and (other in (None, held) or other.node != held.node):
            link.promised_mb.pop(held.session_id, None)
        self.sweep_soon()

    def is_away(self, node_id: str) -> bool:
        """Return whether a node is lost, or did not join in time after the engine's start."""
        return node_id not in self._links and (
            node_id in self._names or time.monotonic() >= self._hopes_until
        )

    def count(self, held: RemoteContainer) -> None:
        """Update the record of the memory that the node of the container `held` has promised to
        sessions.

        The caller must call this after the container's state has changed. A stopped or lost
        container needs no memory.
        """
        link = self._links.get(held.node)
        if link is None:
            return
        if held.is_stopped or held.lost is not None:
            link.promised_mb.pop(held.session_id, None)
        else:
            link.promised_mb[held.session_id] = held.record.memory_mb

    async def until_known(self, held: RemoteContainer) -> None:
        """Wait a bounded time until the container's node has taken over the container.

        Raises:
            SandboxUnavailable: the node cannot be reached, or takes too long.
        """
        if held.is_known.is_set():
            return
        if held.node in self._links:
            with anyio.move_on_after(RESUME_S):
                await held.is_known.wait()
                return
        raise self._unreachable(held.node)

    def _unreachable(self, node_id: str) -> SandboxUnavailable:
        name = self._names.get(node_id, "of the session")
        return try_later(f"The node {name} cannot be reached. Repeat the call later.")

    async def ask(self, node_id: str, method: str, *arguments: Any) -> Any:
        """Call a method of a node and return its result.

        Raises:
            SandboxUnavailable: the node cannot be reached, or was lost meanwhile.
        """
        link = self._links.get(node_id)
        if link is None:
            raise self._unreachable(node_id)
        return await self._ask(link, method, *arguments)

    def tell(self, node_id: str, method: str, *arguments: Any) -> None:
        """Call a method of a node without waiting for its result. If the node cannot be reached, do
        nothing.
        """
        link = self._links.get(node_id)
        if link is not None:
            link.port.tell(method, link.ticket, *arguments)

    async def _ask(self, link: _Link, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            asked = link.port.call(method, link.ticket, *arguments, **options)
            return await link.unless_gone(asked)
        except NodeGone:
            raise try_later(
                f"The node {link.placed.name} was lost. The request may or may not have been done."
            ) from None

    # -- joining -----------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Search for new nodes and join them, until this wall is closed."""
        await anyio.lowlevel.checkpoint()  # sessions are resumed first
        known: set[str] = set()
        while self._group is not None:
            try:
                ports = await self._membership.ports()
                self._away = None
                for key in self._refused.keys() - {port.key for port in ports}:
                    del self._refused[key]
            except Exception as error:  # whatever Ray does, the engine continues
                why = error.message if isinstance(error, EngineError) else type(error).__name__
                if self._away is None:
                    self._on_event("cluster.unavailable", {"why": why})
                self._away = why.rstrip(".")
                ports = []
                await anyio.sleep(AGAIN_S)
            for port in ports:
                if port.key not in known and self._group is not None:
                    known.add(port.key)
                    self._group.start_soon(self._serve, port, known)
            await anyio.sleep(LOOK_S)

    async def _serve(self, port: NodePort, known: set[str]) -> None:
        """Join a node, and follow the node's reports until the node is lost."""
        label, link = port.key[:12], None
        try:
            facts = await _in_time(port.call("facts"), SILENT_S)
            label = facts["name"]
            why = _why_refused(facts["version"], facts["clock"])
            if why is not None:
                return self._refuse(port.key, label, why)
            link = await self._join(port, facts["id"], facts["name"], facts["slots"])
            self._refused.pop(port.key, None)
            await self._follow_reports(link)
        except Exception as error:  # whatever a node does, the engine and other nodes continue
            is_known = isinstance(error, NodeGone | EngineError)
            why = str(error) if is_known else type(error).__name__
            if link is None:
                self._refuse(port.key, label, f"it does not answer: {why}")
            elif self._group is not None:
                self._on_event("node.lost", {"node": label, "why": why})
        finally:
            if link is not None:
                self._on_gone(link)
            await anyio.sleep(AGAIN_S if link is None else LOOK_S)
            known.discard(port.key)

    def _refuse(self, key: str, label: str, why: str) -> None:
        if self._refused.get(key) != (label, why):
            self._on_event("node.refused", {"node": label, "why": why})
        self._refused[key] = label, why

    async def _join(self, port: NodePort, node_id: str, name: str, slots: int) -> _Link:
        """Join a node, and let the node take over its sessions."""
        join = self._joins[node_id] = self._joins.get(node_id, 0) + 1
        ticket = Ticket(self._owner, self._epoch * JOINS + join)
        containers = self._sessions_of(node_id)
        expected = [pair for pair in self._expected.values() if pair[1].node == node_id]
        terms = replace(
            self._terms,
            sessions=(*(held.stored() for held in containers), *expected),
            copies=self._needed,
        )
        await _in_time(port.call("join", ticket, terms), JOIN_S)
        before = self._links.get(node_id)
        if before is not None:  # the loss of the earlier link was not noticed
            self._on_gone(before)
        link = _Link(port, ticket, PlacedNode(node_id, name, 0, {}, is_open=False), slots)
        self._links[node_id], self._names[node_id] = link, name
        self._newest = None
        try:
            # Include the sessions that were resumed or ended meanwhile.
            containers = list(dict.fromkeys((*containers, *self._sessions_of(node_id))))
            for held in containers:
                await _in_time(self._resume(link, held), SILENT_S)
        except BaseException:
            self._on_gone(link)
            raise
        self._waits.pop(node_id, None)
        self._on_event("node.joined", {"node": name, "slots": slots, "sessions": len(containers)})
        return link

    def _sessions_of(self, node_id: str) -> list[RemoteContainer]:
        return [held for held in self._held.values() if held.node == node_id and held.lost is None]

    async def _resume(self, link: _Link, held: RemoteContainer) -> None:
        record, home = held.stored(self._joins[link.placed.id])
        held.apply(await self._ask(link, "resume", record, home))
        if held.lost is not None:  # the session ended before its node had taken it over
            link.port.tell("drop", link.ticket, held.session_id, "its session has ended")
            return
        held.is_known.set()
        self.count(held)

    async def _follow_reports(self, link: _Link) -> None:
        seen = -1
        while True:
            before = link.report
            asked = link.port.call("report", link.ticket, seen)
            report = link.report = await _in_time(asked, SILENT_S)
            if before is None or _offer(before) != _offer(report):
                self._newest = None
            seen = report.number
            for session_id, state in report.changed.items():
                held = self._held.get(session_id)
                if held is not None and held.node == link.placed.id:
                    held.apply(state)
            self._place(link)
            self._has_come.set()
            self._has_come = anyio.Event()
            await anyio.sleep(REPORT_PAUSE_S)

    def _place(self, link: _Link) -> None:
        """Pass a node's latest report to the placement of calls."""
        report, placed = link.report, link.placed
        if report is None or self._links.get(placed.id) is not link:
            return  # a late report of a node that is lost or has joined again
        newest = self._images()
        placed.images = {
            name: image.id
            for name, image in report.images.items()
            if newest.get(name) is not None and newest[name].id == image.id
        }
        placed.warm.clear()
        placed.warm.update(report.warm)
        placed.slots = min(link.said_slots, report.host.memory_mb // CONTAINER_MEMORY_CLASSES[0])
        placed.others, placed.engines = report.others, report.engines
        placed.is_open = report.is_ready and not report.is_drained
        self._placer.put(placed)
        for name in newest:
            if name not in placed.images and PLUS not in name:
                self._pass_on(name, link)

    def _on_gone(self, link: _Link) -> None:
        node_id = link.placed.id
        link.gone.set()
        if self._links.get(node_id) is not link:
            return
        del self._links[node_id]
        self._newest = None
        self._placer.drop(node_id)
        for held in self._held.values():
            if held.node == node_id:
                held.is_known.clear()
        self._forget(link)
        for other in self._links.values():
            self._place(other)  # the lost node may have had the newest image
        self._wait_for(node_id)

    def _forget(self, lost: _Link) -> None:
        """Remove a lost node from the list of nodes, if the node was drained when it was lost, and
        has no sessions.
        """
        node_id = lost.placed.id
        is_drained = lost.report is not None and lost.report.is_drained
        if is_drained and all(held.node != node_id for held in self._held.values()):
            del self._names[node_id]

    def _wait_for(self, node_id: str) -> None:
        """Start a task that waits for a lost node to come back. If the node does not come back in
        time, the task declares the node's sessions lost.
        """
        if node_id not in self._waits:
            wait = self._waits[node_id] = object()
            self._start_soon(self._give_up, node_id, wait)

    async def _give_up(self, node_id: str, wait: object) -> None:
        await anyio.sleep(self._lost_s)
        if self._waits.get(node_id) is not wait:  # the node was back, and may be lost again
            return
        del self._waits[node_id]
        for held in [container for container in self._held.values() if container.node == node_id]:
            held.lose(f"its node {self._names.get(node_id, node_id)} is lost")

    # -- images ------------------------------------------------------------------------------

    def _images(self) -> dict[str, ImageFacts]:
        """Return the newest image of each name among all ready nodes.

        The result is cached, because every call and every report uses it.
        """
        if self._newest is not None:
            return self._newest
        newest = self._newest = {}
        for report in self._reports:
            if report.is_ready:
                for name, image in report.images.items():
                    if name not in newest or image.created > newest[name].created:
                        newest[name] = image
        return newest

    async def _find(self, image: str) -> ImageFacts:
        """Return the newest image of a name. If no node has such an image, wait a bounded time for
        a node that does.

        Raises:
            SandboxUnavailable: no node has the image, or no node is ready.
        """
        found = self._images().get(image)
        if found is None:
            with anyio.move_on_after(self._terms.settings.container.queue_seconds):
                while not self.status.is_ready and self._is_hopeful:
                    await self._until_change()
            if await self._ask_all("find_image", image):
                with anyio.move_on_after(2 * LOOK_S):
                    while (found := self._images().get(image)) is None:
                        await self._until_change()
        if found is None:
            if not self.status.is_ready:
                raise try_later(f"Containers are unavailable; nothing ran. {self.status.remedy}")
            raise _image_missing(image)
        return found

    def _pass_on(self, image: str, to: _Link) -> None:
        """Copy the newest image with this name from another node to the node `to`, in the
        background.
        """
        key = (to.placed.id, image)
        source = next((link for link in self._links.values() if image in link.placed.images), None)
        if source is None or key in self._syncing or self._group is None:
            return
        # Different Docker image stores give one image two digests. Then no copy would ever help.
        copy = image, source.placed.images[image]
        if time.monotonic() >= to.copied.get(copy, -math.inf) + COPY_AGAIN_S:
            to.copied[copy] = time.monotonic()
            self._syncing.add(key)
            self._start_soon(self._copy, image, source, to)

    async def _copy(self, image: str, source: _Link, to: _Link) -> None:
        transfer = secrets.token_hex(8)
        values: JsonObject = {"image": image, "from": source.placed.name, "to": to.placed.name}
        try:
            if await self._has(to, image, source.placed.images.get(image)):
                return
            saving = source.port.call("save_image", source.ticket, transfer, image)
            for _ in range(await source.unless_gone(saving)):
                piece = source.port.pass_piece(source.ticket, transfer, to.port, to.ticket)
                await source.unless_gone(to.unless_gone(piece))
            await to.unless_gone(to.port.call("load_image", to.ticket, transfer))
            self._on_event("node.image_copied", values)
        except (NodeGone, EngineError) as error:
            self._on_event("node.image_not_copied", {**values, "why": str(error)})
            to.copied.clear()
            await anyio.sleep(AGAIN_S)
        finally:
            for link in (source, to):
                link.port.tell("end_transfer", link.ticket, transfer)
            self._syncing.discard((to.placed.id, image))

    async def _has(self, link: _Link, image: str, digest: str | None) -> bool:
        """Return whether the node has the image with this digest, even if its reports do not
        include the image yet.
        """
        with suppress(EngineError):
            found = await link.unless_gone(link.port.call("find_image", link.ticket, image))
            return bool(found == digest)
        return False

    # -- inside ------------------------------------------------------------------------------

    async def _until_change(self) -> None:
        with anyio.move_on_after(LOOK_S):
            await self._has_come.wait()

    async def _ask_all(self, method: str, *arguments: Any) -> int:
        """Call a method of all nodes. Return the number of nodes on which it succeeded."""
        links = list(self._links.values())
        asked = [self._quietly(self._ask(link, method, *arguments)) for link in links]
        return sum(await asyncio.gather(*asked))

    async def _quietly(self, asked: Coroutine[Any, Any, Any]) -> bool:
        with suppress(EngineError, NodeGone):
            await asked
            return True
        return False

    def _start_soon(self, task: Callable[..., Any], *arguments: object) -> None:
        if self._group is not None:
            start_soon(self._group, self._guarded, task, *arguments)

    async def _guarded(self, task: Callable[..., Any], *arguments: object) -> None:
        """Call `task` with the arguments and await the result. If `task` raises an exception, log
        the exception, which would otherwise end the engine.
        """
        try:
            await task(*arguments)
        except Exception as error:
            self._on_event("cluster.failed", {"why": repr(error)[:200]})


@dataclass(frozen=True, slots=True)
class NodeLease:
    """A lease on a slot of a node, for one run."""

    wall: ClusterWall
    node_id: str
    order: RunOrder
    queue_ms: float

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program on the lease's node."""
        order = replace(self.order, program=program, arguments=arguments, limits=limits)
        ending = await self.wall.run(self.node_id, order, sinks)
        isolation = "container_per_call" if order.fresh else "call"
        return replace(ending, isolation=isolation)


class RemoteContainer:
    """The container of a session on a node, in the state that the node reported last."""

    def __init__(
        self,
        wall: ClusterWall,
        node: str,
        record: SessionRecord,
        epoch: int,
        state: HeldState,
        on_lost: Callable[[], None],
    ) -> None:
        self._wall = wall
        self.node = node
        self.record = record
        self.session_id = record.id
        self._epoch = epoch
        self._state = state
        self._on_lost = on_lost
        self.is_known = asyncio.Event()
        """Set once the node has taken over the container, until the node is lost."""

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def languages(self) -> tuple[str, ...]:
        return self._state.languages

    @property
    def lock(self) -> str:
        return self._state.lock

    @property
    def lost(self) -> str | None:
        return self._state.lost

    @property
    def grade(self) -> Grade | None:
        return self._state.grade

    @property
    def is_paused(self) -> bool:
        return self._state.is_paused

    @property
    def is_stopped(self) -> bool:
        return self._state.is_stopped

    @property
    def is_away(self) -> bool:
        return self._wall.is_away(self.node)

    def stored(self, join: int = 0) -> tuple[SessionRecord, SessionHome]:
        """Return the session's record and home. The session's node needs both to take over the
        container.

        `join` is the number of times that the engine has joined the node since the engine's start.
        It becomes part of the home's epoch.
        """
        state, now = self._state, SessionStatus.ACTIVE
        if state.is_stopped or state.is_paused:
            now = SessionStatus.STOPPED if state.is_stopped else SessionStatus.PAUSED
        record = self.record.model_copy(update={"state": now, "languages": state.languages})
        # The epoch lets the node tell a newer home from an older one.
        epoch = self._epoch * JOINS + join
        return record, SessionHome(state.name, epoch, 0.0, 0.0, state.lock, self.node)

    def apply(self, state: HeldState) -> None:
        """Store the state that the node has reported. If the container was lost or stopped, inform
        the session.
        """
        if self.lost is not None:
            return
        before, self._state = self._state, state
        self._wall.count(self)
        if state.lost is not None or (state.is_stopped and not before.is_stopped):
            self._on_lost()

    def lose(self, why: str) -> None:
        """Declare the container lost, for the reason `why`."""
        self.apply(replace(self._state, lost=why, is_stopped=False))

    async def facts(self) -> JsonObject:
        facts: JsonObject = await self._do("facts")
        return facts

    @property
    def running(self) -> int:
        return self._state.running

    async def processes(self, request: JsonObject) -> JsonObject:
        answer: JsonObject = await self._do("processes", request)
        return answer

    async def connect(self, port: int) -> anyio.abc.ByteStream:
        await self._wall.until_known(self)
        number = self._wall.next_number()
        close = partial(self._wall.tell, self.node, "close_dialled", self.session_id, number)
        try:
            await self._wall.ask(self.node, "connect", self.session_id, number, port)
        except BaseException:  # the node may still make the connection
            close()
            raise
        use = partial(self._wall.ask, self.node, "use_dialled", self.session_id, number)
        return _Dialled(use, close)

    async def pause(self) -> None:
        await self._do("pause")

    async def stop(self, unless: Callable[[], bool] = lambda: False) -> None:
        if not unless():
            await self._do("stop")

    async def restore(self, copy: str) -> None:
        await self._do("restore", copy)

    async def until_free(self) -> None:
        """Resume or start the container if it is paused or stopped. Otherwise, do nothing."""
        # There is nothing else to wait for: the node itself ensures before each run that nothing of
        # the previous run is left.
        if self.lost is None and (self.is_paused or self.is_stopped):
            await self._do("until_free")

    @asynccontextmanager
    async def copy_disk(self, copy: str) -> AsyncIterator[int]:
        async with self._wall.copied(copy):
            await self._wall.until_known(self)
            number = self._wall.next_number()
            yield await self._wall.ask(self.node, "copy_disk", self.session_id, copy, number)

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        if self.lost is not None:
            return RunEnding(EndedBy.SANDBOX_LOST, "session")
        await self._wall.until_known(self)
        domain = TrustDomain("", None, self.session_id)
        order = RunOrder("", program, arguments, limits, domain, session_id=self.session_id)
        return await self._wall.run(self.node, order, sinks)

    def end(self, why: str) -> None:
        if self.lost is None:
            self._wall.tell(self.node, "end", self.session_id, why)
            self.lose(why)
        self._wall.let_go(self)

    async def until_gone(self) -> None:
        with suppress(EngineError):
            await self._wall.ask(self.node, "in_session", self.session_id, "until_gone")

    async def _do(self, operation: str, *arguments: Any) -> Any:
        await self._wall.until_known(self)
        asked = self._wall.ask(self.node, "in_session", self.session_id, operation, *arguments)
        result, state = await asked
        self.apply(state)
        return result


class _Receiver:
    """Passes a run's events, which the node sends, to the receivers in `sinks`."""

    def __init__(self, link: _Link, order: RunOrder, sinks: RunSinks) -> None:
        self._link = link
        self._order = order
        files = sinks.files
        self._takers: dict[str, Callable[..., None] | None] = {
            "output": sinks.output,
            "progress": sinks.progress,
            "file": files.start if files is not None else None,
            "data": files.write if files is not None else None,
            "frame": self._take_frame,
        }
        """Name of an event → its receiver, or None if the event is not wanted."""
        self._told = 0
        self.is_mute = False
        """Whether all events except output are dropped from now on."""
        self._streams: dict[str, StreamEnd] = {
            stream.kind.name: stream.open(_Port(self, stream.kind.name)) for stream in sinks.streams
        }

    async def read(self) -> RunEnding:
        """Pass on the run's events until the run has ended. Return the ending.

        Raises:
            NodeGone: the node is lost, or no longer knows the run.
            EngineError: the node refused the run.
        """
        port, ticket, order = self._link.port, self._link.ticket, self._order
        piece: list[RunEvent] = await port.call("run", ticket, order)
        while True:
            for name, *values in piece:
                if name == "ending":
                    ending: RunEnding = values[0]
                    return ending
                if name == "refused":
                    raise values[0]
                self._pass(name, values)
            try:
                piece = await port.call("more", ticket, order.id)
            except (
                SandboxUnavailable
            ) as error:  # the node no longer serves this engine, or has forgotten the run
                raise NodeGone(error.message) from None

    def _pass(self, name: str, values: list[Any]) -> None:
        take = self._takers.get(name)
        if take is None or (self.is_mute and name != "output"):
            return
        try:
            take(*values)
        except Exception:  # a failing receiver is not called again; the run continues
            failed = ("file", "data") if name in ("file", "data") else (name,)
            self._takers.update(dict.fromkeys(failed))

    def _take_frame(self, kind: str, body: bytes) -> None:
        try:
            self._streams[kind].on_frame(body)
        except FrameError as error:  # the guest broke the protocol
            self._streams[kind].close()
            self.tell("refuse", kind, str(error))

    def tell(self, name: str, *values: bytes | bool | str) -> None:
        """Send a message to the run on its node. The run processes all messages in the order of
        sending.
        """
        number, self._told = self._told, self._told + 1
        self._link.port.tell("tell", self._link.ticket, self._order.id, number, name, *values)

    async def dial(self, address: str, port: int) -> anyio.abc.ByteStream:
        """Connect to an address from the run's node, and return the connection.

        Raises:
            EngineError: the node is lost, or refused or failed to make the connection.
        """
        node, ticket, run_id = self._link.port, self._link.ticket, self._order.id
        try:
            number = await node.call("dial", ticket, run_id, address, port)
        except NodeGone:
            raise NetworkError("The node is lost.") from None
        return _Dialled(
            partial(node.call, "use_dialled", ticket, run_id, number),
            partial(node.tell, "close_dialled", ticket, run_id, number),
        )

    def close(self) -> None:
        """Close the streams, because the run has ended."""
        for end in self._streams.values():
            end.close()


@dataclass(frozen=True, slots=True)
class _Port:
    """Implements `StreamPort` for one stream of a run on a node."""

    receiver: _Receiver
    kind: str

    @property
    def dial(self) -> Dial:
        return self.receiver.dial

    def send(self, body: bytes) -> None:
        self.receiver.tell("frame", self.kind, body)

    def pause(self, *, is_paused: bool) -> None:
        self.receiver.tell("pause", self.kind, is_paused)

    def refuse(self, why: str) -> None:
        self.receiver.tell("refuse", self.kind, why)


class _Dialled(anyio.abc.ByteStream):
    """A connection that a node opened, either to another host or to a port of a session on the
    node.

    `use` calls `Node.use_dialled`, which raises NodeGone and EngineError. `close` closes the
    connection on the node. The bytes pass through Ray and the node, which can read all that is not
    encrypted.
    """

    def __init__(self, use: Callable[..., Awaitable[Any]], close: Callable[[], None]) -> None:
        self._use = use
        self._close = close
        self._unread = b""
        self._next: asyncio.Future[bytes] | None = None

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return the next bytes. Raises the same errors as anyio's streams."""
        if not self._unread:
            # If this method is cancelled, the next call returns what was read.
            if self._next is None:
                self._next = asyncio.ensure_future(self._do("receive"))
            await asyncio.wait((self._next,))
            piece, self._next = self._next, None
            self._unread = piece.result()
            if not self._unread:
                raise anyio.EndOfStream
        data, self._unread = self._unread[:max_bytes], self._unread[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        """Send bytes. Raises the same errors as anyio's streams."""
        await self._do("send", bytes(item))

    async def send_eof(self) -> None:
        """Signal to the other end that no more bytes will be sent.

        Raises the same errors as anyio's streams.
        """
        await self._do("send_eof")

    async def _do(self, operation: str, *arguments: bytes) -> Any:
        try:
            return await self._use(operation, *arguments)
        except (NodeGone, EngineError):
            raise anyio.BrokenResourceError from None

    async def aclose(self) -> None:
        """Close the connection."""
        if self._next is not None:
            self._next.cancel()
        self._close()
        await anyio.lowlevel.checkpoint()


_NEVER_CAME = (
    "Sessions of an earlier start wait for this node, but it has not joined this cluster. Start it "
    "in this cluster, or start the engine with the previous cluster."
)

_NO_LIMITS = Limits(0, 0, None, 0)


async def _in_time(asked: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """Await a request to a node and return the request's result. Raises NodeGone after
    `seconds`.
    """
    try:
        with anyio.fail_after(seconds):
            return await asked
    except TimeoutError:
        raise NodeGone(f"it has not answered for {seconds:g} s") from None


def _why_refused(its_version: str, clock: float) -> str | None:
    if its_version != VERSION:
        return f"it runs fumehood {its_version}, but the engine runs {VERSION}"
    skew = clock - time.time()
    if abs(skew) > MAX_SKEW_S:
        return f"its clock differs from the engine's by {skew:+.0f} s"
    return None


def _offer(report: NodeReport) -> tuple[bool, dict[str, ImageFacts]]:
    return report.is_ready, report.images


def _image_missing(name: str) -> ImageMissing:
    remedy = f"Build it on one: fumehood images build {name}."
    return ImageMissing.of(name, "is not on any node", remedy)


def _record(link: _Link) -> NodeRecord:
    report, placed = link.report, link.placed
    state, why = NodeState.JOINED, None
    if report is not None and report.is_drained:
        state = NodeState.DRAINED
    elif report is None or not report.is_ready:
        state = NodeState.UNREADY
        why = "; ".join(report.faults if report else ()) or "it has not reported yet"
    elif other := report.images.keys() - placed.images.keys():
        why = f"Outdated images: {', '.join(sorted(other))}."
    elif placed.slots < link.said_slots:
        memory_mb = report.host.memory_mb
        why = f"Its {memory_mb} MB are enough for {placed.slots} of {link.said_slots} slots."
    return NodeRecord(
        name=placed.name,
        state=state,
        why=why,
        id=placed.id,
        slots=placed.slots,
        used=placed.used + placed.others,
        sessions=len(link.promised_mb),
        memory_mb=report.host.memory_mb if report else 0,
        enforced=tuple(sorted(report.seen)) if report else (),
        images={name: image.id for name, image in report.images.items()} if report else {},
    )
