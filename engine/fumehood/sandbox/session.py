"""One session: its request, its container and expiry, the leases of its calls, and its record.

Host side, used by `sessions`; executors use the leases. Invariants: one call at a time uses the
container; waiting calls are limited in number, served in order, and wait for a bounded time. A run
begins only while the session is active and its container is clean; if the session ends during a
run, the run's ending reports that. Records of ended sessions are kept for a day, up to a limit for
each principal, and a change stays pending until it is stored.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import takewhile
from pathlib import PurePath
from typing import Any, Protocol

import anyio
from pydantic import TypeAdapter, ValidationError

from fumehood.core.errors import EndedBy, InvalidParams, faults_of
from fumehood.core.hosts import network_wish
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES
from fumehood.core.limits import (
    CONTAINER_MEMORY_CLASSES,
    MB,
    MIN_CPUS,
    MIN_DISK_MB,
    Limits,
    WallLimits,
    container_writable_mb,
)
from fumehood.core.names import IMAGE_NAME, MAX_NAME_CHARACTERS
from fumehood.core.session import (
    SESSION_NAME,
    KeptSession,
    ProjectHome,
    SavedCopy,
    SessionHome,
    SessionRecord,
    SessionStatus,
    Snapshot,
    Variables,
)
from fumehood.sandbox.settings import SessionSettings
from fumehood.sandbox.wall import (
    FIRST_EPOCH,
    NO_SINKS,
    HostSize,
    Lease,
    RunEnding,
    RunSinks,
    SessionContainer,
    try_later,
)

KEPT = timedelta(days=1)
"""How long the record of an ended session is kept."""

MIN_S = 0.001
"""Shortest idle time and lifetime of a session, in seconds."""

MAX_OF_PRINCIPAL = 100
"""Maximum number of ended sessions that are kept for one principal. Older ones are deleted."""


def pins_of(lock: str) -> tuple[str, ...]:
    """Return the packages of a lock as NAME==VERSION."""
    return tuple(line.split()[0] for line in lock.splitlines() if "==" in line)


def sentence(clause: str) -> str:
    """Make a sentence of a clause such as "its owner ended it"."""
    return f"{clause[0].upper()}{clause[1:]}."


@dataclass(eq=False, slots=True)
class Session:
    """An active session. Times are from the monotonic clock, except the fields named `…_at`."""

    id: str
    principal_id: str
    agent_id: str | None
    name: str | None
    image: str
    memory_mb: int
    disk_mb: int | None
    cpus: float | None
    packages: tuple[str, ...]
    network: tuple[str, ...]
    container: SessionContainer
    idle_s: float
    lifetime_s: float
    created_at: datetime
    last_used_at: datetime
    created: float
    last_used: float
    epoch: int = FIRST_EPOCH
    calls: int = 0
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of its programs."""
    preset: str | None = None
    """The preset with which it was made."""
    snapshots: tuple[Snapshot, ...] = ()
    copy: SavedCopy | None = None
    """Its saved files, if it is durable."""
    project: ProjectHome | None = None
    in_trial: bool = False
    """Whether its files are those of a trial."""
    trials: int = 0
    """Effects of trials that wait beside it."""
    restored_at: datetime | None = None
    copied_at: datetime | None = None
    """When the copy of its files was saved from which it was restored, until its next call."""
    is_moved: bool = False
    """Whether it has a new container that is not stored yet."""
    stopped_why: str | None = None
    """Why it was stopped, as a sentence, until its next call."""
    has_place: bool = True
    """Whether it counts as one that runs."""
    kept_processes: Mapping[str, JsonObject] = field(default_factory=dict)
    """Name → the request to start it, of processes that start again with its container."""
    visits: int = 0
    """Requests of its processes and to its ports, beside its calls."""
    users: int = 0
    """Calls that use the session or wait for it."""
    is_pausing: bool = False
    """Whether it was to be paused since its last use. If that failed, it is not tried again."""
    is_stopping: bool = False
    """Whether it is being stopped because it was not used."""
    stop_again: float = 0.0
    """Until then, by the monotonic clock, it is not tried again to stop it."""
    is_outdated: bool = False
    """Whether its database row is out of date."""
    finished: KeptSession | None = None
    """The final record, once the session has ended or is lost."""
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def is_stopped(self) -> bool:
        """Whether its container is gone, but not its files."""
        return self.container.is_stopped or (
            self.copy is not None and self.container.lost is not None and self.finished is None
        )

    @property
    def needs_copy(self) -> bool:
        """Whether its files must be restored before its next use."""
        place = self.container
        return self.copy is not None and (place.lost is not None or place.is_away)

    def why_over(self, now: float) -> str | None:
        """Return why the session has expired, or None."""
        if now >= self.created + self.lifetime_s:
            return "its lifetime is over"
        if self.disk_mb is None and self.is_unused(now):
            return f"it was not used for {self.idle_s:g} s"
        return None

    def is_unused(self, now: float) -> bool:
        """Whether it was not used for its idle time."""
        return not (self.users or self.visits) and now - self.last_used >= self.idle_s

    def is_idle(self, now: float, pause_s: float) -> bool:
        """Whether the session is to be paused now."""
        return (
            not (self.users or self.visits or self.is_pausing) and now - self.last_used >= pause_s
        )

    def with_env(self, program: str, arguments: JsonObject) -> JsonObject:
        """Return the arguments of a run with the session's environment variables."""
        return with_env(self.env, arguments) if self.env and program in LANGUAGES else arguments

    async def take_turn(self, settings: SessionSettings) -> None:
        """Wait a bounded time until earlier calls have left the session.

        Raises:
            SandboxUnavailable: they take too long, or too many calls are already waiting.
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
        """Pass the turn to the next call."""
        self.users -= 1
        self.note_use(now, now_at)
        self._turn.release()

    def note_use(self, now: float, now_at: datetime) -> None:
        """Note that it was used until now."""
        self.last_used, self.last_used_at = now, now_at
        self.is_outdated = True
        self.is_pausing = self.container.is_paused or self.is_stopped

    def kept(self) -> KeptSession:
        """Return its current record, with its owner."""
        if self.finished is not None:
            return self.finished
        last_end = self.created_at + timedelta(seconds=self.lifetime_s)
        idle_end = self.last_used_at + timedelta(seconds=self.idle_s)
        record = SessionRecord(
            id=self.id,
            name=self.name,
            state=self._state(),
            why=self.stopped_why if self.is_stopped else None,
            image=self.image,
            languages=self.container.languages,
            agent_id=self.agent_id,
            memory_mb=self.memory_mb,
            disk_mb=self.disk_mb,
            cpus=self.cpus,
            packages=self.packages,
            network=self.network,
            created_at=self.created_at,
            last_used_at=self.last_used_at,
            expires_at=last_end if self.users or self.disk_mb else min(idle_end, last_end),
            calls=self.calls,
            is_busy=self.users > 0,
            snapshots=self.snapshots,
            durable=self.copy is not None,
            saved_at=self.saved_at,
            restored_at=self.restored_at,
            project=PurePath(self.project.directory).name if self.project is not None else None,
            env=tuple(self.env),
            preset=self.preset,
        )
        place, restored_at = self.container, self.restored_at
        home = SessionHome(
            place.name, self.epoch, self.idle_s, self.lifetime_s, place.lock, place.node,
            self.copy, restored_at.isoformat() if restored_at is not None else None,
            self.in_trial, self.project, self.kept_processes, self.env,
        )  # fmt: skip
        return KeptSession(self.principal_id, record, home=home)

    @property
    def saved_at(self) -> datetime | None:
        """When its files were last saved, if it is durable."""
        return datetime.fromisoformat(self.copy.saved_at) if self.copy is not None else None

    def _state(self) -> SessionStatus:
        if self.is_stopped:
            return SessionStatus.STOPPED
        return SessionStatus.PAUSED if self.container.is_paused else SessionStatus.ACTIVE

    def finish(self, status: SessionStatus, why: str, now_at: datetime) -> KeptSession:
        """Set the final record and return it. `why` is a clause, such as "its owner ended it"."""
        before = self.kept()
        is_left = status is SessionStatus.LOST and bool(self.snapshots)
        record = before.record.model_copy(
            update={
                "snapshots": self.snapshots if is_left else (),
                "state": status,
                "why": sentence(why),
                "expires_at": now_at,
                "is_busy": False,
            }
        )
        # Forks of its snapshots need it, and its record whether it was durable.
        home = before.home if is_left or self.copy is not None else None
        if home is not None and not is_left:
            home = replace(home, env={})
        self.finished = KeptSession(self.principal_id, record, now_at, home)
        return self.finished


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The properties of a new session."""

    name: str | None
    image: str
    memory_mb: int
    disk_mb: int | None
    cpus: float | None
    packages: tuple[str, ...]
    network: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    idle_s: float
    lifetime_s: float
    durable: bool = False

    @property
    def saved_mb(self) -> int:
        """The largest size of its saved files, in MB."""
        return workspace_mb(self.memory_mb, self.disk_mb) if self.durable else 0


def workspace_mb(memory_mb: int, disk_mb: int | None) -> int:
    """Return the size of a session's workspace, in MB."""
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
    packages: Sequence[str] | None,
    network: Sequence[str],
    env: Mapping[str, str],
    idle_seconds: float | None,
    lifetime_seconds: float | None,
    durable: bool,
) -> SessionRequest:
    """Check a request against the operator's limits, and fill in absent values.

    None means the configured value. Memory is rounded down to an available size.

    Raises:
        InvalidParams: a value is invalid or over its limit.
    """
    chosen = settings.image if image is None else image
    if not re.fullmatch(IMAGE_NAME, chosen):
        raise InvalidParams(
            "This cannot be the name of an image. fumehood images list shows the names.",
            fields=["image"],
        )
    if name is not None and not re.fullmatch(SESSION_NAME, name):
        raise InvalidParams(f"A session's name matches {SESSION_NAME}.", fields=["name"])
    longest_s = settings.lifetime_seconds if disk_mb is None else settings.disk_lifetime_seconds
    most_mb = _most_memory_mb(settings, offered, host)
    for key, wish, least, most in (
        ("memory_mb", memory_mb, offered.min_memory_mb, most_mb),
        ("disk_mb", disk_mb, MIN_DISK_MB, settings.max_disk_mb),
        ("cpus", cpus, MIN_CPUS, settings.max_cpus or host.cpus),
        ("idle_seconds", idle_seconds, MIN_S, settings.idle_seconds),
        ("lifetime_seconds", lifetime_seconds, MIN_S, longest_s),
    ):
        if wish is not None and not least <= wish <= most:
            raise InvalidParams(f"{key} must be from {least:g} to {most:g} here.", fields=[key])
    for one in network:
        try:
            network_wish(one)
        except ValueError as error:
            fault = f"The host {one[:100]!a} of network {error}."
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
        packages=tuple(packages or ()),
        network=tuple(network),
        env=dict(env),
        idle_s=idle_seconds or settings.idle_seconds,
        lifetime_s=lifetime_seconds or longest_s,
        durable=durable,
    )


_VARIABLES: TypeAdapter[dict[str, str]] = TypeAdapter(Variables)


def with_env(env: Mapping[str, str], arguments: JsonObject) -> JsonObject:
    """Return a program's arguments with environment variables of its session.

    They come before those that the arguments have, because the last one of a name wins.
    """
    added = [{"name": name, "value": value} for name, value in env.items()]
    return {**arguments, "env": [*added, *(arguments.get("env") or [])]}


def _most_memory_mb(settings: SessionSettings, offered: WallLimits, host: HostSize) -> int:
    of_calls = offered.max_memory_mb or offered.min_memory_mb
    most = settings.max_memory_mb or max(host.memory_mb // 4, of_calls)
    return min(most, CONTAINER_MEMORY_CLASSES[-1])


class Trials(Protocol):
    """Runs trials in one session, during a call's turn."""

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> tuple[RunEnding, HeldFiles | None]:
        """Run a program, take its effect out of the session, and return it; None if the program
        failed.

        Raises:
            InvalidParams, SandboxUnavailable, RateLimited: nothing ran.
        """
        ...

    async def put_in(self, held: HeldFiles) -> None:
        """Put an effect in, once.

        Raises:
            ApprovalExpired: what it touches has changed, so nothing was put in.
            SandboxUnavailable: it may have been put in partly.
        """
        ...

    async def drop(self, held: HeldFiles) -> None:
        """Forget an effect."""
        ...


class Project(Protocol):
    """The project of one session, during a turn."""

    async def difference(self, lease: Lease) -> JsonObject:
        """Return what has changed since its files were copied in."""
        ...

    async def effect(self, lease: Lease) -> Any:
        """Return what `apply` would do, as an executor's effect."""
        ...

    async def apply(self, lease: Lease, expected: str | None) -> JsonObject:
        """Write the changes into its directory, if they are those that were `expected`."""
        ...


@dataclass(frozen=True, slots=True)
class SessionLease:
    """One call's turn in a session. `until_ready` raises if the session has ended. `save` saves the
    files after a run of a durable session that may have changed them, and returns why it could not.
    """

    session: Session
    until_ready: Callable[[], Awaitable[None]]
    save: Callable[[str, JsonObject], Awaitable[str | None]]
    queue_ms: float
    is_call: bool = True
    trials: Trials | None = None
    """Set for a session whose files are saved."""
    project: Project | None = None
    """Set for a session that was made from a project directory."""
    processes: Callable[[JsonObject], Awaitable[JsonObject]] | None = None
    """Asks something of its registered processes."""

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run a program. This may be repeated; files and variables are kept from run to run.

        Raises:
            ResourceNotFound: the session ended before this run.
        """
        session = self.session
        await self.until_ready()
        limits = replace(limits, memory_mb=session.memory_mb)
        arguments = session.with_env(program, arguments)
        if session.copy is None:
            ending = await session.container.run(program, arguments, limits, sinks)
        else:
            ending = await self._run_and_save(program, arguments, limits, sinks)
        if ending.ended_by is not EndedBy.SANDBOX_LOST:
            ending = self._with_state(ending, program)
        elif session.copy is not None:
            ending = replace(ending, copied_at=session.saved_at)
        return replace(ending, ended_by=_ended_by(session, ending), isolation="session")

    def _with_state(self, ending: RunEnding, program: str) -> RunEnding:
        """Report once that what ran in the session before is gone."""
        session = self.session
        if session.copied_at is not None and self.is_call:
            copied_at, session.copied_at, session.stopped_why = session.copied_at, None, None
            return replace(ending, state="restored", copied_at=copied_at)
        # Told to the first run that could have variables.
        if session.stopped_why is not None and session.copied_at is None and program == "python":
            session.stopped_why = None
            return replace(ending, state="restarted")
        return ending

    async def _run_and_save(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """Run a program, and save the files before its ending is reported."""
        endings: list[RunEnding] = []
        kept = replace(sinks, ending=endings.append)
        try:
            ending = await self.session.container.run(program, arguments, limits, kept)
        except BaseException:  # what was cancelled may have changed files as well
            with anyio.CancelScope(shield=True):
                not_saved = await self.save(program, arguments)
            if endings and sinks.ending is not None:
                sinks.ending(replace(endings[0], not_saved=not_saved))
            raise
        if ending.ended_by is EndedBy.SANDBOX_LOST:
            return ending
        with anyio.CancelScope(shield=True):  # the run is over, so its files are not cut off
            not_saved = await self.save(program, arguments)
        return replace(ending, not_saved=not_saved)


def _ended_by(session: Session, ending: RunEnding) -> EndedBy:
    """Return how a run ended. It was not lost if its container was removed with its session."""
    finished = session.finished
    was_ended = finished is not None and finished.record.state is SessionStatus.ENDED
    if was_ended and ending.ended_by is EndedBy.SANDBOX_LOST:
        return EndedBy.CANCELLED
    return ending.ended_by


# -- durable sessions ----------------------------------------------------------------------


class NotSaved(Exception):
    """The files of a session could not be saved. The message is a clause."""


class CopyLost(Exception):
    """The saved files of a session are not complete. The message is a clause that says what is
    missing.
    """


@dataclass(eq=False, slots=True)
class HeldFiles:
    """The effect of a trial on its session, which is kept beside it."""

    token: str
    has_variables: bool
    changes: Any
    """The files that it changes; the saver's own."""
    shown: JsonObject
    """The same for people, as in previews."""

    @property
    def is_empty(self) -> bool:
        """Whether the session would be the same with it. Variables are not compared."""
        return not (self.has_variables or any(self.shown[one] for one in _CHANGES))


_CHANGES = ("added", "changed", "removed")


class Saver(Protocol):
    """Keeps copies of workspaces outside of their containers.

    One call at a time for each session. A copy that was stored stays complete until the next one
    is, or `drop`.
    """

    def may_change(self, program: str, arguments: JsonObject) -> bool:
        """Whether a run can have changed files."""
        ...

    async def save(
        self,
        source: CopySource,
        copy: SavedCopy,
        now: Callable[[], datetime],
        store: Callable[[SavedCopy], Awaitable[None]],
    ) -> None:
        """Save what differs from the copy, and `store` the new one, if anything does.

        Raises:
            NotSaved: nothing was stored, and `copy` is still complete.
            EngineError: `store` failed, and one of both copies is stored; both are complete.
        """
        ...

    async def restore(self, target: CopySource, copy: SavedCopy) -> None:
        """Put the files of a copy into an empty workspace.

        Raises:
            CopyLost: files are missing for good.
            SandboxUnavailable, StateUnavailable: it could not be read or put there now.
        """
        ...

    def others(self, session_id: str, copy: SavedCopy) -> tuple[str, ...] | None:
        """Return links and special files of the workspace; None if it may differ from the copy."""
        ...

    async def hold(self, source: CopySource, copy: SavedCopy) -> tuple[Any, JsonObject]:
        """Return what differs from the copy, with its content kept, and the same for people. Raises
        NotSaved.
        """
        ...

    async def put_back(self, source: CopySource, copy: SavedCopy, changes: Any) -> None:
        """Make the workspace again as the copy, from which it differs by these changes. Raises
        NotSaved.
        """
        ...

    def touched(self, session_id: str, changes: Any) -> list[str]:
        """Return the changed paths that are not any more, in the last copy, as they were."""
        ...

    async def put_in(self, source: CopySource, changes: Any) -> None:
        """Make the changes. Raises NotSaved."""
        ...

    async def let_go(self, changes: Any) -> None:
        """Delete the content of changes."""
        ...

    async def drop(self, session_id: str) -> None:
        """Delete all copies of a session that is over, now or later."""
        ...


@dataclass(frozen=True, slots=True)
class CopySource:
    """A session's workspace, for a saver. A lease on its container without a turn or a copy."""

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
        """Run a program of the engine, after the cleanup of the last run."""
        await self.container.until_free()
        limits = replace(limits, memory_mb=self.memory_mb, disk_mb=self.disk_mb)
        return await self.container.run(program, arguments, limits, sinks)

    @property
    def most_bytes(self) -> int:
        """The size of the workspace."""
        return workspace_mb(self.memory_mb, self.disk_mb) * MB


def source_of(session: Session) -> CopySource:
    """Return the workspace of a session."""
    return CopySource(session.id, session.memory_mb, session.disk_mb, session.container)


# -- ended sessions -----------------------------------------------------------------------


class SessionRows(Protocol):
    """The database rows of sessions."""

    async def change(self, put: list[KeptSession], delete: list[str]) -> None:
        """Write and delete rows in one transaction, which is durable when this returns.

        Raises:
            EngineError: the write failed, so nothing is guaranteed to be stored.
        """
        ...


class SessionHistory:
    """Ended sessions, and changed rows of all sessions that are not yet written."""

    def __init__(self, rows: SessionRows) -> None:
        self._rows = rows
        self._over: dict[str, KeptSession] = {}
        self._unwritten: dict[str, KeptSession] = {}
        self._undeleted: set[str] = set()

    def find(self, principal_id: str, session_id: str) -> KeptSession | None:
        """Return this principal's ended session with an id, or None."""
        found = self._over.get(session_id)
        return found if found is not None and found.principal_id == principal_id else None

    def every(self) -> list[KeptSession]:
        """Return every ended session, newest first."""
        return list(self._over.values())[::-1]

    def of(self, principal_id: str) -> list[KeptSession]:
        """Return this principal's ended sessions, newest first."""
        mine = [one for one in self._over.values() if one.principal_id == principal_id]
        return mine[::-1]

    def add(self, one: KeptSession) -> None:
        """Add a session that has ended. The next `write` writes its row."""
        self.keep(one)
        self.note(one)

    def note(self, one: KeptSession) -> None:
        """Register a new or changed row. The next `write` writes it."""
        self._unwritten[one.record.id] = one

    def prune(self, now: datetime) -> None:
        """Forget sessions that ended more than a day ago."""
        oldest = now - KEPT
        # They are in the order of their ends, so that this reads no more than it forgets.
        gone = takewhile(lambda one: (one.finished_at or now) < oldest, self._over.values())
        self.forget([one.record.id for one in gone])

    async def write(self) -> None:
        """Write pending changes. If that fails, they stay pending for the next `write`.

        Raises:
            EngineError: the write failed, so nothing is guaranteed to be stored.
        """
        put, delete = dict(self._unwritten), set(self._undeleted)
        if not put and not delete:
            return
        await self._rows.change(list(put.values()), sorted(delete))
        self._undeleted -= delete
        for session_id, one in put.items():
            if self._unwritten.get(session_id) is one:
                del self._unwritten[session_id]

    def keep(self, one: KeptSession) -> None:
        """Add a session that has ended and whose row exists."""
        self._over[one.record.id] = one
        mine = self.of(one.principal_id)
        self.forget([old.record.id for old in mine[MAX_OF_PRINCIPAL:]])

    def forget(self, session_ids: Iterable[str]) -> None:
        """Forget sessions. The next `write` deletes their rows, if any."""
        for session_id in session_ids:
            self._over.pop(session_id, None)
            self._unwritten.pop(session_id, None)
            self._undeleted.add(session_id)
