"""The engine: the interface for embedding programs, the daemon and the command line.

Host side. Above it the faces; below it `compose`, which makes, starts and stops its parts. Every
face goes through here, so that none can skip a gate: a call is made by `run` or `open_stream`, with
no more rights than its principal has. Entering the engine starts the walls; leaving it ends them,
and everything that runs in them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Any, BinaryIO, Unpack

import anyio.to_thread

from fumehood.answers import ToolDetails
from fumehood.approvals.service import ApprovalService
from fumehood.budgets.model import AllUsageQuery, UsageQuery, UsageTable
from fumehood.compose import EngineLife, compose, make_basis
from fumehood.config import Config
from fumehood.core.call import CallBody, CallOptions, RawBatch
from fumehood.core.call_log import CallPage, CallQuery, CallRecord
from fumehood.core.envelope import Envelope, Metadata, Performance, Resources, UsageReport
from fumehood.core.errors import EngineError, IdempotencyConflict, ResourceNotFound
from fumehood.core.events import Event, last_event
from fumehood.core.identity import Principal, Scope, uid_principal_id
from fumehood.core.json_types import JsonObject
from fumehood.core.keywords import (
    BatchKeywords,
    CallKeywords,
    CallQueryKeywords,
    UsageKeywords,
    checked,
    show_keywords,
)
from fumehood.core.pages import MAX_ITEMS, Pages
from fumehood.core.result_check import ResultChecker
from fumehood.core.status import Readiness, StateReadiness
from fumehood.core.tool import ToolDefinition
from fumehood.core.usage import TokenCounter
from fumehood.executors.handle import CallHandle
from fumehood.executors.session_files import SessionFiles
from fumehood.identity.principals import require_agent
from fumehood.observe.clock import Clock, timestamp
from fumehood.observe.log import Logger
from fumehood.pipeline.batch import Batch, Parse
from fumehood.pipeline.incoming import (
    NotJson,
    parse_batch,
    parse_batch_call,
    parse_call_body,
    parse_call_query,
    parse_own_batch_call,
    parse_own_call,
    parse_query,
)
from fumehood.pipeline.result import shape_error
from fumehood.pipeline.stream import StreamedCall, events_of
from fumehood.protocol.blob_urls import parse_blob_url
from fumehood.registry.directory import DirectoryFault
from fumehood.registry.discover import Tool
from fumehood.registry.listing import (
    DEFAULT_LIMIT,
    Selection,
    ToolFilter,
    ToolPage,
    filter_tools,
    page_of_tools,
)
from fumehood.sandbox.wall import Wall
from fumehood.storage.blobs import Blob
from fumehood.storage.database import Database
from fumehood.storage.recordings import RecordingReader

MAX_SHOWN_TOOL = 80
"""Characters: the text that was asked for need not be the name of a tool."""


@show_keywords
class Engine:
    """Runs tools behind their gates and walls.

        async with Engine(tools=[send_invoice]) as engine:
            envelope = await engine.call("calculator", {"expression": "5! + 2**10"})

    State that must survive the process is kept in `database` (`open_database`); without one it is
    kept in memory and ends with the engine.

    `tools` come from the embedding program, which is its own operator: functions made by
    `@tool`, definitions, or documents of definitions. Built-in tools and entry points are found
    by themselves, and so are the files of `tools_directory`, which are watched while the engine
    is entered.

    Raises:
        InvalidDefinition: a tool of `tools` is wrong, with every fault of every one.
        PolicyError: the configuration's `policy_file` cannot be used, with every fault.
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
        container: Wall | None = None,
        database: Database | None = None,
    ) -> None:
        made = compose(
            make_basis(config, token_counter, log, clock, result_checkers),
            tools,
            database,
            interpreter=interpreter,
            jail=jail,
            container=container,
        )
        self._made = made
        self._life = EngineLife(made)
        self.config = made.basis.config
        self.log = made.basis.log
        self.load_faults = made.load_faults
        self.database = made.database
        self.audit = made.audit
        self.registrations = made.registrations
        self.agents = made.state.agents
        self.tokens = made.state.tokens
        self.approvers = made.state.approvers
        self.budgets = made.state.budgets
        self.cache = made.state.cache
        self.blobs = made.state.blobs
        self.keys = made.state.keys
        self.sessions = made.sessions
        self.approvals = made.approvals.service
        self.policy = made.policy
        self.webhook = made.approvals.webhook

    async def __aenter__(self) -> Engine:
        await self._life.begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._life.end()

    async def call(
        self, tool: str, arguments: JsonObject | None = None, **options: Unpack[CallKeywords]
    ) -> Envelope:
        """Call a tool (`name` or `name@version`) as the owner of this process.

        `options` are those of `CallOptions`. Always answers with an envelope, also where
        arguments or options are no JSON at all.

        Raises:
            TypeError: there is no such option.
            EngineNotRunning: the engine was not entered, or has been left.
        """
        chosen = checked(CallKeywords, "call", options)
        self._life.require_begun()
        try:
            name, body = parse_own_call(tool, arguments, chosen)
        except NotJson as error:
            return self.refusal(error)
        except EngineError as error:
            return self.refusal(error, tool=str(tool))
        return await self.run(name, body, self.owner)

    async def batch(
        self, calls: Iterable[JsonObject], **options: Unpack[BatchKeywords]
    ) -> list[Envelope]:
        """Make many calls at once as the owner of this process; their answers in their order.

        Each of the 1 to 1000 calls is `{"tool": …, "arguments": {…}, "options": {…}}`. `options`
        are those of `BatchOptions`. A call that is malformed or fails has its own answer.

        Raises:
            InvalidParams: the number of calls or an option of the batch is wrong.
            TypeError, EngineNotRunning: as `call`.
        """
        chosen = checked(BatchKeywords, "batch", options)
        self._life.require_begun()
        body = parse_batch({"calls": list(calls), "options": chosen})
        return await self.open_batch(body, self.owner, parse=parse_own_batch_call).run()

    async def fetch_all(
        self,
        tool: str,
        arguments: JsonObject | None = None,
        *,
        max_items: int = MAX_ITEMS,
        **options: Unpack[CallKeywords],
    ) -> list[Any]:
        """The items of all pages of a tool that answers in pages, up to `max_items`.

        Each page is a call of its own, with the previous page's `next_cursor` as `cursor`.

        Raises:
            CallFailed: the call of a page did not succeed; it has that page's envelope.
            ValueError: the tool does not answer in pages, or as `call`.
        """
        pages = Pages(arguments, max_items)
        while not pages.is_over:
            answer = await self.call(tool, pages.arguments, **options)
            pages.add(answer.raise_for_error().data)
        return pages.items

    @property
    def owner(self) -> Principal:
        """The principal of this process's own calls."""
        return replace(self.principal_of_uid(os.getuid()), is_program=True)

    def principal_of_uid(self, uid: int) -> Principal:
        """The principal of a Unix user. A uid gives the scope `call` only."""
        principal_id = self.config.principal_ids.get(uid) or uid_principal_id(uid)
        agents = self.agents.spoken_for_by(principal_id)
        return Principal(principal_id, frozenset({Scope.CALL}), agents)

    @property
    def desk(self) -> ApprovalService:
        """The older name of `approvals`."""
        return self.approvals

    def now(self) -> datetime:
        """The engine's clock."""
        return self._made.basis.clock.now()

    def run(
        self, tool: str, body: CallBody, principal: Principal | None, live: CallHandle | None = None
    ) -> Coroutine[Any, Any, Envelope]:
        """Run one call. The face has authenticated the principal. To be awaited.

        `live` gets its events, and can cancel it.
        """
        return self._made.calls.run(tool, body, principal, live or CallHandle())

    def open_stream(self, tool: str, body: CallBody, principal: Principal | None) -> StreamedCall:
        """Run one call independently of its caller, who may follow its events."""
        return self._made.calls.open_stream(tool, body, principal)

    def open_batch(
        self, body: RawBatch, principal: Principal, parse: Parse = parse_batch_call
    ) -> Batch:
        """Many calls of one principal, to be run; each goes through `run`."""
        return Batch(
            body.calls,
            body.options,
            parse=parse,
            run=lambda tool, call, live: self.run(tool, call, principal, live),
            refuse=self.refusal,
            log=self.log,
        )

    def follow_call(
        self, call_id: str, principal: Principal, after: str | None = None
    ) -> RecordingReader:
        """The events of one principal's call, of all that come or those behind one; to be closed.

        Raises:
            ResourceNotFound: no such call, another's, or its events are not kept.
        """
        return self._made.calls.follow(call_id, principal, after)

    async def stream(
        self, tool: str, arguments: JsonObject | None = None, **options: Unpack[CallKeywords]
    ) -> AsyncIterator[Event]:
        """Call a tool as `call` does; yields its events as they come, its answer as the last.

        Closing the iterator leaves the call to itself; with `cancel_on_disconnect` it ends it.

        Raises:
            TypeError, EngineNotRunning: as `call`.
        """
        chosen = checked(CallKeywords, "stream", options)
        self._life.require_begun()
        try:
            name, body = parse_own_call(tool, arguments, chosen)
        except EngineError as error:
            yield last_event(self.refusal(error, tool=str(tool)))
            return
        call = self.open_stream(name, body, self.owner)
        refusal = await call.begun()
        if refusal is not None:
            yield last_event(refusal)
            return
        try:
            async for event in events_of(call):
                yield event
        finally:
            if body.options.cancel_on_disconnect:
                call.live.cancel()

    async def cancel(self, call_id: str) -> None:
        """End a running call of this process's owner. It has its answer: CANCELLED.

        Raises:
            ResourceNotFound: no such call, or it is over.
        """
        await self.cancel_call(call_id, self.owner)

    async def cancel_call(self, call_id: str, principal: Principal) -> None:
        """End a running call of one principal's; waits until its program is gone.

        Raises:
            ResourceNotFound: no such call of this principal's, or it is over.
        """
        if self._made.calls.running.has(call_id, principal):
            await self._made.calls.running.cancel(call_id, principal)
            return
        try:
            await self.approvals.cancel_call(call_id, principal)
        except (IdempotencyConflict, ResourceNotFound):
            raise ResourceNotFound("No such call of yours is running. Do not retry.") from None

    def tools(self) -> list[ToolDefinition]:
        """The preferred version of every registered tool, by name."""
        return [tool.definition for tool in self._made.registry]

    def tools_page(
        self,
        principal: Principal | None = None,
        *,
        filter_by: ToolFilter | None = None,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> ToolPage:
        """Some of the tools in order of their names, and the cursor of those that follow.

        Raises:
            InvalidParams: the limit is not from 1 to 100, or the cursor is of another list.
        """
        return page_of_tools(
            self._made.registry,
            self._made.cursors,
            (principal or self.owner).id,
            filter_by=filter_by or ToolFilter(),
            limit=limit,
            cursor=cursor,
        )

    def tool(self, reference: str) -> ToolDetails:
        """One tool by `name` or `name@version`, with its other versions. Raises ToolNotFound."""
        found = self._made.registry.get(reference)
        versions = self._made.registry.versions(found.definition.name)
        return ToolDetails(
            tool=found.definition,
            versions=tuple(tool.definition.version for tool in versions),
            source=found.source.value,
            circuit=self._made.circuits.status_of(found.definition),
        )

    def callable_tools(
        self, principal: Principal, agent_id: str | None = None
    ) -> list[ToolDefinition]:
        """The tools that a principal, or an agent of its, can call, as they are seen: a
        principal's by name, an agent's in its order.

        Raises:
            ResourceNotFound: no such agent, or not this principal's to speak for.
        """
        if agent_id is not None:
            found = self.agent_tools(principal, agent_id, exclude_dangerous=False).tools
        else:
            found = tuple(t.definition for t in self._made.registry if t.disabled_because is None)
        has_authenticated = principal.has_authenticated
        return [t for t in found if t.is_active and (has_authenticated or not t.requires_auth)]

    def tools_state(
        self, principal: Principal, agent_id: str | None = None
    ) -> tuple[int, int, bool]:
        """A value that is equal as long as `callable_tools` answers the same. Raises as it does."""
        if agent_id is not None:
            require_agent(principal, agent_id, self.agents.find(agent_id))
        agents = 0 if agent_id is None else self.agents.changes
        return self._made.registry.changes, agents, principal.has_authenticated

    def ready(self) -> Readiness:
        """Whether calls are served, and the limits that each wall in use enforces."""
        is_held, walls = self._made.walls.readiness()
        serves = is_held and not self._made.intake.takes_none()
        state = StateReadiness(failing=self.database.is_failing, lost_rows=self.database.lost_posts)
        return Readiness(
            status="ready" if serves else "not_ready",
            walls=walls,
            state=state,
            broken_circuits=self._made.circuits.broken(),
        )

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
        """An agent's tools in its order, as it sees them, and why others were left out.

        Raises:
            ResourceNotFound: no such agent, or not this principal's to speak for.
        """
        require_agent(principal, agent_id, self.agents.find(agent_id))
        seen, missing = self.agents.tools(agent_id, self._made.registry)
        selection = filter_tools(
            seen,
            categories=categories,
            exclude_dangerous=exclude_dangerous,
            max_cost=max_cost,
            at_most=at_most,
        )
        return replace(selection, left_out=(*selection.left_out, *missing))

    async def calls(self, **query: Unpack[CallQueryKeywords]) -> CallPage:
        """A page of the call log of this process's owner, newest first.

        `query` is that of `CallQuery`: since, until, agent, tool, code, limit, cursor.

        Raises:
            InvalidParams: the query is wrong.
            ResourceNotFound: the cursor is unknown, or too old.
            ReadFailed: the state cannot be read.
        """
        asked = parse_call_query(checked(CallQueryKeywords, "calls", query))
        return await self.list_calls(asked, self.owner)

    async def call_record(self, call_id: str) -> CallRecord:
        """One call of this process's owner.

        Raises:
            ResourceNotFound: no such call, or no longer kept.
            ReadFailed: the state cannot be read.
        """
        return await self.find_call(call_id, self.owner)

    async def list_calls(self, query: CallQuery, principal: Principal) -> CallPage:
        """A page of one principal's calls. Raises as `calls` does."""
        return await self._made.state.calls.page(principal.id, query)

    async def find_call(self, call_id: str, principal: Principal) -> CallRecord:
        """One call of one principal; another's is not found. Raises as `call_record` does."""
        return await self._made.state.calls.get(principal.id, call_id)

    async def usage(
        self, by: str | Iterable[str] | None = None, **query: Unpack[UsageKeywords]
    ) -> UsageTable:
        """The total usage of this process's owner, and the remaining budgets.

        `by` and `query` are those of `UsageQuery`: since, until, agent, session, tool.

        Raises:
            InvalidParams: the query is wrong.
            ReadFailed: the state cannot be read.
        """
        asked = checked(UsageKeywords, "usage", query)
        if by is not None:
            asked["by"] = by if isinstance(by, str) else list(by)
        return await self.usage_of(self.owner, parse_query(UsageQuery, asked))

    async def usage_of(self, principal: Principal, query: UsageQuery) -> UsageTable:
        """The same of one principal's calls, with the budgets that limit it."""
        table = await self._made.state.usage.table(query, principal.id)
        return table.with_budgets(self.budgets.standings(principal))

    async def all_usage(self, query: AllUsageQuery) -> UsageTable:
        """The same for the calls of all principals, or of one, with all budgets."""
        table = await self._made.state.usage.table(query, query.principal)
        return table.with_budgets(self.budgets.standings())

    async def open_blob(
        self, blob_id: str, principal: Principal, *, expires: str, signature: str
    ) -> tuple[Blob, BinaryIO]:
        """One principal's blob by the parts of its address, and its file, to be closed.

        Raises:
            ResourceNotFound: no such blob of this principal's, or no longer.
            ReadFailed: the state cannot be read.
        """
        return await self.blobs.open_blob(blob_id, principal.id, expires, signature)

    async def blob(self, url: str) -> bytes:
        """The whole of a blob of this process's owner, by the `url` of an answer.

        Raises:
            ValueError: this is no address of a blob.
            ResourceNotFound: no such blob, or no longer.
            ReadFailed: the state cannot be read.
        """
        link = parse_blob_url(url)
        _, file = await self.open_blob(
            link.blob_id, self.owner, expires=link.expires, signature=link.signature
        )
        with file:
            return await anyio.to_thread.run_sync(file.read)

    def session_files(self, session_id: str, principal: Principal | None = None) -> SessionFiles:
        """The files of a session of this process's owner, or of another principal."""
        return SessionFiles(self.sessions, self._made.cursors, principal or self.owner, session_id)

    def answer(self, data: JsonObject) -> Envelope:
        """An envelope without a call's id, for an answer such as a list of tools."""
        return self._envelope(data)

    def refusal(self, error: EngineError, tool: str | None = None) -> Envelope:
        """An envelope for a request that was refused before it became a call."""
        return self._envelope({}, error, tool)

    def _envelope(
        self, data: JsonObject, error: EngineError | None = None, tool: str | None = None
    ) -> Envelope:
        basis = self._made.basis
        now = basis.clock.now()
        return Envelope(
            success=error is None,
            status="success" if error is None else "error",
            data=data,
            error=shape_error(error) if error is not None else None,
            metadata=Metadata(
                tool_name=tool[:MAX_SHOWN_TOOL] if tool is not None else None,
                tool_version=None,
                call_id=None,
                trace_id=basis.ids.trace_id(now),
                timestamp=timestamp(now),
                execution_time_ms=0.0,
                performance=Performance(total_ms=0.0),
                sandbox=None,
                resources=Resources(),
                usage=UsageReport(currency=self.config.prices.currency),
            ),
        )

    def drain(self) -> None:
        """Accept no new calls; running calls continue."""
        self._life.drain()

    async def drained(self) -> None:
        """Wait, after `drain`, until no call runs, approved calls included."""
        await self._life.drained()

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._made.intake.is_draining

    @property
    def directory_faults(self) -> tuple[DirectoryFault, ...]:
        """The present faults in the directory of definitions."""
        directory = self._made.directory
        return directory.faults if directory is not None else ()

    @property
    def walls(self) -> dict[str, dict[str, Any]]:
        """For each wall in use: the enforced limits, whether they are enough, and the faults.

        Without an `essential` wall the engine refuses all calls; without another, only the calls
        of its tools.
        """
        return self._made.walls.report()


__all__ = ["CallOptions", "Engine", "Tool", "parse_batch", "parse_call_body", "parse_call_query"]
