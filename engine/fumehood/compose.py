"""The composition: what an engine is made of, and in which order.

Host side, the top of the composition root: with its sisters `engine_…` the only place that names
concrete classes. Above it `engine_life`, which starts what is made here, and `engine`, which shows
it. Invariants: each part is made from parts above it in `compose`; nothing runs yet, and no call
is taken. What is wrong with the tools, the state or the policy comes out here, at the first fault.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fumehood.approvals.channels.base import ApprovalChannel
from fumehood.approvals.channels.webhook import WebhookChannel
from fumehood.approvals.requests import ApprovalRequests
from fumehood.config import Config, config_file, load_config
from fumehood.core.usage import EstimatingCounter, TokenCounter
from fumehood.engine_answers import EngineAnswers
from fumehood.engine_approvals import (
    EngineApprovals,
    make_approvals,
    make_channels,
    make_requests,
)
from fumehood.engine_audit import EngineAudit
from fumehood.engine_calls import EngineCalls, Intake
from fumehood.engine_directory import EngineDirectory
from fumehood.engine_policy import EnginePolicy
from fumehood.engine_records import EngineRecords
from fumehood.engine_sessions import make_sessions
from fumehood.engine_state import EngineState, read_state
from fumehood.engine_walls import EngineWalls, logged
from fumehood.observe.clock import Clock, IdSource, SystemClock
from fumehood.observe.log import Logger, quiet_logger
from fumehood.pipeline.services import PipelineServices
from fumehood.protocol.cursors import Cursors
from fumehood.registry.discover import LoadFault, discover
from fumehood.registry.index import ToolIndex
from fumehood.registry.loading import Tool, import_paths, register_all
from fumehood.registry.registrations import Registrations
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.sandbox.wall import Wall
from fumehood.storage.database import Database, open_database
from fumehood.storage.errors import understood

CURSOR_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Basis:
    """What the parts are made with, all of it passed in."""

    config: Config
    log: Logger
    clock: Clock
    counter: TokenCounter
    ids: IdSource


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts of one engine. The database ends with it where `owns_database`."""

    basis: Basis
    registry: ToolIndex
    load_faults: list[LoadFault]
    owns_database: bool
    database: Database
    audit: EngineAudit
    registrations: Registrations
    directory: EngineDirectory | None
    cursors: Cursors
    walls: EngineWalls
    state: EngineState
    intake: Intake
    sessions: SessionKeeper
    approvals: EngineApprovals
    policy: EnginePolicy
    calls: EngineCalls
    records: EngineRecords
    answers: EngineAnswers


def make_basis(
    config: Config | None, counter: TokenCounter | None, log: Logger | None, clock: Clock | None
) -> Basis:
    """Of each that is None, the usual one: the configuration of the environment, and no log.

    Raises:
        ConfigError: that configuration is wrong.
    """
    return Basis(
        config=config if config is not None else load_config(),
        log=log if log is not None else quiet_logger(),
        clock=clock if clock is not None else SystemClock(),
        counter=counter if counter is not None else EstimatingCounter(),
        ids=IdSource(),
    )


def compose(
    basis: Basis,
    tools: Iterable[Tool],
    given: Database | None,
    *,
    interpreter: Wall | None,
    jail: Wall | None,
    container: Wall | None,
) -> Composition:
    """Make an engine's parts; of a database or a wall that is None, the engine's own.

    Raises:
        InvalidDefinition: a tool of `tools` is wrong.
        DamagedState: the database holds what no engine wrote there.
        PolicyError: the policy's file cannot be used.
        ConfigError: the webhook's secret cannot be used.
    """
    config, log, clock, ids = basis.config, basis.log, basis.clock, basis.ids
    registry, load_faults = _find_tools(basis, tools)
    database = given if given is not None else open_database(None)
    files = database.path.parent if database.path is not None else None
    audit = EngineAudit(database, config.audit, log, clock.now)
    registrations = _read_registrations(registry, database, log)
    directory = _read_directory(config.tools_directory, registry, registrations, log)
    cursors = Cursors(secrets.token_bytes(CURSOR_KEY_BYTES))
    on_event = logged(log)
    walls = EngineWalls(
        config,
        import_paths(registry),
        state=files,
        on_event=on_event,
        interpreter=interpreter,
        jail=jail,
        container=container,
    )
    state = read_state(config, database, files, clock.now)
    for name in state.budgets.unmatched({tool.definition.name for tool in registry}):
        log.warning("budget.covers_no_tool", budget=name)
    intake = Intake()
    sessions = make_sessions(
        config,
        database,
        walls.container,
        state.agents,
        clock,
        is_draining=lambda: intake.is_draining,
        on_event=on_event,
    )
    policy = EnginePolicy(
        config.policy_file, config.environment, registry, state.agents, database, log, clock.now
    )
    channels = make_channels(config, database, clock, log)
    for channel in channels:
        if isinstance(channel, WebhookChannel):  # it reports the anchors, too
            audit.connect(channel.wake)
    requests = _make_requests(basis, database, state, channels, intake)
    rooms = PipelineServices(
        registry=registry,
        agents=state.agents,
        walls=walls.by_name,
        clock=clock,
        log=log,
        counter=basis.counter,
        prices=config.resource_prices,
        allow_debug=config.allow_debug,
        is_draining=intake.takes_none,
        calls=state.calls,
        blobs=state.blobs,
        cursors=cursors,
        sessions=sessions,
        policy=policy.gate,
        keys=state.keys,
        budgets=state.budgets,
        approvals=requests,
    )
    calls = EngineCalls(
        intake, rooms, ids, clock, state.spools, output_bytes=config.container.output_kb * 1024
    )
    return Composition(
        basis=basis,
        registry=registry,
        load_faults=load_faults,
        owns_database=given is None,
        database=database,
        audit=audit,
        registrations=registrations,
        directory=directory,
        cursors=cursors,
        walls=walls,
        state=state,
        intake=intake,
        sessions=sessions,
        approvals=make_approvals(channels, rooms),
        policy=policy,
        calls=calls,
        records=EngineRecords(state.calls, state.usage, state.budgets),
        answers=EngineAnswers(clock, ids, config.prices.currency),
    )


def _find_tools(basis: Basis, given: Iterable[Tool]) -> tuple[ToolIndex, list[LoadFault]]:
    """The tools that are installed and may be used, those that are given, and what is wrong."""
    config, registry = basis.config, ToolIndex()
    private = (Path.home(), config.state_directory, config_file().parent)
    faults = discover(registry, config.host_tools, private=private)
    for fault in faults:
        basis.log.error("tools.left_out", entry_point=fault.entry_point, reason=fault.reason)
    register_all(registry, given, private)
    return registry, faults


def _read_registrations(registry: ToolIndex, database: Database, log: Logger) -> Registrations:
    """Those of an engine before this one, back in the registry."""
    with understood("definitions of tools"):
        registrations = Registrations(registry, database)
    for left_out in registrations.load_faults:
        log.error("tools.left_out", registered=True, reason=left_out.message)
    return registrations


def _read_directory(
    path: Path | None, registry: ToolIndex, registrations: Registrations, log: Logger
) -> EngineDirectory | None:
    """The directory of definitions, where one is configured."""
    return EngineDirectory(path, registry, registrations, log) if path is not None else None


def _make_requests(
    basis: Basis,
    database: Database,
    state: EngineState,
    channels: tuple[ApprovalChannel, ...],
    intake: Intake,
) -> ApprovalRequests:
    with understood("approvals"):
        return make_requests(
            basis.config,
            database,
            channels,
            approvers=state.approvers,
            tokens=state.tokens,
            agents=state.agents,
            is_draining=intake.takes_none,
            clock=basis.clock,
            ids=basis.ids,
            log=basis.log,
        )
