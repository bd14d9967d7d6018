"""The tables of approvals, idempotency keys, budgets, the audit chain and the webhook."""

from __future__ import annotations

from sqlalchemy import Connection

_STATEMENTS = (
    """CREATE TABLE approvals ( seq INTEGER NOT NULL, id VARCHAR NOT NULL, version INTEGER NOT
    NULL, state VARCHAR NOT NULL, call_id VARCHAR NOT NULL, principal_id VARCHAR NOT NULL,
    agent_id VARCHAR, session_id VARCHAR, tool VARCHAR NOT NULL, action_digest VARCHAR NOT
    NULL, idempotency_key VARCHAR, created_at VARCHAR NOT NULL, expires_at VARCHAR NOT NULL,
    warned_at VARCHAR, decided_at VARCHAR, started_at VARCHAR, ended_at VARCHAR, code VARCHAR,
    document JSON NOT NULL, answer VARCHAR, PRIMARY KEY (seq), UNIQUE (id) )""",
    """CREATE INDEX approvals_by_call ON approvals (call_id)""",
    """CREATE INDEX approvals_by_digest ON approvals (action_digest, state)""",
    """CREATE INDEX approvals_by_principal ON approvals (principal_id, seq)""",
    """CREATE INDEX approvals_by_state ON approvals (state, seq)""",
    """CREATE TABLE decisions ( seq INTEGER NOT NULL, approval_id VARCHAR NOT NULL, at VARCHAR
    NOT NULL, approver VARCHAR NOT NULL, channel VARCHAR NOT NULL, decision VARCHAR NOT NULL,
    action_digest VARCHAR NOT NULL, reason VARCHAR, edited BOOLEAN NOT NULL, is_self_approval
    BOOLEAN NOT NULL, PRIMARY KEY (seq) )""",
    """CREATE INDEX decisions_by_approval ON decisions (approval_id, seq)""",
    """CREATE TABLE remembered ( id VARCHAR NOT NULL, tool VARCHAR NOT NULL, principal_id
    VARCHAR NOT NULL, agent_id VARCHAR, session_id VARCHAR, arguments JSON NOT NULL, rule
    VARCHAR NOT NULL, definition VARCHAR NOT NULL, approval_id VARCHAR NOT NULL, created_by
    VARCHAR NOT NULL, created_at VARCHAR NOT NULL, expires_at VARCHAR, uses_left INTEGER,
    used INTEGER NOT NULL, removed_at VARCHAR, PRIMARY KEY (id) )""",
    """CREATE TABLE idempotency ( principal_id VARCHAR NOT NULL, "key" VARCHAR NOT NULL,
    fingerprint VARCHAR NOT NULL, call_id VARCHAR NOT NULL, state VARCHAR NOT NULL, may_repeat
    BOOLEAN NOT NULL, approval_id VARCHAR, created_at VARCHAR NOT NULL, expires_at VARCHAR NOT
    NULL, answer VARCHAR, PRIMARY KEY (principal_id, "key") )""",
    """CREATE INDEX idempotency_by_end ON idempotency (expires_at)""",
    """CREATE TABLE counters ( budget VARCHAR NOT NULL, subject VARCHAR NOT NULL, period VARCHAR
    NOT NULL, unit VARCHAR NOT NULL, settled VARCHAR NOT NULL, reserved VARCHAR NOT NULL,
    updated_at VARCHAR NOT NULL, PRIMARY KEY (budget, subject, period, unit) )""",
    """CREATE TABLE audit ( seq INTEGER NOT NULL, key_id VARCHAR NOT NULL, body VARCHAR NOT NULL,
    mac BLOB NOT NULL, PRIMARY KEY (seq) )""",
    """CREATE TABLE deliveries ( seq INTEGER NOT NULL, approval_id VARCHAR NOT NULL, event
    VARCHAR NOT NULL, created_at VARCHAR NOT NULL, attempts INTEGER NOT NULL, delivered_at
    VARCHAR, given_up_at VARCHAR, PRIMARY KEY (seq) )""",
    """CREATE INDEX deliveries_by_state ON deliveries (delivered_at, given_up_at)""",
)


def upgrade(connection: Connection) -> None:
    """Run the step."""
    for statement in _STATEMENTS:
        connection.exec_driver_sql(statement)
