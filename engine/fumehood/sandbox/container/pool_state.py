"""The pool's books: which containers there are, whose they are, and which may be given to whom.

Host side, below the pool, which alone changes them. Pure: nothing here waits or decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.container.pool_entry import UNUSED, Kind, PoolEntry, State
from fumehood.sandbox.container.queue import PoolRequest

TURN_S = 1.0
"""How long a trust domain keeps a container that others wait for. Making one takes half of it."""


class PoolState:
    """Containers that are there, that leave, and that are being made."""

    def __init__(self) -> None:
        self.places: dict[str, PoolEntry] = {}
        self.leaving: dict[str, asyncio.Event] = {}
        self.making = 0
        self.warming = 0
        """How many of `making` are for nobody in particular."""

    @property
    def total(self) -> int:
        """All of them."""
        return len(self.places) + len(self.leaving) + self.making

    @property
    def has_unused(self) -> bool:
        """Whether any stands there without a call in it."""
        return any(place.state in UNUSED for place in self.places.values())

    def coming(self) -> Counter[tuple[TrustDomain | None, Kind]]:
        """How many will be clean in a moment, by whom they serve."""
        return Counter(
            (place.domain, place.kind)
            for place in self.places.values()
            if place.state is State.RESETTING
        )

    def shares(self, waiters: Iterable[PoolRequest[PoolEntry]]) -> Counter[str]:
        """How many containers each principal has calls in, or has being made."""
        busy = [place.domain for place in self.places.values() if place.state is State.BUSY]
        shares = Counter(domain.principal_id for domain in busy if domain is not None)
        shares.update(one.domain.principal_id for one in waiters if one.is_being_made)
        return shares

    def find(self, waiter: PoolRequest[PoolEntry], state: State) -> PoolEntry | None:
        """One in this state that may serve the waiter: the last used, so that others grow old."""
        domain = None if state is State.WARM else waiter.domain
        if waiter.fresh and state is not State.WARM:
            return None
        fitting = (
            place
            for place in self.places.values()
            if place.state is state and place.domain == domain and place.kind == waiter.kind
        )
        return max(fitting, key=lambda place: place.last_used, default=None)

    def dispensable(
        self, waiters: Iterable[PoolRequest[PoolEntry]], now: float
    ) -> PoolEntry | None:
        """The least recently used of those that nobody uses; what serves whoever comes goes last.

        One that its own domain waits for stays for the length of a turn: a container for every
        call of every domain would cost all of them more than waiting.
        """
        wanted = {(waiter.domain, waiter.kind) for waiter in waiters if not waiter.fresh}
        idle = (
            place
            for place in self.places.values()
            if place.state in UNUSED
            and ((place.domain, place.kind) not in wanted or now - place.given_at >= TURN_S)
        )
        return min(
            idle, key=lambda place: (place.state is State.WARM, place.last_used), default=None
        )

    def counts(self) -> JsonObject:
        """How many there are, by state."""
        states = Counter(place.state for place in self.places.values())
        return {
            **{state.name.lower(): states[state] for state in State},
            "making": self.making,
            "leaving": len(self.leaving),
        }
