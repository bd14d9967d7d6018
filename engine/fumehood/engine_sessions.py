"""The engine's sessions: made from what the state still knows of them, with who may make one.

Host side, part of the composition root. Above it `engine_composition`, below it `gates`, `store`
and `sandbox`. Invariant: a session is made by nobody who could not make its calls, and by none
while the engine drains.
"""

from __future__ import annotations

from collections.abc import Callable

from fumehood.config import Config
from fumehood.core.errors import ShuttingDown
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.identity.agents import Agents
from fumehood.identity.principals import require_agent, require_caller
from fumehood.observe.clock import Clock
from fumehood.sandbox.sessions import SessionClock, SessionKeeper
from fumehood.sandbox.wall import Wall
from fumehood.storage.database import Database
from fumehood.storage.errors import understood
from fumehood.storage.sessions import SessionTable


def make_sessions(
    config: Config,
    database: Database,
    wall: Wall,
    agents: Agents,
    clock: Clock,
    *,
    is_draining: Callable[[], bool],
    on_event: Callable[[str, JsonObject], None],
) -> SessionKeeper:
    """The keeper of sessions behind `wall`.

    Raises:
        DamagedState: the rows of sessions cannot be understood.
    """

    def check_maker(principal: Principal, agent_id: str | None) -> None:
        """Who may make a session, and for which agent: whoever may make such calls."""
        require_caller(principal)
        if agent_id is not None:
            require_agent(principal, agent_id, agents.find(agent_id))
        if is_draining():
            raise ShuttingDown(
                "The engine is stopping. Repeat the call when it is back.", retry_after_ms=2000
            )

    rows = SessionTable(database)
    with understood("sessions"):
        kept = rows.all_now()
    return SessionKeeper(
        wall,
        rows,
        config.session_rules,
        SessionClock(clock.now, clock.monotonic),
        check_maker,
        kept=kept,
        on_event=on_event,
    )
