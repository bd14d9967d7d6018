"""A lease on a session's place: entered when those before it have left, for the runs of one call.

Host side, between `sessions` and the executors. Invariant: a run begins only while the session
is active and its place is clean; where the session ends in the middle of one, it says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from fumehood.core.errors import EndedBy, InternalError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.session import SessionRules, SessionStatus
from fumehood.sandbox.session import Session
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks


class SessionLease:
    """The turn of one caller. `find` raises where the session is not active any more."""

    __slots__ = (
        "_find", "_is_call", "_monotonic", "_now", "_on_left", "_rules", "_session", "queue_ms",
    )  # fmt: skip

    def __init__(
        self,
        find: Callable[[], Session],
        rules: SessionRules,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
        on_left: Callable[[Session], None],
        *,
        is_call: bool,
    ) -> None:
        self._find = find
        self._rules = rules
        self._monotonic = monotonic
        self._now = now
        self._on_left = on_left
        self._is_call = is_call
        self._session: Session | None = None
        self.queue_ms = 0.0

    async def __aenter__(self) -> SessionLease:
        session = self._find()
        asked = time.monotonic()
        await session.take_turn(self._rules)
        try:
            self._find()
            await session.place.until_free()
            self._find()
        except BaseException:
            self._leave(session, is_call=False)
            raise
        self._session = session
        self.queue_ms = (time.monotonic() - asked) * 1e3
        return self

    async def __aexit__(self, *exc: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._leave(session, is_call=self._is_call)

    def _leave(self, session: Session, *, is_call: bool) -> None:
        session.leave_turn(self._monotonic(), self._now(), is_call=is_call)
        self._on_left(session)

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """One run; several may follow each other. What one leaves, the next one finds.

        Raises:
            ResourceNotFound: the session ended before this run.
        """
        session = self._session
        if session is None:
            raise InternalError("A lease on a session is not entered.")
        if limits.memory_mb not in (None, session.memory_mb):
            raise InternalError("A run has the memory limit of its session.")
        await session.place.until_free()
        if session.finished is not None:
            self._find()
        limits = replace(limits, memory_mb=session.memory_mb)
        ending = await session.place.run(program, arguments, limits, sinks)
        return replace(ending, ended_by=_ended_by(session, ending), isolation="session")


def _ended_by(session: Session, ending: RunEnding) -> EndedBy:
    """A place that is gone because somebody ended the session was not lost."""
    finished = session.finished
    was_ended = finished is not None and finished.record.state is SessionStatus.ENDED
    if was_ended and ending.ended_by is EndedBy.SANDBOX_LOST:
        return EndedBy.CANCELLED
    return ending.ended_by
