"""Composition: create, start, recover, drain and stop the objects that make up an engine.

Host side, below `engine`. Only this module uses concrete classes of all packages. Each package
creates its own objects from arguments; this module passes them the configuration. Invariants:
`compose` creates each object from earlier ones, starts none of them, and raises the first fault in
the tools, the state or the policy. The engine accepts calls only after it has recovered interrupted
calls, and then starts approved calls. When the engine has ended, none of its tasks is running.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from fumehood.approvals.requests import read_requests
from fumehood.approvals.service import ApprovalService
from fumehood.approvals.stored_calls import HumanAsker
from fumehood.circuits.breaker import Circuits
from fumehood.config import Config, config_file, load_config
from fumehood.core.call import ResultChecker
from fumehood.core.errors import ShuttingDown
from fumehood.core.identity import Principal
from fumehood.core.usage import EstimatingCounter, TokenCounter
from fumehood.engine_part import Kernel
from fumehood.engine_parts import EngineParts
from fumehood.identity.identities import Identities, read_identities
from fumehood.observe.clock import Clock, IdSource, SystemClock
from fumehood.observe.log import Logger, log_fault, quiet_logger, redact_events
from fumehood.parts import coming, oci_runtime_of, runtime_of
from fumehood.pipeline.authorize import facts_to_explain
from fumehood.pipeline.check_result import ResultCheckers, load_checkers
from fumehood.pipeline.claim import Keys
from fumehood.pipeline.context import AnswerSettings, PipelineServices
from fumehood.pipeline.plan import is_in_weaker_container
from fumehood.pipeline.retry import Retries
from fumehood.pipeline.running import Calls, Intake
from fumehood.policy.current import CurrentPolicy
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.discover import LoadFault, Tool, import_paths
from fumehood.registry.index import ExternalTools, ToolIndex
from fumehood.registry.secrets import SecretBindings
from fumehood.registry.sources import ToolSources, find_tools, read_sources
from fumehood.sandbox.sessions import SessionClock, SessionKeeper
from fumehood.sandbox.settings import WallSettings
from fumehood.sandbox.wall import SessionWall, Wall, Walls
from fumehood.sandbox.walls import EngineWalls, logged
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError
from fumehood.storage.idempotency import KEY_LIFETIME
from fumehood.storage.retention import Prune, retention
from fumehood.storage.stores import Stores, make_stores

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


T = TypeVar("T")

CURSOR_KEY_BYTES = 32
"""Length of the random key that signs cursors, in bytes. Each start of the engine has a new key."""


@dataclass(frozen=True, slots=True)
class Composition:
    """The objects that make up one engine, connected to each other."""

    kernel: Kernel
    parts: EngineParts
    sources: ToolSources
    walls: EngineWalls
    policy: CurrentPolicy
    services: PipelineServices
    calls: Calls
    approvals: ApprovalService


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
    """Create the objects of an engine, without opening the stores of files.

    `tools` are the program's own tools, and `given` is the engine's database. Each wall in
    `walls_given` replaces a part's wall of the same name. If an argument is None, a default is
    used, for example a new database, the configuration from the environment, or no log.

    Raises:
        ConfigError, TypeError, InvalidDefinition, DamagedState, PolicyError, PartError: the first
            fault in the configuration, a checker, the tools, the database, the policy or a part.
    """
    config, log, clock = config or load_config(), log or quiet_logger(), clock or SystemClock()
    counter, ids, intake = counter or EstimatingCounter(), IdSource(), Intake()
    checks = ResultCheckers([*load_checkers(config.result_checkers), *checkers], log)
    registry, load_faults = _find_tools(config, log, tools)
    stores = _make_stores(config, clock, given)
    kernel = Kernel(config, stores.database, clock, log, counter, tracer_provider, stores.files)
    parts = EngineParts(kernel)
    sources = read_sources(registry, load_faults, kernel.database, log)
    parts.add_tools(registry, sources.registrations)
    walls = _make_walls(kernel, registry, parts, jail, container, walls_given)
    identities = read_identities(kernel.database)
    sessions = SessionKeeper(
        walls.container, stores.sessions, config.sessions, SessionClock(clock.now, clock.monotonic),
        partial(_check_maker, identities, intake), kept=stores.sessions.all_now(),
        saver=parts.saver(), presets=config.presets,
        in_session=parts.in_sessions(), in_new_container=parts.in_new_containers(),
        carries=parts.carry_overs(), on_event=logged(log),
    )  # fmt: skip
    policy = _read_policy(kernel, registry, identities, parts, walls.by_name, sessions)
    redactor = Redactor(config.redaction)
    redact_events(log, redactor.event)
    asker = _make_asker(kernel, identities, parts, intake, ids)
    services = PipelineServices(
        registry=registry, identities=identities, policy=policy.gate, asker=asker,
        parts=parts.in_calls(), walls=walls.by_name, sessions=sessions, stores=stores,
        circuits=Circuits(config.circuits, clock.monotonic, log), retries=Retries(clock),
        keys=Keys(kernel.database), cursors=Cursors(secrets.token_bytes(CURSOR_KEY_BYTES)),
        answers=AnswerSettings(counter, config.prices, checks or None, config.allow_debug),
        redactor=redactor, clock=clock, log=log, is_draining=intake.takes_none,
    )  # fmt: skip
    return Composition(
        kernel, parts, sources, walls, policy, services,
        Calls(intake, services, ids, clock), ApprovalService(services, asker),
    )  # fmt: skip


def _find_tools(
    config: Config, log: Logger, given: Iterable[Tool]
) -> tuple[ToolIndex, list[LoadFault]]:
    """Register the tools of installed packages and those in `given`. Return the index of the
    tools, and the reasons why some tools of packages were left out.
    """
    bindings = SecretBindings(config.secrets, config.rest, log=log)
    registry = ToolIndex(bindings, ExternalTools(config.external_tools), coming(config))
    private = (Path.home(), config.state_directory, config_file().parent)
    return registry, find_tools(registry, given, config.host_tools, config.web, private, log)


def _make_stores(config: Config, clock: Clock, given: Database | None) -> Stores:
    return make_stores(
        given, config.files, config.record, recorded=config.recorded_calls,
        calls_kept=config.calls_kept, calls_kept_days=config.calls_kept_days,
        blobs_kept_mb=config.blobs_kept_mb, blobs_kept_hours=config.blobs_kept_hours,
        now=clock.now,
    )  # fmt: skip


def _make_walls(
    kernel: Kernel,
    registry: ToolIndex,
    parts: EngineParts,
    jail: Wall | None,
    container: SessionWall | None,
    given: Mapping[str, Wall],
) -> EngineWalls:
    config = kernel.config
    settings = WallSettings(
        jail=config.jail,
        container=config.container.model_copy(
            update={"runtime": config.container.runtime or oci_runtime_of(config.container.engine)}
        ),
        own_images=config.own_images,
        longest_session_s=config.sessions.lifetime_seconds,
        longest_with_disk_s=config.sessions.disk_lifetime_seconds,
        orphan_s=config.sessions.orphan_seconds,
        runtime=runtime_of(config.container.engine),
        image_maker=parts.image_maker(),
    )
    return EngineWalls(
        settings,
        import_paths(registry),
        state=kernel.database.directory,
        on_event=logged(kernel.log),
        jail=jail,
        container=container,
        given=given,
        of_parts=parts.walls,
    )


def _check_maker(
    identities: Identities, intake: Intake, principal: Principal, agent_id: str | None
) -> Sequence[str]:
    """Check that a principal may create a session now, for the agent `agent_id`. Return the presets
    to which the agent is bound.

    `identities` knows the agents, and `intake` knows whether the engine is stopping.

    Raises:
        PermissionDenied: the principal may not call tools.
        ResourceNotFound: there is no such agent, or the principal may not act for it.
        ShuttingDown: the engine is stopping, so nobody may create a session.
    """
    presets = identities.presets_of(principal, agent_id)
    if intake.is_draining:
        raise ShuttingDown(
            "The engine is stopping. Repeat the call when it runs again.", retry_after_ms=2000
        )
    return presets


def _read_policy(
    kernel: Kernel,
    registry: ToolIndex,
    identities: Identities,
    parts: EngineParts,
    walls: Walls,
    sessions: SessionKeeper,
) -> CurrentPolicy:
    now, agents = kernel.clock.now, identities.agents
    weaker = partial(is_in_weaker_container, walls=walls, sessions=sessions)
    return CurrentPolicy(
        kernel.config.policy_file,
        kernel.config.environment,
        registry,
        partial(facts_to_explain, registry=registry, agents=agents, now=now, is_weaker=weaker),
        partial(parts.use_policy, registry),
        kernel.database,
        kernel.log,
        now,
    )


def _make_asker(
    kernel: Kernel, identities: Identities, parts: EngineParts, intake: Intake, ids: IdSource
) -> HumanAsker:
    requests = read_requests(
        kernel.database,
        identities,
        kernel.config.approvals,
        kernel.subscribers,
        others=parts.approvers(),
        now=kernel.clock.now,
        new_id=ids.approval_id,
        is_draining=intake.takes_none,
        log=kernel.log,
    )
    return HumanAsker(requests)


class EngineLife:
    """Starts and stops the objects of an engine. `end` stops the objects in reverse order."""

    def __init__(self, made: Composition) -> None:
        self._made = made
        self._log = made.kernel.log
        self._now = made.kernel.clock.now
        self._stack = AsyncExitStack()
        self.has_begun = False

    async def begin(self) -> None:
        """Start all objects in order, and accept calls. If one fails to start, stop the objects
        that were started.
        """
        try:
            await self._begin()
        except BaseException:
            await self.end()
            raise

    async def _begin(self) -> None:
        self.has_begun = True
        made, services, enter = self._made, self._made.services, self._stack.enter_async_context
        if services.stores.is_own:
            self._stack.callback(services.stores.database.close)
        await made.parts.open(self._stack)
        await enter(made.walls)
        # Before a session can end because it was unused while no engine ran.
        services.sessions.keep_for_calls(await made.approvals.requests.awaited_sessions())
        await enter(services.sessions)
        await made.policy.start()
        await self._follow_policy()
        await made.parts.start(made, self._stack)
        self._stack.push_async_callback(services.stores.blobs.room.aclose)
        self._stack.push_async_callback(made.calls.end_started)
        outcomes = await made.parts.outcomes()
        await self._try("blobs", services.stores.blobs.open)
        await self._keep_within_bounds()
        await self._recover_keys()
        made.calls.intake.is_open = True
        await enter(made.approvals.scheduler.running(outcomes))
        # By now the scheduler has ended interrupted approved calls.
        await made.parts.recover()

    async def drained(self) -> None:
        """Wait until no call is running, including approved calls. Call `drain` first."""
        await self._made.calls.drained()
        await self._made.approvals.requests.runs.drained()

    async def end(self) -> None:
        """Accept no more calls, and stop all objects."""
        self._made.calls.intake.is_open = False
        try:
            await self._stack.aclose()
        finally:
            with anyio.CancelScope(shield=True):
                # One turn of the event loop, so that the last calls are recorded (`record_ending`).
                await anyio.lowlevel.checkpoint()
                await self._made.parts.close()

    async def _follow_policy(self) -> None:
        """Start a task that watches the policy file until the engine is stopped."""
        group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(group.cancel_scope.cancel)
        group.start_soon(self._made.policy.follow)

    async def _keep_within_bounds(self) -> None:
        """Delete old calls, blobs, idempotency keys and approvals that need not be kept any longer.
        Do so at once, and then periodically until the engine is stopped.
        """
        config, stores = self._made.kernel.config, self._made.services.stores
        calls, blobs = stores.calls, stores.blobs
        all_kept: tuple[tuple[Prune, float, asyncio.Event | None], ...] = (
            (calls.prune, config.calls_kept_days * 86_400, calls.overdue),
            (blobs.prune, config.blobs_kept_hours * 3600, blobs.overdue),
            (self._made.services.keys.prune, KEY_LIFETIME.total_seconds(), None),
            (self._made.approvals.requests.table.prune, math.inf, None),
        )
        on_fault = partial(log_fault, self._log, "state.retention_failed")
        for prune, kept_s, overdue in all_kept:
            await self._stack.enter_async_context(
                retention(prune, self._now, on_fault, kept_s=kept_s, overdue=overdue)
            )

    async def _recover_keys(self) -> None:
        """Find the interrupted calls that have an idempotency key, and record that their answers
        are lost.

        If the record cannot be written, log this. The engine then finds out that an answer is lost
        when the call's key is used again.
        """
        recover = partial(self._made.services.keys.recover, self._now())
        lost = await self._try("idempotency_keys", recover)
        if lost:
            self._log.warning("idempotency.outcomes_unknown", calls=lost)

    async def _try(self, name: str, work: Callable[[], Awaitable[T]]) -> T | None:
        """Call `work`, which uses the store `name`, and return its result.

        If the store fails, log the failure under `name` and return None. The engine still starts,
        and answers report what is missing.
        """
        try:
            return await work()
        except StoreError as fault:
            self._log.error(f"{name}.unavailable", reason=str(fault))
            return None
