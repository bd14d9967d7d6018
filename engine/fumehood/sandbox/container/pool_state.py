"""The pool's state: its containers, the seams to them, and the queue of requests.

Host side, pure, below the pool. Invariant: the queue is bounded, in total, for each principal and
for each of its trust domains. Turns alternate between principals, then between the domains of one;
within a domain, requests are served in order. So many sessions do not get a principal more.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import zip_longest
from typing import Protocol

from fumehood.core.fair_share import FairShare
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.settings import ContainerSettings

MAX_WAITING = 2000
"""Requests in the queue. One principal may have half of them, one of its domains a quarter."""

TURN_S = 1.0
"""How long a trust domain keeps an idle container that others wait for: twice a creation's time."""


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """The image and size that a call needs."""

    image: str
    memory_mb: int


class EntryFactory(Protocol):
    """Makes and removes containers."""

    async def make(self, kind: Kind) -> Container:
        """Raises EngineError where no container can be made; then none is left behind."""
        ...

    async def remove(self, name: str) -> None:
        """Return when it is gone; try as often as necessary."""
        ...


class State(Enum):
    """What the container of an entry does."""

    WARM = auto()
    """It has run nothing, and belongs to no domain."""
    BUSY = auto()
    """A lease holds it."""
    RESETTING = auto()
    IDLE = auto()
    """It is clean, and waits for the next call of its domain."""


UNUSED = (State.WARM, State.IDLE)


class EventsListener(Protocol):
    """The pool, as its containers see it."""

    def on_clean(self, entry: PoolEntry) -> None: ...
    def on_end(self, entry: PoolEntry, why: str) -> None: ...


@dataclass(eq=False, slots=True)
class PoolEntry:
    """One container of the pool."""

    container: Container
    kind: Kind
    made_at: float
    pool: EventsListener
    state: State = State.WARM
    domain: TrustDomain | None = None
    uses: int = 0
    last_used: float = 0.0
    given_at: float = 0.0
    """When its domain got it."""

    def on_clean(self) -> None:
        """The container has been reset."""
        self.pool.on_clean(self)

    def on_end(self, why: str) -> None:
        """The container has ended."""
        self.pool.on_end(self, why)

    def why_not_again(
        self, settings: ContainerSettings, now: float, *, once: bool, is_spared: bool = False
    ) -> str | None:
        """The reason why its container is not used again, if there is one."""
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


class QueueFull(Exception):
    """Too many requests wait already."""


@dataclass(eq=False, slots=True)
class PoolRequest:
    """A call that waits for a container."""

    domain: TrustDomain
    kind: Kind
    fresh: bool
    granted: asyncio.Future[PoolEntry] = field(repr=False)
    is_being_made: bool = False
    """Whether a container is being made for it."""


class FairQueue:
    """The waiting requests of all principals."""

    def __init__(self) -> None:
        self._principals: OrderedDict[str, OrderedDict[TrustDomain, list[PoolRequest]]] = (
            OrderedDict()
        )
        self._places = FairShare(MAX_WAITING, MAX_WAITING // 2)

    def __len__(self) -> int:
        return self._places.total

    def __iter__(self) -> Iterator[PoolRequest]:
        everybody = self._principals.values()
        return iter([one for domains in everybody for mine in domains.values() for one in mine])

    def join(self, request: PoolRequest) -> None:
        """Add a request at the end of its domain's. Raises QueueFull."""
        principal_id = request.domain.principal_id
        domains = self._principals.get(principal_id, OrderedDict())
        mine = domains.get(request.domain, [])
        if len(mine) >= MAX_WAITING // 4 or self._places.take(principal_id) is not None:
            raise QueueFull
        mine.append(request)
        domains.setdefault(request.domain, mine)
        self._principals.setdefault(principal_id, domains)

    def leave(self, request: PoolRequest) -> None:
        """Remove a request. Harmless if it is not here."""
        principal_id = request.domain.principal_id
        domains = self._principals.get(principal_id, OrderedDict())
        mine = domains.get(request.domain, [])
        if request in mine:
            mine.remove(request)
            self._places.give_back(principal_id)
            if not mine:
                del domains[request.domain]
            if not domains:
                del self._principals[principal_id]

    def pass_on(self, request: PoolRequest) -> None:
        """End the turn of its principal and its domain, whether or not it still waits."""
        principal_id = request.domain.principal_id
        if principal_id in self._principals:
            self._principals.move_to_end(principal_id)
            if request.domain in self._principals[principal_id]:
                self._principals[principal_id].move_to_end(request.domain)

    def in_turn(self) -> Iterator[list[PoolRequest]]:
        """The requests of each domain, in the order of the turns. Safe against changes."""
        columns = [list(domains.values()) for domains in self._principals.values()]
        for row in zip_longest(*columns, fillvalue=()):
            for mine in row:
                yield list(mine)


# -- all containers --------------------------------------------------------------------------


class PoolState:
    """The containers that exist, are being removed or are being created. Only `Pool` changes it."""

    def __init__(self) -> None:
        self.entries: dict[str, PoolEntry] = {}
        self.leaving: dict[str, asyncio.Event] = {}
        self.making = 0
        self.warming = 0
        """The number of `making` that are for no particular call."""

    @property
    def total(self) -> int:
        """The number of all containers."""
        return len(self.entries) + len(self.leaving) + self.making

    @property
    def has_unused(self) -> bool:
        """Whether any container is without a call."""
        return any(entry.state in UNUSED for entry in self.entries.values())

    def coming(self) -> Counter[tuple[TrustDomain | None, Kind]]:
        """The number of containers being reset, by domain and kind."""
        return Counter(
            (entry.domain, entry.kind)
            for entry in self.entries.values()
            if entry.state is State.RESETTING
        )

    def shares(self, requests: Iterable[PoolRequest]) -> Counter[str]:
        """The number of containers that each principal uses, or that are being created for it."""
        busy = [entry.domain for entry in self.entries.values() if entry.state is State.BUSY]
        shares = Counter(domain.principal_id for domain in busy if domain is not None)
        shares.update(one.domain.principal_id for one in requests if one.is_being_made)
        return shares

    def find(self, request: PoolRequest, state: State) -> PoolEntry | None:
        """A container in this state that may serve the request: the most recently used one, so that
        the others reach their age limit.
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
        """The least recently used idle container; those ready for any domain go last.

        One that its own domain waits for stays for a turn: a new container for every call of every
        domain would cost all of them more than waiting.
        """
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
        """The number of containers by state."""
        states = Counter(entry.state for entry in self.entries.values())
        return {
            **{state.name.lower(): states[state] for state in State},
            "making": self.making,
            "leaving": len(self.leaving),
        }
