"""Tables for identities, agents, definitions, changes and the call log."""

from __future__ import annotations

from sqlalchemy import Connection

_STATEMENTS = (
    "CREATE TABLE meta (key VARCHAR NOT NULL PRIMARY KEY, value VARCHAR NOT NULL)",
    """CREATE TABLE tokens (
        id VARCHAR NOT NULL PRIMARY KEY, name VARCHAR NOT NULL, principal_id VARCHAR NOT NULL,
        secret_hash BLOB NOT NULL, scopes JSON NOT NULL, agents JSON NOT NULL,
        created_at VARCHAR NOT NULL, created_by VARCHAR NOT NULL,
        expires_at VARCHAR, revoked_at VARCHAR)""",
    """CREATE TABLE approvers (
        id VARCHAR NOT NULL PRIMARY KEY, name VARCHAR NOT NULL UNIQUE, salt BLOB NOT NULL,
        secret_hash BLOB NOT NULL, scopes JSON NOT NULL, created_at VARCHAR NOT NULL,
        created_by VARCHAR NOT NULL, removed_at VARCHAR)""",
    """CREATE TABLE agents (
        id VARCHAR NOT NULL PRIMARY KEY, description VARCHAR NOT NULL, principals JSON NOT NULL,
        is_enabled BOOLEAN NOT NULL, created_at VARCHAR NOT NULL)""",
    """CREATE TABLE bindings (
        agent_id VARCHAR NOT NULL, tool VARCHAR NOT NULL, sort_order INTEGER NOT NULL,
        fixed JSON NOT NULL, defaults JSON NOT NULL, is_enabled BOOLEAN NOT NULL,
        PRIMARY KEY (agent_id, tool))""",
    """CREATE TABLE definitions (
        name VARCHAR NOT NULL, version VARCHAR NOT NULL, document JSON NOT NULL,
        created_at VARCHAR NOT NULL, updated_at VARCHAR NOT NULL, PRIMARY KEY (name, version))""",
    """CREATE TABLE switches (
        name VARCHAR NOT NULL, version VARCHAR NOT NULL, is_active BOOLEAN NOT NULL,
        PRIMARY KEY (name, version))""",
    """CREATE TABLE changes (
        seq INTEGER NOT NULL PRIMARY KEY, at VARCHAR NOT NULL, principal_id VARCHAR NOT NULL,
        action VARCHAR NOT NULL, subject VARCHAR NOT NULL, details JSON NOT NULL)""",
    """CREATE TABLE calls (
        seq INTEGER NOT NULL PRIMARY KEY, id VARCHAR NOT NULL UNIQUE, at VARCHAR NOT NULL,
        principal_id VARCHAR NOT NULL, agent_id VARCHAR, session_id VARCHAR,
        trace_id VARCHAR NOT NULL, tool VARCHAR NOT NULL, version VARCHAR,
        code VARCHAR NOT NULL, ended_by VARCHAR, total_ms FLOAT NOT NULL, cpu_ms FLOAT,
        cost VARCHAR NOT NULL, currency VARCHAR NOT NULL, input_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL, tokens_used INTEGER NOT NULL)""",
    "CREATE INDEX calls_by_principal ON calls (principal_id, seq, at, tool, code, agent_id)",
)


def upgrade(connection: Connection) -> None:
    """Run the step."""
    for statement in _STATEMENTS:
        connection.exec_driver_sql(statement)
