"""One session: its request, preset, container, expiry, share of the host, and record.

Host side, used by `sessions` and `session_use`. Invariants: one call at a time uses the container;
waiting calls are limited in number, served in order, and wait for a bounded time. If an agent is
bound to presets, each of its sessions uses one of these presets, and has only what that preset
grants, except for environment variables. Records of ended sessions are kept for a day, up to a
limit for each principal. A changed record is pending until it is stored.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum
from itertools import takewhile
from typing import Any, Protocol

import anyio
from pydantic import TypeAdapter, ValidationError

from fumehood.core.errors import InvalidParams, PermissionDenied, QuotaExceeded, faults_of
from fumehood.core.fair_share import FairShare, Lack
from fumehood.core.hosts import network_wish
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES
from fumehood.core.limits import (
    CONTAINER_MEMORY_CLASSES,
    MB,
    MIN_CPUS,
    MIN_DISK_MB,
    Grade,
    Limits,
    WallLimits,
    container_writable_mb,
    strongest,
)
from fumehood.core.names import IMAGE_NAME, MAX_NAME_CHARACTERS, listed
from fumehood.core.session import (
    SESSION_NAME,
    KeptSession,
    SavedCopy,
    SessionFields,
    SessionHome,
    SessionRecord,
    SessionStatus,
    Snapshot,
    Variables,
)
from fumehood.parts import fields_of_parts
from fumehood.sandbox.session_states import Keeps, next_state, seen_change
from fumehood.sandbox.settings import Preset, SessionSettings
from fumehood.sandbox.wall import (
    FIRST_EPOCH,
    NO_SINKS,
    HostSize,
    RunEnding,
    RunSinks,
    SessionContainer,
    try_later,
)

KEPT = timedelta(days=1)
"""How long the record of an ended session is kept."""

MAX_OF_PRINCIPAL = 100
"""Maximum number of records of ended sessions that are kept for one principal. The oldest are
deleted.
"""


def sentence(clause: str) -> str:
    """Return `clause`, such as "its owner ended it", as a sentence with a capital and a full
    stop.
    """
    return f"{clause[0].upper()}{clause[1:]}."


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The validated properties of a session. Fields ending in `_s` are in seconds."""

    name: str | None
    image: str
    memory_mb: int
    disk_mb: int | None
    cpus: float | None
    least_grade: Grade | None
    packages: tuple[str, ...]
    network: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    idle_s: float
    lifetime_s: float
    durable: bool = False

    @property
    def saved_mb(self) -> int:
        """The maximum size of the session's saved files, in MB; 0 if the session is not durable."""
        return workspace_mb(self.memory_mb, self.disk_mb) if self.durable else 0


class Leftovers(Enum):
    """The kinds of unfinished files that may be in a workspace. Programs can see such files; the
    session's owner cannot.
    """

    NONE = 0
    WRITES = 1
    """Files of failed or interrupted write requests."""
    UPLOADS = 2
    """Files of failed or interrupted write requests, and of uploads that began under an earlier
    engine.
    """


@dataclass(eq=False, slots=True)
class Session:
    """A session. Once the session is over, `finished` has its final record.

    Times are in seconds of the monotonic clock, except in the fields named `…_at`, which are dates.
    """

    id: str
    principal_id: str
    agent_id: str | None
    spec: SessionRequest
    """The session's properties. Its `packages` are all packages of the lock, as NAME==VERSION."""
    container: SessionContainer
    state: SessionStatus
    """The session's state. Only `change` sets it."""
    created_at: datetime
    last_used_at: datetime
    created: float
    last_used: float
    epoch: int = FIRST_EPOCH
    calls: int = 0
    preset: str | None = None
    """Name of the preset with which the session was created, if any."""
    snapshots: tuple[Snapshot, ...] = ()
    copy: SavedCopy | None = None
    """The saved copy of the files, if the session is durable."""
    of_parts: Mapping[str, JsonObject] = field(default_factory=dict, repr=False)
    """The values that parts keep with the session, by name. They may hold secrets."""
    must_restore: bool = False
    """Whether the next engine must restore the files from the saved copy, because the files in the
    container are incomplete, or have changes that may have to be undone.
    """
    restored_at: datetime | None = None
    copied_at: datetime | None = None
    """Time of the saved copy from which the files were restored. None if they were not restored, or
    if a call has already reported the restoration.
    """
    is_moved: bool = False
    """Whether the session has a new container that is not stored yet."""
    stopped_why: str | None = None
    """Why the session was stopped, as a sentence. None if it was not stopped, or if a call has
    already reported the restart.
    """
    has_place: bool = True
    """Whether `SessionPlaces` counts the session as running."""
    visits: int = 0
    """Number of current uses of the session's container outside of calls."""
    users: int = 0
    """Number of calls that use the session or wait for it."""
    lacks_saver: bool = False
    """Whether the session is durable, but no part of this engine saves files. Such a session cannot
    be used, and does not end when its idle time is over.
    """
    is_awaited: bool = False
    """Whether a call in the session waits for a human. If so, idle time does not end the session.
    """
    is_pausing: bool = False
    """Whether the engine must not pause the session automatically, because the session was paused
    or stopped since its last use, or an attempt to pause it was made.
    """
    stop_again: float = 0.0
    """Time of the next attempt to stop the session, if it is still unused then."""
    refused: str | None = None
    """The last message that was logged about an impossible change of the state."""
    is_outdated: bool = False
    """Whether the database row of the session is out of date."""
    leftovers: Leftovers = Leftovers.NONE
    finished: KeptSession | None = None
    """The final record, once the session has ended or is lost."""
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def is_stopped(self) -> bool:
        """Whether the session has no container, only its files on a disk or in a saved copy."""
        return self.state is SessionStatus.STOPPED

    @property
    def keeps(self) -> frozenset[Keeps]:
        """The places outside the container that keep the session's files."""
        disk = {Keeps.DISK} if self.spec.disk_mb is not None else set()
        return frozenset(disk | ({Keeps.COPY} if self.copy is not None else set()))

    @property
    def needs_copy(self) -> bool:
        """Whether the files must be restored from the saved copy before the session is used
        again.
        """
        place = self.container
        has_no_disk = self.is_stopped and self.spec.disk_mb is None
        return self.copy is not None and (place.lost is not None or place.is_away or has_no_disk)

    def change(self, name: str) -> None:
        """Change the state by the transition `name`. Raises ImpossibleChange if `TRANSITIONS` does
        not allow it.
        """
        self.state = next_state(name, self.state, self.keeps)

    def seen_change(self) -> str | None:
        """Return the name of the transition that changes the session's state to that of its
        container, or None if the two states agree. Raises ImpossibleChange if there is no such
        transition.
        """
        place = self.container
        now = SessionStatus.PAUSED if place.is_paused else SessionStatus.ACTIVE
        if place.lost is not None and self.copy is None:
            return "lose"
        if place.lost is not None or place.is_stopped:
            now = SessionStatus.STOPPED
        return None if now is self.state else seen_change(self.state, now, self.keeps)

    def why_over(self, now: float) -> str | None:
        """Return a clause that says why the session has expired at the time `now`, or None if it
        has not expired.
        """
        if now >= self.created + self.spec.lifetime_s:
            return "its lifetime is over"
        may_be_idle = self.spec.disk_mb is not None or self.is_awaited or self.lacks_saver
        if not may_be_idle and self.is_unused(now):
            return f"it was not used for {self.spec.idle_s:g} s"
        return None

    def is_unused(self, now: float) -> bool:
        """Whether the session is not in use, and its idle time is over at the time `now`."""
        return not (self.users or self.visits) and now - self.last_used >= self.spec.idle_s

    def is_idle(self, now: float, pause_s: float) -> bool:
        """Whether the session must be paused at the time `now`, because it was not used for
        `pause_s` seconds.
        """
        return (
            not (self.users or self.visits or self.is_pausing) and now - self.last_used >= pause_s
        )

    def with_env(self, program: str, arguments: JsonObject) -> JsonObject:
        """Return the arguments for a run of `program`. If `program` is the name of a language, add
        the session's environment variables to `arguments`.
        """
        return (
            with_env(self.spec.env, arguments)
            if self.spec.env and program in LANGUAGES
            else arguments
        )

    async def take_turn(self, settings: SessionSettings) -> None:
        """Wait for the turn in the session, which is the right to use the session alone, and take
        it. If earlier calls still use the session, wait at most `settings.queue_seconds`.

        Raises:
            SandboxUnavailable: earlier calls take too long, or too many calls are already waiting.
        """
        if self.users > settings.waiting:
            raise try_later("Too many calls wait for this session already. Repeat the call later.")
        self.users += 1
        try:
            with anyio.fail_after(settings.queue_seconds):
                await self._turn.acquire()
        except BaseException as error:
            self.users -= 1
            if isinstance(error, TimeoutError):
                waited = f"This session was busy with other calls for {settings.queue_seconds:g} s."
                raise try_later(f"{waited} Repeat the call later.") from None
            raise

    def leave_turn(self, now: float, now_at: datetime) -> None:
        """Release the session for the next waiting call, and record that the session was last used
        at the time `now`. `now_at` is the same time as a date.
        """
        self.users -= 1
        self.note_use(now, now_at)
        self._turn.release()

    def note_use(self, now: float, now_at: datetime) -> None:
        """Record that the session was in use until the time `now`. `now_at` is the same time as a
        date.
        """
        self.last_used, self.last_used_at = now, now_at
        self.is_outdated = True
        self.stop_again = 0.0
        self.is_pausing = self.state is not SessionStatus.ACTIVE

    def kept(self) -> KeptSession:
        """Return the session's current record, or its final record if it is over. The result also
        names the session's owner, and contains what the next engine needs to continue the session.
        """
        if self.finished is not None:
            return self.finished
        idle_end = self.last_used_at + timedelta(seconds=self.spec.idle_s)
        is_needed = self.users or self.visits or self.is_awaited or self.spec.disk_mb
        is_needed = is_needed or self.lacks_saver
        record = SessionRecord(
            id=self.id,
            name=self.spec.name,
            state=self.state,
            why=self.stopped_why if self.is_stopped else None,
            image=self.spec.image,
            languages=self.container.languages,
            agent_id=self.agent_id,
            memory_mb=self.spec.memory_mb,
            disk_mb=self.spec.disk_mb,
            cpus=self.spec.cpus,
            least_grade=self.spec.least_grade,
            packages=self.spec.packages,
            network=self.spec.network,
            created_at=self.created_at,
            last_used_at=self.last_used_at,
            expires_at=self.last_end if is_needed else min(idle_end, self.last_end),
            calls=self.calls,
            is_busy=self.users > 0,
            snapshots=self.snapshots,
            durable=self.copy is not None,
            saved_at=self.saved_at,
            restored_at=self.restored_at,
            env=tuple(self.spec.env),
            preset=self.preset,
            **fields_of_parts(self.of_parts),
        )
        place, restored_at = self.container, self.restored_at
        home = SessionHome(
            place.name, self.epoch, self.spec.idle_s, self.spec.lifetime_s, place.lock, place.node,
            self.copy, restored_at.isoformat() if restored_at is not None else None,
            self.must_restore, self.of_parts, self.spec.env,
        )  # fmt: skip
        return KeptSession(self.principal_id, record, home=home)

    @property
    def last_end(self) -> datetime:
        """When the session's lifetime ends."""
        return self.created_at + timedelta(seconds=self.spec.lifetime_s)

    @property
    def saved_at(self) -> datetime | None:
        """When the files were last saved; None if the session is not durable."""
        return datetime.fromisoformat(self.copy.saved_at) if self.copy is not None else None

    def finish(self, why: str, now_at: datetime) -> KeptSession:
        """Set the final record of a session that has ended or is lost, and return it. `why` is a
        clause, such as "its owner ended it". `now_at` is the time of the end.
        """
        before = self.kept()
        is_left = self.state is SessionStatus.LOST and bool(self.snapshots)
        record = before.record.model_copy(
            update={
                "snapshots": self.snapshots if is_left else (),
                "why": sentence(why),
                "expires_at": now_at,
                "is_busy": False,
            }
        )
        # Forks of its snapshots need the home, and a stored record's `durable` is derived from it.
        home = before.home if is_left or self.copy is not None else None
        if home is not None and not is_left:
            home = replace(home, env={})
        self.finished = KeptSession(self.principal_id, record, now_at, home)
        return self.finished


def workspace_mb(memory_mb: int, disk_mb: int | None) -> int:
    """Return the size of a session's workspace in MB. The workspace is the session's disk or, if
    `disk_mb` is None, a part of its memory.
    """
    return disk_mb or container_writable_mb(memory_mb)["/workspace"]


def make_request(
    settings: SessionSettings,
    offered: WallLimits,
    host: HostSize,
    *,
    name: str | None,
    image: str | None,
    memory_mb: int | None,
    disk_mb: int | None,
    cpus: float | None,
    least_grade: Grade | None,
    packages: Sequence[str] | None,
    network: Sequence[str],
    env: Mapping[str, str],
    idle_seconds: float | None,
    lifetime_seconds: float | None,
    durable: bool,
) -> SessionRequest:
    """Create the request for a session from the values that a caller wants. Check each value
    against the operator's limits in `settings`. If a value is None, use the configured one.

    `offered` are the limits that the wall enforces, and `host` is the size of the wall's host. If
    the wall has fixed memory sizes, the memory is rounded down to such a size.

    Raises:
        InvalidParams: a value is invalid or outside its limits.
    """
    chosen = settings.image if image is None else image
    if not re.fullmatch(IMAGE_NAME, chosen):
        raise InvalidParams(
            "This is not a valid name of an image. See `fumehood images list` for the names.",
            fields=["image"],
        )
    if name is not None and not re.fullmatch(SESSION_NAME, name):
        raise InvalidParams(f"A session's name must match {SESSION_NAME}.", fields=["name"])
    longest_s = settings.lifetime_seconds if disk_mb is None else settings.disk_lifetime_seconds
    of_calls = offered.max_memory_mb or offered.min_memory_mb
    most_mb = settings.max_memory_mb or max(host.memory_mb // 4, of_calls)
    most_mb = min(most_mb, CONTAINER_MEMORY_CLASSES[-1])
    for key, wish, least, most in (
        ("memory_mb", memory_mb, offered.min_memory_mb, most_mb),
        ("disk_mb", disk_mb, MIN_DISK_MB, settings.max_disk_mb),
        ("cpus", cpus, MIN_CPUS, settings.max_cpus or host.cpus),
        ("idle_seconds", idle_seconds, 0, settings.idle_seconds),
        ("lifetime_seconds", lifetime_seconds, 0, longest_s),
    ):
        if wish is not None and not least <= wish <= most:
            raise InvalidParams(f"{key} must be from {least:g} to {most:g} here.", fields=[key])
    for host_wish in network:
        try:
            network_wish(host_wish)
        except ValueError as error:
            fault = f"The entry {host_wish[:100]!a} of network {error}."
            raise InvalidParams(fault, fields=["network"]) from None
    try:
        _VARIABLES.validate_python(dict(env), strict=True)
    except ValidationError as error:
        path, said = faults_of(error)[0]
        fault = f"env.{path[:MAX_NAME_CHARACTERS]}: {said}." if path else f"env {said}."
        raise InvalidParams(fault, fields=["env"]) from None
    usual_mb = min(offered.default_memory_mb or offered.min_memory_mb, most_mb)
    return SessionRequest(
        name=name,
        image=chosen,
        memory_mb=offered.memory_class(memory_mb or usual_mb),
        disk_mb=disk_mb,
        cpus=cpus,
        least_grade=least_grade,
        packages=tuple(packages or ()),
        network=tuple(network),
        env=dict(env),
        idle_s=idle_seconds or settings.idle_seconds,
        lifetime_s=lifetime_seconds or longest_s,
        durable=durable,
    )


_VARIABLES: TypeAdapter[dict[str, str]] = TypeAdapter(Variables)


def with_env(env: Mapping[str, str], arguments: JsonObject) -> JsonObject:
    """Return a program's arguments with a session's environment variables `env` added.

    If `arguments` already has a variable with the same name, its value takes precedence.
    """
    added = [{"name": name, "value": value} for name, value in env.items()]
    return {**arguments, "env": [*added, *(arguments.get("env") or [])]}


# -- presets --------------------------------------------------------------------------------

NO_PRESET = Preset()


def find_preset(presets: Mapping[str, Preset], name: str | None) -> Preset:
    """Return the preset with this name. For None, return an empty preset.

    Raises:
        InvalidParams: no preset has this name.
    """
    if name is None:
        return NO_PRESET
    if name not in presets:
        raise InvalidParams(
            f"There is no preset {name[:MAX_NAME_CHARACTERS]!r}. Configured presets: "
            f"{listed(sorted(presets)) or 'none'}.",
            fields=["preset"],
        )
    return presets[name]


def merged(preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """Combine a preset with the request `given`, and return the fields of the session. A field that
    is None or missing in `given` has the preset's value.

    The hosts and environment variables in `given` are added to those of the preset. The stronger of
    both least grades counts.
    """
    fields = {name: getattr(preset, name) for name in SessionFields.model_fields}
    fields |= {name: value for name, value in given.items() if value is not None}
    fields["network"] = tuple(dict.fromkeys((*preset.network, *(given.get("network") or ()))))
    fields["least_grade"] = strongest(preset.least_grade, given.get("least_grade"))
    fields["env"] = {**preset.env, **(given.get("env") or {})}
    return fields


def require_bound(agent_id: str | None, bound: Sequence[str], preset: str | None) -> None:
    """Check that an agent may create a session with this preset. `bound` are the names of the
    presets to which the agent is bound.

    Raises:
        PermissionDenied: the agent is bound to presets, and `preset` is not one of them.
    """
    if bound and preset not in bound:
        raise _refusal(agent_id, bound, ["preset"], "Name one of them.")


def require_within(
    agent_id: str | None, bound: Sequence[str], wanted: SessionRequest, granted: SessionRequest
) -> None:
    """Check that a session has no more than its preset grants. `bound` are the presets to which the
    agent is bound, `wanted` is the request for the session, and `granted` is the request that
    results from the preset alone.

    Raises:
        PermissionDenied: `wanted` exceeds `granted`; the message names the fields.
    """
    more = {
        "image": wanted.image != granted.image,
        "memory_mb": wanted.memory_mb > granted.memory_mb,
        "cpus": (wanted.cpus or 0) > (granted.cpus or 0),
        "disk_mb": (wanted.disk_mb or 0) > (granted.disk_mb or 0),
        "packages": not set(wanted.packages) <= set(granted.packages),
        "network": not set(wanted.network) <= set(granted.network),
        "durable": wanted.durable and not granted.durable,
        "idle_seconds": wanted.idle_s > granted.idle_s,
        "lifetime_seconds": wanted.lifetime_s > granted.lifetime_s,
    }
    fields = [name for name, is_more in more.items() if is_more]
    if fields:
        words = f"Leave out the fields that exceed its preset: {', '.join(fields)}."
        raise _refusal(agent_id, bound, fields, words)


def _refusal(
    agent_id: str | None, bound: Sequence[str], fields: Sequence[str], remedy: str
) -> PermissionDenied:
    words = f"The agent {agent_id} is bound to presets: {listed(bound)}. {remedy}"
    return PermissionDenied(words, fields=fields)


# -- places ----------------------------------------------------------------------------------

PROMISED = 0.75
"""Fraction of the host's memory that all running sessions together may reserve. The sessions of one
principal may reserve this fraction of that amount.
"""


class SessionPlaces:
    """Counts sessions, disks, saved files and memory, in total and for each principal. Sessions
    that are being created count as well.

    All running sessions together get at most the `PROMISED` fraction of the host's memory. The
    caller must give back each amount that it has taken, exactly once.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self.running = FairShare(settings.max, settings.max_of_one)
        """Number of sessions that are not stopped."""
        self.disks = FairShare(settings.max_disks, (settings.max_disks + 1) // 2)
        """Number of sessions with a disk."""
        self.saved = FairShare(settings.max_saved_mb, settings.max_saved_mb // 2)
        """Total size of the workspaces of durable sessions, in MB."""
        self._memory = FairShare(sys.maxsize, sys.maxsize)
        """Total memory of the sessions that are not stopped, in MB."""

    def take(
        self, principal_id: str, memory_mb: int, host: HostSize
    ) -> tuple[Lack, QuotaExceeded] | None:
        """Count one more running session with `memory_mb` of memory, and return None. `host` is the
        size of the host.

        If the number of sessions or their memory would exceed a limit, count nothing, and return a
        pair. Its first value says whether this is the limit of the principal or of all principals.
        Its second value is the error for the caller, which is not raised here.
        """
        if host.memory_mb:
            self._memory.most = round(host.memory_mb * PROMISED)
            self._memory.most_of_one = round(self._memory.most * PROMISED)
        for share, unit, amount in ((self.running, "sessions", 1), (self._memory, "MB", memory_mb)):
            lack = share.lacks(principal_id, amount)
            if lack is not None:
                return lack, QuotaExceeded(
                    f"The engine has no room for another session of {memory_mb} MB: {share.total} "
                    f"of {share.most} {unit} are reserved, {share.of(principal_id)} of "
                    f"{share.most_of_one} for you. End a session, or stop one that has a disk: "
                    "`fumehood sessions end ID`, `fumehood sessions stop ID`.",
                    retryable=True,
                )
        self.add(principal_id, memory_mb)
        return None

    def add(self, principal_id: str, memory_mb: int) -> None:
        """Count a session that is already running, even if that exceeds the limits."""
        self.running.add(principal_id)
        self._memory.add(principal_id, memory_mb)

    def give_back(self, principal_id: str, memory_mb: int) -> None:
        """Subtract one running session with this memory from the counts."""
        self.running.give_back(principal_id)
        self._memory.give_back(principal_id, memory_mb)

    def take_disks(self, principal_id: str, number: int) -> None:
        """Count `number` more sessions with a disk.

        Raises:
            QuotaExceeded: the number of sessions with a disk would exceed a limit. Nothing is
                counted.
        """
        if self.disks.take(principal_id, number) is not None:
            raise QuotaExceeded(
                f"There are too many sessions with a disk: {self.disks.total} of at most "
                f"{self.disks.most}, {self.disks.of(principal_id)} of at most "
                f"{self.disks.most_of_one} of them yours. End one of yours first: "
                "`fumehood sessions end ID`."
            )

    def take_saved(self, principal_id: str, mb: int) -> None:
        """Count the workspace of one more durable session. `mb` is its size in MB.

        Raises:
            QuotaExceeded: all workspaces together would be too large. Nothing is counted.
        """
        if self.saved.take(principal_id, mb) is not None:
            raise QuotaExceeded(
                f"There is no room for another durable session of {mb} MB: {self.saved.total} of "
                f"{self.saved.most} MB are reserved, {self.saved.of(principal_id)} of "
                f"{self.saved.most_of_one} MB for you. End a durable session first, or create a "
                "smaller one."
            )


# -- durable sessions ----------------------------------------------------------------------


class NotSaved(Exception):
    """The files of a session could not be saved or replaced. The message says why, as a clause."""


class CopyLost(Exception):
    """The saved files of a session are incomplete. The message is a clause that names the missing
    part.
    """


class Saver(Protocol):
    """Keeps copies of workspaces outside their containers. A part of the engine provides it
    (`EnginePart.saver`).

    The methods are never called concurrently for one session. A stored copy stays complete until
    the next copy is stored, or until `drop` is called.
    """

    def may_change(self, program: str, arguments: JsonObject) -> bool:
        """Whether a run of this program with these arguments may change files."""

    async def save(
        self,
        source: CopySource,
        copy: SavedCopy,
        now: Callable[[], datetime],
        store: Callable[[SavedCopy], Awaitable[None]],
    ) -> None:
        """Save the files in `source` that have changed since `copy`, and pass the new copy to
        `store`. If no file has changed, do nothing. `now` returns the time that the new copy gets.

        Raises:
            NotSaved: nothing was stored, and `copy` is still complete.
            EngineError: `store` failed. Either the old or the new copy is stored, and both are
                complete.
        """

    async def restore(self, target: CopySource, copy: SavedCopy) -> None:
        """Write the files of `copy` into the empty workspace `target`.

        Raises:
            CopyLost: files of the copy are permanently lost.
            SandboxUnavailable, StateUnavailable: the copy cannot be read or restored now.
        """

    async def drop(self, session_id: str) -> None:
        """Delete all copies of an ended session. A failed deletion is repeated later."""


@dataclass(frozen=True, slots=True)
class CopySource:
    """A session's workspace, as a `Saver` uses it. It implements `Lease`. Unlike the lease of a
    call, it does not wait for other calls in the session, and does not save the files after a run.
    """

    session_id: str
    memory_mb: int
    disk_mb: int | None
    container: SessionContainer
    queue_ms: float = 0.0

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Wait for the cleanup after the last run, then run one of the engine's own programs, and
        return its ending.
        """
        await self.container.until_free()
        limits = replace(limits, memory_mb=self.memory_mb, disk_mb=self.disk_mb)
        return await self.container.run(program, arguments, limits, sinks)

    @property
    def most_bytes(self) -> int:
        """The capacity of the workspace in bytes."""
        return workspace_mb(self.memory_mb, self.disk_mb) * MB


def source_of(session: Session) -> CopySource:
    """Return the workspace of a session in the form that a `Saver` needs."""
    return CopySource(session.id, session.spec.memory_mb, session.spec.disk_mb, session.container)


# -- ended sessions -----------------------------------------------------------------------


class SessionRows(Protocol):
    """The database table of sessions."""

    async def change(self, put: list[KeptSession], delete: list[str]) -> None:
        """Write the rows `put`, and delete the rows of the session ids `delete`, in one
        transaction. The transaction is durable when this method returns.

        Raises:
            EngineError: the write failed. The transaction may or may not have been stored.
        """


class SessionHistory:
    """The records of ended sessions, and the changes to rows of all sessions that are not written
    yet.
    """

    def __init__(self, rows: SessionRows) -> None:
        self._rows = rows
        self._over: dict[str, KeptSession] = {}
        self._named: dict[tuple[str, str | None], str] = {}
        """Principal and name of a session → id of the last ended session with this name."""
        self._unwritten: dict[str, KeptSession] = {}
        self._undeleted: set[str] = set()

    def find(self, principal_id: str, reference: str) -> KeptSession | None:
        """Return an ended session of a principal, or None. `reference` is the id of the session, or
        a name, which means the last ended session with this name.
        """
        found = self._over.get(self._named.get((principal_id, reference), reference))
        return found if found is not None and found.principal_id == principal_id else None

    def every(self) -> list[KeptSession]:
        """Return every ended session, newest first."""
        return list(self._over.values())[::-1]

    def of(self, principal_id: str) -> list[KeptSession]:
        """Return this principal's ended sessions, newest first."""
        own = [kept for kept in self._over.values() if kept.principal_id == principal_id]
        return own[::-1]

    def add(self, ended: KeptSession) -> None:
        """Add a session that has ended. The next `write` writes its row."""
        self.keep(ended)
        self.note(ended)

    def note(self, changed: KeptSession) -> None:
        """Register the new or changed row of a session, which may be active or over. The next
        `write` writes the row.
        """
        self._unwritten[changed.record.id] = changed

    def prune(self, now: datetime) -> None:
        """Forget sessions that ended more than a day before `now`. The next `write` deletes their
        rows.
        """
        oldest = now - KEPT
        # Sessions are in the order in which they ended, so this stops at the first one to keep.
        gone = takewhile(lambda kept: (kept.finished_at or now) < oldest, self._over.values())
        self.forget([kept.record.id for kept in gone])

    async def write(self) -> None:
        """Write pending changes. If that fails, they stay pending for the next `write`.

        Raises:
            EngineError: the write failed. The changes may or may not have been stored.
        """
        put, delete = dict(self._unwritten), set(self._undeleted)
        if not put and not delete:
            return
        await self._rows.change(list(put.values()), sorted(delete))
        self._undeleted -= delete
        for session_id, written in put.items():
            if self._unwritten.get(session_id) is written:
                del self._unwritten[session_id]

    def keep(self, ended: KeptSession) -> None:
        """Add a session that has ended and whose row is already stored."""
        self._over[ended.record.id] = ended
        if ended.record.name is not None:
            self._named[ended.principal_id, ended.record.name] = ended.record.id
        own = self.of(ended.principal_id)
        self.forget([old.record.id for old in own[MAX_OF_PRINCIPAL:]])

    def forget(self, session_ids: Iterable[str]) -> None:
        """Forget the sessions with these ids. The next `write` deletes their rows, if they are
        stored.
        """
        for session_id in session_ids:
            gone = self._over.pop(session_id, None)
            own_name = (gone.principal_id, gone.record.name) if gone is not None else ("", None)
            if self._named.get(own_name) == session_id:
                del self._named[own_name]
            self._unwritten.pop(session_id, None)
            self._undeleted.add(session_id)
