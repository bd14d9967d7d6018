"""Rows of tokens, approvers, agents and bindings. Secrets are stored as hashes only. Rows of tokens
and approvers are never deleted.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from fumehood.identity.model import Agent, Binding
from fumehood.storage.schema import AGENTS, APPROVERS, BINDINGS, TOKENS

Row = dict[str, Any]


def all_tokens(connection: Connection) -> list[Row]:
    """Every token ever made, oldest first."""
    return [dict(row) for row in connection.execute(select(TOKENS)).mappings()]


def add_token(connection: Connection, row: Row) -> None:
    connection.execute(insert(TOKENS), row)


def revoke_token(connection: Connection, token_id: str, at: str) -> None:
    """Revoke a token; one that was revoked before keeps its time."""
    connection.execute(
        update(TOKENS)
        .where(TOKENS.c.id == token_id, TOKENS.c.revoked_at.is_(None))
        .values(revoked_at=at)
    )


def all_approvers(connection: Connection) -> list[Row]:
    """Every approver ever made, oldest first."""
    return [dict(row) for row in connection.execute(select(APPROVERS)).mappings()]


def add_approver(connection: Connection, row: Row) -> None:
    """Raises IntegrityError if the name is taken."""
    connection.execute(insert(APPROVERS), row)


def remove_approver(connection: Connection, approver_id: str, at: str) -> None:
    connection.execute(
        update(APPROVERS)
        .where(APPROVERS.c.id == approver_id, APPROVERS.c.removed_at.is_(None))
        .values(removed_at=at)
    )


def all_agents(connection: Connection) -> list[Agent]:
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
    """Create or replace an agent; its bindings stay."""
    known = connection.execute(select(AGENTS.c.created_at).where(AGENTS.c.id == agent.id)).scalar()
    connection.execute(delete(AGENTS).where(AGENTS.c.id == agent.id))
    row: dict[str, Any] = agent.model_dump(mode="json")
    connection.execute(insert(AGENTS), {**row, "created_at": known or at})


def delete_agent(connection: Connection, agent_id: str) -> None:
    """Delete an agent with its bindings."""
    connection.execute(delete(BINDINGS).where(BINDINGS.c.agent_id == agent_id))
    connection.execute(delete(AGENTS).where(AGENTS.c.id == agent_id))


def put_binding(connection: Connection, agent_id: str, binding: Binding) -> None:
    """Bind a tool, or replace its binding. One binding for each agent and tool name."""
    unbind(connection, agent_id, binding.tool)
    connection.execute(insert(BINDINGS), {"agent_id": agent_id, **binding.model_dump()})


def unbind(connection: Connection, agent_id: str, tool: str) -> None:
    """Remove a binding, whichever version it names."""
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
