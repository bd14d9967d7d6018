"""What operators see of an engine: everybody's calls, sessions and rules, and the metrics.

Host side. Above it the engine; below it the parts that `compose` has made. Invariant: nothing here
calls a tool, except for a dry run, which uses nothing up. Answers and files of others are for
administrators: they could make a token of the owner's anyway. Approvers see the answers of calls
that needed approval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any, BinaryIO

import anyio

from fumehood.answers import CallDetails
from fumehood.compose import Composition
from fumehood.core.call import DECIDING_OPTIONS, CallBody, CallOptions
from fumehood.core.call_log import (
    AllCallsQuery,
    CallPage,
    MatchedCalls,
    RulesToTry,
    ToolFiguresList,
    TriedRule,
    TriedRules,
)
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    InvalidParams,
    PermissionDenied,
    ResourceNotFound,
    ToolNotFound,
)
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL
from fumehood.core.pages import MAX_PAGE
from fumehood.core.session import KeptSession, OwnedSession
from fumehood.core.status import EngineSummary, NodeRecord, Readiness, engine_version
from fumehood.core.tool import ToolDefinition
from fumehood.executors.handle import CallHandle
from fumehood.observe.metrics import Figure, network_figures, node_figures
from fumehood.policy.loader import parse_policy
from fumehood.policy.model import CallFacts, PolicyError, Rule
from fumehood.policy.rules import compile_rule
from fumehood.protocol.messages import decode_envelope
from fumehood.sandbox.session_processes import SessionProcesses
from fumehood.storage.blobs import Blob
from fumehood.storage.calls import AllCalls, CallGroup
from fumehood.storage.changes import recorded

SHOWN_GROUPS = 20


class Overview:
    """The view over one engine's calls, sessions, tools and rules."""

    def __init__(self, made: Composition) -> None:
        self._made = made
        self._clock = made.basis.clock
        self._calls = AllCalls(made.database)
        self._started_at = self._clock.now()
        self._trying = anyio.CapacityLimiter(1)

    # -- nodes -----------------------------------------------------------------------------

    def nodes(self) -> list[NodeRecord]:
        """Return the nodes of the cluster; none if the containers are on this machine."""
        cluster = self._made.walls.cluster
        return cluster.nodes() if cluster is not None else []

    async def drain_node(self, name: str, by: Principal, *, is_drained: bool) -> NodeRecord:
        """Let a node take nothing new, or again.

        Raises:
            ResourceNotFound: no such node has joined.
            SandboxUnavailable: it was lost.
        """
        cluster = self._made.walls.cluster
        if cluster is None:
            raise ResourceNotFound("This engine has no nodes.", fields=["node"])
        node = await cluster.drain(name, is_drained=is_drained)
        event = "node.drained" if is_drained else "node.resumed"
        self._made.basis.log.info(event, node=name, by=by.id)
        return node

    # -- calls -----------------------------------------------------------------------------

    async def calls(self, query: AllCallsQuery) -> CallPage:
        """Return calls of all principals, newest first. Raises as `AllCalls.page`."""
        return await self._calls.page(query)

    async def call(self, call_id: str, reader: Principal) -> CallDetails:
        """Return one call with everything that is kept of it, as far as the reader may see it.

        Raises:
            ResourceNotFound: the call log does not have it.
        """
        record, stages_ms, audit_seq = await self._calls.get(call_id)
        stored = await self._made.approvals.requests.table.of_call(call_id)
        approval = None
        if stored is not None:
            approval = await self._made.approvals.show(stored.approval.id)
        answer = stored.answer if stored is not None else None
        if answer is None:
            answer = await self._made.state.keys.answer_of(record.principal_id, call_id)
        may_read = approval is not None or Scope.ADMIN in reader.scopes
        children = await self._calls.page(AllCallsQuery(parent=call_id, limit=MAX_PAGE))
        return CallDetails(
            call=record,
            stages_ms=stages_ms,
            audit_seq=audit_seq,
            approval=approval,
            envelope=decode_envelope(answer.encode()) if answer is not None and may_read else None,
            answer="shown" if answer is not None and may_read else
            "not_kept" if answer is None else "needs_admin",
            children=children.items,
            can_repeat=stored is not None and not stored.approval.tool.startswith(EXTERNAL),
        )  # fmt: skip

    async def open_blob(
        self, call_id: str, blob_id: str, reader: Principal, *, expires: str, signature: str
    ) -> tuple[Blob, BinaryIO]:
        """Open a blob of a call's answer for a reader who may see it. The caller closes the file.

        Raises:
            ResourceNotFound: the call or blob is unknown or no longer kept.
            PermissionDenied: the answer is for administrators.
        """
        details = await self.call(call_id, reader)
        if details.answer == "needs_admin":
            raise PermissionDenied("The answers of calls without approval need admin.")
        if details.answer == "not_kept":
            raise ResourceNotFound("The answer of this call is not kept. Do not retry.")
        owner = details.call.principal_id
        return await self._made.state.blobs.open_blob(blob_id, owner, expires, signature)

    async def repeat_as_dry_run(self, call_id: str) -> Envelope:
        """Repeat a call that needed approval as a dry run, with its caller's rights.

        Raises:
            ResourceNotFound: its arguments are not kept.
            PermissionDenied: its caller may no longer call.
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
        given = CallOptions.model_validate(stored.request.options)
        kept = {"agent_id", "session_id", *DECIDING_OPTIONS}
        options = CallOptions(dry_run=True, **given.model_dump(include=kept))
        body = CallBody(arguments=stored.request.arguments, options=options)
        tool = f"{stored.approval.tool}@{stored.approval.tool_version}"
        return await self._made.calls.run(tool, body, principal, CallHandle())

    async def figures(self, hours: int) -> ToolFiguresList:
        """Return success and latency of each tool's recent calls. Raises ReadFailed."""
        return await self._calls.figures(self._clock.now() - timedelta(hours=hours))

    # -- sessions --------------------------------------------------------------------------

    def sessions(self) -> tuple[OwnedSession, ...]:
        """Return the sessions of all principals."""
        return tuple(map(_owned, self._made.sessions.every()))

    def session(self, session_id: str) -> OwnedSession:
        """Return one session. Raises ResourceNotFound."""
        for one in self._made.sessions.every():
            if one.record.id == session_id:
                return _owned(one)
        raise ResourceNotFound("There is no such session. Do not retry.")

    def owner_of(self, session_id: str) -> Principal:
        """Return a session's owner as a principal without scopes. Raises ResourceNotFound."""
        return Principal(self.session(session_id).principal_id)

    async def end_session(self, session_id: str, by: Principal) -> OwnedSession:
        """End any session with everything that runs in it, and record that as a change.

        Raises:
            ResourceNotFound: the session is unknown.
            WriteFailed: the change could not be recorded, and the session continues.
        """
        found = self.session(session_id)
        if not found.state.is_over:
            details = {"principal_id": found.principal_id}
            await self._record(by, "session.end", session_id, details)
            why = "an administrator ended it"
            await self._made.sessions.end(Principal(found.principal_id), session_id, why)
        return self.session(session_id)

    def processes(self, session_id: str) -> SessionProcesses:
        """Return the processes of any session, for looking at them: that is not a use of it.

        Raises:
            ResourceNotFound: there is no such session, or it is over.
        """
        return self._made.sessions.processes(self.owner_of(session_id), session_id, is_use=False)

    async def stop_process(
        self, session_id: str, name: str, grace_s: float, by: Principal
    ) -> JsonObject:
        """End a process of any session, and record that as a change. One that has ended stays so.

        Raises:
            ResourceNotFound: there is no such process.
            SandboxUnavailable: the session cannot run now.
            WriteFailed: the change could not be recorded, and the process continues.
        """
        processes = self.processes(session_id)
        for one in (await processes.ask({"do": "list"}))["processes"]:
            if one["name"] == name and one["state"] == "ended":
                return dict(one)
            if one["name"] == name:
                break
        else:
            raise ResourceNotFound("This session has no such process.", fields=["process"])
        details = {"principal_id": self.owner_of(session_id).id, "process": name}
        await self._record(by, "process.stop", session_id, details)
        answer = await processes.ask({"do": "stop", "name": name, "grace_s": grace_s})
        return dict(answer["process"])

    async def _record(
        self, by: Principal, action: str, subject: str, details: dict[str, str]
    ) -> None:
        await self._made.database.write(
            recorded(
                lambda _: None, at=self._clock.now(), by=by.id, action=action, subject=subject,
                details=details,
            )
        )  # fmt: skip

    # -- the engine ------------------------------------------------------------------------

    def summary(self, readiness: Readiness) -> EngineSummary:
        """Return the state of the engine."""
        made = self._made
        config = made.basis.config
        return EngineSummary(
            version=engine_version(),
            started_at=self._started_at,
            mode=config.mode,
            environment=config.environment,
            is_draining=made.intake.is_draining,
            running_calls=len(made.calls.running),
            readiness=readiness,
            containers=made.walls.containers(),
            sessions=dict(made.sessions.counts),
            circuits=tuple(made.circuits.statuses()),
        )

    # -- rules -----------------------------------------------------------------------------

    async def try_rules(self, wish: RulesToTry) -> TriedRules:
        """Try rules against the calls of the last days. The rules in force stay.

        Raises:
            InvalidParams: the rules have faults.
            ReadFailed: the log cannot be read.
        """
        known = [tool.definition for tool in self._made.registry]
        groups, is_partial = await self._calls.groups(self._clock.now() - timedelta(days=wish.days))
        tools = {group[:2]: self._tool(group) for group in groups}
        found = [(group, tool) for group in groups if (tool := tools[group[:2]]) is not None]
        environment = self._made.basis.config.environment

        def tried() -> tuple[TriedRule, ...]:
            policy = parse_policy("rules.toml", wish.rules.encode(), known)
            return tuple(_tried(rule, environment, found) for rule in policy.rules)

        try:  # thousands of rules take seconds, which must not be those of calls
            items = await anyio.to_thread.run_sync(tried, limiter=self._trying)
        except PolicyError as refused:
            faults = list(refused.shown)
            raise InvalidParams(
                f"The rules cannot be used: {faults[0]}", fields=["rules"],
                details={"faults": faults},
            ) from None  # fmt: skip
        calls = sum(group.calls for group in groups)
        return TriedRules(
            items=items,
            calls=calls,
            skipped=calls - sum(group.calls for group, _ in found),
            is_partial=is_partial,
        )

    def _tool(self, group: CallGroup) -> ToolDefinition | None:
        try:
            reference = f"{group.tool}@{group.version}" if group.version else group.tool
            return self._made.registry.get(reference, names_others=False).definition
        except ToolNotFound:
            return None


def _tried(
    rule: Rule, environment: str, groups: Sequence[tuple[CallGroup, ToolDefinition]]
) -> TriedRule:
    unknown = [one.name for one in (*rule.when, *(rule.any or ()))]
    unknown += ["over_budget"] if rule.over_budget else []
    plain = rule.model_copy(update={"when": (), "any": None, "over_budget": None})
    compiled = compile_rule(plain, None, environment)
    matched = [
        group
        for group, tool in groups
        if compiled.is_about(tool)
        and compiled.matches(CallFacts(tool, {}, group.principal_id, group.agent_id, None))
    ]
    return TriedRule(
        id=rule.id,
        decision=rule.decision.value,
        calls=sum(group.calls for group in matched),
        groups=tuple(
            MatchedCalls(
                tool=group.tool, principal_id=group.principal_id, agent_id=group.agent_id,
                calls=group.calls,
            )
            for group in matched[:SHOWN_GROUPS]
        ),
        unknown=tuple(unknown),
    )  # fmt: skip


def _owned(kept: KeptSession) -> OwnedSession:
    fields: dict[str, Any] = dict(kept.record)
    return OwnedSession(**fields, principal_id=kept.principal_id)


async def figures_of(made: Composition) -> list[Figure]:
    """Return all figures. Raises ReadFailed."""
    pending = await made.approvals.count_pending()
    shown = Figure("approvals_pending", "Calls that wait for a human's approval.", pending)
    return [shown, *_of_calls(made), *_of_containers(made), *_of_state(made), *_of_sight(made)]


def _of_calls(made: Composition) -> Iterator[Figure]:
    yield Figure("calls_running", "Calls that run or wait now.", len(made.calls.running))
    yield Figure(
        "sessions_open",
        "Sessions that exist now.",
        sum(made.sessions.counts[state] for state in ("active", "paused", "stopped")),
    )
    yield Figure("circuits_open", "Services that calls are not let through to.",
                 made.circuits.broken())  # fmt: skip
    cache = made.state.cache.status()
    yield Figure("cache_hits", "Calls answered by the result cache.", cache.hits, kind="counter")
    yield Figure("cache_misses", "Calls that it did not answer.", cache.misses, kind="counter")
    yield Figure("cache_bytes", "Size of the results in the cache.", cache.size_bytes)
    used: dict[str, float] = {}
    for one in made.state.budgets.standings():
        limit, taken = Decimal(one.limit), Decimal(one.spent) + Decimal(one.held)
        ratio = float(taken / limit) if limit else 1.0
        used[one.budget] = max(ratio, used.get(one.budget, 0.0))
    yield Figure("budget_used_ratio", "The part of a budget that is used, of its owner who has "
                 "used most.", used, "budget")  # fmt: skip


def _of_containers(made: Composition) -> Iterator[Figure]:
    counts: dict[str, float] = {**made.walls.containers()}
    waiting, dirty = counts.pop("waiting", 0), counts.pop("dirty", 0)
    yield Figure("containers", "Containers by state; `held` ones belong to sessions.", counts,
                 "state")  # fmt: skip
    yield Figure("container_calls_waiting", "Calls that wait for a container.", waiting)
    yield Figure("containers_dirty", "Containers that could not be cleaned, and were removed.",
                 dirty, kind="counter")  # fmt: skip
    if made.walls.cluster is not None:
        yield from node_figures(made.walls.cluster.nodes())


def _of_state(made: Composition) -> Iterator[Figure]:
    database = made.database
    yield Figure("state_rows_lost", "Rows of the call log that were not stored.",
                 database.lost_posts, kind="counter")  # fmt: skip
    yield Figure("state_failing", "1 while the state cannot be written.", database.is_failing)
    yield Figure("state_writes_waiting", "Changes that wait to be written.", database.waiting)


def _of_sight(made: Composition) -> Iterator[Figure]:
    observer = made.basis.observer
    alerts = observer.alerts.look().alerts
    yield Figure("alert_firing", "1 while an alert of the engine fires.",
                 {a.name: float(a.firing) for a in alerts if a.tool is None}, "alert")  # fmt: skip
    if observer.spans is not None:
        yield Figure("traces_left_out", "Calls without spans, because there were too many.",
                     observer.spans.left_out, kind="counter")  # fmt: skip
    yield from network_figures(observer.metrics.network)
    yield Figure("build_info", "The version of the engine.", {engine_version(): 1.0}, "version")
