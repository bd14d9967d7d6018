"""The pool of containers: which trust domain owns each container, and which waiting call is served
next.

Host side, between the wall and `container`. Runs only in the event loop, so each change of
`PoolState` is atomic. Invariants: a container serves one trust domain for its whole life; it is
reset between the calls of this domain, and is never passed to another one; it is destroyed if a run
in it did not end, if it is not clean, or if it has reached its limit of uses or age; there are
never more than `pool_max` containers, including those that are being created or removed; a
container that is taken for a session leaves the pool.

The queue of waiting calls is bounded in total, for each principal, and for each trust domain. Turns
alternate between principals, then between the domains of one principal. Within a domain, requests
are served in order. Therefore a principal gains nothing by opening many sessions.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import zip_longest
from typing import Generic, Protocol, TypeVar

import anyio

from fumehood.core.errors import EngineError
from fumehood.core.fair_share import FairShare
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.container.channel import ChannelListener
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.settings import ContainerSettings
from fumehood.sandbox.wall import MAX_WAITING, OnEvent, try_later

TURN_S = 1.0
"""Seconds for which a trust domain may keep a container that other domains need while calls of the
first domain wait for one. This is twice the time to create a container.
"""


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """The properties of a container that a call can choose: image, memory and processors."""

    image: str
    memory_mb: int
    cpus: float = 0.0
    """Number of processors for programs. 0 means the configured number."""


class EntryFactory(Protocol):
    """Creates and removes the containers of a pool."""

    async def make(self, kind: Kind) -> Container:
        """Create a container of this kind and return it. If this fails, EngineError is raised, and
        no container is left.
        """
        ...

    async def remove(self, name: str) -> None:
        """Remove the container with this name. Return only when it is removed, however many
        attempts that takes.
        """
        ...


class State(Enum):
    """The state of a container in the pool."""

    WARM = auto()
    """The container has run nothing and belongs to no trust domain."""
    BUSY = auto()
    """A lease uses the container."""
    RESETTING = auto()
    """The container is being cleaned after a run."""
    IDLE = auto()
    """The container is clean and waits for the next call of its trust domain."""


UNUSED = (State.WARM, State.IDLE)
"""The states of containers that no call uses."""


@dataclass(eq=False, slots=True)
class PoolEntry:
    """One container of the pool, with its state and its history. This object receives the
    container's events.
    """

    container: Container
    kind: Kind
    made_at: float
    pool: Pool
    state: State = State.WARM
    domain: TrustDomain | None = None
    uses: int = 0
    last_used: float = 0.0
    given_at: float = 0.0
    """When the trust domain `domain` received the container, by the monotonic clock."""

    def on_clean(self) -> None:
        """Notify the pool that the container is clean after a run."""
        self.pool.on_clean(self)

    def on_end(self, why: str) -> None:
        """Notify the pool that the container has ended."""
        self.pool.on_end(self, why)

    def why_not_again(
        self, settings: ContainerSettings, now: float, *, once: bool, is_spared: bool = False
    ) -> str | None:
        """Return a clause that says why the container must not be used again. If it may be used
        again, return None.

        `settings` limit the container's age, uses and idle time. `now` is the time by the monotonic
        clock. `once` is True if the container has served a call that requested it for itself alone.
        If `is_spared` is True, the idle time is not limited.
        """
        container = self.container
        reasons = {
            "it was for one call": once,
            "a run was left in the middle": not (container.is_free or container.is_resetting),
            "memory ran out in it": container.ran_out_of_memory,
            "it has served enough": self.uses >= settings.max_uses,
            "it is old": now - self.made_at >= settings.lifetime_seconds,
            "it was idle": not is_spared and now - self.last_used >= settings.idle_seconds,
        }
        return next((why for why, is_so in reasons.items() if is_so), None)


# -- the queue -------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class PoolRequest:
    """A call that waits for a container of the pool."""

    domain: TrustDomain
    kind: Kind
    fresh: bool
    """Whether nothing may have run in the container before."""
    granted: asyncio.Future[PoolEntry] = field(repr=False)
    """The container, once one is granted to the call, or the error that refuses the call."""
    is_being_made: bool = False
    """Whether a container is being created for this request."""


class Waiting(Protocol):
    """A request that can wait in a `FairQueue`."""

    @property
    def domain(self) -> TrustDomain:
        """The trust domain for which the request was made."""
        ...


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """The waiting requests of all principals. Principals take turns, and so do the trust domains of
    one principal. Within a trust domain, requests keep their order.
    """

    def __init__(self) -> None:
        self._principals: OrderedDict[str, OrderedDict[TrustDomain, list[W]]] = OrderedDict()
        self._places = FairShare(MAX_WAITING, MAX_WAITING // 2)

    def __len__(self) -> int:
        return self._places.total

    def __iter__(self) -> Iterator[W]:
        everybody = self._principals.values()
        return iter([one for domains in everybody for mine in domains.values() for one in mine])

    def join(self, request: W) -> bool:
        """Add a request to the queue, after the other requests of its trust domain, and return
        True.

        If the trust domain already has a quarter of all places in the queue, return False and do
        not add the request. Do the same if the principal already has at least as many places as are
        free.
        """
        principal_id = request.domain.principal_id
        domains = self._principals.get(principal_id, OrderedDict())
        mine = domains.get(request.domain, [])
        # So no principal can fill the queue alone.
        left = MAX_WAITING - self._places.total
        if len(mine) >= MAX_WAITING // 4 or self._places.of(principal_id) >= left:
            return False
        self._places.add(principal_id)
        mine.append(request)
        domains.setdefault(request.domain, mine)
        self._principals.setdefault(principal_id, domains)
        return True

    def leave(self, request: W) -> bool:
        """Remove a request from the queue. Return False if it is not in the queue."""
        principal_id = request.domain.principal_id
        domains = self._principals.get(principal_id, OrderedDict())
        mine = domains.get(request.domain, [])
        if request not in mine:
            return False
        mine.remove(request)
        self._places.give_back(principal_id)
        if not mine:
            del domains[request.domain]
        if not domains:
            del self._principals[principal_id]
        return True

    def pass_on(self, request: W) -> None:
        """End the turn of the principal and of the trust domain of a request. Both go to the end of
        the order.
        """
        principal_id = request.domain.principal_id
        if principal_id in self._principals:
            self._principals.move_to_end(principal_id)
            if request.domain in self._principals[principal_id]:
                self._principals[principal_id].move_to_end(request.domain)

    def in_turn(self) -> Iterator[list[W]]:
        """Yield one list for each trust domain, which contains the domain's requests. The lists
        come in the order in which the domains have their turns. The queue may change during the
        iteration.
        """
        columns = [list(domains.values()) for domains in self._principals.values()]
        for row in zip_longest(*columns, fillvalue=()):
            for mine in row:
                yield list(mine)


# -- all containers --------------------------------------------------------------------------


class PoolState:
    """All containers of the pool, including those that are being created or removed. Only `Pool`
    changes this state.
    """

    def __init__(self) -> None:
        self.entries: dict[str, PoolEntry] = {}
        self.leaving: dict[str, asyncio.Event] = {}
        self.making = 0
        self.warming = 0
        """Number of containers in `making` that are created to be kept warm, and not for a waiting
        call.
        """

    @property
    def total(self) -> int:
        """The number of all containers, including those that are being created or removed."""
        return len(self.entries) + len(self.leaving) + self.making

    @property
    def has_unused(self) -> bool:
        """Whether there is a warm or idle container."""
        return any(entry.state in UNUSED for entry in self.entries.values())

    def coming(self) -> Counter[tuple[TrustDomain | None, Kind]]:
        """Count the containers that are being reset and will soon be idle. The result maps the
        trust domain and kind of the containers to their number.
        """
        return Counter(
            (entry.domain, entry.kind)
            for entry in self.entries.values()
            if entry.state is State.RESETTING
        )

    def shares(self, requests: Iterable[PoolRequest]) -> Counter[str]:
        """Return the number of containers for each principal: those that its calls use, and those
        that are being created for its calls. `requests` are the waiting requests.
        """
        busy = [entry.domain for entry in self.entries.values() if entry.state is State.BUSY]
        shares = Counter(domain.principal_id for domain in busy if domain is not None)
        shares.update(one.domain.principal_id for one in requests if one.is_being_made)
        return shares

    def find(self, request: PoolRequest, state: State) -> PoolEntry | None:
        """Return a container in the state `state` that may serve the request, or None if there is
        none.

        If several containers may serve it, return the container that was used last, so that the
        others stay idle and expire.
        """
        domain = None if state is State.WARM else request.domain
        if request.fresh and state is not State.WARM:
            return None
        fitting = (
            entry
            for entry in self.entries.values()
            if entry.state is state and entry.domain == domain and entry.kind == request.kind
        )
        return max(fitting, key=lambda entry: entry.last_used, default=None)

    def dispensable(self, requests: Iterable[PoolRequest], now: float) -> PoolEntry | None:
        """Return the container to destroy if a new container needs its place. If no container may
        be destroyed, return None. `requests` are the waiting requests, and `now` is the time by the
        monotonic clock.

        If an idle container may be destroyed, the result is the least recently used of them.
        Otherwise, it is the least recently used warm container.

        If the trust domain of an idle container waits for a container of the same kind, the idle
        container may not be destroyed at first. It may be destroyed `TURN_S` seconds after its
        domain received it.
        """
        # Without this protection, each call of each domain might need a new container, and all
        # calls would wait longer.
        wanted = {(request.domain, request.kind) for request in requests if not request.fresh}
        idle = (
            entry
            for entry in self.entries.values()
            if entry.state in UNUSED
            and ((entry.domain, entry.kind) not in wanted or now - entry.given_at >= TURN_S)
        )
        return min(
            idle, key=lambda entry: (entry.state is State.WARM, entry.last_used), default=None
        )

    def counts(self) -> JsonObject:
        """Return the number of containers in each state, and of containers that are being created
        (`making`) or removed (`leaving`).
        """
        states = Counter(entry.state for entry in self.entries.values())
        return {
            **{state.name.lower(): states[state] for state in State},
            "making": self.making,
            "leaving": len(self.leaving),
        }


class Pool:
    """The containers that calls can lease.

    `warm_image` is the image of the containers that are kept ready for any trust domain.
    """

    def __init__(
        self,
        factory: EntryFactory,
        settings: ContainerSettings,
        start_soon: Callable[..., object],
        *,
        warm_image: str = "python",
        part_of_one: float = 0.75,
        on_event: OnEvent = lambda event, values: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._factory = factory
        self._settings = settings
        self._warm_kind = Kind(warm_image, settings.warm_memory_mb)
        self._most_of_one = math.ceil(settings.pool_max * part_of_one)
        """Maximum number of containers for one principal. It ensures that the calls of one
        principal cannot occupy the whole pool.
        """
        self._start_soon = start_soon
        self._on_event = on_event
        self._monotonic = monotonic
        self._state = PoolState()
        self._queue: FairQueue[PoolRequest] = FairQueue()
        self._is_dispatching = False
        self._has_changed = False
        self._refusal: EngineError | None = None
        """The error for all calls after the pool was closed. None while it is open."""
        self.dirty = 0
        """Number of containers since the start that could not be cleaned after a run."""

    # -- for the wall ---------------------------------------------------------------

    async def take(self, domain: TrustDomain, kind: Kind, *, fresh: bool) -> PoolEntry:
        """Wait a bounded time for a container of this kind, and return it. Only calls of this trust
        domain have run in it. If `fresh` is True, nothing has run in it.

        Raises:
            SandboxUnavailable: no container became free in time, too many calls are waiting, or
                none can be created.
        """
        if self._refusal is not None:
            raise _another(self._refusal)
        loop = asyncio.get_running_loop()
        request = PoolRequest(domain, kind, fresh, loop.create_future())
        if not self._queue.join(request):
            raise try_later("Too many calls wait for a container. Repeat the call later.")
        self._dispatch()
        try:
            with anyio.fail_after(self._settings.queue_seconds):
                return await request.granted
        except BaseException as error:
            self._forget(request)
            if isinstance(error, TimeoutError):
                waited = f"No container became free in {self._settings.queue_seconds:g} s."
                raise try_later(f"{waited} Repeat the call later.") from None
            raise

    def give_back(self, entry: PoolEntry, *, ran: bool, fresh: bool) -> None:
        """Give back a container after its lease. If the container must not be used again
        (`PoolEntry.why_not_again`), destroy it.

        `ran` says whether a program ran in the container. `fresh` says whether the call requested a
        container in which nothing has run. If both are True, the container is always destroyed.
        """
        if entry.container.name not in self._state.entries:
            return
        entry.last_used = self._monotonic()
        if not ran:
            entry.state = State.IDLE if entry.uses else State.WARM
            entry.domain = entry.domain if entry.uses else None
        else:
            entry.uses += 1
            entry.state = State.RESETTING if entry.container.is_resetting else State.IDLE
        why = entry.why_not_again(self._settings, self._monotonic(), once=ran and fresh)
        if why is not None:
            self._destroy(entry, why)
        self._dispatch()

    def let_go(self, entry: PoolEntry, listener: ChannelListener) -> bool:
        """Remove a leased container from the pool, and return True. If the container has ended in
        the meantime, return False. The caller must ensure that nothing has run in the container.

        If the result is True, `listener` receives the container's events from then on. It must end
        and remove the container.
        """
        assert entry.uses == 0
        if self._state.entries.pop(entry.container.name, None) is None:
            return False
        entry.container.listener = listener
        self._dispatch()
        return True

    def refuse_waiting(self, refusal: EngineError) -> None:
        """Make all waiting calls fail with the error `refusal`."""
        for request in self._queue:
            self._refuse(request, refusal)

    def close(self, refusal: EngineError, why: str) -> None:
        """Refuse all waiting and all future calls with the error `refusal`. Destroy all containers,
        and log `why` as the reason.
        """
        self._refusal = refusal
        self.refuse_waiting(refusal)
        for entry in list(self._state.entries.values()):
            self._destroy(entry, why)

    def tidy(self, *, least_warm: int = 0) -> None:
        """Destroy containers that are too old or were idle too long, and create missing warm
        containers. The wall calls this periodically.

        If fewer than `least_warm` warm containers are ready, one more is created, even if the
        settings require none.
        """
        spared = self._settings.pool_min
        for entry in list(self._state.entries.values()):
            if entry.state not in UNUSED:
                continue
            is_spared = self._is_ready_for_all(entry) and spared > 0
            spared -= is_spared
            why = entry.why_not_again(
                self._settings, self._monotonic(), once=False, is_spared=is_spared
            )
            if why is not None:
                self._destroy(entry, why)
        self._dispatch()
        self._keep_warm(least_warm)

    def retire(self, is_outdated: Callable[[Container], bool]) -> None:
        """Destroy all containers that are not in use and for which `is_outdated` returns True.

        A container in use is not destroyed now. A later call of `retire` can destroy it.
        """
        for entry in list(self._state.entries.values()):
            if entry.state in UNUSED and is_outdated(entry.container):
                self._destroy(entry, "its image is not the newest")
        self._dispatch()

    def warm(self) -> Counter[Kind]:
        """Kind → number of containers in which nothing has run."""
        entries = self._state.entries.values()
        return Counter(entry.kind for entry in entries if entry.state is State.WARM)

    @property
    def names(self) -> list[str]:
        """The names of all containers, including those that are being removed."""
        return [*self._state.entries, *self._state.leaving]

    def counts(self) -> JsonObject:
        """Return figures for the operator: the numbers of containers in each state, of waiting
        calls, and of containers that could not be cleaned.
        """
        return {**self._state.counts(), "waiting": len(self._queue), "dirty": self.dirty}

    # -- events of containers -------------------------------------------------------

    def on_clean(self, entry: PoolEntry) -> None:
        """Mark a container, which is clean after a run, as idle, and offer it to waiting calls."""
        if entry.state is State.RESETTING:
            entry.state = State.IDLE
            self._dispatch()

    def on_end(self, entry: PoolEntry, why: str) -> None:
        """Take a container that has ended, for whatever reason, out of the pool, and start removing
        it in the background. `why` is the reason, for the log.
        """
        if self._state.entries.pop(entry.container.name, None) is None:
            return
        if entry.container.is_dirty:
            self.dirty += 1
            self._tell("container.dirty", entry, why)
        self._tell("container.destroyed", entry, why)
        self._state.leaving[entry.container.name] = asyncio.Event()
        self._start_soon(self._remove, entry.container)
        self._dispatch()

    # -- inside -----------------------------------------------------------------

    def _dispatch(self) -> None:
        """Grant free containers to waiting calls, create containers for calls that need one, and
        keep some containers warm. The containers are created in the background.
        """
        # Serving the queue may change the pool, and each change calls this method. Such an inner
        # call only sets `_has_changed`, and the outer call does the work.
        self._has_changed = True
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._has_changed:
                self._has_changed = False
                has_room = self._state.total < self._settings.pool_max
                if self._refusal is None and (has_room or self._state.has_unused):
                    if self._queue:
                        self._serve_queue()
                    self._keep_warm(self._settings.pool_min)
        finally:
            self._is_dispatching = False

    def _serve_queue(self) -> None:
        """For each trust domain with waiting calls, grant a free container to one call, or start
        creating a container for it.
        """
        coming = self._state.coming()
        shares = self._state.shares(self._queue)
        can_make = True
        for requests in self._queue.in_turn():
            for request in requests:
                key = (request.domain, request.kind)
                if request.granted.done():  # cancelled, and not yet out of the queue
                    continue
                if shares[request.domain.principal_id] >= self._most_of_one:
                    break  # its calls wait until one of its own ends
                entry = self._state.find(request, State.IDLE)
                if entry is None and not request.fresh and coming[key]:
                    coming[key] -= 1  # a container of this domain is being cleaned
                    continue
                entry = entry or self._state.find(request, State.WARM)
                if entry is not None:
                    self._grant(request, entry)
                    shares[request.domain.principal_id] += 1
                    self._has_changed = True
                    break
                if request.is_being_made:
                    continue
                can_make = can_make and self._start_making(request)
                if can_make:
                    shares[request.domain.principal_id] += 1
                    self._has_changed = True
                    break
                if not self._state.has_unused:
                    return  # nothing is left to grant

    def _grant(self, request: PoolRequest, entry: PoolEntry) -> None:
        assert entry.domain in (None, request.domain)
        assert entry.kind == request.kind
        assert entry.uses == 0 or not request.fresh
        if entry.domain is None:
            entry.given_at = self._monotonic()
        entry.domain = request.domain
        entry.state = State.BUSY
        self._queue.pass_on(request)
        self._queue.leave(request)
        request.granted.set_result(entry)

    def _start_making(self, request: PoolRequest) -> bool:
        """Start creating a container for a request, and return True. If the pool is full, first
        destroy a container that no call uses.

        If the pool is full and no container may be destroyed, create nothing, and return False.
        """
        instead_of = None
        if self._state.total >= self._settings.pool_max:
            victim = self._state.dispensable(self._queue, self._monotonic())
            if victim is None:
                return False
            instead_of = victim.container.name
            self._destroy(victim, "room for another")
        request.is_being_made = True
        self._queue.pass_on(request)
        self._state.making += 1
        self._start_soon(self._make, request.kind, request, instead_of)
        return True

    def _keep_warm(self, least_warm: int) -> None:
        """Start creating a warm container if fewer than `least_warm` are ready. Do nothing if calls
        are waiting, a warm container is already being created, or the pool is full.
        """
        if len(self._queue) or self._state.warming:
            return
        warm = sum(self._is_ready_for_all(entry) for entry in self._state.entries.values())
        if warm < least_warm and self._state.total < self._settings.pool_max:
            self._state.making += 1
            self._state.warming += 1
            self._start_soon(self._make, self._warm_kind, None, None)

    def _is_ready_for_all(self, entry: PoolEntry) -> bool:
        return entry.state is State.WARM and entry.kind == self._warm_kind

    async def _make(self, kind: Kind, request: PoolRequest | None, instead_of: str | None) -> None:
        failure: EngineError | None = None
        try:
            if instead_of in self._state.leaving:
                await self._state.leaving[instead_of].wait()
            container = await self._factory.make(kind)
        except EngineError as error:
            failure = error
        finally:
            self._state.making -= 1
            self._state.warming -= request is None
            if request is not None:
                request.is_being_made = False
        if failure is not None:
            if request is not None:
                self._refuse(request, failure)
                self._dispatch()
            return
        entry = PoolEntry(container, kind, self._monotonic(), self)
        container.listener = entry
        entry.last_used = entry.made_at
        self._state.entries[container.name] = entry
        if container.is_dead:  # it ended after it became ready
            self.on_end(entry, "it ended")
        elif self._refusal is not None:
            self._destroy(entry, "the engine stops")
        elif request is not None and not request.granted.done():
            self._grant(request, entry)
        self._dispatch()

    async def _remove(self, container: Container) -> None:
        try:
            await container.until_examined()
            await self._factory.remove(container.name)
        finally:
            self._state.leaving.pop(container.name).set()
        self._dispatch()

    def _destroy(self, entry: PoolEntry, why: str) -> None:
        entry.container.end(why)  # calls `on_end`, unless the container had already ended
        if entry.container.name in self._state.entries:
            self.on_end(entry, why)

    def _forget(self, request: PoolRequest) -> None:
        """Remove the request of a call that has stopped waiting. If a container was granted to the
        call at the same moment, give the container back.
        """
        self._queue.leave(request)
        granted = request.granted
        if granted.done() and not granted.cancelled():
            if granted.exception() is None:
                self.give_back(granted.result(), ran=False, fresh=request.fresh)
        else:
            granted.cancel()
            self._dispatch()

    def _refuse(self, request: PoolRequest, refusal: EngineError) -> None:
        self._queue.leave(request)
        if not request.granted.done():
            request.granted.set_exception(_another(refusal))

    def _tell(self, event: str, entry: PoolEntry, why: str) -> None:
        values: JsonObject = {"name": entry.container.name, "why": why, "uses": entry.uses}
        if entry.container.complaint:
            values["guest_said"] = entry.container.complaint
        self._on_event(event, values)


def _another(error: EngineError) -> EngineError:
    """Return a copy of an error."""
    # Each waiting call needs its own: if the same object were raised twice, the tracebacks would be
    # mixed.
    return copy.copy(error)
