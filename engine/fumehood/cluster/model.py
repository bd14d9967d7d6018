"""What engines and nodes send each other: values only.

They are pickled, so both sides must have the same version of this package, which is compared first
(`NodeFacts`). Nodes are trusted: whoever can call a node can run code on its machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple, TypedDict

from fumehood.core.errors import EngineError
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit, Limits
from fumehood.core.session import SessionHome, SessionRecord
from fumehood.sandbox.container.pool import Kind
from fumehood.sandbox.settings import WallSettings
from fumehood.sandbox.wall import HostSize

VERSION = version("fumehood")
"""The version of the code that runs: an upgrade in place changes what is installed, not this."""


class Ticket(NamedTuple):
    """Who commands a node: an engine's state, and the number of this command of it.

    Each start of an engine has higher numbers than earlier ones, and each time that it joins a node
    again. A node obeys the highest number only.
    """

    owner: str
    epoch: int


class NodeFacts(TypedDict):
    """What a node says of itself before it obeys anybody. No class, so that an engine of another
    version can read it.
    """

    id: str
    """Stays the same as long as its directory."""
    name: str
    version: str
    """Of this package."""
    slots: int
    clock: float
    """Its time, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an engine wants of a node: how containers are made, and which sessions stay."""

    settings: WallSettings
    sessions: tuple[tuple[SessionRecord, SessionHome], ...] = ()
    """Sessions of this node that are not over."""
    copies: frozenset[str] = frozenset()
    """Copies of disks that are kept."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """An image on a node."""

    id: str
    created: float
    languages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state of a session's container on its node."""

    name: str
    languages: tuple[str, ...]
    lock: str
    lost: str | None
    is_paused: bool
    is_stopped: bool
    running: int = 0
    """Registered processes that run."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The state of a node, for one engine."""

    number: int
    """Grows with each change."""
    is_ready: bool
    is_drained: bool
    seen: frozenset[Limit]
    faults: tuple[str, ...]
    host: HostSize
    images: dict[str, ImageFacts]
    warm: dict[Kind, int]
    counts: JsonObject
    """Containers by state."""
    others: int
    """Slots that other engines use."""
    engines: int
    """The number of engines that have joined it."""
    changed: dict[str, HeldState]
    """Session id → state, of those that changed since the report that the engine has."""


@dataclass(frozen=True, slots=True)
class RunOrder:
    """One run: where, what, and which of its events are wanted."""

    id: str
    program: str
    arguments: JsonObject
    limits: Limits
    domain: TrustDomain
    fresh: bool = False
    kind: Kind | None = None
    digest: str = ""
    """That of the image below its packages, to which an approval may be bound."""
    lock: str = ""
    """The packages in the name of its image, with hashes."""
    session_id: str | None = None
    """The session whose container it runs in; None: a container of the pool, of this kind."""
    is_live: bool = False
    wants: frozenset[str] = frozenset()
    """Names of `RunSinks` that have a receiver."""
    trust: str | None = None
    """The certificates of the gateway, for a program that has network."""
    trial: tuple[str, str] | None = None
    """As in `RunSinks`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An error of the engine's own, sent as a value."""

    error: EngineError


RunEvent = tuple[Any, ...]
"""The name of an event and its values; the last one is `ending` or `refused`."""
