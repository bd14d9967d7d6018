"""The tables after the newest migration. Times are UTC, ISO 8601 with microseconds.

Host side, used by the packages that store rows. JSON columns hold validated values.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)

METADATA = MetaData()

META = Table(
    "meta",
    METADATA,
    Column("key", String, primary_key=True),
    Column("value", String, nullable=False),
)

TOKENS = Table(
    "tokens",
    METADATA,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("principal_id", String, nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("agents", JSON, nullable=False),
    Column("created_at", String, nullable=False),
    Column("created_by", String, nullable=False),
    Column("expires_at", String),
    Column("revoked_at", String),
)

APPROVERS = Table(
    "approvers",
    METADATA,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("salt", LargeBinary, nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("created_at", String, nullable=False),
    Column("created_by", String, nullable=False),
    Column("removed_at", String),
)

AGENTS = Table(
    "agents",
    METADATA,
    Column("id", String, primary_key=True),
    Column("description", String, nullable=False),
    Column("principals", JSON, nullable=False),
    Column("is_enabled", Boolean, nullable=False),
    Column("created_at", String, nullable=False),
)

BINDINGS = Table(
    "bindings",
    METADATA,
    Column("agent_id", String, primary_key=True),
    Column("tool", String, primary_key=True),
    Column("sort_order", Integer, nullable=False),
    Column("fixed", JSON, nullable=False),
    Column("defaults", JSON, nullable=False),
    Column("is_enabled", Boolean, nullable=False),
)

DEFINITIONS = Table(
    "definitions",
    METADATA,
    Column("name", String, primary_key=True),
    Column("version", String, primary_key=True),
    Column("document", JSON, nullable=False),
    Column("created_at", String, nullable=False),
    Column("updated_at", String, nullable=False),
)

SWITCHES = Table(
    "switches",
    METADATA,
    Column("name", String, primary_key=True),
    Column("version", String, primary_key=True),
    Column("is_active", Boolean, nullable=False),
)

CHANGES = Table(
    "changes",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("at", String, nullable=False),
    Column("principal_id", String, nullable=False),
    Column("action", String, nullable=False),
    Column("subject", String, nullable=False),
    Column("details", JSON, nullable=False),
)

CALLS = Table(
    "calls",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("at", String, nullable=False),
    Column("principal_id", String, nullable=False),
    Column("agent_id", String),
    Column("session_id", String),
    Column("trace_id", String, nullable=False),
    Column("tool", String, nullable=False),
    Column("version", String),
    Column("code", String, nullable=False),
    Column("ended_by", String),
    Column("total_ms", Float, nullable=False),
    Column("cpu_ms", Float),
    Column("cost", String, nullable=False),
    Column("currency", String, nullable=False),
    Column("input_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("tokens_used", Integer, nullable=False),
    Column("cache_hit", Boolean),
    Column("parent_id", String),
    Column("stages", JSON(none_as_null=True)),
    Column("audit_seq", Integer),
    # An index for each filter of a list: no combination reads rows in vain.
    Index("calls_by_principal", "principal_id", "seq", "at", "tool", "code", "agent_id"),
    Index("calls_by_trace", "trace_id"),
    Index("calls_by_parent", "parent_id", sqlite_where=text("parent_id IS NOT NULL")),
)
"""One row for each call, ordered by `seq`; `at` is the envelope's timestamp, in milliseconds."""

BLOBS = Table(
    "blobs",
    METADATA,
    Column("id", String, primary_key=True),
    Column("principal_id", String, nullable=False),
    Column("filename", String, nullable=False),
    Column("content_type", String, nullable=False),
    Column("size", Integer, nullable=False),
    Column("created_at", String, nullable=False),
    Column("expires_at", Integer, nullable=False),
    Column("session_id", String),
    Index("blobs_by_end", "expires_at"),
)
"""One row for each blob, whose id is its file name; `expires_at` in whole Unix seconds. One with a
`session_id` ends with that session."""

SESSIONS = Table(
    "sessions",
    METADATA,
    Column("id", String, primary_key=True),
    Column("principal_id", String, nullable=False),
    Column("agent_id", String),
    Column("state", String, nullable=False),
    Column("why", String),
    Column("image", String, nullable=False),
    Column("languages", JSON, nullable=False),
    Column("memory_mb", Integer, nullable=False),
    Column("created_at", String, nullable=False),
    Column("last_used_at", String, nullable=False),
    Column("expires_at", String, nullable=False),
    Column("finished_at", String),
    Column("calls", Integer, nullable=False),
)
"""One row for each session; its usage may be a few seconds old."""

APPROVALS = Table(
    "approvals",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("version", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("call_id", String, nullable=False),
    Column("principal_id", String, nullable=False),
    Column("agent_id", String),
    Column("session_id", String),
    Column("tool", String, nullable=False),
    Column("action_digest", String, nullable=False),
    Column("idempotency_key", String),
    Column("created_at", String, nullable=False),
    Column("expires_at", String, nullable=False),
    Column("warned_at", String),
    Column("decided_at", String),
    Column("started_at", String),
    Column("ended_at", String),
    Column("code", String),
    Column("document", JSON, nullable=False),
    Column("answer", String),
    Column("repeat_key", String),
    Index("approvals_by_state", "state", "seq"),
    Index("approvals_by_principal", "principal_id", "seq"),
    Index("approvals_by_call", "call_id"),
    Index("approvals_by_digest", "action_digest", "state"),
    Index("approvals_by_repeat_key", "repeat_key", unique=True),
)
"""One row for each approval, ordered by `seq`. `document` holds the fields that no query uses (the
stored request, the effective arguments, the binding, the preview, decisions' rules); `answer` is
the call's envelope as JSON. A call with the same `repeat_key` is this call; it is null once the
caller has the answer.
"""

DECISIONS = Table(
    "decisions",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("approval_id", String, nullable=False),
    Column("at", String, nullable=False),
    Column("approver", String, nullable=False),
    Column("channel", String, nullable=False),
    Column("decision", String, nullable=False),
    Column("action_digest", String, nullable=False),
    Column("reason", String),
    Column("edited", Boolean, nullable=False),
    Column("is_self_approval", Boolean, nullable=False),
    Index("decisions_by_approval", "approval_id", "seq"),
)
"""Every approver's decision, in order; rows never change."""

REMEMBERED = Table(
    "remembered",
    METADATA,
    Column("id", String, primary_key=True),
    Column("tool", String, nullable=False),
    Column("principal_id", String, nullable=False),
    Column("agent_id", String),
    Column("session_id", String),
    Column("arguments", JSON, nullable=False),
    Column("rule", String, nullable=False),
    Column("definition", String, nullable=False),
    Column("approval_id", String, nullable=False),
    Column("created_by", String, nullable=False),
    Column("created_at", String, nullable=False),
    Column("expires_at", String),
    Column("uses_left", Integer),
    Column("used", Integer, nullable=False),
    Column("removed_at", String),
    Column("any_others", Boolean, nullable=False),
)
"""Rules that approvals left behind."""

IDEMPOTENCY = Table(
    "idempotency",
    METADATA,
    Column("principal_id", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("fingerprint", String, nullable=False),
    Column("call_id", String, nullable=False),
    Column("state", String, nullable=False),
    Column("may_repeat", Boolean, nullable=False),
    Column("approval_id", String),
    Column("created_at", String, nullable=False),
    Column("expires_at", String, nullable=False),
    Column("answer", String),
    Index("idempotency_by_end", "expires_at"),
)
"""One row for each key: `running`, `waiting` (for an approval), `done` (with the answer),
`unknown`."""

COUNTERS = Table(
    "counters",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("name", String, nullable=False),
    Column("subject", String, nullable=False),
    Column("period", String, nullable=False),
    Column("unit", String, nullable=False),
    Column("settled", Integer, nullable=False),
    Column("reserved", Integer, nullable=False),
    Column("until", String, nullable=False),
    UniqueConstraint("name", "subject", "period", "unit"),
    Index("counters_by_end", "until"),
)
"""One row for each budget or rate limit (`name`), subject (`agent=a;tool=b`), period and unit: the
amount used, and the amount reserved ahead; after a crash the reserved amount counts. Money is in
millionths. Of a rate limit it is when its whole burst is free again, in Unix nanoseconds. The row
is deleted at `until`."""

AUDIT = Table(
    "audit",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("key_id", String, nullable=False),
    Column("body", String, nullable=False),
    Column("mac", LargeBinary, nullable=False),
)
"""The audit chain: `body` is the row as JSON; `mac` uses a key outside this file and also covers
the previous row."""

DELIVERIES = Table(
    "deliveries",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("approval_id", String, nullable=False),
    Column("event", String, nullable=False),
    Column("created_at", String, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("delivered_at", String),
    Column("given_up_at", String),
    Column("document", JSON(none_as_null=True)),
    Index("deliveries_by_state", "delivered_at", "given_up_at"),
)
"""Undelivered webhook messages; a row is written in the transaction of the event that it reports,
which is an approval (by its id) or is stored in `document`."""
