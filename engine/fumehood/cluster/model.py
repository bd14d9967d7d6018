"""The values that engines and nodes exchange.

The values are pickled, so both sides must have the same version of this package. The engine
compares the versions first (`NodeFacts`). Nodes are trusted: anyone who can call a node can run
code on its machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple, TypedDict

from fumehood.core.errors import EngineError
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade, Limit, Limits
from fumehood.core.session import SessionHome, SessionRecord
from fumehood.sandbox.container.pool import Kind
from fumehood.sandbox.settings import WallSettings
from fumehood.sandbox.streams import StreamKind
from fumehood.sandbox.wall import HostSize

VERSION = version("fumehood")
"""Version of the running code. If the package is upgraded while the process runs, this value stays
the same."""


class Ticket(NamedTuple):
    """Identifies an engine to a node that the engine has joined.

    `owner` is the id of the engine's state. `epoch` is a number, which is higher each time the
    engine starts, and each time it joins the same node again. Of the tickets with the same `owner`,
    a node obeys only the one with the highest `epoch`.
    """

    owner: str
    epoch: int


class NodeFacts(TypedDict):
    """A node's id, name, package version, number of slots and clock. An engine checks them before
    it joins the node.

    The values are sent as a plain dictionary, so that an engine of another version can read them
    too.
    """

    id: str
    """The node's id, which stays the same as long as the node keeps its directory."""
    name: str
    version: str
    """Version of this package on the node."""
    slots: int
    clock: float
    """The node's clock, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an engine sends to each node that it joins: the settings for containers, and what the
    node must keep. The node must keep the listed sessions, and the listed copies of disks.
    """

    settings: WallSettings
    sessions: tuple[tuple[SessionRecord, SessionHome], ...] = ()
    """The sessions on this node that have not ended."""
    copies: frozenset[str] = frozenset()
    """Ids of the disk copies that the node must keep."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """A container image on a node: its id, when it was created, and the languages it can run."""

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
    """The number of registered processes that are running in the container."""
    grade: Grade | None = None
    """How strongly the container holds its programs. None if it does not run."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The state of a node, as reported to one engine."""

    number: int
    """Number of the report, which grows with each change of the state."""
    is_ready: bool
    is_drained: bool
    seen: frozenset[Limit]
    faults: tuple[str, ...]
    host: HostSize
    images: dict[str, ImageFacts]
    warm: dict[Kind, int]
    counts: JsonObject
    """Number of containers by state."""
    others: int
    """Slots that other engines use."""
    engines: int
    """The number of engines that have joined the node."""
    changed: dict[str, HeldState]
    """Session id → state, for each session that has changed since the last report that the engine
    received."""
    grade: Grade | None = None
    """How strongly containers hold their programs. None if none was started."""


@dataclass(frozen=True, slots=True)
class RunOrder:
    """An order to run a program: the program, its container, and the events to send back."""

    id: str
    program: str
    arguments: JsonObject
    limits: Limits
    domain: TrustDomain
    fresh: bool = False
    kind: Kind | None = None
    digest: str = ""
    """Digest of the image without additions. An approval may be bound to this digest."""
    lock: str = ""
    """The lock of the image's additions, or "" if the image has none."""
    session_id: str | None = None
    """The session in whose container the program runs. If it is None, the program runs in a
    container of the pool, of the kind `kind`."""
    is_live: bool = False
    wants: frozenset[str] = frozenset()
    """The fields of `RunSinks` that have a receiver."""
    streams: tuple[StreamKind, ...] = ()
    """The kinds of the run's streams."""
    trial: tuple[str, str] | None = None
    """The same as `RunSinks.trial`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An engine error that a node returns as a value instead of raising it."""

    error: EngineError


RunEvent = tuple[Any, ...]
"""The name of an event and its values. The last event of a run is `ending` or `refused`."""
