"""The tables and their migrations. Times are in UTC, in ISO 8601 with microseconds, unless noted.

Host side, used by the packages that store rows. JSON columns contain validated values. The
migrations in `STEPS` lead from an empty SQLite file to the newest schema. A released step never
changes. All steps that a database lacks run in one transaction, which also stores the new version.
A PostgreSQL database is created with the schema that is the newest at that time, so only later
steps run there.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Decimal

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.exc import DontWrapMixin
from sqlalchemy.types import TypeEngine

from fumehood.core.errors import InvalidParams

METADATA = MetaData()


class UnstorableText(InvalidParams, DontWrapMixin):
    """A text contains a NUL character, which PostgreSQL cannot store.

    Such a text is also refused if the database is SQLite, so that the state can be copied to
    PostgreSQL. Arguments and results of calls can contain NUL, because JSON escapes it.
    """

    def __init__(self) -> None:
        super().__init__("A NUL character cannot be stored here. Send the text without it.")


def storable(value: str | None) -> str | None:
    """Return the value for a text column unchanged. Raises UnstorableText if the value contains a
    NUL character.
    """
    if value is not None and "\0" in value:
        raise UnstorableText
    return value


class _Text(TypeDecorator[str]):
    """A text column without NUL characters. Its values are compared byte by byte. SQLite does so by
    default; for other databases, the column uses the collation C.
    """

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[str]:
        return String(collation=None if dialect.name == "sqlite" else "C")

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return storable(value)


_TEXT = _Text()

_WHOLE = BigInteger().with_variant(Integer(), "sqlite")
"""Column type for 64-bit integers. In SQLite, every integer column has 64 bits."""

MAX_INTEGER = 2**63 - 1
"""The largest integer that the database can store. If a tool reports a larger count, this number is
stored instead."""

META = Table(
    "meta",
    METADATA,
    Column("key", _TEXT, primary_key=True),
    Column("value", _TEXT, nullable=False),
)

TOKENS = Table(
    "tokens",
    METADATA,
    Column("id", _TEXT, primary_key=True),
    Column("name", _TEXT, nullable=False),
    Column("principal_id", _TEXT, nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("agents", JSON, nullable=False),
    Column("created_at", _TEXT, nullable=False),
    Column("created_by", _TEXT, nullable=False),
    Column("expires_at", _TEXT),
    Column("revoked_at", _TEXT),
)

APPROVERS = Table(
    "approvers",
    METADATA,
    Column("id", _TEXT, primary_key=True),
    Column("name", _TEXT, nullable=False, unique=True),
    Column("salt", LargeBinary, nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("created_at", _TEXT, nullable=False),
    Column("created_by", _TEXT, nullable=False),
    Column("removed_at", _TEXT),
)

AGENTS = Table(
    "agents",
    METADATA,
    Column("id", _TEXT, primary_key=True),
    Column("description", _TEXT, nullable=False),
    Column("principals", JSON, nullable=False),
    Column("is_enabled", Boolean, nullable=False),
    Column("created_at", _TEXT, nullable=False),
    Column("network", JSON(none_as_null=True)),
    Column("presets", JSON(none_as_null=True)),
)

BINDINGS = Table(
    "bindings",
    METADATA,
    Column("agent_id", _TEXT, primary_key=True),
    Column("tool", _TEXT, primary_key=True),
    Column("sort_order", _WHOLE, nullable=False),
    Column("fixed", JSON, nullable=False),
    Column("defaults", JSON, nullable=False),
    Column("is_enabled", Boolean, nullable=False),
)

DEFINITIONS = Table(
    "definitions",
    METADATA,
    Column("name", _TEXT, primary_key=True),
    Column("version", _TEXT, primary_key=True),
    Column("document", JSON, nullable=False),
    Column("created_at", _TEXT, nullable=False),
    Column("updated_at", _TEXT, nullable=False),
)

SWITCHES = Table(
    "switches",
    METADATA,
    Column("name", _TEXT, primary_key=True),
    Column("version", _TEXT, primary_key=True),
    Column("is_active", Boolean, nullable=False),
)

CHANGES = Table(
    "changes",
    METADATA,
    Column("seq", _WHOLE, primary_key=True),
    Column("at", _TEXT, nullable=False),
    Column("principal_id", _TEXT, nullable=False),
    Column("action", _TEXT, nullable=False),
    Column("subject", _TEXT, nullable=False),
    Column("details", JSON, nullable=False),
)

CALLS = Table(
    "calls",
    METADATA,
    Column("seq", _WHOLE, primary_key=True),
    Column("id", _TEXT, nullable=False, unique=True),
    Column("at", _TEXT, nullable=False),
    Column("principal_id", _TEXT, nullable=False),
    Column("agent_id", _TEXT),
    Column("session_id", _TEXT),
    Column("trace_id", _TEXT, nullable=False),
    Column("tool", _TEXT, nullable=False),
    Column("version", _TEXT),
    Column("code", _TEXT, nullable=False),
    Column("ended_by", _TEXT),
    Column("total_ms", Float, nullable=False),
    Column("cpu_ms", Float),
    Column("cost", _TEXT, nullable=False),
    Column("currency", _TEXT, nullable=False),
    Column("input_tokens", _WHOLE, nullable=False),
    Column("output_tokens", _WHOLE, nullable=False),
    Column("tokens_used", _WHOLE, nullable=False),
    Column("cache_hit", Boolean),
    Column("parent_id", _TEXT),
    Column("stages", JSON(none_as_null=True)),
    Column("audit_seq", _WHOLE),
    Column("network", JSON(none_as_null=True)),
    # The columns after `seq` let a list check its filters without reading the rows.
    Index("calls_by_principal", "principal_id", "seq", "at", "tool", "code", "agent_id"),
    Index("calls_by_trace", "trace_id"),
    Index("calls_by_parent", "parent_id", sqlite_where=text("parent_id IS NOT NULL")),
)
"""One row for each call, ordered by `seq`. `at` is the timestamp of the call's envelope, with
milliseconds."""

RECORDS = Table(
    "records",
    METADATA,
    Column("seq", _WHOLE, primary_key=True, autoincrement=False),
    Column("size", _WHOLE, nullable=False),
    Column("document", LargeBinary, nullable=False),
    Column("words", _TEXT, nullable=False),
)
"""One row for each recorded call, with the `seq` of the call's row. `document` contains two lines
of JSON, and is compressed if it is long. `words` is indexed for full-text search. The index has the
name `record_words`: in SQLite it is a table, in PostgreSQL an index."""

WORDS_INDEX = "CREATE INDEX record_words ON records USING gin (to_tsvector('simple', words))"
"""SQL statement that creates PostgreSQL's full-text index. For SQLite, a migration creates the
index."""


BLOBS = Table(
    "blobs",
    METADATA,
    Column("id", _TEXT, primary_key=True),
    Column("principal_id", _TEXT, nullable=False),
    Column("filename", _TEXT, nullable=False),
    Column("content_type", _TEXT, nullable=False),
    Column("size", _WHOLE, nullable=False),
    Column("created_at", _TEXT, nullable=False),
    Column("expires_at", _WHOLE, nullable=False),
    Column("session_id", _TEXT),
    Index("blobs_by_end", "expires_at"),
)
"""One row for each blob. `id` is also the name of the blob's file. `expires_at` is in whole Unix
seconds. A blob with a `session_id` is removed when the session ends."""

SESSIONS = Table(
    "sessions",
    METADATA,
    Column("id", _TEXT, primary_key=True),
    Column("principal_id", _TEXT, nullable=False),
    Column("agent_id", _TEXT),
    Column("state", _TEXT, nullable=False),
    Column("why", _TEXT),
    Column("image", _TEXT, nullable=False),
    Column("languages", JSON, nullable=False),
    Column("memory_mb", _WHOLE, nullable=False),
    Column("created_at", _TEXT, nullable=False),
    Column("last_used_at", _TEXT, nullable=False),
    Column("expires_at", _TEXT, nullable=False),
    Column("finished_at", _TEXT),
    Column("calls", _WHOLE, nullable=False),
    Column("home", JSON(none_as_null=True)),
    Column("name", _TEXT),
    Column("disk_mb", _WHOLE),
    Column("packages", JSON(none_as_null=True)),
    Column("snapshots", JSON(none_as_null=True)),
    Column("cpus", Float),
    Column("network", JSON(none_as_null=True)),
    Column("env", JSON(none_as_null=True)),
    Column("preset", _TEXT),
    Column("least_grade", _TEXT),
)
"""One row for each session. The number of calls and the time of last use may be a few seconds out
of date."""

APPROVALS = Table(
    "approvals",
    METADATA,
    Column("seq", _WHOLE, primary_key=True),
    Column("id", _TEXT, nullable=False, unique=True),
    Column("version", _WHOLE, nullable=False),
    Column("state", _TEXT, nullable=False),
    Column("call_id", _TEXT, nullable=False),
    Column("principal_id", _TEXT, nullable=False),
    Column("agent_id", _TEXT),
    Column("session_id", _TEXT),
    Column("tool", _TEXT, nullable=False),
    Column("action_digest", _TEXT, nullable=False),
    Column("idempotency_key", _TEXT),
    Column("created_at", _TEXT, nullable=False),
    Column("expires_at", _TEXT, nullable=False),
    Column("warned_at", _TEXT),
    Column("decided_at", _TEXT),
    Column("started_at", _TEXT),
    Column("ended_at", _TEXT),
    Column("code", _TEXT),
    Column("document", JSON, nullable=False),
    Column("answer", _TEXT),
    Column("repeat_key", _TEXT),
    Index("approvals_by_state", "state", "seq"),
    Index("approvals_by_principal", "principal_id", "seq"),
    Index("approvals_by_call", "call_id"),
    Index("approvals_by_digest", "action_digest", "state"),
    Index("approvals_by_repeat_key", "repeat_key", unique=True),
)
"""One row for each approval, ordered by `seq`. `document` contains the fields that no query uses:
the stored request, the effective arguments, the binding, the preview and the deciding rules.
`answer` is the call's envelope as JSON. A later call with the same `repeat_key` counts as a repeat
of this call. `repeat_key` becomes null once the caller has received the answer."""

DECISIONS = Table(
    "decisions",
    METADATA,
    Column("seq", _WHOLE, primary_key=True),
    Column("approval_id", _TEXT, nullable=False),
    Column("at", _TEXT, nullable=False),
    Column("approver", _TEXT, nullable=False),
    Column("channel", _TEXT, nullable=False),
    Column("decision", _TEXT, nullable=False),
    Column("action_digest", _TEXT, nullable=False),
    Column("reason", _TEXT),
    Column("edited", Boolean, nullable=False),
    Column("is_self_approval", Boolean, nullable=False),
    Index("decisions_by_approval", "approval_id", "seq"),
)
"""One row for each decision of an approver, in the order of the decisions. Rows never change."""

REMEMBERED = Table(
    "remembered",
    METADATA,
    Column("id", _TEXT, primary_key=True),
    Column("tool", _TEXT, nullable=False),
    Column("principal_id", _TEXT, nullable=False),
    Column("agent_id", _TEXT),
    Column("session_id", _TEXT),
    Column("arguments", JSON, nullable=False),
    Column("rule", _TEXT, nullable=False),
    Column("definition", _TEXT, nullable=False),
    Column("approval_id", _TEXT, nullable=False),
    Column("created_by", _TEXT, nullable=False),
    Column("created_at", _TEXT, nullable=False),
    Column("expires_at", _TEXT),
    Column("uses_left", _WHOLE),
    Column("used", _WHOLE, nullable=False),
    Column("removed_at", _TEXT),
    Column("any_others", Boolean, nullable=False),
)
"""One row for each remembered rule. An approver creates such a rule together with a decision, and
the rule then applies to later calls."""

IDEMPOTENCY = Table(
    "idempotency",
    METADATA,
    Column("principal_id", _TEXT, primary_key=True),
    Column("key", _TEXT, primary_key=True),
    Column("fingerprint", _TEXT, nullable=False),
    Column("call_id", _TEXT, nullable=False),
    Column("state", _TEXT, nullable=False),
    Column("may_repeat", Boolean, nullable=False),
    Column("approval_id", _TEXT),
    Column("created_at", _TEXT, nullable=False),
    Column("expires_at", _TEXT, nullable=False),
    Column("answer", _TEXT),
    Index("idempotency_by_end", "expires_at"),
)
"""One row for each idempotency key. Its state is `running`, `waiting` (the call waits for an
approval), `done` (the row has the answer) or `unknown` (the call may or may not have taken effect).
"""

COUNTERS = Table(
    "counters",
    METADATA,
    Column("seq", _WHOLE, primary_key=True),
    Column("name", _TEXT, nullable=False),
    Column("subject", _TEXT, nullable=False),
    Column("period", _TEXT, nullable=False),
    Column("unit", _TEXT, nullable=False),
    Column("settled", _WHOLE, nullable=False),
    Column("reserved", _WHOLE, nullable=False),
    Column("until", _TEXT, nullable=False),
    UniqueConstraint("name", "subject", "period", "unit"),
    Index("counters_by_end", "until"),
)
"""One row for each combination of a budget or rate limit (`name`), a subject (`agent=a;tool=b`), a
period and a unit.

`settled` is the used amount. `reserved` is the amount that the engine may use without another
write. After a crash, this whole amount counts as used. Amounts of money are in millionths. For a
rate limit, `reserved` is instead the time at which the whole burst is available again, in Unix
nanoseconds. The row expires at the time `until`."""

AUDIT = Table(
    "audit",
    METADATA,
    Column("seq", _WHOLE, primary_key=True),
    Column("key_id", _TEXT, nullable=False),
    Column("body", _TEXT, nullable=False),
    Column("mac", LargeBinary, nullable=False),
)
"""The audit chain, one row for each record. `body` is the record as JSON. `mac` authenticates the
body and the previous row, with a key that is not in the database."""

DELIVERIES = Table(
    "deliveries",
    METADATA,
    Column("seq", _WHOLE, primary_key=True),
    Column("approval_id", _TEXT, nullable=False),
    Column("event", _TEXT, nullable=False),
    Column("created_at", _TEXT, nullable=False),
    Column("attempts", _WHOLE, nullable=False),
    Column("delivered_at", _TEXT),
    Column("given_up_at", _TEXT),
    Column("document", JSON(none_as_null=True)),
    Index("deliveries_by_state", "delivered_at", "given_up_at"),
)
"""One row for each webhook message, with the state of its delivery. The row is written in the
transaction of the event that the message reports. If the event concerns an approval, the row
contains the approval's id. Otherwise, `document` contains the event."""


# -- migrations ----------------------------------------------------------------------------

Step = Callable[[Connection], None]


def _sql(*statements: str) -> Step:
    def upgrade(connection: Connection) -> None:
        for statement in statements:
            connection.exec_driver_sql(statement)

    return upgrade


def _records_of_calls(connection: Connection) -> None:
    """Create the table of records and its full-text index."""
    if connection.dialect.name == "postgresql":
        table = """CREATE TABLE records (seq BIGINT NOT NULL PRIMARY KEY, size BIGINT NOT NULL,
            document BYTEA NOT NULL, words VARCHAR COLLATE "C" NOT NULL)"""
        _sql(table, WORDS_INDEX)(connection)
        return
    _sql(
        """CREATE TABLE records (seq INTEGER NOT NULL PRIMARY KEY, size INTEGER NOT NULL,
        document BLOB NOT NULL, words VARCHAR NOT NULL)""",
        "CREATE VIRTUAL TABLE record_words USING fts5(words, content=records, content_rowid=seq)",
        # A row that is not indexed yet (`calls.index_words`) must not be deleted from the index.
        """CREATE TRIGGER record_deleted AFTER DELETE ON records
        WHEN old.seq <= (SELECT max(id) FROM record_words_docsize) BEGIN
        INSERT INTO record_words(record_words, rowid, words)
        VALUES ('delete', old.seq, old.words); END""",
    )(connection)


_KEPT = timedelta(days=30)


def _one_table_of_counters(connection: Connection) -> None:
    """Move the counts of budgets and rate limits into one table of integer counters."""
    run = connection.exec_driver_sql
    budgets = run(
        "SELECT budget, subject, period, unit, settled, reserved, updated_at FROM counters"
    ).all()
    limits = run('SELECT "limit", subject, free_at FROM rate_limits').all()
    run("DROP TABLE counters")
    run("DROP TABLE rate_limits")
    run(
        """CREATE TABLE counters ( seq INTEGER NOT NULL, name VARCHAR NOT NULL,
            subject VARCHAR NOT NULL, period VARCHAR NOT NULL, unit VARCHAR NOT NULL,
            settled INTEGER NOT NULL, reserved INTEGER NOT NULL, until VARCHAR NOT NULL,
            PRIMARY KEY (seq), UNIQUE (name, subject, period, unit) )"""
    )
    run("CREATE INDEX counters_by_end ON counters (until)")
    run(  # for programs that read the database directly
        """CREATE VIEW rate_limits AS SELECT seq, name AS "limit", subject, reserved AS free_at
            FROM counters WHERE period = 'rate'"""
    )
    rows = [
        (name, subject, period, unit, _figure(unit, settled), _figure(unit, reserved),
         _until(subject, period, updated_at))
        for name, subject, period, unit, settled, reserved, updated_at in budgets
    ]  # fmt: skip
    rows += [
        (limit, subject, "rate", "free_at", 0, free_at, _stamp(free_at))
        for limit, subject, free_at in limits
    ]
    for row in rows:
        run(
            "INSERT INTO counters (name, subject, period, unit, settled, reserved, until) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            row,
        )


def _figure(unit: str, text: str) -> int:
    amount = Decimal(text).scaleb(6) if unit == "money" else Decimal(text)
    return min(int(amount.to_integral_value(ROUND_CEILING)), 2**63 - 1)


def _until(subject: str, period: str, updated_at: str) -> str:
    if period == "total" and "session=" not in subject:
        return "9999"
    return (datetime.fromisoformat(updated_at) + _KEPT).isoformat(timespec="microseconds")


def _stamp(free_at: int) -> str:
    return datetime.fromtimestamp(free_at / 1e9, UTC).isoformat(timespec="microseconds")


STEPS: tuple[Step, ...] = (
    # Tables for identities, agents, definitions, changes and the call log.
    _sql(
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
    ),
    # The table of blobs.
    _sql(
        """CREATE TABLE blobs (
        id VARCHAR NOT NULL PRIMARY KEY, principal_id VARCHAR NOT NULL, filename VARCHAR NOT NULL,
        content_type VARCHAR NOT NULL, size INTEGER NOT NULL, created_at VARCHAR NOT NULL,
        expires_at INTEGER NOT NULL)""",
        "CREATE INDEX blobs_by_end ON blobs (expires_at)",
    ),
    # The table of sessions.
    _sql(
        """CREATE TABLE sessions (
    id VARCHAR NOT NULL PRIMARY KEY, principal_id VARCHAR NOT NULL, agent_id VARCHAR,
    state VARCHAR NOT NULL, why VARCHAR, image VARCHAR NOT NULL, languages JSON NOT NULL,
    memory_mb INTEGER NOT NULL, created_at VARCHAR NOT NULL, last_used_at VARCHAR NOT NULL,
    expires_at VARCHAR NOT NULL, finished_at VARCHAR, calls INTEGER NOT NULL)""",
    ),
    # The tables of approvals, idempotency keys, budgets, the audit chain and the webhook.
    _sql(
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
        """CREATE TABLE audit ( seq INTEGER NOT NULL, key_id VARCHAR NOT NULL, body VARCHAR NOT
    NULL, mac BLOB NOT NULL, PRIMARY KEY (seq) )""",
        """CREATE TABLE deliveries ( seq INTEGER NOT NULL, approval_id VARCHAR NOT NULL, event
    VARCHAR NOT NULL, created_at VARCHAR NOT NULL, attempts INTEGER NOT NULL, delivered_at
    VARCHAR, given_up_at VARCHAR, PRIMARY KEY (seq) )""",
        """CREATE INDEX deliveries_by_state ON deliveries (delivered_at, given_up_at)""",
    ),
    # Webhook messages that are not about an approval store their own document.
    _sql(
        "ALTER TABLE deliveries ADD COLUMN document JSON",
    ),
    # The call log records which calls were answered from the result cache.
    _sql(
        "ALTER TABLE calls ADD COLUMN cache_hit BOOLEAN",
    ),
    # The table of rate limits.
    _sql(
        """CREATE TABLE rate_limits ( seq INTEGER NOT NULL, "limit" VARCHAR NOT NULL,
            subject VARCHAR NOT NULL, free_at INTEGER NOT NULL, PRIMARY KEY (seq),
            UNIQUE ("limit", subject) )""",
        "CREATE INDEX rate_limits_by_end ON rate_limits (free_at)",
    ),
    # The call log records which call's program made a call.
    _sql(
        "ALTER TABLE calls ADD COLUMN parent_id VARCHAR",
    ),
    # Approvals store the key by which repeats of their call are recognized.
    _sql(
        "ALTER TABLE approvals ADD COLUMN repeat_key VARCHAR",
        "CREATE UNIQUE INDEX approvals_by_repeat_key ON approvals (repeat_key)",
    ),
    # Blobs store their session, whose end removes them.
    _sql(
        "ALTER TABLE blobs ADD COLUMN session_id VARCHAR",
    ),
    # The call log stores the time of each stage and the audit row, and has an index by trace.
    _sql(
        "ALTER TABLE calls ADD COLUMN stages JSON",
        "ALTER TABLE calls ADD COLUMN audit_seq INTEGER",
        "CREATE INDEX calls_by_trace ON calls (trace_id)",
        "CREATE INDEX calls_by_parent ON calls (parent_id) WHERE parent_id IS NOT NULL",
    ),
    # A remembered rule stores whether it allows additional arguments; earlier ones do not.
    _sql(
        "ALTER TABLE remembered ADD COLUMN any_others BOOLEAN NOT NULL DEFAULT 0",
    ),
    _one_table_of_counters,
    # An active session stores what the next engine needs to continue it.
    _sql(
        "ALTER TABLE sessions ADD COLUMN home JSON",
    ),
    _sql(
        "ALTER TABLE sessions ADD COLUMN name VARCHAR",
        "ALTER TABLE sessions ADD COLUMN disk_mb INTEGER",
    ),
    _sql(
        "ALTER TABLE sessions ADD COLUMN packages JSON",
        "ALTER TABLE sessions ADD COLUMN snapshots JSON",
        "ALTER TABLE sessions ADD COLUMN cpus FLOAT",
    ),
    # The call log stores what a program sent through the gateway.
    _sql(
        "ALTER TABLE calls ADD COLUMN network JSON",
    ),
    # Agents and sessions store the network hosts that they request.
    _sql(
        "ALTER TABLE agents ADD COLUMN network JSON",
        "ALTER TABLE sessions ADD COLUMN network JSON",
    ),
    # Sessions have environment variables. These are their names; `home` has the values.
    _sql(
        "ALTER TABLE sessions ADD COLUMN env JSON",
    ),
    _sql(
        "ALTER TABLE sessions ADD COLUMN preset VARCHAR",
    ),
    # Agents can be bound to presets of sessions.
    _sql(
        "ALTER TABLE agents ADD COLUMN presets JSON",
    ),
    _records_of_calls,
    # A state that was anchored before it could record this needs the part that anchors it.
    _sql(
        """INSERT INTO meta (key, value) SELECT 'needs.audit', ''
        WHERE EXISTS (SELECT 1 FROM audit WHERE substr(body, 1, 24) = '{"kind":"audit.anchored"')
        AND NOT EXISTS (SELECT 1 FROM meta WHERE key = 'needs.audit')""",
    ),
    # Sessions can demand a grade of their containers.
    _sql(
        "ALTER TABLE sessions ADD COLUMN least_grade VARCHAR",
    ),
)
"""The migrations in order. The version of a schema is the number of steps that lead to it."""
