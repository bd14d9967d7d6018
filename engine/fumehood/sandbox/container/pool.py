"""The pool: warm containers, whose they are, and who gets one next.

Host side, between the wall and `container`; its books are in `books`. Runs in the event loop
alone, so they change in one step. Invariant: a container serves one trust domain in its whole
life. It is reset between that domain's calls, and destroyed where it would change hands, was left
in the middle of a run, is not clean, or has done enough. There are never more than `most`, those
included that are being made or removed. One that is let go of for a session is the session's.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping
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
    PoolRules,
    State,
)
from fumehood.sandbox.container.pool_state import PoolState
from fumehood.sandbox.container.queue import FairQueue, LineFull, PoolRequest

RETRY_AFTER_MS = 1000
MAX_COMPLAINT_CHARACTERS = 500
NOTHING_MISSING: Mapping[str, EngineError] = MappingProxyType({})


class Pool:
    """Containers to lease. Closed when made: `open` says that containers can be made.

    `warm_image` is what those are made of that stand ready for whoever comes.
    """

    def __init__(
        self,
        maker: EntryFactory,
        rules: PoolRules,
        start_soon: Callable[..., object],
        *,
        warm_image: str = "python",
        on_event: Callable[[str, JsonObject], None] = lambda event, values: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._maker = maker
        self._rules = rules
        self._warm_kind = Kind(warm_image, rules.warm_memory_mb)
        self._most_of_one = rules.most - rules.most // 4
        """Of one principal at a time: its calls, however long, do not keep out all others'."""
        self._start_soon = start_soon
        self._on_event = on_event
        self._monotonic = monotonic
        self._books = PoolState()
        self._line: FairQueue[PoolEntry] = FairQueue()
        self._is_dispatching = False
        self._has_changed = False
        self._refusal: EngineError | None = SandboxUnavailable(
            "Containers are being started. Repeat the call.", retry_after_ms=RETRY_AFTER_MS
        )
        self._missing = NOTHING_MISSING
        """Images that are not there, each with what is said of it."""
        self.dirty = 0
        """Containers that could not be cleaned."""

    # -- what the wall asks ---------------------------------------------------------

    async def take(self, domain: TrustDomain, kind: Kind, *, fresh: bool) -> PoolEntry:
        """Wait, bounded, for a container of this domain or of nobody yet.

        Raises:
            SandboxUnavailable: none in time, too many wait, or none can be made.
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
            with anyio.fail_after(self._rules.patience_s):
                return await waiter.granted
        except BaseException as error:
            self._forget(waiter)
            if isinstance(error, TimeoutError):
                waited = f"No container became free in {self._rules.patience_s:g} s."
                raise _busy(waited) from None
            raise

    def give_back(self, place: PoolEntry, *, ran: bool, fresh: bool) -> None:
        """A lease is left. What was left in the middle of a run is destroyed."""
        if place.container.name not in self._books.places:
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
        """A leased container in which nothing has run leaves the pool, and belongs to `listener`,
        who ends it and has it removed. False where it has ended meanwhile.
        """
        assert place.uses == 0
        if self._books.places.pop(place.container.name, None) is None:
            return False
        place.ear.listener = listener
        self._dispatch()
        return True

    def open(
        self, missing: Mapping[str, EngineError] = NOTHING_MISSING, *, least_warm: int = 0
    ) -> None:
        """Containers can be made, but of the images that are missing, by their names.

        Where fewer than `least_warm` stand ready one more is made now, whatever the rules say.
        """
        self._refusal, self._missing = None, MappingProxyType(dict(missing))
        for waiter in self._line:
            if waiter.kind.image in missing and not waiter.is_being_made:
                self._refuse(waiter, missing[waiter.kind.image])
        self._dispatch()
        self._keep_warm(least_warm)

    def close(self, refusal: EngineError, *, destroy: str | None = None) -> None:
        """None can be made, for this reason; who waits is told. `destroy` ends those there are."""
        self._refusal = refusal
        for waiter in self._line:
            self._refuse(waiter, refusal)
        if destroy is not None:
            for place in list(self._books.places.values()):
                self._destroy(place, destroy)

    def tidy(self) -> None:
        """Destroy what has been there for too long. To be called now and then."""
        spared = self._rules.least_warm
        for place in list(self._books.places.values()):
            if place.state not in UNUSED:
                continue
            is_spared = self._is_ready_for_all(place) and spared > 0
            spared -= is_spared
            why = self._why_not_again(place, once=False, is_spared=is_spared)
            if why is not None:
                self._destroy(place, why)
        self._dispatch()

    def retire(self, is_outdated: Callable[[Pooled], bool]) -> None:
        """Destroy those that stand idle and are of an older kind; the others later."""
        for place in list(self._books.places.values()):
            if place.state in UNUSED and is_outdated(place.container):
                self._destroy(place, "its image is not the newest")
        self._dispatch()

    @property
    def names(self) -> list[str]:
        """The containers that are there, those included that are being removed."""
        return [*self._books.places, *self._books.leaving]

    def counts(self) -> JsonObject:
        """How many there are, by state. For the operator."""
        return {**self._books.counts(), "waiting": len(self._line), "dirty": self.dirty}

    # -- what containers say of themselves ------------------------------------------

    def on_clean(self, place: PoolEntry) -> None:
        """A container has been reset."""
        if place.state is State.RESETTING:
            place.state = State.IDLE
            self._dispatch()

    def on_end(self, place: PoolEntry, why: str) -> None:
        """A container has ended: by itself, by its channel, or by `_destroy`."""
        if self._books.places.pop(place.container.name, None) is None:
            return
        if place.container.is_dirty:
            self.dirty += 1
            self._tell("container.dirty", place, why)
        self._tell("container.destroyed", place, why)
        self._books.leaving[place.container.name] = asyncio.Event()
        self._start_soon(self._remove, place.container)
        self._dispatch()

    # -- inside -----------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give what there is to whose turn it is; have made what is missing; keep some warm.

        What it does may end in another call of it, which then only says that there is more to do.
        """
        self._has_changed = True
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._has_changed:
                self._has_changed = False
                if self._refusal is None and self._can_change:
                    self._go_round()
                    self._keep_warm(self._rules.least_warm)
        finally:
            self._is_dispatching = False

    @property
    def _can_change(self) -> bool:
        """Whether a container could be given away or made: else a call only joins the line."""
        return self._books.has_unused or self._books.total < self._rules.most

    def _go_round(self) -> None:
        """One turn for each trust domain that waits."""
        coming = self._books.coming()
        shares = self._books.shares(self._line)
        can_make = True
        for waiters in self._line.in_turn():
            for waiter in waiters:
                key = (waiter.domain, waiter.kind)
                if waiter.granted.done():  # cancelled, and not yet out of the line
                    continue
                if shares[waiter.domain.principal_id] >= self._most_of_one:
                    break  # all of this principal's wait for one of its own to end
                place = self._books.find(waiter, State.IDLE)
                if place is None and not waiter.fresh and coming[key]:
                    coming[key] -= 1  # its own will be clean in a moment
                    continue
                place = place or self._books.find(waiter, State.WARM)
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
                if not self._books.has_unused:
                    return  # nothing is left to be given to anybody

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
        """Begin to make one for it, in the place of an idle one where the pool is full."""
        instead_of = None
        if self._books.total >= self._rules.most:
            victim = self._books.dispensable(self._line, self._monotonic())
            if victim is None:
                return False
            instead_of = victim.container.name
            self._destroy(victim, "room for another")
        waiter.is_being_made = True
        self._line.pass_on(waiter)
        self._books.making += 1
        self._start_soon(self._make, waiter.kind, waiter, instead_of)
        return True

    def _keep_warm(self, least_warm: int) -> None:
        """One more, where too few stand ready, nobody waits, and there is room."""
        if len(self._line) or self._books.warming or self._warm_kind.image in self._missing:
            return
        warm = sum(self._is_ready_for_all(place) for place in self._books.places.values())
        if warm < least_warm and self._books.total < self._rules.most:
            self._books.making += 1
            self._books.warming += 1
            self._start_soon(self._make, self._warm_kind, None, None)

    def _is_ready_for_all(self, place: PoolEntry) -> bool:
        return place.state is State.WARM and place.kind == self._warm_kind

    async def _make(
        self, kind: Kind, waiter: PoolRequest[PoolEntry] | None, instead_of: str | None
    ) -> None:
        ear = ContainerEvents(self)
        failure: EngineError | None = None
        try:
            if instead_of in self._books.leaving:
                await self._books.leaving[instead_of].wait()
            container = await self._maker.make(kind, ear)
        except EngineError as error:
            failure = error
        finally:
            self._books.making -= 1
            self._books.warming -= waiter is None
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
        self._books.places[container.name] = place
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
            self._books.leaving.pop(container.name).set()
        self._dispatch()

    def _destroy(self, place: PoolEntry, why: str) -> None:
        place.container.end(why)  # comes back as `on_end`
        if place.container.name in self._books.places:
            self.on_end(place, why)

    def _why_not_again(
        self, place: PoolEntry, *, once: bool, is_spared: bool = False
    ) -> str | None:
        return place.why_not_again(self._rules, self._monotonic(), once=once, is_spared=is_spared)

    def _forget(self, waiter: PoolRequest[PoolEntry]) -> None:
        """Whoever waited does not any more; what was granted in the same moment goes back."""
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
    """The same words in an exception of its own: one that is raised twice keeps both tracebacks."""
    return copy.copy(error)


def _busy(why: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"{why} Repeat the call later.", retry_after_ms=RETRY_AFTER_MS)


__all__ = ["EntryFactory", "Kind", "Listener", "Pool", "PoolEntry", "PoolRules", "Pooled"]
