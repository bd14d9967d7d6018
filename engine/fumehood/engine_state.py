"""The engine's state: what is read from its database at the start, and kept in it or beside it.

Host side, part of the composition root. Above it `engine_composition`, below it `gates`,
`registry`, `call` and `store`. The approvals, the sessions and the definitions of tools are kept
by those who work with them. Invariant: nothing here is open yet, and no calls are looked at;
`engine_life` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fumehood.budgets.ledger import Budgets
from fumehood.budgets.store import CounterTable
from fumehood.budgets.usage import UsageLog
from fumehood.config import Config
from fumehood.core.limits import MB
from fumehood.identity.agents import Agents
from fumehood.identity.approvers import Approvers
from fumehood.identity.tokens import Tokens
from fumehood.pipeline.claim import Keys
from fumehood.storage.blobs import BlobStore
from fumehood.storage.calls import CallLog
from fumehood.storage.database import Database
from fumehood.storage.errors import understood
from fumehood.storage.recordings import RecordingStore


@dataclass(frozen=True, slots=True)
class EngineState:
    """Who may do what, and what became of it."""

    agents: Agents
    tokens: Tokens
    approvers: Approvers
    calls: CallLog
    usage: UsageLog
    budgets: Budgets
    blobs: BlobStore
    keys: Keys
    spools: RecordingStore


def read_state(
    config: Config, database: Database, directory: Path | None, now: Callable[[], datetime]
) -> EngineState:
    """The state in `database`, with files in `directory`: None where the engine keeps none.

    Raises:
        DamagedState: the database holds what no engine wrote there.
    """
    with understood("agents"):
        agents = Agents(database)
    with understood("tokens"):
        tokens = Tokens(database)
    with understood("approvers"):
        approvers = Approvers(database)
    with understood("counters of budgets"):
        budgets = Budgets(config.budget_rules, CounterTable(database), now)
    return EngineState(
        agents=agents,
        tokens=tokens,
        approvers=approvers,
        calls=CallLog(database, kept_days=config.calls_kept_days, kept=config.calls_kept),
        usage=UsageLog(database),
        budgets=budgets,
        blobs=BlobStore(
            database,
            directory,
            max_bytes=config.blobs_kept_mb * MB,
            lifetime_s=max(1, int(config.blobs_kept_hours * 3600)),
            now=now,
        ),
        keys=Keys(database),
        spools=RecordingStore(directory, max_bytes=config.streams_mb * MB),
    )
