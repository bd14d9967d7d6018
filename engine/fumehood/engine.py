"""The engine: the composition root. The only place that names concrete classes.

Above it the faces (daemon, command line, an embedding program); below it the rooms.
Entering it starts the walls, leaving it ends them with everything that runs in them.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import anyio
import anyio.lowlevel
import anyio.to_thread

from fumehood.call.claim import Keys
from fumehood.call.incoming import (
    NotJson,
    parse_call_body,
    parse_call_query,
    parse_own_call,
    parse_query,
)
from fumehood.call.rooms import Rooms
from fumehood.call.stream import StreamedCall, events_of
from fumehood.config import Config, config_file, load_config
from fumehood.engine_answers import EngineAnswers
from fumehood.engine_approvals import EngineApprovals
from fumehood.engine_audit import EngineAudit
from fumehood.engine_calls import EngineCalls, Intake
from fumehood.engine_directory import EngineDirectory
from fumehood.engine_policy import EnginePolicy
from fumehood.engine_records import EngineRecords
from fumehood.engine_sessions import make_sessions
from fumehood.engine_walls import EngineWalls, logged
from fumehood.executors.live import Live
from fumehood.executors.session_files import SessionFiles
from fumehood.gates.approvers import Approvers
from fumehood.gates.binding import require_agent
from fumehood.gates.budget import Budgets
from fumehood.gates.tokens import Tokens
from fumehood.model.answers import ToolDetails
from fumehood.model.call import CallBody, CallOptions
from fumehood.model.call_log import CallPage, CallQuery, CallRecord
from fumehood.model.envelope import Envelope
from fumehood.model.errors import (
    EngineError,
    IdempotencyConflict,
    ResourceNotFound,
)
from fumehood.model.events import Event, last_event
from fumehood.model.idempotency import KEY_LIFETIME
from fumehood.model.identity import Principal, Scope, uid_principal_id
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import MB
from fumehood.model.status import Readiness, StateReadiness
from fumehood.model.tool import ToolDefinition
from fumehood.model.usage import EstimatingCounter, TokenCounter
from fumehood.model.usage_table import AllUsageQuery, UsageQuery, UsageTable
from fumehood.observe.clock import Clock, IdSource, SystemClock
from fumehood.observe.log import Logger, log_fault, quiet_logger
from fumehood.registry.agents import Agents
from fumehood.registry.directory import DirectoryFault
from fumehood.registry.discover import LoadFault, discover
from fumehood.registry.filtering import Selection, filter_tools
from fumehood.registry.index import ToolIndex
from fumehood.registry.listing import DEFAULT_LIMIT, ToolFilter, ToolPage, page_of_tools
from fumehood.registry.loading import Tool, import_paths, register_all
from fumehood.registry.registrations import Registrations
from fumehood.sandbox.wall import Wall
from fumehood.store.blobs import Blob, BlobStore
from fumehood.store.calls import CallLog
from fumehood.store.counters import CounterTable
from fumehood.store.database import Database, open_database
from fumehood.store.errors import StoreError, understood
from fumehood.store.retention import Kept, retention
from fumehood.store.spool import SpoolStore
from fumehood.store.usage import UsageLog
from fumehood.wire.blob_urls import parse_blob_url
from fumehood.wire.cursors import Cursors

if TYPE_CHECKING:
    from fumehood.engine_webhook import EngineWebhook

CURSOR_KEY_BYTES = 32


class Engine:
    """Runs tools behind their gates and walls.

        async with Engine(tools=[send_invoice]) as engine:
            envelope = await engine.call("calculator", {"expression": "5! + 2**10"})

    What must survive the process is kept in `database` (`open_database`); without one it is
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
        log: Logger | None = None,
        clock: Clock | None = None,
        interpreter: Wall | None = None,
        jail: Wall | None = None,
        container: Wall | None = None,
        database: Database | None = None,
    ) -> None:
        self.config = config if config is not None else load_config()
        self.log = log if log is not None else quiet_logger()
        self._clock = clock if clock is not None else SystemClock()
        self._counter = token_counter if token_counter is not None else EstimatingCounter()
        self._ids = IdSource()
        self._registry = ToolIndex()
        private = (Path.home(), self.config.state_directory, config_file().parent)
        self.load_faults: list[LoadFault] = discover(
            self._registry, self.config.host_tools, private=private
        )
        for fault in self.load_faults:
            self.log.error("tools.left_out", entry_point=fault.entry_point, reason=fault.reason)
        register_all(self._registry, tools, private)
        self._owns_database = database is None
        self.database = database if database is not None else open_database(None)
        self.audit = EngineAudit(self.database, self.config.audit, self.log, self._clock.now)
        with understood("definitions of tools"):
            self.registrations = Registrations(self._registry, self.database)
        for left_out in self.registrations.load_faults:
            self.log.error("tools.left_out", registered=True, reason=left_out.message)
        directory = self.config.tools_directory
        self._directory = (
            EngineDirectory(directory, self._registry, self.registrations, self.log)
            if directory is not None
            else None
        )
        self._cursors = Cursors(secrets.token_bytes(CURSOR_KEY_BYTES))
        self._walls = EngineWalls(
            self.config,
            import_paths(self._registry),
            state=self.database.path.parent if self.database.path is not None else None,
            on_event=logged(self.log),
            interpreter=interpreter,
            jail=jail,
            container=container,
        )
        with understood("agents"):
            self.agents = Agents(self.database)
        with understood("tokens"):
            self.tokens = Tokens(self.database)
        with understood("approvers"):
            self.approvers = Approvers(self.database)
        self._calls = CallLog(
            self.database, kept_days=self.config.calls_kept_days, kept=self.config.calls_kept
        )
        self._usage = UsageLog(self.database)
        with understood("counters of budgets"):
            self.budgets = Budgets(
                self.config.budget_rules, CounterTable(self.database), self._clock.now
            )
        known = {tool.definition.name for tool in self._registry}
        for name in self.budgets.unmatched(known):
            self.log.warning("budget.covers_no_tool", budget=name)
        self.blobs = BlobStore(
            self.database,
            self.database.path.parent if self.database.path is not None else None,
            max_bytes=self.config.blobs_kept_mb * MB,
            lifetime_s=max(1, int(self.config.blobs_kept_hours * 3600)),
            now=self._clock.now,
        )
        self._intake = Intake()
        self.sessions = make_sessions(
            self.config,
            self.database,
            self._walls.container,
            self.agents,
            self._clock,
            is_draining=lambda: self._intake.is_draining,
            on_event=logged(self.log),
        )
        with understood("approvals"):
            self._approvals = EngineApprovals(
                self.config,
                self.database,
                approvers=self.approvers,
                tokens=self.tokens,
                agents=self.agents,
                clock=self._clock,
                ids=self._ids,
                log=self.log,
            )
        self.desk = self._approvals.desk
        self.policy = EnginePolicy(
            self.config.policy_file,
            self.config.environment,
            self._registry,
            self.agents,
            self.database,
            self.log,
            self._clock.now,
        )
        self.webhook = self._make_webhook()
        self.keys = Keys(self.database)
        self._rooms = Rooms(
            registry=self._registry,
            agents=self.agents,
            walls=self._walls.by_name,
            clock=self._clock,
            log=self.log,
            counter=self._counter,
            prices=self.config.resource_prices,
            allow_debug=self.config.allow_debug,
            is_draining=self._intake.takes_none,
            calls=self._calls,
            blobs=self.blobs,
            cursors=self._cursors,
            sessions=self.sessions,
            policy=self.policy.gate,
            keys=self.keys,
            budgets=self.budgets,
            desk=self.desk,
        )
        self._approvals.connect(
            self._rooms,
            self._intake.takes_none,
            self.webhook.wake if self.webhook is not None else None,
        )
        self._spools = SpoolStore(
            self.database.path.parent if self.database.path is not None else None,
            max_bytes=self.config.streams_mb * MB,
        )
        self._own_calls = EngineCalls(
            self._intake,
            self._rooms,
            self._ids,
            self._clock,
            self._spools,
            output_bytes=self.config.container.output_kb * 1024,
        )
        self._records = EngineRecords(self._calls, self._usage, self.budgets)
        self._answers = EngineAnswers(self._clock, self._ids, self.config.prices.currency)
        self._stack = AsyncExitStack()

    def _make_webhook(self) -> EngineWebhook | None:
        """What tells another program of approvals, where one is configured."""
        chosen = self.config.webhook
        if chosen is None:
            return None
        # Here, because it brings an HTTP client with it, and most engines have no use for one.
        from fumehood.engine_webhook import EngineWebhook

        return EngineWebhook(chosen, self.database, self.desk.show, self.desk.now, self.log)

    async def __aenter__(self) -> Engine:
        if self._owns_database:
            self._stack.callback(self.database.close)
        await self._stack.enter_async_context(self.audit.anchored())
        await self._stack.enter_async_context(self._walls)
        await self._stack.enter_async_context(self.sessions)
        await self.policy.start()
        group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(group.cancel_scope.cancel)
        group.start_soon(self.policy.follow)
        if self._directory is not None:
            group.start_soon(self._directory.follow)
        self._stack.callback(self.blobs.close)
        self._stack.callback(self._spools.close)
        self._stack.push_async_callback(self._close_budgets)
        self._stack.push_async_callback(self._own_calls.end_streamed)
        # Without them what is too large is not kept, or what happens not told: answers say so.
        for name, open_store in (("blobs", self.blobs.open), ("streams", self._spools.open)):
            try:
                await open_store()
            except StoreError as fault:
                self._on_store_fault(name, fault)
        all_kept: tuple[tuple[Kept, float], ...] = (
            (self._calls, self.config.calls_kept_days * 86_400),
            (self.blobs, self.config.blobs_kept_hours * 3600),
            (self.keys, KEY_LIFETIME.total_seconds()),
            (self.budgets, math.inf),
            (self._approvals.table, math.inf),
        )
        for kept, kept_s in all_kept:
            await self._stack.enter_async_context(
                retention(kept, self._clock.now, self._on_retention_fault, kept_s=kept_s)
            )
        await self._recover_keys()
        self._intake.is_open = True
        if self.webhook is not None:
            await self._stack.enter_async_context(self.webhook.running())
        await self._stack.enter_async_context(self.desk)
        return self

    async def _recover_keys(self) -> None:
        """Where it fails, each lost call is found when its key comes again."""
        try:
            lost = await self.keys.recover(self._clock.now())
        except StoreError as fault:
            self._on_store_fault("idempotency_keys", fault)
            return
        if lost:
            self.log.warning("idempotency.outcomes_unknown", calls=lost)

    async def __aexit__(self, *exc: object) -> None:
        self._intake.is_open = False
        await self._stack.aclose()
        await anyio.lowlevel.checkpoint()  # the last calls' last events are still to be logged

    async def call(
        self, tool: str, arguments: JsonObject | None = None, **options: Any
    ) -> Envelope:
        """Call a tool (`name` or `name@version`) as the owner of this process.

        `options` are those of `CallOptions`. Always answers with an envelope, also where
        arguments or options are no JSON at all.
        """
        try:
            name, body = parse_own_call(tool, arguments, options)
        except NotJson as error:
            return self.refusal(error)
        except EngineError as error:
            return self.refusal(error, tool=str(tool))
        return await self.run(name, body, self.owner)

    @property
    def owner(self) -> Principal:
        """The principal of this process's own calls."""
        return self.principal_of_uid(os.getuid())

    def principal_of_uid(self, uid: int) -> Principal:
        """Whom a Unix user is here: `call` and nothing else comes with a uid."""
        principal_id = self.config.principal_ids.get(uid) or uid_principal_id(uid)
        agents = self.agents.spoken_for_by(principal_id)
        return Principal(principal_id, frozenset({Scope.CALL}), agents)

    def now(self) -> datetime:
        """The engine's clock."""
        return self._clock.now()

    def run(
        self, tool: str, body: CallBody, principal: Principal | None, live: Live | None = None
    ) -> Coroutine[Any, Any, Envelope]:
        """Carry out one call of somebody whose identity the face has established.

        `live` hears of it meanwhile, and can end it. To be awaited.
        """
        return self._own_calls.run(tool, body, principal, live or Live())

    def open_stream(self, tool: str, body: CallBody, principal: Principal | None) -> StreamedCall:
        """Carry out one call beside its caller, who follows its events or leaves."""
        return self._own_calls.open_stream(tool, body, principal)

    async def stream(
        self, tool: str, arguments: JsonObject | None = None, **options: Any
    ) -> AsyncIterator[Event]:
        """Call a tool as `call` does; yields its events as they come, its answer as the last.

        Closing the iterator leaves the call to itself; with `cancel_on_disconnect` it ends it.
        """
        try:
            name, body = parse_own_call(tool, arguments, options)
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
        if self._own_calls.running.has(call_id, principal):
            await self._own_calls.running.cancel(call_id, principal)
            return
        try:
            await self.desk.cancel_call(call_id, principal)
        except (IdempotencyConflict, ResourceNotFound):
            raise ResourceNotFound("No such call of yours is running. Do not retry.") from None

    def tools(self) -> list[ToolDefinition]:
        """The preferred version of every registered tool, by name."""
        return [tool.definition for tool in self._registry]

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
            self._registry,
            self._cursors,
            (principal or self.owner).id,
            filter_by=filter_by or ToolFilter(),
            limit=limit,
            cursor=cursor,
        )

    def tool(self, reference: str) -> ToolDetails:
        """One tool by `name` or `name@version`, with its other versions. Raises ToolNotFound."""
        found = self._registry.get(reference)
        versions = self._registry.versions(found.definition.name)
        return ToolDetails(
            tool=found.definition,
            versions=tuple(tool.definition.version for tool in versions),
            source=found.source.value,
        )

    def ready(self) -> Readiness:
        """Whether calls are served, and what each wall in use enforces here."""
        is_held, walls = self._walls.readiness()
        serves = is_held and not self._intake.takes_none()
        state = StateReadiness(failing=self.database.is_failing, lost_rows=self.database.lost_posts)
        return Readiness(status="ready" if serves else "not_ready", walls=walls, state=state)

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
        seen, missing = self.agents.tools(agent_id, self._registry)
        selection = filter_tools(
            seen,
            categories=categories,
            exclude_dangerous=exclude_dangerous,
            max_cost=max_cost,
            at_most=at_most,
        )
        return replace(selection, left_out=(*selection.left_out, *missing))

    async def calls(self, **query: Any) -> CallPage:
        """A page of the call log of this process's owner, newest first.

        `query` is that of `CallQuery`: since, until, agent, tool, code, limit, cursor.

        Raises:
            InvalidParams: the query is wrong.
            ResourceNotFound: the cursor is unknown, or too old.
            ReadFailed: the state cannot be read.
        """
        return await self.list_calls(parse_call_query(query), self.owner)

    async def call_record(self, call_id: str) -> CallRecord:
        """One call of this process's owner.

        Raises:
            ResourceNotFound: no such call, or no longer kept.
            ReadFailed: the state cannot be read.
        """
        return await self.find_call(call_id, self.owner)

    async def list_calls(self, query: CallQuery, principal: Principal) -> CallPage:
        """A page of one principal's calls. Raises as `calls` does."""
        return await self._records.page(query, principal)

    async def find_call(self, call_id: str, principal: Principal) -> CallRecord:
        """One call of one principal; another's is not found. Raises as `call_record` does."""
        return await self._records.find(call_id, principal)

    async def usage(self, **query: Any) -> UsageTable:
        """What calls of this process's owner took together, and what budgets have left.

        `query` is that of `UsageQuery`: by, since, until, agent, session, tool.

        Raises:
            InvalidParams: the query is wrong.
            ReadFailed: the state cannot be read.
        """
        return await self.usage_of(self.owner, parse_query(UsageQuery, query))

    async def usage_of(self, principal: Principal, query: UsageQuery) -> UsageTable:
        """The same of one principal's calls, with the budgets that limit it."""
        return await self._records.usage_of(principal, query)

    async def all_usage(self, query: AllUsageQuery) -> UsageTable:
        """The same of everybody's calls or of one principal's, with all budgets."""
        return await self._records.all_usage(query)

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
        return SessionFiles(self.sessions, self._cursors, principal or self.owner, session_id)

    def answer(self, data: JsonObject) -> Envelope:
        """An envelope for what is no call, such as a list of tools."""
        return self._answers.envelope(data)

    def refusal(self, error: EngineError, tool: str | None = None) -> Envelope:
        """An envelope for what was refused before it became a call."""
        return self._answers.envelope({}, error, tool)

    def drain(self) -> None:
        """Take no new calls from now on; what runs goes on."""
        self._own_calls.drain()

    async def drained(self) -> None:
        """Wait, after `drain`, until no call runs any more, those with a human's yes included."""
        await self._own_calls.drained()
        await self.desk.drained()

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._intake.is_draining

    @property
    def directory_faults(self) -> tuple[DirectoryFault, ...]:
        """What is wrong in the directory of definitions now."""
        return self._directory.faults if self._directory is not None else ()

    @property
    def walls(self) -> dict[str, dict[str, Any]]:
        """For each wall in use, what it enforces here, whether that is enough, and what is wrong.

        Without an `essential` one the engine serves nobody; without another, its own tools are
        refused.
        """
        return self._walls.report()

    def _on_store_fault(self, name: str, fault: StoreError) -> None:
        self.log.error(f"{name}.unavailable", reason=str(fault))

    async def _close_budgets(self) -> None:
        try:
            await self.budgets.close()
        except StoreError as fault:  # what was reserved ahead counts as spent then
            self._on_store_fault("budgets", fault)

    def _on_retention_fault(self, fault: Exception) -> None:
        log_fault(self.log, "state.retention_failed", fault)


__all__ = ["CallOptions", "Engine", "Tool", "parse_call_body", "parse_call_query"]
