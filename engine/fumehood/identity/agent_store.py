"""Rows of agents and their bindings."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, delete, insert, select

from fumehood.identity.agent import Agent, Binding
from fumehood.storage.schema import AGENTS, BINDINGS


def all_agents(connection: Connection) -> list[Agent]:
    """Every agent."""
    rows = connection.execute(select(AGENTS)).mappings()
    return [
        Agent(
            id=row["id"],
            description=row["description"],
            principals=tuple(row["principals"]),
            is_enabled=row["is_enabled"],
        )
        for row in rows
    ]


def all_bindings(connection: Connection) -> list[tuple[str, Binding]]:
    """Every binding with its agent's id."""
    rows = connection.execute(select(BINDINGS)).mappings()
    return [
        (
            row["agent_id"],
            Binding(
                tool=row["tool"],
                sort_order=row["sort_order"],
                fixed=row["fixed"],
                defaults=row["defaults"],
                is_enabled=row["is_enabled"],
            ),
        )
        for row in rows
    ]


def put_agent(connection: Connection, agent: Agent, at: str) -> None:
    """Make an agent, or change it; its bindings stay."""
    known = connection.execute(select(AGENTS.c.created_at).where(AGENTS.c.id == agent.id)).scalar()
    connection.execute(delete(AGENTS).where(AGENTS.c.id == agent.id))
    row: dict[str, Any] = agent.model_dump(mode="json")
    connection.execute(insert(AGENTS), {**row, "created_at": known or at})


def delete_agent(connection: Connection, agent_id: str) -> None:
    """Remove an agent with its bindings."""
    connection.execute(delete(BINDINGS).where(BINDINGS.c.agent_id == agent_id))
    connection.execute(delete(AGENTS).where(AGENTS.c.id == agent_id))


def put_binding(connection: Connection, agent_id: str, binding: Binding) -> None:
    """Bind a tool, or change its binding. One binding a tool name and agent."""
    unbind(connection, agent_id, binding.tool)
    connection.execute(insert(BINDINGS), {"agent_id": agent_id, **binding.model_dump()})


def unbind(connection: Connection, agent_id: str, tool: str) -> None:
    """Take a tool from an agent, whichever version is bound."""
    name = tool.partition("@")[0]
    bound = connection.execute(
        select(BINDINGS.c.tool).where(BINDINGS.c.agent_id == agent_id)
    ).scalars()
    for reference in list(bound):
        if reference.partition("@")[0] == name:
            connection.execute(
                delete(BINDINGS).where(
                    BINDINGS.c.agent_id == agent_id, BINDINGS.c.tool == reference
                )
            )
