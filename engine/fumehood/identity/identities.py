"""The identities that one engine knows: agents, tokens and approvers.

Host side, created by `compose`. Invariant: authority is looked up each time it is used, so the
revocation of a token, or of the right to act for an agent, takes effect immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from fumehood.core.identity import Principal
from fumehood.identity.agents import Agents
from fumehood.identity.approvers import Approvers
from fumehood.identity.principals import require_agent, require_caller
from fumehood.identity.tokens import Tokens
from fumehood.storage.database import Database
from fumehood.storage.errors import understood


@dataclass(frozen=True, slots=True)
class Identities:
    """All agents, tokens and approvers that are stored in one database."""

    agents: Agents
    tokens: Tokens
    approvers: Approvers

    def present(
        self, principal_id: str, token_id: str | None, now: datetime, *, is_program: bool
    ) -> Principal | None:
        """Return the principal `principal_id` with the authority that it has at the time `now`. If
        it has a token, `token_id` is the token's id. Return None if this token is no longer valid.
        `is_program` is True for a program that embeds the engine.
        """
        agents = self.agents.spoken_for_by(principal_id)
        return self.tokens.present_authority(
            principal_id, token_id, agents, now, is_program=is_program
        )

    def presets_of(self, principal: Principal, agent_id: str | None) -> Sequence[str]:
        """Return the names of the presets that sessions of the agent `agent_id` may have. An empty
        result means that all presets are allowed. The result is also empty if `agent_id` is None.

        Raises:
            PermissionDenied: the principal may not call tools.
            ResourceNotFound: there is no such agent, or the principal may not act for it.
        """
        require_caller(principal)
        if agent_id is None:
            return ()
        agent = self.agents.find(agent_id)
        require_agent(principal, agent_id, agent)
        return agent.presets if agent is not None else ()


def read_identities(database: Database) -> Identities:
    """Read all identities from the database. Raises DamagedState if the database has invalid
    rows.
    """
    with understood("agents"):
        agents = Agents(database)
    with understood("tokens"):
        tokens = Tokens(database)
    with understood("approvers"):
        approvers = Approvers(database)
    return Identities(agents, tokens, approvers)
