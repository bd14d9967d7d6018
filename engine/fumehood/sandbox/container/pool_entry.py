"""A place: one container in the pool's books, what kind it is, and for how long it is used.

Host side, below the pool. Values, and the seams to what makes containers and to the containers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from fumehood.core.identity import TrustDomain
from fumehood.sandbox.container.settings import ContainerSettings


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """What a container must be to serve a call: made of this image, and of this size."""

    image: str
    memory_mb: int


class Listener(Protocol):
    """How a container tells its holder of itself."""

    def on_clean(self) -> None: ...
    def on_end(self, why: str) -> None: ...


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


class EntryFactory(Protocol):
    """Makes and removes containers."""

    async def make(self, kind: Kind, listener: Listener) -> Pooled:
        """Raises EngineError where no container can be made; then none is left behind."""
        ...

    async def remove(self, name: str) -> None:
        """Returns when it is gone, however often that has to be tried."""
        ...


class State(Enum):
    """What the container of a place does."""

    WARM = auto()
    """It has run nothing, and belongs to nobody."""
    BUSY = auto()
    """A lease holds it."""
    RESETTING = auto()
    IDLE = auto()
    """It is clean, and waits for the next call of its domain."""


UNUSED = (State.WARM, State.IDLE)


@dataclass(eq=False, slots=True)
class PoolEntry:
    """One container in the pool's books."""

    container: Pooled
    kind: Kind
    made_at: float
    ear: ContainerEvents
    state: State = State.WARM
    domain: TrustDomain | None = None
    uses: int = 0
    last_used: float = 0.0
    given_at: float = 0.0
    """When it became its domain's."""

    def why_not_again(
        self, settings: ContainerSettings, now: float, *, once: bool, is_spared: bool = False
    ) -> str | None:
        """Why its container serves nobody any more, if that is so."""
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


class EventsListener(Protocol):
    """Who keeps the books."""

    def on_clean(self, place: PoolEntry) -> None: ...
    def on_end(self, place: PoolEntry, why: str) -> None: ...


class ContainerEvents:
    """Hears of one container for whoever has it; made before it is."""

    __slots__ = ("_books", "_place", "listener")

    def __init__(self, books: EventsListener) -> None:
        self._books = books
        self._place: PoolEntry | None = None
        self.listener: Listener | None = None
        """Who hears of it instead of the pool, once the pool has let go of it."""

    def belongs_to(self, place: PoolEntry) -> None:
        """From now on it hears for this place."""
        self._place = place

    def on_clean(self) -> None:
        if self.listener is not None:
            self.listener.on_clean()
        elif self._place is not None:
            self._books.on_clean(self._place)

    def on_end(self, why: str) -> None:
        if self.listener is not None:
            self.listener.on_end(why)
        elif self._place is not None:
            self._books.on_end(self._place, why)
