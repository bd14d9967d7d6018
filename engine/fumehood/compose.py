"""The parts of an engine: create, start, recover, drain and stop them.

Host side, below `engine`. Only this module uses concrete classes of all packages. Invariants:
`compose` creates each part from earlier ones, starts none of them, and raises the first fault in
the tools, the state or the policy. Calls are accepted only after interrupted calls were recovered,
and approved calls start after that. When the engine has ended, none of its tasks is running.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from fumehood.approvals.eligibility import Eligibility
from fumehood.approvals.remembered import RememberedRules
from fumehood.approvals.requests import ApprovalRequests
from fumehood.approvals.scheduler import ApprovalScheduler
from fumehood.approvals.service import ApprovalService
from fumehood.approvals.store import ApprovalTable
from fumehood.approvals.stored_calls import HumanAsker, StoredCalls
from fumehood.audit.service import AuditService
from fumehood.circuits.breaker import Circuits
from fumehood.config import Config, config_file, load_config
from fumehood.core.call import ResultChecker
from fumehood.core.errors import FumehoodError, ShuttingDown
from fumehood.core.identity import Principal
from fumehood.core.limits import MB
from fumehood.core.part import Part, PartError, imported, named_faults
from fumehood.core.usage import EstimatingCounter, TokenCounter
from fumehood.engine_part import EnginePart, Kernel, gates_of, walls_of
from fumehood.executors.session_saver import SessionSaver
from fumehood.executors.upstreams import Upstreams
from fumehood.identity.agents import Agents
from fumehood.identity.approvers import Approvers
from fumehood.identity.principals import require_agent, require_caller
from fumehood.identity.tokens import Tokens
from fumehood.observe.clock import Clock, IdSource, SystemClock
from fumehood.observe.log import Logger, log_fault, quiet_logger, redact_events
from fumehood.observe.subscriber import Subscribers
from fumehood.parts import coming, parts
from fumehood.pipeline.authorize import facts_to_explain
from fumehood.pipeline.check_result import ResultCheckers, load_checkers
from fumehood.pipeline.claim import Keys
from fumehood.pipeline.context import PipelineServices
from fumehood.pipeline.part import CallParts
from fumehood.pipeline.retry import Retries
from fumehood.pipeline.running import Calls, Intake
from fumehood.policy.current import CurrentPolicy
from fumehood.policy.model import CallFacts, ExplainWish, Policy
from fumehood.projects.service import Projects, ProjectStore, SessionProject
from fumehood.projects.writing import Journals
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.directory import WatchedDirectory
from fumehood.registry.discover import LoadFault, Tool, discover, import_paths, register_all
from fumehood.registry.index import ExternalTools, ToolIndex
from fumehood.registry.registrations import Registrations
from fumehood.registry.secrets import SecretBindings
from fumehood.sandbox.sessions import SessionClock, SessionKeeper
from fumehood.sandbox.settings import WallSettings
from fumehood.sandbox.wall import SessionWall, Wall
from fumehood.sandbox.walls import EngineWalls, logged
from fumehood.storage.blobs import BlobStore
from fumehood.storage.calls import CallLog
from fumehood.storage.database import Database, open_database
from fumehood.storage.errors import StoreError, understood
from fumehood.storage.files import PROJECTS, SESSIONS, FilePlaces, SavedFiles
from fumehood.storage.idempotency import KEY_LIFETIME
from fumehood.storage.retention import Prune, retention
from fumehood.storage.sessions import SessionTable

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


T = TypeVar("T")

CURSOR_KEY_BYTES = 32
"""Length of the random key that signs cursors, in bytes. Each start of the engine has a new key."""


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts of one engine. If `owns_database`, the engine closes the database when it ends."""

    config: Config
    ids: IdSource
    services: PipelineServices
    load_faults: list[LoadFault]
    owns_database: bool
    database: Database
    audit: AuditService
    registrations: Registrations
    directory: WatchedDirectory | None
    walls: EngineWalls
    tokens: Tokens
    approvers: Approvers
    intake: Intake
    session_rows: SessionTable
    saved: Sequence[SavedFiles]
    """The stores with the saved files of sessions. Empty if the engine keeps no state."""
    projects: Projects
    parts: tuple[EnginePart, ...]
    approvals: ApprovalService
    policy: CurrentPolicy
    calls: Calls


def compose(
    tools: Iterable[Tool],
    given: Database | None,
    *,
    config: Config | None,
    counter: TokenCounter | None,
    log: Logger | None,
    clock: Clock | None,
    checkers: Sequence[ResultChecker],
    tracer_provider: TracerProvider | Literal["environment"] | None,
    jail: Wall | None,
    container: SessionWall | None,
    walls_given: Mapping[str, Wall],
) -> Composition:
    """Create the parts of an engine.

    `given` is the database. A database or wall that is None is created; `walls_given` replace the
    walls of parts with the same names. None for another argument means a default, such as the
    configuration from the environment, or no log. The stores of files are not open yet.

    Raises:
        ConfigError: the configuration is invalid, a result checker cannot be loaded, or the
            settings of a part cannot be used.
        TypeError: a result checker is not an asynchronous function.
        InvalidDefinition: the definition of a tool in `tools` is invalid.
        DamagedState: the database has invalid rows.
        PolicyError: the policy file cannot be used.
    """
    config = config or load_config()
    counter = counter or EstimatingCounter()
    log = log or quiet_logger()
    clock = clock or SystemClock()
    ids = IdSource()
    result_checkers = ResultCheckers([*load_checkers(config.result_checkers), *checkers], log)
    registry, load_faults = _find_tools(config, log, tools)
    database = given if given is not None else open_database(None)
    files = database.directory
    shared = files if files is None else config.files.directory or files
    # Without a state they are opened as well: a standby needs their extra before it is active.
    opened = config.files.remote()
    places = FilePlaces(shared, opened if files is not None else None)
    kernel = Kernel(config, database, clock, log, counter, tracer_provider, places)
    own_parts = tuple(_make(part, kernel) for part in parts() if part.in_engine is not None)
    subscribers = kernel.subscribers = Subscribers(own_parts, log)
    audit = AuditService(
        database,
        config.audit,
        log,
        clock.now,
        subscribers,
    )
    registrations = _read_registrations(registry, database, log)
    directory = None
    if config.tools_directory is not None:
        directory = WatchedDirectory(config.tools_directory, registry, registrations, log)
    upstreams = Upstreams(config.rest, registry.secrets, web=config.web)
    on_event = logged(log)
    wall_settings = WallSettings(
        jail=config.jail,
        container=config.container,
        packages=config.packages,
        own_images=config.own_images,
        longest_session_s=config.sessions.lifetime_seconds,
        longest_with_disk_s=config.sessions.disk_lifetime_seconds,
        orphan_s=config.sessions.orphan_seconds,
    )
    walls = EngineWalls(
        wall_settings,
        import_paths(registry),
        state=files,
        on_event=on_event,
        jail=jail,
        container=container,
        given=walls_given,
        of_parts=partial(walls_of, own_parts),
    )
    with understood("agents"):
        agents = Agents(database)
    with understood("tokens"):
        tokens = Tokens(database)
    with understood("approvers"):
        approvers = Approvers(database)
    blobs = BlobStore(
        database,
        places.directory,
        max_bytes=config.blobs_kept_mb * MB,
        lifetime_s=max(1, int(config.blobs_kept_hours * 3600)),
        now=clock.now,
        remote=places.remote,
    )
    intake = Intake()
    session_rows = SessionTable(database, blobs.overdue.set)
    saved: tuple[SavedFiles, ...] = ()
    if shared is not None:
        place = None if opened is not None else shared
        saved = tuple(SavedFiles(place, opened, folder) for folder in (SESSIONS, PROJECTS))
    project_store = ProjectStore(
        saved[1] if saved else None, Journals(None if files is None else files / PROJECTS)
    )
    with understood("sessions"):
        kept_sessions = session_rows.all_now()
    sessions = SessionKeeper(
        walls.container,
        session_rows,
        config.sessions,
        SessionClock(clock.now, clock.monotonic),
        partial(_check_maker, agents, intake),
        kept=kept_sessions,
        saver=SessionSaver(saved[0]) if saved else None,
        open_project=partial(SessionProject, project_store),
        presets=config.presets,
        on_event=on_event,
    )

    def facts_of(query: ExplainWish) -> CallFacts:
        return facts_to_explain(query, registry, agents, clock.now)

    def use(policy: Policy | None) -> None:
        values = policy.of_parts if policy is not None else {}
        tools = {tool.definition.name for tool in registry}
        for part in own_parts:
            part.use_policy(values, tools)

    policy = CurrentPolicy(
        config.policy_file, config.environment, registry, facts_of, use, database, log,
        clock.now,
    )  # fmt: skip
    redactor = Redactor(config.redaction)
    redact_events(log, redactor.event)
    with understood("approvals"):
        asker = HumanAsker(
            ApprovalRequests(
                ApprovalTable(
                    database, subscribers=subscribers, kept_days=config.approvals.kept_days
                ),
                RememberedRules(database),
                Eligibility(
                    approvers,
                    tokens,
                    agents,
                    others=frozenset(part.approver for part in own_parts if part.approver),
                    allow_self_approval=config.approvals.allow_self_approval,
                    now=clock.now,
                ),
                config.approvals,
                subscribers=subscribers,
                now=clock.now,
                new_id=ids.approval_id,
                is_draining=intake.takes_none,
                log=log,
            )
        )
    services = PipelineServices(
        registry=registry,
        agents=agents,
        tokens=tokens,
        walls=walls.by_name,
        clock=clock,
        log=log,
        counter=counter,
        prices=config.prices,
        allow_debug=config.allow_debug,
        is_draining=intake.takes_none,
        calls=CallLog(
            database,
            kept_days=config.calls_kept_days,
            kept=config.calls_kept,
            recorded=config.recorded_calls,
            record=config.record,
        ),
        blobs=blobs,
        cursors=Cursors(secrets.token_bytes(CURSOR_KEY_BYTES)),
        upstreams=upstreams,
        sessions=sessions,
        policy=policy.gate,
        keys=Keys(database),
        gates=gates_of(own_parts, (key for part in parts() for key in part.excesses)),
        asker=asker,
        redactor=redactor,
        checkers=result_checkers or None,
        circuits=Circuits(config.circuits, clock.monotonic, log),
        retries=Retries(clock),
        subscribers=subscribers,
        parts=CallParts.of(own_parts),
    )
    return Composition(
        config=config,
        ids=ids,
        services=services,
        load_faults=load_faults,
        owns_database=given is None,
        database=database,
        audit=audit,
        registrations=registrations,
        directory=directory,
        walls=walls,
        tokens=tokens,
        approvers=approvers,
        intake=intake,
        session_rows=session_rows,
        saved=saved,
        projects=Projects(project_store, sessions),
        parts=own_parts,
        approvals=ApprovalService(ApprovalScheduler(StoredCalls(services, asker))),
        policy=policy,
        calls=Calls(intake, services, ids, clock),
    )


def _make(part: Part, kernel: Kernel) -> EnginePart:
    """Create the object of a part for one engine.

    Raises PartError, with the part's name, if the part itself fails.
    """
    with named_faults(f"The part {part.name!r} could not be made"):
        made: EnginePart = imported(part.in_engine)(kernel)
    return made


def _find_tools(
    config: Config, log: Logger, given: Iterable[Tool]
) -> tuple[ToolIndex, list[LoadFault]]:
    """Load the installed and the given tools.

    Also return the faults of tools that were left out.
    """
    secrets = SecretBindings(config.secrets, config.rest, log=log)
    registry = ToolIndex(secrets, ExternalTools(config.external_tools), coming(config))
    private = (Path.home(), config.state_directory, config_file().parent)
    faults = discover(registry, config.host_tools, private=private, web=config.web)
    secrets.report_unusable()
    for fault in faults:
        log.error("tools.left_out", entry_point=fault.entry_point, reason=fault.reason)
    register_all(registry, given, private)
    return registry, faults


def _read_registrations(registry: ToolIndex, database: Database, log: Logger) -> Registrations:
    """Restore the tools that were registered in earlier runs of the engine."""
    with understood("definitions of tools"):
        registrations = Registrations(registry, database)
    for left_out in registrations.load_faults:
        log.error("tools.left_out", registered=True, reason=left_out.message)
    return registrations


def _check_maker(
    agents: Agents, intake: Intake, principal: Principal, agent_id: str | None
) -> tuple[str, ...]:
    """Refuse a principal that may not create a session, and everyone while the engine is stopping.

    Return the presets to which the agent is bound.
    """
    require_caller(principal)
    agent = agents.find(agent_id) if agent_id is not None else None
    if agent_id is not None:
        require_agent(principal, agent_id, agent)
    if intake.is_draining:
        raise ShuttingDown(
            "The engine is stopping. Repeat the call when it runs again.", retry_after_ms=2000
        )
    return agent.presets if agent is not None else ()


class EngineLife:
    """Starts and stops the parts of an engine. `end` stops them in the reverse order of `begin`."""

    def __init__(self, made: Composition) -> None:
        self._made = made
        self._config = made.config
        self._log = made.services.log
        self._now = made.services.clock.now
        self._stack = AsyncExitStack()
        self.has_begun = False

    async def begin(self) -> None:
        """Start all parts in order, and accept calls. If one fails, stop the started ones."""
        try:
            await self._begin()
        except BaseException:
            await self.end()
            raise

    async def _begin(self) -> None:
        self.has_begun = True
        made, enter = self._made, self._stack.enter_async_context
        if made.owns_database:
            self._stack.callback(made.database.close)
        await enter(made.audit.anchored())
        for saved in made.saved:
            self._stack.push_async_callback(anyio.to_thread.run_sync, saved.close)
        await enter(made.walls)
        # Before a session can end because it was unused while no engine ran.
        made.services.sessions.keep_for_calls(await made.approvals.requests.awaited_sessions())
        await enter(made.services.sessions)
        await made.policy.start()
        await self._follow_files()
        for part in made.parts:
            await self._start(part, partial(self._enter, part))
        self._stack.push_async_callback(made.services.upstreams.close)
        self._stack.push_async_callback(made.services.blobs.room.aclose)
        self._stack.push_async_callback(made.calls.end_started)
        outcomes = await self._put_projects_back()
        await self._try("blobs", made.services.blobs.open)
        await self._keep_within_bounds()
        await self._recover_keys()
        made.intake.is_open = True
        await enter(made.approvals.scheduler.running(outcomes))
        await anyio.to_thread.run_sync(made.projects.forget)
        for part in made.parts:
            # By now the scheduler has ended interrupted approved calls.
            await self._start(part, part.recovered)

    async def _enter(self, part: EnginePart) -> None:
        """Start a part's background work."""
        await self._stack.enter_async_context(part.running(self._made))

    async def _start(self, part: EnginePart, step: Callable[[], Awaitable[object]]) -> None:
        """Do one step of a part's start.

        Raises PartError, with the part's name, for an exception that is not the engine's.
        """
        try:
            await step()
        except FumehoodError:
            raise
        except Exception as fault:
            log_fault(self._log, "part.not_started", fault, part=type(part).__name__)
            raise PartError(f"{type(part).__name__} could not be started: {fault}") from fault

    async def drained(self) -> None:
        """Wait, after `drain`, until no call is running, including approved ones."""
        await self._made.calls.drained()
        await self._made.approvals.requests.runs.drained()

    async def end(self) -> None:
        """Accept no more calls, and stop all parts."""
        self._made.intake.is_open = False
        try:
            await self._stack.aclose()
        finally:
            with anyio.CancelScope(shield=True):
                # One turn of the event loop, so that the last calls are recorded (`record_ending`).
                await anyio.lowlevel.checkpoint()
                await self._close_parts()

    async def _close_parts(self) -> None:
        for part in reversed(self._made.parts):
            try:
                await anyio.to_thread.run_sync(part.close)
            except Exception as fault:
                log_fault(self._log, "part.not_closed", fault, part=type(part).__name__)

    async def _follow_files(self) -> None:
        """Watch the policy file and the directory of tool definitions, in tasks."""
        group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(group.cancel_scope.cancel)
        group.start_soon(self._made.policy.follow)
        if self._made.directory is not None:
            group.start_soon(self._made.directory.follow)

    async def _put_projects_back(self) -> dict[str, bool]:
        """Restore project directories into which a killed engine was writing.

        Return the outcome of each such call: call id → True if it wrote everything, False if
        nothing.
        """
        failed, outcomes = await anyio.to_thread.run_sync(self._made.projects.recover)
        for directory in failed:
            self._log.error("project.not_put_back", directory=directory)
        return outcomes

    async def _keep_within_bounds(self) -> None:
        """Delete expired rows and files, at once and then periodically."""
        made, services = self._made, self._made.services
        calls, blobs = services.calls, services.blobs
        all_kept: tuple[tuple[Prune, float, asyncio.Event | None], ...] = (
            (calls.prune, self._config.calls_kept_days * 86_400, calls.overdue),
            (blobs.prune, self._config.blobs_kept_hours * 3600, blobs.overdue),
            (services.keys.prune, KEY_LIFETIME.total_seconds(), None),
            (self._made.approvals.requests.table.prune, math.inf, None),
        )
        for saved in made.saved:
            all_kept += ((partial(_sweep, saved, made.session_rows), math.inf, saved.overdue),)
        on_fault = partial(log_fault, self._log, "state.retention_failed")
        for prune, kept_s, overdue in all_kept:
            await self._stack.enter_async_context(
                retention(prune, self._now, on_fault, kept_s=kept_s, overdue=overdue)
            )

    async def _recover_keys(self) -> None:
        """Mark the keys of interrupted calls as lost.

        If this fails, each of these calls is found to be lost when its key is used again.
        """
        recover = partial(self._made.services.keys.recover, self._now())
        lost = await self._try("idempotency_keys", recover)
        if lost:
            self._log.warning("idempotency.outcomes_unknown", calls=lost)

    async def _try(self, name: str, work: Callable[[], Awaitable[T]]) -> T | None:
        """Do some work on a store and return its result.

        If the store fails, log that and return None. The engine still starts, and answers report
        what is missing.
        """
        try:
            return await work()
        except StoreError as fault:
            self._log.error(f"{name}.unavailable", reason=str(fault))
            return None


async def _sweep(saved: SavedFiles, rows: SessionTable, now: datetime) -> int:
    """Delete the saved files of sessions that are over. Return the number of files."""
    live, over = await rows.ids()
    return await saved.sweep(live, over, now)
