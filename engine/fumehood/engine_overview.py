"""What operators see of an engine: all principals' calls, sessions and rules, and the metrics.

Host side. Used by the engine; uses what `compose` creates. Invariant: nothing here runs a tool; a
dry run only describes a call. Only administrators see the answers and files of other principals,
for whom they could create a token anyway. Approvers see the answers of calls that needed approval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, BinaryIO, TypeVar

import anyio

from fumehood.answers import CallDetails
from fumehood.approvals.refusals import require_known_options
from fumehood.call_options import CallOptions, deciding, read_stored
from fumehood.compose import Composition
from fumehood.core.call import CallBody, CallRequest
from fumehood.core.call_log import (
    AllCallsQuery,
    CallPage,
    CallQuery,
    CallRecord,
    CallSeries,
    MatchedCalls,
    RulesToTry,
    SeriesQuery,
    ToolFiguresList,
    TriedRule,
    TriedRules,
)
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    ResourceNotFound,
    ToolNotFound,
)
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL
from fumehood.core.session import KeptSession, OwnedSession
from fumehood.core.status import EngineSummary, Readiness, engine_version
from fumehood.core.tool import ToolDefinition
from fumehood.core.usage_table import AllUsageQuery
from fumehood.executors.base import CallHandle
from fumehood.observe.figures import Figure
from fumehood.pipeline.running import LiveCall
from fumehood.policy.loader import parse_policy
from fumehood.policy.model import CallFacts, PolicyError, Rule
from fumehood.policy.rules import compile_rule
from fumehood.protocol.messages import decode_envelope
from fumehood.sandbox.session_use import SessionProcesses
from fumehood.storage.audit_chain import chain_of
from fumehood.storage.blobs import Blob
from fumehood.storage.calls import AllCalls, CallGroup, FoundCall, Recorded
from fumehood.storage.changes import recorded, stamp

T = TypeVar("T")

SHOWN_GROUPS = 20

NOTED_FOR_S = 300.0
"""Seconds in which an access to the same data by the same reader is recorded only once."""

Q = TypeVar("Q", AllCallsQuery, AllUsageQuery)

NOT_RUNNING = "No such call is running. Do not retry."
_FIELDS = {"agent": "agent_id", "principal": "principal_id", "session": "session_id",
           "trace": "trace_id", "parent": "parent_id"}  # fmt: skip


class Overview:
    """The view over one engine's calls, sessions, tools and rules."""

    def __init__(self, made: Composition) -> None:
        self._made = made
        self._clock = made.services.clock
        self._calls = AllCalls(made.kernel.database)
        self._redactor = made.services.redactor
        self._started_at = self._clock.now()
        self._trying = anyio.CapacityLimiter(1)
        self._watched: dict[str, tuple[CallRequest, JsonObject]] = {}
        """Call id → request and redacted arguments, for running calls that operators look at."""
        self._noted: dict[tuple[object, ...], float] = {}
        """Recently recorded access (event, reader, data) → the time when it was recorded."""

    # -- calls -----------------------------------------------------------------------------

    async def calls(self, query: AllCallsQuery, reader: Principal) -> CallPage:
        """Return calls of all principals, newest first.

        Raises:
            PermissionDenied: only administrators may search by text, because a search reveals what
                calls contain.
            ResourceNotFound: the cursor is unknown, or too old.
            ReadFailed: the state cannot be read.
            WriteFailed: the search could not be recorded.
        """
        query = self.by_session_id(query)
        if query.state is not None:
            page = self.running(query)
            items = tuple(_for_reader(record, reader) for record in page.items)
            return page.model_copy(update={"items": items})
        if query.text is not None:
            if Scope.ADMIN not in reader.scopes:
                raise PermissionDenied("A search in what calls were given needs admin.")
            await self._note_reading("calls.searched", reader, {"text": query.text})
        return await self._calls.page(query)

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
        """Return a running call with the end of its output, and its redacted arguments, or None."""
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
        """Return the running calls, oldest first. A call that was approved appears only once."""
        found = {one.request.call_id: one for one in self._made.calls.running.values()}
        for run in self._made.approvals.requests.runs.running.values():
            if run.request is not None:
                call = LiveCall(run.request, run.handle, run.began_at)
                found[run.request.call_id] = call
        return sorted(found.values(), key=lambda one: one.began_at)

    def _live(self, one: LiveCall, *, with_output: bool = False) -> CallRecord:
        currency = self._made.kernel.config.prices.currency
        return one.record(self._clock.now(), currency, with_output=with_output)

    async def cancel(self, call_id: str, by: Principal) -> None:
        """Cancel a running call of any principal.

        The cancellation is recorded in the audit log as an administrative change.

        Raises:
            ResourceNotFound: no such call is running.
            WriteFailed: the change could not be recorded, and the call continues.
        """
        found = self.running_call(call_id)
        if found is None:
            raise ResourceNotFound(NOT_RUNNING)
        record, _ = found
        await self._record(by, "call.cancel", call_id, {"principal_id": record.principal_id})
        await self.cancel_as(call_id, Principal(record.principal_id))

    async def cancel_as(self, call_id: str, principal: Principal) -> None:
        """Cancel a running call of one principal, and wait until its program has ended.

        Raises:
            ResourceNotFound: the principal has no such call, or it has ended.
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

    async def call(self, call_id: str, reader: Principal) -> CallDetails:
        """Return everything that is stored about a call, as far as the reader may see it.

        Raises:
            ResourceNotFound: the call is not in the call log, and is not running.
        """
        running = self.running_call(call_id)
        if running is None:
            found = await self._calls.get(call_id)
        else:
            record, given = running
            found = FoundCall(_for_reader(record, reader), {}, None, Recorded(given, b""))
        stored = await self._made.approvals.requests.table.of_call(call_id)
        approval = None
        if stored is not None:
            approval = await self._made.approvals.show(stored.approval.id)
        answer = stored.answer if stored is not None else None
        if answer is None:
            answer = await self._made.services.keys.answer_of(found.call.principal_id, call_id)
        encoded = answer.encode() if answer is not None else None
        if encoded is None and found.record is not None:
            encoded = found.record.envelope
        envelope = decode_envelope(encoded) if encoded else None
        arguments = found.record.arguments if found.record is not None else None
        may_read = approval is not None or Scope.ADMIN in reader.scopes
        if approval is None and may_read and (arguments is not None or envelope is not None):
            told = {"call_id": call_id, "principal_id": found.call.principal_id}
            await self._note_reading("call.read", reader, told)
        children = await self._calls.below(call_id) if running is None else ()
        return CallDetails(
            call=found.call,
            stages_ms=found.stages_ms,
            audit_seq=found.audit_seq,
            approval=approval,
            arguments=arguments if may_read else None,
            envelope=envelope if may_read else None,
            answer="shown" if envelope is not None and may_read else
            "not_kept" if envelope is None else "needs_admin",
            children=children,
            can_repeat=stored is not None and not stored.approval.tool.startswith(EXTERNAL),
        )  # fmt: skip

    async def open_blob(
        self, call_id: str, blob_id: str, reader: Principal, *, expires: str, signature: str
    ) -> tuple[Blob, BinaryIO]:
        """Open a blob of a call's answer for a reader who may see it. The caller closes the file.

        Raises:
            ResourceNotFound: the call or blob is unknown or no longer kept.
            PermissionDenied: only administrators may read the answer.
        """
        details = await self.call(call_id, reader)
        if details.answer == "needs_admin":
            raise PermissionDenied("The answers of calls without approval need admin.")
        if details.answer == "not_kept":
            raise ResourceNotFound("The answer of this call is not kept. Do not retry.")
        owner = details.call.principal_id
        return await self._made.services.stores.blobs.open_blob(blob_id, owner, expires, signature)

    async def repeat_as_dry_run(self, call_id: str) -> Envelope:
        """Repeat a call that needed approval as a dry run, with the rights of the call's caller.

        Raises:
            ResourceNotFound: the call's arguments are not stored.
            PermissionDenied: the call's caller may no longer make calls.
            InvalidParams: this engine does not know one of the call's options.
        """
        stored = await self._made.approvals.requests.table.of_call(call_id)
        if stored is None or stored.approval.tool.startswith(EXTERNAL):
            raise ResourceNotFound(
                "The arguments of this call are not kept: only those of calls that needed approval "
                "are. Do not retry."
            )
        requests = self._made.approvals.requests
        principal = requests.eligibility.caller_of(stored)
        if principal is None:
            raise PermissionDenied("The caller of this call may not make it any more.")
        require_known_options(stored.request.options)
        given, _ = read_stored(stored.request.options)
        whose = given.model_dump(include={"agent_id", "session_id"})
        options = CallOptions(dry_run=True, **whose, **deciding(given))
        body = CallBody(arguments=stored.request.arguments, options=options)
        tool = f"{stored.approval.tool}@{stored.approval.tool_version}"
        return await self._made.calls.run(tool, body, principal, CallHandle())

    async def figures(self, hours: int) -> ToolFiguresList:
        """Return success and latency of each tool's recent calls. Raises ReadFailed."""
        return await self._calls.figures(self._clock.now() - timedelta(hours=hours))

    async def series(self, query: SeriesQuery) -> CallSeries:
        """Return counts, failures, latency and cost of calls over time. Raises ReadFailed."""
        return await self._calls.series(query, self._clock.now() - timedelta(hours=query.hours))

    # -- sessions --------------------------------------------------------------------------

    def sessions(self) -> tuple[OwnedSession, ...]:
        """Return the sessions of all principals."""
        return tuple(map(_owned, self._made.services.sessions.every()))

    def session(self, reference: str) -> OwnedSession:
        """Return one session by its id or name.

        A name refers to the session in use with this name, or else to the last session with this
        name that ended.

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

    def by_session_id(self, query: Q) -> Q:
        """Return the query with the session's id in the filter `session`, even if it was a name."""
        with suppress(ResourceNotFound):
            if query.session is not None:
                return query.model_copy(update={"session": self.session(query.session).id})
        return query

    async def end_session(self, session_id: str, by: Principal) -> OwnedSession:
        """End any principal's session and everything that runs in it.

        This is recorded in the audit log as an administrative change.

        Raises:
            ResourceNotFound: the session is unknown.
            WriteFailed: the change could not be recorded, and the session continues.
        """
        found = self.session(session_id)
        if not found.state.is_over:
            details = {"principal_id": found.principal_id}
            await self._record(by, "session.end", found.id, details)
            why = "an administrator ended it"
            await self._made.services.sessions.end(Principal(found.principal_id), found.id, why)
        return self.session(found.id)

    def processes(self, session_id: str) -> SessionProcesses:
        """Return the processes of any principal's session.

        This does not count as a use of the session.

        Raises:
            ResourceNotFound: there is no such session, or it has ended.
        """
        found = self.session(session_id)
        return self._made.services.sessions.processes(
            Principal(found.principal_id), found.id, is_use=False
        )

    async def stop_process(
        self, session_id: str, name: str, grace_s: float, by: Principal
    ) -> JsonObject:
        """End a process of any principal's session and return it.

        This is recorded in the audit log as an administrative change. If the process has already
        ended, it is only returned.

        Raises:
            ResourceNotFound: there is no such process.
            SandboxUnavailable: the session cannot run now.
            WriteFailed: the change could not be recorded, and the process continues.
        """
        session = self.session(session_id)
        processes = self.processes(session.id)
        for one in (await processes.ask({"do": "list"}))["processes"]:
            if one["name"] == name and one["state"] == "ended":
                return dict(one)
            if one["name"] == name:
                break
        else:
            raise ResourceNotFound("This session has no such process.", fields=["process"])
        details = {"principal_id": session.principal_id, "process": name}
        await self._record(by, "process.stop", session.id, details)
        answer = await processes.ask({"do": "stop", "name": name, "grace_s": grace_s})
        return dict(answer["process"])

    async def _record(
        self, by: Principal, action: str, subject: str, details: dict[str, str]
    ) -> None:
        await self._made.kernel.database.write(
            recorded(
                lambda _: None, at=self._clock.now(), by=by.id, action=action, subject=subject,
                details=details,
            )
        )  # fmt: skip

    async def _note_reading(self, event: str, by: Principal, told: JsonObject) -> None:
        """Record in the audit chain that an operator read data of other principals.

        Repeated access is recorded only once in `NOTED_FOR_S`, because the page of a running call
        reloads often. Raises WriteFailed.
        """
        key, now = (event, by.id, *told.values()), self._clock.monotonic()
        if now - self._noted.get(key, -math.inf) < NOTED_FOR_S:
            return
        at = stamp(self._clock.now())
        told = self._redactor.value(told)[0]
        await self._made.kernel.database.write(
            lambda rows: chain_of(rows).append(rows, event, at, {"by": by.id, **told})
        )
        recent = {one: at for one, at in self._noted.items() if now - at < NOTED_FOR_S}
        self._noted = {**recent, key: now}

    # -- the engine ------------------------------------------------------------------------

    def summary(self, readiness: Readiness) -> EngineSummary:
        """Return a summary of the engine's state."""
        made = self._made
        config = made.kernel.config
        return EngineSummary(
            version=engine_version(),
            started_at=self._started_at,
            mode=config.mode,
            environment=config.environment,
            is_draining=made.calls.intake.is_draining,
            running_calls=len(made.calls.running),
            readiness=readiness,
            containers=made.walls.containers(),
            sessions=dict(made.services.sessions.counts),
            circuits=tuple(made.services.circuits.statuses()),
        )

    # -- rules -----------------------------------------------------------------------------

    async def try_rules(self, wish: RulesToTry, reader: Principal) -> TriedRules:
        """Apply policy rules to the calls of the last `wish.days` days. The policy does not change.

        For administrators, conditions on arguments are checked against the recorded arguments.

        Raises:
            InvalidParams: the rules are invalid.
            ReadFailed: the call log cannot be read.
            WriteFailed: the access to the arguments could not be recorded.
        """
        rules = await self._in_thread(partial(self._parsed, wish.rules))
        since = self._clock.now() - timedelta(days=wish.days)
        groups, is_partial = await self._calls.groups(since)
        tools = {group[:2]: self._tool(group) for group in groups}
        found = [(group, tool) for group in groups if (tool := tools[group[:2]]) is not None]
        environment = self._made.kernel.config.environment
        given: list[tuple[CallGroup, JsonObject]] = []
        if Scope.ADMIN in reader.scopes and any(rule.when or rule.any for rule in rules):
            await self._note_reading("calls.searched", reader, {"rules": wish.rules})
            given = await self._calls.given(since, {group.tool for group, _ in found})

        def tried() -> tuple[TriedRule, ...]:
            calls = [(one, tools[one[:2]], arguments) for one, arguments in given]
            return tuple(_tried(rule, environment, found, calls) for rule in rules)

        items = await self._in_thread(tried)
        calls = sum(group.calls for group in groups)
        return TriedRules(
            items=items,
            calls=calls,
            skipped=calls - sum(group.calls for group, _ in found),
            is_partial=is_partial,
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run slow work on rules in a thread, so that it does not delay calls."""
        return await anyio.to_thread.run_sync(work, limiter=self._trying)

    def _parsed(self, rules: str) -> tuple[Rule, ...]:
        """Parse rules in the format of a policy file. Raises InvalidParams."""
        known = [tool.definition for tool in self._made.services.registry]
        try:
            return parse_policy("rules.toml", rules.encode(), known).rules
        except PolicyError as refused:
            faults = list(refused.shown)
            raise InvalidParams(
                f"The rules cannot be used: {faults[0]}", fields=["rules"],
                details={"faults": faults},
            ) from None  # fmt: skip

    def _tool(self, group: CallGroup) -> ToolDefinition | None:
        try:
            reference = f"{group.tool}@{group.version}" if group.version else group.tool
            return self._made.services.registry.get(reference, names_others=False).definition
        except ToolNotFound:
            return None


def _tried(
    rule: Rule,
    environment: str,
    groups: Sequence[tuple[CallGroup, ToolDefinition]],
    given: Sequence[tuple[CallGroup, ToolDefinition | None, JsonObject]],
) -> TriedRule:
    conditions = [one.name for one in (*rule.when, *(rule.any or ()))]
    excesses = list(rule.exceeds)
    rule = rule.model_copy(update=dict.fromkeys(excesses))
    plain = rule.model_copy(update={"when": (), "any": None})
    compiled = compile_rule(plain, None, environment)
    whole = compile_rule(rule, None, environment)
    left = {  # calls whose arguments are unknown
        group[:4]: group.calls
        for group, tool in groups
        if compiled.is_about(tool)
        and compiled.matches(CallFacts(tool, {}, group.principal_id, group.agent_id, None))
    }
    certain = dict.fromkeys(left, 0)
    for group, tool, arguments in given if conditions else ():
        key = group[:4]
        if tool is not None and left.get(key):
            left[key] -= 1
            facts = CallFacts(tool, arguments, group.principal_id, group.agent_id, None)
            certain[key] += whole.matches(facts)
    at_most = {key: count + certain[key] for key, count in left.items()}
    unknown = (conditions if any(left.values()) else []) + excesses
    matched = sorted((key for key, count in at_most.items() if count), key=lambda k: -at_most[k])
    return TriedRule(
        id=rule.id,
        decision=rule.decision.value,
        calls=sum(at_most.values()),
        at_least=0 if excesses else sum((certain if conditions else at_most).values()),
        groups=tuple(
            MatchedCalls(
                tool=tool_name, principal_id=principal_id, agent_id=agent_id,
                calls=at_most[tool_name, version, principal_id, agent_id],
            )
            for tool_name, version, principal_id, agent_id in matched[:SHOWN_GROUPS]
        ),
        unknown=tuple(unknown),
    )  # fmt: skip


def _for_reader(record: CallRecord, reader: Principal) -> CallRecord:
    """Return a running call as the reader may see it.

    Only administrators see the call's message and output.
    """
    if Scope.ADMIN in reader.scopes or record.running is None:
        return record
    running = record.running.model_copy(update={"message": "", "stdout": None, "stderr": None})
    return record.model_copy(update={"running": running})


def _owned(kept: KeptSession) -> OwnedSession:
    fields: dict[str, Any] = dict(kept.record)
    return OwnedSession(**fields, principal_id=kept.principal_id)


async def figures_of(made: Composition) -> list[Figure]:
    """Return all metrics of the engine. Raises ReadFailed."""
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
