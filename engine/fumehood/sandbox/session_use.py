"""Access to a session: leases for calls, and visits for parts.

Host side. `sessions` creates these objects; executors and parts use them. A lease holds the
session's turn, so a session has at most one lease at a time. A visit uses the container without
holding the turn. It only keeps the session from being paused or stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

import anyio

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits, strongest
from fumehood.core.session import SessionStatus
from fumehood.sandbox.session import (
    Leftovers,
    Session,
    source_of,
)
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks, SessionContainer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeptValues:
    """The values that parts of the engine keep with one session. `values` maps each value's name to
    the value.

    `keep` receives a name and a value, and stores the value under this name (`SessionKeeper.keep`).
    """

    session_id: str
    values: Mapping[str, JsonObject]
    keep: Callable[[str, JsonObject], Awaitable[object]]


Visit = Callable[[], AbstractAsyncContextManager[SessionContainer]]
"""Returns a context manager that keeps a session running, and gives its block the session's
container.

Raises:
    ResourceNotFound: the session has ended.
    SandboxUnavailable, QuotaExceeded: the session cannot run now.
"""


@dataclass(frozen=True, slots=True)
class SessionAccess(KeptValues):
    """Access to one session for a part, independently of calls.

    `visit` returns a context manager whose block gets the session's container. During the block,
    calls can run in the session, and the engine does not pause or stop it for lack of use. Its
    owner can still pause or stop it.
    """

    session: Session
    visit: Visit


InSession = Callable[[SessionAccess], object | None]
"""Called for each turn in a session. Returns an object that one part provides for its own
executors, or None.
"""

InNewContainer = Callable[[SessionAccess, SessionContainer], Awaitable[None]]
"""Called when a new container has replaced a session's earlier one, before a program runs in the
new container.
"""

CarryOver = Callable[[KeptValues, KeptValues], Awaitable[None]]
"""Copies one part's values from one session to another. The first argument is the existing session,
the second a new session that is made from it and not stored yet. The part decides which values it
copies.
"""


@dataclass(frozen=True, slots=True)
class SessionLease:
    """The right to use a session alone, for one call or one operation on files.

    `until_ready` waits until the session can run a program. It raises ResourceNotFound if the
    session has ended.

    `save` saves the session's files if the session is durable. `save_after` receives the name and
    the arguments of a program. If a run of that program may have changed files, it does the same as
    `save`. Both return None or, if saving failed, a clause that says why.

    `write` stores the session's record.
    """

    session: Session
    until_ready: Callable[[], Awaitable[None]]
    save: Callable[[], Awaitable[str | None]]
    save_after: Callable[[str, JsonObject], Awaitable[str | None]]
    write: Callable[[], Awaitable[None]]
    queue_ms: float
    is_call: bool = True
    """Whether the lease is for a call. Only a call reports that the files were restored."""
    of_parts: tuple[object, ...] = ()
    """The objects that parts provide for their own executors (`EnginePart.in_session`)."""

    def part(self, kind: type[T]) -> T | None:
        """Return the object of class `kind` that a part of the engine has made for this lease. If
        there is none, return None. The executors of a part use this method to get the part's
        object.
        """
        return next((given for given in self.of_parts if isinstance(given, kind)), None)

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run a program in the session, and return its ending. `run` can be called several times;
        the runs share files and variables.

        Raises:
            ResourceNotFound: the session ended before this run.
        """
        session = self.session
        await self.until_ready()
        # Read before the run, because the container may be lost while the files are saved.
        copied_at, was_stopped = session.copied_at, session.stopped_why is not None
        leftovers = session.leftovers
        if program == "files" and leftovers is Leftovers.NONE:
            session.leftovers = Leftovers.WRITES  # until the run has succeeded
        limits = replace(
            limits,
            memory_mb=session.spec.memory_mb,
            least_grade=strongest(limits.least_grade, session.spec.least_grade),
        )
        arguments = session.with_env(program, arguments)
        if session.copy is None:
            ending = await session.container.run(program, arguments, limits, sinks)
        else:
            ending = await self._run_and_save(program, arguments, limits, sinks)
        if ending.ended_by is EndedBy.OK:
            session.leftovers = leftovers
        if ending.ended_by is not EndedBy.SANDBOX_LOST:
            ending = self._with_state(ending, program, copied_at, was_stopped=was_stopped)
        elif session.copy is not None:
            ending = replace(ending, copied_at=session.saved_at)
        finished = session.finished
        was_ended = finished is not None and finished.record.state is SessionStatus.ENDED
        if was_ended and ending.ended_by is EndedBy.SANDBOX_LOST:  # removed with its session
            ending = replace(ending, ended_by=EndedBy.CANCELLED)
        return replace(ending, isolation="session")

    def _with_state(
        self, ending: RunEnding, program: str, copied_at: datetime | None, *, was_stopped: bool
    ) -> RunEnding:
        """Return `ending` and, if the session was restored or restarted before this run, add this
        fact to it. A restoration is reported to the next call, and a restart to the next Python
        program. Each is reported only once.

        If the files were restored from a copy, `copied_at` is the time of that copy. `was_stopped`
        says whether the session had been stopped before the run.
        """
        session = self.session
        if copied_at is not None and self.is_call:
            session.copied_at = None
            ending = replace(ending, state="restored", copied_at=copied_at)
        # Reported to the first run that could have used variables.
        elif was_stopped and copied_at is None and program == "python":
            ending = replace(ending, state="restarted")
        else:
            return ending
        if not session.is_stopped:  # otherwise the next call reports it
            session.stopped_why = None
        return ending

    async def _run_and_save(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """Run a program, and return the ending of the run. Before the ending is reported, save the
        session's files.
        """
        endings: list[RunEnding] = []
        kept = replace(sinks, ending=endings.append)
        try:
            ending = await self.session.container.run(program, arguments, limits, kept)
        except BaseException:  # a cancelled run may have changed files as well
            with anyio.CancelScope(shield=True):
                not_saved = await self.save_after(program, arguments)
            if endings and sinks.ending is not None:
                sinks.ending(replace(endings[0], not_saved=not_saved))
            raise
        if ending.ended_by is EndedBy.SANDBOX_LOST:
            return ending
        with anyio.CancelScope(shield=True):  # a cancelled call must not leave its files unsaved
            not_saved = await self.save_after(program, arguments)
        return replace(ending, not_saved=not_saved)


_SWEEP_LIMITS = Limits(wall_s=10.0, cpu_s=10.0, memory_mb=None, output_bytes=MB)


async def sweep(session: Session) -> None:
    """Remove unfinished files (`Session.leftovers`) from the session's workspace. The caller must
    hold the session's turn, the right to use the session alone.
    """
    uploads = session.leftovers is Leftovers.UPLOADS
    ending = await source_of(session).run(
        "files", {"do": "sweep", "uploads": uploads}, _SWEEP_LIMITS
    )
    if ending.ended_by is not EndedBy.SANDBOX_LOST:  # a sweep that failed is not repeated
        session.leftovers = Leftovers.NONE
