"""Sessions: containers that a principal keeps from one call to the next.

Host side, used by `pipeline/execute` and the public interfaces. It uses a wall that offers
containers for sessions, and database rows that outlive the engine. Invariants: a session belongs to
one principal and one agent, and other callers cannot find out that it exists; a session serves one
call at a time; a session's container ends with the session; no principal has more than its share of
sessions; a session is stored before it is reported.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import Any

import anyio
import anyio.abc

from fumehood.core.errors import (
    EngineError,
    InvalidParams,
    QuotaExceeded,
    ResourceNotFound,
    SandboxUnavailable,
)
from fumehood.core.fair_share import Lack
from fumehood.core.identity import Principal, TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade, strongest
from fumehood.core.session import (
    KeptSession,
    SavedCopy,
    SessionHome,
    SessionRecord,
    SessionStatus,
)
from fumehood.core.tasks import start_soon
from fumehood.parts import fields_of_parts, missing_options
from fumehood.sandbox.session import (
    CopyLost,
    Leftovers,
    NotSaved,
    Saver,
    Session,
    SessionHistory,
    SessionPlaces,
    SessionRequest,
    SessionRows,
    find_preset,
    make_request,
    merged,
    require_bound,
    require_within,
    sentence,
    source_of,
)
from fumehood.sandbox.session_states import TRANSITIONS, ImpossibleChange, next_state
from fumehood.sandbox.session_use import (
    CarryOver,
    InNewContainer,
    InSession,
    KeptValues,
    SessionAccess,
    SessionLease,
    sweep,
)
from fumehood.sandbox.settings import Preset, SessionSettings
from fumehood.sandbox.wall import (
    FIRST_EPOCH,
    Lease,
    OnEvent,
    SessionContainer,
    SessionWall,
    WallDown,
    pins_of,
    require_enforcing,
    require_grade,
    try_later,
)

ID_BYTES = 16
"""Length of the random ids of sessions, in bytes."""

TIDY_S = 1.0
"""Seconds between checks for expired and unused sessions, and between writes of changed rows."""

STOP_AGAIN_S = 30.0
"""Seconds between attempts to stop an unused session."""

PLACE_PAUSE_S = 0.05
"""Seconds between attempts to count a stopped session as running while too many sessions run."""

STOP_DEADLINE_S = 5.0
"""Maximum seconds for which a stopping engine waits until the containers of ended sessions are
removed. The wall removes those that are left.
"""

OWN_NAMES = frozenset(field.name for field in fields(SessionHome))
"""Names of the values that the engine itself stores with a session. Parts cannot use these
names.
"""

Records = list[SessionRecord]

Check = Callable[[Principal, str | None], Sequence[str]]
"""Receives a principal and an agent's id. Returns the presets to which the agent is bound. If there
are any, each session of the agent needs one of them. Raises an error if the principal may not call
tools, or may not act for the agent.
"""


@dataclass(frozen=True, slots=True)
class SessionClock:
    """The host's clocks: `monotonic` for deadlines, `now` for reported times."""

    now: Callable[[], datetime]
    monotonic: Callable[[], float]


class SessionKeeper:
    """Creates, keeps and ends the sessions of one engine.

    Use the object as an asynchronous context manager. Leaving the context ends all sessions, unless
    the wall keeps them for the next engine.
    """

    def __init__(
        self,
        wall: SessionWall,
        rows: SessionRows,
        settings: SessionSettings,
        clock: SessionClock,
        check: Check,
        *,
        kept: Iterable[KeptSession] = (),
        saver: Saver | None = None,
        in_session: Sequence[InSession] = (),
        carries: Sequence[CarryOver] = (),
        in_new_container: Sequence[InNewContainer] = (),
        presets: Mapping[str, Preset] | None = None,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        """Create a keeper with the sessions `kept`, which earlier engines have stored in `rows`.

        `check` returns the presets to which an agent is bound. It raises an error if the principal
        may not act for the agent. If `saver` is None, no session can be durable. `on_event`
        receives log events.

        Parts of the engine provide the other functions. Those in `in_session` are called when a
        call or an operation on files begins to use a session. Those in `in_new_container` are
        called when a new container has replaced a session's earlier one. Those in `carries` are
        called for each session that `make_like` creates.
        """
        self._wall = wall
        self._settings = settings
        self._clock = clock
        self._check = check
        self._saver = saver
        self._in_session = in_session
        self._carries = carries
        self._in_new_container = in_new_container
        self._presets = presets or {}
        self._on_event = on_event
        self._live: dict[str, Session] = {}
        self._places = SessionPlaces(settings)
        self._awaited: frozenset[str] = frozenset()
        """Ids of the sessions with a call that waits for a human."""
        self._names: list[tuple[str, str | None]] = []
        """Owner and name of each session that is being created."""
        self._leaving = 0
        """Number of containers of ended sessions that are still being removed."""
        self._left = anyio.Event()
        self._group: anyio.abc.TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._history = SessionHistory(rows)
        wall.spare_copies(self._copies)
        self._left_behind: list[KeptSession] = []
        """Active sessions of an earlier engine, until this engine continues them."""
        for stored in sorted(kept, key=lambda row: row.finished_at or row.record.created_at):
            self._inherit(stored)

    async def __aenter__(self) -> SessionKeeper:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(self._group.cancel_scope.cancel)
        # Before any takeover, because each later engine must use a higher epoch.
        for stored in self._left_behind:
            self._history.note(stored)
        await self._write_changes()
        for stored in self._left_behind:
            self._resume(stored)
        self._left_behind.clear()
        self._group.start_soon(self._keep_tidy)
        return self

    async def __aexit__(self, *exc: object) -> None:
        keeps = self._wall.keeps_sessions
        for session in self._live.values():
            self._history.note(session.kept())
        ending = [] if keeps else list(self._live.values())
        for session in ending:
            self._finish(session, "end", "the engine was stopped")
        self._group, group = None, self._group
        try:
            if group is not None:
                with anyio.CancelScope(shield=True):
                    await self._write_changes()
                with anyio.move_on_after(STOP_DEADLINE_S, shield=True):
                    for session in ending:
                        await session.container.until_gone()
        finally:
            await self._stack.aclose()

    # -- for owners ----------------------------------------------------------

    async def create(
        self,
        principal: Principal,
        *,
        name: str | None = None,
        agent_id: str | None = None,
        preset: str | None = None,
        image: str | None = None,
        memory_mb: int | None = None,
        cpus: float | None = None,
        least_grade: Grade | None = None,
        disk_mb: int | None = None,
        packages: Sequence[str] | None = None,
        network: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        durable: bool | None = None,
        idle_seconds: float | None = None,
        lifetime_seconds: float | None = None,
    ) -> SessionRecord:
        """Create a session, and return its record. An argument of None means the preset's value or,
        if the preset has none either, the configured value. If `preset` is None, the session uses
        the first preset to which the agent is bound.

        Raises:
            InvalidParams: a value is invalid or outside its limits, the name is taken, the preset
                does not exist, or a package is not allowed or not available.
            QuotaExceeded: the limits of this principal or of the engine allow no other session.
            PermissionDenied: the agent is bound to presets, and the request names another preset or
                exceeds the named one.
            ResourceNotFound: this principal may not act for the agent.
            SandboxUnavailable: no container or no disk is available.
            StoreError: the session could not be stored, so it was not created.
        """
        bound = self._check(principal, agent_id)
        if bound and preset is None:
            preset = bound[0]
        require_bound(agent_id, bound, preset)
        if self._group is None:
            raise try_later(
                "The engine is stopping or not started. Repeat the call when it is back."
            )
        given = {
            "image": image, "memory_mb": memory_mb, "cpus": cpus, "disk_mb": disk_mb,
            "least_grade": least_grade, "packages": packages, "network": network, "env": env,
            "durable": durable, "idle_seconds": idle_seconds,
            "lifetime_seconds": lifetime_seconds,
        }  # fmt: skip
        chosen = find_preset(self._presets, preset)
        await self._wall.until_host_is_known()
        request = self._request(name, merged(chosen, given))
        if bound:
            require_within(agent_id, bound, request, self._request(None, merged(chosen, {})))
        if missing := missing_options(request):
            words = f"No part of this engine provides the option {missing[0]!r} of sessions."
            raise InvalidParams(words, fields=missing)
        if request.durable and self._saver is None:
            words = "Durable sessions need an engine with state, and this one keeps no state."
            raise InvalidParams(words, fields=["durable"])
        with self._named(principal.id, [name]):
            async with self._place_for(principal.id, request):
                await self._until_there_is_room()
                session = await self._make(principal.id, agent_id, preset, request)
        self._live[session.id] = session
        self._follow(session)
        if session.finished is not None:
            raise try_later("The session was lost while it was being created. Repeat the call.")
        self._tell("session.created", session)
        return self._record(session)

    async def keep(self, session_id: str, name: str, value: JsonObject) -> SessionRecord:
        """Store a value that a part of the engine keeps with a session, and return the session's
        record. The value has the name `name`, and replaces an earlier value with this name.

        The value lasts as long as the session, also in later engines and in engines without the
        part. If `make_like` creates a session from this one, the part decides which values the new
        session gets.

        Raises:
            ResourceNotFound: the session is not active.
            StoreError: the value could not be stored.
            ValueError: the engine uses this name itself.
        """
        _require_name_of_part(name)
        session = self._live.get(session_id)
        if session is None:
            raise _unknown()
        session.of_parts = {**session.of_parts, name: value}
        await self._write(session)
        return self._record(session)

    def list(self, principal: Principal) -> Records:
        """Return a principal's sessions: first the active ones, then those that ended recently,
        newest first.
        """
        own = [live for live in self._live.values() if live.principal_id == principal.id]
        newest = sorted(own, key=lambda live: live.created_at, reverse=True)
        ended = [kept.record for kept in self._history.of(principal.id)]
        return [*map(self._record, newest), *ended]

    def every(self) -> Sequence[KeptSession]:
        """Return the sessions of all principals: first the active ones, then those that ended
        recently, newest first.
        """
        newest = sorted(self._live.values(), key=lambda live: live.created_at, reverse=True)
        live = [KeptSession(session.principal_id, self._record(session)) for session in newest]
        return [*live, *self._history.every()]

    def find(self, principal: Principal, reference: str) -> SessionRecord:
        """Return a principal's session, even if it has ended. `reference` is the session's id or a
        name. A name means the active session with this name or, if there is none, the last ended
        one.

        Raises:
            ResourceNotFound: the principal has no such session.
        """
        session = self._live_one(principal.id, reference)
        if session is not None:
            return self._record(session)
        over = self._history.find(principal.id, reference)
        if over is None:
            raise _unknown()
        return over.record

    async def end(
        self, principal: Principal, session_id: str, why: str = "its owner ended it"
    ) -> SessionRecord:
        """End a principal's session with everything that runs in it, and return the session's
        record. If the session has already ended, only return its record. `why` is a clause that the
        record states as the reason.

        Raises:
            ResourceNotFound: this principal has no such session.
            StoreError: the session has ended, but its end is not stored yet.
        """
        session = self._live_one(principal.id, session_id)
        if session is not None:
            self._finish(session, "end", why)
            await self._history.write()
        return self.find(principal, session.id if session is not None else session_id)

    async def pause(self, principal: Principal, session_id: str) -> SessionRecord:
        """Wait until the running and waiting calls of a principal's session have finished, then
        freeze the session. It stays frozen until its next use. Return the session's record.

        Raises:
            ResourceNotFound: this principal has no such session, or the session has ended.
            SandboxUnavailable: the calls take too long, or the container could not be frozen.
        """
        async with self.turn(principal, session_id) as session:
            await session.container.pause()
            self._follow(session)
        return self.find(principal, session.id)

    async def stop(self, principal: Principal, session_id: str) -> SessionRecord:
        """Wait until the running and waiting calls of a principal's session have finished, then
        stop the session. This ends everything that runs in the session, but keeps its disk. Return
        the session's record.

        Raises:
            InvalidParams: the session has no disk.
            ResourceNotFound: this principal has no such session, or the session has ended.
            SandboxUnavailable: the calls take too long, or the container could not be stopped.
        """
        async with self.turn(principal, session_id) as session:
            require_disk(session, "would be lost. Pause or end the session instead.")
            await self._stop(session, "its owner stopped it")
        return self.find(principal, session.id)

    async def resume(self, principal: Principal, session_id: str) -> SessionRecord:
        """Thaw a principal's session if it is paused, or start it if it is stopped, and return its
        record. This counts as a use of the session.

        Raises:
            ResourceNotFound: this principal has no such session, or the session has ended.
            SandboxUnavailable: the session's earlier calls take too long, or the session cannot run
                now.
            QuotaExceeded: too many sessions run to start this one again.
        """
        session = self._usable(principal.id, session_id)
        async with self._lease(principal.id, session.id, is_call=False):
            pass
        return self.find(principal, session.id)

    # -- for parts ---------------------------------------------------------------------

    def usable(self, principal: Principal, reference: str) -> Session:
        """Return a principal's active session. `reference` is the session's id or name.

        Raises:
            ResourceNotFound: this principal has no such session, or the session has ended.
        """
        return self._usable(principal.id, reference)

    @asynccontextmanager
    async def turn(self, principal: Principal, reference: str) -> AsyncIterator[Session]:
        """Wait for the turn in a principal's session, and hold it during the block. The turn is the
        right to use the session alone. `reference` is the session's id or name.

        The block gets the session. If the session is paused or stopped, it stays so. If the block
        succeeds, the session's row is stored.

        Raises:
            ResourceNotFound: this principal has no such session, or the session has ended.
            SandboxUnavailable: earlier calls take too long, or too many calls are waiting.
        """
        session = self._usable(principal.id, reference)
        async with self._entered(session):
            yield session
        self._history.note(session.kept())  # a reported state must survive a crash
        await self._write_changes()

    async def set(self, session: Session, name: str, value: object) -> None:
        """Set the field `name` of a session to `value`, and store the session's row.

        Raises:
            StoreError: the row could not be stored, so the field has its old value again.
        """
        before = getattr(session, name)
        setattr(session, name, value)
        try:
            await self._write(session)
        except BaseException:
            setattr(session, name, before)
            self._history.note(session.kept())
            raise

    async def continue_with(self, session: Session, why: str) -> str | None:
        """Continue a stopped session after the files on its disk have been replaced. If the session
        is durable, start it and save the new files.

        The caller must hold the session's turn, the right to use the session alone. `why` is a
        sentence that says why the session was stopped.

        If saving failed, return a clause that says why, otherwise None. Raises the same errors as
        `resume`.
        """
        session.stopped_why = why
        session.leftovers = Leftovers.UPLOADS  # the disk may have been copied during an upload
        self._leave_place(session)
        if session.copy is None:
            return None
        await self._until_ready(session)
        return await self._save(session)  # the saved copy still has the old files

    def original(self, principal: Principal, reference: str) -> SessionRecord:
        """Return the record of a principal's session, if the principal may create another session
        with the same properties. `reference` is the id or name of the existing session, which may
        have ended or be lost.

        Raises:
            PermissionDenied: the agent is bound to presets, and the session uses none of them.
            ResourceNotFound: the principal has no such session, or may not act for the agent.
        """
        record = self.find(principal, reference)
        bound = self._check(principal, record.agent_id)
        require_bound(record.agent_id, bound, record.preset)
        return record

    async def make_like(
        self,
        principal: Principal,
        session_id: str,
        names: Sequence[str | None],
        why: str,
        disk: Callable[[str, SessionHome], AbstractAsyncContextManager[str]],
    ) -> Records:
        """Create sessions with the properties of an existing session, the source, and return their
        records. Each new session is stopped, and has its own disk. If one cannot be created, none
        is created.

        `session_id` is the id of the source, which must belong to the principal, and may be lost.
        `names` contains one entry for each new session: its name, or None for a session without a
        name. `why` is a sentence that says why the new sessions are stopped.

        `disk` is called once for each new session, with the session's id and the `SessionHome` of
        the source. It returns a context manager that makes the session's disk. Its block gets the
        name for the session's container, which does not exist yet. If the block fails, the disk is
        removed.

        Raises:
            InvalidParams: a session already has one of the names.
            QuotaExceeded: there are too many sessions with a disk.
            StoreError: the new sessions could not be stored, so none was created.
            EngineError: for the reasons of `original`. Or a disk could not be made, or a part could
                not copy its values to the new sessions.
        """
        record = self.original(principal, session_id)
        source = self._kept(principal.id, record.id)
        if self._group is None or source is None or source.home is None:
            raise _unknown()
        home, made = source.home, list[KeptSession]()
        kept = KeptValues(record.id, home.of_parts, partial(self.keep, record.id))
        with self._named(principal.id, names):
            self._places.take_disks(principal.id, len(names))
            try:
                async with AsyncExitStack() as stack:
                    for name in names:
                        new_id = f"sess_{secrets.token_hex(ID_BYTES)}"
                        place = await stack.enter_async_context(disk(new_id, home))
                        new_home = replace(
                            home, container=place, epoch=FIRST_EPOCH, copy=None, restored_at=None,
                            must_restore=False, of_parts=await self._carried_over(kept, new_id),
                        )  # fmt: skip
                        made.append(_like(source, new_home, new_id, name, why, self._clock))
                    await self._store(made)
            finally:
                self._places.disks.give_back(principal.id, len(names))
            for new in made:
                self._resume(new)
        return [self.find(principal, new.record.id) for new in made]

    async def _carried_over(self, source: KeptValues, session_id: str) -> dict[str, JsonObject]:
        """Let each part of the engine choose which of its values in the session `source` the new
        session `session_id` gets, and return these values by name.
        """
        values: dict[str, JsonObject] = {}

        async def keep(name: str, value: JsonObject) -> None:
            _require_name_of_part(name)
            values[name] = value

        for carry in self._carries:
            await carry(source, KeptValues(session_id, {}, keep))
        return values

    async def _write(self, session: Session) -> None:
        """Store a session's row. Raises StoreError if that fails."""
        self._history.note(session.kept())
        await self._history.write()

    async def _store(self, new: Sequence[KeptSession]) -> None:
        """Write the rows of new sessions: all of them, or none if that fails."""
        for session in new:
            self._history.note(session)
        try:
            await self._history.write()
        except BaseException:
            # The write may have succeeded.
            self._history.forget([session.record.id for session in new])
            raise

    def _copies(self) -> Sequence[str]:
        """Return the ids of all snapshots of sessions. Each id is also the name of a copy of a
        disk, which the wall must keep.
        """
        records = [kept.record for kept in (*self._left_behind, *self.every())]
        return [snapshot.id for record in records for snapshot in record.snapshots]

    # -- for calls -----------------------------------------------------------------

    def id_of(self, principal: Principal, reference: str) -> str:
        """Return the id of a principal's session, which may have ended. `reference` is the
        session's id or name. If there is no such session, return `reference` unchanged.
        """
        # A call that needs no session may name one that does not exist.
        session = self._live_one(principal.id, reference)
        if session is not None:
            return session.id
        over = self._history.find(principal.id, reference)
        return over.record.id if over is not None else reference

    def examine(
        self,
        principal: Principal,
        agent_id: str | None,
        session_id: str,
        *,
        language: str | None = None,
        memory_mb: int | None = None,
    ) -> SessionRecord:
        """Check that a call may use the session that it names, and return the session's record.
        Nothing is reserved.

        If `language` is None, it is not checked that the session's image supports a language. If
        `memory_mb` is None, the session's memory is not checked.

        Raises:
            ResourceNotFound: this principal and agent have no such session, or it has ended.
            InvalidParams: the session's image lacks the language, or the session's memory is not
                `memory_mb`.
        """
        session = self._usable(principal.id, session_id)
        if session.agent_id != agent_id:
            raise _unknown()
        if language is not None and language not in session.container.languages:
            known = ", ".join(session.container.languages)
            raise InvalidParams(
                f"This session's image {session.spec.image} has no {language}, only {known}. "
                "Create a session with another image, or call without a session.",
                fields=["options.session_id"],
            )
        if memory_mb is not None and memory_mb != session.spec.memory_mb:
            raise InvalidParams(
                f"This session has a memory limit of {session.spec.memory_mb} MB, which calls in "
                "it cannot change.",
                fields=["options.memory_limit_mb"],
            )
        return self._record(session)

    def own_env(self, principal: Principal, session_id: str) -> Mapping[str, str]:
        """Return the environment variables that a principal has set for its session. Variables with
        the same value as in the session's preset are left out. If the principal has no such
        session, the result is empty.
        """
        session = self._live.get(session_id)
        if session is None or session.principal_id != principal.id:
            return {}  # a later stage refuses the call
        preset = self._presets.get(session.preset or "")
        usual = preset.env if preset is not None else {}
        return {name: value for name, value in session.spec.env.items() if usual.get(name) != value}

    async def facts_of(self, session_id: str) -> JsonObject:
        """Return the facts of the image that the next call in a session uses. They have the form of
        `HasImages.facts_of`.

        Raises:
            ResourceNotFound: the session is not active.
            SandboxUnavailable: the facts cannot be determined now.
        """
        session = self._live.get(session_id)
        if session is None:
            raise _unknown()
        if session.needs_copy:
            async with self._lease(session.principal_id, session_id, is_call=False):
                pass
        return await session.container.facts()

    def lease(
        self,
        principal: Principal,
        agent_id: str | None,
        session_id: str,
        *,
        language: str | None,
        memory_mb: int | None,
        least_grade: Grade | None = None,
    ) -> AbstractAsyncContextManager[Lease]:
        """Return a lease of a session's container for one call. It is a context manager. If earlier
        calls use the session, entering it waits for them. `language` and `memory_mb` are checked as
        in `examine`. `least_grade` is the grade that the container must have.

        This method raises the same errors as `examine`. Entering the context manager raises other
        errors:

        Raises:
            ResourceNotFound: the session has ended meanwhile.
            SandboxUnavailable: the session is too busy or cannot run now.
            QuotaExceeded: too many sessions run to start this session again.
        """
        self.examine(principal, agent_id, session_id, language=language, memory_mb=memory_mb)
        return self._lease(principal.id, session_id, is_call=True, least=least_grade)

    def grade_of(self, session_id: str) -> Grade | None:
        """Return the grade of a session's container. Return None if it does not run, or is not
        known.
        """
        session = self._live.get(session_id)
        return session.container.grade if session is not None else None

    async def files(
        self, principal: Principal, session_id: str
    ) -> AbstractAsyncContextManager[Lease]:
        """Return a lease of a principal's session for operations on its files outside of calls. It
        is a context manager. Entering it raises the same errors as entering the result of `lease`.

        Raises:
            ResourceNotFound: this principal has no such session, or the session has ended.
        """
        session = self._usable(principal.id, session_id)
        return self._lease(principal.id, session.id, is_call=False)

    # -- for the engine -----------------------------------------------------------

    def tidy(self) -> None:
        """End expired sessions, pause or stop unused sessions, and forget the sessions that ended
        more than a day ago. The engine calls this method periodically.
        """
        now = self._clock.monotonic()
        for session in list(self._live.values()):
            self._follow(session)
            self._end_if_over(session)
            if self._group is None or session.finished is not None:
                continue
            if session.spec.disk_mb is not None and session.is_unused(now):
                if not session.is_stopped and now >= session.stop_again:
                    session.stop_again = now + STOP_AGAIN_S
                    self._group.start_soon(self._stop_idle, session)
            elif session.is_idle(now, self._settings.pause_seconds):
                session.is_pausing = True
                self._group.start_soon(self._pause_idle, session)
        self._history.prune(self._clock.now())

    def is_active(self, session_id: str) -> bool:
        """Whether there is an active session with this id, whoever its owner is."""
        return session_id in self._live

    def last_end(self, session_id: str) -> datetime | None:
        """Return when a session's lifetime ends, or None if the session is not active."""
        session = self._live.get(session_id)
        return None if session is None else session.last_end

    def note_use(self, session_id: str) -> None:
        """Record that a session was in use until now. Do nothing if it is not active."""
        if (session := self._live.get(session_id)) is not None:
            session.note_use(self._clock.monotonic(), self._clock.now())

    def keep_for_calls(self, session_ids: frozenset[str]) -> None:
        """Set the ids of the sessions that have calls waiting for a human. These sessions do not
        end when their idle time is over.

        When a session is no longer among the ids, its idle time starts again.
        """
        before, self._awaited = self._awaited, session_ids
        for session in self._live.values():
            session.is_awaited = session.id in session_ids
        for session_id in before - session_ids:
            self.note_use(session_id)

    @property
    def counts(self) -> Mapping[str, int]:
        """State → number of sessions, for the operator."""
        states = [session.state for session in self._live.values()]
        return {
            "active": states.count(SessionStatus.ACTIVE),
            "paused": states.count(SessionStatus.PAUSED),
            "stopped": states.count(SessionStatus.STOPPED),
            "busy": sum(session.users > 0 for session in self._live.values()),
            "creating": self._places.running.total
            - sum(session.has_place for session in self._live.values()),
            "leaving": self._leaving,
        }

    # -- inside ---------------------------------------------------------------------------

    def _inherit(self, stored: KeptSession) -> None:
        """Add a stored session of an earlier engine. If the session is active, this engine will
        continue it or, if the wall does not keep sessions, count it as lost.
        """
        if stored.record.state.is_over:
            self._history.keep(stored)
            return
        if stored.home is not None and self._wall.keeps_sessions:
            self._wall.expect(stored.record, stored.home)
            home = replace(stored.home, epoch=stored.home.epoch + 1)
            self._left_behind.append(replace(stored, home=home))
            return
        now = self._clock.now()
        lost = {
            "state": next_state("lose", stored.record.state),
            "why": "The engine was restarted.",
            "expires_at": now,
            "is_busy": False,
        }
        record = stored.record.model_copy(update=lost)
        self._history.add(KeptSession(stored.principal_id, record, now))

    def _resume(self, stored: KeptSession) -> None:
        """Make a stored session active in this engine. The session comes from an earlier engine, or
        `make_like` has just created it.
        """
        record, home, wall = stored.record, stored.home, self._wall
        assert home is not None
        now, now_at = self._clock.monotonic(), self._clock.now()

        def since(moment: datetime) -> float:  # never negative: clocks can be set back
            return max(0.0, (now_at - moment).total_seconds())

        session = Session(
            id=record.id,
            principal_id=stored.principal_id,
            agent_id=record.agent_id,
            spec=SessionRequest(
                name=record.name,
                image=record.image,
                memory_mb=record.memory_mb,
                disk_mb=record.disk_mb,
                cpus=record.cpus,
                least_grade=record.least_grade,
                packages=record.packages,
                network=record.network,
                env=home.env,
                idle_s=home.idle_s,
                lifetime_s=home.lifetime_s,
                durable=home.copy is not None,
            ),
            preset=record.preset,
            container=wall.resume(record, home, lambda: self._follow(self._live.get(record.id))),
            state=record.state,
            created_at=record.created_at,
            last_used_at=record.last_used_at,
            created=now - since(record.created_at),
            last_used=now - since(record.last_used_at),
            epoch=home.epoch,
            is_awaited=record.id in self._awaited,
            calls=record.calls,
            is_pausing=record.state in (SessionStatus.PAUSED, SessionStatus.STOPPED),
            stopped_why=record.why,
            has_place=record.state is not SessionStatus.STOPPED,
            snapshots=record.snapshots,
            copy=home.copy,
            of_parts=home.of_parts,
            restored_at=record.restored_at,
            leftovers=Leftovers.UPLOADS,  # the engine may have been killed at any moment
            must_restore=home.must_restore,
            lacks_saver=home.copy is not None and self._saver is None,
        )
        self._live[session.id] = session
        if session.has_place:
            self._places.add(session.principal_id, session.spec.memory_mb)
        if session.spec.disk_mb is not None:
            self._places.disks.add(session.principal_id)
        self._places.saved.add(session.principal_id, session.spec.saved_mb)
        self._tell("session.resumed", session)
        if home.must_restore:
            session.container.end("its engine was killed while its files were changed")
        self._follow(session)

    def _request(self, name: str | None, fields: Mapping[str, Any]) -> SessionRequest:
        """Return a validated request for a session with this name and these fields. Raises
        InvalidParams.
        """
        limits, host = self._wall.limits, self._wall.host
        return make_request(self._settings, limits, host, name=name, **fields)

    def _require_limits(self) -> None:
        """Raise SandboxUnavailable if the wall does not enforce a required limit. If the wall is
        down, do nothing.
        """
        # If the wall is down, `SessionWall.hold` raises an error later.
        with suppress(WallDown):
            require_enforcing("container", self._wall.status)

    async def _make(
        self,
        principal_id: str,
        agent_id: str | None,
        preset: str | None,
        request: SessionRequest,
    ) -> Session:
        """Create a session: reserve a container, and store the session's row. If one of these
        fails, undo both.
        """
        session_id = f"sess_{secrets.token_hex(ID_BYTES)}"
        self._require_limits()
        container = await self._wall.hold(
            TrustDomain(principal_id, agent_id, session_id),
            image=request.image,
            memory_mb=request.memory_mb,
            cpus=request.cpus,
            disk_mb=request.disk_mb,
            additions=request.packages,
            on_lost=lambda: self._follow(self._live.get(session_id)),
        )
        try:
            require_grade(container.grade, request.least_grade)
        except SandboxUnavailable:
            container.end("its grade is too low")
            self._remove_after_end(container)
            raise
        now, now_at = self._clock.monotonic(), self._clock.now()
        session = Session(
            id=session_id,
            principal_id=principal_id,
            agent_id=agent_id,
            spec=replace(request, packages=pins_of(container.lock)),
            preset=preset,
            container=container,
            state=TRANSITIONS["create"].to,
            created_at=now_at,
            last_used_at=now_at,
            last_used=now,
            created=now,
            copy=SavedCopy(now_at.isoformat()) if request.durable else None,
        )
        try:
            await self._store([session.kept()])
        except BaseException:
            container.end("the session could not be stored")
            self._remove_after_end(container)
            raise
        return session

    @asynccontextmanager
    async def _place_for(self, principal_id: str, request: SessionRequest) -> AsyncIterator[None]:
        """Reserve what a new session needs within a principal's limits. The block must create the
        session. If the block fails, release the reservation.

        Raises:
            QuotaExceeded: the new session would exceed a limit.
        """
        with ExitStack() as undo:
            if request.disk_mb is not None:
                self._places.take_disks(principal_id, 1)
                undo.callback(self._places.disks.give_back, principal_id)
            if request.durable:
                self._places.take_saved(principal_id, request.saved_mb)
                undo.callback(self._places.saved.give_back, principal_id, request.saved_mb)
            await self._reserve(principal_id, request.memory_mb)
            undo.callback(self._places.give_back, principal_id, request.memory_mb)
            yield
            undo.pop_all()

    async def _reserve(self, principal_id: str, memory_mb: int) -> None:
        """Count one more running session. If that would exceed a limit, first stop unused sessions
        that have a disk, beginning with the least recently used. Raises QuotaExceeded.
        """
        spared: set[str] = set()
        while (refused := self._places.take(principal_id, memory_mb, self._wall.host)) is not None:
            lack, error = refused
            unused = [
                live
                for live in self._live.values()
                if live.spec.disk_mb is not None
                and not (live.users or live.visits or live.is_stopped)
                and live.id not in spared
                and (lack is Lack.TOTAL or live.principal_id == principal_id)
            ]
            if not unused:
                raise error
            oldest = min(unused, key=lambda live: live.last_used)
            spared.add(oldest.id)  # tried only once, because its node may be unreachable
            with suppress(SandboxUnavailable):
                await self._stop(oldest, "another session needed its place", if_unused=True)

    async def _until_there_is_room(self) -> None:
        """Wait until the number of containers leaves room for a session that is about to be
        created. Containers of ended sessions count until they are removed. Wait at most
        `sessions.queue_seconds`.

        Raises:
            SandboxUnavailable: the removal of containers took too long.
        """
        with anyio.move_on_after(self._settings.queue_seconds):
            while self._places.running.total + self._leaving > self._settings.max:
                await self._left.wait()
            return
        raise try_later(
            "The containers of sessions that have ended are still being removed. Repeat the call "
            "later."
        )

    def _usable(self, principal_id: str, reference: str) -> Session:
        """Return a principal's active session by its id or name. If it has expired, end it.

        Raises:
            ResourceNotFound: this principal has no such session, or it has ended or expired.
        """
        session = self._live_one(principal_id, reference)
        if session is not None:
            why = session.why_over(self._clock.monotonic())
            if why is None:
                return session
            if session.users:
                raise _over(SessionStatus.ENDED, why, self._clock.now())
            self._finish(session, "end", why)
            reference = session.id
        over = self._history.find(principal_id, reference)
        if over is None:
            raise _unknown()
        raise _over(over.record.state, over.record.why or "", over.record.expires_at)

    async def _until_ready(self, session: Session) -> None:
        """Wait until a session's container can run a program. If necessary, start the session
        again, or restore its files from the saved copy. The session may have ended when this
        returns.

        Raises:
            QuotaExceeded: too many other sessions run.
            SandboxUnavailable: the session cannot be started or restored now.
        """
        if not session.has_place:
            await self._wait_for_place(session)
            if session.finished is not None:  # it ended before it had this place
                self._places.give_back(session.principal_id, session.spec.memory_mb)
                return
            session.has_place = True
        name = session.container.name
        try:
            await self._until_free(session)
            _require_grade(session)
            if session.leftovers is not Leftovers.NONE and session.container.lost is None:
                await sweep(session)
                await session.container.until_free()
        finally:
            self._follow(session)
            if session.is_stopped:
                self._leave_place(session)
        if session.finished is None and (session.is_moved or session.container.name != name):
            if not session.has_place:  # given back when its old container was found to be gone
                self._places.add(session.principal_id, session.spec.memory_mb)
                session.has_place = True
            self._history.note(session.kept())  # the next engine must find the new container
            if session.is_moved:
                await self._history.write()
                session.is_moved = False
            else:
                await self._write_changes()
            await self._prepare(session)

    async def _until_free(self, session: Session) -> None:
        """Wait until a session's container is free. If necessary, start it, or restore its files
        into a new one. Raises the same errors as `_until_ready`.
        """
        if not session.needs_copy:
            await session.container.until_free()
            self._follow(session)
        if session.needs_copy:
            with anyio.CancelScope(shield=True):  # otherwise the next call starts from scratch
                await self._restore_copy(session)
            await session.container.until_free()

    async def _prepare(self, session: Session) -> None:
        """Call the functions with which parts of the engine prepare a session's new container."""
        for prepare in self._in_new_container:
            await prepare(self._access(session), session.container)

    async def _restore_copy(self, session: Session) -> None:
        """Give a durable session a new container with the files of its saved copy. If the copy is
        incomplete, the session is lost.

        Raises:
            SandboxUnavailable, StateUnavailable: the files cannot be restored now. The session's
                next use tries again.
        """
        old, copy, saver = session.container, session.copy, self._saver
        assert copy is not None
        assert saver is not None
        if old.lost is not None and not old.is_away:  # the old and the new disk have the same name
            with anyio.move_on_after(self._settings.queue_seconds) as waiting:
                await old.until_gone()
            if waiting.cancelled_caught:
                raise try_later("The session's lost container is still being removed.")
        self._require_limits()
        session.must_restore |= old.lost is not None
        if session.must_restore:
            await self._write(session)  # so that after a crash, no half-filled disk is used
        new = await self._wall.hold(
            TrustDomain(session.principal_id, session.agent_id, session.id),
            image=session.spec.image,
            memory_mb=session.spec.memory_mb,
            cpus=session.spec.cpus,
            disk_mb=session.spec.disk_mb,
            lock=old.lock,
            on_lost=lambda: self._follow(self._live.get(session.id)),
        )
        if session.finished is not None:
            new.end("its session has ended")
            self._remove_after_end(new)
            return
        session.container, session.is_moved, session.must_restore = new, True, True
        self._change(session, "restore")
        old.end("its session is restored elsewhere")  # in case its node comes back
        if new.node:
            session.snapshots = ()  # their copies are on the old node
        try:
            await saver.restore(source_of(session), copy)
        except CopyLost as error:
            self._finish(session, "lose", f"its copy is incomplete: {error}")
            return
        except BaseException:
            new.end("its files could not be restored")
            raise
        session.must_restore = False
        session.copied_at = session.saved_at
        session.restored_at = self._clock.now()
        self._tell("session.restored", session, saved_at=copy.saved_at, node=new.node)

    async def _save_after(
        self, session: Session, program: str, arguments: JsonObject
    ) -> str | None:
        """Do the same as `_save`, but only if a run of this program with these arguments may have
        changed files.
        """
        saver = self._saver
        if saver is None or not saver.may_change(program, arguments):
            return None
        return await self._save(session)

    async def _save(self, session: Session) -> str | None:
        """Save the files of a session, if the session is durable and has not ended. If saving
        failed, return a clause that says why, otherwise None. The caller must hold the session's
        turn, which is the right to use the session alone.
        """
        if session.finished is not None or session.copy is None or self._saver is None:
            return None
        try:
            store = partial(self.set, session, "copy")
            await self._saver.save(source_of(session), session.copy, self._clock.now, store)
            return None
        except NotSaved as error:
            is_lost = session.container.lost is not None or session.container.is_stopped
            why = "its container was lost meanwhile" if is_lost else str(error)
        except EngineError:
            why = "the engine's state cannot be written"
        self._tell("session.not_saved", session, why=why)
        return why

    async def _wait_for_place(self, session: Session) -> None:
        """Reserve a place for a stopped session that is about to start. If too many sessions run,
        wait until another one is stopped to make room, at most `sessions.queue_seconds`. Raises
        QuotaExceeded if there is no place by then.
        """
        last = anyio.current_time() + self._settings.queue_seconds
        while True:
            try:
                return await self._reserve(session.principal_id, session.spec.memory_mb)
            except QuotaExceeded:
                busy = any(live.spec.disk_mb and live.has_place for live in self._live.values())
                if not busy or session.finished or anyio.current_time() >= last:
                    raise
            await anyio.sleep(PLACE_PAUSE_S)

    def _leave_place(self, session: Session) -> None:
        """Remove a session from the count of running sessions, if it is counted there."""
        if session.has_place:
            session.has_place = False
            self._places.give_back(session.principal_id, session.spec.memory_mb)

    async def _stop_idle(self, session: Session) -> None:
        try:
            await self._stop(
                session, f"it was not used for {session.spec.idle_s:g} s", if_unused=True
            )
        except EngineError as error:  # for example, its node is unreachable
            self._on_event("session.not_stopped", {"session": session.id, "why": error.message})

    async def _stop(self, session: Session, why: str, *, if_unused: bool = False) -> None:
        """Stop a session that has a disk. If `if_unused` is True, do nothing while the session is
        in use. `why` is a clause that says why the session is stopped.
        """

        def is_used() -> bool:
            return if_unused and session.users + session.visits > 0

        await session.container.stop(is_used)
        self._follow(session)
        if session.is_stopped:
            session.stopped_why = sentence(why)

    @asynccontextmanager
    async def _lease(
        self, principal_id: str, session_id: str, *, is_call: bool, least: Grade | None = None
    ) -> AsyncIterator[SessionLease]:
        """Lease a session during the block, and pass the lease to the block. `is_call` says whether
        the lease is for a call, which the session then counts. `least` is the grade that the
        session's container must have, in addition to what the session itself demands.

        Before the block, wait for the session's turn, the right to use the session alone. Then wait
        until the session can run a program.

        Raises:
            ResourceNotFound: this principal has no such session, or the session has ended.
            SandboxUnavailable: the session is too busy or cannot run now.
            QuotaExceeded: too many sessions run to start this session again.
        """
        session = self._usable(principal_id, session_id)

        async def until_ready() -> None:
            if session.finished is None:
                await self._until_ready(session)
                _require_grade(session, least)
            if session.finished is not None:
                self._usable(principal_id, session.id)

        asked = time.monotonic()
        async with self._entered(session):
            await until_ready()
            try:
                waited_ms = (time.monotonic() - asked) * 1e3
                yield SessionLease(
                    session, until_ready, partial(self._save, session),
                    partial(self._save_after, session), partial(self._write, session), waited_ms,
                    is_call, self._of_parts(session),
                )  # fmt: skip
            finally:
                session.calls += is_call

    def access(
        self, principal: Principal, session_id: str, *, is_use: bool = True
    ) -> SessionAccess:
        """Return a part's access to a principal's session, independently of calls. While a block of
        its `visit` runs, the engine does not pause or stop the session for lack of use. The
        session's owner can still pause or stop it.

        If `is_use` is True, each visit starts or thaws the session if necessary, and counts as a
        use of the session. If `is_use` is False, a visit does neither, so the session must already
        run.

        Raises:
            ResourceNotFound: this principal has no such session, or the session has ended.
        """
        session = self._usable(principal.id, session_id)
        return self._access(session, is_use=is_use)

    def _access(self, session: Session, *, is_use: bool = True) -> SessionAccess:
        keep, visit = partial(self.keep, session.id), partial(self._visit, session, is_use=is_use)
        return SessionAccess(session.id, session.of_parts, keep, session, visit)

    @asynccontextmanager
    async def _visit(self, session: Session, *, is_use: bool) -> AsyncIterator[SessionContainer]:
        """Keep a session from being paused or stopped for lack of use during the block, and pass
        the session's container to the block. During the block, calls can run in the session, and
        its owner can pause or stop it.

        If `is_use` is True, the block counts as a use of the session. If the session does not run,
        it is then started or thawed before the block. This waits for earlier calls.
        """
        self._usable(session.principal_id, session.id)
        if is_use:
            _require_saver(session)
        session.visits += 1
        try:
            is_at_rest = session.state is not SessionStatus.ACTIVE or session.needs_copy
            if is_use and is_at_rest:
                async with self._lease(session.principal_id, session.id, is_call=False):
                    pass
            if is_use:
                _require_grade(session)
            yield session.container
        finally:
            session.visits -= 1
            if is_use:
                session.note_use(self._clock.monotonic(), self._clock.now())

    def _of_parts(self, session: Session) -> tuple[object, ...]:
        """Return the objects that parts of the engine create for a lease of this session, for use
        by the parts' own executors.
        """
        access = self._access(session)
        return tuple(given for give in self._in_session if (given := give(access)) is not None)

    @asynccontextmanager
    async def _entered(self, session: Session) -> AsyncIterator[None]:
        """Wait for the turn in a session, the right to use the session alone, and hold it during
        the block.
        """
        _require_saver(session)
        await session.take_turn(self._settings)
        try:
            self._usable(session.principal_id, session.id)
            yield
        finally:
            session.leave_turn(self._clock.monotonic(), self._clock.now())
            self._end_if_over(session)

    def _live_one(self, principal_id: str, reference: str) -> Session | None:
        """Return a principal's active session, or None. `reference` is the session's id or name."""
        session = self._live.get(reference)
        if session is None:
            named = (live for live in self._live.values() if live.spec.name == reference)
            session = next((live for live in named if live.principal_id == principal_id), None)
        return session if session is not None and session.principal_id == principal_id else None

    def _kept(self, principal_id: str, session_id: str) -> KeptSession | None:
        live = self._live.get(session_id)
        return live.kept() if live else self._history.find(principal_id, session_id)

    @contextmanager
    def _named(self, principal_id: str, names: Sequence[str | None]) -> Iterator[None]:
        """Reserve names for a principal's new sessions during the block. The block must create the
        sessions. Raises InvalidParams if a name is taken.
        """
        for name in names:
            self._check_name(principal_id, name)
        reserved = [(principal_id, name) for name in names]
        self._names += reserved
        try:
            yield
        finally:
            for pair in reserved:
                self._names.remove(pair)

    def _check_name(self, principal_id: str, name: str | None) -> None:
        if name is None:
            return
        if name == "new":
            raise InvalidParams(
                "A session cannot have the name 'new', because `--session new` and "
                "`?session_id=new` create a session. Choose another name.",
                fields=["name"],
            )
        if (principal_id, name) in self._names or self._live_one(principal_id, name) is not None:
            raise InvalidParams(
                f"You already have a session {name!r}. Use it, or choose another name.",
                fields=["name"],
            )

    async def _pause_idle(self, session: Session) -> None:
        if session.users or session.visits or session.finished is not None:
            return
        try:
            await session.container.pause()
        except EngineError as error:
            self._on_event("session.not_paused", {"session": session.id, "why": error.message})
        self._follow(session)

    def _record(self, session: Session) -> SessionRecord:
        return session.kept().record

    def _end_if_over(self, session: Session) -> None:
        why = session.why_over(self._clock.monotonic())
        if why is not None and not session.users and session.finished is None:
            self._finish(session, "end", why)

    def _follow(self, session: Session | None) -> None:
        """Adjust a session's state to that of its container. If `session` is None or has ended, or
        if the engine is stopping, do nothing. Call this method regularly, and after each event that
        may have changed the container's state.
        """
        # When the engine stops, the next engine takes the container over.
        if session is None or session.finished is not None or self._group is None:
            return
        try:
            name = session.seen_change()
        except ImpossibleChange as error:
            self._refuse(session, error)
            return
        if name == "lose":
            self._finish(session, name, session.container.lost or "")
        elif name is not None and self._change(session, name):
            session.is_outdated = True
            if name == "stop":
                session.is_pausing = True
                session.stopped_why = sentence(session.container.lost or "its container is gone")
                self._leave_place(session)
            if session.state is not SessionStatus.ACTIVE:
                self._tell(f"session.{session.state.value}", session)

    def _change(self, session: Session, name: str) -> bool:
        """Change a session's state by the transition `name`, and return True. If this is
        impossible, log it and return False.
        """
        try:
            session.change(name)
        except ImpossibleChange as error:
            self._refuse(session, error)
            return False
        return True

    def _refuse(self, session: Session, error: ImpossibleChange) -> None:
        """Log `error`, which says that a session's state could not be changed. If the last error
        logged for this session was the same, do not log it again. The session is not changed.
        """
        # The session can be used as long as its container exists. Tests replace this method to
        # raise the error.
        if session.refused != str(error):
            session.refused = str(error)
            self._tell("session.change_refused", session, why=str(error))

    def _finish(self, session: Session, name: str, why: str) -> None:
        """End a session by the transition `name`, which is `end` or `lose`. Do nothing if this is
        impossible. `why` is a clause.
        """
        if not self._change(session, name):
            return
        del self._live[session.id]
        self._leave_place(session)
        if session.spec.disk_mb is not None:
            self._places.disks.give_back(session.principal_id)
        self._places.saved.give_back(session.principal_id, session.spec.saved_mb)
        kept = session.finish(why, self._clock.now())
        session.container.end(why)
        self._history.add(kept)
        saved_as = session.id if session.copy is not None else None
        self._remove_after_end(session.container, saved_as)
        self._tell(f"session.{session.state.value}", session, why=why)

    def _remove_after_end(self, container: SessionContainer, saved_as: str | None = None) -> None:
        """In the background, wait until an ended container is removed. Then, if `saved_as` is the
        id of a session, delete the saved files of that session.
        """
        if self._group is None:
            return
        self._leaving += 1
        start_soon(self._group, self._until_gone, container, saved_as)

    async def _until_gone(self, container: SessionContainer, saved_as: str | None) -> None:
        try:
            await self._write_changes()  # before the removal: the next engine must know of the end
            await container.until_gone()
            if saved_as is not None and self._saver is not None:
                await self._saver.drop(saved_as)
        finally:
            self._leaving -= 1
            self._left.set()
            self._left = anyio.Event()

    async def _keep_tidy(self) -> None:
        while True:
            self.tidy()
            for session in self._live.values():
                if session.is_outdated:
                    session.is_outdated = False
                    self._history.note(session.kept())
            await self._write_changes()
            await anyio.sleep(TIDY_S)

    async def _write_changes(self) -> None:
        """Write pending changes to the database. If that fails, log it; the next write tries
        again.
        """
        try:
            await self._history.write()
        except EngineError as error:
            self._on_event("session.not_written", {"why": error.message})

    def _tell(self, event: str, session: Session, **values: str) -> None:
        self._on_event(
            event,
            {
                "session": session.id,
                "principal": session.principal_id,
                "image": session.spec.image,
                "calls": session.calls,
                **values,
            },
        )


def require_disk(session: Session, fault: str) -> None:
    """Raise InvalidParams if a session has no disk. `fault` completes the message "The files of
    this session are in memory, and …", and says what to do.
    """
    if session.spec.disk_mb is None:
        raise InvalidParams(
            f"The files of this session are in memory, and {fault}", fields=["session_id"]
        )


def _require_saver(session: Session) -> None:
    """Raise SandboxUnavailable if the session is durable, but no part saves its files."""
    if session.lacks_saver:
        raise SandboxUnavailable(
            "This session is durable, but the part of the engine that saves and restores its files "
            "is missing. The session's data is not lost.",
            retryable=False,
        )


def _require_name_of_part(name: str) -> None:
    """Raise ValueError if the engine itself stores a value with this name."""
    if name in OWN_NAMES:
        raise ValueError(f"A part cannot keep the value {name!r}, which is the kernel's.")


def _like(
    source: KeptSession,
    home: SessionHome,
    session_id: str,
    name: str | None,
    why: str,
    clock: SessionClock,
) -> KeptSession:
    """Return a new, stopped session with the properties of the session `source`. `session_id` and
    `name` are those of the new session. `home` is what an engine needs to continue it. `why` is a
    sentence that says why it is stopped.
    """
    now_at = clock.now()
    record = source.record.model_copy(
        update={
            "id": session_id, "name": name, "state": TRANSITIONS["fork"].to, "why": why,
            "created_at": now_at, "last_used_at": now_at, "calls": 0, "is_busy": False,
            "snapshots": (), "durable": False, "saved_at": None, "restored_at": None,
            **fields_of_parts(home.of_parts),
        }
    )  # fmt: skip
    return KeptSession(source.principal_id, record, home=home)


def _unknown() -> ResourceNotFound:
    words = "You have no such session. Do not retry."
    return ResourceNotFound(words, fields=["session_id"])


def _over(status: SessionStatus, why: str, at: datetime) -> ResourceNotFound:
    clause = f"{why[:1].lower()}{why[1:]}".rstrip(".") + f" ({at:%Y-%m-%d %H:%M:%S} UTC)"
    if status is SessionStatus.LOST:
        words = f"The session is lost: {clause}. Its files and variables are gone."
    else:
        words = f"The session has ended: {clause}. Its files and variables are gone."
    details = {"state": status.value}
    return ResourceNotFound(f"{words} Create a new one.", fields=["session_id"], details=details)


def _require_grade(session: Session, least: Grade | None = None) -> None:
    """Check that a session's container has the grade that the session demands, and the grade
    `least`.

    Raises:
        SandboxUnavailable: the container is too weak. If its grade is not known yet, the request
            may be repeated.
    """
    least, grade = strongest(least, session.spec.least_grade), session.container.grade
    if session.finished is not None or least is None:
        return
    if grade is None:
        raise try_later(f"Whether the session's container has the grade {least} is not known yet.")
    require_grade(grade, least)
