"""Principals, tokens and agents shared by many tests."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from fumehood.core.identity import Principal, Scope
from fumehood.identity.agents import Agents
from fumehood.identity.model import Agent, Binding
from fumehood.identity.tokens import Token, Tokens

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ADMIN = Principal("approver:owner", frozenset({Scope.ADMIN, Scope.APPROVE}))


async def new_token(tokens: Tokens, *scopes: Scope, **fields: object) -> tuple[Token, str]:
    """Create a token."""
    given = {
        "name": "ci", "principal_id": "token:ci", "scopes": scopes or (Scope.CALL,),
        "agents": (), "expires_at": None, "by": ADMIN, "now": NOW,
    }  # fmt: skip
    return await tokens.new(**{**given, **fields})  # type: ignore[arg-type]


async def make_agent(agents: Agents, agent_id: str, *principals: str, **fields: object) -> Agent:
    """An agent that these principals may speak for."""
    agent = Agent(id=agent_id, principals=principals, **fields)  # type: ignore[arg-type]
    await agents.create(agent, by=ADMIN, now=NOW)
    return agent


async def bind(agents: Agents, agent_id: str, tools: Iterable[str] = (), **fields: object) -> None:
    """Give an agent tools, in this order."""
    for number, tool in enumerate(tools):
        binding = Binding(tool=tool, **{"sort_order": number, **fields})  # type: ignore[arg-type]
        await agents.bind(agent_id, binding, by=ADMIN, now=NOW)
