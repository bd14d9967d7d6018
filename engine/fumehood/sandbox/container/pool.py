"""The pool: warm containers, their trust domains, and the order in which waiting calls get them.

Host side, between the wall and `container`. Runs only in the event loop, so each change of
`PoolState` is atomic. Invariants: a container serves one trust domain for its whole life. It is
reset between that domain's calls, and destroyed if it would change domains, was left in the middle
of a run, is not clean, or has reached its limit of uses or age. There are never more than `most`
containers, including those that are being created or removed. A container taken for a session
leaves the pool.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import anyio

from fumehood.core.errors import EngineError, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.container.pool_entry import (
    UNUSED,
    ContainerEvents,
    EntryFactory,
    Kind,
    Listener,
    Pooled,
    PoolEntry,
    State,
)
from fumehood.sandbox.container.queue import FairQueue, LineFull, PoolRequest
from fumehood.sandbox.container.settings import ContainerSettings

RETRY_AFTER_MS = 1000
MAX_COMPLAINT_CHARACTERS = 500
NOTHING_MISSING: Mapping[str, EngineError] = MappingProxyType({})

TURN_S = 1.0
"""How long a trust domain keeps an idle container that others wait for: twice a creation's time."""


class Pool:
    """Containers to lease. Closed at first: `open` tells it that containers can be created.

    `warm_image` is the image of the containers that are kept ready for any domain.
    """

    def __init__(
        self,
        maker: EntryFactory,
        settings: ContainerSettings,
        start_soon: Callable[..., object],
        *,
        warm_image: str = "python",
        on_event: Callable[[str, JsonObject], None] = lambda event, values: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._maker = maker
        self._settings = settings
        self._warm_kind = Kind(warm_image, settings.warm_memory_mb)
        self._most_of_one = settings.pool_max - settings.pool_max // 4
        """The limit for one principal, so that its calls cannot occupy the whole pool."""
        self._start_soon = start_soon
        self._on_event = on_event
        self._monotonic = monotonic
        self._state = PoolState()
        self._line: FairQueue[PoolEntry] = FairQueue()
        self._is_dispatching = False
        self._has_changed = False
        self._refusal: EngineError | None = SandboxUnavailable(
            "Containers are being started. Repeat the call.", retry_after_ms=RETRY_AFTER_MS
        )
        self._missing = NOTHING_MISSING
        """The error for each missing image."""
        self.dirty = 0
        """Containers that could not be cleaned."""

    # -- for the wall ---------------------------------------------------------------

    async def take(self, domain: TrustDomain, kind: Kind, *, fresh: bool) -> PoolEntry:
        """Wait, bounded, for a container of this domain or for an unused one.

        Raises:
            SandboxUnavailable: none in time, too many waiting calls, or none can be created.
        """
        refusal = self._refusal or self._missing.get(kind.image)
        if refusal is not None:
            raise _another(refusal)
        loop = asyncio.get_running_loop()
        waiter: PoolRequest[PoolEntry] = PoolRequest(domain, kind, fresh, loop.create_future())
        try:
            self._line.join(waiter)
        except LineFull:
            raise _busy("Too many calls wait for a container.") from None
        self._dispatch()
        try:
            with anyio.fail_after(self._settings.queue_seconds):
                return await waiter.granted
        except BaseException as error:
            self._forget(waiter)
            if isinstance(error, TimeoutError):
                waited = f"No container became free in {self._settings.queue_seconds:g} s."
                raise _busy(waited) from None
            raise

    def give_back(self, place: PoolEntry, *, ran: bool, fresh: bool) -> None:
        """Return a container after its lease. One left in the middle of a run is destroyed."""
        if place.container.name not in self._state.places:
            return
        place.last_used = self._monotonic()
        if not ran:
            place.state = State.IDLE if place.uses else State.WARM
            place.domain = place.domain if place.uses else None
        else:
            place.uses += 1
            place.state = State.RESETTING if place.container.is_resetting else State.IDLE
        why = self._why_not_again(place, once=ran and fresh)
        if why is not None:
            self._destroy(place, why)
        self._dispatch()

    def let_go(self, place: PoolEntry, listener: Listener) -> bool:
        """Take a leased, unused container out of the pool. It belongs to `listener`, which ends and
        removes it. False if it has ended in the meantime.
        """
        assert place.uses == 0
        if self._state.places.pop(place.container.name, None) is None:
            return False
        place.ear.listener = listener
        self._dispatch()
        return True

    def open(
        self, missing: Mapping[str, EngineError] = NOTHING_MISSING, *, least_warm: int = 0
    ) -> None:
        """Start creating containers, except of the missing images, given by name.

        If fewer than `least_warm` are ready, one more is created now, whatever the rules are.
        """
        self._refusal, self._missing = None, MappingProxyType(dict(missing))
        for waiter in self._line:
            if waiter.kind.image in missing and not waiter.is_being_made:
                self._refuse(waiter, missing[waiter.kind.image])
        self._dispatch()
        self._keep_warm(least_warm)

    def close(self, refusal: EngineError, *, destroy: str | None = None) -> None:
        """Stop creating containers and refuse all waiting calls. `destroy` ends the existing ones,
        for that reason.
        """
        self._refusal = refusal
        for waiter in self._line:
            self._refuse(waiter, refusal)
        if destroy is not None:
            for place in list(self._state.places.values()):
                self._destroy(place, destroy)

    def tidy(self) -> None:
        """Destroy containers that are too old. Called periodically."""
        spared = self._settings.pool_min
        for place in list(self._state.places.values()):
            if place.state not in UNUSED:
                continue
            is_spared = self._is_ready_for_all(place) and spared > 0
            spared -= is_spared
            why = self._why_not_again(place, once=False, is_spared=is_spared)
            if why is not None:
                self._destroy(place, why)
        self._dispatch()

    def retire(self, is_outdated: Callable[[Pooled], bool]) -> None:
        """Destroy idle containers of an outdated image now, and the others when they are idle."""
        for place in list(self._state.places.values()):
            if place.state in UNUSED and is_outdated(place.container):
                self._destroy(place, "its image is not the newest")
        self._dispatch()

    @property
    def names(self) -> list[str]:
        """All containers, including those that are being removed."""
        return [*self._state.places, *self._state.leaving]

    def counts(self) -> JsonObject:
        """The number of containers by state, for the operator."""
        return {**self._state.counts(), "waiting": len(self._line), "dirty": self.dirty}

    # -- events of containers -------------------------------------------------------

    def on_clean(self, place: PoolEntry) -> None:
        """A container has been reset."""
        if place.state is State.RESETTING:
            place.state = State.IDLE
            self._dispatch()

    def on_end(self, place: PoolEntry, why: str) -> None:
        """A container has ended: by itself, by its channel, or by `_destroy`."""
        if self._state.places.pop(place.container.name, None) is None:
            return
        if place.container.is_dirty:
            self.dirty += 1
            self._tell("container.dirty", place, why)
        self._tell("container.destroyed", place, why)
        self._state.leaving[place.container.name] = asyncio.Event()
        self._start_soon(self._remove, place.container)
        self._dispatch()

    # -- inside -----------------------------------------------------------------

    def _dispatch(self) -> None:
        """Grant free containers in turn, create missing ones, and keep some warm.

        Its own changes may call it again; such a call only notes that there is more to do.
        """
        self._has_changed = True
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._has_changed:
                self._has_changed = False
                if self._refusal is None and self._can_change:
                    if self._line:
                        self._go_round()
                    self._keep_warm(self._settings.pool_min)
        finally:
            self._is_dispatching = False

    @property
    def _can_change(self) -> bool:
        """Whether a container could be granted or created; else a call only joins the queue."""
        return self._state.has_unused or self._state.total < self._settings.pool_max

    def _go_round(self) -> None:
        """Give each waiting trust domain one turn."""
        coming = self._state.coming()
        shares = self._state.shares(self._line)
        can_make = True
        for waiters in self._line.in_turn():
            for waiter in waiters:
                key = (waiter.domain, waiter.kind)
                if waiter.granted.done():  # cancelled, and not yet out of the queue
                    continue
                if shares[waiter.domain.principal_id] >= self._most_of_one:
                    break  # all calls of this principal wait for one of its own to end
                place = self._state.find(waiter, State.IDLE)
                if place is None and not waiter.fresh and coming[key]:
                    coming[key] -= 1  # its own will be clean in a moment
                    continue
                place = place or self._state.find(waiter, State.WARM)
                if place is not None:
                    self._grant(waiter, place)
                    shares[waiter.domain.principal_id] += 1
                    self._has_changed = True
                    break
                if waiter.is_being_made:
                    continue
                can_make = can_make and self._have_made(waiter)
                if can_make:
                    shares[waiter.domain.principal_id] += 1
                    self._has_changed = True
                    break
                if not self._state.has_unused:
                    return  # nothing is left to grant

    def _grant(self, waiter: PoolRequest[PoolEntry], place: PoolEntry) -> None:
        assert place.domain in (None, waiter.domain)
        assert place.kind == waiter.kind
        assert place.uses == 0 or not waiter.fresh
        if place.domain is None:
            place.given_at = self._monotonic()
        place.domain = waiter.domain
        place.state = State.BUSY
        self._line.pass_on(waiter)
        self._line.leave(waiter)
        waiter.granted.set_result(place)

    def _have_made(self, waiter: PoolRequest[PoolEntry]) -> bool:
        """Start creating a container for it, in place of an idle one if the pool is full."""
        instead_of = None
        if self._state.total >= self._settings.pool_max:
            victim = self._state.dispensable(self._line, self._monotonic())
            if victim is None:
                return False
            instead_of = victim.container.name
            self._destroy(victim, "room for another")
        waiter.is_being_made = True
        self._line.pass_on(waiter)
        self._state.making += 1
        self._start_soon(self._make, waiter.kind, waiter, instead_of)
        return True

    def _keep_warm(self, least_warm: int) -> None:
        """Create one more if too few are ready, no call is waiting, and there is room."""
        if len(self._line) or self._state.warming or self._warm_kind.image in self._missing:
            return
        warm = sum(self._is_ready_for_all(place) for place in self._state.places.values())
        if warm < least_warm and self._state.total < self._settings.pool_max:
            self._state.making += 1
            self._state.warming += 1
            self._start_soon(self._make, self._warm_kind, None, None)

    def _is_ready_for_all(self, place: PoolEntry) -> bool:
        return place.state is State.WARM and place.kind == self._warm_kind

    async def _make(
        self, kind: Kind, waiter: PoolRequest[PoolEntry] | None, instead_of: str | None
    ) -> None:
        ear = ContainerEvents(self)
        failure: EngineError | None = None
        try:
            if instead_of in self._state.leaving:
                await self._state.leaving[instead_of].wait()
            container = await self._maker.make(kind, ear)
        except EngineError as error:
            failure = error
        finally:
            self._state.making -= 1
            self._state.warming -= waiter is None
            if waiter is not None:
                waiter.is_being_made = False
        if failure is not None:
            if waiter is not None:
                self._refuse(waiter, failure)
                self._dispatch()
            return
        place = PoolEntry(container, kind, self._monotonic(), ear)
        ear.belongs_to(place)
        place.last_used = place.made_at
        self._state.places[container.name] = place
        if container.is_dead:  # since it was ready
            self.on_end(place, "it ended")
        elif self._refusal is not None:
            self._destroy(place, "the wall was closed meanwhile")
        elif waiter is not None and not waiter.granted.done():
            self._grant(waiter, place)
        self._dispatch()

    async def _remove(self, container: Pooled) -> None:
        try:
            await container.until_examined()
            await self._maker.remove(container.name)
        finally:
            self._state.leaving.pop(container.name).set()
        self._dispatch()

    def _destroy(self, place: PoolEntry, why: str) -> None:
        place.container.end(why)  # comes back as `on_end`
        if place.container.name in self._state.places:
            self.on_end(place, why)

    def _why_not_again(
        self, place: PoolEntry, *, once: bool, is_spared: bool = False
    ) -> str | None:
        return place.why_not_again(
            self._settings, self._monotonic(), once=once, is_spared=is_spared
        )

    def _forget(self, waiter: PoolRequest[PoolEntry]) -> None:
        """Remove a waiting call; a container granted at the same moment is returned."""
        self._line.leave(waiter)
        granted = waiter.granted
        if granted.done() and not granted.cancelled():
            if granted.exception() is None:
                self.give_back(granted.result(), ran=False, fresh=waiter.fresh)
        else:
            granted.cancel()
            self._dispatch()

    def _refuse(self, waiter: PoolRequest[PoolEntry], refusal: EngineError) -> None:
        self._line.leave(waiter)
        if not waiter.granted.done():
            waiter.granted.set_exception(_another(refusal))

    def _tell(self, event: str, place: PoolEntry, why: str) -> None:
        values: JsonObject = {"name": place.container.name, "why": why, "uses": place.uses}
        if place.container.complaint:
            values["guest_said"] = place.container.complaint[-MAX_COMPLAINT_CHARACTERS:]
        self._on_event(event, values)


def _another(error: EngineError) -> EngineError:
    """A copy of the exception: one that is raised twice would collect both tracebacks."""
    return copy.copy(error)


def _busy(why: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"{why} Repeat the call later.", retry_after_ms=RETRY_AFTER_MS)


__all__ = ["EntryFactory", "Kind", "Listener", "Pool", "PoolEntry", "Pooled"]


# -- the pool's state ----------------------------------------------------------------------


class PoolState:
    """The containers that exist, are being removed or are being created. Only `Pool` changes it."""

    def __init__(self) -> None:
        self.places: dict[str, PoolEntry] = {}
        self.leaving: dict[str, asyncio.Event] = {}
        self.making = 0
        self.warming = 0
        """The number of `making` that are for no particular call."""

    @property
    def total(self) -> int:
        """The number of all containers."""
        return len(self.places) + len(self.leaving) + self.making

    @property
    def has_unused(self) -> bool:
        """Whether any container is without a call."""
        return any(place.state in UNUSED for place in self.places.values())

    def coming(self) -> Counter[tuple[TrustDomain | None, Kind]]:
        """The number of containers being reset, by domain and kind."""
        return Counter(
            (place.domain, place.kind)
            for place in self.places.values()
            if place.state is State.RESETTING
        )

    def shares(self, waiters: Iterable[PoolRequest[PoolEntry]]) -> Counter[str]:
        """The number of containers that each principal uses, or that are being created for it."""
        busy = [place.domain for place in self.places.values() if place.state is State.BUSY]
        shares = Counter(domain.principal_id for domain in busy if domain is not None)
        shares.update(one.domain.principal_id for one in waiters if one.is_being_made)
        return shares

    def find(self, waiter: PoolRequest[PoolEntry], state: State) -> PoolEntry | None:
        """A container in this state that may serve the waiter: the most recently used one, so that
        the others reach their age limit.
        """
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
        """The least recently used idle container; those ready for any domain go last.

        One that its own domain waits for stays for a turn: a new container for every call of every
        domain would cost all of them more than waiting.
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
        """The number of containers by state."""
        states = Counter(place.state for place in self.places.values())
        return {
            **{state.name.lower(): states[state] for state in State},
            "making": self.making,
            "leaving": len(self.leaving),
        }
