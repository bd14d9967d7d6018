"""Health, readiness, alerts and a summary of the daemon. Values only."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from operator import not_
from typing import Literal

from pydantic import AwareDatetime, Field

from fumehood.core.limits import Grade, Held, Limit
from fumehood.core.value import Value


class Health(Value):
    """States that the engine's process answers. This does not mean that it serves calls (see
    `Readiness`).
    """

    status: Literal["ok"] = "ok"


class WallReadiness(Value):
    """Whether a wall can be used, and the limits that it was tested to enforce on this host.

    `missing` has a sentence for each missing image. Calls that need no missing image are served. If
    every image is missing, the wall is not ready.
    """

    ready: bool
    enforced: tuple[Limit, ...]
    missing: tuple[str, ...] = ()
    runtime: str | None = Field(default=None, exclude_if=not_)
    """What runs the containers, such as `docker`. Absent if the wall has no containers."""
    grade: Grade | None = Field(default=None, exclude_if=not_)
    """How strongly containers hold their programs. Absent until a container was started."""
    held: dict[Limit, Held] = Field(default_factory=dict, exclude_if=not_)
    """How the last container holds each limit. Absent until a container was started."""
    why: str | None = Field(default=None, exclude_if=not_)
    """Why the containers have this grade, or why their grade is refused."""


class StateReadiness(Value):
    """Whether writing to the engine's database fails (`failing`), and how many rows of the call log
    were lost (`lost_rows`).
    """

    failing: bool
    lost_rows: int


class CircuitState(StrEnum):
    """The state of a circuit: whether requests to a service are sent.

    A circuit suspends requests to a service that fails too often. If the circuit is half-open, a
    few requests are sent to test the service.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitStatus(Value):
    """The state of the circuit of one service, with counts of the last requests to the service.

    A circuit suspends requests to a service that fails too often. `retry_after_ms` is the time in
    milliseconds for which calls are still refused, or null if a call would be allowed now.
    """

    upstream: str
    state: CircuitState
    requests: int
    failures: int
    retry_after_ms: int | None


class Readiness(Value):
    """Whether calls are served, and the limits that each wall in use enforces.

    If the engine's database cannot be written, harmless calls are still served, and `state` reports
    the failure. An engine is a `standby` while another engine that uses the same database is
    active.
    """

    status: Literal["ready", "not_ready", "standby"]
    walls: dict[str, WallReadiness]
    state: StateReadiness
    broken_circuits: int = 0
    """Number of circuits that are not closed, which means that requests to a service are suspended
    or limited. Anyone may read this, so services are not named."""


AlertName = Literal[
    "success_rate", "mean_duration", "p99_duration", "error_rate", "retry_rate", "secret_misuse"
]


class Alert(Value):
    """One alert: its threshold, and the current value that is compared with the threshold."""

    name: AlertName
    tool: str | None
    """The tool, or None for all tools together."""
    firing: bool
    since: AwareDatetime | None
    """The time since which the alert is firing, or None if it is not firing."""
    value: float | None
    """The current value: a share of all calls, milliseconds or, for `secret_misuse`, a number of
    requests; None if there were no calls. For `p99_duration`, it is the share of calls that took
    longer than `threshold` milliseconds."""
    threshold: float
    calls: int
    least_calls: int
    """Minimum number of calls before the alert can fire."""
    message: str


class AlertList(Value):
    """The engine's alerts, and the firing alerts of single tools."""

    enabled: bool
    window_seconds: float
    min_calls: int
    alerts: tuple[Alert, ...]


class NodeState(StrEnum):
    """The state of a node of the cluster."""

    JOINED = "joined"
    DRAINED = "drained"
    """The node finishes its running calls and accepts no new ones."""
    UNREADY = "unready"
    """The node has joined, but cannot run calls now."""
    REFUSED = "refused"
    """The node was not admitted, for example because its version differs."""
    GONE = "gone"
    """The node had joined, but cannot be reached now."""


class NodeRecord(Value):
    """One node of the cluster: a machine that runs containers for this engine."""

    name: str
    state: NodeState
    why: str | None = None
    """One sentence if no calls, or no calls of some images, are placed there; otherwise null."""
    id: str = ""
    slots: int = 0
    """Maximum number of calls on the node at the same time."""
    used: int = 0
    """Slots in use, including the slots that other engines use."""
    sessions: int = 0
    """Number of sessions on the node that are not stopped."""
    memory_mb: int = 0
    enforced: tuple[Limit, ...] = ()
    images: dict[str, str] = Field(default={})
    """Maps the name of an image to its digest."""


class EngineSummary(Value):
    """A summary of the engine. `containers` and `sessions` are counts by state."""

    version: str
    started_at: AwareDatetime
    mode: str
    environment: str
    is_draining: bool
    running_calls: int
    readiness: Readiness
    containers: dict[str, int]
    sessions: dict[str, int]
    circuits: tuple[CircuitStatus, ...]
    """The circuits of all services that were called since the engine's start. Circuits that are not
    closed come first."""


def engine_version() -> str:
    """Return the version of the installed package, or `0` if it has no metadata."""
    try:
        return version("fumehood")
    except PackageNotFoundError:
        return "0"


class CacheStatus(Value):
    """The current size of the result cache, and counters since the engine's start."""

    entries: int
    size_bytes: int
    max_bytes: int
    running: int
    """Number of calls that are running now and whose answers may be kept."""
    hits: int
    misses: int
    evicted: int
    """Number of answers that were dropped before they expired, to make room for others."""


class ClearedCache(Value):
    """The number of answers that were dropped from the result cache."""

    cleared: int
