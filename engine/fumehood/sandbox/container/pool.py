"""The pool: warm containers, whose they are, and who gets one next.

Host side, between the wall and `container`. Runs in the event loop alone, so its books change in
one step. Invariant: a container serves one trust domain in its whole life. It is reset between
that domain's calls, and destroyed where it would change hands, was left in the middle of a run,
is not clean, or has done enough. There are never more than `most`, those included that are being
made or removed.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import anyio

from fumehood.model.errors import EngineError, SandboxUnavailable
from fumehood.model.identity import TrustDomain
from fumehood.model.json_types import JsonObject
from fumehood.sandbox.container.line import Line, LineFull, Waiter

RETRY_AFTER_MS = 1000
TURN_S = 1.0
"""How long a trust domain keeps a container that others wait for. Making one takes half of it."""

MAX_COMPLAINT_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class PoolRules:
    """How many containers there are, and for how long each is used."""

    least_warm: int = 1
    """That stand ready for whoever comes, of the default memory class."""
    most: int = 8
    warm_memory_mb: int = 512
    idle_s: float = 300
    """After which one that serves a trust domain is not kept for it any longer."""
    lifetime_s: float = 3600
    max_uses: int = 1000
    patience_s: float = 30
    """How long a call waits for a container."""


class Pooled(Protocol):
    """What the pool needs to know of a container."""

    @property
    def name(self) -> str: ...
    @property
    def image_id(self) -> str: ...
    @property
    def is_dead(self) -> bool: ...
    @property
    def is_free(self) -> bool: ...
    @property
    def is_resetting(self) -> bool: ...
    @property
    def is_dirty(self) -> bool: ...
    @property
    def ran_out_of_memory(self) -> bool: ...
    @property
    def complaint(self) -> str: ...
    def end(self, why: str) -> None: ...
    async def until_examined(self) -> None: ...


class Listener(Protocol):
    """How a container tells the pool of itself."""

    def on_clean(self) -> None: ...
    def on_end(self, why: str) -> None: ...


class Maker(Protocol):
    """Makes and removes containers."""

    async def make(self, memory_mb: int, listener: Listener) -> Pooled:
        """Raises EngineError where no container can be made; then none is left behind."""
        ...

    async def remove(self, name: str) -> None:
        """Returns when it is gone, however often that has to be tried."""
        ...


class _State(Enum):
    WARM = auto()
    """It has run nothing, and belongs to nobody."""
    BUSY = auto()
    """A lease holds it."""
    RESETTING = auto()
    IDLE = auto()
    """It is clean, and waits for the next call of its domain."""


_UNUSED = (_State.WARM, _State.IDLE)


@dataclass(eq=False, slots=True)
class Place:
    """One container in the pool's books."""

    container: Pooled
    memory_mb: int
    made_at: float
    state: _State = _State.WARM
    domain: TrustDomain | None = None
    uses: int = 0
    last_used: float = 0.0
    given_at: float = 0.0
    """When it became its domain's."""


class _Ear:
    """Hears of one container for the pool; made before it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.place: Place | None = None

    def on_clean(self) -> None:
        if self.place is not None:
            self._pool.on_clean(self.place)

    def on_end(self, why: str) -> None:
        if self.place is not None:
            self._pool.on_end(self.place, why)


class Pool:
    """Containers to lease. Closed when made: `open` says that containers can be made."""

    def __init__(
        self,
        maker: Maker,
        rules: PoolRules,
        start_soon: Callable[..., object],
        *,
        on_event: Callable[[str, JsonObject], None] = lambda event, values: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._maker = maker
        self._rules = rules
        self._most_of_one = rules.most - rules.most // 4
        """Of one principal at a time: its calls, however long, do not keep out all others'."""
        self._start_soon = start_soon
        self._on_event = on_event
        self._monotonic = monotonic
        self._places: dict[str, Place] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        self._making = 0
        self._warming = 0
        """How many of `_making` are for nobody in particular."""
        self._line: Line[Place] = Line()
        self._is_dispatching = False
        self._has_changed = False
        self._refusal: EngineError | None = SandboxUnavailable(
            "The container wall is being started. Repeat the call.", retry_after_ms=RETRY_AFTER_MS
        )
        self.dirty = 0
        """Containers that could not be cleaned."""

    # -- what the wall asks ---------------------------------------------------------

    async def take(self, domain: TrustDomain, memory_mb: int, *, fresh: bool) -> Place:
        """Wait, bounded, for a container of this domain or of nobody yet.

        Raises:
            SandboxUnavailable: none in time, too many wait, or none can be made.
        """
        if self._refusal is not None:
            raise _another(self._refusal)
        loop = asyncio.get_running_loop()
        waiter: Waiter[Place] = Waiter(domain, memory_mb, fresh, loop.create_future())
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

    def give_back(self, place: Place, *, ran: bool, fresh: bool) -> None:
        """A lease is left. What was left in the middle of a run is destroyed."""
        if place.container.name not in self._places:
            return
        place.last_used = self._monotonic()
        if not ran:
            place.state = _State.IDLE if place.uses else _State.WARM
            place.domain = place.domain if place.uses else None
        else:
            place.uses += 1
            place.state = _State.RESETTING if place.container.is_resetting else _State.IDLE
        why = self._why_not_again(place, once=ran and fresh)
        if why is not None:
            self._destroy(place, why)
        self._dispatch()

    def open(self) -> None:
        """Containers can be made."""
        self._refusal = None
        self._dispatch()

    def close(self, refusal: EngineError, *, destroy: str | None = None) -> None:
        """None can be made, for this reason; who waits is told. `destroy` ends those there are."""
        self._refusal = refusal
        for waiter in self._line:
            self._refuse(waiter, refusal)
        if destroy is not None:
            for place in list(self._places.values()):
                self._destroy(place, destroy)

    def tidy(self) -> None:
        """Destroy what has been there for too long. To be called now and then."""
        spared = self._rules.least_warm
        for place in list(self._places.values()):
            if place.state not in _UNUSED:
                continue
            is_spared = self._is_ready_for_all(place) and spared > 0
            spared -= is_spared
            why = self._why_not_again(place, once=False, is_spared=is_spared)
            if why is not None:
                self._destroy(place, why)
        self._dispatch()

    def retire(self, is_outdated: Callable[[Pooled], bool]) -> None:
        """Destroy those that stand idle and are of an older kind; the others later."""
        for place in list(self._places.values()):
            if place.state in _UNUSED and is_outdated(place.container):
                self._destroy(place, "its image is not the newest")
        self._dispatch()

    @property
    def names(self) -> list[str]:
        """The containers that are there, those included that are being removed."""
        return [*self._places, *self._leaving]

    def counts(self) -> JsonObject:
        """How many there are, by state. For the operator."""
        states = Counter(place.state.name.lower() for place in self._places.values())
        return {
            **{state.name.lower(): states[state.name.lower()] for state in _State},
            "making": self._making,
            "leaving": len(self._leaving),
            "waiting": len(self._line),
            "dirty": self.dirty,
        }

    # -- what containers say of themselves ------------------------------------------

    def on_clean(self, place: Place) -> None:
        """A container has been reset."""
        if place.state is _State.RESETTING:
            place.state = _State.IDLE
            self._dispatch()

    def on_end(self, place: Place, why: str) -> None:
        """A container has ended: by itself, by its channel, or by `_destroy`."""
        if self._places.pop(place.container.name, None) is None:
            return
        if place.container.is_dirty:
            self.dirty += 1
            self._tell("container.dirty", place, why)
        self._tell("container.destroyed", place, why)
        self._leaving[place.container.name] = asyncio.Event()
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
                if self._refusal is None:
                    self._go_round()
                    self._keep_warm()
        finally:
            self._is_dispatching = False

    def _go_round(self) -> None:
        """One turn for each trust domain that waits."""
        coming = Counter(
            (place.domain, place.memory_mb)
            for place in self._places.values()
            if place.state is _State.RESETTING
        )
        shares = self._shares()
        can_make = True
        for waiters in self._line.in_turn():
            for waiter in waiters:
                key = (waiter.domain, waiter.memory_mb)
                if waiter.granted.done():  # cancelled, and not yet out of the line
                    continue
                if shares[waiter.domain.principal_id] >= self._most_of_one:
                    break  # all of this principal's wait for one of its own to end
                place = self._find(waiter, _State.IDLE)
                if place is None and not waiter.fresh and coming[key]:
                    coming[key] -= 1  # its own will be clean in a moment
                    continue
                place = place or self._find(waiter, _State.WARM)
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
                if not any(place.state in _UNUSED for place in self._places.values()):
                    return  # nothing is left to be given to anybody

    def _shares(self) -> Counter[str]:
        """How many containers each principal has calls in, or has being made."""
        busy = [place.domain for place in self._places.values() if place.state is _State.BUSY]
        shares = Counter(domain.principal_id for domain in busy if domain is not None)
        shares.update(one.domain.principal_id for one in self._line if one.is_being_made)
        return shares

    def _find(self, waiter: Waiter[Place], state: _State) -> Place | None:
        """One in this state that may serve the waiter: the last used, so that others grow old."""
        domain = None if state is _State.WARM else waiter.domain
        if waiter.fresh and state is not _State.WARM:
            return None
        fitting = (
            place
            for place in self._places.values()
            if place.state is state
            and place.domain == domain
            and place.memory_mb == waiter.memory_mb
        )
        return max(fitting, key=lambda place: place.last_used, default=None)

    def _grant(self, waiter: Waiter[Place], place: Place) -> None:
        assert place.domain in (None, waiter.domain)
        assert place.uses == 0 or not waiter.fresh
        if place.domain is None:
            place.given_at = self._monotonic()
        place.domain = waiter.domain
        place.state = _State.BUSY
        self._line.pass_on(waiter)
        self._line.leave(waiter)
        waiter.granted.set_result(place)

    def _have_made(self, waiter: Waiter[Place]) -> bool:
        """Begin to make one for it, in the place of an idle one where the pool is full."""
        instead_of = None
        if self._total() >= self._rules.most:
            victim = self._dispensable()
            if victim is None:
                return False
            instead_of = victim.container.name
            self._destroy(victim, "room for another")
        waiter.is_being_made = True
        self._line.pass_on(waiter)
        self._making += 1
        self._start_soon(self._make, waiter.memory_mb, waiter, instead_of)
        return True

    def _dispensable(self) -> Place | None:
        """The least recently used of those that nobody uses; what serves whoever comes goes last.

        One that its own domain waits for stays for the length of a turn: a container for every
        call of every domain would cost all of them more than waiting.
        """
        now = self._monotonic()
        wanted = {(waiter.domain, waiter.memory_mb) for waiter in self._line if not waiter.fresh}
        idle = (
            place
            for place in self._places.values()
            if place.state in _UNUSED
            and ((place.domain, place.memory_mb) not in wanted or now - place.given_at >= TURN_S)
        )
        return min(
            idle, key=lambda place: (place.state is _State.WARM, place.last_used), default=None
        )

    def _keep_warm(self) -> None:
        """One more, where too few stand ready, nobody waits, and there is room."""
        if len(self._line) or self._warming:
            return
        warm = sum(self._is_ready_for_all(place) for place in self._places.values())
        if warm < self._rules.least_warm and self._total() < self._rules.most:
            self._making += 1
            self._warming += 1
            self._start_soon(self._make, self._rules.warm_memory_mb, None, None)

    def _is_ready_for_all(self, place: Place) -> bool:
        return place.state is _State.WARM and place.memory_mb == self._rules.warm_memory_mb

    def _total(self) -> int:
        return len(self._places) + len(self._leaving) + self._making

    async def _make(
        self, memory_mb: int, waiter: Waiter[Place] | None, instead_of: str | None
    ) -> None:
        ear = _Ear(self)
        failure: EngineError | None = None
        try:
            if instead_of in self._leaving:
                await self._leaving[instead_of].wait()
            container = await self._maker.make(memory_mb, ear)
        except EngineError as error:
            failure = error
        finally:
            self._making -= 1
            self._warming -= waiter is None
            if waiter is not None:
                waiter.is_being_made = False
        if failure is not None:
            if waiter is not None:
                self._refuse(waiter, failure)
                self._dispatch()
            return
        ear.place = place = Place(container, memory_mb, self._monotonic())
        place.last_used = place.made_at
        self._places[container.name] = place
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
            self._leaving.pop(container.name).set()
        self._dispatch()

    def _destroy(self, place: Place, why: str) -> None:
        place.container.end(why)  # comes back as `on_end`
        if place.container.name in self._places:
            self.on_end(place, why)

    def _why_not_again(self, place: Place, *, once: bool, is_spared: bool = False) -> str | None:
        now = self._monotonic()
        container, rules = place.container, self._rules
        reasons = {
            "it was for one call": once,
            "a run was left in the middle": not (container.is_free or container.is_resetting),
            "memory ran out in it": container.ran_out_of_memory,
            "it has served enough": place.uses >= rules.max_uses,
            "it is old": now - place.made_at >= rules.lifetime_s,
            "it was idle": not is_spared and now - place.last_used >= rules.idle_s,
        }
        return next((why for why, is_so in reasons.items() if is_so), None)

    def _forget(self, waiter: Waiter[Place]) -> None:
        """Whoever waited does not any more; what was granted in the same moment goes back."""
        self._line.leave(waiter)
        granted = waiter.granted
        if granted.done() and not granted.cancelled():
            if granted.exception() is None:
                self.give_back(granted.result(), ran=False, fresh=waiter.fresh)
        else:
            granted.cancel()
            self._dispatch()

    def _refuse(self, waiter: Waiter[Place], refusal: EngineError) -> None:
        self._line.leave(waiter)
        if not waiter.granted.done():
            waiter.granted.set_exception(_another(refusal))

    def _tell(self, event: str, place: Place, why: str) -> None:
        values: JsonObject = {"name": place.container.name, "why": why, "uses": place.uses}
        if place.container.complaint:
            values["guest_said"] = place.container.complaint[-MAX_COMPLAINT_CHARACTERS:]
        self._on_event(event, values)


def _another(error: EngineError) -> EngineError:
    """The same words in an exception of its own: one that is raised twice keeps both tracebacks."""
    return copy.copy(error)


def _busy(why: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"{why} Repeat the call later.", retry_after_ms=RETRY_AFTER_MS)
