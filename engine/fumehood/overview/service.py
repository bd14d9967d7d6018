"""The operators' view of an engine: all principals' calls, the engine's state, and tries of rules.

Host side. Invariant: nothing here runs a tool; a dry run only describes a call. Only administrators
see the answers of other principals, for whom they could create a token anyway. Approvers see the
answers of calls that needed approval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import BinaryIO, TypeVar

import anyio
import anyio.to_thread

from fumehood.answers import CallDetails
from fumehood.approvals.refusals import require_known_options
from fumehood.call_options import CallOptions, deciding, read_stored
from fumehood.compose import Composition
from fumehood.core.call import CallBody
from fumehood.core.call_log import (
    CallPage,
    CallRecord,
    CallSeries,
    MatchedCalls,
    ToolFiguresList,
    TriedRule,
    TriedRules,
)
from fumehood.core.envelope import Envelope
from fumehood.core.errors import InvalidParams, PermissionDenied, ResourceNotFound, ToolNotFound
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL
from fumehood.core.status import EngineSummary, Readiness, engine_version
from fumehood.core.tool import ToolDefinition
from fumehood.engine_overview import NOT_RUNNING, Overview
from fumehood.executors.base import CallHandle
from fumehood.overview.calls import AllCalls, CallGroup, FoundCall
from fumehood.overview.queries import AllCallsQuery, RulesToTry, SeriesQuery
from fumehood.policy.loader import parse_policy
from fumehood.policy.model import CallFacts, PolicyError, Rule
from fumehood.policy.rules import compile_rule
from fumehood.protocol.messages import decode_envelope
from fumehood.storage.blobs import Blob
from fumehood.storage.calls import Recorded

T = TypeVar("T")

SHOWN_GROUPS = 20

NOTED_FOR_S = 300.0
"""Seconds in which repeated access to the same data by the same reader is recorded only once."""


class OperatorView:
    """Shows operators the calls, the state and the policy rules of one engine, and lets them cancel
    calls and try rules.
    """

    def __init__(self, made: Composition) -> None:
        self._made = made
        self._kernel = made.kernel
        self._clock = made.services.clock
        self._live = Overview(made)
        self._calls = AllCalls(made.kernel.database)
        self._redactor = made.services.redactor
        self._started_at = self._clock.now()
        self._trying = anyio.CapacityLimiter(1)
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
        query = query.model_copy(update={"session": self._live.id_of_session(query.session)})
        if query.state is not None:
            page = self._live.running(query)
            items = tuple(_for_reader(record, reader) for record in page.items)
            return page.model_copy(update={"items": items})
        if query.text is not None:
            if Scope.ADMIN not in reader.scopes:
                raise PermissionDenied("A text search in calls needs the scope admin.")
            await self._note_reading("calls.searched", reader, {"text": query.text})
        return await self._calls.page(query)

    async def call(self, call_id: str, reader: Principal) -> CallDetails:
        """Return everything that is stored about a call, as far as the reader may see it.

        Raises:
            ResourceNotFound: the call is not in the call log, and is not running.
        """
        running = self._live.running_call(call_id)
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
            subject = {"call_id": call_id, "principal_id": found.call.principal_id}
            await self._note_reading("call.read", reader, subject)
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

    async def cancel(self, call_id: str, by: Principal) -> None:
        """Cancel a running call of any principal.

        The cancellation is recorded in the audit log as an administrative change.

        Raises:
            ResourceNotFound: no such call is running.
            WriteFailed: the change could not be recorded, and the call continues.
        """
        found = self._live.running_call(call_id)
        if found is None:
            raise ResourceNotFound(NOT_RUNNING)
        record, _ = found
        await self._kernel.record_change(
            by.id, "call.cancel", call_id, {"principal_id": record.principal_id}
        )
        await self._live.cancel_as(call_id, Principal(record.principal_id))

    async def open_blob(
        self, call_id: str, blob_id: str, reader: Principal, *, expires: str, signature: str
    ) -> tuple[Blob, BinaryIO]:
        """Open a blob of a call's answer for a reader who may see it. Return the blob and its open
        file. The caller must close the file.

        `expires` and `signature` are the query parameters of the blob's URL.

        Raises:
            ResourceNotFound: the call or blob is unknown or no longer stored, or the signature is
                wrong.
            PermissionDenied: only administrators may read the answer.
        """
        details = await self.call(call_id, reader)
        if details.answer == "needs_admin":
            raise PermissionDenied("Answers of calls without approval need the scope admin.")
        if details.answer == "not_kept":
            raise ResourceNotFound("The answer of this call is not kept. Do not retry.")
        owner = details.call.principal_id
        return await self._made.services.stores.blobs.open_blob(blob_id, owner, expires, signature)

    async def repeat_as_dry_run(self, call_id: str) -> Envelope:
        """Make a dry run of a call that needed approval, and return the dry run's envelope. The dry
        run has the arguments of the call and the rights of the call's caller.

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
            raise PermissionDenied("The caller of this call may no longer make calls.")
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

    async def _note_reading(self, event: str, by: Principal, subject: JsonObject) -> None:
        """Record in the audit chain that the operator `by` read data of other principals.

        `event` is the name of the entry. `subject` describes the data. If the same entry was
        recorded less than `NOTED_FOR_S` seconds ago, do nothing. Raises WriteFailed.
        """
        key, now = (event, by.id, *subject.values()), self._clock.monotonic()
        if now - self._noted.get(key, -math.inf) < NOTED_FOR_S:
            return
        await self._kernel.record(event, {"by": by.id, **self._redactor.value(subject)[0]})
        recent = {noted: at for noted, at in self._noted.items() if now - at < NOTED_FOR_S}
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

        If `reader` is an administrator, conditions on arguments are tested with the recorded
        arguments of the calls. Without recorded arguments, and for other readers, they are not
        tested: a call then counts as one that the rule may match, but not for certain.

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
            calls = [(group, tools[group[:2]], arguments) for group, arguments in given]
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
    """Count the past calls that one rule matches.

    `environment` is the environment for which the rule is evaluated. `groups` counts all calls by
    tool, principal and agent. `given` contains the calls whose arguments are known, each with its
    group, tool and arguments. The tool is None if the engine no longer has it.

    The result has two counts. `at_least` counts the calls that the rule matches for certain.
    `calls` also counts the calls that it matches if every condition that cannot be tested holds.
    """
    conditions = [condition.name for condition in (*rule.when, *(rule.any or ()))]
    excesses = [*rule.exceeds, *(["grade_below"] if rule.grade_below is not None else [])]
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
    """Return a running call without its message and output, unless the reader is an
    administrator.
    """
    if Scope.ADMIN in reader.scopes or record.running is None:
        return record
    running = record.running.model_copy(update={"message": "", "stdout": None, "stderr": None})
    return record.model_copy(update={"running": running})
