"""The tables and their migrations. Times are UTC, ISO 8601 with microseconds, unless noted.

Host side, used by the packages that store rows. JSON columns hold validated values. A new database
gets the declared schema; an older one gets the migrations in `STEPS` that it lacks, in one
transaction, which also stores the new version. A step never changes after its release.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
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

MAX_INTEGER = 2**63 - 1
"""SQLite's largest integer. Larger counts, which tools may report, are stored as this number."""

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
    # The columns after `seq` let a list check its filters without reading the rows.
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
"""One row for each blob. `id` is also the name of its file; `expires_at` is in whole Unix seconds.
A blob with a `session_id` is removed when that session ends."""

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
"""One row for each session. Its number of calls and last use may be a few seconds old."""

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
the call's envelope as JSON. Another call with the same `repeat_key` is treated as a repeat of this
call; it is null once the caller has received the answer.
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
"""One row for each decision of an approver, in order. Rows never change."""

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
"""Rules that approvers created with a decision, to apply to later calls."""

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
"""One row for each idempotency key. Its state is `running`, `waiting` (for an approval), `done`
(with the answer) or `unknown` (whether the call took effect)."""

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
"""One row for each budget or rate limit (`name`), subject (`agent=a;tool=b`), period and
unit. `settled` is the amount used and `reserved` the amount reserved ahead, which counts as used
after a crash; money is in millionths. For a rate limit, `reserved` is when its whole
burst is available again, in Unix nanoseconds. The row is deleted at `until`."""

AUDIT = Table(
    "audit",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("key_id", String, nullable=False),
    Column("body", String, nullable=False),
    Column("mac", LargeBinary, nullable=False),
)
"""The audit chain. `body` is the record as JSON; `mac` authenticates it and the previous row with a
key that is not in the database."""

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
"""Webhook messages and the state of their delivery. A row is written in the transaction of the
event that it reports: an approval, named by its id, or an event stored in `document`."""


# -- migrations ----------------------------------------------------------------------------

Step = Callable[[Connection], None]

FIRST_VERSION = 13
"""The oldest schema that can be opened. Earlier ones were never released."""

STEPS: tuple[Step, ...] = ()
"""The migrations from `FIRST_VERSION` on, in order."""

VERSION = FIRST_VERSION + len(STEPS)
"""The version of the schema declared above."""


def create_schema(connection: Connection) -> None:
    """Create the tables of a new database."""
    METADATA.create_all(connection)
    connection.exec_driver_sql(  # for programs that read the database directly
        """CREATE VIEW rate_limits AS SELECT seq, name AS "limit", subject, reserved AS free_at
            FROM counters WHERE period = 'rate'"""
    )
