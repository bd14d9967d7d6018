"""The engine without the methods that parts add: the interface for the daemon, the parts and
embedding programs.

Host side, between the interfaces to callers and `compose`, which creates, starts and stops the
engine's objects. Every interface makes its calls through `run`, with the rights of the principal,
so that no call can skip a gate (a check before a call). Entering the engine starts the walls.
Leaving the engine ends the walls and everything that runs in them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from fumehood.answers import ToolDetails
from fumehood.call_options import CallOptions
from fumehood.compose import EngineLife, compose
from fumehood.config import Config
from fumehood.core.call import CallBody, ResultChecker
from fumehood.core.call_log import CallPage, CallQuery, CallRecord
from fumehood.core.decision import Decision, decided
from fumehood.core.envelope import Envelope, Metadata, Performance, Resources, UsageReport
from fumehood.core.errors import (
    EngineError,
    EngineNotRunning,
)
from fumehood.core.identity import Principal, Scope, uid_principal_id
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import (
    CallKeywords,
    CallQueryKeywords,
    DecisionKeywords,
    UsageKeywords,
)
from fumehood.core.names import checked_keywords
from fumehood.core.pages import DEFAULT_PAGE, MAX_ITEMS, Pages
from fumehood.core.returned_file import parse_blob_url
from fumehood.core.status import Readiness, StateReadiness
from fumehood.core.tool import Finding, ToolDefinition
from fumehood.core.usage import TokenCounter
from fumehood.core.usage_table import AllUsageQuery, UsageQuery, UsageTable
from fumehood.engine_overview import Overview, figures_of
from fumehood.engine_part import EnginePart
from fumehood.executors.base import CallHandle
from fumehood.identity.principals import require_agent
from fumehood.observe.clock import Clock, timestamp
from fumehood.observe.figures import Figure
from fumehood.observe.log import Logger
from fumehood.pipeline.incoming import (
    parse_call_body,
    parse_own_call,
    parse_own_decision,
    parsed,
)
from fumehood.pipeline.plan import can_run_now, upstream_of
from fumehood.pipeline.result import shape_error
from fumehood.registry.discover import Tool
from fumehood.registry.index import (
    RegisteredTool,
    Selection,
    Source,
    ToolFilter,
    ToolPage,
    filter_tools,
    page_of_tools,
)
from fumehood.sandbox.wall import SessionWall, Wall
from fumehood.storage.database import Database
from fumehood.storage.usage import usage_table

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

PartOfEngine = TypeVar("PartOfEngine", bound=EnginePart)


class Engine:
    """Runs tools in sandboxes. This class has only the core methods; programs use its subclass
    `fumehood.Engine`, which also has the methods that parts add.

    `engine_with_parts.py` explains the arguments.
    """

    def __init__(
        self,
        tools: Iterable[Tool] = (),
        *,
        config: Config | None = None,
        token_counter: TokenCounter | None = None,
        result_checkers: Sequence[ResultChecker] = (),
        log: Logger | None = None,
        clock: Clock | None = None,
        interpreter: Wall | None = None,
        jail: Wall | None = None,
        container: SessionWall | None = None,
        database: Database | None = None,
        tracer_provider: TracerProvider | Literal["environment"] | None = None,
    ) -> None:
        made = compose(
            tools,
            database,
            config=config,
            counter=token_counter,
            log=log,
            clock=clock,
            checkers=result_checkers,
            tracer_provider=tracer_provider,
            jail=jail,
            container=container,
            walls_given={} if interpreter is None else {"interpreter": interpreter},
        )
        self._made = made
        self._life = EngineLife(made)
        services, identities = made.services, made.services.identities
        self.config = made.kernel.config
        self.log = made.kernel.log
        self.load_faults = made.sources.load_faults
        self.database = made.kernel.database
        self.registry = services.registry
        self.registrations = made.sources.registrations
        self.agents = identities.agents
        self.tokens = identities.tokens
        self.approvers = identities.approvers
        self.blobs = services.stores.blobs
        self.call_log = services.stores.calls
        self.sessions = services.sessions
        self.approvals = made.approvals
        self.policy = made.policy
        self.overview = Overview(made)
        self._owner_id = self.config.principal_ids.get(os.getuid()) or uid_principal_id(os.getuid())

    async def __aenter__(self) -> Self:
        await self._life.begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._life.end()

    def part(self, kind: type[PartOfEngine]) -> PartOfEngine:
        """Return this engine's instance of the part class `kind`."""
        return self._made.parts.part(kind)

    def require_begun(self) -> None:
        """Raise EngineNotRunning if the engine has not been entered yet, or has been left."""
        if self._made.calls.intake.is_open:
            return
        raise EngineNotRunning(
            "This engine has stopped, so it takes no calls. Make the call inside its `async with` "
            "block."
            if self._life.has_begun
            else "This engine was not started, so it takes no calls. Use "
            "`async with Engine(...) as engine:`, and make the call inside."
        )

    async def call(
        self, tool: str, arguments: JsonObject | None = None, **options: Unpack[CallKeywords]
    ) -> Envelope:
        """Call a tool (`name` or `name@version`) as the owner of this process.

        `options` are the fields of `CallOptions`. The answer is always an envelope, even if
        arguments or options are not JSON.

        Raises:
            TypeError: an option is unknown.
            EngineNotRunning: the engine was not entered, or has been left.
        """
        chosen = checked_keywords(CallKeywords, "call", options) if options else {}
        self.require_begun()
        try:
            name, body = parse_own_call(tool, arguments, chosen)
        except EngineError as error:
            return self.refusal(error, tool=str(tool))
        return await self.run(name, body, self.owner)

    async def fetch_all(
        self,
        tool: str,
        arguments: JsonObject | None = None,
        *,
        max_items: int = MAX_ITEMS,
        **options: Unpack[CallKeywords],
    ) -> list[Any]:
        """Fetch the items of all pages of a paginated tool, up to `max_items`.

        Each page is a separate call, with the previous page's `next_cursor` as `cursor`.

        Raises:
            CallFailed: the call for a page did not succeed; the exception contains that page's
                envelope.
            ValueError: the tool is not paginated.
            TypeError, EngineNotRunning: for the same reasons as in `call`.
        """
        pages = Pages(arguments, max_items)
        while not pages.is_over:
            answer = await self.call(tool, pages.arguments, **options)
            pages.add(answer.raise_for_error().data)
        return pages.items

    async def decide(
        self,
        tool: str,
        arguments: JsonObject | None = None,
        *,
        context: JsonObject | None = None,
        **options: Unpack[DecisionKeywords],
    ) -> Decision:
        """Return the engine's decision on a tool call that the program itself will make, as the
        owner of this process.

        The engine does not run the tool. The program may run the tool only if the decision is
        `allow`, and then only once. `context` has everything besides the arguments that determines
        the effect of the tool, such as the working directory.

        Raises:
            CallFailed: the engine made no decision, because it is stopping or the request is wrong.
            TypeError, EngineNotRunning: for the same reasons as in `call`.
        """
        chosen = checked_keywords(DecisionKeywords, "decide", options)
        self.require_begun()
        asked = {"tool": tool, "arguments": arguments or {}, "context": context or {}}
        try:
            body = parse_own_decision({**asked, "options": chosen})
        except EngineError as error:
            self.refusal(error).raise_for_error()
            raise
        answer = decided(await self.run(body.reference, body.call, self.owner), body.reference)
        return Decision.model_validate(answer.raise_for_error().data)

    @property
    def owner(self) -> Principal:
        """The principal that owns this process. Calls by the process itself have this principal's
        rights.
        """
        agents = self.agents.spoken_for_by(self._owner_id)
        return Principal(self._owner_id, frozenset({Scope.CALL}), agents, is_program=True)

    def principal_of_uid(self, uid: int) -> Principal:
        """Return the principal of a Unix user. This principal has only the scope `call`."""
        principal_id = self.config.principal_ids.get(uid) or uid_principal_id(uid)
        agents = self.agents.spoken_for_by(principal_id)
        return Principal(principal_id, frozenset({Scope.CALL}), agents)

    def now(self) -> datetime:
        """Return the time of the engine's clock."""
        return self._made.services.clock.now()

    def run(
        self, tool: str, body: CallBody, principal: Principal | None, live: CallHandle | None = None
    ) -> Coroutine[Any, Any, Envelope]:
        """Return a coroutine that runs one call. `body` is the parsed request, and `principal` the
        caller, who must already be authenticated.

        `live` is a handle that receives the call's events and can cancel the call.
        """
        return self._made.calls.run(tool, body, principal, live or CallHandle())

    def delivered(self, live: CallHandle) -> None:
        """Record that the caller of a call has received the answer. `live` is the handle of the
        call.

        After that, an identical call counts as a new call, not as a repeat. The caller of this
        method must use it only for a streamed call, or if `live.is_delivered_later` is set. The
        engine itself records the delivery of all other calls.
        """
        self._made.calls.delivered(live)

    async def cancel(self, call_id: str) -> None:
        """Cancel a running call of this process's owner. The answer to the call is then the error
        CANCELLED.

        Raises:
            ResourceNotFound: the call is unknown or has ended.
        """
        await self.cancel_call(call_id, self.owner)

    async def cancel_call(self, call_id: str, principal: Principal) -> None:
        """Cancel a running call of one principal, and wait until the call's program has ended.

        Raises:
            ResourceNotFound: the principal has no such call, or the call has ended.
        """
        await self.overview.cancel_as(call_id, principal)

    def tools(self) -> list[ToolDefinition]:
        """Return the preferred version of every registered tool, sorted by name."""
        return [tool.definition for tool in self.registry]

    def tools_page(
        self,
        principal: Principal | None = None,
        *,
        filter_by: ToolFilter | None = None,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
    ) -> ToolPage:
        """Return one page of the tools, sorted by name, and the cursor of the next page.

        Raises:
            InvalidParams: the limit is not from 1 to 100, or the cursor belongs to another list.
        """
        return page_of_tools(
            self.registry,
            self._made.services.cursors,
            (principal or self.owner).id,
            filter_by=filter_by or ToolFilter(),
            limit=limit,
            cursor=cursor,
        )

    def tool(self, reference: str) -> ToolDetails:
        """Return a tool and all its versions. `reference` is `name` or `name@version`.

        Raises ToolNotFound.
        """
        found = self.registry.get(reference)
        versions = self.registry.versions(found.definition.name)
        circuit = self._made.services.circuits.of(upstream_of(found.definition))
        return ToolDetails(
            tool=found.definition,
            versions=tuple(tool.definition.version for tool in versions),
            source=str(found.source),
            circuit=circuit.status() if circuit is not None else None,
            findings=self.findings(found),
        )

    def callable_tools(
        self, principal: Principal, agent_id: str | None = None
    ) -> list[ToolDefinition]:
        """Return the tools that a principal or, with `agent_id`, one of its agents can call.

        A principal's tools are sorted by name. An agent's tools are in the agent's order, and as
        the agent sees them.

        Raises:
            ResourceNotFound: the agent is unknown, or the principal may not act for it.
        """
        if agent_id is not None:
            found = self.agent_tools(principal, agent_id, exclude_dangerous=False).tools
        else:
            found = tuple(t.definition for t in self.registry if t.disabled_because is None)
        has_authenticated = principal.has_authenticated
        return [t for t in found if t.is_active and (has_authenticated or not t.requires_auth)]

    def tools_state(
        self, principal: Principal, agent_id: str | None = None
    ) -> tuple[int, int, bool]:
        """Return a value that changes whenever the result of `callable_tools` changes.

        Raises the same errors as `callable_tools`.
        """
        if agent_id is not None:
            require_agent(principal, agent_id, self.agents.find(agent_id))
        agents = 0 if agent_id is None else self.agents.changes
        return self.registry.changes, agents, principal.has_authenticated

    def findings(self, tool: RegisteredTool) -> tuple[Finding, ...]:
        """Check a tool's definition by the rules against text that manipulates models. Return a
        finding for each rule that the definition breaks. A built-in tool has no findings.
        """
        if tool.source is Source.BUILTIN:  # an imitated name is the other tool's fault
            return ()
        from fumehood.registry.poison import poison  # its patterns take a while to compile

        names = (other.definition.name for other in self.registry)
        return tuple(poison(tool.definition.model_dump(mode="json"), names))

    def ready(self) -> Readiness:
        """Return whether the engine serves calls, and the limits that each wall in use enforces."""
        is_held, walls = self._made.walls.readiness()
        serves = is_held and not self._made.calls.intake.takes_none()
        state = StateReadiness(failing=self.database.is_failing, lost_rows=self.database.lost_posts)
        return Readiness(
            status="ready" if serves else "not_ready",
            walls=walls,
            state=state,
            broken_circuits=self._made.services.circuits.broken(),
        )

    def can_run_now(self, tool: ToolDefinition) -> bool:
        """Return True if, as far as the engine knows, a tool's sandbox and image are available."""
        return can_run_now(tool, self._made.walls.by_name)

    async def figures(self) -> list[Figure]:
        """Return all metrics of the engine. Raises ReadFailed if the state cannot be read."""
        return await figures_of(self._made)

    def agent_tools(
        self,
        principal: Principal,
        agent_id: str,
        *,
        categories: Collection[str] | None = None,
        exclude_dangerous: bool = True,
        max_cost: Decimal | None = None,
        at_most: int | None = None,
    ) -> Selection:
        """Return those of an agent's tools that pass the given filters, in the agent's order and as
        the agent sees them. `max_cost` limits the cost of each tool, and `at_most` the number of
        tools.

        The result also contains the omitted tools, with the reasons.

        Raises:
            ResourceNotFound: the agent is unknown, or the principal may not act for it.
        """
        require_agent(principal, agent_id, self.agents.find(agent_id))
        seen, missing = self.agents.tools(agent_id, self.registry)
        selection = filter_tools(
            seen,
            categories=categories,
            exclude_dangerous=exclude_dangerous,
            max_cost=max_cost,
            at_most=at_most,
        )
        return replace(selection, left_out=(*selection.left_out, *missing))

    async def calls(self, **query: Unpack[CallQueryKeywords]) -> CallPage:
        """Return a page of the calls of this process's owner, newest first.

        `query` are fields of `CallQuery`: since, until, agent, tool, code, state, text, limit,
        cursor.

        Raises:
            InvalidParams: the query is wrong.
            ResourceNotFound: the cursor is unknown, or too old.
            ReadFailed: the state cannot be read.
        """
        asked = parsed(CallQuery, checked_keywords(CallQueryKeywords, "calls", query), "query")
        return await self.calls_of(self.owner, asked)

    async def calls_of(self, principal: Principal, query: CallQuery) -> CallPage:
        """Return a page of one principal's calls. The calls come from the call log or, if `query`
        selects running calls, from the engine's memory.

        Raises:
            ResourceNotFound: the cursor is unknown, or too old.
            ReadFailed: the state cannot be read.
        """
        if query.state is not None:
            return self.overview.running(query, principal.id)
        return await self.call_log.page(principal.id, query)

    async def call_record(self, call_id: str) -> CallRecord:
        """Return the record of a call of this process's owner.

        Raises:
            ResourceNotFound: the call is unknown or no longer kept.
            ReadFailed: the state cannot be read.
        """
        return await self.call_log.get(self.owner.id, call_id)

    async def usage(
        self, by: str | Iterable[str] | None = None, **query: Unpack[UsageKeywords]
    ) -> UsageTable:
        """Return the total usage of this process's owner, and the remaining budgets.

        `by` and `query` are fields of `UsageQuery`: by, since, until, agent, session, tool.

        Raises:
            InvalidParams: the query is wrong.
            ReadFailed: the state cannot be read.
        """
        asked = checked_keywords(UsageKeywords, "usage", query)
        if by is not None:
            asked["by"] = by if isinstance(by, str) else list(by)
        return await self.usage_of(self.owner, parsed(UsageQuery, asked, "query"))

    async def usage_of(self, principal: Principal, query: UsageQuery) -> UsageTable:
        """Return the usage of one principal, and the budgets that apply to the principal."""
        if query.session is not None:
            session_id = self.sessions.id_of(principal, query.session)
            query = query.model_copy(update={"session": session_id})
        table = await usage_table(self.database, query, principal.id)
        return self._with_standings(table, principal)

    async def all_usage(self, query: AllUsageQuery) -> UsageTable:
        """Return the usage of all principals and the state of all budgets.

        If `query` names a principal, only the usage of this principal is returned, but still all
        budgets.

        Raises:
            ReadFailed: the state cannot be read.
        """
        query = query.model_copy(update={"session": self.overview.id_of_session(query.session)})
        table = await usage_table(self.database, query, query.principal)
        return self._with_standings(table, None)

    def _with_standings(self, table: UsageTable, principal: Principal | None) -> UsageTable:
        gates = self._made.services.parts.gates
        standings = [one for gate in gates for one in gate.standings(principal)]
        return table.with_standings(standings, self.config.prices.currency)

    async def blob(self, url: str) -> bytes:
        """Return a whole blob of this process's owner. `url` comes from an answer.

        Raises:
            ValueError: `url` is not the address of a blob.
            ResourceNotFound: the blob is unknown or no longer kept.
            ReadFailed: the state cannot be read.
            FilesAway: the remote storage of the blobs is not available now.
        """
        link = parse_blob_url(url)
        _, file = await self.blobs.open_blob(
            link.blob_id, self.owner.id, link.expires, link.signature
        )
        with file:
            return await self.blobs.read(file)

    async def whole(self, envelope: Envelope, field: str) -> Any:
        """Return the full text of an answer's field, such as `stdout`. The answer itself may
        contain only a part of a long text.

        `field` is the dotted path of the field in `data` or in `error.details`.

        Raises:
            ValueError: the field is missing, or the whole text was not kept.
            ResourceNotFound, ReadFailed, FilesAway: for the same reasons as in `blob`.
        """
        url = envelope.shortened(field)
        if url is None:
            return envelope.at(field)
        return envelope.read_whole(field, await self.blob(url))

    def refusal(self, error: EngineError, tool: str | None = None) -> Envelope:
        """Return an envelope for a request that was refused before it became a call."""
        # A program may give a name that is not Unicode, which an answer cannot hold.
        named = tool.encode("utf-8", "replace").decode() if tool is not None else None
        return self.answer({}, error, named)

    def answer(
        self, data: JsonObject, error: EngineError | None = None, tool: str | None = None
    ) -> Envelope:
        """Return an envelope without a call id, for an answer to a request that is not a tool call,
        such as a request for the list of tools.
        """
        now = self.now()
        return Envelope(
            success=error is None,
            status="success" if error is None else "error",
            data=data,
            error=shape_error(error) if error is not None else None,
            metadata=Metadata(
                tool_name=tool,
                tool_version=None,
                call_id=None,
                trace_id=self._made.calls.ids.trace_id(now),
                timestamp=timestamp(now),
                execution_time_ms=0.0,
                performance=Performance(total_ms=0.0),
                sandbox=None,
                resources=Resources(),
                usage=UsageReport(currency=self.config.prices.currency),
            ),
        )

    def drain(self) -> None:
        """Refuse new calls from now on. Running calls continue."""
        self._made.calls.drain()

    async def drained(self) -> None:
        """Wait until no call is running. Approved calls whose callers have left count as well.

        Call `drain` first; otherwise, new calls can keep this method waiting.
        """
        await self._life.drained()

    @property
    def running_calls(self) -> int:
        """The number of running calls for which `drained` waits."""
        runs = self._made.approvals.requests.runs
        alone = [one for one in runs.running if not runs.followers(one)]  # their callers have left
        return len(self._made.calls.running) + len(alone)

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._made.calls.intake.is_draining

    @property
    def walls(self) -> dict[str, dict[str, Any]]:
        """The enforced limits, the readiness and the faults of each wall in use.

        If an `essential` wall is not ready, the engine refuses all calls. If another wall is not
        ready, the engine refuses only the calls that need this wall.
        """
        return self._made.walls.report()


__all__ = ["CallOptions", "Engine", "Tool", "parse_call_body"]
