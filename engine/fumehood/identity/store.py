"""Rows of tokens and approvers. Secrets are kept as hashes only; nothing is ever deleted."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, select, update

from fumehood.storage.schema import APPROVERS, TOKENS

Row = dict[str, Any]


def all_tokens(connection: Connection) -> list[Row]:
    """Every token ever made, oldest first."""
    return [dict(row) for row in connection.execute(select(TOKENS)).mappings()]


def add_token(connection: Connection, row: Row) -> None:
    """One new token."""
    connection.execute(insert(TOKENS), row)


def revoke_token(connection: Connection, token_id: str, at: str) -> None:
    """End a token; one that has ended already keeps its first end."""
    connection.execute(
        update(TOKENS)
        .where(TOKENS.c.id == token_id, TOKENS.c.revoked_at.is_(None))
        .values(revoked_at=at)
    )


def all_approvers(connection: Connection) -> list[Row]:
    """Every approver ever made, oldest first."""
    return [dict(row) for row in connection.execute(select(APPROVERS)).mappings()]


def add_approver(connection: Connection, row: Row) -> None:
    """One new approver. Raises IntegrityError where the name is taken."""
    connection.execute(insert(APPROVERS), row)


def remove_approver(connection: Connection, approver_id: str, at: str) -> None:
    """End an approver's authority."""
    connection.execute(
        update(APPROVERS)
        .where(APPROVERS.c.id == approver_id, APPROVERS.c.removed_at.is_(None))
        .values(removed_at=at)
    )
