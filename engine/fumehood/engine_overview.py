"""An overview of an engine: its running calls, the sessions of all principals, and its metrics.

Host side. Used by the engine and by parts. Uses the objects that `compose` creates. Invariant:
nothing here runs a tool. Only administrators see the files of other principals' sessions. They
could create a token for these principals anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fumehood.compose import Composition
from fumehood.core.call import CallRequest
from fumehood.core.call_log import CallPage, CallQuery, CallRecord
from fumehood.core.errors import IdempotencyConflict, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.session import KeptSession, OwnedSession
from fumehood.core.status import engine_version
from fumehood.observe.figures import Figure
from fumehood.pipeline.running import LiveCall

NOT_RUNNING = "No such call is running. Do not retry."
_FIELDS = {"agent": "agent_id", "principal": "principal_id", "session": "session_id",
           "trace": "trace_id", "parent": "parent_id"}  # fmt: skip


class Overview:
    """Shows one engine's running calls and all its sessions."""

    def __init__(self, made: Composition) -> None:
        self._made = made
        self._clock = made.services.clock
        self._redactor = made.services.redactor
        self._watched: dict[str, tuple[CallRequest, JsonObject]] = {}
        """Maps the id of each running call that operators look at to its request and its redacted
        arguments."""

    # -- calls -----------------------------------------------------------------------------

    def running(self, query: CallQuery, principal_id: str | None = None) -> CallPage:
        """Return the running calls of one principal, or of all principals (None), oldest first."""
        wanted = query.model_dump(include={"agent", "principal", "session", "trace", "parent"})
        tool, _, version = (query.tool or "").partition("@")
        wanted |= {"tool_name": tool or None, "tool_version": version or None}
        records = [self._live(one) for one in self._running()]
        items = tuple(
            record
            for record in records
            if principal_id in (None, record.principal_id)
            and all(
                value is None or getattr(record, _FIELDS.get(name, name)) == value
                for name, value in wanted.items()
            )
        )
        return CallPage(items=items, has_more=False, next_cursor=None, total_count=len(items))

    def running_call(
        self, call_id: str, principal_id: str | None = None
    ) -> tuple[CallRecord, JsonObject] | None:
        """Return a running call and its redacted arguments. The call includes the last part of its
        output.

        If `principal_id` is given, only calls of this principal are considered. Return None if no
        such call is running.
        """
        for one in self._running():
            by = one.request.principal
            is_own = principal_id is None or (by is not None and by.id == principal_id)
            if one.request.call_id == call_id and is_own:
                return self._live(one, with_output=True), self._given_to(one)
        return None

    def _given_to(self, one: LiveCall) -> JsonObject:
        """Return the redacted arguments of a running call.

        They are cached, because redaction is slow and a page about a call requests them often.
        """
        found = self._watched.get(one.request.call_id)
        if found is None or found[0] is not one.request:
            running = {other.request.call_id for other in self._running()}
            self._watched = {key: self._watched[key] for key in self._watched.keys() & running}
            given = self._redactor.value(one.request.arguments)[0]
            found = self._watched[one.request.call_id] = one.request, given
        return found[1]

    def _running(self) -> list[LiveCall]:
        """Return the running calls, oldest first, each of them once."""
        found = {one.request.call_id: one for one in self._made.calls.running.values()}
        # A call that runs after its approval may still be in `found`, while its caller waits.
        for run in self._made.approvals.requests.runs.running.values():
            if run.request is not None:
                call = LiveCall(run.request, run.handle, run.began_at)
                found[run.request.call_id] = call
        return sorted(found.values(), key=lambda one: one.began_at)

    def _live(self, one: LiveCall, *, with_output: bool = False) -> CallRecord:
        currency = self._made.kernel.config.prices.currency
        return one.record(self._clock.now(), currency, with_output=with_output)

    async def cancel_as(self, call_id: str, principal: Principal) -> None:
        """Cancel a running call of one principal, and wait until its program has ended.

        Raises:
            ResourceNotFound: the principal has no such call, or the call has ended.
        """
        calls = self._made.calls
        live = calls.own(call_id, principal)
        if live is not None:
            if not await calls.cancel(live):
                raise ResourceNotFound(NOT_RUNNING)
            return
        try:
            await self._made.approvals.cancel_call(call_id, principal)
        except (IdempotencyConflict, ResourceNotFound):
            raise ResourceNotFound(NOT_RUNNING) from None

    # -- sessions --------------------------------------------------------------------------

    def sessions(self) -> tuple[OwnedSession, ...]:
        """Return the sessions of all principals."""
        return tuple(map(_owned, self._made.services.sessions.every()))

    def session(self, reference: str) -> OwnedSession:
        """Return one session by its id or name.

        If an active session has this name, return it. Otherwise, return the session with this name
        that ended last.

        Raises:
            ResourceNotFound: there is no such session, or several principals have a session with
                this name.
        """
        every = self._made.services.sessions.every()
        found = [one for one in every if reference in (one.record.id, one.record.name)]
        found = [one for one in found if not one.record.state.is_over] or found
        if len({one.principal_id for one in found}) > 1:
            words = "Several principals have a session of this name. Use the session's id."
            raise ResourceNotFound(words, fields=["session_id"])
        if not found:
            raise ResourceNotFound("There is no such session. Do not retry.")
        return _owned(found[0])

    def id_of_session(self, reference: str | None) -> str | None:
        """Return the id of the session with this id or name. If there is no such session, return
        `reference`.
        """
        with suppress(ResourceNotFound):
            return self.session(reference).id if reference is not None else None
        return reference

    async def end_session(self, session_id: str, by: Principal) -> OwnedSession:
        """End a session of any principal and everything that runs in it. Return the ended session.

        `by` is the principal who ends the session. The audit log records the end as an
        administrative change by this principal. If the session has already ended, nothing is
        changed or recorded.

        Raises:
            ResourceNotFound: the session is unknown.
            WriteFailed: the change could not be recorded, so the session was not ended.
        """
        found = self.session(session_id)
        if not found.state.is_over:
            details = {"principal_id": found.principal_id}
            await self._record(by, "session.end", found.id, details)
            why = "an administrator ended it"
            await self._made.services.sessions.end(Principal(found.principal_id), found.id, why)
        return self.session(found.id)

    async def _record(
        self, by: Principal, action: str, subject: str, details: dict[str, str]
    ) -> None:
        await self._made.kernel.record_change(by.id, action, subject, details)


def _owned(kept: KeptSession) -> OwnedSession:
    fields: dict[str, Any] = dict(kept.record)
    return OwnedSession(**fields, principal_id=kept.principal_id)


async def figures_of(made: Composition) -> list[Figure]:
    """Return all metrics of the engine. Raises ReadFailed if the state cannot be read."""
    pending = await made.approvals.count_pending()
    shown = Figure("approvals_pending", "Calls that wait for a human's approval.", pending)
    return [shown, *_of_calls(made), *_of_containers(made), *_of_state(made), *_of_parts(made)]


def _of_calls(made: Composition) -> Iterator[Figure]:
    yield Figure("calls_running", "Calls that run or wait now.", len(made.calls.running))
    yield Figure(
        "sessions_open",
        "Sessions that exist now.",
        sum(made.services.sessions.counts[state] for state in ("active", "paused", "stopped")),
    )
    yield Figure("circuits_open", "Services that calls are not let through to.",
                 made.services.circuits.broken())  # fmt: skip


def _of_containers(made: Composition) -> Iterator[Figure]:
    counts: dict[str, float] = {**made.walls.containers()}
    waiting, dirty = counts.pop("waiting", 0), counts.pop("dirty", 0)
    yield Figure("containers", "Containers by state; `held` ones belong to sessions.", counts,
                 "state")  # fmt: skip
    yield Figure("container_calls_waiting", "Calls that wait for a container.", waiting)
    yield Figure("containers_dirty", "Containers that could not be cleaned, and were removed.",
                 dirty, kind="counter")  # fmt: skip


def _of_state(made: Composition) -> Iterator[Figure]:
    database = made.kernel.database
    yield Figure("state_rows_lost", "Rows of the call log that were not stored.",
                 database.lost_posts, kind="counter")  # fmt: skip
    yield Figure("state_failing", "1 while the state cannot be written.", database.is_failing)
    yield Figure("state_writes_waiting", "Changes that wait to be written.", database.waiting)


def _of_parts(made: Composition) -> Iterator[Figure]:
    for part in made.parts:
        yield from part.figures()
    yield Figure("build_info", "The version of the engine.", {engine_version(): 1.0}, "version")
